"""What HTTP, TLS and sockets of the project have in common: clients, certificates, keys, addresses."""
