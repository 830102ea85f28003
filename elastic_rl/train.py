"""The entry point of a run: prepares the job, keeps the driver alive, plays the drill if asked, and writes the report.

It expects a running durable plane (etcd, coordinators, a DCS node; ``elastic-rl up``). Started again with the same job
it goes on from the last committed state.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.failure.policy import progress_of
from elastic_rl.coordinator.operations.state_machine import JOB
from elastic_rl.data.ledger import Ledger
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.catalog import list_versions
from elastic_rl.driver.restart_requests import acknowledge, open_requests
from elastic_rl.errors import ConfigError, EtcdUnavailable
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, RestartRequest, Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.faults.drill import Drill, FaultContext, FaultPlan, standard_faults
from elastic_rl.host import processes
from elastic_rl.report import build as report_build
from elastic_rl.report import html as report_html
from elastic_rl.roles.run_log import RunLog

log = logging.getLogger(__name__)

_DRIVER_RESTARTS = 3
"""Times that a driver which ends by itself is started again without progress in between."""
_TICK_S = 0.25
_LOOK_S = 1.0
_GRACE_S = 30.0
"""For a driver to take the compute plane down in order."""
# Ray reads these when it is imported. Its GCS binds every interface, so a token is asked for, on purpose. Its workers
# are nice by default, and so would be the trainer ranks below them, whose collectives wait for the slowest rank.
_RAY_ENV = {"RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}


def run(cfg: Config, info: ClusterInfo, *, faults: bool = False, fault_plan: FaultPlan = standard_faults,
        on_tick: Callable[[], None] | None = None) -> int:
    """Trains until the run ends; returns 0 when it finished, 1 when it failed. Always writes the report.

    With ``faults`` the ``fault_plan`` is played on it, and the run takes all its steps, so that every fault gets its
    turn. ``on_tick`` is called every quarter of a second: the live view.
    Raises ConfigError for a job that is already done, or that another process is training.
    """
    if faults:
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"stop_eval_accuracy": None})})
    with _only_one(cfg):
        return _run(prepare(cfg, info), info, fault_plan if faults else None, on_tick or (lambda: None))


@contextmanager
def _only_one(cfg: Config) -> Iterator[None]:
    """Holds the job's lock, which the kernel takes back whatever ends this process, and leaves no process behind."""
    cfg.cluster_dir.mkdir(parents=True, exist_ok=True)
    with (cfg.cluster_dir / "train.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise ConfigError(f"job {cfg.job} is already being trained by another process",
                              hint="wait for it, or name another job with --job=NAME") from e
        run_mark = str(cfg.cluster_dir.resolve())
        processes.sweep(run_mark)
        try:
            yield
        finally:
            processes.sweep(run_mark)


def _run(ctx: RunContext, info: ClusterInfo, fault_plan: FaultPlan | None, on_tick: Callable[[], None]) -> int:
    etcd = ctx.connect()
    started = time.time()
    drill = _start_drill(ctx, etcd, info, fault_plan) if fault_plan else None
    try:
        code = _keep_driver(ctx, etcd, on_tick)
        if drill:
            drill.stopping.set()
            drill.join(timeout=10.0)
        write_report(ctx, etcd, wall_s=time.time() - started)
        return code
    finally:
        if drill:
            drill.stopping.set()
        etcd.close()


