"""The training loop: ``pipeline`` runs a job. ``schedule`` says what is done next, ``stages`` do it, mode by mode, and
``waits`` has how they wait.

Their parts are in packages: ``sampling`` (from prompts to rewarded samples), ``flow`` (which of them a step takes, and
how they are generated, between the steps or beside them), ``training`` (from those to a step of the trainer
groups), ``untrained`` (modes that train nothing) and ``records`` (what a run leaves behind).
"""
