"""Runs a job: prepares it, keeps its driver running, injects faults on request, and writes the report.

It needs a running durable plane (etcd, coordinators, a DCS node, the host agent that keeps them running: ``elastic-rl
up``). Run again with the same job it resumes from the last committed state. Once the driver was started, an outage of
etcd, however long, ends nothing here: each reading is tried again, or left out.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from elastic_rl.config import Config, Stream
from elastic_rl.config.fixed_settings import fixed_settings
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.data import derived
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.ledger import Audit, ConsumedGroups, Consumption, audit
from elastic_rl.data.text_options import with_absolute_paths
from elastic_rl.dcs.catalog.reads import list_versions
from elastic_rl.driver.supervisor import END_CODES, STOPPED, DriverSupervisor
from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable, Fenced
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import ENDED_PHASES, GroupLease, JobStatus, Severity, Version
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.faults.context import FaultContext
from elastic_rl.faults.injector import FaultInjector, FaultPlan, standard_faults
from elastic_rl.host import cluster_settings, inherited_model, job_spec, leftovers, processes
from elastic_rl.host.address import host_address
from elastic_rl.host.agent.status import AgentWatch
from elastic_rl.host.compute_services import ray_epoch
from elastic_rl.host.job_secrets import dcs_security
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.ray_node import compute_environment
from elastic_rl.job import check as job_check
from elastic_rl.job import run_start
from elastic_rl.job.check import JobFinding
from elastic_rl.pipeline.records.history_reader import HistoryReader
from elastic_rl.pipeline.records.run_events import PRODUCER
from elastic_rl.pipeline.records.run_log import LineFile, RunLog
from elastic_rl.report import build as report_build
from elastic_rl.report import html as report_html
from elastic_rl.runtime.files import preflight_writes

log = logging.getLogger(__name__)

_LEAVE_S = 30.0
"""Longest wait for a command that starts or stops the cluster."""
_TICK_ETCD_BUDGET_S = 1.0
"""Retries of etcd in the thread that also refreshes the live view. Its callers try again for as long as it takes."""
_REPORT_ETCD_BUDGET_S = 15.0
_INTERRUPTED_ETCD_BUDGET_S = 2.0
"""Time for what etcd adds to the report: when the run has ended, and when someone waits for it to be interrupted."""

OnTick = Callable[[Mapping[str, str]], None]
"""Called with what the run waits for: name of a local service that does not run → why."""
OnBegun = Callable[[], None]
"""Called when all is checked and decided, before the driver is started."""


def run(cfg: Config, info: ClusterInfo, *, faults: bool = False, fault_plan: FaultPlan = standard_faults,
        on_tick: OnTick | None = None, from_job: str = "", checked: bool = False, on_begun: OnBegun = lambda: None,
        begun_at: float = 0.0, goes_on: Callable[[], bool] = lambda: False, assignment: int = 0, submission: int = 0,
        stopped: Callable[[], bool] = lambda: False) -> int:
    """Trains until the run ends; returns 0 when it finished, 1 when it failed, and ``STOPPED``. Always writes the
    report and, when it finished, the policy.

    With ``faults`` the faults of ``fault_plan`` are injected, and the run takes all its steps, so that every fault gets
    its turn. ``on_tick`` is called four times a second. ``from_job``: begin with the newest committed policy of this
    job. ``checked``: who starts it has made the checks of a new job, and has said what they warn of. ``begun_at``: when
    the run began, in unix seconds, if its process ended meanwhile and this one goes on with it. ``goes_on``: asked when
    an error, or a signal, ends this process: whether another one goes on with the run. Then its compute plane runs on.
    ``stopped``: whether the operator stops the run. ``assignment``: generation of the driver's assignment, if there is
    one: this process's driver begins under it. ``submission``: number of the job's submission that is carried out, if
    it was submitted.

    Raises ConfigError for a job that is already done, that another process is training, or whose settings contradict
    what it has decided, PreflightFailed when its folder cannot be written, and EtcdUnavailable when etcd does not
    answer at the start.
    """
    if faults and cfg.mode != "rl":
        raise ConfigError(f"faults are injected into RL runs only, and this one has mode={cfg.mode}",
                          hint="leave --faults out")
    if faults:
        cfg = cfg.model_copy(update={"train": cfg.train.model_copy(update={"stop_eval_accuracy": None})})
    cluster = Cluster(cfg)
    with _exclusive(cluster, resumes=bool(begun_at), goes_on=goes_on):
        if begun_at and (code := _end_without_us(cfg, info, begun_at, assignment)) is not None:
            return code
        tick, agent = on_tick or (lambda waiting: None), AgentWatch(cluster)
        ctx = prepare(cfg, info, from_job=from_job, checked=checked, resumes=bool(begun_at)).model_copy(
            update={"assignment": assignment, "submission": submission})
        # Not before: a run that is refused changes nothing. One that is started again finds settings that may be newer.
        Cluster(ctx.config).put_job_record(info.etcd_endpoints, resubmit=not begun_at, token=fencing.assigned(
            ClusterKeys(cfg.cluster_name), cfg.job, assignment))
        on_begun()
        code = _run(ctx, info, fault_plan if faults else None, lambda: tick(agent.waiting()),
                    started=begun_at or time.time(), goes_on=goes_on, stopped=stopped)
        if not code:
            _export_policy(ctx, info)
        return code


@contextmanager
def _exclusive(cluster: Cluster, *, resumes: bool, goes_on: Callable[[], bool]) -> Iterator[None]:
    """Makes this process the one that trains the job. Leaves no process or file behind, unless another process goes on
    with the run. ``resumes``: the driver of this run takes over what its predecessor has left, unless Ray was ended."""
    paths = JobPaths.of(cluster.cfg)
    with cluster.training():
        cluster.leave_ray(cluster.cfg.job, timeout_s=_LEAVE_S)  # of the run while it was on another host
        if not resumes or not ray_epoch(paths):
            leftovers.sweep(paths)
        is_over = False
        try:
            yield
            is_over = True
        finally:
            if is_over or not goes_on():
                leftovers.sweep(paths)


def _end_without_us(cfg: Config, info: ClusterInfo, begun_at: float, assignment: int) -> int | None:
    """The exit code of a run whose job ended after this process's predecessor was killed, with its report and policy;
    None where it has not ended. ``prepare`` would refuse a job that has done all its steps, and repeat one that failed.
    """
    ctx = RunContext(config=_absolute(cfg), etcd_endpoints=info.etcd_endpoints, job=cfg.job, epoch=0, model_dir="",
                     host=host_address(cfg), assignment=assignment)
    with _connect(ctx, cfg.etcd.retry_budget_s) as etcd:
        phase = _status(etcd, ctx.keys).phase
    if phase not in ENDED_PHASES:
        return None
    code = END_CODES[phase]
    _report(ctx, code, began_at=begun_at)
    if not code:
        _export_policy(ctx, info)
    return code


def _export_policy(ctx: RunContext, info: ClusterInfo) -> None:
    """Writes the newest policy of a job that has finished to its folder on this host, with an event that says so. Where
    that fails the checkpoint service has it."""
    if not ctx.config.uses_trainer:
        return
    target, host = JobPaths.of(ctx.config).policy, Cluster(ctx.config).host.name
    where = f"{target} of host {host}" if host else str(target)
    try:
        held = inherited_model.keep_policy(ctx.config, info, target)
        kind, text, severity = event_kinds.RUN_EXPORTED, f"{where} has {held}", Severity.INFO
    except ElasticRLError as e:
        log.error("the policy cannot be exported to %s: %s", target, e)
        has = f", which has {held}" if (held := inherited_model.holds(target)) else ""
        kind, text, severity = event_kinds.RUN_NOT_EXPORTED, f"{where}{has}: {e.message}", Severity.WARNING
    token = fencing.assigned(ClusterKeys(ctx.config.cluster_name), ctx.job, ctx.assignment)
    with suppress(EtcdUnavailable, Fenced), _connect(ctx, _INTERRUPTED_ETCD_BUDGET_S) as etcd:
        FencedWriter(etcd, ctx.keys, lambda: token, f"the assignment of driver/{ctx.job}").emit(
            kind, ctx.job, text, severity=severity)


def _run(ctx: RunContext, info: ClusterInfo, fault_plan: FaultPlan | None, on_tick: Callable[[], None], *,
         started: float, goes_on: Callable[[], bool], stopped: Callable[[], bool]) -> int:
    code: int | None = None
    with _connect(ctx, _TICK_ETCD_BUDGET_S) as etcd, ctx.connect() as injected:
        injector = _start_injector(ctx, injected, info, fault_plan) if fault_plan else None
        try:
            code = _supervise_driver(ctx, etcd, on_tick, goes_on, stopped)
            with suppress(EtcdUnavailable, Fenced):  # the next run does it, too
                run_start.forget_engines(etcd, ctx.keys)
            return code
        finally:
            if injector:
                injector.end()
                injector.join(timeout=10.0)
            _report(ctx, code, began_at=started)


def _connect(ctx: RunContext, retry_budget_s: float) -> EtcdClient:
    return EtcdClient.from_config(ctx.config.etcd, ctx.etcd_endpoints,
                                  retry_budget_s=min(retry_budget_s, ctx.config.etcd.retry_budget_s))


def prepare(cfg: Config, info: ClusterInfo, *, from_job: str = "", checked: bool = False, resumes: bool = False
            ) -> RunContext:
    """Makes the job's folder and context. ``checked``: as of ``run``. ``resumes``: this run has begun, and may be
    training meanwhile. Raises ConfigError when the job has already done all its steps, or decided other settings than
    these, when its model cannot be used, Fenced when another process starts the same job at the same moment, and
    PreflightFailed when its folder cannot be written."""
    cfg = _absolute(cfg)
    paths = JobPaths.of(cfg)
    with preflight_writes(cfg.run_dir):
        paths.folder.mkdir(parents=True, exist_ok=True)
    with EtcdClient.from_config(cfg.etcd, info.etcd_endpoints) as etcd:
        if not resumes:
            run_start.forget_engines(etcd, Keys(cfg.job))  # its checks take a while, and nothing of it runs
        cfg, warnings = _admit(etcd, cfg, from_job, checked=checked or resumes)
        if not resumes:
            derived.remove_unused(paths.data)
        model_dir = str(inherited_model.began_with(cfg))
        with preflight_writes(paths.folder):
            cluster_settings.save(cfg, paths.settings)
        ctx = RunContext(config=cfg, etcd_endpoints=info.etcd_endpoints, job=cfg.job, epoch=0, model_dir=model_dir,
                         host=host_address(cfg))
        if not resumes:
            run_start.open_run(etcd, ctx.keys, ctx.config, [] if checked else [
                f"{found.part}: {found.fault or found.detail}. {found.hint}" for found in warnings])
    return ctx


def _absolute(cfg: Config) -> Config:
    """The settings with absolute paths: the run's processes may have another working folder."""
    path = str(Path(cfg.model.path).expanduser().resolve()) if cfg.model.path else ""
    critic = str(Path(cfg.critic.model).expanduser().resolve()) if cfg.critic.model else ""
    options = with_absolute_paths(cfg.data.source, cfg.data.options)
    return cfg.model_copy(update={"run_dir": cfg.run_dir.resolve(),
                                  "data": cfg.data.model_copy(update={"options": options}),
                                  "model": cfg.model.model_copy(update={"path": path}),
                                  "critic": cfg.critic.model_copy(update={"model": critic}),
                                  "pools": {name: pool.model_copy(update={
                                      "model": str(Path(pool.model).expanduser().resolve())})
                                      for name, pool in cfg.pools.items()}})


