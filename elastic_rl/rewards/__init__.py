"""Verifiable rewards: pure functions of a problem and the token ids of a response."""
