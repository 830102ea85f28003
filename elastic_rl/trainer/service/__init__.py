"""The commands of a trainer group, its HTTP service, and the client of it."""
