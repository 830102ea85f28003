"""The chaos suite: real processes, real faults, and checkers that judge the store's history by the rules I1 to I10.

A test here has a workload that goes on while the nemesis strikes, a witness that each fault did happen, and an observer
that is independent of the product's own client. Checkers are pure functions over a history.
"""
