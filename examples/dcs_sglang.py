"""Your own SGLang server gets each new version of a stream, by SGLang's own call for that: no patch of the server, and
no job of elastic-rl.

    elastic-rl up --job=weights
    elastic-rl versions access access.json --job=weights
    elastic-rl versions import MODEL_FOLDER policy --job=weights    # or your trainer: examples/dcs_torchrun.py

    python -m sglang.launch_server --model-path MODEL_FOLDER --port 30000
    python examples/dcs_sglang.py access.json http://127.0.0.1:30000

It runs on the host of the server, which reads the weights from a folder in memory (`/update_weights_from_disk`). The
stream has the tensors of MODEL_FOLDER, by their names there. A further argument is the number of versions after which
it ends. A pool of a job does more: it stages versions beside the live weights, and replaces engines
(docs/operating/external-engines.md).
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

from safetensors.torch import save_file

from elastic_rl import dcs
from elastic_rl.errors import VersionNotFound

STREAM = "policy"
MEMORY = "/dev/shm"
"""Where the weights are for the time of an update; it needs room for one version."""
TIMEOUT_S = 600.0
"""How long an update of the server may take, the requests included that it finishes before."""


def main(access: str, server: str, versions: int) -> None:
    seen = 0
    with dcs.connect(access) as service:
        for version in service.follow(STREAM):
            try:
                update(service, version, server)
            except VersionNotFound:  # it was released meanwhile (dcs.keep_versions): a newer one is there
                continue
            seen += 1
            print(f"{server} serves {version.name}", flush=True)
            if seen == versions:
                return


def update(service: dcs.CheckpointService, version: dcs.VersionInfo, server: str) -> None:
    """Returns when the server answers with the weights of a version. Raises RuntimeError with the server's reason if it
    refuses them."""
    with tempfile.TemporaryDirectory(prefix="weights-", dir=MEMORY) as folder:  # this user's alone
        save_file(dict(service.pull(version).tensors), Path(folder) / "model.safetensors")
        post(f"{server}/update_weights_from_disk", {
            "model_path": folder, "load_format": "safetensors", "flush_cache": True, "weight_version": version.name})


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
    access, server, *rest = sys.argv[1:]
    main(access, server.rstrip("/"), int(rest[0]) if rest else 0)
