"""Restarts that the leader or an operator wants, as whoever runs the part sees them."""

from __future__ import annotations

from elastic_rl.coordinator.keys import Keys
from elastic_rl.coordinator.records import Restart
from elastic_rl.coordinator.store import Compare, Store


def open_wishes(store: Store, keys: Keys) -> dict[str, Restart]:
    """Wishes that were not carried out yet, by target."""
    found = [Restart.decode(kv.value) for kv in store.range(keys.restarts_prefix())[0]]
    return {wish.target: wish for wish in found if wish.done < wish.wanted}


def carried_out(store: Store, keys: Keys, wish: Restart, *guards: Compare) -> None:
    """Notes that a wish was carried out; a later one for the same target stays open, one that was taken back is left as
    it is. Raises Fenced when a guard does not hold."""
    def mark(raw: bytes | None) -> bytes | None:
        now = Restart.decode(raw) if raw else None
        return now.but(done=max(now.done, min(wish.wanted, now.wanted))).encode() if now else None

    store.update(keys.restart(wish.target), mark, guards=guards)
