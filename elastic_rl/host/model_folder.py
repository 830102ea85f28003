"""Whether a run can work with a Hugging Face model folder: read from its JSON files, without torch or transformers.

What it refuses would otherwise end the trainer or an engine minutes after the start.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from elastic_rl.config import Config
from elastic_rl.config.groups import CRITIC, TrainerGroupSpec
from elastic_rl.errors import ConfigError
from elastic_rl.models.arch import (
    HF_EMBEDDING,
    HF_OUTPUT,
    MAX_CONFIG_BYTES,
    VALUE_HEAD,
    ModelArch,
    config_eos_ids,
    read_json,
    vocabulary_of,
)
from elastic_rl.runtime.files import os_error_text, read_limited

DTYPES = ("float32", "bfloat16", "float16")
_INDEX = "model.safetensors.index.json"
_MAX_JSON_BYTES = 256 << 20
"""Largest size of an index or of a file of the tokenizer. A tokenizer.json of large models has some tens of MiB, and
a tokenizer_config.json some MiB where tens of thousands of tokens were added."""
_SHOWN = 4
"""Tensors that are named, of those that are missing or have a wrong shape."""
_MAX_DIGITS = 10
"""Most digits of the number of a layer; Python reads none of thousands."""
_MAX_HEADER_BYTES = 100 << 20
"""Largest header of a safetensors file, as the format allows."""
_COMPARED, _COMPARED_BYTES = 64, 4096
"""Parts of two tensors that are compared, and bytes of each."""
_SAMPLES, _SAMPLE_BYTES = 16, 64 << 10
"""Parts of each file that ``fingerprint`` reads, and their size."""
_OLD_TOKENIZERS = ("tokenizer.model", "vocab.json")
"""Files of a tokenizer without tokenizer.json, which transformers makes that of."""


def fingerprint(folder: Path) -> str:
    """A digest, in hexadecimal, of the config and of parts of each file of weights, which takes a moment for a model
    of any size. Folders with other models have other ones, unless these differ between the parts alone. Raises
    ConfigError."""
    try:
        found = hashlib.blake2b(read_limited(folder / "config.json", MAX_CONFIG_BYTES), digest_size=16)
        for path in sorted(folder.glob("*.safetensors")):
            about = path.stat()
            if not stat.S_ISREG(about.st_mode):  # a FIFO would be waited for without end
                raise ConfigError(f"{path} is no regular file", hint="move it out of the model folder")
            size = about.st_size
            found.update(os.fsencode(f"{path.name} {size} "))
            with path.open("rb") as file:
                for at in [*(size * i // _SAMPLES for i in range(_SAMPLES)), max(0, size - _SAMPLE_BYTES)]:
                    file.seek(at)
                    found.update(file.read(_SAMPLE_BYTES))
    except OSError as e:
        raise ConfigError(f"the model {folder} cannot be read: {os_error_text(e, folder)}",
                          hint="name an HF model folder that this user can read") from e
    return found.hexdigest()


@dataclass(frozen=True)
class Fault:
    """Why a run cannot work with the model, and what to do."""

    message: str
    fix: str


@dataclass(frozen=True)
class Facts:
    """What a model folder says of its model."""

    arch: ModelArch
    dtype: str
    """Dtype as in config.json; empty where it does not say."""
    eos_ids: frozenset[int]


def require(cfg: Config, longest_sequence: int) -> None:
    """Raises ConfigError with every fault when the run cannot work with its model: the folder of ``model.path``, else
    the built-in shape. ``longest_sequence``: tokens of the longest prompt and response of the data, together."""
    _refuse(cfg, faults(cfg, longest_sequence))


def require_critic(cfg: Config) -> ModelArch | None:
    """The shape of the critic's model; None for that of the built-in one. Raises ConfigError with every fault when the
    critic's group cannot work with the folder of ``critic.model``, or else of ``model.path``; but for the length of
    sequences, which ``require_critic_positions`` is for."""
    path = cfg.critic.model or cfg.model.path
    if not path:
        return None
    folder = Path(path).expanduser()
    arch = read(folder, "critic.model" if cfg.critic.model else "model.path").arch
    found = list(_parallel_of(CRITIC, cfg, arch))
    if cfg.critic.model:
        found += _weights(folder, arch.as_critic())
        if not cfg.model.path:
            found.append(Fault("the policy is the built-in model, whose tokens no other model has", "set model.path"))
        elif arch.vocab < (vocab := read(Path(cfg.model.path).expanduser()).arch.vocab):
            found.append(Fault(f"the critic has {arch.vocab} tokens, and the policy {vocab}",
                               "take a critic with the policy's tokens"))
    _refuse_critic(path, found)
    return arch


def require_critic_positions(cfg: Config, arch: ModelArch, longest_sequence: int) -> None:
    """Raises ConfigError when the model of ``critic.model``, of that shape, has too few positions. The policy's, which
    a critic without that begins with, is for ``require_positions``."""
    name = _positions_key(Path(cfg.critic.model).expanduser())
    _refuse_critic(cfg.critic.model, list(_positions(longest_sequence, arch.max_positions, name)))


def _refuse_critic(path: str, found: list[Fault]) -> None:
    if found:
        raise ConfigError(f"the critic cannot begin with {path}:\n  " + "\n  ".join(f.message for f in found),
                          hint="; ".join(dict.fromkeys(f.fix for f in found if f.fix)))


def require_positions(cfg: Config, facts: Facts | None, longest_sequence: int) -> None:
    """Raises ConfigError for a model with fewer positions than the longest sequence has tokens. ``facts``: what was
    read of the folder of ``model.path``."""
    positions, name = (cfg.model.max_positions, "model.max_positions") if facts is None else (
        facts.arch.max_positions, _positions_key(Path(cfg.model.path).expanduser()))
    _refuse(cfg, list(_positions(longest_sequence, positions, name)))


def _refuse(cfg: Config, found: list[Fault]) -> None:
    if found:
        where = f"model.path={cfg.model.path}" if cfg.model.path else "the built-in model"
        raise ConfigError(f"{where} cannot be used:\n  " + "\n  ".join(f.message for f in found),
                          hint="; ".join(dict.fromkeys(f.fix for f in found if f.fix)))


def faults(cfg: Config, longest_sequence: int = 0) -> list[Fault]:
    """What is wrong, most fundamental first; empty where nothing is. ``longest_sequence`` 0: not known."""
    if not cfg.model.path:
        return list(_positions(longest_sequence, cfg.model.max_positions, "model.max_positions"))
    folder = Path(cfg.model.path).expanduser()
    try:
        facts = read(folder)
    except ConfigError as e:
        return [Fault(e.message, e.hint)]
    checks: tuple[Callable[[], Iterable[Fault]], ...] = (
        lambda: _parallel(cfg, facts.arch), lambda: _in_forward_groups(cfg, facts.arch),
        lambda: _weights(folder, facts.arch), lambda: _tokenizer(folder, facts),
        lambda: _positions(longest_sequence, facts.arch.max_positions, _positions_key(folder)))
    return [fault for check in checks for fault in check()]


def require_servable(folder: Path) -> str:
    """The ``model_type`` of a model that engines serve as it is, of whatever family. Raises ConfigError for a folder
    without one, and for a tokenizer whose ids the model does not have: the first of them would end an engine."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", hint="name a folder: download the model first")
    raw = read_json(folder / "config.json")
    if not any(folder.glob("*.safetensors")) and not any(folder.glob("*.bin")):
        raise ConfigError(f"{folder} has no weights", hint="download the model again")
    path, vocab = folder / "tokenizer.json", vocabulary_of(folder)
    ids = _token_ids(read_json(path, _MAX_JSON_BYTES)) if vocab and path.exists() else {}
    if vocab and (found := list(_beyond(ids, vocab))):
        raise ConfigError(f"{folder}: {found[0].message}", hint=found[0].fix)
    return str(raw.get("model_type") or "unknown")


