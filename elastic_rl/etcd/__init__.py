"""Client of etcd v3, and the whole keyspace of a job with its records. The bottom layer: it imports no other part."""
