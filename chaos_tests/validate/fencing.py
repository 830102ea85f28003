"""I1 of the fencing tokens: epochs, generations of drivers and assignments, terms, formations and restarts only grow,
and what names one was written while it was the present one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from chaos_tests.validate.replay import KeyChange, Transaction, below
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.etcd.keys import ClusterKeys, Keys

_JOB, _CLUSTER = Keys("j"), ClusterKeys("c")
_EPOCH, _LEADERSHIP = below(_JOB.epoch()), below(_JOB.leadership())
_NUMBERED = (_EPOCH, below(_JOB.driver()), below(_JOB.actor_term()))
_FORMATIONS, _RESTARTS = below(_JOB.formation("")), below(_JOB.restarts_prefix())
_ASSIGNMENTS, _RUN_STATUSES = below(_CLUSTER.assignments_prefix()), below(_CLUSTER.run_statuses_prefix())
_HOSTS, _HOST_STATES = below(_CLUSTER.hosts_prefix()), below(_CLUSTER.host_states_prefix())
_GONE = (HostPhase.DRAINING.value, HostPhase.LEFT.value, HostPhase.LOST.value)
"""Phases of a host from which what it holds moves."""
_FIT = (HostPhase.READY.value,)
"""Phases in which a host is given something."""


class Tokens(Checker):
    """The epoch, the driver's generation and the actor's term count up by one with each put, over the whole run, and
    the term of the leadership grows. They are deleted with their job alone."""

    rule = "I1"
    keys = (*_NUMBERED, _LEADERSHIP)
    judges = "fencing tokens"

    def __init__(self) -> None:
        super().__init__()
        self._last = dict[str, int]()

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name not in _NUMBERED and change.name != _LEADERSHIP:
                continue
            key, before = change.key, self._last.get(change.key)
            if not change.put:
                kept = any(change.scope + name in found.after.present for name in self.keys)
                if kept and not found.ended(change.scope):
                    self.violated(f"{change.at()} was deleted: its numbers begin again", change.event)
                self._last.pop(key, None)
                continue
            number = change.new.get("term" if change.name == _LEADERSHIP else "number")
            if not isinstance(number, int):
                continue
            self.judged += 1
            if change.name == _LEADERSHIP or change.past_unseen:  # the numbers between are those of others, or unseen
                if number < (before or 0) or number == before and change.past_unseen and change.name != _LEADERSHIP:
                    self.violated(f"{change.at()} is {number} after {before}", change.event)
            elif before is not None and number != before + 1:
                self.violated(f"{change.at()} is {number} after {before}", change.event)
            elif before is None and change.created and number != 1:
                self.violated(f"{change.at()} begins with {number}", change.event)
            self._last[key] = max(number, before or 0)


class Formations(Checker):
    """A trainer group's formation is of the present epoch, and no formation is deleted while its job is there: its
    number is the version of its key."""

    rule = "I1"
    keys = (_FORMATIONS,)
    judges = "formations of trainers"

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if not change.name.startswith(_FORMATIONS):
                continue
            epoch = found.before(change.scope + _EPOCH).get("number")
            self.judged += 1
            if not change.put:
                if found.after.get(change.scope + _EPOCH):
                    self.violated(f"{change.at()} was deleted, so that its numbers are given out again", change.event)
            elif epoch is not None and change.new and change.new["epoch"] != epoch:
                self.violated(f"{change.at()} of epoch {change.new['epoch']} was written in epoch {epoch}",
                              change.event)


class Restarts(Checker):
    """Each restart request of a target has the next number; what was carried out stays so, and none is carried out that
    was not requested."""

    rule = "I1"
    keys = (_RESTARTS,)
    judges = "requests of restarts"

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if not change.name.startswith(_RESTARTS) or not change.new:
                continue
            old, new = change.old, change.new
            done, done_before = (record.get("observed_generation", 0) for record in (new, old))
            self.judged += 1
            if done > new["generation"]:
                self.violated(f"{change.at()}: request {done} of {new['generation']} was carried out", change.event)
            elif old and not 0 <= new["generation"] - old["generation"] <= 1:
                self.violated(f"{change.at()} went from request {old['generation']} to {new['generation']}",
                              change.event)
            elif old and done < done_before:
                self.violated(f"{change.at()}: request {done_before} is open again", change.event)


@dataclass(frozen=True)
class Held:
    """An assignment, as of one revision."""

    generation: int
    host: str
    incarnation: str


class Holders:
    """Who holds each assignment, as far as its past was seen, and with it its generation."""

    def __init__(self) -> None:
        self._held = dict[str, Held]()

    def forget(self) -> None:
        self._held.clear()

    def of(self, key: str) -> Held | None:
        """The assignment under a key; None where it is not known."""
        return self._held.get(key)

    def change(self, change: KeyChange) -> tuple[Held, Held] | None:
        """What an assignment was and is; None where it was deleted, or its past is unseen."""
        before = self._held.pop(change.key, None)
        if not change.put or (before is None and not change.created):
            return None
        before = before if before is not None else Held(0, "", "")
        now = self._held[change.key] = Held(before.generation + 1, str(change.new.get("host", "")),
                                          str(change.new.get("incarnation", "")))
        return before, now


class Assignments(Checker):
    """A singleton has one key, whose version is its generation: the key is never deleted, or a generation would be
    given out twice. It is given to a host that is fit, and moves from one that lives only where that has failed it. The
    run's status is written by the holder of the present generation alone."""

    rule = "I1"
    keys: ClassVar[tuple[str, ...]] = (_ASSIGNMENTS, _RUN_STATUSES, _HOSTS)
    judges = "assignments, and statuses of runs of known ones"

    def __init__(self) -> None:
        super().__init__()
        self._holders, self._incarnations = Holders(), dict[str, str]()

    def gap(self, first: int, last: int) -> None:
        self._holders.forget()
        self._incarnations.clear()

    def transaction(self, found: Transaction) -> None:
        before = {key: self._holders.of(key) for key in map(_assignment_of, found.changes) if key}
        for change in found.changes:
            if change.name.startswith(_HOSTS) and change.new:
                self._incarnations[change.key] = str(change.new.get("incarnation", ""))
        for change in found.changes:
            if change.name.startswith(_ASSIGNMENTS):
                self.judged += 1
                self._assigned(found, change)
        for change in found.changes:
            if change.name.startswith(_RUN_STATUSES) and (written := change.new.get("generation", 0)):
                now = before[_assignment_of(change)]
                self.judged += now is not None
                if now is not None and written != now.generation:
                    self.violated(f"{change.at()} was written under generation {written} in generation "
                                  f"{now.generation}", change.event)

    def _assigned(self, found: Transaction, change: KeyChange) -> None:
        changed = self._holders.change(change)
        if not change.put:
            self.violated(f"{change.at()} was deleted: its generations begin again", change.event)
        if changed is None or not changed[1].host:
            return
        before, now = changed
        phases = {host: found.after.get(f"{change.scope}{_HOST_STATES}{host}").get("phase") for host in (
            before.host, now.host)}
        lives = phases[before.host] not in (None, *_GONE) and self._incarnations.get(
            f"{change.scope}{_HOSTS}{before.host}") == before.incarnation
        if phases[now.host] not in (None, *_FIT):
            self.violated(f"{change.at()} was given to {now.host}, which is {phases[now.host]}", change.event)
        elif before.host not in ("", now.host) and lives and before.host not in {
                failed["host"] for failed in change.new.get("failed", [])}:
            self.violated(f"{change.at()} was taken from {before.host}, which is {phases[before.host]}, and given to "
                          f"{now.host}", change.event)


def _assignment_of(change: KeyChange) -> str:
    """The key of the assignment of which a run's status is; "" for another key."""
    if not change.name.startswith(_RUN_STATUSES):
        return ""
    return f"{change.scope}{_ASSIGNMENTS}driver/{change.name.removeprefix(_RUN_STATUSES)}"


CHECKERS: tuple[type[Checker], ...] = (Tokens, Formations, Restarts, Assignments)
