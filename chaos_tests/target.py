"""The cluster and the job that a chaos run strikes: one that is made for the run, or one that runs already."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from chaos_tests import kept_job
from elastic_rl import config
from elastic_rl.config import Config, Stream
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.dcs.catalog.reads import list_versions
from elastic_rl.errors import ConfigError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import StepMetrics, Version
from elastic_rl.faults.context import FaultContext
from elastic_rl.faults.undo import UndoRegistry
from elastic_rl.host import job_spec, leftovers, processes
from elastic_rl.host.job_run import RunReading
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import build, read_for_build, read_records
from elastic_rl.train import audit_of

_OF_THE_RUN: Mapping[str, str] = {
    **dict.fromkeys(("run_dir", "job", "cluster"), "it says itself where it is"), "seed": "the schedule has its seed",
    "train.steps": "the schedule has its length: give --steps or --minutes",
    **dict.fromkeys(("alerts.urls", "alerts.routes", "alerts.config_file"),
                    "it receives the alerts itself, and judges them"),
    "etcd.endpoints": "it starts an etcd, which its faults strike"}
"""Settings that a run on a cluster of its own decides, and why."""
READ_BUDGET_S = 1.0
"""Retries of a reading that is made again and again."""


@dataclass(frozen=True)
class Target:
    """A job that runs, or is about to, and how to reach it."""

    cluster: Cluster
    info: ClusterInfo
    etcd: EtcdClient
    """For the faults, which wait for an etcd that is away."""
    reader: EtcdClient
    """For readings that are made again and again, and may be left out."""
    keys: Keys
    api: AdminClient
    own: bool
    """Whether the cluster was made for this run."""

    @property
    def cfg(self) -> Config:
        return self.cluster.cfg

    @property
    def paths(self) -> JobPaths:
        return JobPaths.of(self.cfg)

    @property
    def folders(self) -> Sequence[JobPaths]:
        """The folders of the job, one a host that may have its run."""
        return (self.paths,)

    @property
    def hosts(self) -> Mapping[str, str]:
        """Address of each host by its name, where clients may change what is wanted of hosts."""
        return {}

    @property
    def cluster_keys(self) -> ClusterKeys:
        return ClusterKeys(self.cfg.cluster_name)

    @property
    def observed(self) -> tuple[str, ...]:
        """Prefixes of the keys in etcd that are of the cluster and of the job."""
        return (self.keys.root, self.cluster_keys.root)

    @property
    def name(self) -> str:
        return f"job {self.cfg.job} in {self.cfg.run_dir}" if not self.own else f"a cluster of its own, {self.cfg.job}"

    def context(self, undo: UndoRegistry | None = None) -> FaultContext:
        return FaultContext(self.cfg, self.etcd, self.keys, self.api, undo=undo)

    def heal(self) -> None:
        """Ends what faults have left that is not noted to be undone, and returns once nothing is missing. Raises
        ElasticRLError."""

    def stop_job(self) -> None:
        """Returns once the run of the job has ended. Raises EtcdUnavailable."""
        self.cluster.stop_run()

    def reading(self) -> RunReading:
        """How the run of the job goes. Raises EtcdUnavailable."""
        return self.cluster.run.read_from(self.reader)

    def alerts(self) -> list[Alert]:
        """All that etcd has. Raises EtcdUnavailable."""
        return [alert for alert, _ in readable(self.reader.range(self.keys.alerts_prefix())[0], Alert)]

    def unowned(self) -> list[str]:
        """The keys of a job that has ended which are to be there only as long as who wrote them: its members, their
        processes, what they pin and publish, and where they meet. Coordinators and DCS nodes run on. Raises
        EtcdUnavailable."""
        keys = self.keys
        found = [kv.key for prefix in (keys.members_prefix(), f"{keys.root}processes/", f"{keys.root}dcs/pins/",
                                       f"{keys.root}dcs/staging/", keys.rendezvous_prefix())
                 for kv in self.reader.range(prefix)[0]]
        return [key for key in found if not {"coordinator", "dcs"} & {*key.removeprefix(keys.root).split("/")[1:-1]}]

    def report(self) -> dict[str, Any]:
        """The report of the job: as its run has written it, or, while that goes on, of what it has done so far. Raises
        EtcdUnavailable."""
        if self.own:
            return dict(json.loads(self.paths.report.read_text(encoding="utf-8"))) if self.paths.report.exists() else {}
        return self.report_so_far()

    def report_so_far(self) -> dict[str, Any]:
        """The report of what etcd and the records of the job have now. Raises EtcdUnavailable."""
        steps = sorted((record for paths in self.folders for record in read_for_build(paths.steps)),
                       key=lambda record: float(record["at"]))
        phase = self.reading().phase
        return build([*steps, *read_records(self.paths.faults)], job=self.cfg.job, seed=self.cfg.seed,
                     status=phase.value if phase is not None else "",
                     audit=audit_of(self.reader, self.keys, self.cfg.train.prompts_per_step),
                     versions=list_versions(self.reader, self.keys, Stream.POLICY))

    def refused(self) -> str | None:
        """What the product says to whoever would resume the job with another seed, by the line that names it; "" where
        it may be resumed so, and None where it has not committed anything yet that depends on its settings. Nothing is
        started. Raises EtcdUnavailable."""
        decided = job_spec.read(self.reader, self.keys)
        if decided.spec is None or not decided.committed:
            return None
        other = self.cfg.model_copy(update={"seed": self.cfg.seed + 1})
        try:
            job_spec.require_same(job_spec.with_template_date(other, decided), decided)
        except ConfigError as e:  # a line a setting, with its values: those of others may be secret
            lines = e.message.splitlines()
            return next((line.strip() for line in lines if line.split()[:1] == ["seed"]), lines[0])
        return ""

    def committed_steps(self) -> list[int]:
        """The steps of which etcd has the metrics, in order. Raises EtcdUnavailable."""
        return [m.step for m, _ in readable(self.reader.range(self.keys.steps_prefix())[0], StepMetrics)]


@contextmanager
def _connected(cluster: Cluster, info: ClusterInfo, *, own: bool) -> Iterator[Target]:
    with ExitStack() as stack:
        etcd = stack.enter_context(cluster.etcd(info))
        reader = stack.enter_context(cluster.etcd(info, retry_budget_s=READ_BUDGET_S))
        yield Target(cluster, info, etcd, reader, Keys(cluster.cfg.job), AdminClient(info), own)


def own_config(folder: Path, settings: Mapping[str, Any], more: Sequence[str] = (), *, seed: int) -> Config:
    """The settings of a job on a cluster of its own below ``folder``. ``more``: on top, as ``--key.sub=value``. Raises
    ConfigError, also for what the run decides itself: it would strike another etcd, or tell others of its alerts."""
    named = config.given(None, more)
    for name, why in _OF_THE_RUN.items():
        section, _, key = name.rpartition(".")
        within = named.get(section) if section else named
        if isinstance(within, Mapping) and key in within:
            raise ConfigError(f"a run on a cluster of its own takes no --{name}: {why}", hint="leave it out")
    for word in more:  # it would replace what the scenario and the run have decided in that section
        name, _, value = word.removeprefix("--").partition("=")
        if "." not in name and value.lstrip().startswith("{"):
            raise ConfigError(f"a run on a cluster of its own takes no whole section: --{name}",
                              hint=f"give its keys one by one: --{name}.KEY=VALUE")
    return config.load(None, [
        "--train.stop_eval_accuracy=null",
        *(f"--{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in settings.items()),
        *more, f"--seed={seed}", f"--run_dir={run_dir_of(folder)}", f"--job=chaos-{secrets.token_hex(4)}"])


def run_dir_of(folder: Path) -> Path:
    """``run_dir`` of a cluster of its own."""
    return folder / "cluster"


@contextmanager
def own_cluster(cfg: Config, *, say: Callable[[str], None], on_leftover: Callable[[str], None],
                on_kept: Callable[[Mapping[str, Any]], None] = lambda kept: None) -> Iterator[Target]:
    """Brings a cluster up and submits its job; takes it down at the end, whatever happens, and calls ``on_leftover``
    with each thing that has not ended with it, and ``on_kept`` with what is kept of a job that had ended before
    (``kept_job``). The host agent takes it down where this process is killed."""
    cluster = Cluster(cfg, say=say)
    heads: list[Version] | None = None
    with cluster.owned():
        try:
            info = cluster.up()
            cluster.submit()
            with _connected(cluster, info, own=True) as target:
                yield target
                with suppress(EtcdUnavailable):
                    heads = kept_job.heads(target.etcd, target.keys) if target.reading().over else None
        finally:
            cluster.down()
    for what in left_behind(cluster.cfg):
        on_leftover(what)
    if heads is not None:
        on_kept(kept_job.on_disk(cluster.cfg, heads))
    cluster.down(purge=True)
    leftovers.sweep(JobPaths.of(cluster.cfg))


@contextmanager
def running_cluster(cluster: Cluster) -> Iterator[Target]:
    """A cluster that is up, and a job on it. Raises EtcdUnavailable where it is not up."""
    with _connected(cluster, cluster.connect(), own=False) as target:
        yield target


def left_behind(cfg: Config) -> list[str]:
    """What should be gone once the cluster of a job is down: processes, shared memory, temporary files. A process at a
    terminal is somebody's who looks at the logs: those of a cluster have none."""
    paths = JobPaths.of(cfg)
    mine = {p.pid for p in psutil.process_iter(["cmdline", "terminal"])
            if cfg.job in " ".join(p.info["cmdline"] or []) and not p.info["terminal"]}
    mine |= {p.pid for p in processes.marked(str(paths.private))}
    return [*(f"process {pid}: {_command(pid)}" for pid in sorted(mine)),
            *map(str, Path("/dev/shm").glob(f"*{cfg.job}*")), *map(str, leftovers.tagged_files(paths.file_tag())),
            *([str(paths.temp)] if paths.temp.exists() else [])]


def _command(pid: int) -> str:
    with suppress(psutil.Error):
        return " ".join(psutil.Process(pid).cmdline())[:200]
    return "it has just ended"
