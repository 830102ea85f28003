"""At which revision of etcd the leader takes a member to have run: what has registered later replaces it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl.config import parse
from elastic_rl.coordinator.membership.controller import MembershipController
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Member

KEYS = Keys("j")
REGISTERED = 5


class Leader:
    """The leader's view of one member, from snapshots."""

    def __init__(self) -> None:
        etcd: Any = None
        self.controller = MembershipController(etcd, KEYS, parse({"job": "j"}), lambda *_: None, lambda *_: True)
        self.beats = 0

    def sees(self, noted: int | None, *, now: int, written: int = REGISTERED) -> int:
        """A new heartbeat. ``noted``: the revision that its agent has noted; None: it collects nothing. ``now``: that
        of etcd. ``written``: that of the member's record. Returns the one at which the leader takes it to have run."""
        self.beats += 1
        member = Member(role="engine", id="e", incarnation="i", pid=1, host="h", beat_at=100.0 + self.beats,
                        progress_at=100.0, beats=self.beats)
        snapshot: Any = SimpleNamespace(
            members=[member], nodes={}, read_at=now, revision=lambda key: written,
            created=lambda key: REGISTERED, alive_revisions={"i": noted} if noted is not None else {})
        self.controller._live(snapshot, {})
        return self.controller._heartbeats["engine", "e", "i"].revision


@pytest.mark.parametrize(("noted", "seen"), [(None, REGISTERED), (0, REGISTERED), (3, REGISTERED), (8, 8), (20, 20)])
def test_member_ran_at_the_revision_that_its_agent_has_noted_and_not_at_that_of_the_write(
        noted: int | None, seen: int) -> None:
    assert Leader().sees(noted, now=20) == seen


def test_revision_stays_where_the_host_has_lost_what_it_noted() -> None:
    leader = Leader()
    assert leader.sees(8, now=10) == 8
    assert leader.sees(None, now=12) == leader.sees(0, now=14) == 8
    assert leader.sees(15, now=16) == 15 and leader.sees(None, now=20, written=18) == 18


def test_revision_that_etcd_has_not_reached_is_of_before_a_restore() -> None:
    leader = Leader()
    assert leader.sees(100, now=120) == 100
    assert leader.sees(100, now=40) == REGISTERED
    assert leader.sees(41, now=42) == 41
