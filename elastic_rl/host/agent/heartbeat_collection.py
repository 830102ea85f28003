"""What a host agent makes of the heartbeat files of a job's processes. Pure: no clock, no file, no etcd.

The transitions that must NOT exist:

- from a newer heartbeat of a process to an older one, or to none while its record may still be there: readers would
  take the record's, which may be days old. So the last heartbeat of a process that is gone stays for longer than its
  lease, and only then its file is deleted;
- to a revision at which the process may have been dead or stopped: the leader takes whoever registered later for its
  replacement. So a revision is only noted of a process that was seen to run after etcd had reached it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from elastic_rl.etcd.heartbeat_folder import MAX_FILES, HeartbeatFile
from elastic_rl.etcd.process_state import ProcessState
from elastic_rl.etcd.records import Heartbeat, HostHeartbeats

KEPT_LEASES = 3.0
"""The last heartbeat of a process that is gone is kept for so many times its lease."""


@dataclass(frozen=True)
class FoundFile:
    """The file of a process, as one look found it."""

    file: HeartbeatFile
    state: ProcessState
    """The process, looked at after the file was read."""


@dataclass(frozen=True)
class CollectedHeartbeats:
    """What one look makes of a folder."""

    record: HostHeartbeats
    """What etcd is to have; without a heartbeat there it is to have nothing."""
    collected: frozenset[str]
    """Incarnations of the processes of the record that are there."""
    over: frozenset[str]
    """Incarnations whose files are to be deleted."""


def collect(host: str, before: HostHeartbeats | None, found: Iterable[FoundFile], revision: int, now_s: float,
            unread: Collection[str] = ()) -> CollectedHeartbeats:
    """``before``: what etcd has. ``revision``: of etcd, at some time before the files were read. ``now_s``: as the
    files have it (``boottime_s``). ``unread``: incarnations of the processes whose files cannot be read now: what etcd
    has of them stays."""
    known = {beat.incarnation: beat for beat in before.beats} if before is not None else {}
    kept, over = list[FoundFile](), set[str]()
    for f in found:
        if f.state is ProcessState.GONE and now_s - f.file.written_s > KEPT_LEASES * f.file.lease_s:
            over.add(f.file.beat.incarnation)
        else:
            kept.append(f)
    # Those that etcd has stay, so that a full folder has no member come and go.
    kept.sort(key=lambda f: (f.file.beat.incarnation not in known, f.file.beat.incarnation))
    kept = kept[:MAX_FILES]
    beats = [_beat(f, known.get(f.file.beat.incarnation), revision) for f in kept]
    beats += [known[incarnation] for incarnation in known.keys() & set(unread)]
    beats.sort(key=lambda b: (b.role, b.id, b.incarnation))
    return CollectedHeartbeats(
        HostHeartbeats(host=host, beats=beats),
        frozenset(f.file.beat.incarnation for f in kept if f.state is not ProcessState.GONE), frozenset(over))


def _beat(found: FoundFile, before: Heartbeat | None, revision: int) -> Heartbeat:
    beat = found.file.beat
    if before is None:
        return beat.replace(revision=revision if found.state is ProcessState.RUNNING else 0)
    if beat.beats <= before.beats:
        return before
    return beat.replace(revision=max(before.revision, revision) if found.state is ProcessState.RUNNING
                        else before.revision)
