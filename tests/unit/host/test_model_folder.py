"""Which model folders a run can work with, by their JSON files."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from elastic_rl import config
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.errors import ConfigError
from elastic_rl.host import model_folder, preflight
from elastic_rl.host.preflight import Verdict
from elastic_rl.trainer.megatron.policy import ModelArch

DEEP = "[" * 100_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model_dir(tmp_path_factory.mktemp("model") / "m", config.parse({}))


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    """A copy of a good folder, to be changed."""
    copy = tmp_path / "model"
    copy.mkdir()
    for file in made.iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    return copy


def edit(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def truncate(path: Path, size: int) -> None:
    path.write_bytes(path.read_bytes()[:size])


def header(folder: Path, text: str) -> None:
    """Gives the model's safetensors file another header."""
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text.encode())


def messages(folder: Path, **settings: Any) -> str:
    cfg = config.parse({"model": {"path": str(folder)}, "trainer": {"tensor_parallel": 2}, **settings})
    return "\n".join(f.message for f in model_folder.faults(cfg, 10))


def test_model_that_the_project_makes_can_be_used(folder: Path) -> None:
    assert messages(folder) == ""
    model_folder.require(config.parse({"model": {"path": str(folder)}}), 10)
    assert model_folder.read(folder).dtype == "float32"


@pytest.mark.parametrize("change", [
    {"model_type": "gpt2"}, {"attention_bias": True}, {"use_sliding_window": True}, {"hidden_act": "gelu"},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}])
def test_what_the_trainer_refuses_is_refused_before_the_start(folder: Path, change: dict[str, Any]) -> None:
    ModelArch.read(folder)
    edit(folder / "config.json", **change)
    with pytest.raises(ConfigError):
        ModelArch.read(folder)
    assert messages(folder) != ""


@pytest.mark.parametrize(("file", "change", "said"), [
    ("config.json", {"num_hidden_layers": None}, "num_hidden_layers"), ("config.json", {"vocab_size": "16"},
                                                                       "vocab_size"),
    ("config.json", {"dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
    ("config.json", {"quantization_config": {"quant_method": "awq"}}, "quantized"),
    ("config.json", {"num_attention_heads": 3}, "cannot share 2 key-value heads"),
    ("config.json", {"num_key_value_heads": 1}, "num_key_value_heads=1 is not a multiple of trainer.tensor_parallel=2"),
    ("config.json", {"intermediate_size": 7}, "intermediate_size=7"),
    ("config.json", {"max_position_embeddings": 9}, "too small for the longest prompt and response, 10 tokens"),
    ("config.json", {"vocab_size": 14}, "token id 14"),
    ("tokenizer_config.json", {"eos_token": None}, "names no eos_token"),
    ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, "names no eos_token"),
    ("config.json", {"hidden_size": 100}, "where config.json says [16, 100]"),
    ("config.json", {"num_hidden_layers": 1}, "has model.layers.1.input_layernorm.weight, and config.json says"),
    ("config.json", {"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight has shape"),
    ("config.json", {"intermediate_size": 8}, "model.layers.0.mlp.down_proj.weight has shape"),
    ("config.json", {"num_hidden_layers": 3}, "no tensor model.layers.2.input_layernorm.weight"),
    ("config.json", {"num_hidden_layers": 10_000}, "no tensor model.layers.2.input_layernorm.weight"),
    ("config.json", {"num_hidden_layers": 10**9}, "no valid num_hidden_layers"),
    ("config.json", {"rope_parameters": {"rope_theta": 10**400}}, "rope_theta"),
    ("config.json", {"rms_norm_eps": 10**400}, "no valid rms_norm_eps"),
    ("config.json", {"rms_norm_eps": math.inf}, "no valid rms_norm_eps"),
    ("tokenizer_config.json", {"eos_token": ["a"]}, "names no eos_token"),
    ("tokenizer_config.json", {"eos_token": {"content": {}}}, "names no eos_token"),
    ("tokenizer.json", {"model": {"vocab": 5}}, "no vocabulary"), ("tokenizer.json", {"added_tokens": 5},
                                                                   "no vocabulary"),
    ("config.json", {"model_type": "qwen2", "head_dim": 24}, "q_proj.bias"),
    ("generation_config.json", {"eos_token_id": [5, 6]}, "not the model's eos_token_id (5, 6)"),
    ("tokenizer.json", {"model": {"vocab": {}}, "added_tokens": []}, "no vocabulary")])
def test_fault_is_named(folder: Path, file: str, change: dict[str, Any], said: str) -> None:
    edit(folder / file, **change)
    assert said in messages(folder)


def test_config_without_kv_heads_is_that_of_a_model_with_one_for_each_head(folder: Path) -> None:
    """As OpenLLaMA and other models of the first Llama have it."""
    edit(folder / "config.json", num_key_value_heads=None)
    assert "k_proj.weight has shape" in messages(folder), "its weights have two"
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor.repeat(2, 1) if "k_proj" in name or "v_proj" in name else tensor
               for name, tensor in weights.items()}, folder / "model.safetensors")
    assert messages(folder) == ""
    raw = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    del raw["num_key_value_heads"]
    (folder / "config.json").write_text(json.dumps(raw | {"model_type": "llama"}), encoding="utf-8")
    assert "q_norm" not in messages(folder) and model_folder.read(folder).arch.kv_heads == 4


