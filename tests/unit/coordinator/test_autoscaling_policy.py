"""The policy of autoscaling: its rules under any load, and what it makes of recorded traces."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from elastic_rl.config.autoscale import AutoscaleConfig
from elastic_rl.coordinator.autoscaling.policy import Observation, PoolLoad, decide, is_high, is_low
from elastic_rl.etcd.records import AutoscalerState

TRACES = Path(__file__).parent / "traces"
POOL = "rollout"
CFG = AutoscaleConfig(mode="automatic", min_engines=2, max_engines=8)
HIGH = PoolLoad(engines=4, queued=5.0, token_usage=0.95)
LOW = PoolLoad(engines=4, queued=0.0, token_usage=0.1)
BETWEEN = PoolLoad(engines=4, queued=0.5, token_usage=0.6)


@dataclass
class Pool:
    """A pool under the policy. ``set``: the numbers that it set, with the time and the reason of each."""

    cfg: AutoscaleConfig = CFG
    desired: int = 4
    state: AutoscalerState | None = None
    now: float = 1000.0
    set: list[tuple[float, int, str]] = field(default_factory=list)

    def see(self, load: PoolLoad | str, *, after_s: float = 1.0, **more: Any) -> AutoscalerState:
        """One pass; a number that is set is reached at once, unless ``missing`` says otherwise later."""
        self.now += after_s
        decision = decide(self.cfg, POOL, self.state, Observation(self.desired, load, **more), self.now)
        self.state = decision.state
        if decision.target is not None:
            self.set.append((self.now, decision.target, decision.reason))
            if self.cfg.mode != "dry_run":
                self.desired = decision.target
        return decision.state

    def see_for(self, seconds: int, load: PoolLoad | str, **more: Any) -> list[int]:
        """A pass each second; the numbers that were set meanwhile."""
        before = len(self.set)
        for _ in range(seconds):
            self.see(load, **more)
        return [number for _, number, _ in self.set[before:]]


def test_high_load_adds_engines_once_it_has_lasted_and_names_the_reason() -> None:
    pool = Pool()
    pool.see_for(61, BETWEEN)  # the cooldown of the start
    assert pool.see_for(29, HIGH) == []
    assert pool.see_for(1, HIGH) == [8], "four times the queue: at most max_step_up more"
    assert "5.0 requests wait in an engine" in pool.set[0][2] and "95% of the KV cache" in pool.set[0][2]


def test_step_follows_the_excess_of_the_load() -> None:
    pool = Pool(cfg=CFG.model_copy(update={"max_engines": 64}), desired=20)
    pool.see_for(61, BETWEEN)
    assert pool.see_for(30, PoolLoad(20, queued=0.2, token_usage=0.9)) == [22], "0.9 / 0.85 of 20 engines"


def test_low_load_removes_engines_down_to_the_fewest() -> None:
    pool = Pool()
    assert pool.see_for(600, LOW) == []
    assert pool.see_for(1, LOW) == [3]
    assert pool.see_for(598, replace(LOW, engines=3)) == []
    assert pool.see_for(3, replace(LOW, engines=3)) == [2]
    assert pool.see_for(5000, replace(LOW, engines=2)) == [] and "the fewest" in pool.state.message


def test_engines_stay_whose_load_the_others_could_not_take() -> None:
    cfg = CFG.model_copy(update={"min_engines": 1, "token_usage_low": 0.6})
    pool = Pool(cfg=cfg, desired=2)
    load = PoolLoad(engines=2, queued=0.0, token_usage=0.45)
    assert is_low(cfg, load)
    assert pool.see_for(2000, load) == [] and "one engine less" in pool.state.message


def test_low_load_of_two_steps_is_needed_where_they_are_long() -> None:
    """Engines of ``train.schedule: sync`` have nothing to do while the trainer computes."""
    pool, computing = Pool(), replace(LOW, step_s=900.0, asks=False)
    for _ in range(5):
        assert pool.see_for(850, computing) == []
        pool.see_for(50, replace(BETWEEN, step_s=900.0))
    assert pool.see_for(1801, computing) == [3]


def test_trainer_that_is_the_bottleneck_adds_no_engines() -> None:
    pool, busy = Pool(), replace(HIGH, trainer_idle=0.05)
    assert not is_high(CFG, busy)
    assert pool.see_for(1000, busy) == []
    assert pool.see_for(30, replace(HIGH, trainer_idle=0.4)) == [8]


def test_phase_without_requests_neither_counts_nor_ends_a_high_load() -> None:
    pool = Pool()
    pool.see_for(61, BETWEEN)
    for _ in range(2):
        assert pool.see_for(14, HIGH) == []
        assert pool.see_for(60, replace(LOW, asks=False)) == []
    assert pool.see_for(2, HIGH) == [8]


def test_outage_that_the_run_waits_for_removes_no_engines() -> None:
    pool = Pool()
    assert pool.see_for(4000, replace(LOW, waits=True)) == []


def test_pool_that_has_not_reached_its_number_grows_no_further_and_may_shrink() -> None:
    pool = Pool()
    assert pool.see_for(1000, HIGH, missing="3 of 4 engines are ready") == []
    assert "3 of 4" in pool.state.message
    assert pool.see_for(301, LOW, missing="3 of 4 engines are ready") == [3], "there is no room for what it asked for"


def test_operation_on_the_pool_holds_every_change() -> None:
    for load in (HIGH, LOW):
        pool = Pool()
        assert pool.see_for(1000, load, busy="the drain of engines/e0 is not done") == []
        assert "the drain of engines/e0" in pool.see(load, busy="the drain of engines/e0 is not done").message
        assert len(pool.see_for(1, load)) == 1


@pytest.mark.parametrize("desired", [1, 20])
def test_number_beyond_the_bounds_is_brought_within_at_once(desired: int) -> None:
    pool = Pool(desired=desired)
    pool.see("unknown")
    assert pool.desired == (2 if desired == 1 else 8) and "beyond the bounds" in pool.set[0][2]


def test_number_that_somebody_else_sets_is_the_new_start() -> None:
    pool = Pool()
    pool.see_for(89, HIGH)
    pool.see_for(1, HIGH)
    assert pool.desired == 8
    pool.desired = 3  # by a person
    assert pool.see_for(60, HIGH) == [], "both cooldowns begin"
    assert pool.see_for(2, HIGH) == [7]


def test_external_scaler_has_the_bounds_alone() -> None:
    pool = Pool(cfg=CFG.model_copy(update={"mode": "external"}))
    assert pool.see_for(2000, HIGH) == pool.see_for(2000, LOW) == []
    pool.desired = 11
    pool.see(HIGH)
    assert pool.desired == 8


def test_dry_run_has_the_pace_of_the_real_one() -> None:
    pool = Pool(cfg=CFG.model_copy(update={"mode": "dry_run"}))
    pool.see_for(61, BETWEEN)
    assert pool.see_for(30, HIGH) == [8] and pool.desired == 4
    assert pool.state is not None and pool.state.recommended == 8
    assert pool.see_for(59, HIGH) == []


def test_thresholds_that_would_oscillate_are_refused() -> None:
    for wrong in ({"min_engines": 5, "max_engines": 4}, {"token_usage_low": 0.9}, {"max_engines": 0},
                  {"queue_high": 0}, {"queue_high": float("inf")}):
        with pytest.raises(ValidationError):
            AutoscaleConfig.model_validate(wrong)


# -- any load ----------------------------------------------------------------------------------------------------------
shares = st.one_of(st.none(), st.floats(0, 1))
loads = st.builds(PoolLoad, engines=st.integers(1, 20), queued=st.floats(0, 1e9), token_usage=shares,
                  trainer_idle=shares, step_s=st.floats(0, 1000), asks=st.booleans(), waits=st.booleans())
modes = st.sampled_from(["automatic", "dry_run", "external"])
configs = st.builds(
    lambda low, span, **more: AutoscaleConfig(min_engines=low, max_engines=low + span, **more),
    low=st.integers(1, 5), span=st.integers(0, 10), mode=modes, up_after_s=st.floats(0.1, 60),
    down_after_s=st.floats(0.1, 60), up_cooldown_s=st.floats(0.1, 60), down_cooldown_s=st.floats(0.1, 60),
    max_step_up=st.integers(1, 5), max_step_down=st.integers(1, 5))
passes = st.lists(st.tuples(
    st.floats(-3, 120), st.one_of(st.just("unknown"), loads, loads, loads),  # a leader's clock may go back a little
    st.sampled_from(["", "", "", "missing"]), st.sampled_from(["", "", "", "busy"]),
    st.one_of(st.none(), st.none(), st.none(), st.integers(1, 20))), max_size=60)


@given(cfg=configs, desired=st.integers(1, 20), history=passes)
def test_every_change_keeps_the_rules(cfg: AutoscaleConfig, desired: int, history: list[Any]) -> None:
    state: AutoscalerState | None = None
    now = latest = 100.0
    changed_at = float("-inf")
    for after_s, load, missing, busy, by_hand in history:
        now = max(0.0, now + after_s)
        latest = max(latest, now)
        if by_hand is not None and by_hand != desired:
            desired, changed_at = by_hand, now
        decision = decide(cfg, POOL, state, Observation(desired, load, missing, busy), now)
        again = decide(cfg, POOL, state, Observation(desired, load, missing, busy), now)
        assert decision == again, "it depends on its arguments alone"
        state, target = decision.state, decision.target
        assert AutoscalerState.decode(state.encode()) == state, "another leader goes on with the same"
        if target is None:
            continue
        assert decision.reason
        assert cfg.min_engines <= target <= cfg.max_engines and target != desired
        within = cfg.min_engines <= desired <= cfg.max_engines
        if within:
            assert not isinstance(load, str), "an unknown load changes nothing"
            assert cfg.mode != "external" and not busy
            if target > desired:
                assert not missing and target - desired <= cfg.max_step_up and is_high(cfg, load)
                assert latest - changed_at >= cfg.up_cooldown_s - 1e-6
            else:
                assert desired - target <= cfg.max_step_down and is_low(cfg, load)
                assert latest - changed_at >= cfg.down_cooldown_s - 1e-6
        changed_at = now
        if cfg.mode != "dry_run":
            desired = target


@pytest.mark.parametrize(("desired", "load", "target"), [(1, "HIGH", 3), (20, "LOW", 8)])
def test_dry_run_recommends_a_number_within_the_bounds_where_they_are_not_kept(desired: int, load: str, target: int
                                                                                ) -> None:
    pool = Pool(cfg=CFG.model_copy(update={"mode": "dry_run", "min_engines": 3, "max_engines": 8, "max_step_up": 1,
                                           "max_step_down": 1}), desired=desired)
    pool.see_for(2000, {"HIGH": HIGH, "LOW": LOW}[load])
    assert pool.state is not None and pool.state.recommended == target


@given(desired=st.integers(2, 8), load=loads)
def test_steady_load_reaches_a_number_that_stays(desired: int, load: PoolLoad) -> None:
    """Load of a fixed amount, whatever it is, shared by the engines: the number goes one way, and then stays."""
    quick = {"up_after_s": 4.0, "down_after_s": 8.0, "up_cooldown_s": 4.0, "down_cooldown_s": 8.0}
    pool = Pool(cfg=CFG.model_copy(update={**quick, "max_step_down": 3}), desired=desired)
    amount = replace(load, asks=True, waits=False, step_s=0.0)
    for _ in range(60):
        share = load.engines / pool.desired
        pool.see(replace(amount, engines=pool.desired, queued=amount.queued * share, token_usage=None if
                         amount.token_usage is None else min(1.0, amount.token_usage * share)), after_s=4.0)
    numbers = [desired, *(n for _, n, _ in pool.set)]
    assert numbers in (sorted(numbers), sorted(numbers, reverse=True))


def test_engines_without_room_are_taken_back_and_not_requested_again_for_a_while() -> None:
    pool = Pool()
    pool.see_for(61, BETWEEN)
    assert pool.see_for(30, HIGH, all_ready=True) == [8]
    short = {"missing": "5 of 8 engines are ready", "busy": "the scale is not done", "no_room": 3}
    assert pool.see_for(120, HIGH, **short) == [], "a host may just be joining"
    assert pool.see_for(1, "the load is unknown, which does not matter", **short) == [5]
    assert "no room for 3 of 4 that were added" in pool.set[-1][2]
    assert pool.see_for(599, HIGH, all_ready=True) == [] and "had no room for more" in pool.state.message
    assert pool.see_for(2, HIGH, all_ready=True) == [8]


def test_engines_that_lost_their_room_later_are_not_taken_back() -> None:
    pool = Pool()
    pool.see_for(61, BETWEEN)
    assert pool.see_for(30, HIGH) == [8]
    pool.see(HIGH, all_ready=True)
    assert pool.see_for(1000, HIGH, missing="6 of 8 engines are ready", no_room=2) == []


# -- traces ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", ["recorded", "burst", "idle_trainer", "busy_trainer", "flapping", "outage"])
def test_trace_gives_the_numbers_that_were_reviewed(name: str) -> None:
    """Each row of a trace holds for its seconds. ``waiting``: requests that wait in all engines together; ``caches``:
    how many engines' KV caches the requests would fill. So the load follows what the policy does."""
    trace = json.loads((TRACES / f"{name}.json").read_text())
    pool = Pool(cfg=AutoscaleConfig.model_validate({"mode": "automatic", **trace["settings"]}),
                desired=trace["desired"])
    for row in trace["rows"]:
        run = {key: row[key] for key in ("trainer_idle", "step_s", "asks", "waits") if key in row}
        for _ in range(row["seconds"]):
            load = row["unknown"] if "unknown" in row else PoolLoad(
                engines=pool.desired, queued=row["waiting"] / pool.desired,
                token_usage=min(1.0, row["caches"] / pool.desired), **run)
            pool.see(load, missing=row.get("missing", ""), busy=row.get("busy", ""))
    found = [[round(at - 1000.0), number] for at, number, _ in pool.set]
    assert found == trace["set"], f"{trace['about']}: {found}"
