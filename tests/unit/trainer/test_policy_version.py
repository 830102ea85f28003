"""Which version of the policy a group that does not train computes with, and which ones are kept for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.config.algorithm import reference_step
from elastic_rl.config.groups import ACTOR
from elastic_rl.dcs.catalog.references import REFERENCE_KEY, needed, oldest_of_step
from elastic_rl.errors import Conflict
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.trainer.progress import Progress


def version(number: int, step: int, *, phase: str = "rl", state: VersionState = VersionState.COMMITTED, **more: int
            ) -> Version:
    meta: dict[str, Any] = {"step": step, "phase": phase, **more}
    return Version(stream="policy", number=number, epoch=1, state=state, meta=meta)


numbered = st.lists(st.tuples(st.integers(0, 6), st.sampled_from(["rl", "sft"]), st.sampled_from(VersionState)),
                    max_size=12).map(
    lambda found: [version(n, step, phase=phase, state=state) for n, (step, phase, state) in enumerate(found, 1)])


@given(numbered, st.integers(0, 6), st.integers(0, 13))
def test_version_is_the_oldest_committed_one_of_the_step(versions: list[Version], step: int, at_least: int) -> None:
    fits = [v.number for v in versions if v.state is VersionState.COMMITTED and v.number >= at_least
            and v.meta == {"step": step, "phase": "rl"}]
    if fits:
        assert oldest_of_step(versions, step, at_least) == min(fits)
    else:
        with pytest.raises(Conflict, match=f"after RL step {step} is committed"):
            oldest_of_step(versions, step, at_least)


def test_refusal_says_what_there_is() -> None:
    with pytest.raises(Conflict, match="of number 9 or higher; the newest is 7, of step 3"):
        oldest_of_step([version(7, 3), version(8, 4, state=VersionState.STAGING)], 3, 9)
    with pytest.raises(Conflict, match="there is none"):
        oldest_of_step([], 0, 0)


@dataclass
class Run:
    """A trainer as it publishes, and goes back: versions with the weights that they have, by a label."""

    every: int | None
    progress: Progress = Progress("rl")
    weights: str = "begin"
    policy: list[Version] = field(default_factory=list)
    states: list[Version] = field(default_factory=list)
    of_version: dict[int, str] = field(default_factory=dict)
    reference_of: dict[str, str] = field(default_factory=dict)
    """The reference of the step that follows on these weights: what the run itself knows."""
    state_weights: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.publish(state=True, renews=True)
        self.reference_of["begin"] = "begin"

    def publish(self, *, state: bool, renews: bool = False) -> None:
        number, p = len(self.policy) + 1, self.progress
        named = {REFERENCE_KEY: p.reference_version} if p.reference_version else {}
        self.policy.append(version(number, p.step, **named))
        self.of_version[number] = self.weights
        if renews:
            self.progress = p = p.replace(reference_version=number)
        if state:
            self.states.append(version(len(self.states) + 1, p.step, **{REFERENCE_KEY: p.reference_version}))
            self.state_weights.append(self.weights)

    def train(self, *, state: bool) -> None:
        step, before = self.progress.step + 1, self.weights
        renews = reference_step(step + 1, self.every) == step
        self.weights = f"{step} after {len(self.policy)}"
        self.reference_of[self.weights] = self.weights if renews else self.reference_of[before]
        self.progress = self.progress.replace(step=step, **({"reference_version": 0} if renews else {}))
        self.publish(state=state, renews=renews)

    def go_back(self, pick: int) -> None:
        """To any state: the newest may be on a node that is away, and come back."""
        at = pick % len(self.states)
        found, self.weights = self.states[at], self.state_weights[at]
        self.progress = Progress("rl", int(found.meta["step"]), reference_version=int(found.meta[REFERENCE_KEY]))
        self.publish(state=False)


@given(st.lists(st.one_of(st.booleans(), st.integers(0, 9)), max_size=30), st.sampled_from([None, 1, 2, 3]))
def test_reference_stays_however_often_the_run_goes_back(moves: list[bool | int], every: int | None) -> None:
    run = Run(every)
    for move in moves:
        if isinstance(move, bool):
            run.train(state=move)
        else:
            run.go_back(move)
        step = reference_step(run.progress.step + 1, every)
        kept = needed({ACTOR.weights: run.policy, ACTOR.state: run.states})[ACTOR.weights]
        assert len(kept) <= len(run.states) + 1, "a year of steps keeps no more"
        left = [v for v in run.policy if v.number in kept]
        used = oldest_of_step(left, step, run.progress.reference_version)
        assert run.of_version[used] == run.reference_of[run.weights]
    for state, weights in zip(run.states, run.state_weights, strict=True):
        assert run.of_version[int(state.meta[REFERENCE_KEY])] == run.reference_of[weights]


def test_reference_of_the_newest_policy_is_kept_before_any_state_has_it() -> None:
    named = [version(n, n - 1, **({REFERENCE_KEY: 5} if n > 5 else {})) for n in range(1, 8)]
    assert needed({ACTOR.weights: named}) == {ACTOR.weights: {5}}
    assert needed({ACTOR.weights: named[:5]}) == {ACTOR.weights: {5}}, "itself"
    assert needed({ACTOR.weights: named, ACTOR.state: [version(1, 3, **{REFERENCE_KEY: 1}), version(2, 4)]}) == {
        ACTOR.weights: {1, 5}}
    assert needed({}) == {ACTOR.weights: set()}
