"""The process of a rank: joins its group, serves the shares of its replica, and runs the worker until it is stopped."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch.distributed as dist

from elastic_rl.algorithms.registry import algorithm_of, required_tensors
from elastic_rl.config.groups import ACTOR
from elastic_rl.errors import ElasticRLError, Fenced
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.membership import Membership
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.here import heartbeats_here
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.runtime.file_tags import tag_temporary_files
from elastic_rl.runtime.process import die_with_parent, freeze_heap
from elastic_rl.telemetry import logs, traces
from elastic_rl.trainer.broadcast import gather_text
from elastic_rl.trainer.device_phases import TrainerGroupPhases
from elastic_rl.trainer.forward_worker import ForwardWorker
from elastic_rl.trainer.group_worker import restarts
from elastic_rl.trainer.megatron import parallel
from elastic_rl.trainer.megatron.policy import ModelArch
from elastic_rl.trainer.service.board import Board
from elastic_rl.trainer.service.server import TrainerService
from elastic_rl.trainer.service.shares import Shares
from elastic_rl.trainer.worker import TrainerWorker

log = logging.getLogger(__name__)


def serve(context_file: str, address: str) -> None:
    """Runs this rank. ``address``: that of this host at which the other ranks and the actor reach it. Exits with
    ``parallel.FENCED_EXIT`` when its epoch or formation is over."""
    die_with_parent()
    tag_temporary_files()
    ctx = RunContext.load(Path(context_file))
    rank = int(os.environ["RANK"])
    logs.setup(f"{ctx.group.name}-rank-{rank}", ctx.config.telemetry.log_level)
    traces.setup(ctx.config.telemetry.otlp_endpoint, "elastic-rl.trainer")
    logging.getLogger("megatron").setLevel(logging.WARNING)
    try:
        with ctx.connect() as etcd:
            _serve(ctx, etcd, rank, address)
    except Fenced as e:
        log.error("the time of this rank is over: %s", e)
        sys.exit(parallel.FENCED_EXIT)


def _serve(ctx: RunContext, etcd: EtcdClient, rank: int, address: str) -> None:
    ctx.writer_of_group(etcd).require()  # before it takes the place of a rank of the next formation
    needs = [] if ctx.group is not ACTOR else [  # what a critic learns from is looked at when it is to learn
        name for name in required_tensors(algorithm_of(ctx.config), ctx.config.algorithm)
        if name != "ref_logprobs" or ctx.config.uses_reference_group]  # else the ranks add these
    needs += ["numbers"] if ctx.config.train.minibatches > 1 else []
    board = Board(ctx.config.trainer.share_piece_bytes)
    # The ranks of a stage and of one replica are consecutive, so the first ranks are those of the first stage.
    trainer = ctx.config.trainer
    stage, replica = trainer.ranks // trainer.pipeline_parallel, trainer.tensor_parallel * trainer.context_parallel
    service = TrainerService(
        board, address, dcs_security(ctx.config, required=True),
        Shares(ctx.config, needs=needs, vocab=ModelArch.read(ctx.model_dir).vocab).take,
    ).start() if rank < stage and rank % replica == 0 else None
    member = Membership(etcd, ctx.keys, ctx.group.name, f"rank-{rank}", ttl_s=ctx.config.coordinator.lease_ttl_s,
                        url=service.url if service is not None else "", epoch=ctx.epoch,
                        info={"restarts": restarts(), "ranks": trainer.ranks, "formation": ctx.formation},
                        heartbeats=heartbeats_here(ctx.config)).start()
    try:
        par = parallel.init(ctx.config, address)
        urls = [url for url in gather_text(service.url if service is not None else "", par) if url]
        phases = TrainerGroupPhases(ctx, etcd, par, member.incarnation) if ctx.config.colocated else None
        if phases is not None:
            phases.await_first(lambda phase: member.progress(0, phase))
        worker = (TrainerWorker(ctx, etcd, par, member, board, urls, phases) if ctx.group.trains
                  else ForwardWorker(ctx, etcd, par, member, board, urls))
        if rank == 0:
            name, kinds = ctx.group.name, event_kinds.TRAINER_GROUP_EVENTS[ctx.group.name]
            ctx.writer_of_group(etcd).emit(kinds.restarted if restarts() else kinds.started, name,
                         f"group of {par.world} ranks, TP={par.tp} CP={par.cp} PP={par.pp} DP={par.dp}",
                         severity=Severity.WARNING if restarts() else Severity.INFO, restarts=restarts(),
                         incarnation=member.incarnation)
        freeze_heap()
        worker.run()
    except Fenced:
        member.close()  # the run was restarted on purpose: no death of this rank
        raise
    except (ElasticRLError, RuntimeError):
        # Not deregistered: the entry expires with its lease, so that the end of this rank counts as a death.
        log.exception("rank %d ends", rank)
        raise
    member.close()
    if service is not None:
        service.close()
    dist.destroy_process_group()
