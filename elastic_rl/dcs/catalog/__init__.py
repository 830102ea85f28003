"""The catalog of versions in etcd, and its upkeep: state changes, retention, garbage collection."""
