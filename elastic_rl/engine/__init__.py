"""SGLang backend: one server's process and weights, its life as a record in etcd, and the router in front of a pool."""
