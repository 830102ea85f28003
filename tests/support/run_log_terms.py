"""Terms of an actor that do nothing but write records, with segments small enough for tests."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

from elastic_rl import config
from elastic_rl.config import Stream
from elastic_rl.dcs.publish.growing_stream import GrowingStream
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.pipeline.records import history
from elastic_rl.pipeline.records.run_log import JobStatusWriter, RunLog
from elastic_rl.pipeline.records.spool import Spool
from elastic_rl.pipeline.records.tail_keys import open_history

SEGMENT, TAIL = 4096, 32 << 10


def use_small_segments(setattr_: Any = setattr) -> None:
    """``setattr_``: that of a monkeypatch, where it is to be undone."""
    setattr_(history, "SEGMENT_BYTES", SEGMENT)
    setattr_(history, "TAIL_BYTES", TAIL)


class Term:
    """A term of the actor. Its spool's thread does not run, unless it is started: ``seal`` and ``copy`` do its work."""

    def __init__(self, etcd: EtcdClient, keys: Keys, folder: Path, most_bytes: int = 1 << 30, **dcs: object) -> None:
        epoch = fencing.current_epoch(etcd, keys)
        self.number = fencing.begin_term(etcd, keys, epoch, "actor")
        writer = FencedWriter.of_term(etcd, keys, epoch, self.number)
        self.history = open_history(etcd, keys, writer, keys.job)
        self.status = JobStatusWriter(etcd, keys, writer, steps=1000, seed=0, history=self.history)
        self.log = RunLog(self.history)
        self.path = folder / "steps.jsonl"
        settings = config.parse({"dcs": {"io_timeout_s": 10, "staging_ttl_s": 10, **dcs}}).dcs
        stream = GrowingStream(etcd, keys, Stream.RUN_LOG, settings, epoch=epoch, token=writer,
                               owner=f"actor-{self.number}", security=None)
        self.spool = Spool(etcd, keys, self.history, stream, most_bytes=most_bytes, path=self.path,
                           lock=folder / "lock")
        self._steps = itertools.count(1)

    def step(self, nbytes: int = 500) -> None:
        """A step's record and its status."""
        step = next(self._steps)
        self.log.write("step", step=step, term=self.number, x="." * nbytes)
        self.status.write("rl", step=step)

    def steps(self, count: int, nbytes: int = 500) -> None:
        for _ in range(count):
            self.step(nbytes)

    def seal(self) -> None:
        """Raises as ``Spool.seal``."""
        while self.spool.seal():
            pass

    def copy(self) -> bytes:
        """What is in the file. Raises as ``LocalCopy.step``."""
        while self.spool._copy.step():
            pass
        return self.path.read_bytes()

    def end(self) -> None:
        """The process ends, with its locks and connections."""
        self.spool._copy.close()
        self.spool._stream.close()
