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
