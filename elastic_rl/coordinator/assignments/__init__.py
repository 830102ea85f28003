"""Assignments: which host holds each singleton of the cluster."""
