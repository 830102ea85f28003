"""Client of etcd v3, and the whole keyspace of a job with its records. The bottom layer: of the other
parts it imports settings, telemetry and what a process does for itself alone."""
