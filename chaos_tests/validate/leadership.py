"""I1: at most one effective leader, and no write of a stale one. Pure checks of the store's history."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from chaos_tests.event_log import Event
from chaos_tests.validate.replay import FIRST_REVISION, KeyChange, Transaction, below
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.keys import ClusterKeys, Keys

_JOB, _CLUSTER = Keys("j"), ClusterKeys("c")
_LEADERS, _EVENTS, _POOLS = below(_CLUSTER.leader_prefix()), below(_JOB.events_prefix()), below(_JOB.pools_prefix())
_LEADERSHIP, _HEARTBEAT = below(_JOB.leadership()), below(_JOB.leader_heartbeat())


class Election:
    """Which replica leads: the candidate with the lowest create revision."""

    def __init__(self, *, from_the_start: bool) -> None:
        self.from_the_start = from_the_start
        """Whether all candidates were seen. Where not, a leader is known from its own word on, and until its key is
        deleted: an older candidate cannot have been there, and a younger one may."""
        self.leader = ""
        self.terms = list[tuple[int, str]]()
        """(first revision, replica) of each term."""
        self._candidates = dict[str, int]()

    @property
    def term(self) -> int:
        """The create revision of the leader's key."""
        return self._candidates.get(self.leader, 0)

    @property
    def known(self) -> bool:
        return self.from_the_start or bool(self.leader)

    def candidate(self, name: str, create: int | None) -> None:
        """A candidate's key as it is now; None: it was deleted."""
        if create is None:
            self._candidates.pop(name, None)
        else:
            self._candidates[name] = create

    def decide(self, revision: int) -> None:
        """The changes of a transaction are complete."""
        if not self.from_the_start:
            self.leader = self.leader if self.leader in self._candidates else ""
            return
        now = min(self._candidates, key=lambda name: self._candidates[name], default="")
        if now and now != self.leader:
            self.terms.append((revision, now))
        self.leader = now

    def said(self, replica: str, term: int) -> None:
        """A record that only the leader writes was written, where the leader is not known."""
        self._candidates[replica], self.leader = term, replica


class Leaders(Checker):
    """What was written as the leader was written by the one that led, each term is announced once at most, and a pool
    changes together with its event."""

    rule = "I1"
    keys = (_LEADERS, _LEADERSHIP, _HEARTBEAT, _EVENTS, _POOLS)
    judges = "writes of leaders that were known"

    def __init__(self, first_revision: int = 0) -> None:
        """``first_revision``: from which on the changes were seen; 0: that of the first one."""
        super().__init__()
        self._elections = dict[str, Election]()
        """The elections by the scope of their cluster."""
        self._cluster: str | None = None
        self._announced, self._desired = dict[str, list[Event]](), dict[str, int]()
        self._first = first_revision

    def begin(self, run: Event) -> None:
        super().begin(run)
        name = self.settings.get("cluster")
        self._cluster = ClusterKeys(str(name)).root if name else None

    def gap(self, first: int, last: int) -> None:
        self._first = self._first or FIRST_REVISION
        self._elections = {scope: Election(from_the_start=False) for scope in self._elections}
        self._announced.clear()
        self._desired.clear()

    def transaction(self, found: Transaction) -> None:
        self._first = self._first or found.revision
        for change in found.changes:
            self._job_write(found, change)
        elected = {change.scope for change in found.changes if change.name.startswith(_LEADERS)}
        for scope in elected:
            self._cluster = self._cluster or scope
            election = self._election(scope)
            for change in found.changes:
                if change.scope == scope and change.name.startswith(_LEADERS):
                    election.candidate(change.name.removeprefix(_LEADERS),
                                       change.event["create"] if change.put else None)
            election.decide(found.revision)

    def terms(self, scope: str) -> list[tuple[int, str]]:
        """Revision and leader of each term of the cluster whose keys have this root."""
        return self._election(scope).terms

    def _election(self, scope: str) -> Election:
        return self._elections.setdefault(scope, Election(from_the_start=self._first < FIRST_REVISION))

    def _job_write(self, found: Transaction, change: KeyChange) -> None:
        if change.name.startswith(_POOLS) and change.name.endswith("/spec") and change.put and "desired" in change.new:
            before, desired = self._desired.get(change.key), int(change.new["desired"])
            self._desired[change.key] = desired
            # The driver that takes over writes other fields of it again.
            if before is not None and not change.created and desired != before and not any(
                    other.scope == change.scope and other.name.startswith(_EVENTS) for other in found.changes):
                self.violated(f"{change.at()}: the pool changed without its event", change.event)
        if not (change.put and (wrote := _writer(change.name, change.new))):
            return
        election = self._election(self._cluster or ClusterKeys(change.job).root)
        term = change.new.get("term")
        if not election.known:
            if isinstance(term, int):
                election.said(wrote, term)
            return
        self.judged += 1
        if wrote != election.leader:
            self.violated(f"{change.at()} was written by {wrote} while {election.leader or 'no replica'} led",
                          change.event)
        elif change.name in (_LEADERSHIP, _HEARTBEAT) and term != election.term:
            self.violated(f"{change.at()} was written in term {term} while {wrote} led in term {election.term}",
                          change.event)
        if change.name == _LEADERSHIP and election.from_the_start:
            announced = self._announced.setdefault(change.scope, [])
            announced.append(change.event)
            if len(announced) > len(election.terms) and wrote == election.leader:
                self.violated(f"{change.at()}: of {len(election.terms)} terms {len(announced)} were announced",
                              change.event)


def _writer(name: str, record: Mapping[str, Any]) -> str:
    """The replica that wrote a record as the leader, by what it says; "" where it does not say."""
    if name in (_LEADERSHIP, _HEARTBEAT):
        return str(record.get("replica", ""))
    if name.startswith(_EVENTS):
        if record.get("kind") == "pool.scaled":
            return str((record.get("data") or {}).get("replica", ""))
        if record.get("kind") == "leader.elected":
            return str(record.get("subject", ""))
    return ""


CHECKERS: tuple[type[Checker], ...] = (Leaders,)
