"""The catalog of versions in etcd: which exist, in which state, where their chunks are, and its maintenance."""
