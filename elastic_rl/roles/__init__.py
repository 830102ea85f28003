"""The roles of a run: one Ray Serve deployment a file, all keeping the contract of roles.contract."""
