"""Faults of storage: a disk that takes no more, and one that gives back other bytes than it was given."""

from __future__ import annotations

import errno
import os
import resource
import time
from pathlib import Path

import psutil

from elastic_rl.config import ROLLOUT_POOL, Stream
from elastic_rl.dcs.catalog import reads
from elastic_rl.dcs.manifest import Manifest
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.records import DcsNode
from elastic_rl.faults.context import INJECT_TIMEOUT_S, FaultContext, VictimTaken
from elastic_rl.faults.finding import await_service, engines_of_pool
from elastic_rl.faults.kinds import RecoversWithSteps
from elastic_rl.faults.undo import Undo
from elastic_rl.host.service_files import node_service
from elastic_rl.runtime.waiting import wait_until

_REFUSED = os.strerror(errno.EFBIG)
_NO_GROWTH = 1
"""Limit of the size of a process's files, in bytes."""


def _node(context: FaultContext) -> int:
    return await_service(context, node_service(context.cfg.job))


def _records(context: FaultContext) -> list[DcsNode]:
    return [record for record, _ in readable(context.etcd.range(context.keys.dcs_nodes_prefix())[0], DcsNode)]


class DiskRefusesWrites(RecoversWithSteps):
    """No file of the DCS node may grow for a while (``RLIMIT_FSIZE``), so that each write to its disk fails, with EFBIG
    in the place of ENOSPC: this needs no file system of its own. Versions are published and pulled from memory as
    before; the node says how many chunks are not on its disk, and saves them later."""

    name = "dcs_disk_refuses_writes"

    def __init__(self, context: FaultContext, seconds: float) -> None:
        super().__init__(context)
        self.seconds, self._unsaved, self._said = seconds, 0, ""

    def inject(self) -> tuple[str, str]:
        """Raises PermissionError where this process may not limit others."""
        pid, self.at = _node(self.context), time.time()
        self.context.require_own(psutil.Process(pid))
        limit, most = resource.prlimit(pid, resource.RLIMIT_FSIZE), 0
        if limit[0] == _NO_GROWTH:  # whoever has set it takes it away: this one would put it back, for good
            raise VictimTaken(f"another fault keeps the files of pid {pid} from growing")
        with self.context.undo.noted(Undo.UNLIMIT, pid, limit=[*limit]):
            with self.context.striking(f"no file of pid {pid} could grow"):
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (_NO_GROWTH, limit[1]))
            end, said = time.monotonic() + self.seconds, ""
            while time.monotonic() < end:
                records = self.context.answered(lambda: _records(self.context))
                for record in (record for record in records if record.pid == pid):
                    most = max(most, record.unsaved)
                    said = record.disk_fault if _REFUSED in record.disk_fault else said
                self.context.ended.wait(0.2)
        self._unsaved, self._said = most, said
        if not said:  # nothing was to be written; chunks that wait for their turn are no witness
            return "DCS node", ""
        return "DCS node", (f"no file of pid {pid} could grow for {self.seconds:g} s: {most} chunks were not on its "
                            f"disk, and it said {said!r}")

    def detected(self) -> bool:
        """The node says that its disk refuses writes."""
        return bool(self._said)

    def is_back(self) -> bool:
        """It has saved what it had not, but for what was published since."""
        return any(record.unsaved <= self._unsaved // 2 for record in _records(self.context))


class ChunksDamaged(RecoversWithSteps):
    """The disk of the DCS node has damaged files, by one bit or by a torn end, and the node and an engine are killed,
    so that the newest policy version is read from disk. The new engine never gets those bytes: the node finds that they
    are not those of their digest, and another copy is used, or the version is published again. What nobody makes again
    (the model's files, the records of the run) is spared: its only copy would be lost, by the schedule."""

    may_go_unnoticed = True
    """A newer version may be published before somebody reads this one."""

    def __init__(self, context: FaultContext, *, torn: bool) -> None:
        """``torn``: the second half of each file is lost; else a bit in its middle is flipped."""
        super().__init__(context)
        self.torn, self.name = torn, "chunks_torn" if torn else "chunk_bits_flipped"
        self._victim, self._desired, self._state = "", 0, 0

    def inject(self) -> tuple[str, str]:
        engine = wait_until(lambda: next(iter(engines_of_pool(self.context)), None), timeout_s=INJECT_TIMEOUT_S,
                            what="an engine that is ready")
        pid = _node(self.context)
        folder, node = self._folder(pid), next((r.id for r in _records(self.context) if r.pid == pid), "")
        head, self._state = self._head(Stream.POLICY), self._head(Stream.TRAINER_STATE)
        self._desired, self._victim, self.at = self.context.desired(), engine.id, time.time()
        # The engine is killed last: its replacement is to read from files that are damaged already.
        node_killed = self.context.kill(pid)
        spared = self._made_once(folder)
        files = [path for path in folder.glob("[0-9a-f][0-9a-f]/*") if "." not in path.name and path.name not in spared]
        for path in files:
            _damage(path, torn=self.torn)
        engine_killed = self.context.kill(engine.pid)
        if not files:
            return f"disk of the DCS node {node}, engine {engine.id}", ""
        how = "lost its second half" if self.torn else "had a bit flipped"
        return f"disk of the DCS node {node}, engine {engine.id}", (
            f"{node_killed}; each of {len(files)} chunks on its disk {how} then, head {head}; "
            f"{engine_killed}")

    def _made_once(self, folder: Path) -> set[str]:
        """Names of the files of versions that are published once."""
        found = set[str]()
        for stream in (Stream.MODEL, Stream.RUN_LOG):
            for version in reads.list_versions(self.context.etcd, self.context.keys, stream):
                path = folder / version.manifest[:2] / version.manifest
                if version.manifest and path.is_file():
                    found |= {path.name, *Manifest.decode(path.read_bytes()).chunks}
        return found

    @staticmethod
    def _folder(pid: int) -> Path:
        """The folder in which a node has its chunks: the file that it holds locked is in there."""
        return next(Path(file.path).parent for file in psutil.Process(pid).open_files()
                    if Path(file.path).name == "lock")

    def detected(self) -> bool:
        """The node says which bytes it has not any more, or somebody has published them again."""
        return (any(record.lost_chunks for record in _records(self.context))
                or self.context.has_event(event_kinds.VERSION_REPUBLISHED, self.at))

    def _head(self, stream: Stream) -> int:
        head = reads.head(self.context.etcd, self.context.keys, stream)
        return head.number if head else 0

    def is_back(self) -> bool:
        """Engines have a version again, and the trainer has saved another state: all that it had saved may be lost, so
        that another fault of it would leave nothing to resume from."""
        return (len(self.context.ready(ROLLOUT_POOL) - {self._victim}) >= self._desired
                and self._head(Stream.TRAINER_STATE) > self._state)


def _damage(path: Path, *, torn: bool) -> None:
    nbytes = path.stat().st_size
    if torn:
        os.truncate(path, nbytes // 2)
        return
    with path.open("r+b") as file:
        file.seek(nbytes // 2)
        byte = file.read(1)
        file.seek(nbytes // 2)
        file.write(bytes([byte[0] ^ 0x10]))
