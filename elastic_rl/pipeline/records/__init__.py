"""What a run leaves behind: its log, the status, metrics and events in etcd, and a few samples for people."""
