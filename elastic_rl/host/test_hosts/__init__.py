"""Hosts of a cluster in namespaces of this machine, to try several hosts out, for tests and for benches.

Each has network, pid, mount, ipc and uts namespaces, and its own ``/dev/shm`` and ``/tmp``. So another host cannot look
at its processes or its memory, and ``kill -9`` of its init is a power cut. They share this machine's CPUs, memory, GPUs
and clock. ``naming`` is pure; ``isolated_hosts`` makes namespaces, bridge and links; ``cluster_hosts`` makes them a
cluster.
"""
