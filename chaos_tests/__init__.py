"""The chaos suite: real processes, real faults, and checkers that judge what happened by the rules of
docs/architecture.md, "What always holds": I1, I2, I3, I8 and I10.

A test here has ``traffic`` that goes on while faults happen, a witness that each fault did happen, and an ``observer``
that is independent of the product's own client. What clients did and were told is a ``history``, which is checked
against a sequential ``model``; what the observer saw is checked by ``validate``. Checkers are pure functions.
"""
