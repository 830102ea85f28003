"""The event log of a chaos run: everything that was done and seen, in one file of JSON lines.

The runner and its threads append records while the run goes on. Checkers (``validate``) and the report (``report``)
read nothing else, so a folder that somebody has sent can be judged again on another machine.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

FORM = 1
"""Form of the file, in its first record. A file of another form is refused."""
Event = Mapping[str, Any]


class Kind(StrEnum):
    """Kinds of records. Each record has ``at`` (unix s), ``kind`` and the fields that are named here."""

    RUN = "run"
    """First record. ``form``, ``scenario``, ``seed``, ``schedule`` (as its JSON object, without secrets), ``target``,
    ``arguments`` (words of a command line that name the job and what of it may be struck, where it ran before),
    ``recovery_s`` (after which it gives a recovery up; records of earlier releases have none: 900),
    ``settings`` (of the job, without secrets), ``versions`` (package → version), ``commit``, ``baseline`` (whether it
    is the fault-free run), ``traffic`` (its names in ``chaos_tests.traffic.workloads``), ``floor`` (the least that
    makes it worth something: ``steps`` before the first fault, ``answers`` of clients, and, by the name of each model
    that judges what they do, how many of these), ``must_see`` (rules that must not be unseen in it)."""
    FAULT = "fault"
    """A planned fault, once it is over or given up. ``name``, ``step``, ``target``, ``state`` (of the victim then),
    ``witness`` ("" when it was not seen to happen), ``injected_at`` (when it struck), ``detected_at``,
    ``healed_at`` (unix s or None), ``waited_s`` (for its victim, before ``injected_at``), ``may_go_unnoticed`` (whether
    nobody has to detect it), ``said`` (what the job's status said that it waits for), ``problem`` (why it did not
    happen or was not seen to heal), ``breaks`` (the rule that it found broken; ""), ``parts`` (that it strikes, the one
    that it is a fault of first) and ``seen_in`` (the parts whose losses it may be the reason for), as the catalogue has
    them; records of earlier releases have neither."""
    OPERATION = "operation"
    """An operation of a client, as ``chaos_tests.history.Operation`` has it: ``client``, ``key``, ``call``,
    ``argument``, ``began_s``, ``ended_s``, ``result``; ``model`` names the sequential model that judges it."""
    UNANSWERED = "unanswered"
    """A try of a client that got no answer and certainly had no effect, so that no model needs it: ``client``, ``key``,
    ``call``, ``model``. Logs of earlier releases have none."""
    CHANGE = "change"
    """A change of a key in etcd, as the independent observer saw it: ``revision``, ``put``, ``key``, ``create``,
    ``value``; of a value that is too long for the log only ``omitted_bytes``."""
    GAP = "gap"
    """Changes that the observer did not see, since they were compacted before: of the revisions ``first`` to ``last``.
    What a rule says of them is unseen, not kept."""
    PRESENT = "present"
    """A key that was there at the end of a gap, with the fields of a CHANGE, of the last one that it had by then. A
    record with ``listed`` has no key: all keys of that revision were shown before it. Logs of earlier releases have
    none."""
    WATCH = "watch"
    """A change as a watch of the product's client delivered it: ``client`` (one watch), ``prefix``, ``revision``,
    ``put``, ``key``. A record with ``listed`` true has no key: the client has read the whole range at that revision,
    since changes were compacted, or to begin with."""
    STEP = "step"
    """A step's record, as steps.jsonl has it, each time that the step was done."""
    EVENT = "event"
    """An event of the product, as its API has it: ``id``, ``name`` (its kind), ``subject``, ``severity``,
    ``message``; its ``at`` is of the clock of its writer, and ``seen_at`` of when the run has read it."""
    NOTIFICATION = "notification"
    """What a receiver of alerts got: ``alert`` (its kind), ``subject``, ``phase`` (firing, resolved), ``key`` (of its
    deduplication)."""
    PROCESS = "process"
    """A sample of a process, on a cluster of the run's own where growth is to be judged: ``role`` (what it is in the
    cluster, the same over restarts), ``pid``, ``rss_bytes``, ``anonymous_bytes`` (of it what is mapped of no file),
    ``descriptors``, ``threads``, ``cpu_s``."""
    STORE = "store"
    """A sample of what is kept, in such a run: ``etcd_keys`` and ``etcd_keys_by_prefix``, ``etcd_bytes`` (in use),
    ``files`` of the job's folder, their bytes as ``history_bytes`` (steps.jsonl, and what the checkpoint service has on
    disk), ``log_bytes`` (with those of etcd) and ``file_bytes`` (the others), those of all as
    ``file_bytes_by_folder``, ``shm_files`` and ``shm_bytes`` in /dev/shm, ``status_s`` (time that
    ``status`` took), ``step`` (the newest one)."""
    LEFTOVER = "leftover"
    """Something that should have ended with the cluster: ``what``."""
    STOP = "stop"
    """The run is about to ask its job to stop: ``since`` (unix s, when it began to wait for parts that were short, and
    for a further step), ``revision`` (newest one of etcd that the observer had shown then), ``step`` (newest one)."""
    END = "end"
    """Last record. ``phase`` (of the job), ``report`` (its report.json), ``alerts`` (each as etcd has it at the end),
    ``aborted`` (why the run was ended early; ""), ``problems`` (what of the suite itself has failed), ``revision`` (of
    etcd at the end, of a change that the observer is to have seen; None where etcd did not answer),
    ``records`` (kind → how many were written before this one). Of a cluster of the run's own also ``refused`` (what was
    said to whoever would have resumed the job with another seed: "" where it might have been, None where it had decided
    nothing or etcd did not answer), and, on one host, ``kept`` (what was on disk of the job, which had ended, once its
    cluster was down, as ``kept_job.on_disk`` has it: ``lacks``, what was not there; ``steps``, of which there were
    records; ``versions``, None where the job has no disk, else each head's ``stream``, ``number``, ``created_at``,
    ``chunks``, and how many of them were ``lost``; None where the job had not ended). Logs of earlier releases have
    neither."""


