"""Hugging Face model folders: writing a version as one, and reading one."""

from __future__ import annotations

import errno
import functools
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from fnmatch import fnmatch
from glob import escape
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from elastic_rl.dcs.versions.names import LABEL
from elastic_rl.errors import ConfigError, DiskFull
from elastic_rl.models.arch import HF_EMBEDDING, HF_OUTPUT, MAX_CONFIG_BYTES, VALUE_HEAD
from elastic_rl.models.chat_templates import TEMPLATES, named_templates
from elastic_rl.runtime.files import let_readers, read_limited

INDEX = "model.safetensors.index.json"
_COPIED = ("config.json", "generation_config.json", "tokenizer*", "special_tokens_map.json", "added_tokens.json",
           "vocab.json", "vocab.txt", "merges.txt", "*.tiktoken", "tekken.json", "spiece.model", "sentencepiece*.model",
           "chat_template.*", "*preprocessor_config.json",
           "README.md", "LICENSE*", "NOTICE*", "USE_POLICY*")
"""Names of the files of a model that an export has beside its weights. A folder may hold anything else, such as the
weights in other formats, or secrets."""
_MODEL_FILES = (*_COPIED, LABEL, "*.safetensors", "*.index.json", "*.bin", ".gitattributes")
"""Names of files that a model folder may have, and that an export with ``force`` deletes."""

_MAX_INDEX_BYTES = 256 << 20
_DTYPE_KEYS = ("dtype", "torch_dtype")
"""Keys of config.json for the dtype in which transformers loads the weights; the second is that of older releases."""

_WITH_VALUE_HEAD = "ForSequenceClassification"
"""End of the names of transformers' classes that have ``VALUE_HEAD`` in the place of an output layer."""

Tensors = Iterable[tuple[str, torch.Tensor]]
Progress = Callable[[int], None]
"""Called with the bytes written or read since the last call."""


class _Kind(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]


