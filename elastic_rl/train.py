"""Runs a job: prepares it, keeps its driver running, injects faults on request, and writes the report.

It needs a running durable plane (etcd, coordinators, a DCS node; ``elastic-rl up``). Run again with the same job it
resumes from the last committed state.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.data.ledger import Ledger
from elastic_rl.dcs.catalog.reads import list_versions
from elastic_rl.driver.supervisor import DriverSupervisor
from elastic_rl.errors import ConfigError
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.faults.context import FaultContext
from elastic_rl.faults.injector import FaultInjector, FaultPlan, standard_faults
from elastic_rl.host import leftovers, processes
from elastic_rl.report import build as report_build
from elastic_rl.report import html as report_html
from elastic_rl.roles.run_log import RunLog
from elastic_rl.telemetry.log_files import ray_environment

# Ray reads these when it is imported. Its GCS binds every interface, so it must require a token. Its workers have a
# lower priority by default, and so would the trainer ranks below them, whose collectives wait for the slowest rank.
_RAY_ENV = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def run(cfg: Config, info: ClusterInfo, *, faults: bool = False, fault_plan: FaultPlan = standard_faults,
        on_tick: Callable[[], None] | None = None) -> int:
    """Trains until the run ends; returns 0 when it finished, 1 when it failed. Always writes the report.

    With ``faults`` the faults of ``fault_plan`` are injected, and the run takes all its steps, so that every fault gets
    its turn. ``on_tick`` is called four times a second, for the live view.
    Raises ConfigError for a job that is already done, or that another process is training.
    """
    if faults:
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"stop_eval_accuracy": None})})
    with _exclusive(cfg):
        return _run(prepare(cfg, info), info, fault_plan if faults else None, on_tick or (lambda: None))


@contextmanager
def _exclusive(cfg: Config) -> Iterator[None]:
    """Holds the job's lock, which the kernel releases however this process ends. Leaves no process or file behind."""
    cfg.cluster_dir.mkdir(parents=True, exist_ok=True)
    with (cfg.cluster_dir / "train.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConfigError(f"job {cfg.job} is already being trained by another process",
                              hint="wait for it, or name another job with --job=NAME") from e
        leftovers.sweep(cfg.cluster_dir)
        try:
            yield
        finally:
            leftovers.sweep(cfg.cluster_dir)


def _run(ctx: RunContext, info: ClusterInfo, fault_plan: FaultPlan | None, on_tick: Callable[[], None]) -> int:
    etcd = ctx.connect()
    started = time.time()
    injector = _start_injector(ctx, etcd, info, fault_plan) if fault_plan else None
    try:
        code = _supervise_driver(ctx, etcd, on_tick)
        if injector:
            injector.stopping.set()
            injector.join(timeout=10.0)
        write_report(ctx, etcd, wall_s=time.time() - started)
        return code
    finally:
        if injector:
            injector.stopping.set()
        etcd.close()


def prepare(cfg: Config, info: ClusterInfo) -> RunContext:
    """Makes the job's folder and context. Raises ConfigError when the job has already done all its steps, and Fenced
    when another process starts the same job at the same moment."""
    cfg = cfg.model_copy(update={"run_dir": cfg.run_dir.resolve()})
    cfg.job_dir.mkdir(parents=True, exist_ok=True)
    (cfg.job_dir / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    model_dir = Path(cfg.model.path) if cfg.model.path else cfg.job_dir / "model"
    ctx = RunContext(config=cfg, etcd_endpoints=info.etcd_endpoints, job=cfg.job, epoch=0, model_dir=str(model_dir))
    etcd = ctx.connect()
    try:
        _reopen(etcd, ctx)
    finally:
        etcd.close()
    return ctx


def _reopen(etcd: EtcdClient, ctx: RunContext) -> None:
    """Clears the end of an earlier run of the same job, so that this one resumes from its committed state. Raises
    ConfigError for a job that is done, and Fenced when a driver starts meanwhile."""
    epoch = fencing.current_epoch(etcd, ctx.keys)

    def change(raw: bytes | None) -> bytes | None:
        if raw is None:
            return None
        status = JobStatus.decode(raw)
        if status.phase == "finished" and status.step >= ctx.config.train.steps:
            raise ConfigError(f"job {ctx.job} has already done its {status.step} steps",
                              hint="name a new job with --job=NAME, or raise --train.steps to continue this one")
        return status.replace(phase="starting", steps=ctx.config.train.steps, message="").encode()

    etcd.update(ctx.keys.job_status(), change, guards=[fencing.epoch_guard(ctx.keys, epoch)])


def _supervise_driver(ctx: RunContext, etcd: EtcdClient, on_tick: Callable[[], None]) -> int:
    context_file = ctx.save(ctx.config.cluster_dir / "run.json")
    command = processes.python("elastic_rl.driver", "--context", str(context_file))
    env = {processes.RUN_MARK: str(ctx.config.cluster_dir), **_RAY_ENV, **ray_environment(ctx.config.telemetry),
           **ctx.config.device.environment()}
    return DriverSupervisor(ctx, etcd, command, env=env, on_tick=on_tick).run()


def _status(etcd: EtcdClient, keys: Keys) -> JobStatus:
    found = etcd.get(keys.job_status())
    return readable_one(found, JobStatus) or JobStatus(phase="")


def _start_injector(ctx: RunContext, etcd: EtcdClient, info: ClusterInfo, fault_plan: FaultPlan) -> FaultInjector:
    context = FaultContext(ctx.config, etcd, ctx.keys, AdminClient(info))
    injector = FaultInjector(context, RunLog(ctx.config.job_dir / "steps.jsonl"),
                             fault_plan(context, ctx.config.train.steps))
    injector.start()
    return injector


def write_report(ctx: RunContext, etcd: EtcdClient, *, wall_s: float) -> Path:
    """Writes report.json and report.html to the job's folder; returns the path of the page."""
    cfg = ctx.config
    records = report_build.read_records(cfg.job_dir / "steps.jsonl")
    last_step = max((r["step"] for r in records if r["kind"] == "step"), default=0)
    audit = Ledger(etcd, ctx.keys).audit(last_step, cfg.train.prompts_per_step)
    report = report_build.build(records, job=cfg.job, seed=cfg.seed, audit=audit, wall_s=wall_s,
                                status=_status(etcd, ctx.keys).phase,
                                versions=list_versions(etcd, ctx.keys, Stream.POLICY))
    return report_html.write(report, records, cfg.job_dir)
