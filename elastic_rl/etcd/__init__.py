"""Client of etcd v3, and the whole keyspace of a job with its records. It imports settings, errors and
what a process does for itself (``runtime``), and no other package."""
