"""Tests of the code around the device. Each runs on the CPU, and on CUDA where there is a GPU.

They need no etcd, Ray, SGLang, transformers or network, so that they run on a bare GPU machine. There, besides torch,
numpy and safetensors, install from wheels: megatron-core==0.16.1 packaging pydantic pydantic-core annotated-types
typing-inspection typing-extensions pyyaml xxhash blake3 orjson pytest pluggy iniconfig; and for ``test_publish``
protobuf grpcio psutil (skipped without them). All but torch are small. Run them without the other tests' conftest:

    PYTHONPATH=. python -m pytest tests/gpu --confcutdir=tests/gpu -p no:cacheprovider
"""

from __future__ import annotations

import pytest
import torch

NO_GPU = "no GPU: torch.cuda.is_available() is false"


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest) -> torch.device:
    """The device under test; skipped where the machine lacks it."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip(NO_GPU)
    return torch.device(request.param, 0 if request.param == "cuda" else None)
