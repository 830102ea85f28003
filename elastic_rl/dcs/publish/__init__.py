"""Publishing a version: parts written by the ranks, replicated, committed in one transaction."""
