"""Reads the records of a run from etcd as they are written, for the live view on any host of its cluster, in a thread
of its own: the view never waits for an etcd that is away."""

from __future__ import annotations

import logging
import threading
from collections import deque

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.pipeline.records.history_tail import HistoryTail
from elastic_rl.report.build import Record, parse_lines

log = logging.getLogger(__name__)

_READ_S = 0.5
_RETRY_S = 1.0
_JOIN_S = 2.0
_MOST_RECORDS = 10_000
"""Records that the view has not taken yet; of more the oldest are left out."""


class RecordReader:
    """Reads from its beginning until ``close``."""

    def __init__(self, etcd: EtcdClient, keys: Keys, identity: str, offset: int | None) -> None:
        """``identity``, ``offset``: as of ``HistoryTail``."""
        self._tail = HistoryTail(etcd, keys, identity, offset)
        self._records: deque[Record] = deque(maxlen=_MOST_RECORDS)
        self._incomplete, self._found = b"", False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="record-reader", daemon=True)
        self._thread.start()

    @property
    def found(self) -> bool:
        """Whether etcd has answered."""
        return self._found

    def records(self) -> list[Record]:
        """The next ones, without waiting."""
        found = list[Record]()
        while self._records:
            found.append(self._records.popleft())
        return found

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_JOIN_S)

    def _run(self) -> None:
        with self._tail as tail:
            problem = ""
            while not self._closing.is_set():
                try:
                    data = tail.read(_READ_S)
                except ElasticRLError as e:  # the view says so
                    if problem != (problem := e.message):
                        log.warning("the records of the run cannot be read: %s", e)
                    self._closing.wait(_RETRY_S)
                    continue
                *lines, self._incomplete = (self._incomplete + data).split(b"\n")
                self._records.extend(parse_lines(line.decode(errors="replace") for line in lines))
                self._found, problem = True, ""
