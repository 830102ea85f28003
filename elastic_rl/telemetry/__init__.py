"""What a process says about itself: logs (JSON lines), traces (OpenTelemetry), metrics (Prometheus), and the metrics of
training for other programs. Imports nothing of the project but this package, so that every other part may use it."""
