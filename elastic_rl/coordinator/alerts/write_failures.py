"""Notifies while etcd accepts no writes, because its space is used up, say. Every other notification is written to etcd
before it is sent; these are kept in memory only, so a change of the leader may repeat one."""

from __future__ import annotations

import time
from collections.abc import Callable

from apprise import NotifyType

from elastic_rl.coordinator.alerts.controller import Sender
from elastic_rl.coordinator.alerts.notifier import Notification

_REPEAT_S = 3600.0
_RETRY_S = 30.0
_HOLD_S = 5.0
"""Writes must have been refused for this long."""


class WriteFailureNotifier:
    def __init__(self, sender: Sender, clock: Callable[[], float] = time.monotonic, *, kind: str = "etcd.refuses",
                 subject: str = "etcd", consequence: str = "Until it accepts writes, no other alert is sent and the "
                 "job cannot be changed.", resolved: str = "etcd accepts writes again.") -> None:
        """``kind`` and ``subject``: those of the notification; ``consequence`` and ``resolved``: what it says of
        the fault while it lasts, and when it is over."""
        self._sender, self._clock = sender, clock
        self._id, self._subject, self._consequence, self._resolved = kind, subject, consequence, resolved
        self._since = 0.0
        self._notified_at: dict[str, float] = {}  # by receiver

    def failed(self, reason: str) -> None:
        """etcd refused a write. Notifies each receiver once an hour."""
        now = self._clock()
        self._since = self._since or now
        if now - self._since < _HOLD_S:
            return
        for receiver in self._sender.receivers:
            last = self._sender.last_result(receiver.name)
            repeat_s = _RETRY_S if last is not None and last.group_id == self._id and not last.ok else _REPEAT_S
            notified_at = self._notified_at.get(receiver.name)
            body = f"{reason}\n{self._consequence}"
            if (notified_at is None or now - notified_at >= repeat_s) and self._send(
                    receiver.name, "FIRING", body, NotifyType.FAILURE):
                self._notified_at[receiver.name] = now

    def succeeded(self) -> None:
        """A pass of the leader wrote to etcd."""
        self._since = 0.0
        for name in list(self._notified_at):
            if self._send(name, "RESOLVED", self._resolved, NotifyType.SUCCESS):
                del self._notified_at[name]

    def _send(self, name: str, phase: str, body: str, kind: NotifyType) -> bool:
        title = f"[{phase}] {self._sender.job}: {self._id} {self._subject}"
        return self._sender.send(name, Notification(self._id, 0, title, body, kind))
