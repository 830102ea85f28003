"""What the driver makes of the phases of shared devices: which engines are late, and who has which GPU."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.driver.late_engines import LateEngines
from elastic_rl.driver.plan import Running, plan
from elastic_rl.driver.shared_gpus import free_gpus
from elastic_rl.etcd.device_phase import SeenPhase, Side
from elastic_rl.etcd.records import Engine, EngineState


def engine(name: str, state: EngineState, *, holds: bool) -> Engine:
    return Engine(id=name, pool="rollout", state=state, epoch=1, holds_device=holds)


TRAINERS, ENGINES = SeenPhase(Side.TRAINER, 1), SeenPhase(Side.ENGINES, 2)
HOLDER = engine("a", EngineState.SYNCING, holds=True)


def test_engine_that_keeps_its_memory_is_late_after_the_limit() -> None:
    late = LateEngines(10.0)
    assert [bool(late.observe(TRAINERS, [HOLDER], now)) for now in (100.0, 105.0, 109.9, 110.0)] == [
        False, False, False, True]
    assert "did not release its memory" in late.observe(TRAINERS, [HOLDER], 111.0)["a"]


def test_released_engine_that_does_not_take_its_phase_is_late_too() -> None:
    late, released = LateEngines(10.0), engine("a", EngineState.RELEASED, holds=False)
    assert not late.observe(ENGINES, [released], 0.0)
    assert "did not take device memory" in late.observe(ENGINES, [released], 10.0)["a"]
    assert not LateEngines(0.0).observe(TRAINERS, [released], 0.0), "it is as it should be"


def test_each_phase_has_a_limit_of_its_own() -> None:
    late = LateEngines(10.0)
    late.observe(TRAINERS, [HOLDER], 0.0)
    late.observe(ENGINES, [HOLDER], 9.0)
    third, later = SeenPhase(Side.TRAINER, 3), SeenPhase(Side.TRAINER, 9)
    assert not late.observe(third, [HOLDER], 12.0)
    assert late.observe(third, [HOLDER], 22.0)
    assert not late.observe(later, [HOLDER], 200.0), "no pass has seen the ones in between"


def test_limit_of_an_applying_engine_counts_from_the_end_of_that() -> None:
    late, applies = LateEngines(10.0), HOLDER.replace(applying=7)
    assert not late.observe(TRAINERS, [HOLDER], 0.0), "it pulls the version"
    assert not any(late.observe(TRAINERS, [applies], now) for now in (8.0, 17.0))
    assert not any(late.observe(TRAINERS, [HOLDER], now) for now in (17.5, 27.0)), "it releases its memory"
    assert late.observe(TRAINERS, [HOLDER], 27.5)
    late.observe(TRAINERS, [applies], 28.0)
    assert late.observe(TRAINERS, [applies], 38.0), "an update that hangs has no limit of its own here"


@pytest.mark.parametrize("spared", [
    engine("a", EngineState.STARTING, holds=True), engine("a", EngineState.DEAD, holds=True),
    engine("a", EngineState.READY, holds=False)], ids=lambda e: e.state)
def test_engine_that_starts_has_ended_or_has_no_memory_is_not_late(spared: Engine) -> None:
    late = LateEngines(10.0)
    assert not late.observe(TRAINERS, [spared], 0.0) and not late.observe(TRAINERS, [spared], 1e6)


def test_nobody_is_late_while_it_is_nobodys_phase() -> None:
    assert not LateEngines(0.0).observe(SeenPhase(None), [HOLDER, engine("b", EngineState.RELEASED, holds=False)], 0.0)


@given(st.dictionaries(st.sampled_from("abc"), st.integers(0, 16), min_size=1), st.integers(1, 8), st.data())
def test_engines_have_rows_of_gpus_of_their_own(total: dict[str, int], per_engine: int, data: st.DataObject) -> None:
    """However engines come and go, as many fit as there are rows; and where none has gone they are spread evenly."""
    gpus = {host: [f"{i}" for i in range(count)] for host, count in total.items()}
    taken: list[tuple[str, str]] = []
    for _ in range(20):
        if taken and data.draw(st.booleans()):
            taken.remove(data.draw(st.sampled_from(taken)))
        left = {host: count // per_engine - sum(on == host for on, _ in taken) for host, count in total.items()}
        host, found = free_gpus(gpus, taken, per_engine)
        assert bool(found) == bool(host) == any(left.values())
        if found:
            row = found.split(",")
            assert len(row) == per_engine and set(row) <= set(gpus[host]) and left[host] == max(left.values())
            assert not set(row) & {gpu for on, other in taken if on == host for gpu in other.split(",")}
            taken.append((host, found))


def test_released_engines_are_kept_like_ready_ones() -> None:
    released = Running("a", EngineState.RELEASED, 1.0)
    assert plan(1, [released], may_start=5).start == 0
    assert plan(1, [released, Running("b", EngineState.SYNCING, 0.0)], may_start=0).drain == ("b",)
