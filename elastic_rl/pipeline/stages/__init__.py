"""How what the schedule asks for is done on the real parts, by mode: ``rl``, ``sft``, and ``sampled`` for the modes
that train nothing. What modes share is one term of the actor (``term``) and access to the trainer (``trainer_access``).

Each stage waits for what it depends on, says so, and tries again without end; only Fenced ends it.
"""
