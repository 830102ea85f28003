"""Versions as people handle them: list, compare, verify, pin, export, import."""
