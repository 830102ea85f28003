"""The settings of steps whose gradients are computed in parts (``train.prompts_per_part``)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from elastic_rl import config
from elastic_rl.algorithms.registry import ALGOS, algorithm_of, options_of
from elastic_rl.config.checks import unread_settings
from elastic_rl.errors import ConfigError
from elastic_rl.pipeline.flow.group_flow import FlowLimits

PARTS: dict[str, Any] = {"train": {"schedule": "fully_async", "prompts_per_step": 8, "prompts_per_part": 3,
                                   "updates_per_step": 1}}


def job(train: dict[str, Any] | None = None, **sections: Any) -> config.Config:
    return config.parse({"train": {**PARTS["train"], **(train or {})}, **sections})


def test_groups_per_part_are_set_only_for_jobs_that_generate_beside_steps() -> None:
    assert FlowLimits.of(job()).groups_per_part == 3 and job().computes_parts
    sync = job({"schedule": "sync"})
    assert FlowLimits.of(sync).groups_per_part is None and not sync.computes_parts
    assert any("train.prompts_per_part is for train.schedule=fully_async" in said for said in unread_settings(sync))


def test_stored_settings_of_a_job_name_every_setting_and_only_those_that_differ_are_said_to_be_unread() -> None:
    stored = config.parse(job({"schedule": "sync"}).model_dump(mode="json"))
    assert [said.split()[0] for said in unread_settings(stored)] == ["train.prompts_per_part"]


@pytest.mark.parametrize(("train", "sections", "said"), [
    ({"prompts_per_part": 8}, {}, "a part is less than a step; set a smaller one"),
    ({"updates_per_step": 2}, {}, "set both to 1"),
    ({}, {"algorithm": {"name": "ppo"}}, "with a critic"),
    ({}, {"algorithm": {"teacher": "big"}, "pools": {"big": {"model": "/m"}}}, "with algorithm.teacher=big"),
    ({}, {"trainer": {"moe_aux_loss_coef": 0.1}}, "the load-balancing loss is of all samples"),
    ({}, {"deterministic": True}, "with deterministic=true")])
def test_what_needs_all_samples_of_a_step_together_is_refused(train: dict[str, Any], sections: dict[str, Any],
                                                              said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        job(train, **sections)
    assert said in str(refused.value) and "train.prompts_per_part=" in str(refused.value)


NAMES = [name for name, spec in ALGOS.items() if spec.advantages is not None and spec.token_advantages is None]


@pytest.mark.parametrize("name", NAMES)
def test_algorithm_whose_advantages_are_of_all_groups_is_refused(name: str) -> None:
    cfg = job(algorithm={"name": name, "constant_length_tokens": 9})
    if name.startswith("reinforce_pp"):
        with pytest.raises(ConfigError, match="may depend on all groups of a step"):
            algorithm_of(cfg)
    else:
        assert algorithm_of(cfg).per_group


@pytest.mark.parametrize("name", NAMES)
def test_part_has_the_whole_steps_advantages_where_an_algorithm_says_so(name: str) -> None:
    spec = ALGOS[name]
    options = options_of(spec, config.parse({}).algorithm)
    rewards = torch.rand((8, 4), generator=torch.Generator().manual_seed(3))
    assert spec.advantages is not None
    parts = torch.cat([spec.advantages(part, options) for part in rewards.split([3, 1, 4])])
    assert torch.equal(parts, spec.advantages(rewards, options)) == spec.per_group


@pytest.mark.parametrize(("schedule", "prompts", "part", "given", "used"), [
    ("sync", 4, None, None, 16), ("fully_async", 3, None, None, 1), ("fully_async", 24, None, None, 6),
    ("fully_async", 1024, None, None, 16), ("fully_async", 24, 8, None, 2), ("fully_async", 24, 8, 9, 9),
    ("sync", 64, None, 1, 1)])
def test_asynchronous_request_holds_at_most_a_quarter_of_a_part(
        schedule: str, prompts: int, part: int | None, given: int | None, used: int) -> None:
    cfg = config.parse({"train": {"schedule": schedule, "prompts_per_step": prompts, "prompts_per_part": part,
                                  "updates_per_step": 1},
                        "rollout": {"groups_per_request": given}})
    assert cfg.groups_per_request == used
