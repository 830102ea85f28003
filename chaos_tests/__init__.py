"""The chaos suite: real processes, real faults, and checkers that judge the store's history by the rules of
docs/architecture.md, "What always holds": I1, I2, I3, I8 and I10.

A test here has a workload that goes on while the nemesis strikes, a witness that each fault did happen, and an observer
that is independent of the product's own client. Checkers are pure functions over a history.
"""
