"""A cluster on test hosts as the target of a chaos run: a member of etcd, a coordinator, an agent and a DCS node on
each host, a light run on one of them, clients of the admin API beside them, and faults of hosts, their network and what
runs on them.

Needs root, no GPU and little CPU: the run computes nothing (``traffic.driver_writes``). ``play`` does a whole run and
writes its event log; ``validate.hosts`` judges that. A scenario that brings other traffic uses ``cluster_of_hosts``.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil

from chaos_tests.event_log import FORM, EventLog, Kind
from chaos_tests.faults.catalogue import HOST_FAULTS
from chaos_tests.nemesis.schedule import Schedule, Strike
from chaos_tests.observation import observe
from chaos_tests.traffic import driver_writes
from chaos_tests.traffic.cluster_changes import ClusterClients, Target
from chaos_tests.traffic.pool_changes import POOL
from elastic_rl import config
from elastic_rl.coordinator.alerts.state_machine import Alert
from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import DeadlineExceeded, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.decoding import readable
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.records import Leader, PoolSpec
from elastic_rl.faults.hosts import HostFault, HostsContext, restore
from elastic_rl.faults.undo import UndoRegistry
from elastic_rl.host import processes
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.test_hosts.bridge import interfaces
from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts
from elastic_rl.host.test_hosts.isolated_hosts import MARK
from elastic_rl.host.test_hosts.naming import is_of_tag, tag_of
from elastic_rl.runtime.waiting import wait_until

SCENARIO = "hosts"
CLUSTER = "chaos"
HOSTS = 3
SETTINGS: Mapping[str, Any] = {
    "coordinator": {"replicas": 1}, "dcs": {"arena_bytes": 32 << 20},
    "etcd": {"follow_members_s": 2.0, "history_s": 7200.0}, "rollout": {"engines": 2}}
"""``history_s``: the observer reads the whole history at the end."""
ANSWERS_A_STEP = 10
"""A step of a schedule is so many known outcomes of clients' operations: this traffic has no steps of its own."""
_READY_S, _DETECT_S, _HEAL_S = 300.0, 180.0, 600.0
_POLL_S = 0.2
_EVENTS = 2000


@dataclass(frozen=True)
class HostsCluster:
    """A cluster that is up, with a light run."""

    hosts: ClusterHosts
    cluster: Cluster
    info: ClusterInfo
    etcd: EtcdClient
    context: HostsContext
    """For the faults."""
    target: Target
    """For the clients."""

    @property
    def job(self) -> str:
        return self.context.job

    def await_whole(self) -> None:
        """Returns once nothing is missing. Raises DeadlineExceeded, which names what is."""
        missing = "an answer of etcd"

        def whole() -> bool:
            nonlocal missing
            with contextlib.suppress(EtcdUnavailable):
                missing = self.context.missing()
            return not missing

        try:
            wait_until(whole, timeout_s=_READY_S, poll_s=_POLL_S, what="the whole cluster")
        except DeadlineExceeded as e:
            raise DeadlineExceeded(f"{e.message}: it lacks {missing}") from e


@contextlib.contextmanager
def cluster_of_hosts(say: Callable[[str], None], *, hosts: int = HOSTS, settings: Mapping[str, Any] = SETTINGS
                     ) -> Iterator[HostsCluster]:
    """Brings up so many hosts with a light run, which are off at the end, whatever happens. Raises PreflightFailed
    where this machine cannot have them, and what ``ClusterHosts.up`` raises."""
    folder = Path(tempfile.mkdtemp(prefix="erl-chaos-", dir="/var/tmp"))  # hosts have a /tmp of their own
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        cfg = config.parse({**settings, "run_dir": str(folder / "runs"), "cluster": CLUSTER,
                            "job": f"light-{secrets.token_hex(3)}"})
        cluster = Cluster(cfg, say=say)
        made = ClusterHosts(cluster, say, outlive=False)
        stack.callback(_end, made)
        made.up(hosts, control_hosts=hosts)
        info = _connected(cluster, hosts)
        etcd = stack.enter_context(cluster.etcd(info, retry_budget_s=1.0))
        keys = ClusterKeys(CLUSTER)
        leaders = wait_until(lambda: _candidates(etcd, keys, hosts), timeout_s=_READY_S, poll_s=_POLL_S,
                             what="a coordinator on each host")
        etcd.put(Keys(cfg.job).pool_spec(POOL), PoolSpec(name=POOL, desired=cfg.rollout.engines).encode())
        made.submit(env=driver_writes.environment(folder))
        context = HostsContext(made, etcd, keys, cfg.job, hosts,
                               undo=UndoRegistry(cluster.paths.folder / "faults"),
                               works=lambda generation: driver_writes.works(etcd, cfg.job, generation))
        found = HostsCluster(
            made, cluster, info, etcd, context,
            Target({leader.replica: leader.url for leader in leaders}, cfg.job,
                   {"Authorization": f"Bearer {info.token('operator')}"}, tls.trust(info.ca_file),
                   {host.name: host.address for host in made.all()}))
        found.await_whole()
        yield found


def _connected(cluster: Cluster, hosts: int) -> ClusterInfo:
    """How to connect, once the agents know all members of etcd."""
    def known() -> ClusterInfo | None:
        info = cluster.connect()
        return info if len(info.etcd_endpoints) == hosts else None

    return wait_until(known, timeout_s=_READY_S, poll_s=_POLL_S, what="the members of etcd")


