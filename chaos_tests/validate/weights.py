"""I4 and I5 of the versions that samples name: engines had them, with a checksum, and they are as old as is said."""

from __future__ import annotations

import math
from bisect import bisect_right, insort
from typing import ClassVar

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.replay import OBSERVER_LATE_S, KeyChange, Transaction, below
from chaos_tests.validate.training import StepChecker, proof
from chaos_tests.validate.verdict import Checker
from elastic_rl.etcd.keys import Keys

_JOB = Keys("j")
_ENGINES, _POOLS = below(_JOB.engines_prefix()), below(_JOB.pools_prefix())
_VERSIONS = below(_JOB.versions_prefix("policy"))
_LEAVING, _UNDER_WAY_S = ("syncing", "draining"), 300.0
"""States of an engine that was ready and takes no further requests, and how long those may last that are under way: it
goes on to follow the head meanwhile."""
_SAME_BY_CHANCE = 2
"""Versions of the same weights may have manifests that differ: other ranks have cut them into chunks."""


class Checksums(Checker):
    """Each version that an engine of a job that trains has applied, but the first of a runner, has a checksum, which is
    the same in all engines of one layout, and another one than that of other weights."""

    rule = "I4"
    reads = frozenset({Kind.STEP})
    keys = (_ENGINES, _POOLS, _VERSIONS)
    judges = "checksums of versions in engines"

    def __init__(self) -> None:
        super().__init__()
        self._first = dict[tuple[str, str], int]()
        """The version that each runner of an engine had first."""
        self._known = dict[tuple[str, str, int], tuple[str, Event]]()
        self._without, self._trains = list[tuple[KeyChange, int]](), False
        self._manifests = dict[tuple[str, int], str]()
        """Manifest of each committed version of the policy, by its job."""
        self._of_policy = dict[tuple[str, str, str], set[int]]()
        """(job, layout, checksum) → versions of the policy."""

    def see(self, event: Event) -> None:
        self._trains = True

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for change, version in self._without if self._trains or self._known else ():
            self.violated(f"{change.at()} is ready with version {version} and has no checksum of it", change.event)
        for (job, _, checksum), versions in self._of_policy.items():
            different = {self._manifests[job, version]: version for version in versions
                         if (job, version) in self._manifests}
            if len(different) > _SAME_BY_CHANCE:
                self.violated(f"{len(different)} versions of different weights have the one checksum {checksum} in "
                              f"engines, such as {' and '.join(map(str, sorted(different.values())[:2]))}")

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            new = change.new
            if change.name.startswith(_ENGINES) and new and not new.get("external") and isinstance(
                    version := new.get("version"), int) and version:
                first = self._first.setdefault((change.key, str(new.get("incarnation", ""))), version)
                if not new.get("applying"):
                    self._checksum(change, version, first=version == first)
                    spec = found.after.get(f"{change.scope}{_POOLS}{new.get('pool', '')}/spec")
                    if new.get("checksum") and spec.get("stream", "policy") == "policy":
                        self._of_policy.setdefault(
                            (change.scope, str(new.get("layout", "")), str(new["checksum"])), set()).add(version)
            elif change.name.startswith(_VERSIONS) and new.get("state") == "committed" and new.get("manifest"):
                self._manifests[change.scope, int(new.get("number") or 0)] = str(new["manifest"])

    def _checksum(self, change: KeyChange, version: int, *, first: bool) -> None:
        checksum = str(change.new.get("checksum") or "")
        if not checksum:
            if not first and change.new.get("state") == "ready" and change.old.get("version") != version:
                self._without.append((change, version))
            return
        of = (change.scope, str(change.new.get("layout", "")), version)
        if of not in self._known:
            self.judged += 1
        known, by = self._known.setdefault(of, (checksum, change.event))
        if known != checksum:
            self.violated(f"{change.at()} has the checksum {checksum} of version {version}, and another engine of its "
                          f"layout {known}", by, change.event)


