"""The entry point of a run: prepares the job, keeps the driver alive, plays the drill if asked, and writes the report.

It expects a running durable plane (etcd, coordinators, a DCS node; ``elastic-rl up``). Started again with the same job
it goes on from the last committed state.
"""

from __future__ import annotations

import fcntl
import logging
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from elastic_rl import processes
from elastic_rl.admin_client import AdminClient
from elastic_rl.cluster import ClusterInfo
from elastic_rl.config import Config
from elastic_rl.context import RunContext
from elastic_rl.coordinator import events
from elastic_rl.coordinator.records import JobStatus, Severity
from elastic_rl.coordinator.store import Store
from elastic_rl.data.ledger import Ledger
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.dcs.catalog import list_versions
from elastic_rl.drill import Drill, FaultPlan, Scene, standard_faults
from elastic_rl.errors import ConfigError
from elastic_rl.report import build as report_build
from elastic_rl.report import html as report_html
from elastic_rl.roles.run_log import RunLog

log = logging.getLogger(__name__)

_DRIVER_RESTARTS = 3
_TICK_S = 0.25
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
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"stop_heldout": None})})
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
    store = ctx.store()
    started = time.time()
    drill = _start_drill(ctx, store, info, fault_plan) if fault_plan else None
    try:
        code = _keep_driver(ctx, store, on_tick)
        if drill:
            drill.stopping.set()
            drill.join(timeout=10.0)
        write_report(ctx, store, wall_s=time.time() - started)
        return code
    finally:
        if drill:
            drill.stopping.set()
        store.close()


def prepare(cfg: Config, info: ClusterInfo) -> RunContext:
    """Makes the job's folder, model and context. Raises ConfigError when the job has already done all its steps."""
    cfg = cfg.model_copy(update={"run_dir": cfg.run_dir.resolve()})
    cfg.job_dir.mkdir(parents=True, exist_ok=True)
    (cfg.job_dir / "config.yaml").write_text(yaml.safe_dump(cfg.model_dump(mode="json"), sort_keys=False))
    model_dir = Path(cfg.model.path) if cfg.model.path else cfg.job_dir / "model"
    if not cfg.model.path and not (model_dir / "config.json").exists():
        make_model_dir(model_dir, cfg)
    ctx = RunContext(config=cfg, etcd=info.etcd, job=cfg.job, epoch=0, model_dir=str(model_dir))
    store = ctx.store()
    try:
        _reopen(store, ctx)
    finally:
        store.close()
    return ctx


def _reopen(store: Store, ctx: RunContext) -> None:
    """Clears the end of an earlier run of the same job, so that this one goes on from its committed state."""
    found = store.get(ctx.keys.job_status())
    if not found:
        return
    status = JobStatus.decode(found.value)
    if status.phase == "finished" and status.step >= ctx.config.train.steps:
        raise ConfigError(f"job {ctx.job} has already done its {status.step} steps",
                          hint="name a new job with --job=NAME, or raise --train.steps to go on")
    store.put(ctx.keys.job_status(), status.but(phase="starting", steps=ctx.config.train.steps, message="").encode())


def _keep_driver(ctx: RunContext, store: Store, on_tick: Callable[[], None]) -> int:
    """Starts the driver, and again if it dies: a global restart, since a new driver raises the epoch."""
    context_file = ctx.config.cluster_dir / "run.json"
    ctx.save(context_file)
    command = processes.python("elastic_rl.driver", "--context", str(context_file))
    for start in range(1 + _DRIVER_RESTARTS):
        if start:
            events.emit(store, ctx.keys, "run.global_restart", ctx.job, f"the driver ended; global restart {start}",
                        severity=Severity.ERROR)
        driver = processes.spawn(command, log=ctx.config.cluster_dir / "logs" / "driver.log",
                                 env={processes.RUN_MARK: str(ctx.config.cluster_dir), **_RAY_ENV})
        try:
            _wait_for(driver, on_tick)
        finally:
            processes.stop(driver.pid, grace_s=30.0)
        phase = _phase(store, ctx)
        if phase in ("finished", "failed"):
            return 0 if phase == "finished" else 1
    log.error("the driver ended %d times; giving up: see %s/logs/driver.log", start + 1, ctx.config.cluster_dir)
    return 1


def _wait_for(driver: subprocess.Popen[bytes], on_tick: Callable[[], None]) -> None:
    while True:
        on_tick()
        try:
            driver.wait(timeout=_TICK_S)
            on_tick()
            return
        except subprocess.TimeoutExpired:
            continue


def _phase(store: Store, ctx: RunContext) -> str:
    found = store.get(ctx.keys.job_status())
    return JobStatus.decode(found.value).phase if found else ""


def _start_drill(ctx: RunContext, store: Store, info: ClusterInfo, fault_plan: FaultPlan) -> Drill:
    scene = Scene(ctx.config, store, ctx.keys, AdminClient(info))
    drill = Drill(scene, RunLog(ctx.config.job_dir / "steps.jsonl"), fault_plan(scene, ctx.config.train.steps))
    drill.start()
    return drill


def write_report(ctx: RunContext, store: Store, *, wall_s: float) -> Path:
    """Writes report.json and report.html into the job's folder; returns the path of the page."""
    cfg = ctx.config
    records = report_build.read_records(cfg.job_dir / "steps.jsonl")
    last_step = max((r["step"] for r in records if r["kind"] == "step"), default=0)
    audit = Ledger(store, ctx.keys).audit(last_step, cfg.train.prompts_per_step)
    report = report_build.build(records, job=cfg.job, seed=cfg.seed, audit=audit, wall_s=wall_s,
                                status=_phase(store, ctx), versions=list_versions(store, ctx.keys, "policy"))
    return report_html.write(report, records, cfg.job_dir)
