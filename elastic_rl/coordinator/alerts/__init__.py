"""Alerts: which conditions are alerts, who receives them, and their delivery through Apprise."""
