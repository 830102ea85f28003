"""Faults that can be injected into a running job, and the drill that plays them."""