def read(folder: Path, setting: str = "model.path") -> Facts:
    """Raises ConfigError for a folder that holds no model that the trainer supports. ``setting``: that names it."""
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {folder}", hint=f"{setting} names a folder: download the model first")
    path = folder / "config.json"
    raw = read_json(path)
    arch = ModelArch.parse(raw, str(path))
    dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "").removeprefix("torch.")
    if dtype and dtype not in DTYPES:
        raise ConfigError(f"{path}: dtype {dtype!r} is not supported", hint=f"supported: {', '.join(DTYPES)}")
    return Facts(arch, dtype, frozenset(_eos_ids(folder, raw)))


def _eos_ids(folder: Path, config: dict[str, Any]) -> Iterator[int]:
    """Token ids that end a response for the engines: those of generation_config.json, else of config.json."""
    path = folder / "generation_config.json"
    found = (read_json(path) if path.exists() else {}).get("eos_token_id", config_eos_ids(config))
    yield from (i for i in (found if isinstance(found, list) else [found]) if isinstance(i, int))


def _parallel(cfg: Config, arch: ModelArch) -> Iterator[Fault]:
    trainer, moe = cfg.trainer, arch.moe
    if arch.heads % arch.kv_heads:
        yield Fault(f"{arch.heads} attention heads cannot share {arch.kv_heads} key-value heads evenly",
                    "use another model")
    if arch.head_dim % 2:
        yield Fault(f"the model's head_dim={arch.head_dim} is odd: the rotary position embedding turns pairs of values",
                    "use another model")
    mlp = ("intermediate_size", arch.ffn) if moe is None else ("moe_intermediate_size", moe.ffn)
    for key, size, name, ranks in (
            ("num_attention_heads", arch.heads, "trainer.tensor_parallel", trainer.tensor_parallel),
            ("num_key_value_heads", arch.kv_heads, "trainer.tensor_parallel", trainer.tensor_parallel),
            (*mlp, "trainer.tensor_parallel", trainer.tensor_parallel),
            ("num_hidden_layers", arch.layers, "trainer.pipeline_parallel", trainer.pipeline_parallel)):
        if size % ranks:
            yield Fault(f"the model's {key}={size} is not a multiple of {name}={ranks}",
                        f"set a {name} that divides {size}")
    try:
        arch.require_expert_parallel(trainer.expert_parallel)
    except ConfigError as e:
        yield Fault(e.message, e.hint)


