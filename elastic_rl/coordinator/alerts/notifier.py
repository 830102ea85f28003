"""Sends messages through Apprise from one worker thread a receiver, so that a notification service that is slow, dead
or hanging delays nothing but its own messages."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import apprise
from apprise import AppriseResultStatus, NotifyType
from apprise.exception import AppriseImproperlyConfigured

from elastic_rl.config import AlertConfig
from elastic_rl.coordinator.alerts import message, receivers
from elastic_rl.coordinator.alerts.delivery import NotificationGroup, Outcome
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity
from elastic_rl.telemetry import metrics

log = logging.getLogger(__name__)

_DELIVERED = metrics.counter("alert_deliveries", "Messages given to a notification service", ("result",))
_TYPES = {Severity.INFO: NotifyType.INFO, Severity.WARNING: NotifyType.WARNING, Severity.ERROR: NotifyType.FAILURE}
NOT_LEADING = "not sent: another replica leads"


@dataclass(frozen=True)
class Notification:
    """A message as it is sent. ``may_send`` is asked right before: a replica that was paused and leads no more must not
    tell what is long over."""

    parcel: str
    attempt: int
    title: str
    body: str
    type: NotifyType
    may_send: Callable[[], bool] = lambda: True


def notification(job: str, parcel: NotificationGroup, alerts: Sequence[Alert],
                 may_send: Callable[[], bool]) -> Notification:
    """The words of a parcel, with the state that its alerts have now."""
    title, body = message.compose(job, parcel, alerts)
    kind = NotifyType.SUCCESS if parcel.phase is Phase.RESOLVED else _TYPES[message.worst(alerts)]
    return Notification(parcel.id, parcel.attempts, title, body, kind, may_send)


class _Worker:
    """Sends to one receiver, one letter at a time."""

    def __init__(self, receiver: Receiver, service: apprise.Apprise, timeout_s: float,
                 done: Callable[[], None]) -> None:
        self.receiver, self._service, self._timeout_s, self._done = receiver, service, timeout_s, done
        self._lock = threading.Lock()
        self._given = threading.Event()
        self._letter: Notification | None = None
        self.outcome: Outcome | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"notify-{receiver.name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        with self._lock:
            return self._letter is not None

    def give(self, notification: Notification) -> bool:
        with self._lock:
            if self._letter is not None or self._stopping.is_set():
                return False
            self._letter, self.outcome = notification, None
        self._given.set()
        return True

    def stop(self) -> None:
        self._stopping.set()
        self._given.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            self._given.wait()
            self._given.clear()
            notification = self._letter
            if self._stopping.is_set() or notification is None:
                return
            error = self._send(notification) if notification.may_send() else NOT_LEADING
            _DELIVERED.labels("failed" if error else "ok").inc()
            if error:
                log.warning("receiver %s did not take message %s: %s", self.receiver.name, notification.parcel, error)
            with self._lock:
                self._letter, self.outcome = None, Outcome(notification.parcel, notification.attempt, not error, error)
            self._done()

    def _send(self, notification: Notification) -> str:
        """Empty when the service took the letter, else why not, without anything secret."""
        try:
            result = self._service.notify(body=notification.body, title=notification.title,
                                          notify_type=notification.type,
                                          timeout=self._timeout_s)
        except (AppriseImproperlyConfigured, OSError, ValueError, TypeError) as e:
            return type(e).__name__
        if result:  # falsy for everything but success; `is False` would never match
            return ""
        timed_out = result.status == AppriseResultStatus.TIMEOUT
        return f"no answer within {self._timeout_s:g} s" if timed_out else "the service refused it or cannot be reached"


class Notifier:
    """Gives letters to the receivers. The caller keeps what must not be lost; here is only what is being sent.

    Raises ConfigError at once for a URL that Apprise does not understand.
    """

    def __init__(self, job: str, cfg: AlertConfig) -> None:
        self.job, self._timeout_s = job, cfg.timeout_s
        self._on_outcome: Callable[[], None] = lambda: None
        self._workers = {r.name: _Worker(r, service, cfg.timeout_s, lambda: self._on_outcome())
                         for r, service in receivers.load(cfg).items()}

    @property
    def receivers(self) -> list[Receiver]:
        return [w.receiver for w in self._workers.values()]

    def on_outcome(self, call: Callable[[], None]) -> None:
        """``call`` is called, from a worker's thread, whenever an attempt has ended."""
        self._on_outcome = call

    def send(self, receiver: str, notification: Notification) -> bool:
        """Begins to send; False when the receiver is still being sent something. Never blocks."""
        return self._workers[receiver].give(notification)

    def busy(self, receiver: str) -> bool:
        return self._workers[receiver].busy

    def outcome(self, receiver: str) -> Outcome | None:
        """How the last attempt ended, until the next one begins."""
        return self._workers[receiver].outcome

    def close(self) -> None:
        """Stops the workers. Waits for what is being sent, within one service's time."""
        for worker in self._workers.values():
            worker.stop()
        end = time.monotonic() + self._timeout_s + 1.0
        for worker in self._workers.values():
            worker.join(max(0.0, end - time.monotonic()))
