"""A job before it starts: what `config check` finds in its settings, data and model."""
