"""``python -m elastic_rl.trainer.group.agent --context FILE``: torch elastic's agent for the ranks of this host.

When a rank dies or is stopped (SIGSTOP), the agents of all hosts of the group end its ranks and start them again; they
resume from the newest state of their group. An agent ends when the run's epoch, or the group's formation, is over. Its
ranks die with it, also after kill -9. Exit codes: 0 stopped, 1 restarts used up, 2 bad context, 3 fenced. """

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

from elastic_rl.data.queue.row_client import set_package_options
from elastic_rl.errors import ConfigError, EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import deregister, members
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address
from elastic_rl.host.paths import JobPaths
from elastic_rl.runtime.file_tags import TAG_ENV
from elastic_rl.runtime.process import die_with_parent
from elastic_rl.telemetry import logs
from elastic_rl.trainer.group.refused_commands import RefusedCommands
from elastic_rl.trainer.group.step_progress import StepProgress
from elastic_rl.trainer.megatron.parallel import FENCED_EXIT
from elastic_rl.trainer.megatron.policy import ModelArch

log = logging.getLogger(__name__)

_MONITOR_INTERVAL_S = 0.2
_FENCE_INTERVAL_S = 1.0
_KEEP_ALIVE_S, _KEEP_ALIVES = 30, 10_000
"""Shortest interval in which an agent says in the rendezvous that it is there. That drops an agent that was silent for
so many intervals, by the clocks of other hosts: never, for an outage of etcd or a clock that is wrong. The driver finds
agents that are gone, and ends the formation.
"""
_RANK_GRACE_S = 2
"""Time between SIGTERM and SIGKILL: a stopped or hung rank must not delay the restart of the others."""
_WHY_CHARS = 500
DETERMINISTIC_CUDA = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
                      "NCCL_ALGO": "Ring"}
"""What cuBLAS, Transformer Engine and NCCL need to compute the same bits each time; Megatron asks for the same."""


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="elastic_rl.trainer.group.agent", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--context", required=True, help="JSON file of the run context")
    parser.add_argument("--address", default=own_address(), help="address of this host at which the other ranks are")
    parser.add_argument("--hosts", type=int, default=1, help="number of hosts of the group, each with an agent")
    parser.add_argument("--ranks", type=int, default=0, help="number of ranks of this host; 0: all of the group")
    args = parser.parse_args(argv)
    die_with_parent()
    try:
        ctx = RunContext.load(args.context)
        # Here and not in the ranks, which torch elastic would restart again and again.
        arch = ModelArch.read(ctx.model_dir)
        arch.attention_dims(ctx.config.trainer.tensor_parallel)
        arch.require_expert_parallel(ctx.config.trainer.expert_parallel)
    except ConfigError as e:
        print(e, file=sys.stderr)
        return 2
    logs.setup(f"{ctx.group.name}-agent", ctx.config.telemetry.log_level)
    # Not a default: Ray sets it in its workers, to the number of CPUs of the whole group.
    os.environ["OMP_NUM_THREADS"] = str(ctx.config.trainer.cpu_threads)
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")  # Megatron overlaps its TP collectives by this order
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    if ctx.config.deterministic:
        os.environ.update(DETERMINISTIC_CUDA)
    os.environ[TAG_ENV] = tag = JobPaths.of(ctx.config).file_tag(  # of what the ranks leave
        ctx.group.name, str(ctx.formation) if ctx.formation else "")
    with own_temp_folder(tag), ctx.connect() as etcd:
        _watch_fence(ctx, etcd)
        return _run(ctx, etcd, args)


def keep_alive_s(hosts: int) -> int:
    """Interval of an agent of a group on so many hosts: they all write one key, once a second together at most."""
    return max(_KEEP_ALIVE_S, hosts)


@contextlib.contextmanager
def own_temp_folder(tag: str) -> Iterator[None]:
    """Has the temporary files of this process, not those of its children, in a folder of this tag: torch elastic and
    multiprocessing make folders that nobody removes. That of an agent that is killed is removed by its tag."""
    before = tempfile.tempdir
    with tempfile.TemporaryDirectory(prefix=tag, ignore_cleanup_errors=True) as tempfile.tempdir:
        try:
            yield
        finally:
            tempfile.tempdir = before


def _run(ctx: RunContext, etcd: EtcdClient, args: argparse.Namespace) -> int:
    from torch.distributed.elastic.multiprocessing import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # Each formation has a run id of its own, so that no agent waits for one of an earlier formation that was killed.
    run_id = f"{ctx.group.name}-{ctx.epoch}-{ctx.formation or secrets.token_hex(4)}"
    agent = _make_agent(ctx, run_id, args, RefusedCommands(etcd, ctx.keys, ctx.group.name),
                        StepProgress(etcd, ctx.keys))
    try:
        result = agent.run()
        if not result.is_failed():
            return 0
        log.error("the group failed: %s", ChildFailedError(ctx.group.name, result.failures))
        ctx.writer_of_group(etcd).emit(
            event_kinds.TRAINER_GROUP_EVENTS[ctx.group.name].restarts_exhausted, ctx.group.name,
            f"{ctx.config.trainer.max_restarts} restarts without a step of the job are used up; the last failure: "
            f"{described(result.failures)}", severity=Severity.ERROR)
        return 1
    except Fenced as e:
        log.error("the group ends: %s", e)
        return FENCED_EXIT
    except SignalException as e:
        log.info("stopped by %s", e.sigval.name)
        # On purpose, so it must not count as a death of the ranks. Those of a later formation are not this agent's.
        deregister(etcd, ctx.keys, [m for m in members(etcd, ctx.keys, ctx.group.name)
                                    if m.epoch == ctx.epoch and m.info.get("formation") == ctx.formation])
        return 0
    finally:
        with contextlib.suppress(EtcdUnavailable):  # the keys end with their lease
            etcd.delete_prefix(f"{ctx.keys.rendezvous_prefix()}{run_id}/")


