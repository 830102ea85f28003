"""The bytes of a node's chunks: shared-memory arena, disk, and the table of what lies where."""
