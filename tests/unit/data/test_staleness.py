"""Which versions of samples a step may be trained on, over every way to publish, save and go back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.data.branch import Branch
from elastic_rl.data.staleness import StalenessRule
from elastic_rl.errors import StaleSamples


@settings(max_examples=seeds(40))
@given(st.lists(st.sampled_from(["step", "publish", "save", "go back"]), max_size=40), st.integers(0, 8))
def test_versions_are_refused_by_their_age_and_by_the_weights_that_made_them(events: list[str], bound: int) -> None:
    """``weights``: the steps that made those of the trainer; each step has a name that is never used again."""
    weights, version, branch, names = (), 1, Branch().published(1), 0
    made_by: dict[int, tuple[int, ...]] = {1: ()}
    saved: tuple[tuple[int, ...], int, Any] = (), 1, branch.to_json()
    first_of_weights, left_behind = 1, set[int]()
    for event in events:
        if event == "save":
            saved = weights, version, branch.to_json()
            continue
        if event == "step":
            names += 1
            weights = (*weights, names)
        elif event == "go back":
            weights, number, as_saved = saved
            left_behind |= set(range(number + 1, version + 1))
            branch = Branch.from_json(as_saved).restored(number)
        version += 1
        branch = branch.published(version)
        made_by[version] = weights
        first_of_weights = version if event != "publish" else first_of_weights
    rule = StalenessRule(first_of_weights, bound, branch, version)
    refused = rule.refused(range(-1, version + 3))
    assert {v for v, steps in made_by.items() if steps != weights[:len(steps)]} <= set(refused)
    assert refused == tuple(sorted({-1, 0, version + 1, version + 2, *left_behind, *(
        v for v in made_by if v < first_of_weights - bound)}))


def test_refusal_names_the_versions_and_what_they_may_be() -> None:
    rule = StalenessRule(10, 2, Branch(7, 9), 11)
    rule.require([9, 10, 11])
    with pytest.raises(StaleSamples, match="version 7, 8, 12 are refused: the step trains version 10") as refused:
        rule.require([12, 8, 9, 7])
    assert refused.value.versions == (7, 8, 12)


def test_who_does_not_know_the_newest_version_refuses_none_for_being_new() -> None:
    assert StalenessRule(10, 0).refused([11]) == () and StalenessRule(10, 0, newest=10).refused([11]) == (11,)


def test_branch_of_an_older_release_has_none_before_it() -> None:
    assert Branch.from_json([3, 5]) == Branch(3, 5)
