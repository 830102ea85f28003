"""The roles of a run: one Ray Serve deployment per file, each a subclass of ``base.Role``."""
