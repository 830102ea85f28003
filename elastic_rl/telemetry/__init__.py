"""What a process says about itself: logs (JSON lines), traces (OpenTelemetry) and metrics (Prometheus). Imports nothing
of the project but this package, so that every other part may use it."""
