"""Sequential models of what clients see, and the check of a history of concurrent operations against one. Pure."""
