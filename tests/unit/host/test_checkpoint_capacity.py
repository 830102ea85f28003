"""Whether the checkpoint service has room for a model."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.host.checkpoint_capacity import VersionSizes, faults, records_bytes, version_sizes
from elastic_rl.models.arch import ModelArch
from elastic_rl.pipeline.records import history

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


@pytest.mark.parametrize(("settings", "policy", "state", "reference"), [
    ({"device__dtype": "float32"}, 4, 4 + 8, 0), ({"device__dtype": "bfloat16"}, 2, 2 + 8 + 4, 0),
    ({"device__dtype": "bfloat16", "algorithm__kl_coef": 0.1}, 2, 2 + 8 + 4, 2), ({"mode": "eval"}, 4, 0, 0)])
def test_sizes_are_those_of_what_is_published(arch: ModelArch, settings: dict[str, Any], policy: int, state: int,
                                              reference: int) -> None:
    assert version_sizes(of(**settings), arch) == VersionSizes(
        PARAMETERS * policy, PARAMETERS * state, PARAMETERS * reference)


def dcs(**mib: int) -> dict[str, Any]:
    return {f"dcs__{key}": value if key == "keep_versions" or value == 1 else value * MIB for key, value in mib.items()}


SIZES = VersionSizes(policy=100 * MIB, trainer_state=300 * MIB)
STORED = 300 + 4 * 300 + 3 * 100
"""MiB: the next state, those that are kept, and the policies of steps between them."""


@pytest.mark.parametrize(("settings", "named"), [
    (dcs(arena_bytes=399, disk_bytes=STORED), "dcs.arena_bytes=.* has no room for the 400 MiB"),
    (dcs(arena_bytes=10_000, disk_bytes=STORED - 1), f"dcs.disk_bytes=.* has no room for the {STORED} MiB"),
    (dcs(arena_bytes=STORED - 1, disk_bytes=0), f"for the {STORED} MiB .* there is no disk"),
    ({**dcs(arena_bytes=400, disk_bytes=1499), "train__state_every_steps": 1}, "for the 1500 MiB")])
def test_what_has_no_room_is_refused_and_fits_with_what_is_suggested(settings: dict[str, Any], named: str) -> None:
    [found] = faults(of(**settings), SIZES)
    assert re.search(named, found.message)
    [(key, value)] = re.findall(r"--dcs\.(\w+)=(\d+)", found.fix)
    assert list(faults(of(**settings | {f"dcs__{key}": value}), SIZES)) == []


@pytest.mark.parametrize("settings", [
    dcs(arena_bytes=400, disk_bytes=STORED), dcs(arena_bytes=STORED, disk_bytes=0),
    dcs(arena_bytes=400, disk_bytes=601, keep_bytes=1),
    {**dcs(arena_bytes=400, disk_bytes=600), "dcs__keep_age_s": 9},
    {**dcs(arena_bytes=400, disk_bytes=1500), "train__state_every_steps": 1}])
def test_room_that_is_just_enough_is_enough(settings: dict[str, Any]) -> None:
    assert list(faults(of(**settings), SIZES)) == []


NEW_RECORDS = 4 * history.TAIL_BYTES // MIB
"""MiB: the records that the 4 versions that are kept have each of its own."""


@pytest.mark.parametrize(("settings", "room"), [
    (dcs(arena_bytes=400, disk_bytes=STORED), 0), (dcs(arena_bytes=STORED, disk_bytes=0), 0),
    (dcs(arena_bytes=400, disk_bytes=STORED + NEW_RECORDS), 0), (dcs(arena_bytes=40, disk_bytes=10), 0),
    (dcs(arena_bytes=400, disk_bytes=STORED + NEW_RECORDS + 5), 5),
    (dcs(arena_bytes=STORED + NEW_RECORDS + 5, disk_bytes=0), 5),
    (dcs(arena_bytes=400, disk_bytes=16 * STORED), STORED), (dcs(arena_bytes=16 * STORED, disk_bytes=0), STORED)])
def test_records_of_the_run_take_a_sixteenth_and_no_room_that_weights_need(settings: dict[str, Any], room: int) -> None:
    assert records_bytes(of(**settings), SIZES) == room * MIB


@pytest.mark.parametrize(("every", "older"), [("null", 0), (100, 1), (20, 2), (10, 4), (1, 4)])
def test_references_of_states_that_are_kept_need_room(every: str | int, older: int) -> None:
    """With states of every 10 steps, of which 4 are kept."""
    settings = {"reference__enabled": "true", "algorithm__kl_coef": 0.1, "algorithm__reference_every_steps": every,
                "train__state_every_steps": 10}
    sizes = VersionSizes(SIZES.policy, SIZES.trainer_state, reference=SIZES.policy)
    needs = STORED + 100 + older * 100
    assert list(faults(of(**settings, **dcs(arena_bytes=10_000, disk_bytes=needs)), sizes)) == []
    [found] = faults(of(**settings, **dcs(arena_bytes=10_000, disk_bytes=needs - 1)), sizes)
    assert f"for the {needs} MiB" in found.message


@pytest.mark.parametrize("mode", ["eval", "rejection_sampling"])
def test_job_without_a_trainer_needs_room_for_one_policy(mode: str) -> None:
    only = VersionSizes(policy=100 * MIB)
    assert list(faults(of(mode=mode, **dcs(arena_bytes=100, disk_bytes=100)), only)) == []
    assert list(faults(of(mode=mode, **dcs(arena_bytes=100, disk_bytes=0)), only)) == []
    assert len(list(faults(of(mode=mode, **dcs(arena_bytes=99, disk_bytes=100)), only))) == 1
