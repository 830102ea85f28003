"""The states of a version and the transitions between them."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.catalog.transitions import TRANSITIONS, transition
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import Version, VersionState

S = VersionState
LEGAL = {(S.STAGING, S.COMMITTED), (S.STAGING, S.ABORTED), (S.COMMITTED, S.GONE), (S.RELEASING, S.GONE)}


def version(state: VersionState) -> Version:
    return Version(stream="policy", number=7, state=state, epoch=2, meta={"step": 1})


@pytest.mark.parametrize(("a", "b"), list(product(S, S)))
def test_only_the_documented_transitions_exist(a: VersionState, b: VersionState) -> None:
    if (a, b) in LEGAL:
        assert transition(version(a), b, nbytes=5) == version(a).replace(state=b, nbytes=5)
    else:
        with pytest.raises(IllegalTransition, match=f"version 7 cannot go from {a} to {b}"):
            transition(version(a), b)


def test_transitions_cover_every_state() -> None:
    assert set(TRANSITIONS) == set(S)


@given(st.lists(st.sampled_from(S), max_size=12))
def test_walk_never_returns_to_a_state_or_releases_an_uncommitted_version(walk: list[VersionState]) -> None:
    at = version(S.STAGING)
    seen = [at.state]
    for to in walk:
        try:
            at = transition(at, to)
        except IllegalTransition:
            continue
        assert to not in seen
        seen.append(to)
    if {S.RELEASING, S.GONE} & set(seen):
        assert S.COMMITTED in seen and S.ABORTED not in seen


def test_version_record_round_trips() -> None:
    v = version(S.COMMITTED)
    assert Version.decode(v.encode()) == v
