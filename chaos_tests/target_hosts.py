"""A cluster on test hosts as the target of a chaos run: a member of etcd, a coordinator, an agent and a DCS node on
each host, and a light run (``traffic.light_job``) on one of them, which faults move to others.

Needs root, no GPU and little CPU: the run computes nothing.
"""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from chaos_tests.target import READ_BUDGET_S, Target, left_behind
from chaos_tests.traffic import driver_writes, light_job
from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.coordinator.client.admin_client import AdminClient
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, DeadlineExceeded, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Leader
from elastic_rl.faults.hosts import HostsContext, restore
from elastic_rl.faults.undo import UndoRegistry
from elastic_rl.host import processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.test_hosts.bridge import interfaces, routes
from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts
from elastic_rl.host.test_hosts.isolated_hosts import MARK, PRIVATE
from elastic_rl.host.test_hosts.naming import choose_subnet, is_of_tag, tag_of
from elastic_rl.runtime.waiting import wait_until

CLUSTER, HOSTS = "chaos", 3
LOGS = "logs"
"""The folder of the logs of all hosts, in ``run_dir`` of the cluster, once it is down."""
RUN = (*light_job.COMMAND, "--pause-s", "0.5")
"""What is in the place of the driver."""
_READY_S, _STOP_S = 300.0, 120.0
_POLL_S = 0.2


@dataclass(frozen=True)
class HostsTarget(Target):
    made: ClusterHosts

    @property
    def folders(self) -> Sequence[JobPaths]:
        return [JobPaths.of(self.cfg.model_copy(update={"run_dir": host.run_dir})) for host in self.made.all()]

    @property
    def hosts(self) -> Mapping[str, str]:
        return {host.name: host.address for host in self.made.all()}

    def context(self, undo: UndoRegistry | None = None) -> HostsContext:
        return HostsContext(self.made, self.cfg, self.reader, self.api, len(self.hosts), undo=undo,
                            works=lambda generation, since: driver_writes.works(
                                self.reader, self.cfg.job, generation, since))

    def heal(self) -> None:
        restore(self.made)
        self.await_whole()

    def stop_job(self) -> None:
        """The run may be on any host, whose agent ends what it leaves."""
        if self.cluster.run.withdraw(self.etcd):
            with contextlib.suppress(DeadlineExceeded):  # the job then ends with the cluster
                wait_until(lambda: self.reading().ended, timeout_s=_STOP_S, poll_s=_POLL_S, what="the end of the run")

    def report(self) -> dict[str, object]:
        """Each host has the records of the steps that were made on it."""
        return self.report_so_far()

    def await_whole(self) -> None:
        """Returns once nothing is missing; a job that has ended needs no run. Raises DeadlineExceeded, which names what
        is."""
        context, missing = self.context(), "an answer of etcd"

        def whole() -> bool:
            nonlocal missing
            with contextlib.suppress(EtcdUnavailable):
                missing = context.missing(run=not self.reading().ended)
            return not missing

        try:
            wait_until(whole, timeout_s=_READY_S, poll_s=_POLL_S, what="the whole cluster")
        except DeadlineExceeded as e:
            raise DeadlineExceeded(f"{e.message}: it lacks {missing}") from e


def require_visible(folder: Path) -> None:
    """Raises ConfigError for a folder of results that test hosts do not see."""
    if below := next((private for private in PRIVATE if folder.resolve().is_relative_to(private)), None):
        raise ConfigError(f"the folder of the results is below {below}, of which each test host has its own",
                          hint="name another folder with --out, such as one below /var/tmp")


