"""The settings of groups that do not train, and the context that their ranks get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.algorithms.registry import algorithm_of
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, REFERENCE
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.model_folder import require
from elastic_rl.net.addresses import LOOPBACK

TIS: dict[str, Any] = {"algorithm": {"tis_cap": 2.0, "kl_coef": 0.1}, "train": {"updates_per_step": 2}}
ON: dict[str, Any] = {"enabled": True}


@pytest.mark.parametrize(("changed", "fault"), [
    ({"actor_fwd": ON, "train": {"updates_per_step": 1}}, "the pass of a single update has them"),
    ({"actor_fwd": ON, "algorithm": {"kl_coef": 0.1}}, "needed with algorithm.tis_cap"),
    ({"reference": ON, "mode": "sft"}, r"reference\.enabled=true with mode=sft"),
    ({"actor_fwd": ON, "placement": "colocated"}, r"placement=colocated with actor_fwd\.enabled=true"),
    ({"reference": {**ON, "trainer": {"tensor_parallel": 7}}}, r"of the group reference: model\.num_heads=\d+"),
    ({"reference": {**ON, "trainer": {"tensor_parallell": 2}}}, r"reference\.trainer\.tensor_parallell"),
])
def test_settings_that_do_not_fit_are_refused(changed: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        config.parse({**TIS, **changed})


def test_reference_group_that_nothing_is_compared_with_is_refused() -> None:
    with pytest.raises(ConfigError, match="compares nothing with the reference policy"):
        algorithm_of(config.parse({"reference": ON}))


def test_ranks_of_a_group_get_its_settings() -> None:
    cfg = config.parse({**TIS, "actor_fwd": {**ON, "trainer": {"data_parallel": 3}}, "reference": ON,
                        "trainer": {"data_parallel": 2}})
    assert cfg.trainer_groups == (ACTOR, ACTOR_FWD, REFERENCE)
    ctx = RunContext(config=cfg, etcd_endpoints=["x:1"], job="j", epoch=1, model_dir="/model", host=LOOPBACK)
    own = ctx.of_group(ACTOR_FWD)
    assert (own.group, own.model_dir, own.config.trainer.data_parallel) == (ACTOR_FWD, "/model", 3)
    assert ctx.of_group(REFERENCE).config.trainer.data_parallel == 2


def test_job_without_the_groups_has_the_trainer_alone() -> None:
    cfg = config.parse(TIS)
    assert cfg.trainer_groups == (ACTOR,) and not cfg.uses_actor_fwd and not cfg.uses_reference_group


def test_model_of_its_own_that_a_group_cannot_split_is_refused(tmp_path: Path) -> None:
    path = make_model_dir(tmp_path / "model", config.parse({}))
    values = {**TIS, "model": {"path": str(path)}, "reference": {**ON, "trainer": {"tensor_parallel": 7}}}
    with pytest.raises(ConfigError, match=r"of the group reference: the model's num_attention_heads=\d+ is not"):
        require(config.parse(values), 8)
