"""Follows the run of a job until it has ended: the live view, then its summary or its error.

The run does not depend on the process that follows it (``host.job_run``), and any number of them may. Ctrl-C on a
terminal asks whether to detach or to stop; everything else that ends a follower detaches it.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from elastic_rl.cli.common import err, out
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.cli.tables import printable
from elastic_rl.errors import ElasticRLError

if TYPE_CHECKING:
    from elastic_rl.cli.live_view import LiveView
    from elastic_rl.coordinator.client.cluster_info import ClusterInfo
    from elastic_rl.etcd.client import EtcdClient
    from elastic_rl.host.job_run import RunReading
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.report.build import Record

log = logging.getLogger(__name__)

_TICK_S = 0.25
_READ_EVERY_S = 1.0
"""How the run goes is read so often."""
_ANSWER_S = 15.0
"""Longest wait for the answer whether to detach or to stop."""
_VIEW_ETCD_BUDGET_S = 1.0
"""Retries of the live view, which reads again anyway."""
_PAST_BYTES, _PAST_TIMEOUT_S = 1 << 20, 5.0
"""Most of what a job did before that is read where its file is not there yet, and the longest wait for a DCS node."""


class Detached(KeyboardInterrupt):
    """A signal other than Ctrl-C ends the follower, such as that of a terminal that is closed."""


def follow(cluster: Cluster, info: ClusterInfo, *, may_detach: bool, attached: bool = False) -> int:
    """Shows the run until it has ended; returns the exit code. ``may_detach``: a signal ends this follower, not the
    run; else it raises KeyboardInterrupt. ``attached``: to a run that another command has submitted, with settings of
    its own, so that ``cluster`` does not have them. Raises the error that ended the run."""
    with _signals_detach() if may_detach else contextlib.nullcontext():
        try:
            reading = _show(cluster, info, attached=attached)
        except KeyboardInterrupt as interrupt:
            if not may_detach:
                raise
            if isinstance(interrupt, Detached) or not _asked_to_stop():
                say_goes_on(cluster)
                return Exit.INTERRUPTED
            cluster.stop_run()
            reading = cluster.run.look()
    return show_end(cluster, reading)


def _show(cluster: Cluster, info: ClusterInfo, *, attached: bool) -> RunReading:
    """Returns when the run has ended."""
    from elastic_rl.cli.live_view import LiveView
    from elastic_rl.cli.record_reader import RecordReader
    from elastic_rl.etcd.keys import Keys
    from elastic_rl.host.paths import JobPaths
    from elastic_rl.telemetry import logs
    cfg, paths = cluster.cfg, JobPaths.of(cluster.cfg)
    # On stderr, this process's log lines would tear the live view apart.
    logs.setup("follower", cfg.telemetry.log_level, file=paths.log("train"))
    reading = cluster.run.look()
    etcd = cluster.etcd(info, retry_budget_s=_VIEW_ETCD_BUDGET_S)
    # The file grows on the host that has the run alone, which may be another one, now or later.
    elsewhere = cluster.named and not cluster.host.is_local
    past, identity, offset = _past(cluster, etcd) if elsewhere or not paths.steps.exists() else ([], "", None)
    records = RecordReader(etcd, Keys(cfg.job), identity, offset) if elsewhere else None
    view = LiveView(job=cfg.job, steps=0 if attached else cfg.total_steps, steps_path=paths.steps, etcd=etcd,
                    started_at=reading.submitted_at or None, faults_path=paths.faults, past=past, records=records,
                    skip_past=attached or elsewhere and offset is None,
                    lines_from=0.0 if attached else reading.submitted_at)
    try:
        return _await_end(cluster, view)
    finally:
        view.close()
        etcd.close()


def _past(cluster: Cluster, etcd: EtcdClient) -> tuple[list[Record], str, int | None]:
    """The newest records of a job by etcd and the checkpoint service, the identity of its history and the offset up to
    which they are of it. No records, and None, where they cannot be had now."""
    from elastic_rl.etcd.keys import Keys
    from elastic_rl.host.job_secrets import dcs_security
    from elastic_rl.pipeline.records.history_reader import HistoryReader
    from elastic_rl.report.build import parse_lines
    cfg = cluster.cfg
    try:
        with HistoryReader(etcd, Keys(cfg.job), io_timeout_s=_PAST_TIMEOUT_S, security=dcs_security(cfg)) as reader:
            lines = reader.end(_PAST_BYTES).decode(errors="replace").splitlines()
            return list(parse_lines(lines)), *reader.stands_at
    except ElasticRLError as e:
        log.warning("the records of before cannot be read: %s", e)
        return [], "", None


def _await_end(cluster: Cluster, view: LiveView) -> RunReading:
    from elastic_rl.etcd.cluster_records import JobPhase
    from elastic_rl.host.agent.status import AgentWatch
    agent, doing, waits_for, read_at = AgentWatch(cluster), "", "", float("-inf")
    while True:
        if time.monotonic() - read_at >= _READ_EVERY_S:
            read_at = time.monotonic()
            try:
                reading = cluster.run.read()
                if reading.over:
                    return reading
                doing = ("stopping" if reading.stopping else f"queued: {reading.waits_for}" if reading.queued else
                         f"starting: {reading.waits_for or 'checks of model, data and plug-ins'}"
                         if reading.phase is JobPhase.STARTING else "")
                waits_for = reading.waits_for if reading.phase is JobPhase.RUNNING else ""
            except (ElasticRLError, OSError) as e:
                waits_for = f"how it goes cannot be read: {e}"
        view.tick({**agent.waiting(), **({"run": waits_for} if waits_for else {})}, doing)
        time.sleep(_TICK_S)


def show_end(cluster: Cluster, reading: RunReading) -> int:
    """Prints how a run has ended; returns the exit code. Raises the error that ended it."""
    from elastic_rl.cli.live_view import summary
    from elastic_rl.etcd.cluster_records import JobPhase
    from elastic_rl.host import inherited_model, kept_state
    from elastic_rl.host.paths import JobPaths
    paths, options = JobPaths.of(cluster.cfg), kept_state.options(cluster.cfg)
    if reading.phase is None:
        raise ElasticRLError(f"job {cluster.cfg.job} has no run in {cluster.cfg.run_dir}",
                             hint="`elastic-rl jobs` lists the jobs; or name another --run_dir")
    if error := reading.error:
        raise error
    with contextlib.suppress(FileNotFoundError):
        if _is_reported(cluster, reading):
            out.print(summary(json.loads(paths.report.read_text(encoding="utf-8")), paths.report_page))
    if held := inherited_model.holds(paths.policy):
        out.print(f"policy      {paths.policy} ({held})", highlight=False, markup=False, soft_wrap=True)
    match reading.phase:
        case JobPhase.FINISHED:
            return Exit.OK
        case _ if reading.phase is JobPhase.STOPPED or reading.stopping:
            _note(f"the run was {reading.outcome or 'stopped'}; `elastic-rl train {options}` resumes it")
            return Exit.INTERRUPTED
        case _:
            _note(f"the run ended with exit code {Exit.FAILED}; `elastic-rl logs train {options}` shows its log, and "
                  f"those of its other processes are in {paths.logs}")
            return Exit.FAILED


def _is_reported(cluster: Cluster, reading: RunReading) -> bool:
    """Whether there is a report of the run on this host. Of one that has ended on another host it is made here, where
    etcd has answered."""
    from elastic_rl.host.paths import JobPaths
    path = JobPaths.of(cluster.cfg).report
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mtime >= reading.submitted_at:  # else it is that of a run before
            return True
    if not cluster.named or cluster.host.is_local or reading.record is None:
        return False
    from elastic_rl.etcd.cluster_records import JobPhase
    from elastic_rl.etcd.run_context import RunContext
    from elastic_rl.train import write_report
    try:
        ctx = RunContext(config=cluster.here, etcd_endpoints=cluster.connect().etcd_endpoints, job=cluster.cfg.job,
                         epoch=0, model_dir="", host=cluster.host.address)
        code = 0 if reading.phase is JobPhase.FINISHED else 1 if reading.phase is JobPhase.FAILED else None
        write_report(ctx, code, began_at=reading.submitted_at, ended_at=reading.since)
    except (ElasticRLError, OSError) as e:
        _note(f"the report of the run cannot be made on this host: {e}")
        return False
    return True


def say_goes_on(cluster: Cluster) -> None:
    """Says how to come back to a run. Nobody may be there to read it."""
    from elastic_rl.host import kept_state
    options = kept_state.options(cluster.cfg)
    with contextlib.suppress(OSError):
        _note(f"the run of job {cluster.cfg.job} goes on\n"
              f"  show it   elastic-rl attach {options}\n"
              f"  stop it   elastic-rl stop {options}")


def _note(text: str) -> None:
    err.print(printable(text), markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _signals_detach() -> Iterator[None]:
    def detach(number: int, frame: Any) -> None:
        raise Detached

    before = {n: signal.signal(n, detach) for n in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


# -- the question --------------------------------------------------------------------------------------------------
def _asked_to_stop() -> bool:
    """Asks on the terminal, if there is one, whether to detach or to stop. A second signal, no answer in time, and
    whatever goes wrong here mean to detach: it loses nothing."""
    try:
        terminal = sys.stdin.fileno()
        if not (err.is_terminal and os.isatty(terminal) and os.tcgetpgrp(terminal) == os.getpgrp()):
            return False
        with _keys_count_at_once(terminal):
            err.print(f"\n[d]etach (the run goes on) or [s]top the run? Detaches in {_ANSWER_S:.0f} s. ", end="",
                      highlight=False, markup=False)
            answer = _read_key(terminal, "ds", timeout_s=_ANSWER_S)
        _note({"d": "detach", "s": "stop"}.get(answer, ""))
        return answer == "s"
    except (AttributeError, OSError, ValueError, termios.error, KeyboardInterrupt):  # stdin may be closed, or none
        return False


@contextmanager
def _keys_count_at_once(terminal: int) -> Iterator[None]:
    """Within the block a key needs no return. What was typed before is forgotten: it answers nothing."""
    before = termios.tcgetattr(terminal)
    tty.setcbreak(terminal, termios.TCSAFLUSH)
    try:
        yield
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _read_key(terminal: int, keys: str, *, timeout_s: float) -> str:
    """The first of ``keys`` that is typed on a terminal; empty when none is in time."""
    end = time.monotonic() + timeout_s
    while select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0]:
        typed = os.read(terminal, 1).decode(errors="replace").lower()
        if not typed or typed in keys:  # nothing: the terminal is gone
            return typed
    return ""
