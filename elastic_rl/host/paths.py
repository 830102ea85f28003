"""Where everything is that this project keeps on a host: the only module that knows the layout of folders and files.

``ClusterPaths`` has the files of a cluster, ``JobPaths`` those of a job: a file belongs to what it describes, whichever
process writes it. Both are made from the settings, which name one folder, ``run_dir``. The layers below this package
(the coordinator, the DCS, and what these import) may not import this module: their callers pass the paths that they
need.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from elastic_rl.config import Config
from elastic_rl.dcs.storage.arena import SHM
from elastic_rl.net.tls import TlsFolder


@dataclass(frozen=True)
class ClusterPaths:
    """What belongs to the cluster: its services, their data, and the secret. Nobody but the owner may enter the folder.
    """

    folder: Path

    @classmethod
    def of(cls, cfg: Config) -> Self:
        return cls(named_clusters(cfg.run_dir) / cfg.cluster if cfg.cluster else JobPaths.of(cfg).private)

    @property
    def info(self) -> Path:
        """How to connect to the cluster (``ClusterInfo``), from its start until it is stopped."""
        return self.folder / "cluster.json"

    @property
    def stopped(self) -> Path:
        """What ``info`` is called while the cluster is stopped: its settings hold, and ``up`` continues with its data.
        """
        return self.folder / "stopped.json"

    @property
    def suspended(self) -> Path:
        """An empty file beside ``stopped`` that says that the runs of the cluster were not stopped: ``up`` resumes
        them."""
        return self.folder / "suspended"

    @property
    def settings(self) -> Path:
        """The settings that the services were started with."""
        return self.folder / "config.yaml"

    @property
    def etcd(self) -> Path:
        """Data of the etcd that ``up`` starts."""
        return self.folder / "etcd"

    @property
    def etcd_member(self) -> Path:
        """How this host starts its member of the cluster's own etcd (``EtcdMember``)."""
        return self.folder / "etcd_member.json"

    @property
    def services(self) -> Path:
        """Folder of the services' files (``ServiceFiles``)."""
        return self.folder / "services"

    @property
    def agents(self) -> Path:
        """Folder of the files of the host agent, which keeps the services running, and its standby."""
        return self.folder / "agents"

    @property
    def active_agent_lock(self) -> Path:
        """Lock of the process of the agent that is not the standby."""
        return self.agents / "active.lock"

    @property
    def agent_status(self) -> Path:
        """What the host agent says of itself and the services (``AgentStatus``)."""
        return self.folder / "agent.json"

    @property
    def incarnation(self) -> Path:
        """The incarnation of this host, which its agents keep until its next boot (``host_facts``)."""
        return self.folder / "incarnation.json"

    @property
    def singletons(self) -> Path:
        """Folder of the files of the cluster's singletons that were started on this host (``ServiceFiles``)."""
        return self.folder / "singletons"

    @property
    def heartbeats(self) -> Path:
        """Folder in which the processes of jobs leave their heartbeats for the host agent, which makes it; see
        ``job_heartbeats``. It is in this host's memory: the folder of a cluster may be on a network file system that
        hangs, and a member must beat while its working thread waits for that."""
        digest = hashlib.sha256(os.fsencode(self.folder.resolve())).hexdigest()
        return SHM / f"erl-heartbeats-{os.getuid()}-{digest[:12]}"

    def job_heartbeats(self, job: str) -> Path:
        """Folder of the heartbeats of a job's processes on this host (``HeartbeatFolder``)."""
        return self.heartbeats / job

    @property
    def owner_lock(self) -> Path:
        """A file that a command holds locked while it owns the cluster (``Cluster.owned``)."""
        return self.folder / "owner.lock"

    @property
    def foreground_lock(self) -> Path:
        """Lock of the command that keeps this host in the cluster (``Cluster.in_foreground``)."""
        return self.folder / "foreground.lock"

    @property
    def logs(self) -> Path:
        """Folder of the services' logs."""
        return self.folder / "logs"

    def log(self, service: str) -> Path:
        """Log of a service."""
        return self.logs / f"{service}.log"

    @property
    def services_lock(self) -> Path:
        """Lock of the process that starts or stops services now."""
        return self.folder / "services.lock"

    @property
    def local_host(self) -> Path:
        """What the cluster knows this host by (``host.local_host``); without it the host is on loopback."""
        return self.folder / "host.json"

    @property
    def join_file(self) -> Path:
        """What another machine needs to join the cluster (``host.join_file``); of a cluster with an address."""
        return self.folder / "cluster.join"

    @property
    def tls(self) -> TlsFolder:
        """The certificate of this host, and its authority's; made for a host that others can reach."""
        return TlsFolder(self.folder / "tls")

    @property
    def secret(self) -> Path:
        """The secret that all others are derived from (``net.cluster_secret``)."""
        return self.folder / "secret"

    @property
    def tokens(self) -> Path:
        """Digests of the admin API's tokens, which users may extend (``auth.TokenTable``)."""
        return self.folder / "tokens.json"

    @property
    def credentials(self) -> Path:
        """Tokens of the admin API by role, for the command line."""
        return self.folder / "credentials.json"

    @property
    def viewer_token(self) -> Path:
        """The viewer's token alone, for Prometheus."""
        return self.folder / "viewer.token"

    # -- hosts in namespaces of this machine ----------------------------------------------------------------------
    @property
    def test_hosts(self) -> Path:
        """Folder of what ``up --hosts`` makes (``host.test_hosts``); there is none without it."""
        return self.folder / "test-hosts"

    @property
    def test_hosts_record(self) -> Path:
        """How many test hosts there are, and their network."""
        return self.test_hosts / "hosts.json"

    @property
    def test_hosts_lock(self) -> Path:
        """Lock of the process that makes, changes or ends test hosts now."""
        return self.test_hosts / "hosts.lock"

    def test_host(self, name: str) -> Path:
        """The ``run_dir`` of a test host but the first one, whose folder is that of the cluster."""
        return self.test_hosts / name

    def test_host_log(self, name: str) -> Path:
        """What a test host has said when it was powered on."""
        return self.test_hosts / f"{name}.log"


