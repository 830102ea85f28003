"""Copies of committed versions in a durable store: any folder or object store that fsspec can reach."""