@contextmanager
def hosts_cluster(cfg: Config, *, say: Callable[[str], None], on_leftover: Callable[[str], None]
                  ) -> Iterator[HostsTarget]:
    """Brings up ``HOSTS`` hosts with a light run, which are off at the end, whatever happens: they end with this
    process. Calls ``on_leftover`` with each thing that has not ended with them. Raises ConfigError for a folder that
    hosts cannot share, PreflightFailed where this machine cannot have hosts, and what ``ClusterHosts.up`` raises."""
    cluster = Cluster(cfg, say=say)
    cfg = cluster.cfg  # its paths are absolute
    require_visible(cfg.run_dir)
    made, failed = ClusterHosts(cluster, say, outlive=False), ""
    try:
        with ExitStack() as stack:
            stack.callback(shutil.rmtree, cfg.run_dir.parent / "site", ignore_errors=True)  # of ``environment``
            stack.callback(_power_off, made)
            made.up(HOSTS, control_hosts=HOSTS)
            info = _connected(cluster)
            reader = stack.enter_context(cluster.etcd(info, retry_budget_s=READ_BUDGET_S))
            etcd = stack.enter_context(cluster.etcd(info))
            urls = wait_until(lambda: _coordinators(etcd, ClusterKeys(cfg.cluster_name)), timeout_s=_READY_S,
                              poll_s=_POLL_S, what="a coordinator on each host")
            info = replace(info, coordinators=urls)
            made.submit(env=driver_writes.environment(cfg.run_dir.parent, RUN))
            target = HostsTarget(cluster, info, etcd, reader, Keys(cfg.job), AdminClient(info), True, made)
            target.await_whole()
            yield target
            try:
                made.down()
            except ElasticRLError as e:
                failed = e.message
    finally:
        for what in (*_left(tag_of(cluster.paths.folder)), *left_behind(cfg), *([failed] if failed else [])):
            on_leftover(what)
        for what in _keep_logs(cluster.paths.folder, cfg.run_dir / LOGS):
            on_leftover(what)
        shutil.rmtree(cluster.paths.folder, ignore_errors=True)


def _keep_logs(folder: Path, kept: Path) -> list[str]:
    """Moves the logs of a cluster and of its hosts out of its folder, which is about to be deleted. Returns what could
    not be moved."""
    failed = []
    for path in [path for path in folder.rglob("*.log*") if path.is_file() and not path.is_symlink()]:
        to = kept / path.relative_to(folder)
        try:
            to.parent.mkdir(parents=True, exist_ok=True)
            path.rename(to)
        except OSError as e:
            failed.append(f"the log {path}: {e.strerror}")
    return failed


def receiver_address(run_dir: Path) -> str:
    """The address of this machine in the network that the hosts of a cluster whose folder this is are going to have.
    Raises PreflightFailed where none is free."""
    paths = ClusterPaths.of(config.parse({"run_dir": str(run_dir), "cluster": CLUSTER}))
    return choose_subnet(tag_of(paths.folder), routes()).of_machine


def _connected(cluster: Cluster) -> ClusterInfo:
    """How to connect, once the agents know all members of etcd."""
    def known() -> ClusterInfo | None:
        info = cluster.connect()
        return info if len(info.etcd_endpoints) == HOSTS else None

    return wait_until(known, timeout_s=_READY_S, poll_s=_POLL_S, what="the members of etcd")


def _coordinators(etcd: EtcdClient, keys: ClusterKeys) -> list[str]:
    """URLs of the coordinators, once each host has one."""
    found = [leader.url for leader, _ in readable(etcd.range(keys.leader_prefix())[0], Leader)]
    return found if len(found) == HOSTS else []


def _power_off(hosts: ClusterHosts) -> None:
    """Ends what is on, where the hosts were not taken down."""
    if hosts.record is not None and (on := [host.name for host in hosts.all() if host.state != "off"]):
        for name in on:
            hosts.power_off(name)
        hosts.down()


def _left(tag: str) -> list[str]:
    """What is there of hosts that were taken down."""
    found = [f"the interface {name}" for name in interfaces() if is_of_tag(name, tag)]
    return found + [f"process {process.pid} of host {mark}" for process, mark in processes.with_variable(MARK)
                    if mark.partition("/")[0] == tag]