class VersionsOfSamples(Checker):
    """Each version that samples name was, before their step, in an engine of the policy that was ready: also one that
    an engine got which was about to leave, and had requests under way."""

    rule = "I4"
    reads: ClassVar[frozenset[Kind]] = frozenset({Kind.STEP})
    keys = (_ENGINES, _POOLS)
    judges = "versions of samples that engines had"
    lacks = "the log has no steps with the versions of their samples, or no engines"

    def __init__(self) -> None:
        super().__init__()
        self._had = dict[int, float]()
        """Version → when an engine that was ready was first seen to have it."""
        self._ready = dict[str, tuple[str, float]]()
        """Key of an engine → its runner that is, or was, ready, and when it was last seen to be."""
        self._first, self._before = math.inf, 0
        """The oldest version that an engine had; and the newest that one had whose records before were not seen."""
        self._named = dict[int, Event]()
        """Version → the first step that names it."""
        self._gaps = False

    def gap(self, first: int, last: int) -> None:
        self._gaps = True

    def transaction(self, found: Transaction) -> None:
        for change in found.changes:
            if change.name.startswith(_ENGINES):
                spec = found.after.get(f"{change.scope}{_POOLS}{change.new.get('pool', '')}/spec")
                if spec.get("stream", "policy") == "policy":
                    self._engine(change, found.at)

    def _engine(self, change: KeyChange, at: float) -> None:
        runner, state = str(change.new.get("incarnation", "")), change.new.get("state")
        if state == "ready":
            self._ready[change.key] = (runner, at)
        elif state not in _LEAVING or self._ready.get(change.key, ("", 0.0))[0] != runner:
            self._ready.pop(change.key, None)
        if not (version := int(change.new.get("version") or 0)):
            return
        self._first = min(self._first, version)
        if change.past_unseen:
            self._before = max(self._before, version)
        if change.key in self._ready and at <= self._ready[change.key][1] + _UNDER_WAY_S:
            self._had.setdefault(version, at)

    def see(self, event: Event) -> None:
        for version in event.get("sample_versions") or ():
            self._named.setdefault(int(version), proof(event, "sample_versions", "policy_version"))

    def finish(self, end: Event | None) -> None:
        super().finish(end)
        for version, step in self._named.items() if not self._gaps else ():
            if version < self._first or version <= self._before:
                continue  # there are no engines, or one had it before the log began
            self.judged += 1
            at = self._had.get(version)
            if at is None or at > float(step["at"]) + OBSERVER_LATE_S:
                self.violated(f"step {step['step']} has samples of version {version}, which no engine had that was "
                              "ready", step)


class StatedStaleness(StepChecker):
    """The staleness of a step is that of its oldest sample: at least as many versions as steps have made since that
    one, at most as many as there are up to the step's own. Each step that trains makes a newer version, and one whose
    samples were compared names their versions."""

    rule = "I5"

    def __init__(self) -> None:
        super().__init__()
        self._made, self._last, self._judged = list[int](), 0, 0
        """Versions that steps have made, in the order of their numbers; that of the last record."""

    def step(self, record: Event) -> None:
        made, named = record.get("policy_version"), [*map(int, record.get("sample_versions") or ())]
        what = f"step {record['step']}"
        if not isinstance(made, int):
            return
        if not named and record.get("logprob_diff_max") is not None:
            self._wrong(record, f"{what} has samples that were compared, and names no version of them")
        elif record.get("loss") is not None and made <= self._last:
            self._wrong(record, f"{what} has made version {made} of the policy, after version {self._last}")
        elif named and record.get("loss") is not None and max(named) >= made:
            self._wrong(record, f"{what} has samples of version {max(named)}, and has made version {made} of them")
        elif named and isinstance(stated := record.get("staleness"), int):
            self._judged += 1
            most = max(0, made - 1 - min(named))
            least = bisect_right(self._made, made - 1) - bisect_right(self._made, min(named))
            if not least <= stated <= most:
                self._wrong(record, f"{what} has a staleness of {stated}, and its oldest sample is of version "
                                    f"{min(named)}, of {most} before its own version {made}")
        if made not in self._made[-1:]:
            insort(self._made, made)
        self._last = made

    def _wrong(self, record: Event, what: str) -> None:
        self.violated(what, proof(record, "policy_version", "sample_versions", "staleness"))

    def evidence(self) -> str:
        return f"the staleness of {self._judged} steps" if self._judged else ""


CHECKERS: tuple[type[Checker], ...] = (Checksums, VersionsOfSamples, StatedStaleness)
