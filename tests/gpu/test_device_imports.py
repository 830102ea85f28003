"""What the tests of this folder need besides torch (see its conftest)."""

from __future__ import annotations

import subprocess
import sys

MODULES = ("trainer.checkpoint.host_copy", "trainer.checkpoint.snapshot", "trainer.checkpoint.rounds",
           "trainer.megatron.parallel", "trainer.megatron.optimizer", "trainer.broadcast",
           "engine.sglang.loader", "engine.sglang.stager", "engine.sglang.staging")
ABSENT = {"ray", "sglang", "transformers", "grpc", "google.protobuf", "opentelemetry", "httpx", "fastapi", "fsspec"}


def test_code_around_the_device_imports_nothing_that_a_bare_gpu_machine_lacks() -> None:
    code = f"import sys, {', '.join(f'elastic_rl.{m}' for m in MODULES)}; print(*({ABSENT!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=300).stdout.split() == []
