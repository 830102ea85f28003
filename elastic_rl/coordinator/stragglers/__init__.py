"""Engines that do not follow the policy as the others do: who they are, and what the leader asks of them."""
