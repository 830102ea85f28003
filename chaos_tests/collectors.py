"""What of a run is copied into its log while it goes on, and what of it is left out."""

from __future__ import annotations

import hashlib
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from chaos_tests.event_log import EventLog, Kind
from chaos_tests.faults.catalogue import FAULTS
from chaos_tests.target import Target
from elastic_rl.config import secrets
from elastic_rl.errors import DeadlineExceeded, ElasticRLError
from elastic_rl.etcd import events
from elastic_rl.etcd.records import Event
from elastic_rl.pipeline.records.run_log import RunLog
from elastic_rl.report.build import parse_lines

log = logging.getLogger(__name__)

_CLOSE_S = 30.0
"""Longest wait for a reading that is under way."""
_MOST_SEEN = 50_000
"""Events that are known to be in the log. A reading goes back to the first of them."""
Say = Callable[[str], None]
"""Says a line to whoever waits for the run."""


def without_secrets(change: Mapping[str, Any]) -> Mapping[str, Any]:
    """The change of the settings that a job was begun with, without those that may be secrets."""
    try:
        return {**change, "value": json.dumps(secrets.without_secrets(json.loads(change["value"])))}
    except (ValueError, KeyError):  # too long for the log, or deleted
        return change


def without_seal(change: Mapping[str, Any]) -> Mapping[str, Any]:
    """The change of a job's record with a digest in the place of its sealed settings: whoever gets the secret of the
    cluster later is not to read them in a log."""
    try:
        record = json.loads(change["value"])
        sealed = record["settings"]
    except (ValueError, TypeError, KeyError):
        return change
    digest = f"sha256:{hashlib.sha256(str(sealed).encode()).hexdigest()}" if sealed else ""
    return {**change, "value": json.dumps({**record, "settings": digest})}


class FaultCopier:
    """Copies the injector's records into the log of the run and, for the report of the job, among its own."""

    def __init__(self, event_log: EventLog, run_log: RunLog, say: Say) -> None:
        self._log, self._run_log, self._say = event_log, run_log, say

    def write(self, kind: str, **fields: Any) -> None:
        self._log.write(Kind.FAULT, **fields, **FAULTS[fields["name"]].fields)
        self._run_log.write(kind, **fields)
        took = (f"healed after {fields['healed_at'] - fields['injected_at']:.1f} s" if fields["healed_at"] else
                fields["problem"])
        self._say(f"step {fields['step']}: {fields['name']} of {fields['target'] or 'nothing'}: {took}")


class StepCopier:
    """Copies the records of the run's steps as they are written, on whichever host, in the order of their times. Those
    of before the run are left out."""

    def __init__(self, target: Target, event_log: EventLog) -> None:
        self._log, self.newest, self.done, self.done_at = event_log, 0, 0, 0.0
        self._offsets = {path: path.stat().st_size if not target.own and path.exists() else 0
                         for path in (paths.steps for paths in target.folders)}

    def poll(self) -> None:
        found = [record for path in self._offsets for record in self._new(path) if record.pop("kind") == "step"]
        for record in sorted(found, key=lambda record: float(record["at"])):
            self._log.write(Kind.STEP, **record)
            self.newest = int(record["step"])
            self.done += 1
            self.done_at = float(record["at"])

    def _new(self, path: Path) -> list[dict[str, Any]]:
        with suppress(FileNotFoundError), path.open("rb") as file:
            file.seek(self._offsets[path])
            whole, newline, _ = file.read().rpartition(b"\n")
            self._offsets[path] += len(whole) + len(newline)
            return [*parse_lines(whole.decode(errors="replace").splitlines())]
        return []


class EventCopier:
    """Copies the events of the job and of its cluster, each once."""

    def __init__(self, target: Target, event_log: EventLog) -> None:
        self._target, self._log, self._since = target, event_log, 0.0 if target.own else time.time()
        self._seen = {"job": dict[str, None](), "cluster": dict[str, None]()}
        """Ids of events that are in the log, the newest last."""

    def poll(self) -> None:
        for keys, seen in ((self._target.keys, self._seen["job"]), (self._target.cluster_keys, self._seen["cluster"])):
            is_known = partial(self._is_known, seen)
            for event in events.back_to(self._target.reader, keys, is_known):
                if not is_known(event):
                    seen[event.id] = None
                    if len(seen) > _MOST_SEEN:
                        del seen[next(iter(seen))]
                    self._log.write(Kind.EVENT, at=event.at, seen_at=time.time(), id=event.id, name=event.kind,
                                    subject=event.subject, severity=event.severity.value, message=event.message)

    def _is_known(self, seen: Mapping[str, None], event: Event) -> bool:
        return event.id in seen or event.at < self._since


class Poller:
    """Calls a function again and again from a thread of its own, and once more at the end. What cannot be read now is
    left out; ``close`` raises any other error, which has ended it."""

    def __init__(self, poll: Callable[[], None], every_s: float) -> None:
        self._poll, self._every_s, self._closing = poll, every_s, threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="poller", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closing.set()
        self._thread.join(_CLOSE_S)
        if self._error is not None:
            raise self._error
        if self._thread.is_alive():
            raise DeadlineExceeded(f"a reading of the run has taken more than {_CLOSE_S:g} s")

    def _run(self) -> None:
        while True:
            last = self._closing.is_set()
            try:
                self._poll()
            except (ElasticRLError, OSError) as e:
                log.debug("not read: %s", e)
            except BaseException as e:  # for whoever closes it
                self._error = e
                return
            if last:
                return
            self._closing.wait(self._every_s)
