"""The program that an engine runs: ``python -m elastic_rl.engine.launch <arguments of sglang.launch_server>``.

SGLang spawns its scheduler and detokenizer, and a spawned child imports the parent's main module again under another
name. Therefore the stand-ins go in at import here, and only the server's start is behind the ``__main__`` guard.

On a CPU the children are forked instead: importing SGLang takes 8 s of a core in each of the three processes, and a
forked child has it done and shares its pages. CUDA does not survive a fork, so there it stays as SGLang wants it.
"""

from __future__ import annotations

import multiprocessing
import os

import torch

from elastic_rl.runtime import die_with_parent

ON_CPU = not torch.cuda.is_available()

if __name__ == "__mp_main__":
    die_with_parent()  # a scheduler must not outlive a server that was killed: it would keep the memory

if ON_CPU:
    from elastic_rl.engine import sglang_cpu

    # Read when sglang is imported, and inherited by the children.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    sglang_cpu.install()


def fork_children() -> None:
    """From here on every start method that a program sets is fork; imports what the children would import."""
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    set_start_method = multiprocessing.set_start_method

    def only_fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = only_fork  # type: ignore[assignment]
    os.register_at_fork(after_in_child=die_with_parent)


def main() -> None:
    """Serves until it is told to stop."""
    import runpy

    if ON_CPU:
        fork_children()
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
