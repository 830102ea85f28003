"""Faults that are injected into a running job, and the injector that plays a plan of them."""