def _admit(etcd: EtcdClient, cfg: Config, from_job: str, *, checked: bool) -> tuple[Config, list[JobFinding]]:
    """Settles what the job begins with, and that it may; returns the settings that hold for it, and what its checks
    warn of. ``checked``: they were made already. Raises as ``prepare``."""
    keys = Keys(cfg.job)
    decided = job_spec.read(etcd, keys)
    cfg = job_spec.with_template_date(cfg, decided)
    begun = decided.spec if decided.committed else None
    if from_job and decided.committed and (begun is None or begun.from_job != from_job):
        raise ConfigError(f"job {cfg.job} has been trained already, and did not begin with the policy of {from_job}",
                          hint="name a new job with --job=NEW, or resume this one without --from-job")
    if begun is not None:
        if begun.from_job and not (inherited_model.folder(cfg) / "config.json").exists():  # as on another host
            inherited_model.export_policy(cfg, begun.from_job, number=begun.from_version)
        cfg = inherited_model.with_inherited_model(cfg, begun.from_job)
        job_spec.require_same(cfg, decided)
        return cfg, _logged(job_check.require(cfg, begun=True, goes_on=checked))
    version = 0
    if not from_job and decided.spec is not None and decided.spec.from_job:  # that start was not completed
        from_job, version = decided.spec.from_job, decided.spec.from_version
        if not (inherited_model.folder(cfg) / "config.json").exists():
            inherited_model.export_policy(cfg, from_job, number=version)
    elif from_job:
        version = inherited_model.export_policy(cfg, from_job)
    if from_job:
        cfg = inherited_model.with_inherited_model(cfg, from_job)
    elif not decided.committed and decided.spec is not None and decided.spec.settings != fixed_settings(cfg):
        shutil.rmtree(inherited_model.folder(cfg), ignore_errors=True)  # made with the settings of then
    # With the model that is settled, whose tokenizer the data may need.
    found = _logged(job_check.require(cfg, goes_on=checked))
    job_spec.record(etcd, keys, cfg, decided, from_job=from_job, from_version=version)
    return cfg, found


