"""Rewards and filters: what a sample is worth, and which prompt groups are not trained on."""
