"""The records under a prefix as they are now, without reading all of them at each look."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Generic, Self, TypeVar

from elastic_rl.errors import Compacted, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.transaction import KeyValue
from elastic_rl.etcd.watch import Watch

T = TypeVar("T")

SILENT_S = 5.0
"""Time without a word from etcd after which what is known may be too old; see ``read_current``."""


class Mirror(Generic[T]):
    """A prefix, read once and then kept current by a watch. For one thread."""

    def __init__(self, etcd: EtcdClient, prefix: str, decode: Callable[[KeyValue], T | None]) -> None:
        """``decode``: the value of a key; None leaves the key out. Called once for each change."""
        self._etcd, self._prefix, self._decode = etcd, prefix, decode
        self._watch: Watch | None = None
        self._values: dict[str, T] = {}

    def read(self, timeout_s: float) -> Mapping[str, T]:
        """The values by key, as soon as one has changed since the last call, and after ``timeout_s`` at the latest. The
        first call returns at once. Raises EtcdUnavailable where all must be read and etcd is away; otherwise, while
        etcd is away, nothing changes: see ``silent_s``."""
        if self._watch is None:
            return self._read_all()
        end = time.monotonic() + timeout_s
        changed = False
        while True:
            try:
                event = self._watch.get(0.0 if changed else max(0.0, end - time.monotonic()))
            except Compacted:
                return self._read_all()
            except ElasticRLError:  # refused, or without credentials that can be read: a new watch may be allowed later
                self.close()
                raise
            if event is None:
                return self._values
            changed = True
            self._take(event.kv, deleted=event.type == "delete")

    @property
    def is_watched(self) -> bool:
        """Whether the next ``read`` may know less than etcd."""
        return self._watch is not None

    @property
    def silent_s(self) -> float:
        """Seconds for which etcd has said nothing: what ``read`` returned may be so old."""
        return self._watch.silent_s if self._watch is not None else 0.0

    def read_current(self, timeout_s: float) -> Mapping[str, T]:
        """Reads as ``read`` does, for what must not be old. Raises EtcdUnavailable also when etcd has been silent for
        some seconds."""
        values = self.read(timeout_s)
        if (silent_s := self.silent_s) > SILENT_S:
            raise EtcdUnavailable(f"etcd has sent no change of {self._prefix} and no sign of life for {silent_s:.0f} s")
        return values

    def _read_all(self) -> Mapping[str, T]:
        self.close()
        kvs, revision = self._etcd.range(self._prefix)
        self._values = {}
        for kv in kvs:
            self._take(kv, deleted=False)
        self._watch = self._etcd.watch(self._prefix, start_revision=revision + 1)
        return self._values

    def _take(self, kv: KeyValue, *, deleted: bool) -> None:
        value = None if deleted else self._decode(kv)
        if value is None:
            self._values.pop(kv.key, None)
        else:
            self._values[kv.key] = value

    def close(self) -> None:
        """Ends the watch. A later ``read`` reads all again."""
        if self._watch is not None:
            self._watch.close()
            self._watch = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