def _candidates(etcd: EtcdClient, keys: ClusterKeys, hosts: int) -> list[Leader]:
    found = [leader for leader, _ in readable(etcd.range(keys.leader_prefix())[0], Leader)]
    return found if len(found) == hosts else []


def _end(hosts: ClusterHosts) -> None:
    if hosts.record is not None:
        for host in hosts.all():
            hosts.power_off(host.name)
        hosts.down()


def play(schedule: Schedule, file: Path, say: Callable[[str], None], *, hosts: int = HOSTS) -> None:
    """Plays a schedule of faults of ``HOST_FAULTS`` on a cluster of its own under the traffic of clients, heals
    everything, reads through every coordinator, takes the cluster down, and writes the event log. Raises what
    ``cluster_of_hosts`` raises. An ElasticRLError of clients, faults or recovery is in the log, which ends then; any
    other error is raised, and leaves a log without an end."""
    log = EventLog(file)
    with contextlib.closing(log):
        log.write(Kind.RUN, form=FORM, scenario=SCENARIO, seed=schedule.seed, schedule=asdict(schedule),
                  target=f"{hosts} test hosts", settings=SETTINGS, versions={"elastic-rl": version("elastic-rl")},
                  commit="", baseline=not schedule.strikes)
        aborted, alerts = "", list[Alert]()
        with cluster_of_hosts(say, hosts=hosts) as cluster:
            clients = ClusterClients(cluster.target, schedule.seed)
            try:
                with clients.working():
                    for strike in schedule.strikes:
                        _await_step(clients, strike.step)
                        _strike(cluster, clients, strike, log, say)
                    _await_step(clients, schedule.steps)
            except ElasticRLError as e:
                aborted = e.message
            try:
                restore(cluster.hosts)
                for problem in clients.last_reads():
                    say(problem)
                    aborted = aborted or problem
                cluster.await_whole()
            except ElasticRLError as e:
                aborted = aborted or e.message
            alerts = _alerts(cluster)
            _observed(cluster, clients, log)
            tag = tag_of(cluster.cluster.paths.folder)
            try:
                cluster.hosts.down()
            except ElasticRLError as e:
                aborted = aborted or e.message
            for what in _left(tag):
                log.write(Kind.LEFTOVER, what=what)
        log.write(Kind.END, phase="", report={}, alerts=[json.loads(alert.encode()) for alert in alerts],
                  aborted=aborted)


def _await_step(clients: ClusterClients, step: int) -> None:
    clients.more(max(0, step * ANSWERS_A_STEP - clients.answered()))


def _strike(cluster: HostsCluster, clients: ClusterClients, strike: Strike, log: EventLog, say: Callable[[str], None]
            ) -> None:
    faults = [HOST_FAULTS[name].make(cluster.context) for name in strike.faults]
    with ThreadPoolExecutor(len(faults), thread_name_prefix="fault") as threads:
        for fields in threads.map(lambda fault: _played(fault, clients), faults):
            log.write(Kind.FAULT, **fields)
            say(f"{fields['name']}: {fields['problem'] or fields['witness']}")


def _played(fault: HostFault, clients: ClusterClients) -> dict[str, Any]:
    """The record of a fault that was played."""
    fields: dict[str, Any] = {
        "name": fault.name, "step": clients.answered() // ANSWERS_A_STEP, "target": "", "state": "", "witness": "",
        "injected_at": time.time(), "detected_at": None, "healed_at": None, "said": "", "problem": ""}
    try:
        target, witness = fault.inject()
        fields |= {"target": target, "witness": witness, "state": fault.victim.value, "injected_at": time.time()}
        wait_until(fault.detected, timeout_s=_DETECT_S, poll_s=_POLL_S, what=f"detection of {fault.name}")
        fields["detected_at"] = time.time()
        wait_until(fault.healed, timeout_s=_HEAL_S, poll_s=_POLL_S, what=f"recovery from {fault.name}")
        fields["healed_at"] = time.time()
    except (ElasticRLError, psutil.Error) as e:
        fields["problem"] = str(e)
        with contextlib.suppress(ElasticRLError):
            fault.healed()  # which ends it
    return fields | {"said": fault.said}


def _alerts(cluster: HostsCluster) -> list[Alert]:
    with contextlib.suppress(EtcdUnavailable):
        return [Alert.decode(kv.value) for kv in cluster.etcd.range(Keys(cluster.job).alerts_prefix())[0]]
    return []


def _observed(cluster: HostsCluster, clients: ClusterClients, log: EventLog) -> None:
    """Writes what the clients were told, what the observer saw, and the product's own events."""
    for operation in clients.recorder.operations():
        log.write(Kind.OPERATION, **asdict(operation))
    keys = Keys(cluster.job)
    last = f"{keys.root}zz-end"
    cluster.etcd.put(last, b"end")
    files = cluster.cluster.here.etcd
    for change in observe(cluster.etcd.endpoint, "/", 1, last,
                          tls=(files.tls_ca, files.tls_cert, files.tls_key)):
        log.write(Kind.CHANGE, **asdict(change))
    for event in events.recent(cluster.etcd, keys, limit=_EVENTS):
        log.write(Kind.EVENT, at=event.at, id=event.id, name=event.kind, subject=event.subject,
                  severity=event.severity.value, message=event.message)


def _left(tag: str) -> list[str]:
    """What is there of hosts that were taken down."""
    found = [f"the interface {name}" for name in interfaces() if is_of_tag(name, tag)]
    return found + [f"process {process.pid} of host {mark}" for process, mark in processes.with_variable(MARK)
                    if mark.partition("/")[0] == tag]
