"""The durable plane on one machine: etcd, coordinator replicas and one DCS node, started and stopped as services.

``up`` is level-triggered: it starts what does not run, so calling it twice is harmless and calling it after a crash
repairs the cluster. ``down`` ends whatever of the job still runs, also after a crash, and keeps its state, with which
the next ``up`` continues. ``revive`` starts one service again that has ended by itself; the host agent calls it. All
three hold the cluster's lock, so that none interferes with another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path

import httpx
import psutil

from elastic_rl.config import Config
from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.api.auth import Role
from elastic_rl.coordinator.api.listening import advertised
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.dcs.storage.arena import PREFIX, SHM, Leftovers
from elastic_rl.errors import ConfigError, DeadlineExceeded, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd import job_settings
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.host import (
    cluster_secrets,
    cluster_settings,
    etcd_server,
    file_lock,
    kept_state,
    leftovers,
    processes,
)
from elastic_rl.host.address import own_address
from elastic_rl.host.job_run import JobRun, Submission
from elastic_rl.host.job_secrets import engine_key_file, remove_secret_files
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.service_files import ServiceFiles, ServiceRecord
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port, require_address, require_port_free
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import preflight_writes, private_folder, require_own_folder
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until
from elastic_rl.telemetry.log_files import tail

log = logging.getLogger(__name__)

OWNER_ENV = "ELASTIC_RL_CLUSTER"
"""Environment variable with the cluster's folder, in every service of a cluster; ``down`` finds services without a
record by it. The compute plane has ``processes.RUN_MARK`` instead: each new run kills what has that, and must not kill
the durable plane."""
_ETCD_BUDGET_S = 2.0
"""Seconds in which an etcd that someone else runs must answer."""
_START_TIMEOUT_S = 120.0
"""Longest wait for a service to answer: its imports alone take 30 s on an overloaded machine. The end of a service ends
the wait."""
_LOCK_TIMEOUT_S = 180.0
"""Longest wait of ``up`` for another command that starts or stops the cluster, which itself waits for services."""
_DOWN_LOCK_TIMEOUT_S = 15.0
"""Longest wait of ``down`` for such a command. It then goes on without the lock, to end an ``up`` that hangs."""
_STOP_RUN_S = 60.0
"""Longest wait for a run to end: it takes its processes down, one after the other, and writes its report."""
SAVE_GRACE_S = 90.0
"""Longest wait for a DCS node to end, which first saves what is in memory only."""
_EXIT_GRACE_S = 5.0
"""Longest wait for children of a killed service to end. The kernel kills them, so it takes milliseconds."""
AGENTS = ("agent-0", "agent-1")
"""Names of the two processes of the host agent: either may be the active one or the standby."""
_NO_RECORD_HINT = "`elastic-rl down` stops what runs without a record; then `elastic-rl up` again"


class Cluster:
    """The cluster of one job. Paths in ``cfg`` are made absolute, since services outlive this process."""

    def __init__(self, cfg: Config, *, say: Callable[[str], None] = log.info) -> None:
        self.cfg = cfg.model_copy(update={"run_dir": cfg.run_dir.expanduser().resolve()})
        self.paths, self._job = ClusterPaths.of(self.cfg), JobPaths.of(self.cfg)
        self.dir = self.paths.folder
        self.services, self.agents = ServiceFiles(self.paths.services), ServiceFiles(self.paths.agents)
        self.run = JobRun(self.cfg, self.services)
        self._say = say
        self._new_data: Path | None = None
        """Folder of an etcd that this start has begun."""

    # -- up -----------------------------------------------------------------------------------------------------
    def up(self, *, resubmit: bool = True) -> ClusterInfo:
        """Starts what does not run and returns when every service answers. ``resubmit``: whether the job's record gets
        these settings where it has others.

        Raises ConfigError (another etcd than the running cluster's), PreflightFailed (port taken, shared memory too
        small, no etcd program, no space or no locks in run_dir), EtcdUnavailable (a configured etcd does not answer) or
        DeadlineExceeded (also while another command starts or stops the cluster). After any error it stops what it
        started, and the stored settings are those of before.
        """
        self._make_folder()
        with (preflight_writes(self.dir), self._locked(_LOCK_TIMEOUT_S),
              cluster_settings.unchanged_on_error(self.paths.settings)):
            known, before = {r.name for r in self.services.all()}, {r.name for r in self.services.running()}
            supervised = bool(self.agents.running())
            try:
                return self._up(set(before), resubmit)
            except BaseException:
                if not supervised and not self.paths.info.exists():
                    self._stop_agents()
                for record in self.services.all():
                    if record.name not in before:
                        self._stop([record], forget=record.name not in known)
                if not before:
                    self._unlink_segments()
                if self._new_data is not None:  # nobody was told of it
                    shutil.rmtree(self._new_data, ignore_errors=True)
                raise

    def _up(self, running: set[str], resubmit: bool) -> ClusterInfo:
        self._require_same_etcd()
        kept_state.require_same_disk(self.cfg)
        self._require_records()
        self._check_machine(running)
        self._secrets(running)
        cluster_settings.save(self.cfg, self.paths.settings)
        if not self.agents.running():  # first: it ends what this process leaves when it is killed
            self._say("starting the host agent")
            self._start_agent(AGENTS[0])
        endpoints = self._etcd(running)
        coordinators = self._start_coordinators(running, endpoints)
        node_pid = self._start_dcs_node(running, endpoints)
        self._await_coordinators(coordinators)
        if node_pid is not None:
            self._await_dcs_node(endpoints, node_pid)
        self.put_job_record(endpoints, resubmit=resubmit, reseal=not running)  # when nothing can be refused any more
        self._await_job(coordinators)
        ca = self.cfg.coordinator.tls_ca
        info = ClusterInfo(self.cfg.job, endpoints, list(coordinators.values()), str(self.paths.credentials),
                           str(Path(ca).resolve()) if ca else "", not self.cfg.etcd.endpoints)
        info.save(self.paths.info)
        if self.abandoned:
            self.run.withdraw()  # it was to end with its owner
        self._disown()
        for path in (self.paths.stopped, self.paths.unsaved):
            path.unlink(missing_ok=True)
        self._new_data = None
        return info

    def restore_settings(self, before: bytes | None) -> None:
        """Puts back the settings that were stored before this command started the cluster (a
        ``cluster_settings.snapshot``), unless another command has stored its own since."""
        with self._locked(_LOCK_TIMEOUT_S):
            if cluster_settings.snapshot(self.paths.settings) == cluster_settings.document(self.cfg):
                cluster_settings.restore(self.paths.settings, before)

    def _make_folder(self) -> None:
        """The cluster's folder, for its owner only: it holds secrets, and logs may. Where the user's umask lets a group
        write, those around it are still the owner's: its members could put another folder in the place of this one.
        Raises ConfigError where it cannot be made, and PreflightFailed where its file system has no locks."""
        try:
            self.cfg.run_dir.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.cfg.run_dir, self._job.folder):
                folder.mkdir(mode=0o755, exist_ok=True)
            private_folder(self.dir, hint=cluster_settings.OTHER_RUN_DIR)
        except OSError as e:
            raise ConfigError(f"cannot create {self.dir}: {e.strerror}", hint="set another --run_dir") from e
        with preflight_writes(self.dir):
            file_lock.require_exclusive(self.paths.services_lock)

    def _require_own_folder(self) -> None:
        """Raises PreflightFailed for a cluster's folder that another user may have put there: its records say which
        processes to end, and its addresses where tokens are sent."""
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            require_own_folder(self.dir, hint=cluster_settings.OTHER_RUN_DIR)

    @property
    def up_before(self) -> bool:
        """Whether the cluster was started and not taken down; after a crash nothing of it may run."""
        return self.paths.info.exists() or bool(self.services.running())

    @property
    def known(self) -> bool:
        """Whether the cluster was started once and its state not purged: its settings hold."""
        return self.up_before or self.paths.stopped.exists()

    def _require_same_etcd(self) -> None:
        """Raises ConfigError when the services, or what is kept, belong to another etcd than the configured one."""
        if not cluster_settings.stored(self.paths.settings):
            return
        old, new = cluster_settings.external_endpoints(self.paths.settings), list(self.cfg.etcd.endpoints)
        if sorted(old) == sorted(new):
            return
        change = f"etcd.endpoints is {new or 'empty'}, and this cluster uses {old or 'an etcd of its own'}"
        if self.up_before:
            raise ConfigError(change, hint=f"`elastic-rl down {kept_state.options(self.cfg)}` first")
        if kept := kept_state.folders(self.cfg):
            paths = ", ".join(str(folder.path) for folder in kept)
            raise ConfigError(f"{change}; the job's state in {paths} belongs to that one",
                              hint=f"give --etcd.endpoints=[{','.join(old)}], or delete what the job has with "
                                   f"`elastic-rl down --purge {kept_state.options(self.cfg)}`")

    def _require_records(self) -> None:
        """Raises PreflightFailed when services of this cluster run elsewhere, or have no record, so that nothing is
        started beside them, and no data deleted that they use."""
        self._require_here()

        def strays() -> list[int]:
            known = [r.pid for files in (self.services, self.agents) for r in files.running()]
            return processes.marked_outside(known, str(self.dir), OWNER_ENV)
        try:
            wait_until(lambda: not strays(), timeout_s=_EXIT_GRACE_S, what="the end of killed services")
        except DeadlineExceeded as e:
            raise PreflightFailed(f"processes {', '.join(map(str, strays()))} of this cluster run without a record in "
                                  f"{self.services.folder}", hint=_NO_RECORD_HINT) from e

    def _require_here(self) -> None:
        """Raises PreflightFailed when services of this cluster run where this process cannot see them."""
        def elsewhere() -> list[str]:
            return [r.name for files in (self.services, self.agents) for r in files.running() if r.elsewhere]
        try:  # one that starts or ends now is between two states for a moment
            wait_until(lambda: not elsewhere(), timeout_s=_EXIT_GRACE_S, what="the services here")
        except DeadlineExceeded as e:
            raise PreflightFailed(f"{', '.join(elsewhere())} of the cluster in {self.dir} run on another machine or in "
                                  "another container", hint="run the command there") from e

    def _check_machine(self, running: set[str]) -> None:
        require_address(self.cfg.coordinator.host, setting="coordinator.host")
        require_address(self.cfg.dcs.host, setting="dcs.host")
        ports = self.cfg.coordinator.ports
        for i, port in enumerate(ports):
            if f"coordinator-{i}" not in running:
                require_port_free(self.cfg.coordinator.host, port, setting=f"coordinator.ports[{i}]")
        if f"dcs-{kept_state.NODE}" in running:
            return
        if self.cfg.dcs.port:
            require_port_free(self.cfg.dcs.host, self.cfg.dcs.port, setting="dcs.port")
        Leftovers().close()  # frees the arenas of killed nodes, also while others map them
        free = shutil.disk_usage(SHM).free
        if free < self.cfg.dcs.arena_bytes:
            raise PreflightFailed(
                f"{SHM} has {free >> 20} MiB free, and the arena needs {self.cfg.dcs.arena_bytes >> 20} MiB "
                f"(dcs.arena_bytes)", hint="set a smaller --dcs.arena_bytes, or a larger /dev/shm: "
                f"`mount -o remount,size=…  {SHM}`, or `docker run --shm-size=…`")

    def _etcd(self, running: set[str]) -> list[str]:
        """Endpoints of the cluster's etcd, which is started unless it runs."""
        if self.cfg.etcd.endpoints:
            endpoints = list(self.cfg.etcd.endpoints)
            with EtcdClient.from_config(self.cfg.etcd, endpoints, retry_budget_s=_ETCD_BUDGET_S) as etcd:
                etcd.get(Keys(self.cfg.job).epoch())  # raises EtcdUnavailable with a hint
            return endpoints
        old = self._own_endpoint()
        if etcd_server.SERVICE in running:
            try:
                self._await("etcd", etcd_server.SERVICE, partial(etcd_server.healthy, old),
                            self.cfg.etcd.start_timeout_s)
                return [old]
            except DeadlineExceeded:
                if self.services.runs(etcd_server.SERVICE):
                    raise
                running.discard(etcd_server.SERVICE)  # it was just ending: it is started again, as if it had been gone
        binary = etcd_server.find_binary()
        if why := etcd_server.objection(etcd_server.version(binary)):
            self._say(f"warning: {binary}: {why}")
        data = self.paths.etcd
        if etcd_server.data_in_use(data):
            raise PreflightFailed(f"an etcd without a record runs on {data}", hint=_NO_RECORD_HINT)
        if not running and kept_state.can_continue(self.cfg):
            self._say(f"continuing with what job {self.cfg.job} has kept in {self.dir}")
        elif not running:
            self._begin_new_run(data)
        port = int(old.rpartition(":")[2]) if old and running else 0
        if port:  # the services that run connect to this one
            require_port_free(own_address(), port, setting="the port of this cluster's etcd")
        elif running:
            raise PreflightFailed(f"services run, and there is no record of their etcd in {self.services.folder}",
                                  hint="`elastic-rl down`, then `elastic-rl up` again")
        return [self._start_etcd(binary, data, port)]

    def _own_endpoint(self) -> str:
        """Endpoint of the etcd that ``up`` started, running or not; empty where nothing has recorded it."""
        if (record := self.services.get(etcd_server.SERVICE)) and record.url:
            return record.url
        info = self._info()
        return info.etcd_endpoints[0] if info and info.own_etcd else ""

    def _begin_new_run(self, data: Path) -> None:
        """Sets aside the data of an earlier etcd whose versions are gone, and the step records and the initial model of
        its run: with an empty etcd this is a new run."""
        for path in (data, self._job.steps, self._job.model):
            if aside := kept_state.set_aside(path):
                self._say(f"{path.name} of an earlier run is now {aside}")
        self._new_data = data

    def _start_etcd(self, binary: Path, data: Path, port: int) -> str:
        attempts = 1 if port else 3  # another process may take a port that was free
        for attempt in range(attempts):
            endpoint = self._spawn_etcd(binary, data, port or free_port(own_address()))
            try:
                self._await("etcd", etcd_server.SERVICE, partial(etcd_server.healthy, endpoint),
                            self.cfg.etcd.start_timeout_s)
                return endpoint
            except DeadlineExceeded:
                self._stop([r for r in self.services.all() if r.name == etcd_server.SERVICE])
                if attempt == attempts - 1:
                    raise
        raise AssertionError("unreachable")

    def _spawn_etcd(self, binary: Path, data: Path, port: int) -> str:
        host = own_address()
        endpoint = f"{host}:{port}"
        command = etcd_server.command(binary, data, host, port, free_port(host), quota_bytes=self.cfg.etcd.quota_bytes)
        self._spawn(etcd_server.SERVICE, command, url=endpoint, env={"GOGC": "50"})
        return endpoint

    def _start_coordinators(self, running: set[str], endpoints: list[str]) -> dict[str, str]:
        """Starts the replicas that are missing; returns the URL of each replica, by name."""
        urls = {r.name: r.url for r in self.services.running()}
        for i in range(self.cfg.coordinator.replicas):
            if (name := f"coordinator-{i}") not in running:
                urls[name] = self._start_coordinator(i, endpoints)
        return {name: urls[name] for name in (f"coordinator-{i}" for i in range(self.cfg.coordinator.replicas))}

    def _start_coordinator(self, i: int, endpoints: list[str]) -> str:
        """Starts one replica; returns its URL."""
        cfg, name = self.cfg.coordinator, f"coordinator-{i}"
        port = cfg.ports[i] if cfg.ports else self._last_port(name, cfg.host)
        url = advertised(cfg, port, endpoints)
        self._spawn(name, processes.python(
            "elastic_rl.coordinator.service", *self._common(endpoints), "--replica", name, "--port", str(port),
            "--tokens", str(self.paths.tokens)), url=url)
        return url

    def _last_port(self, name: str, host: str) -> int:
        """The port that a service had, whose clients know it; a free one where it had none or another has taken it."""
        record = self.services.get(name)
        url = record.url if record is not None else ""
        port = int(url.rpartition(":")[2] or 0) if url.rpartition(":")[2].isdigit() else 0
        try:
            if port:
                require_port_free(host, port, setting=f"the port of {name}")
                return port
        except PreflightFailed as e:
            self._say(f"warning: {e.message}; {name} gets another one")
        return free_port(host)

    def _await_coordinators(self, urls: dict[str, str]) -> None:
        for name, url in urls.items():
            self._await(name, name, partial(_answers, f"{url}/healthz", self.cfg.coordinator.tls_ca), _START_TIMEOUT_S)

    def _start_dcs_node(self, running: set[str], endpoints: list[str]) -> int | None:
        """Starts the DCS node; returns its pid, or None where it is running."""
        name, dcs = f"dcs-{kept_state.NODE}", self.cfg.dcs
        if name in running:
            return None
        port = dcs.port or self._last_port(name, dcs.host)
        return self._spawn(name, processes.python(
            "elastic_rl.dcs.node.service", *self._common(endpoints), "--id", kept_state.NODE, f"--dcs.port={port}",
            f"--dcs.disk_dir={dcs.disk_dir or self._job.disk}"),
            url=f"{dcs.advertise_host or dcs.host}:{dcs.advertise_port or port}")

    def _common(self, endpoints: list[str]) -> list[str]:
        """Options of every service but etcd."""
        return ["--config", str(self.paths.settings), "--etcd", ",".join(endpoints),
                "--secret", str(self.paths.secret), "--logs", str(self.paths.logs)]

    def _await_dcs_node(self, endpoints: list[str], pid: int) -> None:
        """Returns when the node has registered. A killed predecessor's record stays until its lease ends, so the new
        one is recognised by its pid."""
        etcd = EtcdClient.from_config(self.cfg.etcd, endpoints)
        key = Keys(self.cfg.job).dcs_node(kept_state.NODE)
        try:
            self._await("the DCS node", f"dcs-{kept_state.NODE}",
                        lambda: (kv := etcd.get(key)) and json.loads(kv.value)["pid"] == pid, _START_TIMEOUT_S)
        finally:
            etcd.close()

    def _secrets(self, running: set[str]) -> None:
        """Creates the cluster's secret, unless it is there, and the files with tokens that are derived from it. Raises
        ConfigError for a damaged secret, and for damaged credentials. A cluster whose services are ``running`` must not
        get a second secret: they would refuse what is started with it, so without their secret this raises
        PreflightFailed."""
        if running and not self.paths.secret.exists():
            raise PreflightFailed(f"{self.paths.secret} is gone, the secret that the cluster's services run with",
                                  hint="`elastic-rl down`, then `elastic-rl up`")
        cluster_secrets.write_secrets(self.paths, self._say)
        engine_key_file(self.cfg)

    def put_job_record(self, endpoints: list[str], *, resubmit: bool = True, reseal: bool = False) -> None:
        """Writes the record of the job, with which the coordinators take it up. ``resubmit``: also where there is one
        with other settings; ``reseal``: also where these were sealed with another secret than the cluster has now.
        Raises PreflightFailed where they were and coordinators run, ConfigError and EtcdUnavailable."""
        keys = ClusterKeys(self.cfg.job)
        with EtcdClient.from_config(self.cfg.etcd, endpoints) as etcd:
            try:
                job_settings.submit(etcd, keys, self.cfg, ClusterSecret.read(self.paths.secret), resubmit=resubmit,
                                    reseal=reseal)
            except job_settings.OtherSecret as e:
                raise PreflightFailed(f"{self.paths.secret} is not the secret that the cluster's services run with",
                                      hint="put that one back, or `elastic-rl down`, then `elastic-rl up`") from e

    def _await_job(self, urls: dict[str, str]) -> None:
        """Returns when each coordinator has taken up the job."""
        token = read_token(self.paths.credentials, Role.VIEWER)
        for name, url in urls.items():
            self._await(f"job {self.cfg.job} on {name}", name, partial(
                _answers, url + job_path(self.cfg.job), self.cfg.coordinator.tls_ca, token), _START_TIMEOUT_S)

    def _spawn(self, name: str, cmd: list[str], *, url: str = "", env: Mapping[str, str | None] | None = None,
               cwd: Path | None = None) -> int:
        self._say(f"starting {name}")
        return self.services.start(name, cmd, log=self.log_of(name), url=url, cwd=cwd,
                                   env={**(env or {}), OWNER_ENV: str(self.dir)})

    def log_of(self, service: str) -> Path:
        """The log of a service."""
        return self.run.log if service == self.run.name else self.paths.log(service)

    def _await(self, what: str, name: str, check: Callable[[], object], timeout_s: float) -> None:
        try:
            wait_until(check, timeout_s=timeout_s, what=what, alive=lambda: self.services.runs(name), poll_s=0.1)
        except DeadlineExceeded as e:
            log_file = self.log_of(name)
            raise DeadlineExceeded(f"{e.message}; {last_message(log_file)}", hint=f"see {log_file}") from e

    # -- locks --------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _locked(self, timeout_s: float) -> Iterator[None]:
        """Holds the cluster's lock. Only its holder starts or stops services, which do not inherit it. Raises
        DeadlineExceeded while another command holds it, and FileNotFoundError where the cluster's folder is gone."""
        with self.paths.services_lock.open("w") as lock:
            if not file_lock.taken(lock, timeout_s=timeout_s):
                raise DeadlineExceeded(f"another command is starting or stopping the services in {self.dir}",
                                       hint="wait for it to end, then try again")
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Makes this process the one that trains the job within the block. Raises ConfigError while another one does.
        """
        self._make_folder()
        path = self._job.train_lock
        with path.open("w") as lock:
            if file_lock.is_held(path) or not file_lock.taken(lock, timeout_s=file_lock.READER_S):
                raise self._trained_already()
            yield

    @contextlib.contextmanager
    def owned(self) -> Iterator[bool]:
        """Makes this process an owner of the cluster within the block, for its job. The host agent takes the cluster
        down when all owners have ended and one of them without leaving the block, as by kill -9. Yields whether the
        cluster was up before, and not abandoned. Raises ConfigError while another process owns it for the same job, or
        the job's run is on it."""
        self._make_folder()
        path = self.paths.owner_lock(self.cfg.job)
        with contextlib.ExitStack() as held:
            with self._locked(_LOCK_TIMEOUT_S):
                was_up, reading = self.up_before and not self.abandoned, self.run.read()
                # A run that is between two processes is one that goes on, as long as there is who starts it again.
                if file_lock.is_held(path) or reading.alive or reading.wanted and was_up and self.agents.running():
                    raise self._trained_already()
                self.run.withdraw()  # of a run whose machine went down: this process submits its own
                path.parent.mkdir(exist_ok=True)
                # The agent may see the file before its lock, but takes nothing down without the cluster's lock.
                if not file_lock.taken(held.enter_context(path.open("w")), timeout_s=file_lock.READER_S):
                    raise self._trained_already()
            try:
                yield was_up
            finally:
                # The file stays where the cluster is left to another owner, or was to be taken down and was not: the
                # agent takes down a cluster whose owners' files all have no lock.
                if not self.owned_by_others and (was_up or not self.paths.info.exists()):
                    path.unlink(missing_ok=True)

    @property
    def owned_by_others(self) -> bool:
        """Whether processes that train other jobs own the cluster."""
        own = self.paths.owner_lock(self.cfg.job)
        return any(file_lock.is_held(path) for path in self.paths.owner_locks() if path != own)

    @property
    def abandoned(self) -> bool:
        """Whether the cluster had owners, and all have ended without taking it down."""
        owners = self.paths.owner_locks()
        return bool(owners) and not any(map(file_lock.is_held, owners))

    def _disown(self) -> None:
        """Forgets owners that have all ended: the cluster is now that of the command that starts or stops it."""
        if self.abandoned:
            for path in self.paths.owner_locks():
                path.unlink(missing_ok=True)

    def down_if_abandoned(self) -> bool:
        """Ends what a command has left that was killed: a cluster whose owners have ended, with its run, and the rest
        of one that was being stopped. Returns whether the cluster is down."""
        if self.paths.info.exists() and not self.abandoned:  # as in nearly every pass of the agent: without the lock
            return False
        try:
            with self._locked(0.0):
                halfway = self.paths.stopped.exists() and not self.paths.info.exists()
                if self.abandoned or (halfway and self.services.running()):
                    self._say("the processes that owned the cluster, or the one that stopped it, have ended")
                    self._down(purge=False)
                return not self.paths.info.exists() and not self.services.running()
        except DeadlineExceeded:  # a command is starting or stopping it
            return False
        except FileNotFoundError:  # somebody has removed its folder
            return True

    # -- the run --------------------------------------------------------------------------------------------------
    def submit(self, *, faults: bool = False, from_job: str = "") -> None:
        """Starts the run of the job, with this process's environment and working folder, as a service of the cluster.

        Raises ConfigError while the job has a run, EtcdUnavailable where the cluster is not up, and PreflightFailed
        where the run's process cannot be started."""
        with preflight_writes(self.dir), self._locked(_LOCK_TIMEOUT_S):
            self.connect()
            self._require_here()  # else the run would be a service that the host agent cannot see
            if (reading := self.run.read()).wanted:
                raise self._trained_already()
            try:  # one that has ended exits within milliseconds
                wait_until(lambda: not self.run.read().alive, timeout_s=_EXIT_GRACE_S if reading.ended else 0.0,
                           what="the end of the run before")
            except DeadlineExceeded as e:
                raise self._trained_already() from e
            self._disown()
            try:
                self.run.submit(Submission.of_this_process(self.cfg, faults=faults, from_job=from_job))
                self._start_run()
            except BaseException:
                self.run.withdraw()
                if reading.status is not None:  # how the run before has ended
                    with contextlib.suppress(OSError):
                        self.run.save(reading.status)
                raise

    def _trained_already(self) -> ConfigError:
        options = kept_state.options(self.cfg)
        return ConfigError(f"job {self.cfg.job} is already being trained by another process",
                           hint=f"`elastic-rl attach {options}` shows it, `elastic-rl stop {options}` stops it; or "
                                "name another job with --job=NAME")

    def _start_run(self) -> bool:
        """Starts the process of the run that was submitted; False where none is wanted."""
        submission = self.run.submission()
        if submission is None or not self.run.read().wanted:
            return False
        folder = Path(submission.folder)
        if not folder.is_dir():
            raise PreflightFailed(f"the folder that job {self.cfg.job} was submitted in, {folder}, is gone",
                                  hint="make it again: its run then goes on")
        if not os.access(submission.python, os.X_OK):
            raise PreflightFailed(f"the Python that job {self.cfg.job} was submitted with is gone: {submission.python}",
                                  hint="make its environment again: the run then goes on; or `elastic-rl stop` it")
        self._spawn(self.run.name, processes.python(
            "elastic_rl.run_service", f"--run_dir={self.cfg.run_dir}", f"--job={self.cfg.job}",
            interpreter=submission.python), env=submission.process_environment(), cwd=folder)
        return True

    def stop_run(self) -> bool:
        """Ends the run of the job, which writes its report; the next one resumes the job. A run that does not end in
        time is killed. Returns whether there was one to end. Raises PreflightFailed for one that runs elsewhere, and
        DeadlineExceeded where it is to be killed while another command starts or stops the services."""
        self._require_own_folder()
        submitted = self.run.withdraw()  # first: from here on nobody starts it again, also when this process is killed
        return self._end_run() or submitted

    def _end_run(self, *, locked: bool = False) -> bool:
        """Ends the process of a run that was withdrawn; returns whether there was one. ``locked``: this process holds
        the cluster's lock."""
        record = self.services.get(self.run.name)
        if record is None or not record.running:
            return False
        self._say(f"stopping the run of job {self.cfg.job}")
        # By its pid where its file names it: a later run, which another command may start now, is none of ours. One
        # that is just being started, or runs elsewhere, sees that its submission is gone.
        process = None
        with contextlib.suppress(psutil.NoSuchProcess):
            if record.named:
                process = psutil.Process(record.pid)
                process.terminate()
        try:
            wait_until(lambda: not (self.services.runs(self.run.name) if process is None else runs(process)),
                       timeout_s=_STOP_RUN_S, what="the end of the run")
        except DeadlineExceeded as e:
            if process is None:
                raise PreflightFailed(f"the run of job {self.cfg.job} does not end where it runs",
                                      hint="run the command on the machine, or in the container, where it runs") from e
            with contextlib.nullcontext() if locked else self._locked(_DOWN_LOCK_TIMEOUT_S):
                # Not its descendants: the host agent may be one of them, if the run has started it again.
                processes.stop(process.pid, grace_s=0.0, descendants=False)
                leftovers.sweep(self._job)
        return True

    # -- the host agent -------------------------------------------------------------------------------------------
    def _start_agent(self, name: str) -> None:
        """Starts one of the two processes of the host agent, of which one waits until the other has ended."""
        self.agents.start(name, processes.python(
            "elastic_rl.host.agent", "--name", name, f"--run_dir={self.cfg.run_dir}", f"--job={self.cfg.job}"),
            log=self.paths.log(name), env={OWNER_ENV: str(self.dir)})

    def _stop_agents(self) -> None:
        """Ends the processes of the host agent, but for this one, and none of the services, which are their children.
        """
        for record in self.agents.running():
            if record.pid and record.pid != os.getpid():
                processes.stop(record.pid, grace_s=_EXIT_GRACE_S, descendants=False)
            self.agents.forget(record.name)

    # -- one service ----------------------------------------------------------------------------------------------
    def supervised(self) -> list[ServiceRecord]:
        """The services that run, and those that are to run: all that were started and not forgotten, but for a run that
        has ended."""
        records = [record for record in self.services.all() if record.name != self.run.name]
        run = self.services.get(self.run.name) or ServiceRecord(self.run.name)  # none where its starter was killed
        try:
            wanted = self.run.read().wanted
        except OSError:  # reported where it is to be started: no other service waits for its files
            wanted = True
        return [*records, run] if run.running or wanted else records

    def revive(self, name: str) -> bool:
        """Starts a service, or a process of the host agent, again that has ended by itself, on its data and its port,
        and does not wait until it answers. False, with nothing started, where it runs, where it is no service of this
        cluster any more (``down``), and while another command starts or stops the cluster.

        Raises PreflightFailed: its data are gone, its port is taken, processes of this cluster run without a record.
        """
        try:
            with self._locked(0.0):
                info = self._info()
                if name in AGENTS:
                    if info is None or self.agents.runs(name):
                        return False
                    self._start_agent(name)
                    return True
                record = self.services.get(name) or (ServiceRecord(name) if name == self.run.name else None)
                if info is None or record is None or record.running:
                    return False
                self.services.end_leftovers(name)
                self._require_records()
                return self._revive(record, info)
        except (DeadlineExceeded, FileNotFoundError):  # the lock is held; or the cluster's folder is gone
            return False

    def _revive(self, record: ServiceRecord, info: ClusterInfo) -> bool:
        if record.name == etcd_server.SERVICE:
            data = self.paths.etcd
            if not (data / "member").is_dir():  # an empty etcd would tell the services that there are no versions
                raise PreflightFailed(f"the data of this cluster's etcd in {data} are gone",
                                      hint="`elastic-rl down`, then `elastic-rl up` again")
            if etcd_server.data_in_use(data):
                raise PreflightFailed(f"an etcd without a record runs on {data}", hint=_NO_RECORD_HINT)
            port = int(info.etcd_endpoints[0].rpartition(":")[2])
            require_port_free(own_address(), port, setting="the port of this cluster's etcd")
            self._spawn_etcd(etcd_server.find_binary(), data, port)
        elif record.name == f"dcs-{kept_state.NODE}":
            self._start_dcs_node(set(), info.etcd_endpoints)
        elif record.name in (f"coordinator-{i}" for i in range(self.cfg.coordinator.replicas)):
            i = int(record.name.rpartition("-")[2])
            url = self._start_coordinator(i, info.etcd_endpoints)
            if info.coordinators[i:i + 1] != [url]:
                urls = [*info.coordinators[:i], url, *info.coordinators[i + 1:]]
                dataclasses.replace(info, coordinators=urls).save(self.paths.info)
        elif record.name == self.run.name:
            return self._start_run()
        else:
            return False
        return True

    # -- down ---------------------------------------------------------------------------------------------------
    def down(self, *, purge: bool = False) -> list[str]:
        """Ends every process of the job, its run first and etcd last, and removes its shared memory and the files with
        the secrets of the compute plane. The state of the job stays (``kept_state``), and so does the cluster's secret,
        unless ``purge`` deletes them. Returns the names of what was running. Raises ConfigError where the folder cannot
        be one, and PreflightFailed where it is not this user's, and for services that run elsewhere."""
        if in_the_way := next((p for p in (self.dir, *self.dir.parents) if p.exists() and not p.is_dir()), None):
            raise ConfigError(f"{in_the_way} is not a folder, so no cluster is below it",
                              hint="name the run_dir that the job was started with")
        self._require_own_folder()
        if not self.dir.is_dir():
            return self._down(purge)
        self._require_here()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked(_DOWN_LOCK_TIMEOUT_S))
            except DeadlineExceeded as e:
                self._say(f"warning: {e.message}: stopping the services all the same")
                self._stop_agents()  # which would start again what is stopped
            return self._down(purge)

    def _down(self, purge: bool) -> list[str]:
        submitted = self.run.withdraw()  # first: a disk that is full must not keep the run
        if self.paths.info.exists():  # then nobody connects to it any more, and if this process is killed now, the host
            self.paths.unsaved.touch()  # agent does the rest
            self.paths.info.replace(self.paths.stopped)
        stopped = [self.run.name] if self._end_run(locked=True) or submitted else []
        stopped += [f"compute {pid}" for pid in leftovers.sweep(self._job)]
        services = self._stop(sorted(self.services.all(), key=lambda r: _down_order(r.name)))
        stopped += services
        if services.get(f"dcs-{kept_state.NODE}"):  # it was not killed, now or before
            self.paths.unsaved.unlink(missing_ok=True)
        self._stop_agents()
        # A service has no record where someone has deleted its file.
        stopped += [f"stray {pid}" for pid in processes.sweep(str(self.dir), OWNER_ENV)]
        self.services.clear()
        self._unlink_segments()
        remove_secret_files(self._job)
        self._disown()
        if purge:
            kept_state.delete(self.cfg)
        return stopped

    def _info(self) -> ClusterInfo | None:
        """``cluster.json``, or None where it is missing or damaged."""
        try:
            return ClusterInfo.load(self.paths.info)
        except ConfigError as e:
            self._say(f"warning: {e.message}")
            return None

    def _stop(self, records: list[ServiceRecord], *, forget: bool = True) -> dict[str, bool]:
        """Stops services, and forgets them unless they are to be started again. Returns, by the name of each that was
        running, whether it ended before it was killed."""
        stopped = {}
        for record in records:
            if record.running:
                grace_s = SAVE_GRACE_S if record.name.startswith("dcs-") else _EXIT_GRACE_S
                stopped[record.name] = processes.stop(record.pid, grace_s=grace_s)
            if forget:
                self.services.forget(record.name)
        return stopped

    def _unlink_segments(self) -> None:
        for segment in self.segments():
            if not leftovers.is_mapped(segment):
                segment.unlink(missing_ok=True)

    # -- reading ------------------------------------------------------------------------------------------------
    def connect(self) -> ClusterInfo:
        """The running cluster of this job. Raises EtcdUnavailable when it is not up, and PreflightFailed when its
        folder is not this user's."""
        self._require_own_folder()
        info = ClusterInfo.load(self.paths.info)
        if info is None or (info.own_etcd and not self.services.running()):
            raise EtcdUnavailable(f"no cluster of job {self.cfg.job!r} is up under {self.dir}",
                                  hint=f"start one with `elastic-rl up {kept_state.options(self.cfg)}`, or name "
                                       "another --job")
        return info

    def segments(self) -> list[Path]:
        """Shared-memory files of this job."""
        pattern = re.compile(rf"{PREFIX}{re.escape(self.cfg.job)}-node-\d+-[^-]+")
        return [p for p in SHM.glob(f"{PREFIX}{self.cfg.job}-*") if pattern.fullmatch(p.name)]


def _down_order(name: str) -> int:
    """First the coordinators (nothing is left to alert about), then the DCS node, then etcd."""
    order = ("coordinator-", "dcs-", "etcd")
    return next((i for i, prefix in enumerate(order, 1) if name.startswith(prefix)), 0)


def _answers(url: str, ca_file: str, token: str = "") -> bool:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        return http_client.request("GET", url, timeout=1.0, headers=headers,
                                   verify=tls.trust(ca_file)).status_code == 200
    except httpx.HTTPError:
        return False


def last_message(log_file: Path) -> str:
    """The last line of a log, shortened; of a JSON line its error or message."""
    last = next((line for line in reversed(tail(log_file).splitlines()) if line.strip()), "its log is empty")
    try:
        parsed = json.loads(last)
        last = str(parsed.get("error") or parsed.get("message") or parsed.get("msg") or last)
    except (json.JSONDecodeError, AttributeError):
        pass
    return last.strip().splitlines()[-1][:300] if last.strip() else "its log is empty"
