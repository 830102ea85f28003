"""The command logs: the log of a part of a cluster or job. That of this host needs the files only."""

from __future__ import annotations

import codecs
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

from elastic_rl.cli import completion, tables
from elastic_rl.cli.common import EXTRA, File, Output, find_cluster, logs_of, logs_of_hosts, out, say
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, ElasticRLError, HostUnavailable

if TYPE_CHECKING:
    from elastic_rl.host.cluster_logs import ClusterLogs, HostLogs, LogHost
    from elastic_rl.host.local_cluster import Cluster

app = typer.Typer()
_Part = Annotated[str, typer.Argument(
    metavar="PART", show_default=False, autocompletion=completion.logs, help=(
        "The part, or the start of its name if no other begins with that; else list the parts that have a log."))]
_Host = Annotated[str, typer.Option("--host", metavar="HOST", help=(
    "Only the logs of this host; else the host is chosen that has the part."))]
_Lines = Annotated[int, typer.Option("--lines", "-n", min=0, help="Number of lines from the end.")]
_Follow = Annotated[bool, typer.Option("--follow", "-f", help="And what is written from now on, until Ctrl-C.")]

_TICK_S, _RETRY_S = 0.25, 2.0
_LOOK_EVERY_S = 5.0
"""While nothing is written, the host of the part is looked up so often."""
_NAMED = 20
"""Longest list of parts in an error."""


@app.command("logs", **EXTRA)
def show(ctx: typer.Context, part: _Part = "", host: _Host = "", follow: _Follow = False, lines: _Lines = 100,
         file: File = None, output: Output = Format.TABLE) -> None:
    """Show the log of a part of the cluster or the job, wherever in the cluster that is, or list the parts that have
    one. The logs of this host it shows without a cluster, too."""
    cluster = find_cluster(ctx, file, stored=False)
    with logs_of_hosts(cluster, required=bool(host)) as far:
        if not part:
            if follow:
                raise ConfigError("--follow needs a part", hint=_there_is(cluster))
            _list(cluster, far, host, output)
            return
        found = _locate(cluster, far, part, host)
        if found is None:
            if not follow or Path(part).name != part:
                raise ConfigError(f"there is no log of {part!r}", hint=_there_is(cluster))
            found = _to_wait_for(cluster, far, part, host)
        if found.host and found.host != _here(far):
            _note(f"log of {found.part} on host {found.host}")
        _print(_LogView(cluster, far, found, lines, moves=not host), follow=follow)


def _here(far: ClusterLogs | None) -> str:
    return far.here if far is not None else ""


def _there_is(cluster: Cluster) -> str:
    from elastic_rl.host.paths import JobPaths
    logs = logs_of(cluster)
    here = " on this host" if cluster.named else ""
    return (f"parts with a log{here}: {_names(list(logs))}" if logs else
            f"{JobPaths.of(cluster.cfg).logs} has no logs; `elastic-rl jobs` lists the jobs, or name another --run_dir")


def _list(cluster: Cluster, far: ClusterLogs | None, host: str, output: Format) -> None:
    rows, columns = list[dict[str, Any]](), ("part", "nbytes", "written_at", "path")

    def add(at: str, part: str, nbytes: int, written: float, path: str) -> None:
        shown = written if output is Format.JSON else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(written))
        row = {"part": part, "nbytes": nbytes, "written_at": shown, "path": path}
        rows.append({"host": at, **row} if far is not None else row)

    if host in ("", _here(far)):
        for part, path in logs_of(cluster).items():
            with contextlib.suppress(FileNotFoundError):  # a rotation has just deleted it
                found = path.stat()
                add(_here(far), part, found.st_size, found.st_mtime, str(path))
    if far is not None and host != far.here:
        hosts = far.hosts()
        asked = [_known(hosts, host)] if host else [each for each in hosts.values() if each.name != far.here]
        listings, away = far.listings(asked)
        for name, parts in listings.items():
            for each in parts:
                add(name, each.part, each.nbytes, each.written_at, each.path)
        if host in away:
            raise HostUnavailable(away[host])
        for why in away.values():
            _note(why)
    rows.sort(key=lambda row: (row["part"], row.get("host", "")))
    tables.show(out, rows, ("host", *columns) if far is not None else columns, output)


