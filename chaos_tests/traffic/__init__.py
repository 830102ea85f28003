"""Workloads that go on while faults happen. Each writes down what its clients did and were told."""