def test_end_token_is_read_where_transformers_reads_it(folder: Path) -> None:
    settings = folder / "tokenizer_config.json"
    raw = json.loads(settings.read_text(encoding="utf-8"))
    eos, special = raw.pop("eos_token"), folder / "special_tokens_map.json"
    raw.pop("added_tokens_decoder", None)

    def said(token: Any, **more: Any) -> str:
        special.write_text(json.dumps({"eos_token": token}), encoding="utf-8")
        settings.write_text(json.dumps(raw | more), encoding="utf-8")
        got = AutoTokenizer.from_pretrained(str(folder)).eos_token
        found = messages(folder)
        assert (got == eos) == (found == ""), f"transformers reads {got!r}"
        return found

    assert said(eos) == "" and said({"content": eos, "special": True}) == "", "older releases write it there only"
    assert "names no eos_token" in said("3", eos_token=eos) or "eos_token_id" in said("3", eos_token=eos)
    assert said("3", eos_token=eos, added_tokens_decoder={}) == "", "a newer release wrote the other file"


def test_large_tokenizer_config_is_read(folder: Path) -> None:
    """That of a model with 28,000 added tokens has 4 MiB."""
    edit(folder / "tokenizer_config.json", added_tokens_decoder={}, note="x" * (4 << 20))
    assert messages(folder) == ""


def test_tokenizer_in_an_old_form_says_how_to_convert_it(folder: Path) -> None:
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")
    [fault] = model_folder.faults(config.parse({"model": {"path": str(folder)}}))
    assert "only tokenizer.model" in fault.message and "save_pretrained" in fault.fix


def test_tensor_in_two_files_needs_an_index(folder: Path) -> None:
    """Else each reader might take another one."""
    weights = load_file(folder / "model.safetensors")
    save_file({name: tensor + 1 for name, tensor in weights.items()}, folder / "old.safetensors")
    assert "in model.safetensors and in old.safetensors" in messages(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(weights, "model.safetensors")}), encoding="utf-8")
    assert messages(folder) == ""


def test_pipeline_stages_are_checked_against_the_models_own_layers(folder: Path) -> None:
    stages = {"trainer": {"pipeline_parallel": 3, "tensor_parallel": 1}}
    assert "num_hidden_layers=2 is not a multiple of trainer.pipeline_parallel=3" in messages(folder, **stages)
    edit(folder / "config.json", num_hidden_layers=6)
    assert "num_hidden_layers" not in messages(folder, **stages), "the shape of the built-in model does not count"


@pytest.mark.parametrize(("damage", "said"), [
    (lambda f: (f / "config.json").unlink(), "cannot read"), (lambda f: (f / "config.json").write_text("[]"), "object"),
    (lambda f: (f / "config.json").write_bytes(b"\xff{"), "is not JSON"),
    (lambda f: (f / "tokenizer.json").unlink(), "tokenizer.json"), (lambda f: (f / "tokenizer_config.json").unlink(),
                                                                   "eos_token"),
    (lambda f: (f / "model.safetensors").unlink(), "safetensors"),
    (lambda f: (f / "model.safetensors").rename(f / "pytorch_model.bin"), "has no safetensors files"),
    (lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": {"w": "part-9.safetensors"}}'),
     "part-9.safetensors"),
    (lambda f: truncate(f / "model.safetensors", 9000), "has 9000 bytes of"),
    (lambda f: (f / "model.safetensors").write_bytes(b"\xff" * 64), "is not a valid safetensors file"),
    (lambda f: (f / "model.safetensors").write_bytes(b""), "is not a valid safetensors file"),
    (lambda f: header(f, '{"w": {"data_offsets": [0, 0], "shape": [Infinity]}}'), "is not a valid safetensors file"),
    (lambda f: header(f, '{"w": {"data_offsets": [0, Infinity], "shape": []}}'), "is not a valid safetensors file"),
    (lambda f: header(f, f'{{"model.layers.{"9" * 5000}.x": {{"data_offsets": [0, 0], "shape": []}}}}'), "no tensor"),
    (lambda f: header(f, DEEP), "is not a valid safetensors file"),
    (lambda f: (f / "config.json").write_text(DEEP), "config.json is not JSON"),
    (lambda f: (f / "tokenizer.json").write_text(DEEP), "tokenizer.json is not JSON")])
