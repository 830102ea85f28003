"""What is told past etcd, because etcd takes no writes (its space is used up, say): every other notice is written down
before it is sent. In memory only, so a change of the leader may repeat it."""

from __future__ import annotations

import time
from collections.abc import Callable

from apprise import NotifyType

from elastic_rl.coordinator.alerts.controller import Sender
from elastic_rl.coordinator.alerts.notifier import Notification

_ID = "etcd.refuses"
_AGAIN_S = 3600.0
_RETRY_S = 30.0
_SURE_S = 5.0
"""A refusal is told when writes have been refused for so long."""


class WriteFailureNotifier:
    def __init__(self, post: Sender, clock: Callable[[], float] = time.monotonic) -> None:
        self._post, self._clock = post, clock
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
            again = _RETRY_S if last is not None and last.parcel == _ID and not last.ok else _AGAIN_S
            due = receiver.name not in self._told or now - self._told[receiver.name] >= again
            body = f"{reason}\nUntil it takes writes again nothing else is told, and the job cannot be changed."
            if due and self._send(receiver.name, "FIRING", body, NotifyType.FAILURE):
                self._told[receiver.name] = now

    def over(self) -> None:
        """A look went through."""
        self._since = 0.0
        for name in list(self._told):
            if self._send(name, "RESOLVED", "etcd takes writes again.", NotifyType.SUCCESS):
                del self._told[name]

    def _send(self, name: str, phase: str, body: str, kind: NotifyType) -> bool:
        title = f"[{phase}] {self._post.job}: {_ID} etcd"
        return self._post.send(name, Notification(_ID, 0, title, body, kind))