def _logged(found: list[JobFinding]) -> list[JobFinding]:
    for finding in found:
        log.warning("%s: %s; %s", finding.part, finding.fault or finding.detail, finding.hint)
    return found


def _supervise_driver(ctx: RunContext, etcd: EtcdClient, on_tick: Callable[[], None], goes_on: Callable[[], bool],
                      stopped: Callable[[], bool]) -> int:
    """Raises PreflightFailed when the files that the driver needs cannot be written."""
    paths = JobPaths.of(ctx.config)
    with preflight_writes(paths.private):
        context_file = ctx.save(paths.context())
    leftovers.make_temp_folder(paths)
    command = processes.python("elastic_rl.driver", "--context", str(context_file))
    return DriverSupervisor(ctx, etcd, command, env=compute_environment(ctx.config), on_tick=on_tick,
                            goes_on=goes_on, stopped=stopped).run()


def _status(etcd: EtcdClient, keys: Keys) -> JobStatus:
    found = etcd.get(keys.job_status())
    return readable_one(found, JobStatus) or JobStatus(phase="")


def _start_injector(ctx: RunContext, etcd: EtcdClient, info: ClusterInfo, fault_plan: FaultPlan) -> FaultInjector:
    context = FaultContext(ctx.config, etcd, ctx.keys, AdminClient(info))
    paths = JobPaths.of(ctx.config)
    injector = FaultInjector(context, RunLog(LineFile(paths.faults)), fault_plan(context, ctx.config.train.steps),
                             paths.steps)
    injector.start()
    return injector


