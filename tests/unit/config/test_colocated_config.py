"""Settings of a colocated job: what cannot work is refused, with what to do."""

from __future__ import annotations

import pytest

from elastic_rl import config
from elastic_rl.config import ROLLOUT_POOL
from elastic_rl.errors import ConfigError
from elastic_rl.job import check as job_check


@pytest.mark.parametrize(("settings", "said"), [
    ({"train": {"max_staleness": 1}}, "train.max_staleness=1"),
    ({"train": {"schedule": "fully_async"}}, "train.schedule=fully_async"),
    ({"algorithm": {"name": "ppo"}}, "with a critic"),
    ({"mode": "eval"}, "mode=eval"),
    ({"mode": "sft", "sft": {"max_steps": 4}}, "mode=sft"),
    ({"engine": {"release_timeout_s": 10.0}}, "engine.release_timeout_s=10"),
], ids=lambda value: value if isinstance(value, str) else "")
def test_combination_that_cannot_work_is_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        config.parse({"placement": "colocated", **settings})
    assert said in str(refused.value)


def test_engines_of_the_policy_alone_share_devices_and_load_in_place() -> None:
    cfg = config.parse({"placement": "colocated", "pools": {"judge": {"model": "/judge"}}})
    policy, judge = (cfg.pool_settings("/model")[name] for name in (ROLLOUT_POOL, "judge"))
    assert policy.colocated and not judge.colocated
    assert policy.engine.staging_limit_bytes == 0 < judge.engine.staging_limit_bytes
    assert not config.parse({}).pool_settings("/model")[ROLLOUT_POOL].colocated


def test_pool_with_engine_names_like_the_policys_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"pools\.rollout-x: a name that begins with rollout-"):
        config.parse({"pools": {"rollout-x": {"model": "/judge"}}})
    config.parse({"pools": {"rollouts": {"model": "/judge"}}})


@pytest.mark.parametrize(("settings", "installed", "said"), [
    ({"device": {"type": "cpu"}, "rollout": {"engines": 9}}, False, ""),
    ({"device": {"type": "cuda"}, "trainer": {"data_parallel": 4}, "rollout": {"engines": 2},
      "engine": {"extra_args": ["--tp", "2"]}}, True, ""),
    ({"device": {"type": "cuda"}, "trainer": {"data_parallel": 4}, "rollout": {"engines": 2},
      "engine": {"extra_args": ["--tp", "2"]}}, False, "torch_memory_saver"),
    ({"device": {"type": "cuda"}, "trainer": {"data_parallel": 3}, "rollout": {"engines": 2},
      "engine": {"extra_args": ["--tp", "2"]}}, True, "2 engines of 2 GPUs do not fit on the 3 GPUs"),
    ({"cluster": "lab", "device": {"type": "cuda"}, "trainer": {"data_parallel": 4, "ranks_per_host": 1},
      "rollout": {"engines": 2}, "engine": {"extra_args": ["--tp", "2"]}}, True, "does not fit on the 1 that"),
    ({"cluster": "lab", "device": {"type": "cuda"}, "trainer": {"data_parallel": 4, "min_data_parallel": 1},
      "rollout": {"engines": 2}, "engine": {"extra_args": ["--tp", "2"]}}, True, "on the 1 of a trainer with the few"),
    ({"cluster": "lab", "device": {"type": "cuda"},
      "trainer": {"data_parallel": 4, "min_data_parallel": 2, "ranks_per_host": 2},
      "rollout": {"engines": 2}, "engine": {"extra_args": ["--tp", "2"]}}, True, "")])
def test_check_says_when_engines_do_not_fit_or_cannot_release_memory(
        settings: dict[str, object], installed: bool, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_check, "find_spec", lambda name: object() if installed else None)
    [found] = _of_placement(settings)
    assert (said in found.fault) if said else not found.fault


@pytest.mark.parametrize(("ranks", "hint"), [(2, "lower --tp-size of engine.extra_args to 2 or less"),
                                             (4, "set rollout.engines to 1 or less")])
def test_hint_for_engines_that_do_not_fit_names_an_accepted_value(
        ranks: int, hint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_check, "find_spec", lambda name: object())
    [found] = _of_placement({"device": {"type": "cuda"}, "trainer": {"data_parallel": ranks},
                             "rollout": {"engines": 3}, "engine": {"extra_args": ["--tp-size=4"]}})
    assert found.hint == f"{hint}, or more ranks of the trainer"


def _of_placement(settings: dict[str, object]) -> list[job_check.Finding]:
    cfg = config.parse({"placement": "colocated", **settings})
    return [f for f in job_check._model_and_data(cfg) if f.part == "placement"]
