"""Whether the checkpoint service has room for a model."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.host.checkpoint_room import VersionSizes, faults, version_sizes
from elastic_rl.models.arch import ModelArch

MIB = 1 << 20


@pytest.fixture(scope="module")
def arch(tmp_path_factory: pytest.TempPathFactory) -> ModelArch:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps({
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 24,
        "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 50,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "hidden_act": "silu",
        "rope_theta": 10000.0}))
    return ModelArch.read(folder)


def of(**settings: Any) -> Config:
    return config.load(overrides=[f"--{key.replace('__', '.')}={value}" for key, value in settings.items()])


PARAMETERS = 2 * 50 * 8 + 2 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 24)
"""By hand: embedding and head; in each layer queries, keys and values, output, MLP."""


@pytest.mark.parametrize(("settings", "a_weight", "a_state"), [
    ({"device__dtype": "float32"}, 4, 4 + 8), ({"device__dtype": "bfloat16"}, 2, 2 + 8 + 4),
    ({"device__dtype": "bfloat16", "algorithm__kl_coef": 0.1}, 2, 2 + 8 + 4 + 2), ({"mode": "eval"}, 4, 0)])
def test_sizes_are_those_of_what_is_published(arch: ModelArch, settings: dict[str, Any], a_weight: int, a_state: int
                                              ) -> None:
    assert version_sizes(of(**settings), arch) == VersionSizes(PARAMETERS * a_weight, PARAMETERS * a_state)


SIZES = VersionSizes(policy=100 * MIB, trainer_state=300 * MIB)


@pytest.mark.parametrize(("settings", "named"), [
    ({"arena_bytes": 399 * MIB}, "dcs.arena_bytes=.* has no room for the 400 MiB"),
    ({"arena_bytes": 400 * MIB, "disk_bytes": 1099 * MIB}, "dcs.disk_bytes=.* have no room for the 1500 MiB"),
    ({"arena_bytes": 1499 * MIB, "disk_bytes": 0}, "there is no disk")])
def test_what_has_no_room_is_refused_and_fits_with_what_is_suggested(settings: dict[str, int], named: str) -> None:
    def given(values: dict[str, int]) -> Config:
        return of(**{f"dcs__{key}": value for key, value in values.items()})

    [found] = faults(given(settings), SIZES)
    assert re.search(named, found.message)
    for _ in range(2):  # a larger arena may show that the disk is too small
        for fault in faults(given(settings), SIZES):
            [(key, value)] = re.findall(r"--dcs\.(\w+)=(\d+)", fault.fix)[:1]
            settings = {**settings, key: int(value)}
    assert list(faults(given(settings), SIZES)) == []


def test_room_that_is_just_enough_is_enough() -> None:
    for settings in ({"arena_bytes": 400 * MIB, "disk_bytes": 1100 * MIB}, {"arena_bytes": 1500 * MIB, "disk_bytes": 0},
                     {"arena_bytes": 400 * MIB, "disk_bytes": 200 * MIB, "keep_bytes": 1}):
        assert list(faults(of(**{f"dcs__{k}": v for k, v in settings.items()}), SIZES)) == []