def prepare(cfg: Config, info: ClusterInfo) -> RunContext:
    """Makes the job's folder, model and context. Raises ConfigError when the job has already done all its steps."""
    cfg = cfg.model_copy(update={"run_dir": cfg.run_dir.resolve()})
    cfg.job_dir.mkdir(parents=True, exist_ok=True)
    (cfg.job_dir / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    model_dir = Path(cfg.model.path) if cfg.model.path else cfg.job_dir / "model"
    if not cfg.model.path and not (model_dir / "config.json").exists():
        make_model_dir(model_dir, cfg)
    ctx = RunContext(config=cfg, etcd_endpoints=info.etcd_endpoints, job=cfg.job, epoch=0, model_dir=str(model_dir))
    etcd = ctx.connect()
    try:
        _reopen(etcd, ctx)
    finally:
        etcd.close()
    return ctx


def _reopen(etcd: EtcdClient, ctx: RunContext) -> None:
    """Clears the end of an earlier run of the same job, so that this one goes on from its committed state."""
    found = etcd.get(ctx.keys.job_status())
    if not found:
        return
    status = JobStatus.decode(found.value)
    if status.phase == "finished" and status.step >= ctx.config.train.steps:
        raise ConfigError(f"job {ctx.job} has already done its {status.step} steps",
                          hint="name a new job with --job=NAME, or raise --train.steps to go on")
    etcd.put(ctx.keys.job_status(), status.replace(phase="starting", steps=ctx.config.train.steps, message="").encode())


def _keep_driver(ctx: RunContext, etcd: EtcdClient, on_tick: Callable[[], None]) -> int:
    """Starts the driver, and again if it dies: a global restart, since a new driver raises the epoch."""
    context_file = ctx.config.cluster_dir / "run.json"
    ctx.save(context_file)
    command = processes.python("elastic_rl.driver", "--context", str(context_file))
    if (wish := open_requests(etcd, ctx.keys).get(JOB)) is not None:
        acknowledge(etcd, ctx.keys, wish)  # wanted while nothing ran: this start is what was wanted
    starts, reached = 0, -1
    while starts <= _DRIVER_RESTARTS:
        driver = processes.spawn(command, log=ctx.config.cluster_dir / "logs" / "driver.log",
                                 env={processes.RUN_MARK: str(ctx.config.cluster_dir), **_RAY_ENV})
        try:
            wish = _wait_for(driver, etcd, ctx.keys, on_tick)
        finally:
            processes.stop(driver.pid, grace_s=_GRACE_S)
        job = _status(etcd, ctx.keys)
        if job.phase in ("finished", "failed"):
            return 0 if job.phase == "finished" else 1
        if wish is not None:  # the leader counts these, and stops a crash loop
            acknowledge(etcd, ctx.keys, wish)
            continue
        # The leader counts these too, but it may be away: the same guard, in short.
        starts, reached = (starts + 1 if progress_of(job) <= reached else 1), max(reached, progress_of(job))
        events.emit(etcd, ctx.keys, "run.global_restart", ctx.job, f"the driver ended; global restart {starts}",
                    severity=Severity.ERROR)
    log.error("the driver ended %d times without progress; giving up: see %s/logs/driver.log", starts,
              ctx.config.cluster_dir)
    return 1


def _wait_for(driver: subprocess.Popen[bytes], etcd: EtcdClient, keys: Keys,
              on_tick: Callable[[], None]) -> RestartRequest | None:
    """Returns when the driver ended, or somebody wants the job started anew: then the wish."""
    look_at = 0.0
    while driver.poll() is None:
        on_tick()
        if time.monotonic() >= look_at:
            with contextlib.suppress(EtcdUnavailable):  # running work goes on without etcd
                if (wish := open_requests(etcd, keys).get(JOB)) is not None:
                    return wish
            look_at = time.monotonic() + _LOOK_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            driver.wait(timeout=_TICK_S)
    on_tick()
    return None


def _status(etcd: EtcdClient, keys: Keys) -> JobStatus:
    found = etcd.get(keys.job_status())
    return JobStatus.decode(found.value) if found else JobStatus(phase="")


def _start_drill(ctx: RunContext, etcd: EtcdClient, info: ClusterInfo, fault_plan: FaultPlan) -> Drill:
    scene = FaultContext(ctx.config, etcd, ctx.keys, AdminClient(info))
    drill = Drill(scene, RunLog(ctx.config.job_dir / "steps.jsonl"), fault_plan(scene, ctx.config.train.steps))
    drill.start()
    return drill


def write_report(ctx: RunContext, etcd: EtcdClient, *, wall_s: float) -> Path:
    """Writes report.json and report.html into the job's folder; returns the path of the page."""
    cfg = ctx.config
    records = report_build.read_records(cfg.job_dir / "steps.jsonl")
    last_step = max((r["step"] for r in records if r["kind"] == "step"), default=0)
    audit = Ledger(etcd, ctx.keys).audit(last_step, cfg.train.prompts_per_step)
    report = report_build.build(records, job=cfg.job, seed=cfg.seed, audit=audit, wall_s=wall_s,
                                status=_status(etcd, ctx.keys).phase,
                                versions=list_versions(etcd, ctx.keys, Stream.POLICY))
    return report_html.write(report, records, cfg.job_dir)
