"""A DCS node: shared-memory arena, disk, and the server that hands out chunks."""
