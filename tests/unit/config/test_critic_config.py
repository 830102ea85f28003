"""The settings of a critic, and the context that its ranks get."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from elastic_rl import config
from elastic_rl.config.groups import ACTOR, CRITIC
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.model_folder import require_critic
from elastic_rl.models.arch import VALUE_HEAD
from elastic_rl.net.addresses import LOOPBACK

PPO = {"algorithm": {"name": "ppo"}}


@pytest.mark.parametrize(("critic", "fault"), [
    ({"train": {"steps": 3}}, r"critic\.train\.steps: a critic can have otherwise only lr"),
    ({"train": {"lr": -1}}, r"critic\.train\.lr: .*greater than 0"),
    ({"trainer": {"tensor_parallell": 2}},
     r"unknown key critic\.trainer\.tensor_parallell; did you mean 'tensor_parallel'"),
    ({"trainer": {"tensor_parallel": 7}}, r"of the group critic: model\.num_heads=\d+ is not a multiple of "
                                          r"critic\.trainer\.tensor_parallel=7"),
    ({"trainer": {"collective_timeout_s": 5000.0}}, r"of the group critic: .* critic\.trainer\.collective_timeout_s"),
    ({"trainer": {"context_parallel": 2, "packing": False}},
     r"of the group critic: critic\.trainer\.context_parallel=2 .*; set critic\.trainer\.packing=true"),
    ({"warmup_steps": -1}, r"critic\.warmup_steps"),
])
def test_settings_that_a_critic_cannot_have_are_refused(critic: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        config.parse({**PPO, "critic": critic})


def test_ranks_of_the_critic_get_its_settings_and_model(tmp_path: Path) -> None:
    cfg = config.parse({**PPO, "trainer": {"data_parallel": 4, "packing": False}, "train": {"lr": 1e-3, "steps": 7},
                        "critic": {"model": "/critic", "trainer": {"data_parallel": 2}, "train": {"lr": 5e-3}}})
    ctx = RunContext(config=cfg, etcd_endpoints=["a:1"], job=cfg.job, epoch=1, model_dir="/policy", host=LOOPBACK)
    own = RunContext.load(ctx.of_group(CRITIC).save(tmp_path / "context.json"))
    assert (own.group, own.model_dir, own.config.trainer.data_parallel, own.config.train.lr) == (
        CRITIC, "/critic", 2, 5e-3)
    assert (own.config.trainer.packing, own.config.train.steps) == (False, 7), "the rest is that of the policy's group"
    policy = RunContext.load(ctx.of_group(ACTOR).save(tmp_path / "context.json"))
    assert policy == ctx and policy.group is ACTOR


def test_folder_that_a_critic_cannot_begin_with_is_refused(tmp_path: Path) -> None:
    policy = make_model_dir(tmp_path / "policy", config.parse({}))
    critic = make_model_dir(tmp_path / "critic", config.parse({}))
    cfg = config.parse({**PPO, "model": {"path": str(policy)}, "critic": {"model": str(critic)}})
    assert require_critic(cfg) is not None, "a folder without a value head"
    tensors = load_file(critic / "model.safetensors")
    tensors.pop("lm_head.weight")
    hidden = tensors["model.norm.weight"].shape[0]
    save_file({**tensors, VALUE_HEAD: tensors["model.norm.weight"].view(1, hidden).clone()},
              critic / "model.safetensors", {"format": "pt"})
    assert require_critic(cfg) is not None, "a critic has no use for an output layer"
    save_file({**tensors, VALUE_HEAD: tensors["model.norm.weight"].view(2, -1).clone()},
              critic / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=VALUE_HEAD):
        require_critic(cfg)
    with pytest.raises(ConfigError, match="built-in model"):
        require_critic(config.parse({**PPO, "critic": {"model": str(critic)}}))
    with pytest.raises(ConfigError, match=r"critic\.model names a folder"):
        require_critic(config.parse({**PPO, "model": {"path": str(policy)}, "critic": {"model": "/nowhere"}}))


def test_keys_of_the_critics_group_are_those_that_a_user_has() -> None:
    text = ("trainer.packing=false and train.lr: set a trainer.tensor_parallel, critic.trainer.packing, train.steps or "
            "model.trainer.x")
    assert CRITIC.with_own_keys(text) == (
        "critic.trainer.packing=false and critic.train.lr: set a critic.trainer.tensor_parallel, "
        "critic.trainer.packing, train.steps or model.trainer.x")


def test_states_of_policy_and_critic_are_copied_both_or_neither() -> None:
    def streams(*names: str, url: str = "file:///durable") -> dict[str, Any]:
        return {"dcs": {"durable_url": url, "durable_streams": list(names)}}

    for one, other in (("trainer_state", "critic_state"), ("critic_state", "trainer_state")):
        with pytest.raises(ConfigError, match=rf"dcs\.durable_streams has no {other}"):
            config.parse({**PPO, **streams("policy", one)})
        config.parse(streams("policy", one))
        config.parse({**PPO, **streams("policy", one, url="")})
    config.parse({**PPO, **streams("policy")})
    config.parse({**PPO, **streams("trainer_state", "critic_state")})


def test_policy_that_would_never_learn_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"critic\.warmup_steps=9 with train\.steps=9"):
        config.parse({**PPO, "critic": {"warmup_steps": 9}, "train": {"steps": 9}})
    config.parse({**PPO, "critic": {"warmup_steps": 8}, "train": {"steps": 9}})
    config.parse({"critic": {"warmup_steps": 9}, "train": {"steps": 9}})