def write(folder: Path, tensors: Tensors, like: Path, *, shard_bytes: int, force: bool,
          label: Mapping[str, Any] | None = None, progress: Progress = lambda n: None) -> list[str]:
    """Writes tensors as safetensors of at most ``shard_bytes`` (a larger tensor alone), and beside them the config and
    tokenizer of the folder ``like``; what config.json says of the weights is theirs (``_config``). The folder appears
    whole or not at all; returns the names of its files. ``force``: replace a model folder, and no folder with anything
    else in it. ``label``: what a file ``LABEL`` says of the weights.

    Raises ConfigError (``folder`` cannot be written or replaced, ``like`` is no model folder) and DiskFull.
    """
    folder = Path(os.path.abspath(folder))
    _require_replaceable(folder, like, force=force)
    if not (like / "config.json").exists():
        raise ConfigError(f"{like} has no config.json to copy", hint="name a model folder with --like")
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    try:
        _remove_leftovers(folder, "partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for path in like.iterdir():
            if path.is_file() and _is_named(path, _COPIED):
                shutil.copyfile(path, partial / path.name)  # without its permissions: those of the umask are right here
        for path in named_templates(like):
            (partial / TEMPLATES).mkdir(exist_ok=True)
            shutil.copyfile(path, partial / TEMPLATES / path.name)
        written = _write_shards(partial, tensors, shard_bytes, progress)
        (partial / "config.json").write_text(_config(like, written), encoding="utf-8")
        if label is not None:
            (partial / LABEL).write_text(json.dumps(label, indent=2) + "\n", encoding="utf-8")
        _replace(folder, partial)
        _remove_leftovers(folder, "old")  # not before: until now it may have been the only model there
    except (OSError, SafetensorError) as e:
        if getattr(e, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "No space left" in str(e):
            raise DiskFull(f"{folder.parent} has no room for the model; nothing was left there",
                           hint="free some, or name a folder on another disk") from e
        if isinstance(e, OSError):
            raise ConfigError(f"{folder} cannot be written: {e.strerror or e}", hint="name another folder") from e
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(p.name for p in folder.iterdir())


def _config(like: Path, written: Mapping[str, _Kind]) -> str:
    """The config.json of the folder ``like`` with what it says of the weights as those that were ``written`` have it:

    - the dtype. Transformers loads all weights of a folder in one: of several it is one that holds the values of each,
      so loading changes none;
    - whether the output layer is the embedding: else transformers takes one for the other;
    - that they are not quantized, where all of them are floats of 16 bits or more;
    - the class of a model with a value head, which has one label.

    Raises ConfigError for a config.json that is no JSON object, and for one of a model of another size.
    """
    path = like / "config.json"
    try:
        raw = json.loads(read_limited(path, MAX_CONFIG_BYTES).decode("utf-8"))
    except (ValueError, RecursionError) as e:
        raise ConfigError(f"{path} is not JSON: {e}", hint="name another model folder with --like") from e
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}", hint="name another model folder with --like") from e
    if not isinstance(raw, dict):
        raise ConfigError(f"{path} is no JSON object", hint="name another model folder with --like")
    dtypes = [kind.dtype for kind in written.values()]
    floats = [dtype for dtype in dtypes if dtype.is_floating_point and dtype.itemsize >= 2]  # of fewer bits: quantized
    if floats:
        widest = str(functools.reduce(torch.promote_types, floats)).removeprefix("torch.")
        raw |= dict.fromkeys([key for key in _DTYPE_KEYS if key in raw] or _DTYPE_KEYS[:1], widest)
    if len(floats) == len(dtypes):
        raw.pop("quantization_config", None)
    if HF_EMBEDDING in written:
        for key, size in zip(("vocab_size", "hidden_size"), written[HF_EMBEDDING].shape, strict=False):
            if raw.get(key, size) != size:
                raise ConfigError(f"{path} is another model's: its {key} is {raw[key]}, and that of the weights {size}",
                                  hint="name the folder of their model with --like")
        if VALUE_HEAD not in written:
            raw["tie_word_embeddings"] = HF_OUTPUT not in written
    if VALUE_HEAD in written:
        named = raw.get("architectures") or ()
        raw |= {"architectures": [re.sub("For[A-Z]\\w*$", _WITH_VALUE_HEAD, str(name))
                                  for name in ([named] if isinstance(named, str) else named)],
                "id2label": {"0": "value"}, "label2id": {"value": 0}}
    return json.dumps(raw, indent=2) + "\n"


def _is_named(path: Path, patterns: Iterable[str]) -> bool:
    return any(fnmatch(path.name, pattern) for pattern in patterns)


def _remove_leftovers(folder: Path, kind: str) -> None:
    """Removes what exports to ``folder`` that were killed on this machine have left beside it."""
    for path in folder.parent.glob(f".{escape(folder.name)}.*.{kind}"):
        pid = path.name.split(".")[-2]
        if pid.isdecimal() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _require_replaceable(folder: Path, like: Path, *, force: bool) -> None:
    """Raises ConfigError unless a new folder may take this place."""
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ConfigError(f"{folder} is no folder", hint="name a new one")
    if folder == Path.cwd() or not folder.name:
        raise ConfigError(f"{folder} is the current or the root folder", hint="name a new folder in it")
    try:
        entries = sorted(folder.iterdir()) if folder.exists() else []
    except OSError as e:
        raise ConfigError(f"{folder} cannot be read: {e.strerror}", hint="name another folder") from e
    if not entries:
        return
    if not force:
        raise ConfigError(f"{folder} exists and is not empty", hint="name another folder, or give --force")
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} is no model folder: it has no config.json", hint="name another folder")
    for entry in entries:
        known = entry.is_file() and (_is_named(entry, _MODEL_FILES) or (like / entry.name).is_file())
        if entry.name == TEMPLATES and entry.is_dir():
            known = len(named_templates(folder)) == len(list(entry.iterdir()))
        if entry.is_symlink() or not known:
            raise ConfigError(f"{folder} holds {entry.name}, which is no file of a model; --force would delete it",
                              hint="move it away, or name another folder")


def _replace(folder: Path, new: Path) -> None:
    """Puts ``new`` in the place of ``folder``; the old one is deleted once the new one is there."""
    if not folder.exists():
        new.rename(folder)
        return
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    folder.rename(old)
    try:
        new.rename(folder)
    except OSError:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _write_shards(folder: Path, tensors: Tensors, shard_bytes: int, progress: Progress) -> dict[str, _Kind]:
    """Returns of which dtype and shape each tensor is."""
    shards: list[list[str]] = []
    total, written = 0, dict[str, _Kind]()
    for number, shard in enumerate(_shards(tensors, shard_bytes), 1):
        path = folder / f"part-{number}"
        save_file(shard, path, metadata={"format": "pt"})
        let_readers(path)  # safetensors makes files that only their owner may read
        nbytes = sum(t.nbytes for t in shard.values())
        total += nbytes
        written |= {name: _Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in shard.items()}
        progress(nbytes)
        shards.append(list(shard))
    if len(shards) <= 1:
        for _ in shards:
            (folder / "part-1").rename(folder / "model.safetensors")
        return written
    where = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"part-{number}").rename(folder / file)
        where.update(dict.fromkeys(names, file))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": where}, indent=2),
                                encoding="utf-8")
    return written