class EventLog:
    """Appends records, from any thread. A record is in the file when ``write`` returns."""

    def __init__(self, path: Path, *, now: Callable[[], float] = time.time) -> None:
        self.path, self._now, self._lock = path, now, threading.Lock()
        self.written = Counter[str]()
        """Records by kind, without the first and the last one of a run."""
        self.error: OSError | None = None
        """The first error of a write."""
        self._file = open(path, "ab", buffering=0, opener=_private)  # noqa: SIM115 -- it has ``close``

    def write(self, kind: Kind, **fields: Any) -> None:
        """``fields`` are of the kind; an ``at`` among them takes the place of the time of writing. Raises OSError for a
        record that is not in the file then, nor a part of it."""
        line = (json.dumps({"at": self._now(), "kind": kind.value, **fields}, allow_nan=True) + "\n").encode()
        with self._lock:
            try:
                self._append(line)
            except OSError as e:
                self.error = self.error or e
                raise
            if kind not in (Kind.RUN, Kind.END):
                self.written[kind.value] += 1

    def _append(self, line: bytes) -> None:
        size = os.fstat(self._file.fileno()).st_size
        if self._file.write(line) < len(line):
            self._file.truncate(size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))

    def close(self) -> None:
        self._file.close()


_MOST_BYTES, _MOST_OF_OTHERS = 256 << 20, 8 << 20
"""Most bytes of a line: a report of a long run is in the last one. What is read of a line takes 30 times as much."""
_BEGIN_BYTES = 100
"""A record has its time and its kind within so many bytes."""
_MOST_S = 1e12
_MOST_STEPS = 1_000_000_000
_KINDS = frozenset(kind.value for kind in Kind)
Form = Callable[[Any], bool]
"""Whether a value is of a form."""


def _is(*types: type[Any]) -> Form:
    """A number is so small that others can be reckoned from it."""
    return lambda value: type(value) in types and (type(value) not in (int, float) or -_MOST_S < value < _MOST_S)


def _list_of(form: Form) -> Form:
    return lambda value: type(value) is list and all(map(form, value))


def _or_none(form: Form) -> Form:
    return lambda value: value is None or form(value)


def _object_of(form: Form) -> Form:
    return lambda value: type(value) is dict and all(map(form, value.values()))


def _with(forms: Mapping[str, Form]) -> Form:
    """An object with these fields."""
    return lambda value: type(value) is dict and all(
        name in value and form(value[name]) for name, form in forms.items())


_TEXT, _NUMBER, _TIME, _TRUTH, _OBJECT = _is(str), _is(int), _is(int, float), _is(bool), _is(dict)
_NUMBER_OR_NONE, _TIME_OR_NONE = _is(int, type(None)), _is(int, float, type(None))
_TEXTS, _NUMBERS = _or_none(_list_of(_TEXT)), _object_of(_NUMBER)
_STRIKES = _or_none(_list_of(_with({"faults": _list_of(_TEXT)})))
_ALERTS = _or_none(_list_of(_with(dict.fromkeys(("id", "kind", "subject", "message", "phase", "severity"), _TEXT))))
_KEPT = _with({"lacks": _list_of(_TEXT), "steps": _NUMBER, "versions": _or_none(_list_of(_with(
    {"stream": _TEXT, "created_at": _TIME, **dict.fromkeys(("number", "chunks", "lost"), _NUMBER)})))})