# -- which log ---------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Found:
    """A log of the cluster."""

    part: str
    host: str
    """Empty, or the name of this host, for one of its files."""


def _locate(cluster: Cluster, far: ClusterLogs | None, part: str, host: str) -> _Found | None:
    """The log that is meant by a part, or by the start of its name; None where there is none. Raises ConfigError where
    it may be one of several, and HostUnavailable where the host that must have it is away."""
    local = list(logs_of(cluster))
    if far is None:
        name = _one(local, part)
        return _Found(name, "") if name else None
    wanted = host or far.where(part)
    if wanted == far.here:
        name = _one(local, part)
        if name or host:
            return _Found(name, far.here) if name else None
    hosts = far.hosts()
    if wanted and wanted != far.here and (host or wanted in hosts):
        try:
            with far.open(_known(hosts, wanted)) as logs:
                name = _one([each.part for each in logs.parts()], part)
        except HostUnavailable as e:
            if not host and _one(local, part):
                e.hint = f"--host={far.here} shows what this host has of it"
            raise
        if name or host:
            return _Found(name, wanted) if name else None
    return _search(cluster, far, hosts, part)


def _search(cluster: Cluster, far: ClusterLogs, hosts: Mapping[str, LogHost], part: str) -> _Found | None:
    """Looks on all hosts, for what etcd does not say: the newest one where several have had it in turn."""
    from elastic_rl.host.cluster_logs import is_on_several_hosts
    listings, away = far.listings(each for each in hosts.values() if each.name != far.here)
    written = {name: {each.part: each.written_at for each in parts} for name, parts in listings.items()}
    written[far.here] = {}
    for name, path in logs_of(cluster).items():
        with contextlib.suppress(FileNotFoundError):
            written[far.here][name] = path.stat().st_mtime
    name = _one(sorted({name for parts in written.values() for name in parts}), part)
    for why in away.values() if not name else ():
        _note(why)
    having = [at for at, parts in written.items() if name in parts]
    if not having:
        return None
    if len(having) > 1 and is_on_several_hosts(name):
        raise ConfigError(f"several hosts have a log of {name}", hint=f"name one with --host: {_names(sorted(having))}")
    return _Found(name, max(having, key=lambda at: written[at][name]))


def _to_wait_for(cluster: Cluster, far: ClusterLogs | None, part: str, host: str) -> _Found:
    """A log that is not there yet."""
    from elastic_rl.host.paths import JobPaths
    if far is None:
        _note(f"waiting for {JobPaths.of(cluster.cfg).log(part)}; {_there_is(cluster)}")
        return _Found(part, "")
    found = _Found(part, host or far.where(part) or far.here)
    _note(f"waiting for a log of {part} on host {found.host}; {_there_is(cluster)}")
    return found


def _known(hosts: Mapping[str, LogHost], name: str) -> LogHost:
    if name not in hosts:
        raise ConfigError(f"there is no host {name!r}", hint=f"hosts: {_names(sorted(hosts))}")
    return hosts[name]


def _one(parts: Sequence[str], part: str) -> str:
    """The part that is meant, which the start of its name names too; empty where there is none. Raises ConfigError
    where several begin with that."""
    from elastic_rl.host.log_folders import choose
    found = choose(parts, part)
    if len(found) > 1:
        raise ConfigError(f"several logs begin with {part!r}", hint=f"name one: {_names(found)}")
    return found[0] if found else ""


def _names(parts: Sequence[str]) -> str:
    return ", ".join(parts[:_NAMED]) + (f" and {len(parts) - _NAMED} more" if len(parts) > _NAMED else "")


def _note(text: str) -> None:
    say(text, to_err=True)


