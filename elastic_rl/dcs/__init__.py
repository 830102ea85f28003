"""The distributed checkpoint service: immutable, checksummed versions of named tensors, committed whole or not at all.

Packages: ``catalog`` (versions in etcd, and what the leading coordinator does for them), ``publish`` (for trainers),
``fetch`` (for readers; ``mapping`` for code inside an engine, without etcd), ``node`` and ``storage`` (the process
that owns a host's shared-memory arena and disk), ``durable`` (copies outside the nodes), ``versions`` (for people).
"""
