"""Environments that a policy acts in over several turns, and the way to generate that plays them."""
