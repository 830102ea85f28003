"""The distributed checkpoint service: immutable, checksummed versions of named tensors, committed whole or not at all.

For other programs there are the names of ``api``, which this package exports: ``dcs.connect``. They are imported when
they are first used, since most processes of the project need no torch.

Packages: ``catalog`` (versions in etcd, and what the leading coordinator does for them), ``publish`` (for trainers),
``fetch`` (for readers; ``mapping`` for code inside an engine, without etcd), ``node`` and ``storage`` (the process
that owns a host's shared-memory arena and disk), ``durable`` (copies outside the nodes), ``versions`` (for people).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from elastic_rl.dcs.api import (
        CheckpointService,
        ChunkFinding,
        ListedVersion,
        OpenVersion,
        PulledTensors,
        ServiceAccess,
        Shard,
        VersionInfo,
        connect,
    )

__all__ = ["CheckpointService", "ChunkFinding", "ListedVersion", "OpenVersion", "PulledTensors", "ServiceAccess",
           "Shard", "VersionInfo", "connect"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from elastic_rl.dcs import api
    return getattr(api, name)
