"""Preflight checks (`elastic-rl doctor`): what a machine has and lacks for a run, and how to fix it."""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

import psutil

from elastic_rl.config import ROLLOUT_POOL, Config
from elastic_rl.errors import ConfigError, ElasticRLError, PreflightFailed
from elastic_rl.etcd import member_metrics
from elastic_rl.etcd.access import Access
from elastic_rl.etcd.client import Compare, EtcdClient, MemberStatus, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.member_metrics import MemberMetrics
from elastic_rl.host import etcd_server, model_folder
from elastic_rl.host.local_host import LocalHost
from elastic_rl.host.machine_resources import usable_cpus
from elastic_rl.host.paths import ClusterPaths, JobPaths
from elastic_rl.net.addresses import require_port_free

_ETCD_BUDGET_S = 2.0
_MANY_REVISIONS = 100_000
"""An etcd with so many revisions and no compaction is not being compacted."""
_MEMORY_GIB = 8.0
"""Ray, two engines, two ranks and the durable plane take about 7 GiB on a CPU."""
_SOCKET_PATH = 107
"""Bytes in the path of a Unix socket, at most."""
_LONGEST_SOCKET = "w/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store"
"""Longest path of Ray's sockets below the cluster's temp folder, with the largest process id that Linux has."""
_PACKAGES = {"torch": "2.13.0", "sglang": "0.5.23", "megatron-core": "0.16.1", "ray": "2.60.0",
             "sglang-router": "0.3.2", "transformers": "5.19.0"}


class Verdict(StrEnum):
    OK = "ok"
    WARNING = "warning"
    """A run works, with the limitation that is found."""
    FAILED = "failed"
    """A run cannot work."""


@dataclass(frozen=True)
class Finding:
    """The result of one check. ``fix``: what to do about it; empty when there is nothing to do."""

    check: str
    verdict: Verdict
    found: str
    fix: str = ""

    def row(self) -> dict[str, str]:
        return asdict(self)


def examine(cfg: Config) -> list[Finding]:
    """Runs every check, in the order in which their findings are best fixed."""
    checks: tuple[Callable[[Config], Iterable[Finding]], ...] = (
        _python, _packages, _devices, _memory, _shared_memory, _temporary, _model, _etcd, _ports, _admin_api, _files)
    faults = []
    try:
        host = LocalHost.of(paths := ClusterPaths.of(cfg))
        cfg = host.settings_here(cfg, paths.tls)
        cfg = cfg.model_copy(update={"dcs": cfg.dcs.model_copy(update={"host": host.listens_at(cfg.dcs.host)})})
    except ConfigError as e:
        faults = [Finding("host", Verdict.FAILED, e.message, e.hint)]
    return [*faults, *(finding for check in checks for finding in check(cfg))]


def _python(cfg: Config) -> Iterable[Finding]:
    release = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 13)
    yield Finding("python", Verdict.OK if good else Verdict.FAILED, release,
                  "" if good else "install Python 3.11 to 3.13, remove .venv, run `bash ops/setup.sh`")


def _packages(cfg: Config) -> Iterable[Finding]:
    for name, wanted in _PACKAGES.items():
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, Verdict.FAILED, "not installed", "run `bash ops/setup.sh`")
            continue
        same = found.partition("+")[0] == wanted
        yield Finding(name, Verdict.OK if same else Verdict.WARNING, found,
                      "" if same else f"tested with {wanted}: run `bash ops/setup.sh`")


def _devices(cfg: Config) -> Iterable[Finding]:
    import torch
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count:
        names = sorted({torch.cuda.get_device_name(i) for i in range(count)})
        yield Finding("devices", Verdict.OK, f"{count} × {', '.join(names)}")
    elif cfg.device.type == "cuda":
        yield Finding("devices", Verdict.FAILED, "device.type is cuda and torch sees no CUDA device",
                      "set --device.type=cpu, or fix the driver (`nvidia-smi`) and run `bash ops/setup.sh` again")
    elif shutil.which("nvidia-smi"):
        yield Finding("devices", Verdict.WARNING, "nvidia-smi is installed but torch sees no CUDA device",
                      "run `nvidia-smi`; if it lists a GPU, remove .venv and run `bash ops/setup.sh`")
    else:
        yield Finding("devices", Verdict.OK, f"CPU, {usable_cpus()} cores")


def _memory(cfg: Config) -> Iterable[Finding]:
    free = psutil.virtual_memory().available / 2**30
    good = free >= _MEMORY_GIB
    yield Finding("memory", Verdict.OK if good else Verdict.WARNING, f"{free:.1f} GiB available",
                  "" if good else f"the default job needs {_MEMORY_GIB:g} GiB: free some, or set --rollout.engines=1")


