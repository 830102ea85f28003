"""Pure functions between tensors, bytes, digests and deltas."""