def described(failures: Mapping[int, Any]) -> str:
    """The first failure of ranks, in one line; those that the agent has ended after it are none. ``failures``: torch
    elastic's ``ProcessFailure`` by global rank."""
    rank, first = min(failures.items(), key=lambda found: (found[1].exitcode == -signal.SIGTERM, found[1].timestamp))
    why = " ".join(str(first.message).split())[:_WHY_CHARS]
    return f"rank {rank} (pid {first.pid}) ended with exit code {first.exitcode}{f': {why}' if why else ''}"


def _make_agent(ctx: RunContext, run_id: str, args: argparse.Namespace, refused: RefusedCommands,
                progress: StepProgress) -> Any:
    """``refused``: ranks that have ended for one use up none of ``trainer.max_restarts``. ``progress``: those before a
    step of the job count no more."""
    import torch
    from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    from elastic_rl.trainer import rank
    from elastic_rl.trainer.group import rendezvous
    from elastic_rl.trainer.group.rank_watch import RankWatch

    # As long as its membership takes to find a stopped rank dead.
    watch = RankWatch(stopped_limit_s=ctx.config.coordinator.lease_ttl_s, grace_s=_RANK_GRACE_S)

    class Agent(LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            pids = self._pcontext.pids() if self._pcontext is not None else {}
            ended = watch.look(pids) if pids else []
            found = super()._monitor_workers(worker_group)
            if ended and found.state is WorkerState.HEALTHY:
                # With exit code 0, for which torch elastic waits for a result that never comes. No rank ends by itself.
                log.error("ranks %s have exited with code 0", ended)
                found = RunResult(state=WorkerState.FAILED, failures={
                    worker_group.workers[n].global_rank: ProcessFailure(n, pids[n], 0, "") for n in ended})
            if found.state in (WorkerState.UNHEALTHY, WorkerState.FAILED):
                if progress.made():  # in a run of weeks many ranks are lost, each of which was recovered from
                    self._remaining_restarts = worker_group.spec.max_restarts
                # Who sent the command tries its samples one after the other, which ends the ranks many times.
                if refused.take():
                    self._remaining_restarts += 1
            return found

        def _stop_workers(self, worker_group: Any) -> None:
            self._shutdown(timeout=_RANK_GRACE_S)

    trainer, etcd_cfg = ctx.config.trainer, ctx.config.etcd
    cuda = ctx.config.device.uses_cuda(torch.cuda.is_available)
    handler = get_rendezvous_handler(RendezvousParameters(
        backend=rendezvous.BACKEND, endpoint=",".join(ctx.etcd_endpoints), run_id=run_id, min_nodes=args.hosts,
        max_nodes=args.hosts, local_addr=args.address, prefix=ctx.keys.rendezvous_prefix(),
        join_timeout=trainer.start_timeout_s, last_call_timeout=1, keep_alive_interval=keep_alive_s(args.hosts),
        keep_alive_max_attempt=_KEEP_ALIVES, follow_members=not etcd_cfg.endpoints,
        **etcd_cfg.model_dump(exclude={"endpoints"})))
    # A rank that is forked from a server that has imported everything, but holds no thread, socket or CUDA context,
    # saves the seconds of its imports. CUDA must not be forked, and there the imports are the smaller part.
    method = "spawn" if cuda else "forkserver"
    if method == "forkserver":
        import multiprocessing

        preload = ["elastic_rl.trainer.group.preload"]
        if ctx.config.uses_transfer_queue:
            set_package_options(ctx.config.train.queue_call_timeout_s)
            preload.append("transfer_queue")
        multiprocessing.set_forkserver_preload(preload)
    for sig in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(sig, _raise_signal)
    return Agent(WorkerSpec(
        role=ctx.group.name, local_world_size=args.ranks or trainer.ranks, entrypoint=rank.serve,
        args=(args.context, args.address), rdzv_handler=handler, max_restarts=trainer.max_restarts,
        monitor_interval=_MONITOR_INTERVAL_S, master_addr=None), DefaultLogsSpecs(), start_method=method,
        exit_barrier_timeout=5, shutdown_timeout=_RANK_GRACE_S)


def _raise_signal(number: int, _frame: Any) -> None:
    from torch.distributed.elastic.multiprocessing import SignalException

    raise SignalException(f"signal {number}", signal.Signals(number))


def _watch_fence(ctx: RunContext, etcd: EtcdClient) -> None:
    """Ends this process, and with it its ranks, once the epoch or the formation is over: restarted ranks would be
    fenced off at once."""
    token = ctx.writer_of_group(etcd)

    def watch() -> None:
        pause = threading.Event()
        while not pause.wait(_FENCE_INTERVAL_S):
            try:
                token.require()
            except EtcdUnavailable:
                continue  # running work continues without etcd; publishing has a fence of its own
            except Fenced as e:
                log.error("the trainer ends: %s", e)
                os._exit(FENCED_EXIT)

    threading.Thread(target=watch, name="fence-watch", daemon=True).start()


if __name__ == "__main__":
    sys.exit(main())