def _shared_memory(cfg: Config) -> Iterable[Finding]:
    free, need = shutil.disk_usage("/dev/shm").free, cfg.dcs.arena_bytes
    found = f"{free >> 20} MiB free, dcs.arena_bytes needs {need >> 20} MiB"
    if free < need:
        yield Finding("/dev/shm", Verdict.FAILED, found, "set a smaller --dcs.arena_bytes, or enlarge /dev/shm: "
                      "`mount -o remount,size=2G /dev/shm`, or `docker run --shm-size=2g`")
    else:
        yield Finding("/dev/shm", Verdict.OK, found)


def require_temporary(cfg: Config) -> None:
    """Raises PreflightFailed when the folder for temporary files has too long a path for the sockets of Ray and SGLang,
    which would never start."""
    for finding in _temporary(cfg):
        if finding.verdict is Verdict.FAILED:
            raise PreflightFailed(finding.found, hint=finding.fix)


def _temporary(cfg: Config) -> Iterable[Finding]:
    job, pool = JobPaths.of(cfg), max((ROLLOUT_POOL, *cfg.pools), key=len)
    own, folder = job.temp, str(job.temp.parent)
    of_engine = f"{job.file_tag(f'{pool}-123456', '12345678')}tmp12345678"
    longest = max(_LONGEST_SOCKET, of_engine, key=len)
    size, most = len(os.fsencode(folder)), _SOCKET_PATH - len(f"/{own.name}/{longest}")
    found = f"temporary files are put into {folder}"
    yield Finding("TMPDIR", Verdict.OK, found) if size <= most else Finding(
        "TMPDIR", Verdict.FAILED, f"{found}, a path of {size} bytes, and sockets below it leave room for {most}",
        "set TMPDIR to a shorter path of a folder on this machine, such as /tmp, for `elastic-rl train`")


def _model(cfg: Config) -> Iterable[Finding]:
    what = cfg.model.path or "built-in, made by the first start"
    if found := model_folder.faults(cfg):
        yield from (Finding("model", Verdict.FAILED, fault.message, fault.fix) for fault in found)
    elif cfg.model.path and (dtype := model_folder.read(Path(cfg.model.path).expanduser()).dtype) not in (
            "", cfg.device.dtype):
        yield Finding("model", Verdict.WARNING, f"{what}: its weights are {dtype}, and device.dtype is "
                      f"{cfg.device.dtype}", "they are converted; set device.dtype to theirs unless that is wanted")
    else:
        yield Finding("model", Verdict.OK, what)


def _etcd(cfg: Config) -> Iterable[Finding]:
    if cfg.etcd.endpoints:
        yield from _etcd_cluster(cfg)
        return
    try:
        binary = etcd_server.find_binary()
        release = etcd_server.version(binary)
    except PreflightFailed as e:
        yield Finding("etcd", Verdict.FAILED, e.message, e.hint)
        return
    why = etcd_server.objection(release)
    yield Finding("etcd", Verdict.WARNING if why else Verdict.OK, f"{'.'.join(map(str, release))} at {binary}",
                  f"{why}; install 3.4.23+, 3.5.21+ or 3.6" if why else "")


def _etcd_cluster(cfg: Config) -> Iterable[Finding]:
    """An etcd that someone else runs: every member, and what we may do there."""
    try:
        etcd = EtcdClient.from_config(cfg.etcd, cfg.etcd.endpoints, retry_budget_s=_ETCD_BUDGET_S)
    except ConfigError as e:
        yield Finding("etcd", Verdict.FAILED, e.message, e.hint)
        return
    with etcd:
        members = etcd.statuses()
        majority = sum(not m.error for m in members) > len(members) / 2
        for m in members:
            yield _etcd_member(m, cfg, majority=majority)
        if len(members) % 2 == 0:
            yield Finding("etcd members", Verdict.WARNING, f"etcd.endpoints names {len(members)}",
                          "name every member; 3 or 5 stand the loss of 1 or 2, an even number no more than one less")
        epoch = Keys(cfg.job).epoch()
        try:
            etcd.get(epoch)
            # Never runs, since it cannot hold; but etcd asks first whether we may, and whether it has room.
            etcd.txn([Compare.absent(epoch), Compare.exists(epoch)], [Op.put(epoch, b"")])
            yield Finding("etcd access", Verdict.OK, f"may read and write as {cfg.etcd.user or 'anyone'}")
        except ElasticRLError as e:
            yield Finding("etcd access", Verdict.FAILED, e.message, e.hint)


        if alive := next((m for m in members if not m.error), None):
            found = member_metrics.read(alive.endpoint, Access.from_config(cfg.etcd), timeout_s=_ETCD_BUDGET_S)
            yield etcd_history(found, cfg.etcd.history_s)


