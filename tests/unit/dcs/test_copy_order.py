"""The order of copies to the durable store, with copying of any speed, and both retentions at work meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.catalog import pairs
from elastic_rl.dcs.catalog.retention import RetentionPolicy, durable_to_drop, to_release
from elastic_rl.dcs.durable.copy_order import Copyable, CopyOrder
from elastic_rl.etcd.records import Version, VersionState

POLICY, STATE, CRITIC = "policy", "trainer_state", "critic_state"
STREAMS = [POLICY, STATE, CRITIC]


@dataclass
class Job:
    """A job whose versions are published, released, copied and dropped, in whole seconds."""

    copy_s: int
    state_every_s: int = 10
    policy_every_s: int = 10
    keep: int = 4
    durable_keep: int = 3
    leader_lasts_s: int = 0
    """After so many seconds another node leads, without the pins of the one before. 0: never."""
    versions: dict[str, dict[int, Version]] = field(default_factory=lambda: {s: {} for s in STREAMS})
    durable: dict[str, dict[int, Version]] = field(default_factory=lambda: {s: {} for s in STREAMS})
    pinned: set[tuple[str, int]] = field(default_factory=set)
    copied: list[tuple[str, int]] = field(default_factory=list)
    pair_lost: bool = False

    def run(self, seconds: int) -> Job:
        order, task, until = CopyOrder(STREAMS, pairs.PAIRED), None, 0
        for now in range(1, seconds + 1):
            self.publish(now)
            self.release()
            if self.leader_lasts_s and now % self.leader_lasts_s == 0:
                order, task = CopyOrder(STREAMS, pairs.PAIRED), None
                self.pinned.clear()
            if task is not None and now >= until:
                self.finish(*task)
                task = None
            if task is None and (copies := next(order.candidates(self.read), None)) is not None:
                assert all(self.versions[s][n].number == n for s, n in copies), "it was released before its turn"
                self.pinned.update(copies)
                order.begin(copies)
                task, until = copies[0], now + self.copy_s
        return self

    def publish(self, now: int) -> None:
        for stream, every in ((POLICY, self.policy_every_s), (STATE, self.state_every_s), (CRITIC, self.state_every_s)):
            if now % every == 0:
                number = now // every
                meta = {} if stream == POLICY else {pairs.META_KEY: pairs.pair_name(number, "x")}
                self.versions[stream][number] = Version(stream=stream, number=number, state=VersionState.COMMITTED,
                                                        epoch=1, meta=meta)

    def release(self) -> None:
        newest = pairs.in_newest_pairs({s: list(of.values()) for s, of in self.versions.items()}, pairs.PAIRED)
        for stream, of in self.versions.items():
            kept = {n for s, n in self.pinned if s == stream} | {newest.get(stream, 0)}
            for number in to_release(list(of.values()), RetentionPolicy(self.keep), 0.0, pinned=kept):
                del of[number]

    def read(self, stream: str) -> Copyable:
        of = self.versions[stream]
        return Copyable(list(of), pairs.names_of([*of.values(), *self.durable[stream].values()]),
                        max(self.durable[stream], default=0))

    def finish(self, stream: str, number: int) -> None:
        had_pair = self.durable_pair is not None
        self.copied.append((stream, number))
        self.durable[stream][number] = self.versions[stream][number]
        self.pinned.discard((stream, number))
        newest = pairs.in_newest_pairs({s: list(of.values()) for s, of in self.durable.items()}, pairs.PAIRED)
        for name, of in self.durable.items():
            for old in durable_to_drop({n: n for n in of}, self.durable_keep, {newest.get(name, 0)}):
                del of[old]
        self.pair_lost |= had_pair and self.durable_pair is None

    @property
    def durable_pair(self) -> tuple[int, int] | None:
        return pairs.newest_pair(pairs.names_of(list(self.durable[STATE].values())),
                                 pairs.names_of(list(self.durable[CRITIC].values())))

    def count(self, stream: str) -> int:
        return sum(s == stream for s, _ in self.copied)


@given(st.integers(1, 90), st.integers(1, 30), st.integers(1, 30), st.integers(1, 5), st.integers(1, 3))
def test_every_stream_is_copied_and_there_is_always_a_whole_pair(copy_s, state_every_s, policy_every_s, keep,
                                                                 durable_keep) -> None:
    job = Job(copy_s, state_every_s, policy_every_s, keep, durable_keep).run(1000)
    assert job.durable_pair is not None and not job.pair_lost
    states, critics, policies = (job.count(s) for s in (STATE, CRITIC, POLICY))
    assert [n for s, n in job.copied if s == CRITIC] == [n for s, n in job.copied if s == STATE][:critics]
    assert 0 <= states - critics <= 1
    # Each pair may wait for the policy twice, and the policy for one half.
    assert policies >= min(states, 1000 // max(policy_every_s, 2 * copy_s) - 2)
    behind = 1000 // state_every_s - job.durable_pair[0]
    assert behind * state_every_s <= 8 * copy_s + 2 * state_every_s, "the pair is older than the copying of two"


@pytest.mark.parametrize("leader_lasts_s", [30, 100])
def test_another_leader_completes_the_pair_that_was_begun_while_it_can(leader_lasts_s: int) -> None:
    job = Job(copy_s=12, policy_every_s=1000, keep=8, leader_lasts_s=leader_lasts_s).run(1000)
    assert job.durable_pair is not None and not job.pair_lost
    assert job.count(STATE) - job.count(CRITIC) in (0, 1)


@pytest.mark.parametrize(("copied", "lacking"), [(STATE, CRITIC), (CRITIC, STATE)])
def test_half_pair_of_another_leader_is_copied_before_a_newer_pair(copied: str, lacking: str) -> None:
    names = {1: "2/a", 2: "4/b"}
    of = {copied: Copyable([2], names, 1), lacking: Copyable([1, 2], names)}
    assert list(CopyOrder([STATE, CRITIC], pairs.PAIRED).candidates(of.__getitem__)) == [[(lacking, 1)]]
    of[lacking] = Copyable([2], names)
    assert list(CopyOrder([STATE, CRITIC], pairs.PAIRED).candidates(of.__getitem__)) == [[(STATE, 2), (CRITIC, 2)]]


def test_job_without_a_second_group_has_its_states_copied() -> None:
    order = CopyOrder(STREAMS, pairs.PAIRED)
    of = {STATE: Copyable([3, 4], {}, 3), POLICY: Copyable([7, 8, 9], {}, 9)}
    assert list(order.candidates(lambda s: of.get(s, Copyable()))) == [[(STATE, 4)]]


def test_first_state_is_copied_alone_and_a_half_waits() -> None:
    order = CopyOrder([STATE, CRITIC], pairs.PAIRED)
    of = {STATE: Copyable([1, 2], {1: pairs.BEGINNING, 2: "2/a"}), CRITIC: Copyable()}
    assert list(order.candidates(of.__getitem__)) == [[(STATE, 1)]]
    of[STATE] = Copyable([1, 2], of[STATE].pairs, 1)
    assert list(order.candidates(of.__getitem__)) == []
    of[CRITIC] = Copyable([1], {1: "2/a"})
    assert list(order.candidates(of.__getitem__)) == [[(STATE, 2), (CRITIC, 1)]]


def test_versions_that_cannot_be_pinned_make_room_for_newer_ones() -> None:
    order = CopyOrder([STATE, CRITIC], pairs.PAIRED)
    of = {s: Copyable([1], {1: "2/a"}) for s in (STATE, CRITIC)}
    [copies] = order.candidates(of.__getitem__)
    order.begin(copies)
    of = {STATE: Copyable([1, 2], {1: "2/a", 2: "4/b"}, 1), CRITIC: Copyable([2], {2: "4/b"})}
    [rest] = order.candidates(of.__getitem__)
    assert rest == [(CRITIC, 1)]
    order.give_up(rest)
    assert list(order.candidates(of.__getitem__)) == [[(STATE, 2), (CRITIC, 2)]]
