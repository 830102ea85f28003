"""Faults that are injected into a running job, and the drill that plays a plan of them."""