_FORMS: Mapping[str, Sequence[tuple[Sequence[str], Form, bool]]] = {
    Kind.RUN: ((("scenario", "target", "commit"), _TEXT, False),
               (("arguments", "traffic", "must_see"), _TEXTS, False), (("floor",), _NUMBERS, False),
               (("recovery_s",), _TIME, False),
               (("schedule",), lambda value: type(value) is dict and _STRIKES(value.get("strikes")), False),
               (("settings", "versions"), _OBJECT, False)),
    Kind.FAULT: ((("name",), _TEXT, True), (("breaks",), _TEXT, False), (("parts", "seen_in"), _TEXTS, False),
                 (("injected_at", "detected_at", "healed_at"), _TIME_OR_NONE, False)),
    Kind.OPERATION: ((("key",), _TEXT, True), (("began_s",), _TIME, True), (("ended_s",), _TIME_OR_NONE, False)),
    Kind.UNANSWERED: ((("client", "call", "model"), _TEXT, True),),
    Kind.CHANGE: ((("revision",), _NUMBER, True), (("key",), _TEXT, True), (("create",), _NUMBER, False),
                  (("put",), _TRUTH, True), (("value",), _TEXT, False)),
    Kind.GAP: ((("first", "last"), _NUMBER, True),),
    Kind.PRESENT: ((("revision", "create", "listed"), _NUMBER, False), (("key", "value"), _TEXT, False),
                   (("put",), _TRUTH, False)),
    Kind.WATCH: ((("client", "prefix"), _TEXT, True), (("revision",), _NUMBER, True), (("key",), _TEXT, False),
                 (("put", "listed"), _TRUTH, False)),
    Kind.STEP: ((("step",), lambda value: type(value) is int and 0 <= value < _MOST_STEPS, True),),
    Kind.EVENT: ((("name", "subject", "message"), _TEXT, True), (("seen_at",), _TIME, False)),
    Kind.NOTIFICATION: ((("alert", "subject", "phase"), _TEXT, True),),
    Kind.LEFTOVER: ((("what",), _TEXT, True),),
    Kind.STOP: ((("since",), _TIME, True), (("revision", "step"), _NUMBER, True)),
    Kind.END: ((("report",), _OBJECT, False), (("records",), _NUMBERS, False), (("revision",), _NUMBER_OR_NONE, False),
               (("alerts",), _ALERTS, False), (("committed_steps",), _or_none(_list_of(_NUMBER)), False),
               (("refused",), _or_none(_TEXT), False), (("kept",), _or_none(_KEPT), False),
               (("problems",), _TEXTS, False), (("phase", "aborted"), _TEXT, False)),
}
"""The fields without which nothing can be said of a kind, and others that records have: their names, form, and whether
they must be there."""


def _private(path: str, flags: int) -> int:
    """The log has what only the user of the job may read. A link that somebody has put there is not written through."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)


def read(path: Path) -> Iterator[Event]:
    """The records of a log, in the order of the file. A last line without its end is that of a process that was killed
    while it wrote it, and is left out. Raises ValueError, which says where, for a file that is no log of this form, and
    OSError."""
    ended = False
    with open(path, "rb", opener=_without_waiting) as lines:
        for number in itertools.count(1):
            line = lines.readline(_MOST_BYTES)
            if not line.endswith(b"\n"):
                if len(line) == _MOST_BYTES:
                    raise ValueError(f"{path}, line {number}, is longer than {_MOST_BYTES >> 20} MiB")
                if number == 1:
                    raise ValueError(f"{path} has no record: the run ended before it began")
                return
            try:
                if len(line) > _MOST_OF_OTHERS and b'"kind": "end"' not in line[:_BEGIN_BYTES]:
                    raise ValueError(f"it is longer than {_MOST_OF_OTHERS >> 20} MiB")
                record = json.loads(line.decode("utf-8-sig" if number == 1 else "utf-8"))
                if number == 1 and (type(record) is not dict or record.get("kind") != Kind.RUN
                                    or record.get("form") != FORM):
                    raise ValueError(f"this is no event log of form {FORM}")
                _require_form(record)
                if ended or (number > 1 and record["kind"] == Kind.RUN):
                    raise ValueError("the run has ended before it" if ended else "a second run begins here")
                ended = record["kind"] == Kind.END
            except (ValueError, RecursionError) as e:
                raise ValueError(f"{path}, line {number}, is no record of a chaos run: {str(e)[:200]}") from e
            yield record


def _without_waiting(path: str, flags: int) -> int:
    """A FIFO would be waited for without end."""
    return os.open(path, flags | os.O_NONBLOCK)


def _require_form(record: Any) -> None:
    """Raises ValueError for what is no record, or has a field of another type than its kind says."""
    if type(record) is not dict:
        raise ValueError("it is no JSON object")
    kind: Any = record.get("kind")
    at: Any = record.get("at")
    if type(kind) is not str or type(at) not in (int, float) or not -_MOST_S < at < _MOST_S:
        raise ValueError("it has no kind, or no time")
    if kind not in _KINDS:
        raise ValueError(f"its kind {kind[:40]!r} is unknown: it may be of a later release")
    for names, form, needed in _FORMS.get(kind, ()):
        for name in names:
            if name not in record:
                if needed:
                    raise ValueError(f"{name} of {kind} is missing")
            elif not form(value := record[name]):
                raise ValueError(f"{name} of {kind} is of another form: {str(value)[:80]!r}")


class Records:
    """The records of a log, which are read from its file each time that they are iterated over."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __iter__(self) -> Iterator[Event]:
        return read(self.path)