@dataclass(frozen=True)
class JobPaths:
    """What belongs to one job."""

    folder: Path
    """What the job has for its users: settings, records, report, model. They may let others read it."""

    @classmethod
    def of(cls, cfg: Config) -> Self:
        return cls(cfg.run_dir / cfg.job)

    # -- for its users --------------------------------------------------------------------------------------------
    @property
    def settings(self) -> Path:
        """The settings of the run."""
        return self.folder / "config.yaml"

    @property
    def steps(self) -> Path:
        """Records of the run, a JSON object a line: the copy of the job's history on this host (``LocalCopy``)."""
        return self.folder / "steps.jsonl"

    @property
    def faults(self) -> Path:
        """Records of the faults that ``--faults`` has injected, in the same form. They are no part of the history."""
        return self.folder / "faults.jsonl"

    @property
    def report(self) -> Path:
        return self.folder / "report.json"

    @property
    def report_page(self) -> Path:
        return self.folder / "report.html"

    @property
    def model(self) -> Path:
        """The model that the job begins with, where the settings name none."""
        return self.folder / "model"

    @property
    def policy(self) -> Path:
        """The policy of a job that is done, as a model folder."""
        return self.folder / "policy"

    @property
    def data(self) -> Path:
        """Folder of the files that are derived from the data."""
        return self.folder / "data"

    @property
    def evaluated(self) -> Path:
        """The samples of ``mode: eval``, a JSON object a line; the result has the suffix ``.json`` instead."""
        return self.folder / "eval.jsonl"

    @property
    def kept(self) -> Path:
        """The samples that ``mode: rejection_sampling`` has kept; the result has the suffix ``.json`` instead."""
        return self.folder / "kept.jsonl"

    @property
    def hangs(self) -> Path:
        """Folder of the stacks of processes that hung, written before they were ended (``host.stacks``)."""
        return self.folder / "hangs"

    @property
    def kept_steps(self) -> Path:
        """Folder of the batches of steps (``train.keep_steps``)."""
        return self.folder / "kept_steps"

    @property
    def only_train(self) -> Path:
        """Folder of the last ``train --only train``: its metrics and the logs of its ranks."""
        return self.folder / "only-train"

    @property
    def profiles(self) -> Path:
        """Folder of the profiles of steps (``trainer.profile_steps``)."""
        return self.folder / "profiles"

    # -- for its processes ----------------------------------------------------------------------------------------
    @property
    def private(self) -> Path:
        """Folder for the owner only. Its path is the mark of the job's processes (``processes.RUN_MARK``), and its
        digest is in the names of what the job has elsewhere on the host."""
        return self.folder / "cluster"

    @property
    def logs(self) -> Path:
        """Folder of the logs of the job's processes."""
        return self.private / "logs"

    def log(self, process: str) -> Path:
        """Log of a process: train (the run), driver, model, a role, a trainer group, router-POOL, engine-ID (the
        server), runner-ID (what runs the server)."""
        return self.logs / f"{process}.log"

    def context(self, group: str = "", formation: int | str = "") -> Path:
        """The context of the run (``RunContext``), or that of a trainer group in a formation."""
        return self.private / (f"context-{group}-{formation}.json" if group else "run.json")

    @property
    def job_id(self) -> Path:
        """The id of the job (``JobRecord.id``) that the other files are of."""
        return self.private / "job_id"

    @property
    def submitted_settings(self) -> Path:
        """The settings that the job was last started with, which hold where a command names none. For a job with a
        cluster of its own they are ``ClusterPaths.settings``."""
        return self.private / "config.yaml"

    @property
    def cluster_name(self) -> Path:
        """Name of the cluster that the job is on; there is no such file for a job with a cluster of its own."""
        return self.private / "cluster_name"

    @property
    def unsaved(self) -> Path:
        """An empty file that ``down`` leaves where the DCS node was killed before it had saved all chunks: only those
        on its disk are kept."""
        return self.private / "unsaved"

    @property
    def run_status(self) -> Path:
        """What the run has said last of how it goes (``RunStatus``), for when etcd is not up."""
        return self.private / "run_status.json"

    @property
    def compute_services(self) -> Path:
        """Folder of the files (``ServiceFiles``) of the services of the compute plane, which the run starts and ends:
        the host agent restarts none of them."""
        return self.private / "compute"

    @property
    def train_lock(self) -> Path:
        """Lock of the process that trains the job (``Cluster.training``)."""
        return self.private / "train.lock"

    @property
    def run_log_lock(self) -> Path:
        """Lock of the process that writes ``steps``."""
        return self.private / "run_log.lock"

    @property
    def engine_model(self) -> Path:
        """The files of the model without its weights, for engines of a run whose model is on another host."""
        return self.private / "engine_model"

    @property
    def engine_model_lock(self) -> Path:
        """Lock of the process that makes ``engine_model``."""
        return self.private / "engine_model.lock"

    @property
    def engine_key(self) -> Path:
        """File of the key that engines and routers ask for (``job_secrets``)."""
        return self.private / "engine.key"

    def ray_token(self, epoch: int) -> Path:
        """File of the token that the job's Ray asks for in an epoch (``job_secrets``)."""
        return self.private / f"ray-{epoch}.token"

    def ray_tokens(self) -> dict[int, Path]:
        """The files of ``ray_token`` that are there, by epoch."""
        return _by_epoch(self.private, "ray-", ".token")

    def secret_files(self) -> list[Path]:
        """All files of ``engine_key`` and ``ray_token``, also unfinished ones of processes that were killed."""
        return [*self.private.glob("engine.key*"), *self.private.glob("ray-*.token*")]

    @property
    def disk(self) -> Path:
        """The DCS nodes' folder with the job's chunks, one subfolder a node, where ``dcs.disk_dir`` names none."""
        return self.private / "disk"

    # -- temporary files ------------------------------------------------------------------------------------------
    @property
    def temp(self) -> Path:
        """The job's own temp folder, which only its user may enter: Ray's folder is open to all users, and who connects
        to a socket of SGLang runs code. It is TMPDIR of the compute plane, whose processes find it under the same path.
        The path is short: those of sockets are limited to 107 bytes."""
        name, folder = f"erl-{self._digest[:8]}", Path(tempfile.gettempdir())
        return folder if folder.name == name else folder / name

    @property
    def ray_head(self) -> Path:
        """Temporary folder of Ray's head."""
        return self.temp / "h"

    @property
    def ray_worker(self) -> Path:
        """Temporary folder of Ray's worker on this host."""
        return self.temp / "w"

    @property
    def ray_joined(self) -> Path:
        """Temporary folder of this host's worker of a Ray whose head is on another host."""
        return self.temp / "j"

    def ray_store(self, epoch: int) -> Path:
        """Folder in which the head keeps the state of an epoch's Ray."""
        return self.temp / f"gcs-{epoch}"

    def ray_stores(self) -> dict[int, Path]:
        """The folders of ``ray_store`` that are there, by epoch."""
        return _by_epoch(self.temp, "gcs-", "")

    @property
    def compiled(self) -> Path:
        """Cache of Torch's compiler, of all jobs of the user: it is beside the temp folder, and outlives it."""
        return self.temp.parent / f"torchinductor_{os.getuid()}"

    def file_tag(self, part: str = "", start: str = "") -> str:
        """Tag in the names of all files that the job has in /dev/shm and the temp folder, or of one part of it (an
        engine's id), or of one start of that part. Each tag is a prefix of the narrower ones and of no other."""
        names = (f"erl-{self._digest[:12]}", part, start)
        return "".join(f"{re.sub('[^A-Za-z0-9_-]', '_', name)}." for name in names if name)

    @property
    def _digest(self) -> str:
        return hashlib.sha256(os.fsencode(self.private.resolve())).hexdigest()


