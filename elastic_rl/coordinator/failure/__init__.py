"""The failure policy: which fault leads to which action, budgets, and statistics of faults."""
