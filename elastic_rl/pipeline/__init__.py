"""The training loop: what is done next (``schedule``), how it is done (``stages``), and how it waits (``waits``).

Their parts are in packages: ``sampling`` (from prompts to rewarded samples), ``training`` (from those to a step of the
trainer groups), ``fully_async`` (both at once), ``untrained`` (modes that train nothing) and ``records`` (what a run
leaves behind).
"""
