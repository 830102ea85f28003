"""Sends notifications: one thread a receiver, and a process for each notification, so that a service that is slow, dead
or hanging delays nothing but its own notifications."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from apprise import NotifyType

from elastic_rl.config import AlertConfig
from elastic_rl.coordinator.alerts import message, receivers
from elastic_rl.coordinator.alerts.receiver_queue import AttemptResult, NotificationGroup
from elastic_rl.coordinator.alerts.receivers import Receiver
from elastic_rl.coordinator.alerts.sender_process import SenderProcess, SendRequest
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase
from elastic_rl.etcd.records import Severity
from elastic_rl.telemetry import metrics

log = logging.getLogger(__name__)

_DELIVERED = metrics.counter("alert_deliveries", "Notifications given to a notification service", ("result",))
_TYPES = {Severity.INFO: NotifyType.INFO, Severity.WARNING: NotifyType.WARNING, Severity.ERROR: NotifyType.FAILURE}
NOT_LEADING = "not sent: another replica leads"


@dataclass(frozen=True)
class Notification:
    """A notification as it is sent. ``may_send`` is called right before, since a replica that was paused and has lost
    the leadership must not report what is long over."""

    group_id: str
    attempt: int
    title: str
    body: str
    type: NotifyType
    may_send: Callable[[], bool] = lambda: True


def render(job: str, group: NotificationGroup, alerts: Sequence[Alert], may_send: Callable[[], bool]) -> Notification:
    """The notification of a group, with the state that its alerts have now."""
    title, body = message.compose(job, group, alerts)
    kind = NotifyType.SUCCESS if group.phase is Phase.RESOLVED else _TYPES[message.worst(alerts)]
    return Notification(group.id, group.attempts, title, body, kind, may_send)


class _Worker:
    """Sends to one receiver, one notification at a time."""

    def __init__(self, receiver: Receiver, url: str, sender: SenderProcess, timeout_s: float,
                 done: Callable[[], None]) -> None:
        self.receiver, self._url, self._sender, self._timeout_s, self._done = receiver, url, sender, timeout_s, done
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._notification: Notification | None = None
        self.result: AttemptResult | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._work, name=f"notify-{receiver.name}", daemon=True)
        self._thread.start()

    @property
    def busy(self) -> bool:
        with self._lock:
            return self._notification is not None

    def submit(self, notification: Notification) -> bool:
        with self._lock:
            if self._notification is not None or self._stopping.is_set():
                return False
            self._notification, self.result = notification, None
        self._wake.set()
        return True

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def join(self, timeout_s: float) -> None:
        self._thread.join(timeout_s)

    def _work(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            notification = self._notification
            if self._stopping.is_set() or notification is None:
                return
            error = self._send(notification) if notification.may_send() else NOT_LEADING
            _DELIVERED.labels("failed" if error else "ok").inc()
            if error:
                log.warning("notification %s to receiver %s failed: %s", notification.group_id, self.receiver.name,
                            error)
            result = AttemptResult(notification.group_id, notification.attempt, not error, error)
            with self._lock:
                self._notification, self.result = None, result
            self._done()

    def _send(self, n: Notification) -> str:
        return self._sender.send(SendRequest(self._url, n.title, n.body, n.type.value), self._timeout_s)


class Notifier:
    """Sends notifications to the receivers. It holds only what is being sent; the caller keeps what must not be lost.

    Raises ConfigError at once for a URL that Apprise does not know.
    """

    def __init__(self, job: str, cfg: AlertConfig) -> None:
        self.job, self._timeout_s = job, cfg.send_timeout_s
        self._on_result: Callable[[], None] = lambda: None
        self._sender = SenderProcess()
        self._workers = {r.name: _Worker(r, url, self._sender, cfg.send_timeout_s, lambda: self._on_result())
                         for r, url in receivers.load(cfg).items()}
        if self._workers:
            self._sender.start()

    @property
    def receivers(self) -> list[Receiver]:
        return [w.receiver for w in self._workers.values()]

    def on_result(self, call: Callable[[], None]) -> None:
        """``call`` is called, from a worker's thread, whenever an attempt has ended."""
        self._on_result = call

    def send(self, receiver: str, notification: Notification) -> bool:
        """Starts an attempt; false while the receiver's last one still runs. Never blocks."""
        return self._workers[receiver].submit(notification)

    def busy(self, receiver: str) -> bool:
        return self._workers[receiver].busy

    def last_result(self, receiver: str) -> AttemptResult | None:
        """How the last attempt ended, until the next one starts."""
        return self._workers[receiver].result

    def close(self) -> None:
        """Stops the workers. Waits for what is being sent, within one service's timeout."""
        for worker in self._workers.values():
            worker.stop()
        end = time.monotonic() + self._timeout_s + 1.0
        for worker in self._workers.values():
            worker.join(max(0.0, end - time.monotonic()))
        self._sender.close()
