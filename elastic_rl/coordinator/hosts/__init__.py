"""Hosts of the cluster: which of them are there, and which may be given work."""
