"""Autoscaling of engine pools: from the load of a pool to its desired number of engines."""
