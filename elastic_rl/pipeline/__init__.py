"""The training loop: what is done next (``schedule``), how it is done (``stages``), and how it waits (``waits``)."""
