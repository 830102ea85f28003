"""vLLM gets each new version of a stream, in all of its tensor-parallel workers, without a restart.

    elastic-rl up --job=weights
    elastic-rl versions access access.json --job=weights
    python examples/dcs_vllm.py MODEL_FOLDER access.json

**Not run here**: this was written from vLLM's source. There `worker_extension_cls` adds methods to each worker,
`collective_rpc` calls one in all of them, and the worker's `model_runner.reload_weights(weights_iterator=...)` loads
tensors in the format of a checkpoint, sharded and quantized as at the start (`vllm/v1/worker/gpu_model_runner.py`).
Releases without the argument `weights_iterator` have `model.load_weights`, which the code then takes: that is for
weights without quantization.

The stream has the tensors of MODEL_FOLDER, by their names there. Each worker reads them where they lie in the shared
memory of its host, and copies what it needs of them to its device: one fetch a host, whatever the parallel size.
"""

from __future__ import annotations

import inspect
import sys
from typing import Any

from elastic_rl import dcs
from elastic_rl.errors import VersionNotFound

STREAM = "policy"


class FollowVersions:
    """Methods of each worker (`worker_extension_cls`): `self` is vLLM's Worker."""

    model_runner: Any

    def load_version(self, access: str, name: str) -> str:
        """Loads a version, such as policy/12, into this worker's share of the model. Raises VersionNotFound, before
        anything is changed, for one that was released; after any other error the weights may be of two versions."""
        with dcs.connect(access) as service, service.open(name) as opened:
            load, weights = self.model_runner.reload_weights, opened.tensors()
            if "weights_iterator" in inspect.signature(load).parameters:
                load(weights_iterator=weights)
            else:
                self.model_runner.get_model().load_weights(weights)
            return opened.version.name


def main(model: str, access: str) -> None:
    from vllm import LLM, SamplingParams

    llm = LLM(model=model, worker_extension_cls="dcs_vllm.FollowVersions")
    with dcs.connect(access) as service:
        for version in service.follow(STREAM):
            # Between two calls of `generate`, so no request is in flight; a server does this between `pause_generation`
            # and `resume_generation` of its engine.
            try:
                with service.open(version):  # kept until all workers have it
                    loaded = llm.collective_rpc("load_version", args=(access, version.name))
            except VersionNotFound:  # it was released meanwhile (dcs.keep_versions): a newer one is there
                continue
            llm.reset_prefix_cache()  # what it has was computed with other weights
            answer = llm.generate(["The weights are"], SamplingParams(max_tokens=16))[0].outputs[0].text
            print(f"{len(loaded)} workers serve {version.name}: {answer!r}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:3])
