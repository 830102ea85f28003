"""Scenarios by name: a job, the faults that happen to it, and what a run of it is judged by. Pure data.

A new scenario is an entry of ``SCENARIOS``; its faults are names of ``faults.catalogue``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from chaos_tests.faults.catalogue import FAULTS, WEIGHTS, Need, weights
from chaos_tests.nemesis.schedule import Schedule, Strike, drawn, drawn_by_time
from chaos_tests.validate.growth import FEWEST_STEPS
from chaos_tests.validate.verdict import GROWTH


class Tier(StrEnum):
    """Where a scenario runs: which target ``runner`` makes for it."""

    ONE_HOST = "one host"
    """A cluster of its own on this machine."""
    TEST_HOSTS = "test hosts"
    """A cluster of its own on hosts in namespaces of this machine."""


@dataclass(frozen=True)
class Pace:
    """Times between strikes, in one unit: steps in a run by steps, seconds in one by time."""

    before: int
    """From the begin to the first strike, at least."""
    apart: int
    """From one strike to the next, at least."""
    after: int
    """From the last strike to the end, at least, in which the run recovers."""


@dataclass(frozen=True)
class Scenario:
    name: str
    what: str
    settings: Mapping[str, Any]
    """Settings of the job, as ``--key.sub=value``."""
    steps: int = 0
    """Length of a run by steps; 0 where it is by time."""
    minutes: float = 0.0
    """Length of a run by time; 0 where it is by steps."""
    count: int = 0
    """Faults of a run of that length."""
    faults: Mapping[str, float] = field(default_factory=dict)
    """Faults that are drawn, by name in the catalogue, with their weights."""
    steps_per_minute: float = 60.0
    """Steps of its job in a minute, about, with its faults. A run of another length has as many faults a minute."""
    pace: Pace = Pace(3, 6, 15)
    """Steps before, between and after the strikes of a run by steps."""
    pace_s: Pace = Pace(20, 10, 60)
    """Seconds before, between and after the strikes of a run by time."""
    resume_fault: str = ""
    """A fault that strikes a long run by steps twice, near its begin and near its end: how long the recovery takes must
    not grow with the steps in between."""
    together: float = 0.25
    """Share of the strikes that have two faults."""
    overlap: int = 1
    """Strikes that may be under way before the run has recovered from them."""
    rest_steps: int = 0
    """Steps that the job does after the recovery from a strike, before the next one."""
    floor_steps: int = 2
    """Steps that the run has to have done before its first fault: else nothing was under load."""
    baseline: bool = False
    """Whether the same job runs without faults first."""
    traffic: Sequence[str] = ()
    """What clients do meanwhile, by its names in ``traffic.workloads``."""
    floor_answers: int = 0
    """Answers that these clients have to have had: else the run says nothing of them."""
    tier: Tier = Tier.ONE_HOST
    late: float = 3.0
    """A run by time ends after so many times its minutes, whether or not each fault had its turn."""

    def schedule(self, seed: int, *, steps: int = 0, minutes: float = 0.0, faults: int | None = None,
                 only: Sequence[str] | None = None, settings: Sequence[str] = ()) -> Schedule:
        """The schedule of a seed. ``steps``, ``minutes``: another length; the number of faults is in proportion, unless
        ``faults`` says it. ``only``: the faults that may be drawn. Raises ValueError for numbers that do not fit."""
        count = faults if faults is not None else self.usual_count(steps, minutes)
        steps, minutes = (steps, minutes) if steps or minutes else (self.steps, self.minutes)
        weights = {name: weight for name, weight in self.faults.items() if only is None or name in only}
        if not count:
            resumes = self.resume_fault and faults is None and steps >= FEWEST_STEPS + 4 * _RESUME_STEPS
            at = (_RESUME_STEPS, steps - _RESUME_STEPS) if resumes else ()
            strikes = tuple(Strike(step, (self.resume_fault,)) for step in at)
            found = Schedule(seed, 0 if minutes else steps, strikes, minutes)
        elif minutes:
            found = drawn_by_time(seed, minutes, count, weights, together=self.together, before_s=self.pace_s.before,
                                  apart_s=self.pace_s.apart, after_s=self.pace_s.after, struck=_STRUCK)
        else:
            found = drawn(seed, steps, count, weights, together=self.together, before=self.pace.before,
                          apart=self.pace.apart, after=self.pace.after, struck=_STRUCK)
        return replace(found, scenario=self.name, settings=tuple(settings))

    def usual_count(self, steps: int = 0, minutes: float = 0.0) -> int:
        """Faults of a run of this length, or of the scenario's own."""
        asked = minutes or steps / self.steps_per_minute
        usual = self.minutes or self.steps / self.steps_per_minute
        if not asked or not self.count:
            return self.count
        count = round(self.count * asked / usual)
        if minutes:  # no more than find room
            count = min(count, int((minutes * 60 - self.pace_s.before - self.pace_s.after) // self.pace_s.apart))
        return max(1, count)


_RESUME_STEPS = 300
"""Steps before the first strike of ``resume_fault``, and after the last one."""
_OF_ANY_RUN = ("I1", "I2", "I3", "I4", "I5", "I11")
_OF_OWN_CLUSTER = ("I6", "I8", "I12", "I13", "I14", "I15")
"""A run on a cluster of its own has to show these too. A job that was begun before the run, and goes on after it, may
leave no evidence for them."""
_OF_FAULTS, _OF_OWN_FAULTS = ("I10",), ("I9",)
_OF_ENGINES = frozenset({"I4", "I6", "I7"})
"""A light run on test hosts has no engines, and computes nothing."""


def must_see(schedule: Schedule, *, own: bool, compared: bool = False) -> list[str]:
    """The rules that must not be unseen in a run of a schedule: else it is worth nothing. ``own``: whether it is on a
    cluster of its own, whose job begins and ends with it, and whose alerts it receives. ``compared``: whether it is
    deterministic and has a baseline."""
    rules = [*_OF_ANY_RUN, *(_OF_OWN_CLUSTER if own else ()), *(_OF_FAULTS if schedule.strikes else ()),
             *(_OF_OWN_FAULTS if own and schedule.strikes else ()), *(("I7",) if compared else ())]
    if SCENARIOS[schedule.scenario].tier is Tier.TEST_HOSTS:
        rules = [rule for rule in rules if rule not in _OF_ENGINES]
    if own and SCENARIOS[schedule.scenario].resume_fault and schedule.fault_free_steps >= FEWEST_STEPS:
        rules.append(GROWTH)
    return rules


_SMALL: Mapping[str, Any] = {
    "rollout.engines": 1, "train.state_every_steps": 3, "train.prompts_per_step": 8, "train.group_size": 4,
    "train.updates_per_step": 1, "train.eval_every_steps": 1000, "sft.max_steps": 0, "data.options.operand_below": 5,
    "algorithm.entropy_coef": 0.01, "trainer.tensor_parallel": 1, "trainer.data_parallel": 1, "coordinator.replicas": 2}
"""A job that a machine of two cores trains while its parts are killed: a fifth of a second a step. Each step changes
its weights, by the entropy also where no sample has a reward: else no log-prob tells a version from the one before."""
_TINY: Mapping[str, Any] = {
    "sft.max_steps": 0, "rollout.engines": 1, "train.prompts_per_step": 2, "train.group_size": 2,
    "train.updates_per_step": 1, "train.eval_every_steps": 1_000_000, "trainer.tensor_parallel": 1,
    "trainer.data_parallel": 1, "coordinator.replicas": 2, "coordinator.max_events": 200,
    "coordinator.max_step_metrics": 200, "model.hidden_size": 32, "model.intermediate_size": 64, "model.num_layers": 1,
    "model.num_heads": 2, "model.num_kv_heads": 1}
"""The job whose steps are as short as steps can be: a third of a second on two free cores. What etcd keeps of the
newest steps and events is so little that it stops growing in the warm-up."""
_STRUCK = {name: entry.strikes for name, entry in FAULTS.items()}
_EVERY, _OF_HOSTS = (weights(frozenset(Need) - {other}) for other in (Need.TEST_HOSTS, Need.ONE_HOST))
_ANY_SCHEDULE = ("engine_killed", "trainer_rank_killed", "trainer_rank_stopped", "rollout_killed", "advantages_killed",
                 "driver_killed", "coordinator_killed", "dcs_killed")
"""Faults of parts that a run waits for also where its groups are generated beside its steps."""

_LIGHT = ("pools", "silences", "operations", "watches", "programs")
"""Traffic that changes nothing that the job runs on."""

# By time: beside a fault that stops nothing, a job of so many steps would end before the recovery from it.
SCENARIOS: Mapping[str, Scenario] = {scenario.name: scenario for scenario in (
    Scenario("quick", "a small job and a few faults of any kind, in about five minutes", _SMALL, minutes=2.5,
             count=4, faults=WEIGHTS, steps_per_minute=30.0, pace=Pace(3, 6, 20), pace_s=Pace(8, 20, 40),
             traffic=_LIGHT, floor_answers=40),
    Scenario("drawn", "a small job in which faults of any kind follow one another, some of them two at once", _SMALL,
             minutes=5.0, count=10, faults=WEIGHTS, steps_per_minute=30.0, pace=Pace(2, 8, 30), pace_s=Pace(8, 15, 60),
             traffic=_LIGHT, floor_answers=80),
    Scenario("every", "a small job and every fault of one host, one at a time, also those of single processes, of "
             "storage and of who has been replaced", _SMALL, minutes=20.0, count=len(_EVERY), faults=_EVERY,
             steps_per_minute=60.0, pace=Pace(3, 8, 30), pace_s=Pace(10, 12, 60), together=0.0, rest_steps=4,
             traffic=("silences", "watches", "programs"), floor_answers=100),  # a fault writes the pool
    # The length of a step's responses, and so the time of a step, depends on what the job has learned.
    Scenario("soak", "the quick start's job for 30 minutes with a fault every 28 seconds", {}, minutes=30.0, count=64,
             faults=WEIGHTS, steps_per_minute=60.0, pace=Pace(5, 6, 60), pace_s=Pace(30, 12, 120), overlap=3,
             baseline=True, traffic=_LIGHT, floor_answers=400),
    Scenario("growth", "many steps of a tiny job, in which nothing may grow with the steps; all that it runs on is "
             "lost near the begin and near the end, and must be back as soon", _TINY, steps=20_000,
             steps_per_minute=150.0, resume_fault="raylet_killed"),
    Scenario("async", "a fully asynchronous job whose groups are generated beside its steps",
             {**_SMALL, "train.schedule": "fully_async", "train.max_staleness": 2}, minutes=5.0,
             count=6, faults={name: WEIGHTS[name] for name in _ANY_SCHEDULE}, steps_per_minute=30.0,
             pace=Pace(3, 10, 30), pace_s=Pace(10, 25, 60)),
    Scenario("turns", "a small job whose samples have two turns, each of which another engine may make",
             {**_SMALL, "rollout.engines": 2, "rollout.generate": "chaos_tests.traffic.turns:generate",
              "data.options.operand_below": 500}, minutes=5.0, count=6,
             faults={name: WEIGHTS[name] for name in _ANY_SCHEDULE}, steps_per_minute=25.0, pace=Pace(3, 10, 30),
             pace_s=Pace(10, 25, 60)),
    Scenario("changes", "a small job whose pool clients scale, whose engines they have replaced and whose driver "
             "restarted, while faults happen", {**_SMALL, "rollout.engines": 2}, minutes=6.0, count=6,
             faults={name: WEIGHTS[name] for name in ("coordinator_killed", "dcs_killed", "trainer_rank_killed",
                                                      "advantages_killed", "actor_killed", "etcd_killed")},
             steps_per_minute=25.0, pace=Pace(5, 12, 30), pace_s=Pace(20, 25, 60), floor_answers=80,
             traffic=("scales", "silences", "drains", "registers", "restarts", "watches", "programs")),
    Scenario("hosts", "a job that computes nothing on three test hosts, each with etcd, a coordinator and a DCS node: "
             "partitions, power cuts and bad links, while clients cordon hosts; needs root",
             {"cluster": "chaos", "coordinator.replicas": 1, "dcs.arena_bytes": 128 << 20, "etcd.follow_members_s": 2.0,
              "alerts.run_waiting_s": 86400.0}, minutes=4.0, count=6, faults=_OF_HOSTS, steps_per_minute=60.0,
             pace=Pace(3, 10, 30), pace_s=Pace(10, 20, 60), floor_answers=60, tier=Tier.TEST_HOSTS, late=10.0,
             traffic=("pools", "hosts", "silences", "watches")),  # no engine would end an operation
    Scenario("critic", "PPO, whose critic is a group of ranks of its own",
             {**_SMALL, "algorithm.name": "ppo", "critic.trainer": {"data_parallel": 1}}, minutes=5.0, count=5,
             faults={name: WEIGHTS[name] for name in _ANY_SCHEDULE}, steps_per_minute=25.0, pace=Pace(3, 8, 25),
             pace_s=Pace(10, 25, 60)),
)}