def test_missing_or_damaged_file_is_named(folder: Path, damage: Callable[[Path], object], said: str) -> None:
    damage(folder)
    assert said in messages(folder)


@pytest.mark.parametrize("model", [{"family": "llama"}, {"family": "qwen2", "tied_embeddings": True},
                                   {"family": "qwen3_moe", "expert_intermediate_size": 18}])
def test_model_of_every_family_can_be_used(tmp_path: Path, model: dict[str, Any]) -> None:
    made = make_model_dir(tmp_path / "m", config.parse({"model": model}))
    assert messages(made) == ""
    assert (model_folder.read(made).arch.family.model_type, model_folder.read(made).arch.tied) == (
        model["family"], model.get("tied_embeddings", False))


def test_separate_output_layer_is_found_where_the_config_ties_it(tmp_path: Path) -> None:
    made = make_model_dir(tmp_path / "m", config.parse({"model": {"family": "llama"}}))
    edit(made / "config.json", tie_word_embeddings=True)
    assert "lm_head.weight is not model.embed_tokens.weight" in messages(made)
    file = made / "model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, file)
    assert messages(made) == "", "a copy of the embedding, which some programs write"


def test_experts_are_checked_against_the_parallel_sizes(tmp_path: Path, folder: Path) -> None:
    made = make_model_dir(tmp_path / "m", config.parse({"model": {
        "family": "qwen3_moe", "num_experts": 3, "expert_intermediate_size": 9}}))
    trainer = {"trainer": {"tensor_parallel": 2, "data_parallel": 2, "expert_parallel": 2}}
    assert "moe_intermediate_size=9 is not a multiple of trainer.tensor_parallel=2" in messages(made)
    assert "has 3 experts, and trainer.expert_parallel=2" in messages(made, **trainer)
    assert "has no experts, and trainer.expert_parallel=2" in messages(folder, **trainer)


def test_more_experts_than_memory_has_room_for_are_not_listed(tmp_path: Path) -> None:
    made = make_model_dir(tmp_path / "m", config.parse({"model": {"family": "qwen3_moe"}}))
    edit(made / "config.json", num_hidden_layers=10_000, num_experts=10_000)
    assert "no tensor model.layers.0.mlp.experts.4." in messages(made, trainer={"tensor_parallel": 1})


def test_name_of_a_hub_is_no_folder() -> None:
    with pytest.raises(ConfigError, match="there is no folder Qwen/Qwen3-0.6B") as e:
        model_folder.require(config.parse({"model": {"path": "Qwen/Qwen3-0.6B"}}), 10)
    assert "download" in e.value.hint


def test_vocabulary_of_a_unigram_tokenizer_is_read() -> None:
    ids = model_folder._token_ids({"model": {"vocab": [["<s>", 0.0], ["a", -1.0]]},
                                   "added_tokens": [{"id": 7, "content": "</s>"}]})
    assert ids == {"<s>": 0, "a": 1, "</s>": 7}


def test_built_in_model_needs_positions_for_the_task() -> None:
    with pytest.raises(ConfigError, match=r"model\.max_positions=8"):
        model_folder.require(config.parse({"model": {"max_positions": 8}}), 10)
    model_folder.require(config.parse({}), 10)


def test_doctor_reports_the_model(folder: Path) -> None:
    def finding(**device: str) -> preflight.Finding:
        return next(iter(preflight._model(config.parse({"model": {"path": str(folder)}, "device": device}))))

    assert finding().verdict is Verdict.OK
    assert finding(dtype="bfloat16").verdict is Verdict.WARNING
    (folder / "config.json").unlink()
    assert finding().verdict is Verdict.FAILED


def test_fingerprint_is_of_config_and_all_of_the_weights_and_of_nothing_else(tmp_path: Path) -> None:
    def folder(name: str, config: str = "{}", *, changed_at: int | None = None, nbytes: int = 3 << 20) -> str:
        (tmp_path / name).mkdir()
        weights = bytearray(nbytes)
        if changed_at is not None:
            weights[changed_at] = 1
        (tmp_path / name / "config.json").write_text(config)
        (tmp_path / name / "model.safetensors").write_bytes(weights)
        (tmp_path / name / "README.md").write_text(name)
        return model_folder.fingerprint(tmp_path / name)

    first = folder("a")
    assert folder("b") == first
    others = [folder("c", '{"rope_theta": 1}'), folder("begin", changed_at=0), folder("end", changed_at=(3 << 20) - 1),
              folder("middle", changed_at=3 << 19), folder("longer", nbytes=(3 << 20) + 1)]
    assert len({first, *others}) == 6
    (tmp_path / "a" / "config.json").unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        model_folder.fingerprint(tmp_path / "a")
    os.mkfifo(tmp_path / "b" / "more.safetensors")
    with pytest.raises(ConfigError, match="more.safetensors is no regular file"):
        model_folder.fingerprint(tmp_path / "b")
