"""The durable plane on one machine: etcd, coordinator replicas and DCS nodes, started and stopped as services.

``up`` is level-triggered: it starts what does not run, so calling it twice is harmless and calling it after a crash
repairs the cluster. ``down`` ends whatever of the cluster and its jobs still runs, also after a crash, and keeps their
state, with which the next ``up`` continues. ``revive`` starts one service again that has ended by itself; the host
agent calls it. ``admit`` adds a job to a cluster with a name. All hold the cluster's lock, so that none interferes with
another.

A cluster with a name (``Config.cluster``) has any number of jobs; one without is of one job, and called the job's own:
``up`` starts both, and ``down`` ends both. Each job has a DCS node, which is a service of the cluster, and a run, which
is a singleton that the leader assigns to a host (``job_run``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import logging
import os
import re
import shutil
import stat
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

import httpx
import psutil

from elastic_rl.config import Config, Stream
from elastic_rl.config.root import CLUSTER_SECTIONS
from elastic_rl.coordinator.api import tls
from elastic_rl.coordinator.api.auth import Role
from elastic_rl.coordinator.api.listening import advertised
from elastic_rl.coordinator.api_paths import job_path
from elastic_rl.coordinator.client.cluster_info import ClusterInfo
from elastic_rl.coordinator.client.credentials import read_token
from elastic_rl.coordinator.jobs.state_machine import STOP_RUN_S
from elastic_rl.dcs.storage.arena import PREFIX, SHM, Leftovers
from elastic_rl.errors import ConfigError, Conflict, DeadlineExceeded, EtcdUnavailable, PreflightFailed
from elastic_rl.etcd import job_settings
from elastic_rl.etcd.access import Access
from elastic_rl.etcd.client import ClusterMember, EtcdClient, Op
from elastic_rl.etcd.cluster_records import ClusterSpec, JobRecord, RayHead, job_of_driver
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.transaction import Compare
from elastic_rl.host import (
    cluster_secrets,
    cluster_settings,
    etcd_member,
    etcd_server,
    file_lock,
    kept_state,
    leftovers,
    preemption,
    processes,
    ray_node,
)
from elastic_rl.host.address import ray_address
from elastic_rl.host.etcd_member import EtcdMember
from elastic_rl.host.job_run import JobRun, Submission, all_stopped
from elastic_rl.host.job_secrets import engine_key_file, remove_secret_files
from elastic_rl.host.join_file import JoinFile
from elastic_rl.host.local_host import LocalHost, host_name
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.host.processes import OWNER_ENV
from elastic_rl.host.ray_node import RayNode
from elastic_rl.host.service_files import (
    ServiceFiles,
    ServiceRecord,
    job_of_node,
    job_of_ray_worker,
    node_service,
    ray_worker_service,
)
from elastic_rl.net import http_client
from elastic_rl.net.addresses import free_port, host_port, require_address, require_port_free
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.runtime.files import preflight_writes, private_folder, replace_file, require_own_folder
from elastic_rl.runtime.process import runs
from elastic_rl.runtime.waiting import wait_until
from elastic_rl.telemetry.log_files import tail

log = logging.getLogger(__name__)

_ETCD_BUDGET_S = 2.0
"""Seconds in which an etcd that someone else runs must answer."""
_START_TIMEOUT_S = 120.0
"""Longest wait for a service to answer: its imports alone take 30 s on an overloaded machine. The end of a service ends
the wait."""
_LOCK_TIMEOUT_S = 180.0
"""Longest wait of ``up`` for another command that starts or stops the cluster, which itself waits for services."""
_DOWN_LOCK_TIMEOUT_S = 15.0
"""Longest wait of ``down`` for such a command. It then goes on without the lock, to end an ``up`` that hangs."""
_STOP_RUN_S = STOP_RUN_S
"""Longest wait for a run to end, beside that for its commit."""
_WITHDRAW_S = 2.0
"""Seconds of retries of etcd before a run that is taken down is left to write its stop itself."""
_READ_BUDGET_S = 1.0
"""Retries of a reading of a run, which is made again and again."""
SAVE_GRACE_S = 90.0
"""Longest wait for a DCS node to end, which first saves what is in memory only."""
_SAVES_S = 450.0
"""Longest wait for all of them, which end side by side: the launchers in ``ops`` give a host 600 s to end."""
_EXIT_GRACE_S = 5.0
"""Longest wait for children of a killed service to end. The kernel kills them, so it takes milliseconds."""
_OF_ONE_HOST = {"host", "port", "advertise_host", "advertise_port", "disk_dir"}
"""Settings of a job's DCS nodes that are for the host which it was submitted on; its nodes elsewhere have the defaults.
"""
AGENTS = ("agent-0", "agent-1")
"""Names of the two processes of the host agent: either may be the active one or the standby."""


class Cluster:
    """A cluster, and the job on it that ``cfg`` names. Paths in ``cfg`` are made absolute, since services outlive this
    process."""

    def __init__(self, cfg: Config, *, say: Callable[[str], None] = log.info) -> None:
        self.cfg = cfg.model_copy(update={"run_dir": cfg.run_dir.expanduser().resolve()})
        self.paths, self._job = ClusterPaths.of(self.cfg), JobPaths.of(self.cfg)
        self.dir = self.paths.folder
        self.named = bool(cfg.cluster)
        """Whether it is a cluster with a name, which other jobs may be on too."""
        self.node = node_service(cfg.job)
        """Name of the service that is the job's DCS node."""
        self.services, self.agents = ServiceFiles(self.paths.services), ServiceFiles(self.paths.agents)
        self.singletons = ServiceFiles(self.paths.singletons)
        """What the leader has assigned to this host; the agent starts and ends it."""
        self.run = JobRun(self.cfg, self.singletons, self._etcd_if_up, lambda: self.taken_down and not self.suspended)
        self._say = say
        self._host: LocalHost | None = None
        self._new_data: Path | None = None
        """Folder of an etcd that this start has begun."""
        self._owns = False
        """Whether this process owns the cluster."""
        self._kept = set[str]()
        """Services that run on when a start fails: others wait for them."""

    # -- up -----------------------------------------------------------------------------------------------------
    def up(self, *, resubmit: bool = True, name: str = "", address: str = "", labels: Mapping[str, str] | None = None,
           preemption_notice: str | None = None) -> ClusterInfo:
        """Starts what does not run and returns when every service answers. A cluster with a name starts without the
        job (``admit``). ``resubmit``: whether the job's record gets these settings where it has others. ``name``,
        ``address``, ``labels``, ``preemption_notice`` (``join``): of this host in a cluster with a name; empty, or
        None: as before.

        Raises ConfigError (another etcd than the running cluster's), PreflightFailed (port taken, shared memory too
        small, no etcd program, no space or no locks in run_dir), EtcdUnavailable (a configured etcd does not answer) or
        DeadlineExceeded (also while another command starts or stops the cluster). After any error it stops what it
        started, and the stored settings are those of before.
        """
        self._make_folder(self.dir)
        with (preflight_writes(self.dir), self._locked(_LOCK_TIMEOUT_S),
              cluster_settings.unchanged_on_error(self.paths.settings),
              cluster_settings.unchanged_on_error(self.paths.local_host)):
            self._place(name, address, labels=labels, preemption_notice=preemption_notice)
            with self._stopped_on_error() as running:
                return self._up(running, resubmit)

    @contextlib.contextmanager
    def _stopped_on_error(self) -> Iterator[set[str]]:
        """Yields the names of what runs; stops what was started since when the block raises."""
        known, before = {r.name for r in self.services.all()}, {r.name for r in self.services.running()}
        supervised = bool(self.agents.running())
        try:
            yield before | {r.name for r in self.singletons.running()}
        except BaseException:
            if not supervised and not self.paths.info.exists():
                self._stop_agents()
            for record in self.services.all():
                if record.name not in before | self._kept:
                    self._stop([record], forget=record.name not in known)
            if not before and not self.named:
                self._unlink_segments()
            if self._new_data is not None:  # nobody was told of it
                shutil.rmtree(self._new_data, ignore_errors=True)
            raise

    @property
    def host(self) -> LocalHost:
        """This host in the cluster. Raises ConfigError for a damaged file."""
        if self._host is None:
            self._host = LocalHost.of(self.paths)
        return self._host

    @property
    def here(self) -> Config:
        """The settings as they hold on this host (``LocalHost.settings_here``); ``cfg`` has them as they are stored.
        Raises ConfigError."""
        return self.host.settings_here(self.cfg, self.paths.tls)

    def _place(self, name: str, address: str, *, joined: bool = False, labels: Mapping[str, str] | None = None,
               coordinator: bool | None = None, etcd: bool | None = None, preemption_notice: str | None = None
               ) -> None:
        """Gives this host a name, an address, labels, a coordinator, a member of etcd and a source of notices of
        preemption, those that are given. Raises ConfigError for what cannot be one, for a host that has become one of
        the cluster in the other way (``joined``), and where services run under another one, and PreflightFailed for an
        address that this machine does not have."""
        before = self.host
        if joined != before.joined and self.known:
            raise ConfigError(
                f"this machine has joined cluster {self.cfg.cluster}, whose etcd and coordinators are elsewhere"
                if before.joined else f"cluster {self.cfg.cluster} was started on this machine, in {self.dir}",
                hint="`elastic-rl node --join=FILE` starts what runs here" if before.joined else
                "`elastic-rl up` starts what runs here; to join another cluster of that name, set another --run_dir")
        if (name or address or labels or preemption_notice) and not self.named:
            raise ConfigError("only a host of a cluster with a name has a name, an address, labels and notices of "
                              "preemption", hint="give --cluster=NAME, too")
        after = before.named(name, address).replace(joined=joined)
        if before.joined and self.known and after.name != before.name:
            raise ConfigError(f"this host has joined as {before.name}, whose versions its DCS nodes have",
                              hint="leave --name out; or join with another --run_dir")
        if labels is not None:
            after = after.replace(labels=dict(labels))
        if coordinator is not None:
            after = after.replace(coordinator=coordinator)
        if etcd is not None:
            after = after.replace(etcd=etcd)
        if after.joined and (after.coordinator or after.runs_etcd) and after.name.isdecimal():
            raise ConfigError(f"--name={after.name} is what the first host calls its own coordinators and etcd by",
                              hint="give a name that is no number")
        if preemption_notice is not None:
            after = after.replace(preemption_notice=preemption.checked(preemption_notice))
        if after != before:
            if running := [r.name for r in self._running()]:
                raise ConfigError(f"this host is {before.described} while {', '.join(running)} run",
                                  hint=f"`elastic-rl down {kept_state.cluster_options(self.cfg)}` first")
            after.save(self.paths)
        require_address(after.address, setting="--address")
        self._host = after

    def join(self, file: JoinFile, *, name: str = "", address: str = "", labels: Mapping[str, str] | None = None,
             coordinator: bool | None = None, etcd: bool | None = None, preemption_notice: str | None = None
             ) -> ClusterInfo:
        """Makes this machine a host of the cluster that a join file describes, and starts its agent unless that runs.
        ``name``, ``address``, ``labels``: of this host; empty, or None: as before. ``coordinator``, ``etcd``: whether
        one, or a member of the cluster's own etcd, runs here. ``preemption_notice``: where its provider announces that
        it takes the machine back; None: as before.

        Raises ConfigError (nothing that others can reach, another secret than that of what runs here, an etcd without
        this cluster, or with as many members as are of use), PreflightFailed as ``up``, EtcdUnavailable where the
        cluster's etcd does not answer, and DeadlineExceeded. After any error it stops what it started, and what was
        stored is as before; but a member of etcd that has data runs on, with its settings: the others may wait for it.
        """
        self._make_folder(self.dir)
        with preflight_writes(self.dir), self._locked(_LOCK_TIMEOUT_S), contextlib.ExitStack() as undo:
            files = undo.enter_context(contextlib.ExitStack())
            for path in (self.paths.settings, self.paths.local_host, self.paths.secret, self.paths.credentials,
                         self.paths.tokens, self.paths.viewer_token):
                files.enter_context(cluster_settings.unchanged_on_error(path))
            self._place(name, address, joined=True, labels=labels, coordinator=coordinator, etcd=etcd,
                        preemption_notice=preemption_notice)
            if self.host.is_local:
                raise ConfigError("the other hosts of the cluster cannot reach this one",
                                  hint="give --address=IP, an address of this machine that `ip addr` lists")
            self._require_records()
            running = undo.enter_context(self._stopped_on_error())
            self._take_secret(ClusterSecret(file.secret), bool(running))
            self._certify(renew_only=bool(running))
            self._check_coordinators(running)
            cluster_settings.save(self.cfg, self.paths.settings)
            # Members may have come since the file was written, and that of the first host may have gone.
            endpoints = [*dict.fromkeys([*self._endpoints_before, *file.etcd_endpoints])]
            try:
                member = self._start_known_member(running, endpoints)  # first: etcd may have no majority without it
            finally:
                if self._kept:
                    files.pop_all().close()
            with EtcdClient.from_config(self.here.etcd, endpoints, retry_budget_s=_ETCD_BUDGET_S) as client:
                if client.get(ClusterKeys(self.cfg.cluster_name).spec()) is None:
                    raise ConfigError(f"the etcd at {', '.join(endpoints)} has no cluster {self.cfg.cluster}",
                                      hint="copy cluster.join from the folder of the cluster on its first host again")
                self._join_etcd(client, member, asked=bool(etcd))
            coordinators = self._start_coordinators(running, endpoints)
            self._await_coordinators(coordinators)
            info = ClusterInfo("", endpoints, [*dict.fromkeys([*coordinators.values(), *file.coordinators])],
                               str(self.paths.credentials), self.here.coordinator.tls_ca)
            undo.close()  # nothing is undone from here on: the next call goes on where this one ends
            info.save(self.paths.info)
            self._save_join_file(info)
            self.paths.stopped.unlink(missing_ok=True)
            if not self.agents.running():
                self._say("starting the host agent")
                self._start_agent(AGENTS[0])
            return info

    def _save_join_file(self, info: ClusterInfo) -> None:
        """Writes what other machines need to join, where they can. Each host has it: the first one may be lost."""
        if not self.host.is_local:
            JoinFile.of(self.cfg, ClusterSecret.read(self.paths.secret), info.etcd_endpoints, info.coordinators).save(
                self.paths.join_file)

    def _take_secret(self, secret: ClusterSecret, running: bool) -> None:
        """Stores the secret of the cluster that this host joins. Raises ConfigError where what runs has another one."""
        if not self.paths.secret.exists() or ClusterSecret.read(self.paths.secret) != secret:
            if running:
                raise ConfigError("the join file has another secret than what runs on this host", hint=(
                    f"`elastic-rl down {kept_state.cluster_options(self.cfg)}` first"))
            for path in (self.paths.credentials, self.paths.tokens, self.paths.viewer_token):
                path.unlink(missing_ok=True)
            secret.save(self.paths.secret)
        cluster_secrets.write_secrets(self.paths, self._say)

    def _up(self, running: set[str], resubmit: bool) -> ClusterInfo:
        self._require_same_etcd()
        if not self.named:
            kept_state.require_same_cluster(self.cfg)
            kept_state.require_same_disk(self.cfg)
        self._require_records()
        self._check_coordinators(running)
        self._secrets(running)
        self._certify(renew_only=bool(running))
        if not self.named:
            self._check_node(running)
        cluster_settings.save(self.cfg, self.paths.settings)
        if not self.agents.running():  # first: it ends what this process leaves when it is killed
            self._say("starting the host agent")
            self._start_agent(AGENTS[0])
        endpoints = self._etcd(running)
        self._put_spec(endpoints)
        coordinators = self._start_coordinators(running, endpoints)
        node_pid = self._start_dcs_node(running, endpoints) if not self.named else None
        self._await_coordinators(coordinators)
        if not self.named:
            self._await_job(coordinators, endpoints, node_pid, resubmit=resubmit, reseal=not running)
        ca = self.here.coordinator.tls_ca
        info = ClusterInfo("" if self.named else self.cfg.job, endpoints, list(coordinators.values()),
                           str(self.paths.credentials), str(Path(ca).resolve()) if ca else "",
                           not self.cfg.etcd.endpoints)
        info.save(self.paths.info)
        self._save_join_file(info)
        self._disown()
        self.paths.stopped.unlink(missing_ok=True)
        self.paths.suspended.unlink(missing_ok=True)
        if not self.named:
            self._job.unsaved.unlink(missing_ok=True)
        self._new_data = None
        return self._addressed(info)

    def renew_certificate(self) -> bool:
        """Renews the certificate of this host where it is about to expire, or is damaged. False while another
        command starts or stops the cluster. Raises ConfigError where the cluster's secret is another one than its
        services run with, or cannot be read, and OSError."""
        try:
            with self._locked(0.0):
                self._certify(renew_only=True)
                return True
        except DeadlineExceeded:
            return False

    def _certify(self, *, renew_only: bool) -> None:
        """Makes the certificate of this host where it needs one. ``renew_only``: as for ``LocalHost.certify``. Raises
        ConfigError and OSError."""
        if not self.host.is_local:
            coordinator = self.here.coordinator
            also = () if self.host.joined else (coordinator.host, coordinator.advertise_host)  # of the first host
            self.host.certify(self.paths, self.cfg.cluster_name, ClusterSecret.read(self.paths.secret), also=also,
                              renew_only=renew_only)

    def _put_spec(self, endpoints: list[str]) -> None:
        """Writes what the coordinators decide about runs by, and stops those that are not to go on: of a cluster that
        was taken down, or whose owner has ended, or that this process owns, which submits its own."""
        keys = ClusterKeys(self.cfg.cluster_name)
        wanted = self.cfg.coordinator
        spec = ClusterSpec(parallel_jobs=wanted.parallel_jobs if self.named else 1,
                           max_preempted_share=wanted.max_preempted_share).encode()
        with EtcdClient.from_config(self.here.etcd, endpoints) as etcd:
            found = etcd.get(keys.spec())
            if found is None or found.value != spec:
                etcd.put(keys.spec(), spec)
            if self.stops_runs or self.abandoned or self._owns:
                jobs = all_stopped(etcd, keys)
                for job in jobs if self.stops_runs else ():
                    self.of_job(job).run.end_with_cluster(etcd)

    def admit(self, *, resubmit: bool = False) -> ClusterInfo:
        """Adds the job to a cluster with a name that is up, or finds that it is there: with the job's DCS node, and its
        record with which the coordinators take it up. ``resubmit``: as in ``up``.

        Raises EtcdUnavailable where the cluster is not up, ConfigError for a job that is on another cluster or whose
        versions are lost, and otherwise as ``up``; after any error it stops what it started, and the stored settings
        are those of before. DeadlineExceeded where no coordinator takes up the job, which is on the cluster then."""
        self.connect()
        self._make_folder(self._job.private)
        with preflight_writes(self._job.private), self._locked(_LOCK_TIMEOUT_S), contextlib.ExitStack() as undo:
            info = self.connect()
            self._require_same_etcd()
            kept_state.require_same_cluster(self.cfg)
            kept_state.require_same_disk(self.cfg)
            self._require_here()
            running = {r.name for r in self.services.running()}
            self._check_node(running)
            for path in (self._job.cluster_name, self._job.submitted_settings):
                undo.enter_context(cluster_settings.unchanged_on_error(path))
            if self.node not in running:
                undo.enter_context(self._node_stopped_on_error(new=self.services.get(self.node) is None))
                self._begin_or_continue(info.etcd_endpoints)
            replace_file(self._job.cluster_name, self.cfg.cluster, durable=True)
            engine_key_file(self.cfg)
            cluster_settings.save(self.cfg, self._job.submitted_settings)
            pid = self._start_dcs_node(running, info.etcd_endpoints)
            if pid is not None:
                self._await_dcs_node(info.etcd_endpoints, pid)
            self.put_job_record(info.etcd_endpoints, resubmit=resubmit)
            self._keep_id(info.etcd_endpoints)
            self._job.unsaved.unlink(missing_ok=True)
        # Without the lock: the host agent may have to start a coordinator again meanwhile.
        token, page = read_token(self.paths.credentials, Role.VIEWER), job_path(self.cfg.job)
        wait_until(lambda: any(_answers(url + page, info.ca_file, token) for url in info.coordinators), poll_s=0.2,
                   timeout_s=_START_TIMEOUT_S, what=f"a coordinator that takes up job {self.cfg.job}")
        return info

    def _keep_id(self, endpoints: list[str]) -> None:
        """Stores the id of the job that is on the cluster now."""
        with EtcdClient.from_config(self.here.etcd, endpoints) as etcd:
            record = readable_one(etcd.get(ClusterKeys(self.cfg.cluster_name).job(self.cfg.job)), JobRecord)
        if record is not None:
            replace_file(self._job.job_id, record.id, durable=True)

    def _begin_or_continue(self, endpoints: list[str]) -> None:
        """Sets aside what an earlier job of this name has left, where etcd knows none. Raises ConfigError where etcd
        lists versions that ended with the DCS node: the run would wait for them without end."""
        keys = Keys(self.cfg.job)
        with EtcdClient.from_config(self.here.etcd, endpoints) as etcd:
            if etcd.get(keys.job_spec()) is None and etcd.get(keys.epoch()) is None:
                self._set_aside(self._job.steps, self._job.faults, self._job.model)
            lost = not kept_state.keeps_versions(self.cfg) and any(
                etcd.get(keys.stream_head(stream)) is not None for stream in Stream)
        if lost:
            raise ConfigError(f"the versions of job {self.cfg.job} were in memory only, and are gone with its DCS node",
                              hint=f"name another job with --job=NAME, or delete the records of this one: `elastic-rl "
                                   f"down --purge {kept_state.options(self.cfg)}`")

    @contextlib.contextmanager
    def _node_stopped_on_error(self, *, new: bool) -> Iterator[None]:
        """Stops the job's DCS node when the block raises, and forgets it where it is ``new``."""
        try:
            yield
        except BaseException:
            self._stop([r for r in self.services.all() if r.name == self.node], forget=new)
            self._unlink_segments()
            raise

    def restore_settings(self, before: bytes | None, *, of_cluster: bool = False) -> None:
        """Puts back the settings of the job, or of the cluster, that were stored before this command started the
        cluster (a ``cluster_settings.snapshot``), unless another command has stored its own since."""
        with self._locked(_LOCK_TIMEOUT_S):
            path = self.paths.settings if of_cluster else self._job.submitted_settings
            if cluster_settings.snapshot(path) == cluster_settings.document(self.cfg):
                cluster_settings.restore(path, before)

    def _make_folder(self, private: Path) -> None:
        """A folder of the cluster or the job, for its owner only: it holds secrets, and logs may. Where the user's
        umask lets a group write, those around it are still the owner's: its members could put another folder in the
        place of this one. Raises ConfigError where it cannot be made, and PreflightFailed where its file system has no
        locks."""
        try:
            self.cfg.run_dir.parent.mkdir(parents=True, exist_ok=True)
            for folder in (self.cfg.run_dir, private.parent):
                folder.mkdir(mode=0o755, exist_ok=True)
            private_folder(private, hint=cluster_settings.OTHER_RUN_DIR)
        except OSError as e:
            raise ConfigError(f"cannot create {private}: {e.strerror}", hint="set another --run_dir") from e
        with preflight_writes(private):
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
    def taken_down(self) -> bool:
        """Whether a command has taken the cluster down, or is doing so. That a file is missing alone says nothing: its
        file system may be away."""
        return self.paths.stopped.exists() and not self.paths.info.exists()

    @property
    def suspended(self) -> bool:
        """Whether the cluster was taken down by ``suspend``, or is being so: its runs are not stopped."""
        return self.taken_down and self.paths.suspended.exists()

    @property
    def stops_runs(self) -> bool:
        """Whether the cluster was taken down, and its runs were stopped with it. A host that only leaves a cluster, or
        that suspends it, stops none. Raises ConfigError."""
        return self.taken_down and not self.suspended and not self.host.joined

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
        if self.named:
            raise ConfigError(change, hint="give the one that it uses, which has the records of its jobs; or start "
                                           "another cluster, with another --cluster")
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
            return processes.marked_outside([r.pid for r in self._running()], str(self.dir), OWNER_ENV)
        try:
            wait_until(lambda: not strays(), timeout_s=_EXIT_GRACE_S, what="the end of killed services")
        except DeadlineExceeded as e:
            raise PreflightFailed(f"processes {', '.join(map(str, strays()))} of this cluster run without a record in "
                                  f"{self.services.folder}", hint=self._restart_hint) from e

    def _running(self) -> list[ServiceRecord]:
        """All processes of the cluster that run and have a file."""
        return [r for files in (self.services, self.agents, self.singletons) for r in files.running()]

    def _require_here(self) -> None:
        """Raises PreflightFailed when services of this cluster run where this process cannot see them."""
        def elsewhere() -> list[str]:
            return [r.name for r in self._running() if r.elsewhere]
        try:  # one that starts or ends now is between two states for a moment
            wait_until(lambda: not elsewhere(), timeout_s=_EXIT_GRACE_S, what="the services here")
        except DeadlineExceeded as e:
            raise PreflightFailed(f"{', '.join(elsewhere())} of the cluster in {self.dir} run on another machine or in "
                                  "another container", hint="run the command there") from e

    def _check_coordinators(self, running: set[str]) -> None:
        """Raises PreflightFailed where this machine cannot have the coordinators."""
        host = self.here.coordinator.host
        if self._replicas:
            require_address(host, setting="coordinator.host")
        for i, (name, port) in enumerate(zip(self._replicas, self.cfg.coordinator.ports, strict=False)):
            if name not in running:
                require_port_free(host, port, setting=f"coordinator.ports[{i}]")

    def _check_node(self, running: set[str]) -> None:
        """Raises PreflightFailed where this machine cannot have the job's DCS node."""
        require_address(self._dcs_host, setting="dcs.host")
        if self.node in running:
            return
        if self.cfg.dcs.port:
            require_port_free(self._dcs_host, self.cfg.dcs.port, setting="dcs.port")
        Leftovers().close()  # frees the arenas of killed nodes, also while others map them
        free = shutil.disk_usage(SHM).free
        if free < self.cfg.dcs.arena_bytes:
            raise PreflightFailed(
                f"{SHM} has {free >> 20} MiB free, and the arena needs {self.cfg.dcs.arena_bytes >> 20} MiB "
                f"(dcs.arena_bytes)", hint="set a smaller --dcs.arena_bytes, or a larger /dev/shm: "
                f"`mount -o remount,size=…  {SHM}`, or `docker run --shm-size=…`")

    def _etcd(self, running: set[str]) -> list[str]:
        """Endpoints of the cluster's etcd, whose member on this host is started unless it runs."""
        before = self._endpoints_before
        if self.cfg.etcd.endpoints or not self._has_member:
            endpoints = list(self.cfg.etcd.endpoints or before)
            with EtcdClient.from_config(self.here.etcd, endpoints, retry_budget_s=_ETCD_BUDGET_S) as etcd:
                etcd.get(Keys(self.cfg.job).epoch())  # raises EtcdUnavailable with a hint
            return endpoints
        kept = EtcdMember.of(self.paths)
        if kept is None and len(before) == 1:  # of a start by an earlier release
            kept = EtcdMember(name=self._etcd_service, endpoint=before[0])
        own = kept.endpoint if kept is not None else ""
        others = [endpoint for endpoint in before if endpoint != own]
        if self._was_removed(kept, others):
            self._forget_member()
            return others
        if self._etcd_service in running:
            try:
                self._await_etcd(own, others)
                return [own, *others]
            except DeadlineExceeded:
                if self.services.runs(self._etcd_service):
                    raise
                running.discard(self._etcd_service)  # it was just ending: it is started again, as if it had been gone
        data = self.paths.etcd
        if etcd_server.data_in_use(data):
            raise PreflightFailed(f"an etcd without a record runs on {data}", hint=self._restart_hint)
        if others and not etcd_server.has_data(data):  # an empty one would be another cluster beside the others
            raise PreflightFailed(f"the data of this host's member of etcd in {data} are gone, and others have them: "
                                  f"{', '.join(others)}", hint="make this machine a host that joins, with another "
                                  f"--run_dir: `elastic-rl node --join=FILE --etcd`, and `elastic-rl etcd remove "
                                  f"{self._etcd_service}` there")
        if not running and kept_state.can_continue(self.cfg):
            who = f"cluster {self.cfg.cluster}" if self.named else f"job {self.cfg.job}"
            self._say(f"continuing with what {who} has kept in {self.dir}")
        elif not running:
            self._begin_new_run(data)
        if running and not own:
            raise PreflightFailed(f"services run, and there is no record of their etcd in {self.services.folder}",
                                  hint=self._restart_hint)
        return [self._start_etcd(kept, others, required=bool(running or others)), *others]

    @property
    def _has_member(self) -> bool:
        """Whether this host is to have a member of the cluster's own etcd, and was not told that it has none any more.
        """
        member = EtcdMember.of(self.paths)
        return self.host.runs_etcd and not (member is not None and member.removed)

    @property
    def _etcd_service(self) -> str:
        """Name of this host's member of the cluster's own etcd."""
        return etcd_member.service_of(self.host)

    @property
    def _endpoints_before(self) -> list[str]:
        """Endpoints of the cluster's etcd when this host was last up; empty where it was not."""
        with contextlib.suppress(ConfigError):
            if info := self._info() or ClusterInfo.load(self.paths.stopped):
                return info.etcd_endpoints
        return []

    def _was_removed(self, own: EtcdMember | None, others: Sequence[str]) -> bool:
        """Whether the other members say that this host's was removed while it was away. One that starts all the same
        ends again."""
        if own is None or not others or self.services.runs(self._etcd_service):
            return False
        try:
            with EtcdClient.from_config(self.here.etcd, others, retry_budget_s=_ETCD_BUDGET_S) as etcd:
                removed = not etcd_member.keep(etcd, own, own.peer_url(self.host), etcd.members(), votes=False)
        except EtcdUnavailable:  # they may wait for this one
            return False
        if removed:
            self._say(f"etcd's member {own.name} was removed while this host was away: its data are set aside")
        return removed

    def _begin_new_run(self, data: Path) -> None:
        """Sets aside the data of an earlier etcd whose versions are gone, and the step records and the initial model of
        its run: with an empty etcd this is a new run, and assignments are counted from 1 again."""
        self._set_aside(data)
        self.singletons.clear()
        if not self.named:
            self._set_aside(self._job.steps, self._job.faults, self._job.model)
        self._new_data = data

    def _set_aside(self, *paths: Path) -> None:
        for path in paths:
            if aside := kept_state.set_aside(path):
                self._say(f"{path.name} of an earlier run is now {aside}")

    def _start_etcd(self, kept: EtcdMember | None, others: Sequence[str], *, required: bool) -> str:
        """Starts this host's member of etcd, and returns its endpoint. ``kept``: how it was started before. ``others``:
        endpoints of the other members. ``required``: whether no other ports than those before will do."""
        binary = self._etcd_binary()
        attempts = 1 if required else 3  # another process may take a port that was free
        for attempt in range(attempts):
            if attempt and kept is not None:
                kept = kept.replace(endpoint="", peer_port=0)
            member = self._with_free_ports(kept, required=required)
            endpoint = self._spawn_etcd(binary, member)
            try:
                self._await_etcd(endpoint, others)
                return endpoint
            except DeadlineExceeded:
                self._stop([r for r in self.services.all() if r.name == self._etcd_service])
                if attempt == attempts - 1:
                    raise
        raise AssertionError("unreachable")

    def _etcd_binary(self) -> Path:
        binary = etcd_server.find_binary()
        if why := etcd_server.objection(etcd_server.version(binary)):
            self._say(f"warning: {binary}: {why}")
        return binary

    def _with_free_ports(self, kept: EtcdMember | None, *, required: bool) -> EtcdMember:
        """The member with the ports that it had; with others where another process has taken one, unless those are
        ``required``. Raises PreflightFailed."""
        host = self.host.address
        member = kept or EtcdMember(name=self._etcd_service)

        def usable(port: int, what: str) -> int:
            try:
                if port:
                    require_port_free(host, port, setting=f"the port of this host's etcd for {what}")
            except PreflightFailed as e:
                if required:
                    raise
                self._say(f"warning: {e.message}; etcd gets another one")
                port = 0
            return port or free_port(host)

        return member.replace(endpoint=host_port(host, usable(port_of(member.endpoint), "clients")),
                              peer_port=usable(member.peer_port, "its other members"))

    def _spawn_etcd(self, binary: Path, member: EtcdMember) -> str:
        """Starts a member, and returns its endpoint."""
        member.save(self.paths)
        self._spawn(self._etcd_service, etcd_server.command(
            binary, self.paths.etcd, self.host.address, port_of(member.endpoint), member.peer_port, name=member.name,
            cluster=member.initial_cluster, joins=bool(member.initial_cluster), quota_bytes=self.cfg.etcd.quota_bytes,
            tls=self.host.tls(self.paths)), url=member.endpoint, env={"GOGC": "50"})
        return member.endpoint

    def _await_etcd(self, endpoint: str, others: Sequence[str]) -> None:
        """Returns when this host's member of etcd answers. Raises DeadlineExceeded; EtcdUnavailable where it runs, and
        waits for a majority of the others: it then runs on, since they wait for it too."""
        try:
            self._await("etcd", self._etcd_service, partial(self.etcd_healthy, endpoint), self.cfg.etcd.start_timeout_s)
        except DeadlineExceeded as e:
            if not others or not self.services.runs(self._etcd_service):
                raise
            self._kept.add(self._etcd_service)
            raise EtcdUnavailable(
                f"this host's member of etcd runs, and waits for a majority of the others: {', '.join(others)}",
                hint="start the hosts that have them, then this command again") from e

    # -- etcd of several members -------------------------------------------------------------------------------------
    def _start_known_member(self, running: set[str], endpoints: Sequence[str]) -> EtcdMember | None:
        """Starts the member of etcd of a host that has joined with it before, unless it runs; also one that is to be
        removed, which may be part of the majority for that. Returns it; None where this host has none yet, or its data
        are gone, or it was removed. ``endpoints``: of all members, as far as they are known."""
        member = EtcdMember.of(self.paths)
        if (self.cfg.etcd.endpoints or member is None or member.removed
                or not etcd_server.has_data(self.paths.etcd)):
            return None
        others = [endpoint for endpoint in endpoints if endpoint != member.endpoint]
        if self._was_removed(member, others):
            self._forget_member()
            return None
        if self._etcd_service not in running:
            member = self._with_free_ports(member, required=True)
            self._spawn_etcd(self._etcd_binary(), member)
        self._kept.add(self._etcd_service)
        self._await_etcd(member.endpoint, others)
        return member

    def _join_etcd(self, etcd: EtcdClient, member: EtcdMember | None, *, asked: bool) -> None:
        """Has etcd take in a member on this host, where it is to have one and does not (``member``), and starts it; or
        takes off the one that it is to have no more. ``asked``: whether this command says that it is to have one; else
        one that was removed stays so."""
        kept = EtcdMember.of(self.paths)
        if self.cfg.etcd.endpoints:
            if self.host.etcd:
                raise ConfigError("this cluster's etcd is run by someone else (etcd.endpoints)",
                                  hint="leave --etcd out: its members are not this project's")
        elif not self.host.runs_etcd:
            if kept is not None and not kept.removed:
                for known in etcd_member.of_host(kept, kept.peer_url(self.host), etcd.members()):
                    etcd.remove_member(known)
                self._forget_member()
        elif member is None and (asked or kept is None or not kept.removed):
            if kept is not None and kept.removed:
                kept = EtcdMember(name=kept.name)
            member = self._with_free_ports(kept, required=False)
            self._say("adding a member to etcd")
            member.save(self.paths)  # the next start asks for this one, not for a second
            member = etcd_member.admit(etcd, member, member.peer_url(self.host))
            self._set_aside(self.paths.etcd)
            self._await_etcd(self._spawn_etcd(self._etcd_binary(), member), ())
            if why := etcd_member.advice(etcd.members()):
                self._say(f"warning: {why}")

    def keep_member(self, etcd: EtcdClient) -> None:
        """Has the cluster's own etcd know this host's member of it as it is, and this host know the members of etcd:
        they come and go with hosts. Nothing while another command starts or stops the cluster. Raises ConfigError,
        EtcdUnavailable and OSError."""
        own = EtcdMember.of(self.paths) if self._has_member else None  # before the members, which may be others then
        members = etcd.members()
        is_member = own is None or etcd_member.keep(
            etcd, own, own.peer_url(self.host), members, votes=self.etcd_healthy(own.endpoint) and
            etcd_member.may_vote(own, time.time(), self.cfg.etcd.follow_members_s))
        endpoints = etcd_member.endpoints_of(members)
        with contextlib.suppress(DeadlineExceeded), self._locked(0.0):
            if (info := self._info()) is None:
                return
            if own is not None and EtcdMember.of(self.paths) != own:
                return  # another command has changed it meanwhile
            if not is_member:
                log.warning("this host's member of etcd was removed: it ends, and its data are set aside")
                self._forget_member()
            elif own is not None and not own.id:
                self._note_id(own, members)
            if endpoints and set(endpoints) != set(info.etcd_endpoints):
                log.info("the members of etcd are now %s", ", ".join(endpoints))
                info = dataclasses.replace(info, etcd_endpoints=endpoints)
                info.save(self.paths.info)
                self._save_join_file(info)

    def _note_id(self, own: EtcdMember, members: Sequence[ClusterMember]) -> None:
        for known in members:
            if known.name == own.name:
                own.replace(id=known.id).save(self.paths)

    def _forget_member(self) -> None:
        """Ends this host's member of etcd, which is none any more, and sets its data aside. First it is noted: without
        data and without that note, the host would begin another etcd."""
        own = EtcdMember.of(self.paths) or EtcdMember(name=self._etcd_service)
        own.replace(removed=True).save(self.paths)
        self._stop([r for r in self.services.all() if r.name == self._etcd_service])
        self._set_aside(self.paths.etcd)

    def _start_coordinators(self, running: set[str], endpoints: list[str]) -> dict[str, str]:
        """Starts the replicas that are missing; returns the URL of each replica, by name."""
        urls = {r.name: r.url for r in self.services.running()}
        for name in self._replicas:
            if name not in running or name not in urls:  # or it has just ended
                urls[name] = self._start_coordinator(name, endpoints)
        return {name: urls[name] for name in self._replicas}

    @property
    def _replicas(self) -> list[str]:
        """Names of the coordinators of this host, of which the i-th has the i-th of ``coordinator.ports``."""
        if self.host.joined:
            return [f"coordinator-{self.host.name}"] if self.host.coordinator else []
        return [f"coordinator-{i}" for i in range(self.cfg.coordinator.replicas)]

    def _start_coordinator(self, name: str, endpoints: list[str]) -> str:
        """Starts one replica; returns its URL."""
        cfg = self.here.coordinator
        port = cfg.ports[self._replicas.index(name)] if cfg.ports else self._last_port(name, cfg.host)
        url = advertised(cfg, port, endpoints)
        self._spawn(name, processes.python(
            "elastic_rl.coordinator.service", *self._common(self.paths.settings, endpoints, self.paths.logs),
            "--replica", name, "--port", str(port), "--tokens", str(self.paths.tokens)), url=url)
        return url

    def _last_port(self, name: str, host: str) -> int:
        """The port that a service had; a free one where it had none or another has taken it."""
        return self._known_port(name, host) or free_port(host)

    def _known_port(self, name: str, host: str) -> int:
        """The port that a service had, whose clients know it, also before the cluster was taken down; 0 where it had
        none or another process has taken it."""
        record = self.services.get(name)
        port = port_of(record.url if record is not None else self._urls_before.get(name, ""))
        try:
            if port:
                require_port_free(host, port, setting=f"the port of {name}")
        except PreflightFailed as e:
            self._say(f"warning: {e.message}; {name} gets another one")
            return 0
        return port

    @property
    def _urls_before(self) -> dict[str, str]:
        """Where the coordinators were before the cluster was taken down, by service."""
        try:
            info = ClusterInfo.load(self.paths.stopped)
        except ConfigError:
            info = None
        if info is None:
            return {}
        return dict(zip(self._replicas, info.coordinators, strict=False))

    def _await_coordinators(self, urls: dict[str, str]) -> None:
        for name, url in urls.items():
            self._await(name, name, partial(_answers, f"{url}/healthz", self.here.coordinator.tls_ca), _START_TIMEOUT_S)

    def _start_dcs_node(self, running: set[str], endpoints: list[str]) -> int | None:
        """Starts the job's DCS node; returns its pid, or None where it is running."""
        dcs, host = self.cfg.dcs, self._dcs_host
        if self.node in running:
            return None
        port = dcs.port or self._last_port(self.node, host)
        return self._spawn(self.node, processes.python(
            "elastic_rl.dcs.node.service", *self._common(self._job.submitted_settings, endpoints, self._job.logs),
            "--id", self.host.node, f"--dcs.host={host}", f"--dcs.port={port}",
            f"--dcs.disk_dir={dcs.disk_dir or self._job.disk}"),
            url=host_port(dcs.advertise_host or host, dcs.advertise_port or port))

    @property
    def _dcs_host(self) -> str:
        """Where the job's DCS node listens."""
        return self.host.listens_at(self.cfg.dcs.host)

    def _common(self, settings: Path, endpoints: list[str], logs: Path) -> list[str]:
        """Options of every service but etcd. ``logs``: the folder whose files it keeps within their bounds."""
        tls = self.host.tls(self.paths)
        return ["--config", str(settings), "--etcd", ",".join(endpoints), "--secret", str(self.paths.secret),
                *(("--tls", str(tls.folder)) if tls else ()), "--logs", str(logs), *self._options_here()]

    def _options_here(self) -> Iterator[str]:
        """Options for the settings that hold on this host alone, on top of the stored ones."""
        stored, here = (cfg.model_dump(mode="json", include=set(CLUSTER_SECTIONS)) for cfg in (self.cfg, self.here))
        for section, values in here.items():
            yield from (f"--{section}.{key}={json.dumps(value)}" for key, value in values.items()
                        if value != stored[section][key])

    def _await_dcs_node(self, endpoints: list[str], pid: int) -> None:
        """Returns when the node has registered. A killed predecessor's record stays until its lease ends, so the new
        one is recognised by its pid."""
        etcd = EtcdClient.from_config(self.here.etcd, endpoints)
        key = Keys(self.cfg.job).dcs_node(self.host.node)
        try:
            self._await("the DCS node", self.node,
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
                                  hint=self._restart_hint)
        cluster_secrets.write_secrets(self.paths, self._say)
        if not self.named:
            engine_key_file(self.cfg)

    def put_job_record(self, endpoints: list[str], *, resubmit: bool = True, reseal: bool = False,
                       token: Sequence[Compare] = ()) -> None:
        """Writes the record of the job, with which the coordinators take it up. ``resubmit``: also where there is one
        with other settings; ``reseal``: also where these were sealed with another secret than the cluster has now;
        ``token``: the fencing token of a writer that may be stale. Raises Fenced, PreflightFailed where the settings
        were sealed with another secret and coordinators run, ConfigError and EtcdUnavailable."""
        keys = ClusterKeys(self.cfg.cluster_name)
        with EtcdClient.from_config(self.here.etcd, endpoints) as etcd:
            try:
                job_settings.submit(etcd, keys, self.cfg, ClusterSecret.read(self.paths.secret), resubmit=resubmit,
                                    reseal=reseal, token=token)
            except job_settings.OtherSecret as e:
                raise PreflightFailed(f"{self.paths.secret} is not the secret that the cluster's services run with",
                                      hint=f"put that one back, or {self._restart_hint}") from e

    def _await_job(self, urls: Mapping[str, str], endpoints: list[str], node_pid: int | None, *, resubmit: bool,
                   reseal: bool = False) -> None:
        """Returns when the job's DCS node has registered, unless it was there (None), the job's record is written, and
        each coordinator has taken the job up."""
        if node_pid is not None:
            self._await_dcs_node(endpoints, node_pid)
        self.put_job_record(endpoints, resubmit=resubmit, reseal=reseal)  # when nothing can be refused any more
        token = read_token(self.paths.credentials, Role.VIEWER)
        for name, url in urls.items():
            self._await(f"job {self.cfg.job} on {name}", name, partial(
                _answers, url + job_path(self.cfg.job), self.here.coordinator.tls_ca, token), _START_TIMEOUT_S)

    def _spawn(self, name: str, cmd: list[str], *, url: str = "", env: Mapping[str, str | None] | None = None,
               cwd: Path | None = None) -> int:
        self._say(f"starting {name}")
        return self.services.start(name, cmd, log=self.log_of(name), url=url, cwd=cwd,
                                   env={**(env or {}), OWNER_ENV: str(self.dir)})

    def log_of(self, service: str) -> Path:
        """The log of a service, or of a singleton, by the name of its file."""
        job = job_of_driver(unquote(service))
        return JobPaths.of(self._config_of(job)).log("train") if job else self.paths.log(service)

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
        with self.paths.services_lock.open("w", encoding="utf-8") as lock:
            if not file_lock.taken(lock, timeout_s=timeout_s):
                raise DeadlineExceeded(f"another command is starting or stopping the services in {self.dir}",
                                       hint="wait for it to end, then try again")
            yield

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Makes this process the one that trains the job within the block. Raises ConfigError while another one does.
        """
        self._make_folder(self._job.private)
        path = self._job.train_lock
        with path.open("w", encoding="utf-8") as lock:
            if file_lock.is_held(path) or not file_lock.taken(lock, timeout_s=file_lock.READER_S):
                raise self._trained_already()
            yield

    @contextlib.contextmanager
    def in_foreground(self) -> Iterator[None]:
        """Makes this process the one whose end ends what runs here, within the block. Raises ConfigError while another
        one is that: the first of the two to end would take the cluster from under the other."""
        self._make_folder(self.dir)
        path = self.paths.foreground_lock
        with path.open("w", encoding="utf-8") as lock:
            if file_lock.is_held(path) or not file_lock.taken(lock, timeout_s=file_lock.READER_S):
                pids = ", ".join(map(str, file_lock.holders(path)))
                raise ConfigError(f"another command keeps cluster {self.cfg.cluster_name} in its foreground" + (
                    f", process {pids}" if pids else ""), hint="end that one first, which ends what runs here; or "
                    "`elastic-rl up` without --foreground starts what of the cluster does not run")
            yield

    @contextlib.contextmanager
    def owned(self) -> Iterator[bool]:
        """Makes this process the owner of the cluster within the block. The host agent takes the cluster down when its
        owner has ended without leaving the block, as by kill -9. Yields whether the cluster was up before, and not
        abandoned. Raises ConfigError while another process owns it, or the job's run is on it."""
        kept_state.require_same_cluster(self.cfg)
        self._make_folder(self.dir)
        path = self.paths.owner_lock
        with contextlib.ExitStack() as held:
            with self._locked(_LOCK_TIMEOUT_S):
                was_up = self.up_before and not self.abandoned
                # A run that is between two processes is one that goes on, as long as there is who starts it again.
                if file_lock.is_held(path) or self.run.pid or (
                        was_up and self.agents.running() and self.run.look().wanted):
                    raise self._trained_already()
                # The agent may see the file before its lock, but takes nothing down without the cluster's lock.
                lock = held.enter_context(path.open("w", encoding="utf-8"))
                if not file_lock.taken(lock, timeout_s=file_lock.READER_S):
                    raise self._trained_already()
            self._owns = True
            try:
                yield was_up
            finally:
                self._owns = False
                # The file stays where the cluster was to be taken down and was not: the agent takes it down then.
                if was_up or not self.paths.info.exists():
                    path.unlink(missing_ok=True)

    @property
    def abandoned(self) -> bool:
        """Whether the cluster had an owner, which has ended without taking it down."""
        return self.paths.owner_lock.exists() and not file_lock.is_held(self.paths.owner_lock)

    def _disown(self) -> None:
        """Forgets an owner that has ended: the cluster is now that of the command that starts or stops it."""
        if self.abandoned:
            self.paths.owner_lock.unlink(missing_ok=True)

    def down_if_abandoned(self) -> bool:
        """Ends what a command has left that was killed: a cluster whose owner has ended, with its run, and the rest
        of one that was being stopped. Returns whether the cluster is down."""
        if self.paths.info.exists() and not self.abandoned:  # as in nearly every pass of the agent: without the lock
            return False
        try:
            with self._locked(0.0):
                if self.abandoned or (self.taken_down and self.services.running()):
                    self._say("the process that owned the cluster, or the one that stopped it, has ended")
                    self._down(purge=False, suspends=self.suspended)
                return not self.paths.info.exists() and not self.services.running()
        except DeadlineExceeded:  # a command is starting or stopping it
            return False
        except FileNotFoundError:  # somebody has removed its folder
            return True

    # -- the run --------------------------------------------------------------------------------------------------
    def submit(self, *, faults: bool = False, from_job: str = "", checked: bool = False) -> None:
        """Submits the run of the job, with this process's environment and working folder. The leader gives it its turn.
        ``checked``: as of ``Submission``.

        Raises ConfigError while the job has a run, or where this process's environment is too large, and
        EtcdUnavailable where the cluster is not up."""
        with preflight_writes(self.dir), self._locked(_LOCK_TIMEOUT_S):
            info = self.connect()
            self._require_here()
            if self.named and self.services.get(self.node) is None:
                raise EtcdUnavailable(f"job {self.cfg.job} is not on cluster {self.cfg.cluster} any more",
                                      hint="another command has taken it off; try again")
            with self.etcd(info) as etcd:
                if (reading := self.run.read_from(etcd)).wanted:
                    raise self._trained_already()
                try:  # one that has ended exits within milliseconds
                    wait_until(lambda: not self.run.pid, timeout_s=_EXIT_GRACE_S if reading.ended else 0.0,
                               what="the end of the run before")
                except DeadlineExceeded as e:
                    raise self._trained_already() from e
                self._disown()
                self.run.submit(etcd, Submission.of_this_process(self.cfg, faults=faults, from_job=from_job,
                                                                 checked=checked),
                                ClusterSecret.read(self.paths.secret), host=self.host.name)

    def etcd_healthy(self, endpoint: str, *, timeout_s: float = 0.5) -> bool:
        """Whether the member of the cluster's own etcd at ``host:port`` answers and has a leader. Raises ConfigError
        for a certificate that cannot be used."""
        return etcd_server.healthy(endpoint, Access.from_config(self.here.etcd), timeout_s=timeout_s)

    def etcd(self, info: ClusterInfo, **options: Any) -> EtcdClient:
        """A client of the cluster's etcd. This object may have been made by the location of the cluster alone, without
        the settings that say how to connect."""
        stored = cluster_settings.of_etcd(self.paths.settings, self.cfg.etcd)
        here = self.host.settings_here(self.cfg.model_copy(update={"etcd": stored}), self.paths.tls)
        return EtcdClient.from_config(here.etcd, info.etcd_endpoints, **options)

    def _etcd_if_up(self) -> EtcdClient | None:
        """A client of the cluster's etcd; None while the cluster is not up, or nothing of it runs."""
        info = self._info()
        crashed = info is not None and info.own_etcd and not (
            self.services.runs(self._etcd_service) or self.agents.running())
        if info is None or crashed:
            return None
        return self.etcd(info, retry_budget_s=_READ_BUDGET_S)

    def _trained_already(self) -> ConfigError:
        options = kept_state.options(self.cfg)
        return ConfigError(f"job {self.cfg.job} is already being trained by another process",
                           hint=f"`elastic-rl attach {options}` shows it, `elastic-rl stop {options}` stops it; or "
                                "name another job with --job=NAME")

    def stop_run(self) -> bool:
        """Ends the run of the job, which writes its report; the next one resumes the job. A run that does not end in
        time is killed. Returns whether there was one to end. Raises PreflightFailed for one that runs elsewhere,
        EtcdUnavailable where etcd does not answer, and DeadlineExceeded where the run is to be killed while another
        command starts or stops the services."""
        self._require_own_folder()
        kept_state.require_same_cluster(self.cfg)
        if self._info() is None:
            return self._end_run()
        try:
            with self.etcd(self.connect()) as etcd:
                wanted = self.run.withdraw(etcd)
                if wanted or self.run.read_from(etcd).stopping:
                    commit_s = self.run.read_from(etcd).stop_s
                    self._say(f"stopping the run of job {self.cfg.job}: it commits what it has trained, which may take "
                              f"{commit_s:g} s")
                    with contextlib.suppress(DeadlineExceeded):
                        wait_until(lambda: self.run.read_from(etcd).over, timeout_s=commit_s + _STOP_RUN_S,
                                   what="the end of the run")
        except EtcdUnavailable as e:
            e.hint = f"{e.hint}; without etcd, `elastic-rl down {kept_state.cluster_options(self.cfg)}` ends the run"
            raise
        return self._end_run() or wanted

    def _withdraw_run(self) -> float:
        """Has etcd say that the run on this host was stopped, so that it commits what it has trained, and its end is
        no fault. Where etcd does not take that, the run writes it as soon as etcd does. Returns the seconds that the
        commit may take; 0 where nothing runs here."""
        if not self.run.pid:
            return 0.0
        try:
            with self.etcd(self.connect(), retry_budget_s=_WITHDRAW_S) as etcd:
                self.run.withdraw(etcd)
                reading = self.run.read_from(etcd)
        except (ConfigError, Conflict, EtcdUnavailable, PreflightFailed) as e:
            commit_s = self._stop_timeout_s()
            self._say(f"warning: that job {self.cfg.job} is stopped cannot be recorded: {e.message}; its run commits "
                      f"what it has trained if etcd answers within {commit_s:g} s")
            return commit_s
        return reading.stop_s if reading.record is not None else self._stop_timeout_s()

    def _stop_timeout_s(self) -> float:
        """``trainer.stop_timeout_s`` of the run, by the settings in the job's folder: this object may have been made by
        the location of the cluster alone."""
        with contextlib.suppress(ConfigError, PreflightFailed):
            if self._job.settings.exists():
                return cluster_settings.on_top(self._job.settings, {}).trainer.stop_timeout_s
        return self.cfg.trainer.stop_timeout_s

    def _end_run(self, *, locked: bool = False, goes_on: bool = False, commit_s: float = 0.0) -> bool:
        """Ends the process of a run that was stopped, and what its compute plane has left; returns whether there was
        one. ``locked``: this process holds the cluster's lock. ``goes_on``: the run was not stopped, and
        goes on later, or on another host. ``commit_s``: seconds that it may take to commit what it has trained."""
        record = self.singletons.get(quote(self.run.name, safe=""))
        if record is None or not record.running:
            return not locked and self._sweep_compute()
        # By its pid where its file names it: a later run, which another command may start now, is none of ours. One
        # that is just being started, or runs elsewhere, sees that it was stopped.
        process = None
        with contextlib.suppress(psutil.NoSuchProcess):
            if record.named:
                process = psutil.Process(record.pid)
        if goes_on and process is not None:
            processes.stop(process.pid, grace_s=_EXIT_GRACE_S, descendants=False)
        try:
            wait_until(lambda: not (self.run.pid if process is None else runs(process)),
                       timeout_s=commit_s + _STOP_RUN_S if locked else _EXIT_GRACE_S, what="the end of the run")
        except DeadlineExceeded as e:
            if process is None:
                raise PreflightFailed(f"the run of job {self.cfg.job} does not end where it runs",
                                      hint="run the command on the machine, or in the container, where it runs") from e
            with contextlib.nullcontext() if locked else self._locked(_DOWN_LOCK_TIMEOUT_S):
                # Not its descendants: the host agent may be one of them, if the run has started it again.
                processes.stop(process.pid, grace_s=0.0, descendants=False)
        if not locked:  # it may have been killed before it had ended its compute plane
            self._sweep_compute()
        return True

    def _sweep_compute(self) -> bool:
        """Ends what is left of the job's compute plane, unless another command has started a run since; returns whether
        there was something."""
        if not self.paths.services_lock.exists():
            return False
        with self._locked(_DOWN_LOCK_TIMEOUT_S):
            return not self.run.pid and bool(leftovers.sweep(self._job))

    # -- the host agent -------------------------------------------------------------------------------------------
    def _start_agent(self, name: str) -> None:
        """Starts one of the two processes of the host agent, of which one waits until the other has ended."""
        self.agents.start(name, processes.python(
            "elastic_rl.host.agent", "--name", name, *(() if self.named else (f"--job={self.cfg.job}",)),
            *self.location), log=self.paths.log(name), env={OWNER_ENV: str(self.dir)})

    def _stop_agents(self) -> None:
        """Ends the processes of the host agent, but for this one, and none of the services, which are their children.
        """
        for record in self.agents.running():
            if record.pid and record.pid != os.getpid():
                processes.stop(record.pid, grace_s=_EXIT_GRACE_S, descendants=False)
            self.agents.forget(record.name)

    @property
    def location(self) -> list[str]:
        """Options that say where the cluster is, for a process of it."""
        return [f"--run_dir={self.cfg.run_dir}", *([f"--cluster={self.cfg.cluster}"] if self.named else [])]

    # -- the jobs -------------------------------------------------------------------------------------------------
    @property
    def jobs(self) -> list[str]:
        """The jobs that are on the cluster."""
        if not self.named:
            return [self.cfg.job]  # also before it has any service
        return sorted({*(job_of_node(r.name) for r in self.services.all()),
                       *(job_of_driver(unquote(r.name)) for r in self.singletons.running())} - {""})

    def of_job(self, job: str) -> Cluster:
        """The cluster with another job, by its location alone."""
        if job == self.cfg.job:
            return self
        found = Cluster(self._config_of(job), say=self._say)
        found._host = self._host
        return found

    def _config_of(self, job: str) -> Config:
        return self.cfg.model_copy(update={"job": job})

    def with_settings_of(self, job: str) -> Cluster:
        """The cluster with a job and the settings that this was last started with. Raises ConfigError."""
        if not self.named:
            return self
        location = {"job": job, "run_dir": str(self.cfg.run_dir), "cluster": self.cfg.cluster}
        path = JobPaths.of(self._config_of(job)).submitted_settings
        cfg = cluster_settings.on_top(path, location)
        return Cluster(cluster_settings.with_sections_of_cluster(self.paths.settings, cfg, {}), say=self._say)

    # -- for the host agent: the jobs that etcd lists -------------------------------------------------------------
    def serve(self, settings: Config, record: JobRecord) -> bool:
        """Starts the DCS node of a job of the cluster on this host, unless it is there. What an earlier job of the name
        has left here is set aside. ``settings``: those of the job, which the next start of the node follows. False,
        with nothing done, while another command starts or stops the cluster. Raises as ``admit`` does for what this
        host cannot have."""
        if record.host != self.host.name:  # these are for the host that it was submitted on
            defaults = type(settings.dcs)().model_dump(include=_OF_ONE_HOST)
            settings = settings.model_copy(update={"dcs": settings.dcs.model_copy(update=defaults)})
        job = Cluster(settings.model_copy(update={"run_dir": self.cfg.run_dir, "cluster": self.cfg.cluster}),
                      say=self._say)
        try:
            with self._locked(0.0):
                if (info := self._info()) is None:
                    return False
                is_new = self.services.get(job.node) is None
                if is_new:
                    job._make_folder(job._job.private)
                    kept_state.require_same_cluster(job.cfg)
                    job._check_node(set())
                    job._become(record.id)
                    replace_file(job._job.cluster_name, self.cfg.cluster, durable=True)
                if is_new or record.host != self.host.name:  # else `admit` has stored them
                    cluster_settings.save(job.cfg, job._job.submitted_settings)
                if is_new:
                    job._start_dcs_node(set(), info.etcd_endpoints)
                return True
        except DeadlineExceeded:
            return False

    def _become(self, job_id: str) -> None:
        """Has the folder of the job be that of the one with this id."""
        path = self._job.job_id
        before = path.read_text(encoding="utf-8") if path.exists() else job_id
        if before != job_id:
            self._set_aside(kept_state.chunks(self.cfg), self._job.steps, self._job.faults, self._job.model)
        replace_file(path, job_id, durable=True)

    def stop_serving(self, job: str, is_gone: Callable[[], bool]) -> None:
        """Ends the DCS node of a job that is no more on the cluster, and keeps its chunks. ``is_gone``: asked once no
        command can be adding the job; raises EtcdUnavailable."""
        with contextlib.suppress(DeadlineExceeded), self._locked(0.0):
            if is_gone() and (record := self.services.get(node_service(job))):
                self._stop([record])

    def _ray_worker(self, head_address: str, epoch: int) -> RayNode:
        """This host's worker of the job's Ray, whose head is on another host."""
        name = ray_worker_service(self.cfg.job)
        return RayNode(self.cfg, epoch, self.services, name, ray_node.WORKER, self._job.ray_joined,
                       log=self.log_of(name), gcs=lambda: head_address, address=ray_address(self.host.address),
                       host=self.host.name)

    def join_ray(self, job: str, head: RayHead) -> RayNode | None:
        """Has this host run a worker of the Ray of a job that it serves, in the place of one of another Ray, and
        returns it. None while another command starts or stops the cluster. Raises ConfigError and PreflightFailed."""
        found, record = self.with_settings_of(job), self.services.get(ray_worker_service(job))
        if record is not None and (record.generation, record.url) == (head.epoch, head.address):
            return found._ray_worker(head.address, head.epoch)
        try:
            with self._locked(0.0):
                if self._info() is None:
                    return None
                found._end_ray_worker()
                worker = found._ray_worker(head.address, head.epoch)
                self._say(f"starting {worker.name}")
                worker.launch()
                return worker
        except DeadlineExceeded:
            return None

    def restart_ray(self, job: str) -> None:
        """Ends this host's worker of the Ray of a job, which does not work: the agent starts it again."""
        with contextlib.suppress(DeadlineExceeded), self._locked(0.0):
            if record := self.services.get(ray_worker_service(job)):
                self.of_job(job)._ray_worker(record.url, record.generation).end()

    def leave_ray(self, job: str, *, timeout_s: float = 0.0) -> None:
        """Ends this host's worker of the Ray of a job, with all that is on it. ``timeout_s``: longest wait for another
        command that starts or stops the cluster."""
        if self.services.get(ray_worker_service(job)) is not None:
            with contextlib.suppress(DeadlineExceeded), self._locked(timeout_s):
                self.of_job(job)._end_ray_worker()

    def _end_ray_worker(self) -> None:
        """Ends this host's worker of the job's Ray. The caller holds the cluster's lock. The files are removed before
        the record, so that a process that is killed in between leaves a record of them."""
        if record := self.services.get(ray_worker_service(self.cfg.job)):
            worker = self._ray_worker(record.url, record.generation)
            worker.end()
            self._sweep_other_run()
            worker.stop()

    def _sweep_other_run(self) -> None:
        """Removes what a run that is on another host has left here."""
        if not self.run.pid:
            leftovers.sweep(self._job)

    # -- one service ----------------------------------------------------------------------------------------------
    @property
    def _restart_hint(self) -> str:
        where = kept_state.cluster_options(self.cfg)
        return f"`elastic-rl down {where}`, then `elastic-rl up {where}`"

    def revive(self, name: str) -> bool:
        """Starts a service, or a process of the host agent, again that has ended by itself, on its data and its port,
        and does not wait until it answers. False, with nothing started, where it runs, where it is no service of this
        cluster any more (``down``), and while another command starts or stops the cluster.

        Raises PreflightFailed: its data are gone, its port is taken, the disk takes nothing, processes of this cluster
        run without a record.
        """
        try:
            with self._locked(0.0):
                info = self._info()
                if name in AGENTS:
                    if info is None or self.agents.runs(name):
                        return False
                    with preflight_writes(self.dir):
                        self._start_agent(name)
                    return True
                record = self.services.get(name)
                if info is None or record is None or record.running:
                    return False
                self.services.end_leftovers(name)
                self._require_records()
                with preflight_writes(self.dir):
                    return self._revive(record, info)
        except (DeadlineExceeded, FileNotFoundError):  # the lock is held; or the cluster's folder is gone
            return False

    def _revive(self, record: ServiceRecord, info: ClusterInfo) -> bool:
        if record.name == self._etcd_service:
            data = self.paths.etcd
            if not etcd_server.has_data(data):  # an empty etcd would tell the services that there are no versions
                raise PreflightFailed(f"the data of this cluster's etcd in {data} are gone",
                                      hint=self._restart_hint)
            if etcd_server.data_in_use(data):
                raise PreflightFailed(f"an etcd without a record runs on {data}", hint=self._restart_hint)
            member = EtcdMember.of(self.paths) or EtcdMember(  # of a start by an earlier release
                name=record.name, endpoint=record.url)
            self._spawn_etcd(etcd_server.find_binary(), self._with_free_ports(member, required=True))
        elif (job := job_of_node(record.name)) in self.jobs:
            found = self.with_settings_of(job)
            if self.named:  # its sections may be others since
                cluster_settings.save(found.cfg, found._job.submitted_settings)
            found._start_dcs_node(set(), info.etcd_endpoints)
        elif job := job_of_ray_worker(record.name):
            found = self.with_settings_of(job)
            if found.run.pid:
                return False  # the run is here now, and has a worker of its own
            found._sweep_other_run()
            found._ray_worker(record.url, record.generation).launch()
        elif record.name in self._replicas:
            i = self._replicas.index(record.name)
            url = self._start_coordinator(record.name, info.etcd_endpoints)
            if info.coordinators[i:i + 1] != [url]:
                urls = [*info.coordinators[:i], url, *info.coordinators[i + 1:]]
                info = dataclasses.replace(info, coordinators=urls)
                info.save(self.paths.info)
                self._save_join_file(info)
        else:
            return False
        return True

    # -- down ---------------------------------------------------------------------------------------------------
    def down(self, *, purge: bool = False) -> list[str]:
        """Ends every process of the cluster and its jobs, the runs first and etcd last, and removes their shared memory
        and the files with the secrets of the compute plane. The state of the jobs stays (``kept_state``), and so does
        the cluster's secret, unless ``purge`` deletes them, for a cluster of the job's own. Returns the names of what
        was running. Raises ConfigError where the folder cannot be one, and PreflightFailed where it is not this user's,
        and for services that run elsewhere."""
        return self._take_down(purge=purge)

    def suspend(self) -> list[str]:
        """Takes the cluster down as ``down`` does, but stops no run: each goes on from its newest committed state with
        the next ``up``, as after a reboot, or on another host of the cluster once this one is lost. Where the cluster
        is down already, its runs stay as they are."""
        return self._take_down(suspends=True)

    def _take_down(self, *, purge: bool = False, suspends: bool = False) -> list[str]:
        if in_the_way := next((p for p in (self.dir, *self.dir.parents) if p.exists() and not p.is_dir()), None):
            raise ConfigError(f"{in_the_way} is not a folder, so no cluster is below it",
                              hint="name the run_dir that the job was started with")
        if purge:
            kept_state.require_same_cluster(self.cfg)
        self._require_own_folder()
        try:
            self._host = self.host
        except ConfigError as e:  # what runs is to be ended all the same
            self._say(f"warning: {e.message}")
            self._host = LocalHost(name=host_name())
        if not self.dir.is_dir():
            return self._down(purge, suspends)
        self._require_here()
        with contextlib.ExitStack() as stack:
            try:
                stack.enter_context(self._locked(_DOWN_LOCK_TIMEOUT_S))
            except DeadlineExceeded as e:
                self._say(f"warning: {e.message}: stopping the services all the same")
                self._stop_agents()  # which would start again what is stopped
            return self._down(purge, suspends)

    def _down(self, purge: bool, suspends: bool) -> list[str]:
        jobs = [self.of_job(job) for job in self.jobs]
        goes_on = self.host.joined or suspends
        # First: afterwards nobody connects to the cluster any more.
        commit_s = {job.cfg.job: 0.0 if goes_on else job._withdraw_run() for job in jobs}
        if not suspends:
            self.paths.suspended.unlink(missing_ok=True)
        elif self.paths.info.exists():  # before the cluster counts as down, so that no run takes that for its stop
            replace_file(self.paths.suspended, "", private=True, durable=True)
        if self.paths.info.exists():  # then nobody connects to it any more, and if this process is killed now, the host
            for job in jobs:  # agent does the rest; the runs see that they are to end, and no other is started
                with contextlib.suppress(OSError):  # somebody has removed the job's folder, or there is no room
                    job._job.unsaved.touch()
            self.paths.info.replace(self.paths.stopped)
        stopped = [job.run.name for job in jobs if job._end_run(
            locked=True, goes_on=self.host.joined or self.suspended, commit_s=commit_s[job.cfg.job])]
        stopped += [f"compute {pid}" for job in jobs for pid in leftovers.sweep(job._job)]
        services = self._stop(sorted(self.services.all(), key=lambda r: _down_order(r.name)))
        stopped += services
        for job in jobs:
            if services.get(job.node):  # it was not killed, now or before
                job._job.unsaved.unlink(missing_ok=True)
        self._stop_agents()
        if self.paths.heartbeats.exists():  # in /dev/shm
            shutil.rmtree(self.paths.heartbeats, ignore_errors=True)
        # A service has no record where someone has deleted its file.
        stopped += [f"stray {pid}" for pid in processes.sweep(str(self.dir), OWNER_ENV)]
        self.services.clear()
        self.singletons.clear()
        for job in jobs:
            job._unlink_segments()
            remove_secret_files(job._job)
        self._disown()
        if purge:
            kept_state.delete(self.cfg)
        return stopped

    def remove_job(self) -> list[str]:
        """Ends what runs of the job, which is on a cluster with a name, and deletes its state: its records in etcd, its
        chunks on this host, its settings. Returns the names of what was running. Raises EtcdUnavailable where the
        cluster is not up, whose etcd alone can delete the records, ConfigError for a job that is not on it, and
        otherwise as ``down``."""
        info = self.connect()
        if cluster_settings.cluster_of(self._job) != self.cfg.cluster:
            raise ConfigError(f"job {self.cfg.job} is not on cluster {self.cfg.cluster}",
                              hint="leave --cluster out: the job's own files say where it is")
        keys, job = ClusterKeys(self.cfg.cluster_name), self.cfg.job
        with EtcdClient.from_config(self.here.etcd, info.etcd_endpoints) as etcd:
            stopped = [self.run.name] if self.stop_run() else []
            # Not its assignment, which counts the generations of its driver.
            etcd.txn([], [Op.delete(key) for key in (keys.job(job), keys.job_state(job), keys.run_status(job),
                                                     keys.submission(job), keys.ray_head(job))])
            with self._locked(_LOCK_TIMEOUT_S):
                stopped += [f"compute {pid}" for pid in leftovers.sweep(self._job)]
                self._end_ray_worker()
                for record in self.services.all():
                    if record.name == self.node:
                        if record.running:
                            processes.stop(record.pid, grace_s=0.0, descendants=False)  # what it would save is deleted
                            stopped.append(record.name)
                        self.services.forget(record.name)
                self._unlink_segments()
                remove_secret_files(self._job)
            self._await_closed(info)  # else its leader would write records of it again
            etcd.delete_prefix(Keys(job).root)
            for key in (keys.run_status(job), keys.ray_head(job)):
                etcd.delete(key)  # a run that was just ending may have written it again
        kept_state.delete(self.cfg)
        return stopped

    def _await_closed(self, info: ClusterInfo) -> None:
        """Returns when no coordinator serves the job any more: one that is away finds no record of it."""
        token = read_token(self.paths.credentials, Role.VIEWER)

        def closed(url: str) -> bool:
            try:
                return _status(url + job_path(self.cfg.job), info.ca_file, token) == httpx.codes.NOT_FOUND
            except httpx.ConnectError:
                return True
            except httpx.HTTPError:
                return False

        wait_until(lambda: all(map(closed, info.coordinators)), timeout_s=_START_TIMEOUT_S, poll_s=0.2,
                   what=f"the coordinators to leave job {self.cfg.job}")

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
        stopped: dict[str, bool] = {}
        for are_nodes, group in itertools.groupby(records, key=lambda record: bool(job_of_node(record.name))):
            together = list(group)
            running = {record.name: record.pid for record in together if record.running}
            if are_nodes:  # side by side: each saves what it has in memory only, but they may share a disk
                in_time = processes.stop_all(running.values(), grace_s=min(SAVE_GRACE_S * len(running), _SAVES_S))
                stopped |= {name: pid in in_time for name, pid in running.items()}
            else:
                stopped |= {name: processes.stop(pid, grace_s=_EXIT_GRACE_S) for name, pid in running.items()}
            for record in together if forget else ():
                self.services.forget(record.name)
        return stopped

    def _unlink_segments(self) -> None:
        for segment in self.segments():
            if not leftovers.is_mapped(segment):
                segment.unlink(missing_ok=True)

    # -- reading ------------------------------------------------------------------------------------------------
    def connect(self) -> ClusterInfo:
        """The running cluster, with this job. Raises EtcdUnavailable when it is not up, and PreflightFailed when its
        folder is not this user's."""
        self._require_own_folder()
        info = ClusterInfo.load(self.paths.info)
        if info is None or (info.own_etcd and not self.services.running()):
            raise EtcdUnavailable(
                f"cluster {self.cfg.cluster!r} is not up under {self.dir}" if self.named else
                f"no cluster of job {self.cfg.job!r} is up under {self.dir}",
                hint=f"start it with `elastic-rl up {kept_state.cluster_options(self.cfg)}`, or name another "
                     f"--{'cluster' if self.named else 'job'}")
        return self._addressed(info)

    def _addressed(self, info: ClusterInfo) -> ClusterInfo:
        return dataclasses.replace(info, job=self.cfg.job)

    def segments(self) -> list[Path]:
        """Shared-memory files of this job. Another user, and whatever is no file, may have such a name there, too."""
        pattern = re.compile(rf"{PREFIX}{re.escape(self.cfg.job)}-{re.escape(self.host.node)}-[^-]+")
        return [p for p in SHM.glob(f"{PREFIX}{self.cfg.job}-*")
                if pattern.fullmatch(p.name) and stat.S_ISREG(leftovers.own_mode(p))]


