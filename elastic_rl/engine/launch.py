"""The program that an engine runs: ``python -m elastic_rl.engine.launch <arguments of sglang.launch_server>``.

SGLang *spawns* its scheduler and detokenizer, and a spawned child imports the parent's main module again under another
name. Therefore the stand-ins go in at import here, and only the server's start is behind the ``__main__`` guard.
"""

from __future__ import annotations

import os
import sys

import torch

from elastic_rl.processes import die_with_parent

if __name__ == "__mp_main__":
    die_with_parent()  # a scheduler must not outlive a server that was killed: it would keep the memory

if not torch.cuda.is_available():
    from elastic_rl.engine import sglang_cpu

    # Read when sglang is imported, and inherited by the children.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sglang_cpu.install()


def main() -> None:
    """Serves until it is told to stop."""
    import runpy

    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    sys.exit(main())