def _parallel_of(group: TrainerGroupSpec, cfg: Config, arch: ModelArch) -> Iterator[Fault]:
    for fault in _parallel(cfg.of_group(group), arch):
        yield Fault(group.with_own_keys(fault.message), group.with_own_keys(fault.fix))


def _in_forward_groups(cfg: Config, arch: ModelArch) -> Iterator[Fault]:
    """The faults of the groups that compute with the same model and have parallel sizes of their own."""
    for group in cfg.trainer_groups:
        if not group.trains:
            yield from (Fault(f"of the group {group.name}: {fault.message}", fault.fix)
                        for fault in _parallel_of(group, cfg, arch))


def _weights(folder: Path, arch: ModelArch) -> Iterator[Fault]:
    """Every tensor of the model must be in a file that is there, with the shape that the config gives it."""
    index = folder / _INDEX
    again = "download the model again"
    try:
        listed = read_json(index, _MAX_JSON_BYTES)["weight_map"] if index.exists() else {}
        names = sorted(set(listed.values())) if index.exists() else sorted(p.name for p in folder.glob("*.safetensors"))
        missing = [name for name in names if not (folder / name).is_file()]
    except (ConfigError, KeyError, AttributeError, TypeError):
        yield Fault(f"{index} lists no weights", again)
        return
    if missing or not names:
        other = not missing and any(folder.glob("pytorch_model*.bin"))
        yield Fault(f"{folder} has no {', '.join(missing[:3]) or 'safetensors files'}",
                    "it has weights in PyTorch's format: load and save it with transformers, save_pretrained" if other
                    else again)
        return
    stored: dict[str, _Stored] = {}
    for name in names:
        try:
            of_file = _stored(folder / name)
        except ConfigError as e:
            yield Fault(e.message, again)
            return
        if not index.exists() and (twice := sorted(stored.keys() & of_file.keys())):
            yield Fault(f"{folder} has the tensor {twice[0]} in {stored[twice[0]].file.name} and in {name}, and no "
                        f"{index.name} that says which of them counts",
                        "move the file that is not the model's out of the folder")
            return
        stored |= {tensor: entry for tensor, entry in of_file.items() if listed.get(tensor, name) == name}
    # No more than say what is missing: a damaged config.json may have layers and experts for more than memory holds.
    wanted = list(islice(arch.hf_names(), len(stored) + _SHOWN))
    if arch.value_head and VALUE_HEAD not in stored:
        wanted.remove(VALUE_HEAD)  # a critic begins without one
    lacking = [name for name in wanted if name not in stored][:_SHOWN]
    if lacking:
        more = " and more" if len(lacking) == _SHOWN else ""
        yield Fault(f"{folder} has no tensor {', '.join(lacking)}{more} of the {arch.family.model_type} model", again)
    if surplus := sorted(name for name in stored if _layer_of(name) >= arch.layers):
        yield Fault(f"{folder} has {surplus[0]}, and config.json says num_hidden_layers={arch.layers}",
                    "correct num_hidden_layers in config.json, or download the model again")
    wrong = [(name, shape) for name in wanted
             if name in stored and (shape := shape_of(name, arch)) and stored[name].shape != shape]
    for name, shape in wrong[:_SHOWN]:
        yield Fault(f"{name} has shape {stored[name].shape} where config.json says {shape}",
                    "correct config.json, which is not that of these weights, or download the model again")
    if len(wrong) > _SHOWN:
        yield Fault(f"{len(wrong) - _SHOWN} more tensors have other shapes than config.json says", "")
    if arch.tied and {HF_EMBEDDING, HF_OUTPUT} <= stored.keys() and _differ(stored[HF_EMBEDDING], stored[HF_OUTPUT]):
        yield Fault(f"{HF_OUTPUT} is not {HF_EMBEDDING}, and config.json says tie_word_embeddings=true: trainer and "
                    "engines would leave it out", "set tie_word_embeddings to false in config.json")


