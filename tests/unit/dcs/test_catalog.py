"""The states of a version, and which ways between them exist."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.catalog.catalog import TRANSITIONS, move
from elastic_rl.errors import IllegalTransition
from elastic_rl.etcd.records import Version, VersionState

S = VersionState
LEGAL = {(S.STAGING, S.COMMITTED), (S.STAGING, S.ABORTED), (S.COMMITTED, S.RELEASING), (S.RELEASING, S.GONE)}


def version(state: VersionState) -> Version:
    return Version(stream="policy", number=7, state=state, epoch=2, meta={"step": 1})


@pytest.mark.parametrize(("a", "b"), list(product(S, S)))
def test_only_the_four_ways_of_the_picture_exist(a: VersionState, b: VersionState) -> None:
    if (a, b) in LEGAL:
        assert move(version(a), b, nbytes=5) == version(a).replace(state=b, nbytes=5)
    else:
        with pytest.raises(IllegalTransition, match=f"version 7 cannot go from {a} to {b}"):
            move(version(a), b)


def test_every_state_has_its_row() -> None:
    assert set(TRANSITIONS) == set(S)


@given(st.lists(st.sampled_from(S), max_size=12))
def test_no_walk_comes_back_or_shows_what_was_not_committed(walk: list[VersionState]) -> None:
    at = version(S.STAGING)
    seen = [at.state]
    for to in walk:
        try:
            at = move(at, to)
        except IllegalTransition:
            continue
        assert to not in seen
        seen.append(to)
    if {S.RELEASING, S.GONE} & set(seen):
        assert S.COMMITTED in seen and S.ABORTED not in seen


def test_a_version_survives_its_encoding() -> None:
    v = version(S.COMMITTED)
    assert Version.decode(v.encode()) == v
