"""What the independent observer saw of a store: its history, change by change."""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_rl.config import EtcdConfig
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.runtime.process import start_child
from elastic_rl.runtime.waiting import wait_until

_OBSERVER = Path(__file__).parent / "observer.py"
_TIMEOUT_S = 60.0
_AGAIN_S = 1.0
"""Pause before an observer that has ended is started again."""
_ENVIRONMENT = {"PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION": "python"}
_FILES = ("CA", "CERT", "KEY")
"""Variables that name the files of a store with TLS."""


@dataclass(frozen=True)
class Change:
    """One change of one key, as the observer saw it."""

    revision: int
    put: bool
    key: str
    create: int
    value: str
    omitted_bytes: int = 0
    """Size of a value that was too long to be recorded; ``value`` is empty then."""


def require_client() -> None:
    """Raises ConfigError where the observer's client is not installed."""
    if importlib.util.find_spec("etcd3") is None:
        raise ConfigError("the observer of a chaos run needs the package etcd3, a client of etcd of its own",
                          hint="pip install 'elastic-rl[chaos]'")


def observe(endpoint: str, prefix: str, since: int, last: str, *, tls: Sequence[str] = ()) -> list[Change]:
    """The changes under ``prefix`` from the revision ``since`` to that of the key ``last``, in their order, read by the
    observer in a process of its own. ``tls``: files with the authority of the store, and with the certificate and the
    key of a client. Raises AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, str(_OBSERVER), endpoint, prefix, str(since), last], capture_output=True, encoding="utf-8",
        timeout=_TIMEOUT_S, env={**os.environ, **_ENVIRONMENT, **dict(zip(_FILES, tls, strict=False))})
    assert done.returncode == 0, done.stderr[-2000:]
    return [Change(**json.loads(line)) for line in done.stdout.splitlines()]


class Observer:
    """Observes a store until ``close``, in a process of its own. One that has lost its member of the store is started
    again with the next one, from the revision after the last that it saw. Where that was compacted, the revisions
    between are a gap, of which nothing is known but which keys there are at its end."""

    def __init__(self, endpoints: Sequence[str], prefix: str, since: int,
                 on_change: Callable[[dict[str, Any]], None], *, log: Path, access: EtcdConfig | None = None,
                 on_gap: Callable[[int, int], None] = lambda *_: None,
                 on_present: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        """``endpoints``: of the members, as ``host:port``. ``since``: the first revision. ``on_change``: called with
        each change, from a thread of this object. ``log``: for what the process says. ``access``: the PEM files of a
        store with TLS. ``on_gap``: called with the first and the last revision of a gap, from the same thread.
        ``on_present``: called with each key that is there at the end of a gap, as with a change, and then with
        ``listed``, the last revision of the gap."""
        self._endpoints, self._prefix, self._next = itertools.cycle(endpoints), prefix, since
        self._on_change, self._on_gap, self._on_present = on_change, on_gap, on_present
        self._log, self._environment = log, {**os.environ, **_ENVIRONMENT, **_files(access)}
        self._keys = set[str]()
        """Those of the revision ``_next`` that were seen."""
        self._list_at = 0
        """The last revision of a gap, whose keys are to be listed; 0 where they were."""
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._error: BaseException | None = None
        """What has ended its thread."""
        self._thread = threading.Thread(target=self._watch, name="observer", daemon=True)
        self._thread.start()

    def await_revision(self, revision: int) -> None:
        """Returns once it has seen the change of this revision, which is one below its prefix. Raises DeadlineExceeded
        where it does not."""
        wait_until(lambda: self._next >= revision or not self._thread.is_alive(), timeout_s=_TIMEOUT_S,
                   what=f"the change of revision {revision} in the record of the observer")
        self._require()

    def close(self) -> None:
        """Raises what has ended it before."""
        self._closing.set()
        with self._lock:
            if self._process is not None:
                self._process.kill()
        self._thread.join(_TIMEOUT_S)
        self._require()

    def _require(self) -> None:
        if self._error is not None:
            raise ElasticRLError(f"the observer has ended: {type(self._error).__name__}: {self._error}")

    def _watch(self) -> None:
        try:
            self._run()
        except BaseException as e:  # for whoever waits for it
            self._error = e

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._log.open("a", encoding="utf-8") as said:
                with self._lock:
                    if self._closing.is_set():
                        return
                    self._process = process = start_child(
                        [sys.executable, str(_OBSERVER), next(self._endpoints), self._prefix,
                         f"@{self._list_at}" if self._list_at else str(self._next)],
                        stdout=subprocess.PIPE, stderr=said, env=self._environment)
                assert process.stdout is not None
                with process, process.stdout:
                    for line in process.stdout:
                        if line.endswith(b"\n"):
                            self._take(json.loads(line))
            self._closing.wait(_AGAIN_S)

    def _take(self, change: dict[str, Any]) -> None:
        if "compacted" in change:
            # That revision too: a deletion at it is gone.
            first, last = self._next + bool(self._keys), int(change["compacted"])
            if first <= last:
                self._on_gap(first, last)
                self._list_at = last
            self._next, self._keys = max(first, last + 1), set()
            return
        if "listed" in change or change.pop("present", False):
            self._list_at = 0 if "listed" in change else self._list_at
            self._on_present(change)
            return
        self._list_at = 0  # the keys of then cannot be read any more
        # A transaction changes several keys in one revision: the next start gets all of them again.
        if self._next != change["revision"]:
            self._next, self._keys = int(change["revision"]), set()
        if change["key"] not in self._keys:
            self._keys.add(change["key"])
            self._on_change(change)


def _files(access: EtcdConfig | None) -> Mapping[str, str]:
    return {} if access is None else {name: path for name, path in zip(
        _FILES, (access.tls_ca, access.tls_cert, access.tls_key), strict=True) if path}
