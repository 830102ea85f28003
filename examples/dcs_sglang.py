"""Your own SGLang server gets each new version of a stream, by SGLang's own call for that: no patch of the server, and
no job of elastic-rl.

    elastic-rl up --job=weights
    elastic-rl versions access access.json --job=weights
    elastic-rl versions import MODEL_FOLDER policy --job=weights    # or your trainer: examples/dcs_torchrun.py

    python -m sglang.launch_server --model-path MODEL_FOLDER --port 30000
    python examples/dcs_sglang.py access.json http://127.0.0.1:30000 MODEL_FOLDER

It runs on the host of the server, which reads the weights from a folder in memory (`/update_weights_from_disk`). The
stream has the tensors of MODEL_FOLDER, by their names there: SGLang leaves out those that it does not know, and says
that it has loaded the version, so they are compared first. A further argument is the number of versions after which it
ends. A pool of a job does more: it stages versions beside the live weights, and replaces engines
(docs/operating/external-engines.md).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file

from elastic_rl import dcs
from elastic_rl.errors import VersionNotFound

STREAM = "policy"
OUTPUT = "lm_head.weight"
Shape = tuple[int, ...]
MEMORY = "/dev/shm"
"""Where the weights are for the time of an update; it needs room for one version."""
TIMEOUT_S = 600.0
"""How long an update of the server may take, the requests included that it finishes before."""


def main(access: str, server: str, model: Path, versions: int) -> None:
    seen, wanted = 0, shapes_of(model)
    with dcs.connect(access) as service:
        for version in service.follow(STREAM):
            try:
                update(service, version, server, wanted)
            except VersionNotFound:  # it was released meanwhile (dcs.keep_versions): a newer one is there
                continue
            seen += 1
            print(f"{server} serves {version.name}", flush=True)
            if seen == versions:
                return


def update(service: dcs.CheckpointService, version: dcs.VersionInfo, server: str, wanted: Mapping[str, Shape]) -> None:
    """Returns when the server answers with the weights of a version. Raises RuntimeError if they are of another model
    than the server's, or with its reason if it refuses them."""
    tensors = dict(service.pull(version).tensors)
    require_same(version.name, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, wanted)
    with tempfile.TemporaryDirectory(prefix="weights-", dir=MEMORY) as folder:  # this user's alone
        save_file(tensors, Path(folder) / "model.safetensors")
        post(f"{server}/update_weights_from_disk", {
            "model_path": folder, "load_format": "safetensors", "flush_cache": True, "weight_version": version.name})


def shapes_of(model: Path) -> dict[str, Shape]:
    """The shape of each tensor in the safetensors files of a model folder, by name."""
    found = dict[str, Shape]()
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    if not found:
        raise SystemExit(f"{model} has no *.safetensors: give the model folder of the server")
    return found


def require_same(version: str, found: Mapping[str, Shape], wanted: Mapping[str, Shape]) -> None:
    """Raises RuntimeError, which names the first few, unless a version has the tensors of the model. The output layer
    may be left out on either side, where it is the embedding."""
    odd = [name for name in sorted(found.keys() | wanted.keys()) if found.get(name) != wanted.get(name)
           and not (name == OUTPUT and (name not in found or name not in wanted))]
    if odd:
        lines = "; ".join(f"{name} is {found.get(name, 'missing')} and not {wanted.get(name, 'there')}"
                          for name in odd[:5])
        raise RuntimeError(f"{version} has tensors of another model ({len(odd)} differ): {lines}")


def post(url: str, body: dict[str, object]) -> None:
    headers = {"Content-Type": "application/json"}
    if key := os.environ.get("SGLANG_API_KEY"):  # of a server with --api-key
        headers["Authorization"] = f"Bearer {key}"
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            answer.read()
    except urllib.error.HTTPError as e:
        raise RuntimeError(f"{url} refuses the version: {e.read(2000).decode(errors='replace')}") from e


if __name__ == "__main__":
    access, server, model, *rest = sys.argv[1:]
    main(access, server.rstrip("/"), Path(model), int(rest[0]) if rest else 0)
