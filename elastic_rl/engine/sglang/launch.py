"""The program that an engine runs: ``python -m elastic_rl.engine.sglang.launch <arguments of sglang.launch_server>``.

SGLang spawns its scheduler and detokenizer, and a spawned child imports the parent's main module again under another
name. So what is changed in torch and SGLang is changed at import, and only the start of the server is behind the
``__main__`` guard.

On a CPU the children are forked instead: importing SGLang takes 8 s of a core in each of the three processes, and a
forked child has it done and shares its pages. CUDA does not survive a fork, so there the children are spawned.
"""

# ruff: noqa: E402
from __future__ import annotations

import gc

gc.disable()  # until all is imported: modules are no garbage, and to look for some takes a seventh of the time

import functools
import multiprocessing
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import torch

from elastic_rl.engine.sglang import cache_keys, packing, request_bounds, seeds
from elastic_rl.net import torch_store
from elastic_rl.net.engine_key import KEY_FILE_ENV, read_key
from elastic_rl.runtime.file_tags import TAG_ENV, tag_temporary_files
from elastic_rl.runtime.files import PRIVATE_UMASK
from elastic_rl.runtime.process import die_with_parent, freeze_heap

ON_CPU = not torch.cuda.is_available()
_SEEDED = "--enable-deterministic-inference"

torch_store.install()  # of a scheduler, whether it is forked or spawned
if __name__ == "__mp_main__":
    die_with_parent()  # a scheduler must not outlive a server that was killed: it would keep the memory

if ON_CPU:
    from elastic_rl.engine.sglang import cpu_attention, sglang_cpu

    # Read when sglang is imported, and inherited by the children.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    # SGLang imports all of its some 270 models, unless it is given others: then it imports its own when a model is none
    # of these. That is 2 s of 8 in which an engine starts, and Megatron, for an option to dump tensors, is another one.
    os.environ.setdefault("SGLANG_EXTERNAL_MODEL_PACKAGE", "elastic_rl.engine.sglang.models")
    sys.modules.setdefault("megatron", None)  # type: ignore[arg-type]  # importing it says that it is not there
    sglang_cpu.install()


def prepare() -> None:
    """Makes the files of this process private, and tagged where the environment names a tag (see ``host.leftovers``).

    Call it before the schedulers are imported, and again in a process that was forked with another environment.
    """
    os.umask(PRIVATE_UMASK)  # of an external server too, which a person starts: its sockets take pickles
    tag_temporary_files()  # SGLang's sockets are among them
    tag_files()


@functools.cache  # what it replaces must not be wrapped twice
def tag_files() -> None:
    """Puts the tag of the process, where it has one, into the names of what SGLang makes in /dev/shm. The schedulers
    bind ``make_shm_name`` at import."""
    from sglang.srt.server_args import PortArgs
    from sglang.srt.utils import stale_shm_cleanup

    untagged_name, init_new = stale_shm_cleanup.make_shm_name, PortArgs.init_new

    def make_shm_name(kind: str) -> str:
        tag = os.environ.get(TAG_ENV)
        return f"sgl_shm_{kind}_{tag}_{os.getpid()}_{secrets.token_hex(4)}" if tag else untagged_name(kind)

    def tagged_ports(*args: Any, **kwargs: Any) -> PortArgs:
        ports = init_new(*args, **kwargs)
        ports.instance_id = f"{os.environ.get(TAG_ENV, '')}{ports.instance_id}"  # names the segment of load snapshots
        return ports

    stale_shm_cleanup.make_shm_name = make_shm_name
    PortArgs.init_new = staticmethod(tagged_ports)


if __name__ in ("__main__", "__mp_main__"):
    prepare()
gc.enable()


def import_server() -> None:
    """Imports what a server and its children would import."""
    gc.disable()
    import sglang.srt.entrypoints.http_server
    import sglang.srt.managers.detokenizer_manager
    import sglang.srt.managers.scheduler  # noqa: F401

    freeze_heap()  # a collection in a child would write to the pages that it shares with the others
    gc.enable()


def fork_children() -> None:
    """Makes fork the only start method from here on, with everything imported that the children need."""
    import_server()
    cpu_attention.install()
    set_start_method = multiprocessing.set_start_method

    def only_fork(method: str | None, force: bool = False) -> None:
        set_start_method("fork", force=True)

    multiprocessing.set_start_method = only_fork  # type: ignore[assignment]
    os.register_at_fork(after_in_child=die_with_parent)


def allow_seeds_on_cpu() -> None:
    """SGLang samples by seeds only with ``--enable-deterministic-inference``, and does not know the CPU there."""
    from sglang.srt.layers import sampler
    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.server_args import add_deterministic_attention_backend_choices

    # It attends to each sequence by itself, so what a sample gets does not depend on the others of a batch.
    add_deterministic_attention_backend_choices(["torch_native"])
    # Replaces operators by Triton's. On a CPU the operators stay: their last bits may depend on the size of a batch.
    runner: Any = ModelRunner
    runner.maybe_enable_batch_invariant_mode = lambda self: None
    sampler.murmur_hash32 = seeds.hashes


def main() -> None:
    """Serves until SIGTERM."""
    import runpy

    if ON_CPU:
        fork_children()
        allow_seeds_on_cpu()
    seeds.install(seeded=_SEEDED in sys.argv)
    request_bounds.install()
    cache_keys.install_in_schedulers()
    packing.install()
    if path := os.environ.get(KEY_FILE_ENV):
        sys.argv += ["--api-key", read_key(Path(path))]  # here: every user of the host sees the command line
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":
    main()
