"""At which state two trainer groups go on together: the rules, and simulated runs whose groups are lost at any moment.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.config.groups import ACTOR
from elastic_rl.dcs.catalog.pairs import BEGINNING, newest_pair, pair_name
from elastic_rl.pipeline.training.common_state import Available, CommonState, common_state

SEEDS = seeds(40)
PAIRS = st.dictionaries(st.integers(1, 9), st.sampled_from(["0/", "1/a", "2/b", "2/c", "3/d"]))


@given(PAIRS, PAIRS)
@settings(deadline=None)
def test_newest_pair_is_the_newest_version_that_has_a_counterpart(first: dict[int, str], second: dict[int, str]
                                                                  ) -> None:
    found = newest_pair(first, second)
    possible = [n for n, name in first.items() if name in {*second.values(), BEGINNING}]
    if found is None:
        assert not possible
        return
    number, other = found
    assert number == max(possible)
    assert second[other] == first[number] if other else first[number] == BEGINNING not in second.values()


def test_groups_go_on_from_a_common_uncommitted_state() -> None:
    found = common_state(Available("7/x", {1: "0/"}), Available("7/x", {}))
    assert found is not None and found.is_reached


def test_states_of_one_step_that_different_updates_made_do_not_belong_together() -> None:
    policy = Available("20/again", {1: "10/a", 2: "20/again"})
    critic = Available("10/a", {1: "10/a", 2: "20/first"})
    assert common_state(policy, critic) == CommonState(policy=1, critic=None)


def test_version_that_is_not_available_is_left_out() -> None:
    policy, critic = Available("12/x", {1: "0/", 2: "10/a"}), Available("10/a", {5: "10/a"})
    assert common_state(policy, critic) == CommonState(policy=2, critic=None)
    assert common_state(policy, critic, {(ACTOR.state, 2)}) == CommonState(policy=1, critic=0)
    assert common_state(policy, critic, {(ACTOR.state, 2), (ACTOR.state, 1)}) is None


def test_critic_goes_back_to_the_beginning_with_a_supervised_policy() -> None:
    found = common_state(Available(BEGINNING, {1: BEGINNING}), Available("3/x", {}))
    assert found == CommonState(policy=None, critic=0)


@dataclass
class Group:
    """Its state is the list of the ids of the updates that made it."""

    live: tuple[str, ...] = ()
    committed: dict[int, tuple[str, ...]] = field(default_factory=dict)
    released: set[int] = field(default_factory=set)
    number: int = 0

    def commit(self) -> None:
        self.number += 1
        self.committed[self.number] = self.live

    def available(self) -> Available:
        return Available(name_of(self.live), {n: name_of(state) for n, state in self.committed.items()})

    def load(self, number: int | None) -> None:
        if number is not None:
            self.live = self.committed[number] if number else ()

    def restart(self) -> None:
        """At its newest state, as a group that re-forms."""
        self.live = self.committed[max(self.committed)] if self.committed else ()


def name_of(state: tuple[str, ...]) -> str:
    return pair_name(len(state), state[-1] if state else "")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_simulated_run_loses_no_common_state_and_never_mixes_updates(seed: int) -> None:
    """Groups are lost between, before and after the updates, commits fail or come late, old versions are released, and
    a version may be unreadable for a while. Every time that the run goes on both groups have the same history."""
    chance = random.Random(seed)
    policy, critic, ids = Group(), Group(), iter(range(10_000))
    policy.commit()  # at the beginning of RL
    for _ in range(60):
        update = f"u{next(ids)}"
        for group in (policy, critic):
            if chance.random() < 0.15:
                chance.choice((policy, critic)).restart()
                break
            group.live = (*group.live, update)
            if len(group.live) % 3 == 0 and chance.random() < 0.7:
                group.commit()
        release(policy, critic, keep=chance.randint(1, 3))
        without: set[tuple[str, int]] = set()
        if chance.random() < 0.1 and len(policy.committed) > 1:
            without.add((ACTOR.state, max(policy.committed)))
        found = common_state(policy.available(), critic.available(), without)
        if found is None:
            assert without, "there is always a pair, of what can be read"
            without.clear()  # it can be read again
            found = common_state(policy.available(), critic.available())
            assert found is not None
        policy.load(found.policy)
        critic.load(found.critic)
        assert policy.live == critic.live
        assert found.is_reached or found.policy is None or (ACTOR.state, found.policy) not in without


def release(policy: Group, critic: Group, keep: int) -> None:
    """Releases versions as the leader does."""
    pair = newest_pair(policy.available().committed, critic.available().committed)
    assert pair is not None
    for group, needed in zip((policy, critic), pair, strict=True):
        for number in sorted(group.committed)[:-keep]:
            if number != needed:
                del group.committed[number]