def _shards(tensors: Tensors, shard_bytes: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            yield shard
            shard, size = {}, 0
        # A copy: safetensors refuses tensors that share memory, and tied ones do.
        shard[name] = tensor.contiguous().clone()
        size += tensor.nbytes
    if shard:
        yield shard


def files_of(folder: Path) -> list[Path]:
    """The safetensors files of a model folder. Raises ConfigError."""
    return sorted({stored.file for stored in _tensors_of(folder).values()})


class _Stored(NamedTuple):
    file: Path
    shape: tuple[int, ...]


def _tensors_of(folder: Path) -> dict[str, _Stored]:
    """File and shape of each tensor of a model folder: the file that the index names, where there is one; else the only
    file that has it. Raises ConfigError for a missing or invalid file, and without an index for a tensor that several
    files have."""
    index = folder / INDEX
    try:
        listed = json.loads(read_limited(index, _MAX_INDEX_BYTES))["weight_map"] if index.exists() else None
        wanted = None if listed is None else {str(name): folder / file for name, file in listed.items()}
    except (OSError, ValueError, KeyError, AttributeError, TypeError, RecursionError) as e:
        raise ConfigError(f"{index} cannot be read: {e}", hint="download the model again") from e
    files = sorted(folder.glob("*.safetensors") if wanted is None else set(wanted.values()))
    missing = [f.name for f in files if not f.is_file()]
    if missing or not files:
        raise ConfigError(f"{folder} has no {', '.join(missing) or 'safetensors files'}",
                          hint="name an HF model folder with safetensors weights")
    found = dict[str, _Stored]()
    for file in files:
        for name, shape in _shapes_in(file).items():
            if wanted is None and name in found:
                raise ConfigError(f"{folder} has the tensor {name} in {found[name].file.name} and in {file.name}, and "
                                  f"no {INDEX} that says which of them counts",
                                  hint="move the file that is not the model's out of the folder")
            if wanted is None or wanted.get(name) == file:
                found[name] = _Stored(file, shape)
    if lacking := sorted((wanted or {}).keys() - found.keys()):
        raise ConfigError(f"{wanted[lacking[0]] if wanted else folder} has no tensor {lacking[0]}, which {INDEX} says "
                          "it has", hint="download the model again")
    return found


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """The tensors of a safetensors file. Raises ConfigError for an invalid one."""
    try:
        with safe_open(file, framework="pt") as f:
            return {name: tuple(f.get_slice(name).get_shape()) for name in f.keys()}  # noqa: SIM118 - it is no mapping
    except OSError as e:
        raise ConfigError(f"{file} cannot be read: {e.strerror or e}") from e
    except SafetensorError as e:
        raise ConfigError(f"{file} is not a valid safetensors file: {e}") from e


def layout(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a model folder. Raises ConfigError as ``files_of``."""
    return {name: stored.shape for name, stored in _tensors_of(folder).items()}


def is_tied(folder: Path) -> bool:
    """Whether config.json says that the output layer is the embedding. False where there is none that can be read."""
    try:
        raw = json.loads(read_limited(folder / "config.json", MAX_CONFIG_BYTES).decode("utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(raw, dict) and raw.get("tie_word_embeddings") is True


def read(folder: Path, progress: Progress = lambda n: None) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of a model folder once, one at a time. Raises ConfigError as ``files_of``, before the first one."""
    where = {name: stored.file for name, stored in _tensors_of(folder).items()}
    for file in sorted(set(where.values())):
        try:
            with safe_open(file, framework="pt") as f:
                for name in (name for name in f.keys() if where.get(name) == file):  # noqa: SIM118 - it is no mapping
                    tensor = f.get_tensor(name)
                    yield name, tensor
                    progress(tensor.nbytes)
        except SafetensorError as e:
            raise ConfigError(f"{file} is not a valid safetensors file: {e}") from e


def nbytes_of(folder: Path) -> int:
    """About how many bytes ``read`` gives."""
    return sum(f.stat().st_size for f in files_of(folder))