# -- the lines of a log ------------------------------------------------------------------------------------------------
class _LogView:
    """Blocks of a log, and of that of the same part on the host that the run has moved to."""

    def __init__(self, cluster: Cluster, far: ClusterLogs | None, found: _Found, lines: int, *, moves: bool) -> None:
        """``moves``: whether another host may have the part later."""
        self._cluster, self._far, self._found, self._lines = cluster, far, found, lines
        self._moves = moves and far is not None
        self._log = self._open(found)
        self._look_at, self._said = time.monotonic() + _LOOK_EVERY_S, ""

    def close(self) -> None:
        self._log.close()

    def blocks(self, *, follow: bool) -> Iterator[bytes]:
        """What is there; with ``follow`` also what is written later, whatever is away meanwhile. Raises
        HostUnavailable, ConfigError where there is no such log, and OSError."""
        while True:
            pause_s = _TICK_S
            try:
                while block := self._log.read(wait_s=_LOOK_EVERY_S if follow else 0.0):
                    self._said = ""
                    yield block
            except ElasticRLError as e:
                if not follow:
                    raise
                pause_s = _RETRY_S
                if self._said != e.message:
                    _note(f"{e.message}; this waits for it")
                    self._said = e.message
            if not follow:
                return
            time.sleep(pause_s)
            if self._moves and time.monotonic() >= self._look_at:
                self._look_at = time.monotonic() + _LOOK_EVERY_S
                self._follow_the_part()

    def _follow_the_part(self) -> None:
        """Goes on on the host that has the part now, once that has a log of it."""
        far, part = self._far, self._found.part
        assert far is not None
        with contextlib.suppress(ElasticRLError):  # it cannot be known now
            host = far.where(part)
            if not host or host == self._found.host:
                return
            moved = _locate(self._cluster, far, part, host)
            if moved is not None and moved.part == part:
                _note(f"{part} is on host {moved.host} now")
                self._log.close()
                self._found, self._log = moved, self._open(moved)

    def _open(self, found: _Found) -> _Log:
        if self._far is None or found.host == self._far.here:
            return _LocalLog(self._cluster, found.part, self._lines)
        return _FarLog(self._far, found, self._lines)


class _Log(Protocol):
    def read(self, *, wait_s: float) -> bytes:
        """The next block; empty where nothing is there within about ``wait_s``."""

    def close(self) -> None: ...


class _LocalLog:
    def __init__(self, cluster: Cluster, part: str, lines: int) -> None:
        from elastic_rl.host.paths import JobPaths
        from elastic_rl.telemetry.log_files import LogTail
        self._tail = LogTail(logs_of(cluster).get(part) or JobPaths.of(cluster.cfg).log(part), lines)

    def read(self, *, wait_s: float) -> bytes:
        return self._tail.read()

    def close(self) -> None:
        pass  # nothing is open between two reads


class _FarLog:
    """A log of another host, whose agent may be replaced, and then serves at another port."""

    def __init__(self, far: ClusterLogs, found: _Found, lines: int) -> None:
        self._far, self._found, self._lines = far, found, lines
        self._logs: HostLogs | None = None
        self._position = ""

    def read(self, *, wait_s: float) -> bytes:
        """Raises ElasticRLError."""
        if self._logs is None:
            self._logs = self._far.open(_known(self._far.hosts(), self._found.host))
        try:
            block, self._position = (self._logs.after(self._found.part, self._position, wait_s) if self._position else
                                     self._logs.last_lines(self._found.part, self._lines))
        except HostUnavailable:
            self.close()
            raise
        return block

    def close(self) -> None:
        if self._logs is not None:
            self._logs.close()
            self._logs = None


def _print(view: _LogView, *, follow: bool) -> None:
    """Copies a log to stdout: as it is, but for a terminal, where control characters are replaced."""
    terminal, decoder = sys.stdout.isatty(), codecs.getincrementaldecoder("utf-8")("replace")
    with contextlib.closing(view), _reader_may_leave():
        for block in view.blocks(follow=follow):
            if terminal:
                sys.stdout.write(tables.printable(decoder.decode(block)))
            else:
                sys.stdout.buffer.write(block)
            sys.stdout.flush()


@contextlib.contextmanager
def _reader_may_leave() -> Iterator[None]:
    """Ends the block quietly at Ctrl-C, and when the program that reads this one's output has ended (``| head``)."""
    try:
        yield
    except KeyboardInterrupt:
        return  # the way to end it
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python still writes at its exit
