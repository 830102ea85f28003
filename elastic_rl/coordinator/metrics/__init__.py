"""Prometheus metrics of a replica: its own numbers, etcd's, and those of the job."""
