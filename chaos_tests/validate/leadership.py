"""I1: at most one effective leader, and no write of a stale one. A pure check of the store's history."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

from chaos_tests.observation import Change
from elastic_rl.etcd.keys import ClusterKeys, Keys


@dataclass
class Verdict:
    """Result of the check. ``faults`` is empty if I1 held."""

    faults: list[str] = field(default_factory=list)
    terms: list[tuple[int, str]] = field(default_factory=list)
    """(first revision, replica) of each term, by the candidate keys."""
    announced: list[str] = field(default_factory=list)
    desired: dict[int, int] = field(default_factory=dict)
    """The pool's desired number by the revision of its change."""


def check(changes: Sequence[Change], keys: Keys, pool: str = "rollout", *, cluster: str = "") -> Verdict:
    """Replays the history transaction by transaction (changes of one revision belong together). ``cluster``: name of
    the job's cluster, where it has another one than the job.

    The candidate with the lowest create revision leads. What a replica wrote as the leader (a pool's change, the
    announcement of its term) must be at a revision before which it led.
    """
    of_leaders = ClusterKeys(cluster or keys.job).leader_prefix()
    verdict, candidates, leader = Verdict(), dict[str, int](), ""
    for revision, together in groupby(changes, key=lambda c: c.revision):
        batch = list(together)
        for change in batch:
            if change.key == keys.pool_spec(pool) and change.put:
                before = next(reversed(verdict.desired.values()), None)
                verdict.desired[revision] = desired = json.loads(change.value)["desired"]
                # The driver that takes over writes other fields of it again.
                if change.create != revision and desired != before and not any(
                        c.key.startswith(keys.events_prefix()) for c in batch):
                    verdict.faults.append(f"{revision}: the pool changed without its event")
            for writer in _writers(change, keys):
                if writer != leader:
                    led = leader or "no replica"
                    verdict.faults.append(f"{revision}: {change.key} was written by {writer} while {led} led")
                if change.key == keys.leadership():
                    verdict.announced.append(writer)
        for change in batch:
            if change.key.startswith(of_leaders):
                name = change.key.removeprefix(of_leaders)
                if change.put:
                    candidates[name] = change.create
                else:
                    candidates.pop(name, None)
        now = min(candidates, key=lambda n: candidates[n], default="")
        if now != leader and now:
            verdict.terms.append((revision, now))
        leader = now
    if len(verdict.announced) > len(verdict.terms):
        verdict.faults.append(f"of {len(verdict.terms)} terms {len(verdict.announced)} were announced")
    return verdict


def _writers(change: Change, keys: Keys) -> list[str]:
    """Replicas that wrote the record as the leader, by what it says."""
    if not change.put:
        return []
    if change.key == keys.leadership():
        return [json.loads(change.value)["replica"]]
    if change.key.startswith(keys.events_prefix()):
        event = json.loads(change.value)
        if event["kind"] == "pool.scaled":
            return [event["data"]["replica"]]
        if event["kind"] == "leader.elected":
            return [event["subject"]]
    return []
