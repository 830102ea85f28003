"""Leader election with a fencing token."""
