"""A cluster whose hosts are all on this machine: the first ones have etcd and the coordinators, the others join them.

``up`` is level-triggered: it makes what is missing, powers on what is off, heals what is cut. ``down`` takes the hosts
down in order, then ends whatever is left. What they make is found again by its marks (``isolated_hosts``); stored is
only how many hosts there are, and their network, so that they keep their addresses.

The first host has the folder of the cluster, so commands that are run beside the hosts find the cluster there, as one
that was started without hosts. The other hosts have a folder below it, and see nothing else of it.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.errors import ConfigError, DeadlineExceeded, ElasticRLError, EtcdUnavailable
from elastic_rl.etcd.record import Record
from elastic_rl.host import file_lock, kept_state, processes
from elastic_rl.host.agent.host_facts import stored_incarnation
from elastic_rl.host.join_file import JoinFile
from elastic_rl.host.local_cluster import Cluster
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.host.test_hosts.impaired_link import Impairment
from elastic_rl.host.test_hosts.inside import Answer, Request
from elastic_rl.host.test_hosts.isolated_hosts import PRIVATE, IsolatedHosts, require
from elastic_rl.host.test_hosts.naming import Subnet, choose_subnet, host_names, tag_of
from elastic_rl.net.addresses import interface_of
from elastic_rl.runtime.files import preflight_writes, private_folder, replace_file
from elastic_rl.runtime.process import start_child
from elastic_rl.runtime.waiting import wait_until

_LOCK_S = 180.0
"""Longest wait for another command that changes the hosts, which itself waits for services."""
_COMMAND_S = 600.0
"""Longest wait for a command on a host; each of its own waits has a limit that is shorter."""
_READY_S = 120.0
"""Longest wait for the hosts to be known to the cluster: an agent starts, registers, and the leader decides."""
_MODULE = "elastic_rl.host.test_hosts.inside"
_AWAY = ("joining", "suspected", "lost")
"""Phases of a host that is not there yet."""


class HostsRecord(Record):
    """The test hosts of a cluster."""

    count: int
    subnet: str
    control_hosts: int = 1
    """So many of them, from the first one on, have a member of etcd and a coordinator."""


@dataclass(frozen=True)
class HostHere:
    """How a test host is now."""

    name: str
    address: str
    state: str
    """on, off, or cut: on, without its network."""
    pid: int
    """Its init, as this machine numbers processes; 0 while it is off."""
    run_dir: Path


class ClusterHosts:
    """The test hosts of a cluster with a name."""

    def __init__(self, cluster: Cluster, say: Callable[[str], None], *, outlive: bool = True) -> None:
        """``cluster``: with the settings that ``up`` starts it with, and the job that ``submit`` submits; the other
        methods need its location alone. ``outlive``: whether hosts that are powered on outlive this process."""
        self._cluster, self._paths, self._say, self._outlive = cluster, cluster.paths, say, outlive

    # -- what there is ------------------------------------------------------------------------------------------------
    @property
    def record(self) -> HostsRecord | None:
        """None for a cluster without test hosts. Raises ConfigError for a damaged record."""
        path = self._paths.test_hosts_record
        try:
            found = HostsRecord.decode(path.read_bytes())
            Subnet.parse(found.subnet)
            return found
        except FileNotFoundError:
            return None
        except (ValidationError, ValueError) as e:
            raise ConfigError(f"{path} is damaged, the record of the hosts on this machine", hint=(
                f"delete it; `elastic-rl down {self._options}` then ends what is left, and `up --hosts` makes them "
                "again, in another network")) from e

    @property
    def are_beside(self) -> bool:
        """Whether ``up`` has made hosts for the cluster, and this process is on none of them."""
        if not self._cluster.named or not self._were_made:
            return False
        try:
            record = self.record
        except ConfigError:
            return True
        return record is None or not interface_of(self._isolated(record).address(host_names(1)[0]))

    @property
    def isolated(self) -> IsolatedHosts:
        """Their namespaces and network. Raises ConfigError where there are none."""
        if (record := self.record) is None:
            raise ConfigError(f"cluster {self._cluster.cfg.cluster} has no hosts on this machine",
                              hint=f"`elastic-rl up {self._options} --hosts=N` makes them")
        return self._isolated(record)

    def all(self) -> list[HostHere]:
        """Raises ConfigError where there are none."""
        isolated, found = self.isolated, []
        for name in isolated.names:
            init = isolated.init(name)
            state = "off" if init is None else "cut" if isolated.is_cut(name) else "on"
            found.append(HostHere(name, isolated.address(name), state, init.pid if init else 0, self._run_dir(name)))
        return found

    def inside(self, name: str, *command: str, cwd: Path | None = None) -> list[str]:
        """The command line that runs a command on a host. ``cwd``: its working folder. Raises ConfigError for a host
        that there is not, and PreflightFailed for one that is off."""
        isolated = self._with(name)
        entered = isolated.inside(name)
        return [*entered, "sh", "-c", 'cd "$0" && exec "$@"', str(cwd), *command] if cwd else [*entered, *command]

    # -- up and down --------------------------------------------------------------------------------------------------
    def up(self, count: int = 0, *, control_hosts: int = 0) -> ClusterInfo:
        """Brings up so many hosts; 0: as many as there were. ``control_hosts``: so many of them, from the first one on,
        have a member of etcd and a coordinator; 0: as before, and at first one. Returns once the cluster has them all.

        Raises ConfigError (no name, another number than is on, a cluster without test hosts), PreflightFailed where
        this machine cannot have them, DeadlineExceeded, and what ``Cluster.up`` and ``Cluster.join`` raise, as of the
        host. After an error the next call goes on where this one ended."""
        if not self._cluster.named:
            raise ConfigError("hosts on this machine are of a cluster with a name", hint="give --cluster=NAME, too")
        self._require_visible()
        if self._cluster.known and not self._were_made:
            raise ConfigError(f"cluster {self._cluster.cfg.cluster} was started without --hosts",
                              hint="name another --cluster for hosts on this machine")
        require()
        self._agreed(count, control_hosts)  # what raises leaves nothing
        self._make_folder()
        with self._locked():
            record = self._agreed(count, control_hosts)
            replace_file(self._paths.test_hosts_record, record.encode(), private=True, durable=True)
            isolated = self._isolated(record)
            isolated.bridge.make()
            return self._bring(isolated, isolated.names)

    def _agreed(self, count: int, control_hosts: int) -> HostsRecord:
        """The record of so many hosts, which is to be stored before any is made. Raises ConfigError, and
        PreflightFailed where no network is free."""
        found = self.record
        if found is None and not count:
            raise ConfigError("it is not known how many hosts there were", hint="say how many: --hosts=N")
        if found is None:
            names = host_names(count)
            made = IsolatedHosts.new(self._tag, names, self._paths.test_hosts)
            return _checked(HostsRecord(count=len(names), subnet=str(made.bridge.subnet.network),
                                        control_hosts=control_hosts or 1))
        if count and count != found.count:
            more = self._isolated(found).names[len(host_names(count)):]
            if on := [name for name in more if self._isolated(found).init(name) is not None]:
                raise ConfigError(f"{', '.join(on)} of cluster {self._cluster.cfg.cluster} are on, and {count} hosts "
                                  "would be without them", hint="drain them, then `elastic-rl test-hosts power-off` "
                                  f"each; or `elastic-rl down {self._options}` first")
            found = found.replace(count=count)
        return _checked(found.replace(control_hosts=max(control_hosts, found.control_hosts)))

    def _bring(self, isolated: IsolatedHosts, names: Sequence[str]) -> ClusterInfo:
        """Powers hosts on and makes them hosts of the cluster."""
        first, record = isolated.names[0], self.record
        control = isolated.names[1:record.control_hosts] if record is not None else []
        for name in names:
            own = None if name == first else self._run_dir(name)
            if isolated.power_on(name, own=own, hidden=self._cluster.cfg.run_dir if own else None):
                self._say(f"powered on {name} at {isolated.address(name)}")
        requests = dict[str, Request]()
        if first in names:
            requests[first] = Request(action="up", settings=self._cluster.cfg.model_dump(mode="json"), name=first,
                                      address=isolated.address(first))
            if not (control and self._paths.join_file.exists()):  # else etcd may have no majority without the others
                self._run_on(isolated, requests)
                requests.clear()
        file = JoinFile.read(self._paths.join_file)
        self._run_on(isolated, requests | {name: Request(
            action="join", settings={"run_dir": str(self._run_dir(name))}, name=name, address=isolated.address(name),
            join_file=file, control=name in control) for name in names if name != first})
        info = self._cluster.connect()
        self._await_known(info, names)
        return info

    def _await_known(self, info: ClusterInfo, names: Iterable[str]) -> None:
        """Returns once the leader has taken in what runs on the hosts now."""
        api = AdminClient(info, retry_budget_s=1.0)
        files = {name: ClusterPaths.of(self._config(name)).incarnation for name in names}
        missing = list(files)

        def known() -> bool:
            nonlocal missing
            with contextlib.suppress(EtcdUnavailable, RequestRefused):
                found = {host["id"]: host for host in api.hosts()}
                missing = [name for name, path in files.items() if not (
                    (host := found.get(name)) and host["registered"] and host["phase"] not in _AWAY
                    and host["incarnation"] == stored_incarnation(path))]
            return not missing

        try:
            wait_until(known, timeout_s=_READY_S, poll_s=0.2, what="the hosts")
        except DeadlineExceeded as e:
            raise DeadlineExceeded(f"the cluster does not know {', '.join(missing)} after {_READY_S:g} s",
                                   hint=f"`elastic-rl hosts {self._options}` says how they are") from e

    def down(self) -> list[str]:
        """Takes the hosts down in order, ends what is left of them, and removes their network. The cluster keeps its
        state, and the hosts their folders and addresses. Returns the names of the hosts that were on. Raises
        DeadlineExceeded for processes that do not end, PreflightFailed, and, once all else is done, the first error of
        ``Cluster.down``, as of the host."""
        if not self._paths.test_hosts.is_dir():
            return []
        with self._locked():
            try:
                record = self.record
            except ConfigError as e:  # what runs is to be ended all the same
                self._say(f"warning: {e.message}")
                record = None
            isolated = self._isolated(record)
            on = [name for name in isolated.names if isolated.init(name) is not None]
            control = isolated.names[:record.control_hosts if record is not None else 1]
            # The first one stops the runs, for which it needs a majority of the members of etcd.
            for each in (set(on) - {*control}, {*control[:1]}, {*control[1:]}):
                try:
                    self._run_on(isolated, {name: self._down_of(name) for name in on if name in each})
                except ElasticRLError as e:
                    self._say(f"warning: {e.message}; it is powered off")
            ended = isolated.remove()
            failed: ElasticRLError | None = None
            for name in reversed(isolated.names):  # for a host that was off, or has not answered
                try:
                    Cluster(self._config(name), say=self._say).down()
                except ElasticRLError as e:
                    self._say(f"warning: {name}: {e.message}")
                    failed = failed or type(e)(f"{name}: {e.message}", hint=e.hint)
            if failed is not None:
                raise failed
            return ended

    def _down_of(self, name: str) -> Request:
        cfg = self._config(name)
        return Request(action="down", settings={"run_dir": str(cfg.run_dir), "cluster": cfg.cluster})

    def submit(self, *, faults: bool = False, from_job: str = "", env: Mapping[str, str] = {}) -> None:
        """Submits the run of the cluster's job on the first host, with this process's environment and working folder.
        ``env``: more variables of its environment.
        Raises as ``Cluster.admit`` and ``Cluster.submit``, and PreflightFailed for a host that is off."""
        isolated = self.isolated
        self._run_on(isolated, {isolated.names[0]: Request(
            action="submit", settings=self._cluster.cfg.model_dump(mode="json"), folder=str(Path.cwd()), faults=faults,
            from_job=from_job)}, env)

    # -- faults -------------------------------------------------------------------------------------------------------
    def power_off(self, name: str) -> bool:
        """Ends everything on a host at once, as a power cut does; returns whether it was on. Raises ConfigError for a
        host that there is not, and DeadlineExceeded."""
        self._with(name)
        with self._locked():
            return self._with(name).power_off(name)

    def power_on(self, name: str) -> None:
        """Brings up a host that is off; heals one that is on. Raises as ``up``."""
        self._with(name)
        with self._locked():
            isolated = self._with(name)
            isolated.bridge.make()
            self._bring(isolated, [name])

    def cut(self, name: str) -> None:
        """Takes a host off the network: everything on it runs on. Raises ConfigError for a host that there is not, and
        PreflightFailed for one that is off."""
        self._with(name).cut(name)

    def block(self, sender: str, receiver: str) -> None:
        """Has what a host sends to another one get lost; what the other one sends arrives. Raises as ``cut``."""
        self._with(sender)
        self._with(receiver).block(sender, receiver)

    def impair(self, name: str, impairment: Impairment) -> None:
        """Has a host's link be slow, late or lossy, in place of an impairment before. Raises as ``cut``."""
        self._with(name).impair(name, impairment)

    def heal(self, name: str) -> None:
        """Takes back ``cut`` and ``impair`` of a host, and ``block`` to it and from it. Raises as ``cut``."""
        self._with(name).heal(name)

    # -- parts --------------------------------------------------------------------------------------------------------
    @property
    def _were_made(self) -> bool:
        """Whether ``up`` has made hosts: it stores their record first. Where that is lost, the log of the first one is
        left."""
        return any(path.exists() for path in (self._paths.test_hosts_record,
                                              self._paths.test_host_log(host_names(1)[0])))

    @property
    def _tag(self) -> str:
        return tag_of(self._paths.folder)

    @property
    def _options(self) -> str:
        return kept_state.cluster_options(self._cluster.cfg)

    def _isolated(self, record: HostsRecord | None) -> IsolatedHosts:
        """``record``: None where it is lost, for what is known of the hosts without it."""
        if record is None:
            return IsolatedHosts(self._tag, choose_subnet(self._tag, ()), host_names(1), self._paths.test_hosts)
        return IsolatedHosts(self._tag, Subnet.parse(record.subnet), host_names(record.count), self._paths.test_hosts,
                             outlive=self._outlive)

    def _with(self, name: str) -> IsolatedHosts:
        """The hosts, one of which is to have this name. Raises ConfigError."""
        isolated = self.isolated
        if name not in isolated.names:
            raise ConfigError(f"there is no host {name} on this machine", hint=f"there are {', '.join(isolated.names)}")
        return isolated

    def _config(self, name: str) -> Config:
        """Where a host has the cluster."""
        return config.parse({"run_dir": str(self._run_dir(name)), "cluster": self._cluster.cfg.cluster})

    def _run_dir(self, name: str) -> Path:
        return self._cluster.cfg.run_dir if name == host_names(1)[0] else self._paths.test_host(name)

    def _require_visible(self) -> None:
        """Raises ConfigError for a folder that a host has another one in the place of."""
        run_dir = self._cluster.cfg.run_dir
        if below := next((folder for folder in PRIVATE if run_dir.is_relative_to(folder)), None):
            raise ConfigError(f"run_dir is {run_dir}, and each host on this machine has a {below} of its own",
                              hint=f"set a --run_dir that is not below {below}, such as one below /var/tmp")

    def _make_folder(self) -> None:
        """Raises PreflightFailed where it cannot be made."""
        folder = self._paths.test_hosts
        with preflight_writes(folder):
            self._paths.folder.parent.mkdir(parents=True, exist_ok=True)
            for each in (self._paths.folder, folder):
                private_folder(each, hint="set another --run_dir")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Holds the lock of the hosts, whose folder is there. Raises DeadlineExceeded."""
        with self._paths.test_hosts_lock.open("a", encoding="utf-8") as lock:
            if not file_lock.taken(lock, timeout_s=_LOCK_S):
                raise DeadlineExceeded(f"another command changes the hosts of {self._cluster.cfg.cluster}",
                                       hint="wait for it to end, then try again")
            yield

    def _run_on(self, isolated: IsolatedHosts, requests: Mapping[str, Request], env: Mapping[str, str] = {}) -> None:
        """Has each host do something, all at once. Raises the first of their errors, once all have ended, and
        DeadlineExceeded."""
        inside = {name: isolated.inside(name) for name in requests}
        children = {name: start_child([*entered, *processes.python(_MODULE)], stdin=subprocess.PIPE,
                                      stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**_environment(), **env},
                                      cwd="/")
                    for name, entered in inside.items()}
        with ThreadPoolExecutor(max_workers=max(1, len(children))) as pool:
            try:
                answers = [*pool.map(lambda name: self._ask(name, children[name], requests[name]), requests)]
            except BaseException:
                for child in children.values():  # else the threads would wait for them
                    child.kill()
                raise
        for name, answer in zip(requests, answers, strict=True):
            answer.require(name)

    def _ask(self, name: str, child: subprocess.Popen[bytes], request: Request) -> Answer:
        with child:
            try:
                answered, said = child.communicate(request.encode(), timeout=_COMMAND_S)
            except subprocess.TimeoutExpired:
                child.kill()
                return Answer(error=DeadlineExceeded.__name__,
                              message=f"{request.action} has not ended in {_COMMAND_S:g} s")
        lines = said.decode(errors="replace").splitlines()
        try:
            answer = Answer.decode(answered)
        except ValidationError:
            return Answer(error=ElasticRLError.__name__, message=f"{request.action} ended with exit code "
                          f"{child.returncode}: {lines[-1] if lines else 'it has said nothing'}")
        for line in lines:
            self._say(f"{name}: {line}")
        return answer


def _checked(record: HostsRecord) -> HostsRecord:
    """Raises ConfigError for hosts that there cannot be."""
    if not 1 <= record.control_hosts <= record.count:
        raise ConfigError(f"{record.control_hosts} of {record.count} hosts cannot have etcd and a coordinator",
                          hint=f"give 1 to {record.count}")
    return record


def _environment() -> dict[str, str]:
    """The environment for a process on a host: that of this one, but for the place of temporary files, which each host
    has for itself."""
    return {name: value for name, value in os.environ.items() if name != "TMPDIR"}
