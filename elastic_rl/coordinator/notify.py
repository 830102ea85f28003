"""Sends notices through Apprise from one worker thread with a bounded queue, so that a notification service that is
slow, dead or hanging delays nothing but notices."""

from __future__ import annotations

import hashlib
import logging
import queue
import socket
import threading
import time
from collections.abc import Sequence

import apprise
from apprise import NotifyType
from apprise.exception import AppriseImproperlyConfigured

from elastic_rl.coordinator.alerts import Notice, Phase
from elastic_rl.coordinator.records import Severity
from elastic_rl.errors import ConfigError
from elastic_rl.telemetry import metrics

log = logging.getLogger(__name__)

_QUEUE = 64
_BACKOFF_S = (2.0, 60.0)
_DELIVERED = metrics.counter("alert_deliveries", "Notices given to a notification service", ("result",))


def receiver_name(url: str) -> str:
    """A short stable name for an Apprise URL; the URL itself holds secrets and is never stored or logged."""
    return hashlib.blake2s(url.encode(), digest_size=4).hexdigest()


class Notifier:
    """Delivers notices at least once. The caller offers the same notice again and again until ``delivered`` has it.

    Raises ConfigError at once for a URL that Apprise does not understand.
    """

    def __init__(self, job: str, urls: Sequence[str], *, timeout_s: float) -> None:
        self._job, self._timeout_s = job, timeout_s
        self._services: dict[str, apprise.Apprise] = {}
        for n, url in enumerate(urls):
            service = apprise.Apprise(asset=apprise.AppriseAsset(app_id="elastic-rl", async_mode=False))
            if not service.add(url):
                raise ConfigError(f"alerts.urls[{n}] is not a URL that Apprise knows ({url.partition(':')[0]}://…)",
                                  hint="see the list of services at https://github.com/caronc/apprise")
            self._services[receiver_name(url)] = service
        self._queue: queue.Queue[Notice | None] = queue.Queue(_QUEUE)
        self._lock = threading.Lock()
        self._waiting: set[tuple[str, str]] = set()
        self._done: set[tuple[str, str]] = set()
        self._failures: dict[str, int] = {}
        self._not_before: dict[str, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name="notifier", daemon=True)
        self._thread.start()

    @property
    def receivers(self) -> list[str]:
        return list(self._services)

    def offer(self, notice: Notice) -> None:
        """Queues a notice unless it is queued, was delivered, its receiver is in a pause after a failure, or the queue
        is full. Never blocks."""
        item = (notice.alert.id, notice.mark)
        with self._lock:
            if item in self._waiting or item in self._done or notice.receiver not in self._services:
                return
            if time.monotonic() < self._not_before.get(notice.receiver, 0.0):
                return
            try:
                self._queue.put_nowait(notice)
            except queue.Full:
                return
            self._waiting.add(item)

    def delivered(self) -> dict[str, set[str]]:
        """Marks of delivered notices by alert id, until ``forget``."""
        with self._lock:
            found: dict[str, set[str]] = {}
            for alert_id, mark in self._done:
                found.setdefault(alert_id, set()).add(mark)
            return found

    def forget(self, alert_id: str) -> None:
        """The alert is over and its record is gone."""
        with self._lock:
            self._done = {item for item in self._done if item[0] != alert_id}

    def close(self) -> None:
        """Stops the worker. Waits for the notice it is sending, not for the queued ones: the next leader sends them."""
        self._stopping.set()
        try:
            self._queue.put_nowait(None)
        except queue.Full:
            pass  # the worker looks at the flag after each notice
        self._thread.join(self._timeout_s + 1.0)

    def _work(self) -> None:
        while not self._stopping.is_set():
            notice = self._queue.get()
            if notice is None:
                return
            ok = self._send(notice)
            _DELIVERED.labels("ok" if ok else "failed").inc()
            item = (notice.alert.id, notice.mark)
            with self._lock:
                self._waiting.discard(item)
                if ok:
                    self._done.add(item)
                    self._failures[notice.receiver] = 0
                else:
                    failures = self._failures[notice.receiver] = self._failures.get(notice.receiver, 0) + 1
                    pause = min(_BACKOFF_S[1], _BACKOFF_S[0] * 2.0 ** min(failures - 1, 8))
                    self._not_before[notice.receiver] = time.monotonic() + pause

    def _send(self, notice: Notice) -> bool:
        title, body = text(self._job, notice)
        kind = {Severity.INFO: NotifyType.INFO, Severity.WARNING: NotifyType.WARNING,
                Severity.ERROR: NotifyType.FAILURE}[notice.alert.severity]
        if notice.phase is Phase.RESOLVED:
            kind = NotifyType.SUCCESS
        try:
            # The result object is falsy for everything but success; `is False` would never match.
            ok = bool(self._services[notice.receiver].notify(body=body, title=title, notify_type=kind,
                                                             timeout=self._timeout_s))
        except (AppriseImproperlyConfigured, OSError, ValueError, TypeError) as e:
            log.warning("receiver %s: %s", notice.receiver, type(e).__name__)
            return False
        if not ok:
            log.warning("receiver %s did not take alert %s (%s)", notice.receiver, notice.alert.id, notice.phase)
        return ok


def text(job: str, notice: Notice) -> tuple[str, str]:
    """Title and body of a notice. Delivery is at least once; the id in the body tells a repetition from a new alert."""
    alert = notice.alert
    title = f"[{notice.phase.upper()}] {job}: {alert.kind} {alert.subject}"
    lines = [alert.message]
    if notice.phase is Phase.RESOLVED:
        lines.append(f"over after {max(0.0, alert.resolved_at - alert.since):.1f} s")
    lines.append(f"id={alert.id} phase={notice.phase} severity={alert.severity} job={job} host={socket.gethostname()}")
    return title, "\n".join(lines)
