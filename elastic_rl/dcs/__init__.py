"""The distributed checkpoint service: immutable, checksummed versions of named tensors, committed whole or not at all.

Pure: ``manifest`` (what a version consists of), ``arena.Allocator``, ``catalog.move``. Processes: ``node`` (owns a
host's shared-memory arena and serves chunks). For trainers ``publisher``, for everyone who reads ``puller``, for code
inside an engine ``mapping`` (no etcd), for the leading coordinator ``janitor``.
"""
