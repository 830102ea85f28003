"""Logs (JSON lines), traces (OpenTelemetry) and metrics (Prometheus) of a process, and trackers of training metrics."""
