"""Which workers a router lacks and which it has too many of, compared with the engines in etcd. Pure.

An engine adds itself to the router before its record says READY, and removes itself after its record says that it
leaves, so record and list differ for a moment in normal work. What one comparison shows is therefore not confirmed;
what two in a row show is changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass, field

from elastic_rl.etcd.records import Engine, EngineState

_OWN = (EngineState.STARTING, EngineState.SYNCING, EngineState.READY, EngineState.DRAINING)


@dataclass(frozen=True)
class Routes:
    """What the records of one reading say. ``owned`` holds every URL of ``routable``."""

    routable: frozenset[str] = frozenset()
    """URLs of engines that are READY: they take requests."""
    owned: frozenset[str] = frozenset()
    """URLs of engines that add or remove themselves."""
    behind: Mapping[str, float] = field(default_factory=dict)
    """URL → since when, by the leader's clock, of engines that are behind and are to get no requests: they may be in a
    pull, and not know it. In none of the two above."""
    named: frozenset[str] = frozenset()
    """URLs of all engines that have a record, also of those that are gone."""

    @classmethod
    def from_engines(cls, engines: Iterable[Engine], epoch: int) -> Routes:
        """The routes to the engines of an epoch; those of an older one are gone, whatever their records say."""
        known = [e for e in engines if e.url]
        mine = [e for e in known if e.epoch == epoch]
        behind = {e.url: e.straggler.since for e in mine if e.state.serving and e.is_behind and e.straggler is not None}
        return cls(frozenset(e.url for e in mine if e.state is EngineState.READY) - behind.keys(),
                   frozenset(e.url for e in mine if e.state in _OWN) - behind.keys(), behind,
                   frozenset(e.url for e in known))


@dataclass(frozen=True)
class Unconfirmed:
    """Differences that one comparison has shown."""

    missing: frozenset[str] = frozenset()
    surplus: frozenset[str] = frozenset()


@dataclass(frozen=True)
class WorkerChanges:
    add: frozenset[str] = frozenset()
    remove: frozenset[str] = frozenset()


def compare(routes: Routes, listed: Set[str], before: Unconfirmed, *, is_new: bool = False
            ) -> tuple[WorkerChanges, Unconfirmed]:
    """What to change in a router whose workers are ``listed``, and what to look at again next time.

    ``before``: what the previous comparison found first. ``is_new``: the router has just started, so nothing has
    removed anything from it, and what is missing is added at once. What is changed is no longer unconfirmed: if the
    router forgets the change, it takes two comparisons again until it is asked once more. One comparison is enough for
    an engine that is behind, which does not join the router.
    """
    missing, surplus = routes.routable - listed, frozenset(listed) - routes.owned
    changes = WorkerChanges(missing if is_new else missing & before.missing,
                            surplus & (before.surplus | routes.behind.keys()))
    return changes, Unconfirmed(missing - changes.add, surplus - changes.remove)
