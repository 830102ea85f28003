"""The user's own code: how a setting names it, and a function of it in a process of its own."""