@dataclass(frozen=True)
class _Facts:
    """What the report takes from etcd, or has to do without."""

    audit: Audit
    status: str
    versions: list[Version]
    note: str = ""


def _report(ctx: RunContext, code: int | None, *, began_at: float) -> None:
    """Writes the report of a run that has ended with ``code``; None: by an error, or a signal."""
    try:
        write_report(ctx, code, began_at=began_at, ended_at=time.time())
    except OSError as e:  # no room, most likely; the outcome of the run is another matter
        log.error("the report cannot be written to %s: %s", JobPaths.of(ctx.config).folder, e)


def write_report(ctx: RunContext, code: int | None, *, began_at: float, ended_at: float) -> Path:
    """Writes report.json and report.html to the job's folder; returns the path of the page. ``began_at``, ``ended_at``:
    of the last run, unix seconds. Where etcd does not answer, the report is made from the run's own records, and says
    so. Raises OSError."""
    cfg, paths = ctx.config, JobPaths.of(ctx.config)
    records = _records(ctx, _INTERRUPTED_ETCD_BUDGET_S if code in (None, STOPPED) else _REPORT_ETCD_BUDGET_S)
    facts = _facts(ctx, records, code)
    report = report_build.build(records, job=cfg.job, seed=cfg.seed, audit=facts.audit, run_began_at=began_at,
                                wall_s=max(0.0, ended_at - began_at), status=facts.status, versions=facts.versions,
                                note=facts.note)
    return report_html.write(report, records, paths)


