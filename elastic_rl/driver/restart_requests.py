"""Restarts that the leader or an operator wants, as whoever runs the part sees them."""

from __future__ import annotations

from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import RestartRequest


def open_requests(etcd: EtcdClient, keys: Keys) -> dict[str, RestartRequest]:
    """Wishes that were not carried out yet, by target."""
    found = [RestartRequest.decode(kv.value) for kv in etcd.range(keys.restarts_prefix())[0]]
    return {wish.target: wish for wish in found if wish.done < wish.wanted}


def acknowledge(etcd: EtcdClient, keys: Keys, wish: RestartRequest, *guards: Compare) -> None:
    """Notes that a wish was carried out; a later one for the same target stays open, one that was taken back is left as
    it is. Raises Fenced when a guard does not hold."""
    def mark(raw: bytes | None) -> bytes | None:
        now = RestartRequest.decode(raw) if raw else None
        return now.replace(done=max(now.done, min(wish.wanted, now.wanted))).encode() if now else None

    etcd.update(keys.restart(wish.target), mark, guards=guards)
