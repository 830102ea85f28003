"""What runs on one machine and keeps it running: processes, the local cluster, etcd, preflight checks."""
