"""What the API accepts for a pool."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator import pools
from elastic_rl.coordinator.problems import Problem


@given(st.integers())
def test_desired_number_out_of_range_is_refused(desired: int) -> None:
    if 1 <= desired <= 64:
        assert pools.check_desired(desired, 64) == desired
    else:
        with pytest.raises(Problem) as e:
            pools.check_desired(desired, 64)
        assert e.value.status == 422 and "between 1 and 64" in e.value.detail


@pytest.mark.parametrize(("header", "revision"), [('"12"', 12), ("12", 12), ('W/"12"', 12), ("*", None)])
def test_etag_is_the_revision_of_the_spec(header: str, revision: int | None) -> None:
    assert pools.parse_if_match(header) == revision
    assert revision is None or pools.parse_if_match(pools.etag(revision)) == revision


@pytest.mark.parametrize(("header", "status"), [(None, 428), (" ", 428), ('"abc"', 412), ('"-3"', 412)])
def test_missing_if_match_is_428_and_foreign_etag_412(header: str | None, status: int) -> None:
    with pytest.raises(Problem) as e:
        pools.parse_if_match(header)
    assert e.value.status == status
