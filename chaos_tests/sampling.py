"""Samples of what a run takes: its processes, and what it keeps in etcd and on the disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from chaos_tests.target import Target
from elastic_rl.host import processes
from elastic_rl.host.processes import OWNER_ENV


def role_of(command: Sequence[str]) -> str:
    """What a process is in the cluster, the same over its restarts: its module, the title that Ray and SGLang give to
    theirs, or its program. Pure."""
    if not command:
        return "unknown"
    program, *arguments = command
    if "::" in program:
        return program.split()[0]
    if "-m" in arguments[:-1]:
        return arguments[arguments.index("-m") + 1]
    return Path(next((a for a in arguments if a.endswith(".py")), program)).name


def of_processes(target: Target) -> Iterator[dict[str, Any]]:
    """Each process of the cluster and of the job on this host."""
    found = {p.pid: p for p in (*processes.marked(str(target.paths.private)),
                                *processes.marked(str(target.cluster.dir), OWNER_ENV))}
    for process in found.values():
        try:
            with process.oneshot():
                times = process.cpu_times()
                yield {"role": role_of(process.cmdline()), "pid": process.pid,
                       "rss_bytes": process.memory_info().rss, "descriptors": process.num_fds(),
                       "threads": process.num_threads(), "cpu_s": round(times.user + times.system, 2)}
        except psutil.Error:
            continue


def of_store(target: Target) -> dict[str, Any]:
    """What is kept. Raises EtcdUnavailable."""
    began = time.monotonic()
    job = target.api.get("")
    status_s = time.monotonic() - began
    files, file_bytes = _files(target.paths.folder)
    return {"etcd_keys": sum(target.reader.count(prefix) for prefix in target.observed),
            "etcd_bytes": max((s.db_in_use_bytes for s in target.reader.statuses()), default=0), "files": files,
            "file_bytes": file_bytes, "status_s": round(status_s, 4),
            "step": int((job["status"] or {}).get("step") or 0)}


def _files(folder: Path) -> tuple[int, int]:
    """Number and bytes of the files below a folder, which come and go."""
    count = nbytes = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                nbytes += (Path(parent) / name).lstat().st_size
                count += 1
            except FileNotFoundError:
                continue
    return count, nbytes