def _layer_of(name: str) -> int:
    """The layer of a tensor; -1 for one of none."""
    part = name.removeprefix("model.layers.").partition(".")[0]
    return int(part) if name.startswith("model.layers.") and part.isdecimal() and len(part) < _MAX_DIGITS else -1


def shape_of(name: str, arch: ModelArch) -> list[int]:
    """The shape that a tensor of the model has by its config; [] where its name does not say."""
    queries, keys = arch.heads * arch.head_dim, arch.kv_heads * arch.head_dim
    ffn = arch.moe.ffn if arch.moe is not None else arch.ffn
    rows = {"embed_tokens": arch.vocab, "lm_head": arch.vocab, "score": 1, "q_proj": queries, "k_proj": keys,
            "v_proj": keys, "o_proj": arch.hidden, "gate_proj": ffn, "up_proj": ffn, "down_proj": arch.hidden}
    columns = {"o_proj": queries, "down_proj": ffn}
    *_, module, kind = name.split(".")
    if module not in rows:
        return []
    return [rows[module]] if kind == "bias" else [rows[module], columns.get(module, arch.hidden)]


@dataclass(frozen=True)
class _Stored:
    """A tensor of a safetensors file."""

    file: Path
    dtype: str
    shape: list[int]
    start: int
    """Offset of the tensor's first byte in the file; ``stop`` is that after its last one."""
    stop: int