def _records(ctx: RunContext, etcd_budget_s: float) -> list[report_build.Record]:
    """The records of the job's steps and of its faults: of the file in its folder or, where that is not complete, of
    etcd and the checkpoint service. Raises OSError."""
    cfg, paths = ctx.config, JobPaths.of(ctx.config)
    try:
        with _connect(ctx, etcd_budget_s) as etcd, HistoryReader(
                etcd, ctx.keys, io_timeout_s=cfg.dcs.io_timeout_s, security=dcs_security(cfg)) as reader:
            found = list(report_build.parse_parts(reader.parts(paths.steps)))
    except ElasticRLError as e:
        log.warning("the report is made from %s alone: %s", paths.steps, e)
        found = report_build.read_records(paths.steps)
    return report_build.in_order(found, report_build.read_records(paths.faults))


def audit_of(etcd: EtcdClient, keys: Keys, groups_per_step: int) -> Audit:
    """The audit of a job's groups, by the states of the trainer that etcd lists. Raises EtcdUnavailable, ValueError and
    ValidationError."""
    states = [(int(v.meta.get("step", 0)), ConsumedGroups.from_json(v.meta.get("consumed") or {}))
              for v in list_versions(etcd, keys, Stream.TRAINER_STATE)
              if v.committed_at > 0 and v.meta.get("phase") == "rl"]
    lease = readable_one(etcd.get(keys.group_lease(PRODUCER)), GroupLease)
    leased = IntervalSet.from_json(lease.groups) if lease is not None else IntervalSet()
    return audit(states, groups_per_step=groups_per_step, leased=leased)


def _facts(ctx: RunContext, records: list[report_build.Record], code: int | None) -> _Facts:
    per_step = ctx.config.train.prompts_per_step
    try:
        with _connect(ctx, _INTERRUPTED_ETCD_BUDGET_S if code in (None, STOPPED) else _REPORT_ETCD_BUDGET_S) as etcd:
            return _Facts(audit_of(etcd, ctx.keys, per_step), _status(etcd, ctx.keys).phase,
                          list_versions(etcd, ctx.keys, Stream.POLICY))
    except (ElasticRLError, ValidationError, ValueError) as e:
        message = e.message if isinstance(e, ElasticRLError) else f"a record cannot be read: {e}"
    log.warning("the report is made without etcd: %s", message)
    trained, step = ConsumedGroups(), 0
    for record in report_build.effective_steps(records):
        trained = trained.add(Consumption(IntervalSet.from_values(record.get("groups") or [])))
        step = int(record["step"])
    status = {0: "finished", STOPPED: "stopped", None: "interrupted"}.get(code, "failed")
    return _Facts(audit([(step, trained)], groups_per_step=per_step), status, [], (
        f"Made without etcd ({message}): groups, versions and status are from the run's own records."))