def etcd_history(found: MemberMetrics | None, history_s: float) -> Finding:
    """Whether old revisions are ever discarded. ``found``: the metric of one member, None where it has no metrics
    page."""
    if found is None or not found.current_revision:
        return Finding("etcd history", Verdict.OK, "cannot be read" + (
            f"; a coordinator compacts what is older than {history_s:g} s" if history_s else ""))
    kept = found.current_revision - found.compacted_revision
    text = f"{kept:,} revisions kept"
    if found.compacted_revision or kept < _MANY_REVISIONS:
        return Finding("etcd history", Verdict.OK, text)
    also = ("; a coordinator does it only while one runs" if history_s
            else ", or set etcd.history_s above 0 so that the coordinators compact it")
    return Finding("etcd history", Verdict.WARNING, f"{text}, none ever compacted", "start etcd with "
                   "--auto-compaction-mode=periodic --auto-compaction-retention=5m" + also)


def _etcd_member(m: MemberStatus, cfg: Config, *, majority: bool) -> Finding:
    check = f"etcd {m.endpoint}"
    if m.error:
        return Finding(check, Verdict.WARNING if majority else Verdict.FAILED, f"does not serve: {m.error}",
                       "start or repair it" + ("; the others are a majority and continue" if majority else ""))
    quota = f" of {m.quota_bytes >> 20}" if m.quota_bytes else ""
    found = f"{m.version}, {m.db_bytes >> 20}{quota} MiB{', leads' if m.is_leader else ''}"
    if m.alarms:
        return Finding(check, Verdict.FAILED, f"{found}; alarm: {', '.join(m.alarms)}",
                       "for NOSPACE: compact, `etcdctl defrag`, then `etcdctl alarm disarm`"
                       + ("; a coordinator does it while one runs" if cfg.etcd.reclaim_space else ""))
    if m.db_bytes > cfg.alerts.full_fraction * (m.quota_bytes or cfg.etcd.quota_bytes):
        return Finding(check, Verdict.WARNING, f"{found}, {m.db_in_use_bytes >> 20} MiB in use: near its quota",
                       f"`etcdctl defrag --endpoints={m.endpoint}`, or raise its --quota-backend-bytes")
    why = etcd_server.objection(etcd_server.parse_version(m.version))
    return Finding(check, Verdict.WARNING if why else Verdict.OK, found,
                   f"{why}; install 3.4.23+, 3.5.21+ or 3.6" if why else "")


def _ports(cfg: Config) -> Iterable[Finding]:
    wanted = [(cfg.coordinator.host, port, f"coordinator.ports[{i}]") for i, port in enumerate(cfg.coordinator.ports)]
    wanted += [(cfg.dcs.host, cfg.dcs.port, "dcs.port")] if cfg.dcs.port else []
    for host, port, setting in wanted:
        try:
            require_port_free(host, port, setting=setting)
            yield Finding(f"port {port}", Verdict.OK, f"free ({setting})")
        except PreflightFailed as e:
            yield Finding(f"port {port}", Verdict.FAILED, e.message, e.hint)
    if not wanted:
        yield Finding("ports", Verdict.OK, "no port is configured; free ones are chosen")


def _admin_api(cfg: Config) -> Iterable[Finding]:
    if cfg.coordinator.sends_tokens_in_clear:
        yield Finding("admin API", Verdict.WARNING, f"takes tokens in clear on {cfg.coordinator.host}",
                      "set coordinator.tls_cert and coordinator.tls_key, or bind a loopback address")
    else:
        yield Finding("admin API", Verdict.OK, "speaks TLS" if cfg.coordinator.tls_cert else "serves this host only")


def _files(cfg: Config) -> Iterable[Finding]:
    folder = cfg.run_dir.expanduser().resolve()
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free / 2**30
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        yield Finding("run_dir", Verdict.FAILED, f"{folder} cannot be written to",
                      "set another --run_dir, or make it writable")
    else:
        yield Finding("run_dir", Verdict.OK if free >= 2 else Verdict.WARNING, f"{folder}: {free:.0f} GiB free",
                      "" if free >= 2 else "free some disk space: logs, etcd, the DCS and Ray need about 2 GiB")
    limit = _open_files()
    yield Finding("open files", Verdict.OK if limit >= 4096 else Verdict.WARNING, f"at most {limit}",
                  "" if limit >= 4096 else "raise the limit: `ulimit -n 65536`")


def _open_files() -> int:
    import resource
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return hard if hard != resource.RLIM_INFINITY else 1 << 20


def any_failed(findings: Iterable[Finding]) -> bool:
    """Whether a run cannot work on this machine."""
    return any(f.verdict is Verdict.FAILED for f in findings)
