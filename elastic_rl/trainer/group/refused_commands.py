"""Tells ranks that have ended for a command which needs too much memory from ranks that have failed."""

from __future__ import annotations

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import LeaderKeys


class RefusedCommands:
    """The commands of a trainer group for which its ranks have ended, by the events that these leave before."""

    def __init__(self, etcd: EtcdClient, keys: LeaderKeys, group: str) -> None:
        self._etcd, self._keys = etcd, keys
        self._kind = event_kinds.TRAINER_GROUP_EVENTS[group].refused.name
        self._known: frozenset[str] = frozenset()
        """Ids of the events that were seen."""
        self.take()

    def take(self) -> bool:
        """Whether there is one that was not there before. Without etcd there is none."""
        try:
            found = frozenset(e.id for e in events.recent(self._etcd, self._keys) if e.kind == self._kind)
        except EtcdUnavailable:
            return False
        new, self._known = found - self._known, found
        return bool(new)
