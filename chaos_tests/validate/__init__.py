"""Checkers: pure functions over what the observer and the clients saw, by the rules of docs/architecture.md."""
