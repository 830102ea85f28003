"""The stream ``model``: the files of a model's folder but for its weights, which an engine needs on a host that lacks
the folder. Its weights come with the versions that it serves.

A version has each file as a tensor of bytes, under the file's name. One is published when the files differ from those
of the newest version, so that a year of restarts adds nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from elastic_rl.dcs.publish.growing_stream import GrowingStream, NewTensor, StreamHead
from elastic_rl.errors import ChunkCorrupt, ChunkMissing, ConfigError, VersionNotFound
from elastic_rl.models.chat_templates import TEMPLATES, named_templates
from elastic_rl.runtime.files import sync_folder

CONFIG = "config.json"
"""A folder with this file has a model."""
_SERVED = (".safetensors", ".bin", ".pt", ".gguf")
"""What files end with that SGLang can load weights from."""
_WEIGHTS = (*_SERVED, ".safetensors.index.json", ".bin.index.json", ".pth", ".h5", ".msgpack", ".onnx")
_MAX_BYTES = 256 << 20
"""Largest size of all files together; those of models are some 20 MiB, most of it the tokenizer."""
_DIGEST = "files_digest"
"""Key in a version's meta, and name of the file that marks a written folder."""


def has_weights(folder: Path) -> bool:
    """Whether a folder has weights that can be served."""
    return any(entry.name.endswith(_SERVED) for entry in folder.iterdir())


def read_files(folder: Path) -> dict[str, bytes]:
    """Returns the files of a folder by name, without hidden files, and without the folders in it but for that of the
    named chat templates, whose files are ``additional_chat_templates/NAME.jinja``. Raises ConfigError for more than a
    version of this stream may have, and OSError."""
    found, total = dict[str, bytes](), 0
    for path in [*sorted(folder.iterdir()), *named_templates(folder)]:
        if path.name.startswith(".") or path.name.endswith(_WEIGHTS) or not path.is_file():
            continue
        if (total := total + path.stat().st_size) > _MAX_BYTES:
            raise ConfigError(f"{folder} has more than {_MAX_BYTES >> 20} MiB beside its weights",
                              hint="move what is not the model's out of it: engines on other hosts wait for its files")
        found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def digest_of(files: Mapping[str, bytes]) -> str:
    """Returns the digest of the names and bytes of the files."""
    digest = hashlib.blake2b(digest_size=16)
    for name, data in sorted(files.items()):
        digest.update(f"{len(name.encode())}:{name}:{len(data)}:".encode() + data)
    return digest.hexdigest()


def publish(stream: GrowingStream, folder: Path) -> bool:
    """Publishes the files of a folder unless the newest version has the same; whether it did. What this host's node
    lacks of that, as after the loss of a disk, it gets again. Raises ConfigError and OSError, and as
    ``GrowingStream.publish``."""
    files = read_files(folder)
    digest = digest_of(files)
    with contextlib.suppress(ChunkMissing, ChunkCorrupt):  # nobody who answers has the manifest: another version has it
        head = stream.head()
        if head is not None and head.version.meta.get(_DIGEST) == digest:
            lacking = stream.lacking(head, head.manifest.tensors)
            for tensor in head.manifest.tensors:
                if tensor.name in lacking:
                    stream.restore(tensor, files[tensor.name])
            return False
    stream.publish(None, [NewTensor(name, data) for name, data in files.items()], meta={_DIGEST: digest})
    return True


def bring(stream: GrowingStream, folder: Path) -> bool:
    """Makes a folder have the files of the newest version, whole or not at all; whether it had others. For one process
    of a host at a time. Raises VersionNotFound while there is no version, ConfigError for one that is none of a model's
    files, OSError, and as ``GrowingStream.head``."""
    head = stream.head()
    if head is None:
        raise VersionNotFound("the files of the model are not published yet", hint="the run does it when it begins")
    digest = str(head.version.meta.get(_DIGEST))
    mark = folder / f".{_DIGEST}"
    if mark.exists() and mark.read_text(encoding="utf-8") == digest:
        return False
    partial, old = folder.with_name(f"{folder.name}.partial"), folder.with_name(f"{folder.name}.old")
    for left in (partial, old):
        shutil.rmtree(left, ignore_errors=True)
    _write(stream, head, partial, digest)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)
    return True


def _write(stream: GrowingStream, head: StreamHead, folder: Path, digest: str) -> None:
    folder.mkdir(parents=True)
    total, files = 0, dict[str, bytes]()
    for tensor in head.manifest.tensors:
        if not _is_file_of_model(tensor.name):
            raise ConfigError(f"version {head.version.number} of {head.version.stream} has the file {tensor.name!r}",
                              hint=f"only names without folders, and those of {TEMPLATES}, are a model's files")
        if (total := total + sum(nbytes for _, _, nbytes in tensor.slices)) > _MAX_BYTES:
            raise ConfigError(f"version {head.version.number} of {head.version.stream} is larger than "
                              f"{_MAX_BYTES >> 20} MiB")
        files[tensor.name] = stream.read(tensor)
    for name, data in {**files, f".{_DIGEST}": digest.encode()}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        with (folder / name).open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    for path in {(folder / name).parent for name in files} | {folder}:
        sync_folder(path)  # else a power cut may leave the mark and not every file


def _is_file_of_model(name: str) -> bool:
    """Whether a version may have a file of that name: one in the folder itself or a named chat template, not hidden."""
    file = name.removeprefix(f"{TEMPLATES}/")
    return Path(file).name == file and not file.startswith(".") and "\0" not in file and (
        file == name or file.endswith(".jinja"))
