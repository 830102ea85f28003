"""How what the schedule asks for is done on the real parts, by mode: ``rl``, ``sft``, and ``sampled`` for the modes
that train nothing. What the first two share is in ``trainer``, and what all share in ``base``; ``term`` is one term of
the actor.

Each stage waits for what it depends on, says so, and tries again without end; only Fenced ends it.
"""