def _stored(file: Path) -> dict[str, _Stored]:
    """The tensors of a safetensors file, from its header: its length (8 bytes, little-endian), and JSON. Raises
    ConfigError for another file, or one that is cut off."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if not 0 < length <= min(_MAX_HEADER_BYTES, size - 8):
                raise ValueError(f"its header would have {length} bytes")
            header = json.loads(f.read(length))
        values = 8 + length
        tensors = {name: _Stored(file, str(entry.get("dtype")), [int(n) for n in entry["shape"]],
                                 *(values + int(at) for at in entry["data_offsets"]))
                   for name, entry in header.items() if name != "__metadata__"}
        end = max((tensor.stop for tensor in tensors.values()), default=values)
        if size < end:
            raise ValueError(f"it has {size} bytes of {end}")
        return tensors
    except OSError as e:
        raise ConfigError(f"cannot read {file}: {e.strerror}") from e
    except (ValueError, OverflowError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as e:
        raise ConfigError(f"{file} is not a valid safetensors file: {e}") from e


def _differ(one: _Stored, other: _Stored) -> bool:
    """Whether tensors differ in some of their values, which are spread over them: two that were trained apart differ
    nearly everywhere."""
    size = one.stop - one.start
    if (one.dtype, one.shape, size) != (other.dtype, other.shape, other.stop - other.start):
        return False  # one of them has a wrong shape, or their bytes cannot be compared
    try:
        with one.file.open("rb") as f, other.file.open("rb") as g:
            for i in range(_COMPARED):
                at = max(0, size - _COMPARED_BYTES) * i // (_COMPARED - 1)
                f.seek(one.start + at)
                g.seek(other.start + at)
                if f.read(min(size, _COMPARED_BYTES)) != g.read(min(size, _COMPARED_BYTES)):
                    return True
    except OSError:
        return False  # who loads the model says so
    return False


def _tokenizer(folder: Path, facts: Facts) -> Iterator[Fault]:
    """The tokenizer must make ids that the model has, and the engines must know which of them ends a response."""
    path, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    vocab = facts.arch.vocab
    if not path.exists() and (old := [name for name in _OLD_TOKENIZERS if (folder / name).exists()]):
        yield Fault(f"{folder} has no {path.name}, only {old[0]}",
                    f"make it with transformers: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained("
                    f"{str(folder)!r})")
        return
    try:
        ids = _token_ids(read_json(path, _MAX_JSON_BYTES))
        eos = _eos_token(folder)
    except ConfigError as e:
        yield Fault(e.message, "download the model again, with its tokenizer.json")
        return
    if not ids:
        yield Fault(f"{path} has no vocabulary", "download the model again, with its tokenizer.json")
        return
    yield from _beyond(ids, vocab)
    if not isinstance(eos, str) or not eos or eos not in ids:
        yield Fault(f"{settings} names no eos_token that {path.name} has ({eos!r})",
                    f'add "eos_token" to {settings.name}, or use a tokenizer with an end-of-sequence token')
    elif ids[eos] not in facts.eos_ids:
        yield Fault(f"the tokenizer's eos_token {eos!r} (id {ids[eos]}) is not the model's eos_token_id "
                    f"({', '.join(map(str, sorted(facts.eos_ids))) or 'none'}), so engines would not stop at it",
                    "correct eos_token_id in generation_config.json")


def _eos_token(folder: Path) -> Any:
    """The tokenizer's end token as transformers reads it: special_tokens_map.json, of older releases, counts where
    tokenizer_config.json has no ``added_tokens_decoder``. Raises ConfigError."""
    found = dict[str, Any]()
    if (settings := folder / "tokenizer_config.json").exists():
        found = read_json(settings, _MAX_JSON_BYTES)
    if "added_tokens_decoder" not in found and (special := folder / "special_tokens_map.json").exists():
        found = {**found, **read_json(special, _MAX_JSON_BYTES)}
    eos = found.get("eos_token")
    return eos.get("content") if isinstance(eos, dict) else eos


def _beyond(ids: Mapping[str, int], vocab: int) -> Iterator[Fault]:
    if (largest := max(ids.values(), default=0)) >= vocab:
        yield Fault(f"the tokenizer has token id {largest}, and the model's vocab_size is {vocab}",
                    "use the tokenizer that belongs to the model")


def _token_ids(tokenizer: dict[str, Any]) -> dict[str, int]:
    """Tokens of a tokenizer.json with their ids, added ones included; {} where it is damaged."""
    model, more = tokenizer.get("model"), tokenizer.get("added_tokens") or []
    vocab = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocab, dict | list) or not isinstance(more, list):
        return {}
    if isinstance(vocab, dict):
        ids = {str(token): i for token, i in vocab.items() if isinstance(i, int)}
    else:  # Unigram: [token, score] in the order of the ids
        ids = {str(entry[0]): i for i, entry in enumerate(vocab) if isinstance(entry, list) and entry}
    for added in more:
        if isinstance(added, dict) and isinstance(added.get("id"), int):
            ids[str(added.get("content"))] = added["id"]
    return ids


def _positions_key(folder: Path) -> str:
    return f"{folder / 'config.json'}: max_position_embeddings"


def _positions(needed: int, positions: int, name: str) -> Iterator[Fault]:
    if positions < needed:
        yield Fault(f"{name}={positions} is too small for the longest prompt and response, {needed} tokens",
                    "use a model with more positions, or shorter prompts and responses")
