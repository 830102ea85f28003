"""The ``elastic-rl`` command."""
