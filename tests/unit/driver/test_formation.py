"""Where the ranks of a trainer group are, and how many there are."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.config import TrainerConfig
from elastic_rl.driver.formation import Plan, Room, plan, sizes
from elastic_rl.errors import ConfigError

SIZES = st.integers(1, 4)


def trainer(**settings: int) -> TrainerConfig:
    return TrainerConfig(**settings)  # type: ignore[arg-type]


def planned(rooms: Mapping[str, int], *keeps: str, **settings: int) -> Plan | None:
    return plan([Room(*item) for item in rooms.items()], trainer(**settings), keeps=keeps)


@given(rooms=st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 20)), tp=SIZES, cp=st.integers(1, 2),
       pp=st.integers(1, 2), most=st.integers(1, 5), least=SIZES, per_host=st.none() | st.integers(1, 3),
       keeps=st.sets(st.sampled_from("abcdef")))
def test_group_is_the_largest_that_has_room_and_splits_no_tensor_parallel_ranks(
        rooms: dict[str, int], tp: int, cp: int, pp: int, most: int, least: int, per_host: int | None,
        keeps: set[str]) -> None:
    settings = trainer(tensor_parallel=tp, context_parallel=cp, pipeline_parallel=pp, data_parallel=max(most, least),
                       min_data_parallel=least, **({"ranks_per_host": per_host * tp} if per_host else {}))
    found = plan([Room(*item) for item in rooms.items()], settings, keeps=keeps)
    usable = sum(min(room, settings.ranks_per_host or room) // tp * tp for room in rooms.values())
    fits = [size for size in range(least, max(most, least) + 1) if size * tp * cp * pp <= usable]
    assert (found.data_parallel if found else None) == (fits[-1] if fits else None)
    if found is None:
        return
    assert sum(found.ranks.values()) == found.data_parallel * tp * cp * pp
    for host, ranks in found.ranks.items():
        assert ranks and ranks % tp == 0 and ranks <= min(rooms[host], settings.ranks_per_host or rooms[host])
    kept_with_room = {host for host in keeps & rooms.keys() if rooms[host] >= tp}
    if found.ranks.keys() - keeps:
        assert kept_with_room <= found.ranks.keys(), "another host is used only where those of before are full"


def test_hosts_with_more_room_come_first_so_that_there_are_few() -> None:
    assert planned({"a": 2, "b": 8, "c": 4}, data_parallel=8) == Plan({"b": 8}, 8)
    assert planned({"a": 2, "b": 8, "c": 4}, "a", data_parallel=8) == Plan({"a": 2, "b": 6}, 8)


def test_group_with_experts_has_only_sizes_that_split_them_evenly() -> None:
    assert sizes(trainer(data_parallel=8, min_data_parallel=3, expert_parallel=4)) == [8, 4]
    assert sizes(trainer(data_parallel=8, expert_parallel=4)) == [8]
    assert planned({"a": 7}, data_parallel=8, min_data_parallel=3, expert_parallel=4) == Plan({"a": 4}, 4)


@pytest.mark.parametrize(("settings", "named"), [
    ({"trainer": {"data_parallel": 2, "min_data_parallel": 3}}, "min_data_parallel=3 is more than"),
    ({"trainer": {"tensor_parallel": 2, "ranks_per_host": 3}}, "ranks_per_host=3 is not a multiple"),
    ({"trainer": {"data_parallel": 2, "min_data_parallel": 1}, "deterministic": True}, "rounds in another way")])
def test_sizes_that_cannot_be_are_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config.parse(settings)