def _by_epoch(folder: Path, prefix: str, suffix: str) -> dict[int, Path]:
    """The entries of a folder whose names are prefix, epoch and suffix, by epoch."""
    pattern = re.compile(rf"{re.escape(prefix)}(\d+){re.escape(suffix)}")
    found = ((pattern.fullmatch(path.name), path) for path in folder.glob(f"{prefix}*{suffix}"))
    return {int(match[1]): path for match, path in found if match}


def named_clusters(run_dir: Path) -> Path:
    """Folder of the clusters that are not a job's own, by name. No job can have its name."""
    return run_dir / "_clusters"


def jobs_of_user(run_dir: Path) -> list[str]:
    """The jobs below ``run_dir`` that this user has started."""
    return sorted(folder.name for folder in _job_folders(run_dir) if is_own_folder(JobPaths(folder).private))


def _job_folders(run_dir: Path) -> list[Path]:
    return [folder for folder in run_dir.glob("*") if folder != named_clusters(run_dir)]


def is_own_folder(path: Path) -> bool:
    """Whether a folder is this user's, and no link."""
    try:
        found = path.lstat()
    except OSError:  # there is none, or it is in another user's folder
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


def jobs_with_cluster(run_dir: Path) -> list[str]:
    """The jobs below ``run_dir`` whose own cluster was started and not stopped, of those that this user may look at."""
    found = map(JobPaths, _job_folders(run_dir))
    return sorted(job.folder.name for job in found if os.path.exists(ClusterPaths(job.private).info))


def named_clusters_up(run_dir: Path) -> list[str]:
    """The clusters with a name below ``run_dir`` that were started and not stopped."""
    return sorted(folder.name for folder in named_clusters(run_dir).glob("*")
                  if os.path.exists(ClusterPaths(folder).info))
