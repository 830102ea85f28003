"""What runs inside the processes of SGLang: launch, weight loader, staging, and stand-ins on a CPU."""