def port_of(url: str) -> int:
    """The port of a URL or of ``HOST:PORT``; 0 where it has none."""
    port = url.rpartition(":")[2]
    return int(port) if port.isdigit() else 0


def _down_order(name: str) -> int:
    """First the coordinators (nothing is left to alert about), then the DCS node, then etcd."""
    if name.startswith("coordinator-"):
        return 1
    return 2 if job_of_node(name) else 3 if etcd_server.is_member(name) else 0


def _answers(url: str, ca_file: str, token: str = "") -> bool:
    try:
        return _status(url, ca_file, token) == httpx.codes.OK
    except httpx.HTTPError:
        return False


def _status(url: str, ca_file: str, token: str) -> int:
    """The HTTP status that is answered. Raises httpx.HTTPError."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return http_client.request("GET", url, timeout=1.0, headers=headers, verify=tls.trust(ca_file)).status_code


def last_message(log_file: Path) -> str:
    """The last line of a log that says something, shortened; of a JSON line its error or message."""
    lines = [line for line in tail(log_file).splitlines() if line.strip()]
    # A program in Go ends with the stacks of all its threads, below its reason, and its log has that with more words.
    at = next((i for i in reversed(range(len(lines))) if lines[i].startswith(("panic: ", "fatal error: "))), None)
    if at is not None and not any(line.startswith("{") for line in lines[at:]):
        lines = lines[:at + (not at or not lines[at - 1].startswith("{"))]
    last = lines[-1] if lines else "its log is empty"
    try:
        parsed = json.loads(last)
        last = str(parsed.get("error") or parsed.get("message") or parsed.get("msg") or last)
    except (json.JSONDecodeError, AttributeError):
        pass
    return last.strip().splitlines()[-1][:300] if last.strip() else "its log is empty"
