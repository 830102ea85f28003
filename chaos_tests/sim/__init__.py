"""Worlds in which the product's own state machines, schedules and protocols run on a virtual clock while everything
else fails, for thousands of seeds. What a world checks does not come from the code under test."""
