"""Naming versions, telling what changed between two, and HF folders."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from support.shared_fixtures import small_disk
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, LlamaConfig

from elastic_rl.config import durations
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.codecs.tensors import dtype_name, to_bytes
from elastic_rl.dcs.manifest import Manifest, Packer
from elastic_rl.dcs.versions import compare, hf_folder, names
from elastic_rl.dcs.versions.names import LABEL
from elastic_rl.errors import ConfigError, DiskFull, VersionNotFound
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.host import inherited_model


def version(number: int, state: VersionState = VersionState.COMMITTED) -> Version:
    return Version(stream="policy", number=number, state=state, epoch=1)


VERSIONS = [version(3), version(4, VersionState.GONE), version(5), version(7), version(8, VersionState.STAGING)]


@pytest.mark.parametrize("name, number", [("policy", 7), ("policy/-1", 5), ("policy/-2", 3), ("policy/5", 5)])
def test_version_is_named_by_number_or_distance_from_head(name: str, number: int) -> None:
    assert names.pick(VERSIONS, *names.parse(name)).number == number


@pytest.mark.parametrize("name, why", [("policy/4", "gone"), ("policy/8", "staging"), ("policy/9", "no such number"),
                                       ("policy/-3", "3 committed")])
def test_unavailable_version_error_lists_available_ones(name: str, why: str) -> None:
    with pytest.raises(VersionNotFound, match=why) as caught:
        names.pick(VERSIONS, *names.parse(name))
    assert "3, 5, 7" in caught.value.hint


@pytest.mark.parametrize("name", ["", "/3", "policy/", "policy/x", "a b", "policy/1/2", "Policy"])
def test_invalid_version_name_is_a_usage_error(name: str) -> None:
    with pytest.raises(ConfigError):
        names.parse(name)


@pytest.mark.parametrize("stream", ["trainer_state", "critic_state", "run_log", "model", "../../x", "policy/3",
                                    "Policy", "a b", "", "1st", "é"])
def test_stream_that_takes_no_import_is_a_usage_error(stream: str) -> None:
    with pytest.raises(ConfigError):
        names.require_importable(stream)


@pytest.mark.parametrize("stream", ["policy", "critic", "candidate_2"])
def test_stream_that_takes_imports_can_be_named(stream: str) -> None:
    names.require_importable(stream)
    assert names.parse(f"{stream}/3") == (stream, 3)


@pytest.mark.parametrize("change, tied, said", [
    ({}, False, ""), ({"lm_head.weight": None}, True, ""), ({"lm_head.weight": None}, False, "lacks lm_head.weight"),
    ({"lm_head.weight": (5, 4)}, True, "5×4 and not 6×4"), ({"a": None}, False, "lacks a"),
    ({"x": (1,)}, False, "x is there"), ({"a": (), "b": None}, False, "a has the shape scalar and not 2×4; 2 of 3")])
def test_weights_of_another_model_are_told_by_their_layout(change: dict[str, tuple[int, ...] | None], tied: bool,
                                                           said: str) -> None:
    wanted = {"a": (2, 4), "b": (4,), "lm_head.weight": (6, 4)}
    found = {name: shape for name, shape in {**wanted, **change}.items() if shape is not None}
    fault = compare.fault_of_layout(found, wanted, tied=tied)
    assert said in fault and bool(said) == bool(fault)
    assert bool(compare.fault_of_layout(wanted, found, tied=tied)) == bool(said)


@pytest.mark.parametrize("text, seconds", [("90s", 90), ("15m", 900), ("2h", 7200), ("7d", 604800)])
def test_duration_is_read_in_seconds(text: str, seconds: int) -> None:
    assert durations.seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "5", "0s", "-1h", "2 h", "h"])
def test_invalid_duration_is_a_usage_error(text: str) -> None:
    with pytest.raises(ConfigError):
        durations.seconds(text)


def manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    packer = Packer(1 << 20)
    chunks: dict[int, bytearray] = {}
    for name, tensor in tensors.items():
        data = to_bytes(tensor).numpy().tobytes()
        for part in packer.add(name, dtype_name(tensor.dtype), tuple(tensor.shape)):
            chunk = chunks.setdefault(part.chunk, bytearray(1 << 20))
            chunk[part.offset:part.offset + part.nbytes] = data[part.source:part.source + part.nbytes]
    return packer.manifest([digest_of(bytes(chunks[i][:size])) for i, size in enumerate(packer.sizes)])


def test_diff_names_exactly_what_changed() -> None:
    old = {"same": torch.ones(10), "moved": torch.arange(8.0), "gone": torch.ones(2), "cast": torch.ones(4)}
    new = {"same": torch.ones(10), "moved": torch.arange(8.0), "new": torch.ones(3), "cast": torch.ones(4).bfloat16()}
    new["moved"][3] += 0.5
    told, look = compare.differing(manifest(old), manifest(new))
    assert {(c.name, c.what) for c in told} == {("gone", "removed"), ("new", "added"), ("cast", "reshaped")}
    assert "moved" in look
    [change] = compare.compare(look, old, new)
    assert (change.name, change.elements, change.changed, change.max_abs) == ("moved", 8, 1, 0.5)
    assert change.relative_l2 == pytest.approx(0.5 / float(torch.arange(8.0).norm()))


@given(st.sampled_from([torch.float32, torch.bfloat16, torch.int32, torch.uint8, torch.bool, torch.complex64,
                        torch.float8_e4m3fn]), st.integers(0, 40), st.data())
def test_diff_counts_changed_elements_of_every_dtype(dtype: torch.dtype, n: int, data: st.DataObject) -> None:
    raw = torch.randint(0, 2, (n,), generator=torch.Generator().manual_seed(n))
    old = raw.to(torch.float32).to(dtype)
    flips = data.draw(st.sets(st.integers(0, n - 1), max_size=n)) if n else set()
    new_raw = raw.clone()
    for i in flips:
        new_raw[i] = 1 - new_raw[i]
    found = list(compare.compare(["t"], {"t": old}, {"t": new_raw.to(torch.float32).to(dtype)}))
    assert [c.changed for c in found] == ([len(flips)] if flips else [])


@pytest.fixture
def like(tmp_path: Path) -> Path:
    out = tmp_path / "like"
    out.mkdir()
    for name, mode in (("config.json", 0o444), ("tokenizer.json", 0o600)):  # as a shared store, and as a private one
        (out / name).write_text("{}")
        (out / name).chmod(mode)
    (out / "model.safetensors").write_bytes(b"old weights")
    return out


TENSORS = {"a": torch.randn(100, 10), "b": torch.randn(50).bfloat16(), "c": torch.tensor(3.0), "d": torch.empty(0, 4)}


@pytest.mark.parametrize("shard_bytes", [1 << 20, 1000])
def test_hf_folder_round_trips_in_one_file_or_many(tmp_path: Path, like: Path, shard_bytes: int) -> None:
    written = []
    files = hf_folder.write(tmp_path / "out", TENSORS.items(), like, shard_bytes=shard_bytes, force=False,
                         progress=written.append)
    assert sum(written) == sum(t.nbytes for t in TENSORS.values())
    assert {"config.json", "tokenizer.json"} <= set(files)
    assert (hf_folder.INDEX in files) == (shard_bytes == 1000)
    found = dict(hf_folder.read(tmp_path / "out"))
    assert found.keys() == TENSORS.keys() and all(torch.equal(found[n], t) for n, t in TENSORS.items())
    assert all(found[n].dtype == t.dtype for n, t in TENSORS.items())
    assert len({(tmp_path / "out" / name).stat().st_mode & 0o777 for name in files}) == 1, "whoever reads one reads all"


def test_hf_folder_has_both_of_two_tied_tensors(tmp_path: Path, like: Path) -> None:
    shared = torch.randn(8)
    hf_folder.write(tmp_path / "out", {"a": shared, "b": shared}.items(), like, shard_bytes=1 << 20, force=False)
    assert set(dict(hf_folder.read(tmp_path / "out"))) == {"a", "b"}


def test_export_says_which_version_it_has_and_does_not_pass_that_on(tmp_path: Path, like: Path) -> None:
    label = {"job": "j", "stream": "policy", "version": 31, "phase": "rl", "step": 30}
    for source, target, said in ((like, "first", label), (tmp_path / "first", "second", None), (
            like, "first", {**label, "version": 41, "step": 40})):
        hf_folder.write(tmp_path / target, TENSORS.items(), source, shard_bytes=1 << 20, force=True, label=said)
    assert inherited_model.holds(tmp_path / "first") == "step 40, version 41"
    assert inherited_model.holds(tmp_path / "second") == inherited_model.holds(tmp_path / "none") == ""
    (tmp_path / "first" / LABEL).write_text('["no label"]')
    assert inherited_model.holds(tmp_path / "first") == ""


def test_export_refuses_nonempty_folder(tmp_path: Path, like: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "precious").write_text("x")
    with pytest.raises(ConfigError, match="not empty"):
        hf_folder.write(target, TENSORS.items(), like, shard_bytes=1 << 20, force=False)
    assert (target / "precious").exists()


def _broken() -> Iterator[tuple[str, torch.Tensor]]:
    yield "a", torch.ones(1000)
    raise RuntimeError("the node died")


def test_failed_export_leaves_nothing(tmp_path: Path, like: Path) -> None:
    with pytest.raises(RuntimeError):
        hf_folder.write(tmp_path / "out", _broken(), like, shard_bytes=100, force=False)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["like"]


def test_export_removes_what_killed_exports_to_the_folder_have_left(tmp_path: Path, like: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    dead = [tmp_path / f".out.{ended.pid}.{kind}" for kind in ("partial", "old")]
    kept = [tmp_path / f".out.{os.getppid()}.partial", tmp_path / f".out2.{ended.pid}.partial", tmp_path / ".out.x.old"]
    for path in (*dead, *kept):
        path.mkdir()
        (path / "part-1").write_bytes(b"weights")
    _export(tmp_path / "out", like)
    assert not any(path.exists() for path in dead) and all(path.exists() for path in kept)


def test_failed_export_keeps_the_old_model_of_a_killed_one(tmp_path: Path, like: Path) -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    old = tmp_path / f".out.{ended.pid}.old"
    old.mkdir()
    with pytest.raises(RuntimeError):
        _export(tmp_path / "out", like, _broken())
    assert old.exists()


def test_export_copies_files_of_a_model_only(tmp_path: Path, like: Path) -> None:
    for name in ("consolidated.00.pth", "model.gguf", "tf_model.h5", "flax_model.msgpack", ".env", "notes.txt"):
        (like / name).write_bytes(b"x")
    own = {"config.json", "tokenizer.json", "tokenizer.model", "merges.txt", "chat_template.jinja", "LICENSE.txt"}
    for name in own:
        (like / name).write_text("{}")
    _export(tmp_path / "out", like)
    assert {path.name for path in (tmp_path / "out").iterdir()} == own | {"model.safetensors"}


def _tiny(**more: Any) -> LlamaConfig:
    return LlamaConfig(vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2,
                       **more)


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("says", [{}, {"dtype": "float32"}, {"dtype": "bfloat16"}, {"torch_dtype": "float16"}])
def test_export_is_loaded_by_transformers_bit_for_bit(tmp_path: Path, like: Path, stored: torch.dtype,
                                                      says: dict[str, str]) -> None:
    """Whatever dtype the folder of its config.json has."""
    (like / "tokenizer.json").unlink()
    model = AutoModelForCausalLM.from_config(_tiny(), dtype=stored)
    raw = {key: value for key, value in model.config.to_dict().items() if key not in ("dtype", "torch_dtype")}
    (like / "config.json").write_text(json.dumps(raw | says), encoding="utf-8")
    weights = {name: torch.randn(tensor.shape).to(stored) for name, tensor in model.state_dict().items()}
    _export(tmp_path / "out", like, weights.items())
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).state_dict()
    assert all(loaded[name].dtype == stored and torch.equal(loaded[name], weights[name]) for name in weights)
    said = json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8"))
    assert {key: said.get(key) for key in says or {"dtype": ""}} == dict.fromkeys(
        says or {"dtype": ""}, str(stored).removeprefix("torch."))


@pytest.mark.parametrize("dtypes, said", [
    ((torch.bfloat16, torch.float32), "float32"), ((torch.bfloat16, torch.float16), "float32"),
    ((torch.float16, torch.float16), "float16"), ((torch.bfloat16, torch.int32), "bfloat16"),
    ((torch.int32, torch.uint8), None)])
def test_dtype_of_an_export_holds_the_values_of_all_its_tensors(tmp_path: Path, like: Path,
                                                                dtypes: tuple[torch.dtype, ...], said: str | None
                                                                ) -> None:
    _export(tmp_path / "out", like, [(str(i), torch.ones(2, dtype=dtype)) for i, dtype in enumerate(dtypes)])
    assert json.loads((tmp_path / "out" / "config.json").read_text(encoding="utf-8")).get("dtype") == said


@pytest.mark.parametrize("says", [True, False, None])
@pytest.mark.parametrize("tied", [True, False])
def test_export_says_whether_its_output_layer_is_its_embedding(tmp_path: Path, like: Path, tied: bool,
                                                               says: bool | None) -> None:
    (like / "tokenizer.json").unlink()
    model = AutoModelForCausalLM.from_config(_tiny(tie_word_embeddings=tied))
    raw = {key: value for key, value in model.config.to_dict().items() if key != "tie_word_embeddings"}
    (like / "config.json").write_text(json.dumps(raw | ({} if says is None else {"tie_word_embeddings": says})))
    weights = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()
               if not tied or name != "lm_head.weight"}
    _export(tmp_path / "out", like, weights.items())
    loaded = AutoModelForCausalLM.from_pretrained(str(tmp_path / "out")).state_dict()
    assert all(torch.equal(loaded[name], weights[name]) for name in weights)
    assert torch.equal(loaded["lm_head.weight"], weights["model.embed_tokens.weight"]) is tied


@pytest.mark.parametrize("architectures", [["LlamaForCausalLM"], "LlamaForCausalLM"])
def test_export_of_a_critic_is_loaded_by_transformers_with_its_value_head(tmp_path: Path, like: Path,
                                                                          architectures: object) -> None:
    (like / "tokenizer.json").unlink()
    model = AutoModelForCausalLM.from_config(_tiny())
    (like / "config.json").write_text(json.dumps(model.config.to_dict() | {"architectures": architectures}))
    weights = {name: torch.randn(tensor.shape) for name, tensor in model.state_dict().items()
               if name != "lm_head.weight"} | {"score.weight": torch.randn(1, 8)}
    _export(tmp_path / "out", like, weights.items())
    loaded = AutoModelForSequenceClassification.from_pretrained(str(tmp_path / "out"))
    found = loaded.state_dict()
    assert found.keys() == weights.keys() and all(torch.equal(found[name], weights[name]) for name in weights)
    assert loaded.config.architectures == ["LlamaForSequenceClassification"] and loaded.config.num_labels == 1


def test_export_says_that_its_weights_are_quantized_only_where_they_are(tmp_path: Path, like: Path) -> None:
    (like / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}), encoding="utf-8")
    for name, dtype in (("plain", torch.bfloat16), ("packed", torch.float8_e4m3fn)):
        _export(tmp_path / name, like, [("w", torch.ones(2, dtype=dtype)), ("b", torch.ones(2))])
        said = json.loads((tmp_path / name / "config.json").read_text(encoding="utf-8"))
        assert ("quantization_config" in said) is (name == "packed")


def test_export_like_a_model_of_another_size_is_refused(tmp_path: Path, like: Path) -> None:
    (like / "config.json").write_text(json.dumps(_tiny().to_dict()))
    for shape, said in (((17, 8), "vocab_size is 16, and that of the weights 17"), ((16, 4), "hidden_size is 8")):
        with pytest.raises(ConfigError, match=said):
            _export(tmp_path / "out", like, [("model.embed_tokens.weight", torch.ones(shape))])
    assert not (tmp_path / "out").exists()


def test_export_like_a_folder_with_a_damaged_config_is_a_usage_error(tmp_path: Path, like: Path) -> None:
    for content in ("[", "[]"):
        (like / "config.json").write_text(content, encoding="utf-8")
        with pytest.raises(ConfigError, match="config.json"):
            _export(tmp_path / "out", like)
    assert not (tmp_path / "out").exists()


def test_export_has_the_named_chat_templates_and_can_be_replaced(tmp_path: Path, like: Path) -> None:
    templates = like / "additional_chat_templates"
    templates.mkdir()
    (templates / "tool_use.jinja").write_text("T", encoding="utf-8")
    (templates / ".cache").write_text("x", encoding="utf-8")
    for _ in range(2):
        _export(tmp_path / "out", like)
        copied = tmp_path / "out" / "additional_chat_templates"
        assert [(path.name, path.read_text(encoding="utf-8")) for path in copied.iterdir()] == [("tool_use.jinja", "T")]
    (copied / "notes.txt").write_text("x", encoding="utf-8")
    with pytest.raises(ConfigError, match="additional_chat_templates"):
        _export(tmp_path / "out", like)
    assert (copied / "notes.txt").exists(), "what is no template is not deleted"


def test_tensor_in_two_files_is_refused_unless_an_index_says_which_counts(tmp_path: Path) -> None:
    one, other = tmp_path / "model-1.safetensors", tmp_path / "model-2.safetensors"
    save_file({"a": torch.zeros(2), "b": torch.zeros(2)}, one)
    save_file({"a": torch.ones(2)}, other)
    with pytest.raises(ConfigError, match="tensor a in model-1.safetensors and in model-2.safetensors") as caught:
        next(hf_folder.read(tmp_path))
    assert "move the file" in caught.value.hint
    index = tmp_path / hf_folder.INDEX
    index.write_text(json.dumps({"weight_map": {"a": other.name, "b": one.name}}), encoding="utf-8")
    assert [(name, tensor.tolist()) for name, tensor in hf_folder.read(tmp_path)] == [("b", [0, 0]), ("a", [1, 1])]
    index.write_text(json.dumps({"weight_map": {"a": other.name, "c": one.name}}), encoding="utf-8")
    with pytest.raises(ConfigError, match="model-1.safetensors has no tensor c"):
        next(hf_folder.read(tmp_path))


def test_export_to_full_disk_raises_disk_full_and_leaves_nothing(tmp_path: Path, like: Path) -> None:
    with small_disk(tmp_path / "small", "100k") as small:
        with pytest.raises(DiskFull):
            hf_folder.write(small / "out", [("a", torch.ones(100_000))], like, shard_bytes=1 << 20, force=False)
        assert list(small.iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no safetensors", b"\xff" * 100])
def test_invalid_safetensors_file_is_a_usage_error(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match="safetensors"):
        list(hf_folder.read(tmp_path))


def test_shapes_of_a_folder_are_read_with_one_look_at_each_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                ) -> None:
    opened = list[Path]()

    def open_once(file: Path, framework: str) -> Any:
        opened.append(file)
        if opened.count(file) > 1:
            raise SafetensorError("it was replaced meanwhile")
        return safe_open(file, framework=framework)

    monkeypatch.setattr(hf_folder, "safe_open", open_once)
    save_file({"a": torch.ones(2, 3)}, tmp_path / "one.safetensors")
    save_file({"b": torch.ones(())}, tmp_path / "two.safetensors")
    assert hf_folder.layout(tmp_path) == {"a": (2, 3), "b": ()}


def test_folder_with_missing_weights_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="safetensors"):
        hf_folder.files_of(tmp_path)
    (tmp_path / hf_folder.INDEX).write_text(json.dumps({"weight_map": {"a": "model-00001-of-00002.safetensors"}}))
    with pytest.raises(ConfigError, match="00001-of-00002"):
        hf_folder.files_of(tmp_path)


def _export(target: Path, like: Path, tensors: Iterable[tuple[str, torch.Tensor]] | None = None) -> None:
    hf_folder.write(target, TENSORS.items() if tensors is None else tensors, like, shard_bytes=1 << 20, force=True)


@pytest.mark.parametrize("index", ['{"weight_map": {"a": 5}}', '{"weight_map": {"a": 5, "b": "c"}}', "[" * 100_000,
                                   '{"weight_map": {"a": ["b"]}}'], ids=["number", "mixed", "deep", "list"])
def test_damaged_index_of_an_hf_folder_is_an_error(tmp_path: Path, index: str) -> None:
    (tmp_path / hf_folder.INDEX).write_text(index)
    with pytest.raises(ConfigError, match="cannot be read"):
        hf_folder.files_of(tmp_path)


@pytest.mark.parametrize("extra", ["thesis.docx", "sub/config.json", ".git/HEAD"])
def test_forced_export_replaces_model_folders_only(tmp_path: Path, like: Path, extra: str) -> None:
    target = tmp_path / "out"
    _export(target, like)
    _export(target, like)
    precious = target / extra
    precious.parent.mkdir(exist_ok=True)
    precious.write_text("mine")
    with pytest.raises(ConfigError, match=extra.partition("/")[0]):
        _export(target, like)
    assert precious.read_text() == "mine"


def test_forced_export_refuses_a_folder_without_a_model(tmp_path: Path, like: Path) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"config\.json"):
        _export(target, like)
    assert (target / "notes.txt").exists()


def test_failed_export_leaves_the_old_folder(tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "out"
    _export(target, like)
    before = {p.name: p.read_bytes() for p in target.iterdir()}
    rename = Path.rename

    def fail(path: Path, to: Path) -> Path:
        if to == target and path.name.endswith(".partial"):
            raise OSError(5, "Input/output error")
        return rename(path, to)

    monkeypatch.setattr(Path, "rename", fail)
    with pytest.raises(ConfigError, match="Input/output error"):
        _export(target, like, [("other", torch.ones(1))])
    assert {p.name: p.read_bytes() for p in target.iterdir()} == before
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_export_to_no_folder_is_refused(tmp_path: Path, like: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    for target in (tmp_path / "file", tmp_path / "file" / "out", tmp_path / "link", Path("."), Path("/")):
        with pytest.raises(ConfigError):
            _export(target, like)
    assert list((tmp_path / "elsewhere").iterdir()) == []
