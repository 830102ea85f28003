"""Processes of trainer groups (``support.forked``), forked from one that has imported what ranks import:

    agent --context FILE    the agent of a group, as the driver starts it
    rank FOLDER             a rank that performs the scenarios of FOLDER/plan.json (``support.rank_processes``)
"""

from __future__ import annotations

import json
import os
import socket
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing import forkserver, util
from pathlib import Path

from elastic_rl.trainer.group import preload  # first, as in the server that ranks are forked from

# isort: split
import torch
from safetensors.torch import save_file

from elastic_rl.config import Config
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.trainer.group import agent
from elastic_rl.trainer.megatron import parallel
from support.megatron_ranks import perform

_MESSAGE_BYTES = 1 << 17


def main() -> int:
    role = sys.argv.pop(1)
    if role == "rank":
        run_rank(Path(sys.argv[1]))
    util.spawnv_passfds = forked_server_of_ranks()  # type: ignore[attr-defined]
    return agent.main()


def forked_server_of_ranks() -> Callable[[bytes, Sequence[str], Sequence[int]], int]:
    """Forks the process that multiprocessing forks the agent's ranks from, while this one has no threads. It waits
    until what is returned starts it, in the place of a new interpreter. ``support.forked`` cannot serve here: ranks are
    children of multiprocessing's own server, which the agent talks to."""
    requests, far = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if pid := os.fork():
        far.close()
        spawnv_passfds = util.spawnv_passfds  # type: ignore[attr-defined]

        def start(path: bytes, args: Sequence[str], fds: Sequence[int]) -> int:
            if "multiprocessing.forkserver" not in args[-1]:
                return int(spawnv_passfds(path, args, fds))
            socket.send_fds(requests, [json.dumps(dict(os.environ)).encode()], fds)
            return pid

        return start
    requests.close()
    message, fds, *_ = socket.recv_fds(far, _MESSAGE_BYTES, 2)
    if message:
        os.environ.clear()
        os.environ.update(json.loads(message))
        # It is imported again, as in a new interpreter, since it prepares the process that imports it.
        del sys.modules[preload.__name__]
        forkserver.main(*fds, preload=[preload.__name__])
    os._exit(0)


def run_rank(folder: Path) -> None:
    """Writes the tensors of each result that this rank owns to FOLDER/<scenario>-<rank>.safetensors. Never returns."""
    code = 1
    try:
        plan = json.loads((folder / "plan.json").read_text())
        cfg = Config.model_validate(plan["config"])
        par = parallel.init(cfg, LOOPBACK)
        for name, scenario, model, state_file in plan["scenarios"]:
            out = perform(name, scenario, Path(model), state_file, folder, cfg, par)
            save_file({k: v.contiguous() for k, v in out.items()}, folder / f"{name}-{par.rank}.safetensors")
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
