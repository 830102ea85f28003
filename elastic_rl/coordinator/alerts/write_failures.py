"""What is told past etcd, because etcd takes no writes (its space is used up, say): every other notice is written down
before it is sent. In memory only, so a change of the leader may repeat it."""

from __future__ import annotations

import time
from collections.abc import Callable

from apprise import NotifyType

from elastic_rl.coordinator.alerts.controller import Sender
from elastic_rl.coordinator.alerts.notifier import Notification

_AGAIN_S = 3600.0
_RETRY_S = 30.0
_SURE_S = 5.0
"""A refusal is told when writes have been refused for so long."""


class WriteFailureNotifier:
    def __init__(self, post: Sender, clock: Callable[[], float] = time.monotonic, *, kind: str = "etcd.refuses",
                 subject: str = "etcd", consequence: str = "Until it takes writes again nothing else is told, and the "
                 "job cannot be changed.", resolved: str = "etcd takes writes again.") -> None:
        """``kind`` and ``subject``: of the notification; ``consequence`` and ``resolved``: what it says of the fault
        while it lasts, and when it is over."""
        self._post, self._clock = post, clock
        self._id, self._subject, self._consequence, self._resolved = kind, subject, consequence, resolved
        self._since = 0.0
        self._told: dict[str, float] = {}  # when, by receiver

    def tell(self, reason: str) -> None:
        """Writes are refused. Told once an hour to whoever is free to take it."""
        now = self._clock()
        self._since = self._since or now
        if now - self._since < _SURE_S:
            return
        for receiver in self._post.receivers:
            last = self._post.outcome(receiver.name)
            again = _RETRY_S if last is not None and last.parcel == self._id and not last.ok else _AGAIN_S
            due = receiver.name not in self._told or now - self._told[receiver.name] >= again
            body = f"{reason}\n{self._consequence}"
            if due and self._send(receiver.name, "FIRING", body, NotifyType.FAILURE):
                self._told[receiver.name] = now

    def over(self) -> None:
        """A look went through."""
        self._since = 0.0
        for name in list(self._told):
            if self._send(name, "RESOLVED", self._resolved, NotifyType.SUCCESS):
                del self._told[name]

    def _send(self, name: str, phase: str, body: str, kind: NotifyType) -> bool:
        title = f"[{phase}] {self._post.job}: {self._id} {self._subject}"
        return self._post.send(name, Notification(self._id, 0, title, body, kind))
