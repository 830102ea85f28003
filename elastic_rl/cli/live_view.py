"""The progress of a run for a person: a live view on a terminal, plain lines elsewhere.

Reads the end of the run's records and a few records of etcd, and changes nothing. When etcd does not answer, the view
says so, and for how long. ``RunState`` is the pure part.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_rl.cli.cluster_reader import EVENTS_SHOWN, ClusterReader, ClusterState
from elastic_rl.cli.step_lines import throughput_line, update_line
from elastic_rl.cli.tables import clock, printable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import EngineState, Event, JobStatus, Severity
from elastic_rl.report.build import Record, parse_lines
from elastic_rl.runtime.words import counted

log = logging.getLogger(__name__)

_BLOCKS = "▁▂▃▄▅▆▇█"
_READ_BYTES = 4 << 20
"""Most of steps.jsonl that is read at once."""
_PAST_BYTES = 16 << 20
"""Most of what is in a file already that is read: a year of steps has gigabytes, and the view shows its end."""
_MAX_POINTS = 4000
"""Points of a series that are kept; beyond it every second one of the older half is dropped."""
_MAX_NOTES = 3
_KEPT = ("run.resumed", "run.warned")
"""Kinds of events that stay on a terminal, above the view, when others have followed."""
_SETS = 8
"""Evaluation sets beside the main one that are shown."""
_MAX_SEEN = 1000
_STATE_STYLE = {EngineState.READY: "green", EngineState.RELEASED: "dim", EngineState.DEAD: "red",
                EngineState.QUARANTINED: "red"}
_SEVERITY_STYLE = {Severity.INFO: "dim", Severity.WARNING: "yellow", Severity.ERROR: "red"}


def sparkline(values: Iterable[float], width: int, *, low: float = 0.0, high: float = 1.0) -> str:
    """Values as block characters, averaged to at most ``width`` of them; [low, high] spans the blocks."""
    values = list(values)
    if len(values) > width:
        edges = [round(i * len(values) / width) for i in range(width + 1)]
        values = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    top = len(_BLOCKS) - 1
    return "".join(_BLOCKS[max(0, min(top, int((v - low) / (high - low) * top + 0.5)))] for v in values)


def plain_line(record: Record, steps: int) -> str:
    """A record as one line, for logs and pipes."""
    match record["kind"]:
        case "sft":
            return (f"SFT phase step {record['step']}: loss {_f(record.get('loss'))}, "
                    f"eval loss {_f(record.get('eval_loss'))}, "
                    f"eval exact match {_f(record.get('eval_accuracy'))}")
        case "step":
            ready = sum(e.get("state") == "ready" for e in record.get("engines") or [])
            return (f"step {record['step']}/{steps}: reward {_f(record.get('reward_mean'))}, version "
                    f"{record.get('policy_version')}, staleness {record.get('staleness')}, {counted(ready, 'engine')}, "
                    f"log-prob difference {_e(record.get('logprob_diff_max'))}, "
                    f"{_f((record.get('seconds') or {}).get('total'), 2)} s")
        case "eval":
            return f"step {record['step']}/{steps}: eval reward {_f(record.get('eval_accuracy'))}" + "".join(
                f", {name} {_f(value)}" for key in ("eval_sets", "eval_reward_parts")
                for name, value in list((record.get(key) or {}).items())[:_SETS])
        case "sampled":
            return (f"step {record['step']}{f'/{steps}' if steps else ''}: {record.get('samples', '–')} samples of "
                    f"{counted(len(record.get('groups') or []), 'prompt')}, reward {_f(record.get('reward_mean'))}, "
                    f"{record.get('lines', '–')} written, version {record.get('policy_version')}, "
                    f"{_responses(record)}{_f((record.get('seconds') or {}).get('total'), 2)} s")
        case "output":
            return ", ".join(f"{name} {value}" for name, value in _of_output(record["result"]))
        case "rewind":
            return f"back from step {record['from_step']} to {record['to_step']}: {record.get('reason', '')}"
        case "fault":
            start, end = record.get("injected_at"), record.get("healed_at")
            outcome = f"healed after {end - start:.1f} s" if start is not None and end is not None else "not healed yet"
            return f"fault {record['name']} at step {record.get('step')} on {record.get('target')}: {outcome}"
        case "gap":
            return "records are missing here" + (f": {reason}" if (reason := record.get("reason")) else "")
        case other:
            return f"{other}: {record}"


def _responses(record: Record) -> str:
    """How long the responses of a step are, and how fast they came; "" where that is not known."""
    lengths, generate_s = record.get("response_tokens") or {}, (record.get("seconds") or {}).get("generate") or 0.0
    if lengths.get("mean") is None:
        return ""
    rate = f", {record.get('samples', 0) * lengths['mean'] / generate_s:,.0f} tokens/s" if generate_s > 0 else ""
    return f"responses of {_f(lengths['mean'], 1)} tokens, at most {_f(lengths.get('max'), 0)}{rate}, "


def _f(value: Any, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _e(value: Any) -> str:
    return "–" if value is None else f"{value:.1e}"


class RecordSource(Protocol):
    """The records of a run."""

    @property
    def found(self) -> bool:
        """Whether its records are those that the run writes now."""

    def records(self) -> list[Record]:
        """The next ones, without waiting; empty where there are none now."""

    def close(self) -> None: ...


class Tail:
    """The last complete lines of a file that another process appends to, and the new ones, in parts of a bounded
    size. Where another file takes its place, such as one that was made again, its lines that are newer."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._incomplete = path, -1, b""
        self._inode = 0
        self._at = self._newer_than = 0.0
        """Time of the last record, and that of the last one of the file before, unix seconds."""

    @property
    def found(self) -> bool:
        """Whether there was a file."""
        return self._offset >= 0

    def records(self) -> list[Record]:
        """The next ones; empty when the end of the file is reached."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as f:
            size, inode = f.seek(0, os.SEEK_END), os.fstat(f.fileno()).st_ino
            if not self.found or inode != self._inode or size < self._offset:
                # The first line may be cut, and is no record then.
                self._offset, self._inode, self._incomplete = max(0, size - _PAST_BYTES), inode, b""
                self._newer_than = self._at
            found: list[Record] = []
            while not found:
                f.seek(self._offset)
                if not (data := f.read(_READ_BYTES)):
                    break
                self._offset += len(data)
                *lines, self._incomplete = (self._incomplete + data).split(b"\n")
                found = [record for record in parse_lines(line.decode(errors="replace") for line in lines)
                         if not self._newer_than or float(record.get("at") or 0.0) > self._newer_than]
        self._at = max([self._at, *(float(record.get("at") or 0.0) for record in found)])
        return found

    def close(self) -> None:
        """Nothing is open between two readings."""


@dataclass
class RunState:
    """The state of a run by its records so far."""

    steps: int
    rewards: dict[int, float] = field(default_factory=dict)
    eval_accuracy: dict[int, float] = field(default_factory=dict)
    eval_sets: Mapping[str, float] = field(default_factory=dict)
    """Accuracies of further sets in the last evaluation, by name."""
    last: Record = field(default_factory=dict)
    sft: Record = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Applies the next record."""
        match record["kind"]:
            case "sft":
                self.sft = record
            case "sampled":
                self.last = record
            case "step":
                self.last = record
                self.rewards[int(record["step"])] = float(record.get("reward_mean") or 0.0)
                _bound(self.rewards)
            case "eval":
                self.eval_accuracy[int(record["step"])] = float(record["eval_accuracy"])
                _bound(self.eval_accuracy)
                self.eval_sets = record.get("eval_sets") or {}
            case "rewind":
                self.rewards = {s: r for s, r in self.rewards.items() if s <= int(record["to_step"])}
                self._note(record)
            case "fault":
                self._note(record)

    def _note(self, record: Record) -> None:
        self.notes = [*self.notes, plain_line(record, self.steps)][-_MAX_NOTES:]


def _bound(points: dict[int, float]) -> None:
    """Thins out a series, step → value, in place."""
    if len(points) > _MAX_POINTS:
        for step in sorted(points)[:_MAX_POINTS // 2:2]:
            del points[step]


def waiting_line(status: JobStatus | None, now: float) -> str:
    """What the run waits for, and for how long; empty while it works. ``now``: unix seconds."""
    if status is None or not status.waiting_for:
        return ""
    waited = max(0, int(now - status.waiting_since))
    return printable(f"waiting in {status.stage or status.phase} for {waited // 60}:{waited % 60:02d}: "
                     f"{status.waiting_for}")


def render(job: str, state: RunState, cluster: ClusterState, *, elapsed_s: float, width: int = 80,
           waiting: Mapping[str, str] = MappingProxyType({}), doing: str = "") -> RenderableType:
    """The whole view. ``waiting``: what the run waits for, and why. ``doing``: what the run's process does while its
    job's status in etcd is one of before, or does not say it."""
    status, last = cluster.status, state.last
    phase = status.phase if status else "starting"
    done, steps = int(last.get("step", 0)), state.steps
    head = Table.grid(expand=True, padding=(0, 2))
    head.add_column()
    head.add_column(justify="right")
    if not doing:
        doing = f"{phase}: {printable(status.stage)}" if status and status.stage else phase
    head.add_row(Text.assemble((job, "bold"), f"  {doing}", (f"  step {done}/{steps}" if last else "", "bold")),
                 f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    if state.sft and not last:
        facts.add_row("SFT phase", f"step {state.sft['step']}, eval exact match {_f(state.sft.get('eval_accuracy'))}")
    if last.get("kind") == "sampled" or phase in ("eval", "rejection_sampling"):
        _add_sampled_facts(facts, last)
    else:
        _add_training_facts(facts, state, width)
    seconds = last.get("seconds") or {}
    facts.add_row("step time", f"{_f(seconds.get('total'), 2)} s  [dim]" + "  ".join(
        f"{k.replace('_', ' ')} {v:.2f}" for k, v in seconds.items() if k != "total" and v >= 0.005) + "[/]")
    for title, shown in (("update", update_line({**last, **(last.get("algorithm") or {})})),
                         ("throughput", throughput_line(last.get("throughput") or {}))):
        if shown:
            facts.add_row(title, shown)
    progress = ProgressBar(total=steps or None, completed=done)
    parts: list[RenderableType] = [head, progress, facts, _engine_table(cluster)]
    if line := waiting_line(status, time.time()):
        parts.append(Text(line, style="yellow"))
    if cluster.error:
        parts.append(Text(_outage(cluster), style="red"))
    parts += [Text(f"{name} {why}", style="red") for name, why in waiting.items()]
    parts += [Text(note, style="yellow") for note in (*cluster.waiting, *state.notes)]
    parts += [_event_line(e) for e in cluster.events[-EVENTS_SHOWN:]]
    return Panel(Group(*parts), title="elastic-rl", border_style="dim")


def _add_training_facts(facts: Table, state: RunState, width: int) -> None:
    last = state.last
    rewards = sparkline([state.rewards[s] for s in sorted(state.rewards)], max(20, min(60, width - 40)))
    facts.add_row("reward", f"[cyan]{rewards}[/] {_f(last.get('reward_mean'))}")
    evals = [state.eval_accuracy[s] for s in sorted(state.eval_accuracy)]
    facts.add_row("eval reward", f"[yellow]{sparkline(evals, 60)}[/] {_f(evals[-1] if evals else None)}")
    for name, accuracy in list(state.eval_sets.items())[:_SETS]:
        facts.add_row(Text(f"  {printable(name)}"), _f(accuracy))
    facts.add_row("version", f"{last.get('policy_version', '–')}, staleness {last.get('staleness', '–')}, "
                             f"log-prob difference {_e(last.get('logprob_diff_max'))}")
    if "groups_queued" in (flow := last.get("algorithm") or {}):  # train.schedule=fully_async
        facts.add_row("groups", f"{_f(flow['groups_queued'], 0)} queued, {_f(flow.get('groups_leased'), 0)} being "
                                f"generated, {_f(flow.get('groups_stale'), 0)} too stale, "
                                f"{_f(flow.get('groups_lost'), 0)} lost, staleness {_f(flow.get('staleness_mean'), 2)} "
                                "in the mean")


def _add_sampled_facts(facts: Table, last: Record) -> None:
    """Adds the facts of a job that trains nothing."""
    lengths = last.get("response_tokens") or {}
    facts.add_row("reward", f"{_f(last.get('reward_mean'))} in the last step")
    facts.add_row("samples", f"{last.get('samples', '–')} of {counted(len(last.get('groups') or []), 'prompt')}, "
                             f"{last.get('lines', '–')} written, {_f(lengths.get('mean'), 0)} tokens each")
    facts.add_row("version", str(last.get("policy_version", "–")))


def _engine_table(cluster: ClusterState) -> Table:
    table = Table(box=None, padding=(0, 2), header_style="dim")
    for column in ("engine", "state", "version", "pull+apply", "pid"):
        table.add_column(column, no_wrap=True)
    for engine in cluster.engines:
        applying = f" → {engine.applying}" if engine.applying else ""
        table.add_row(engine.id, Text(engine.state, style=_STATE_STYLE.get(engine.state, "yellow")),
                      f"{engine.version}{applying}", f"{engine.pull_apply_s * 1000:.0f} ms", str(engine.pid or "–"))
    if cluster.engine_count > len(cluster.engines):
        table.add_row(f"… of {cluster.engine_count}")
    return table


def _event_line(event: Event) -> Text:
    line = printable(f"{clock(event.at)} {event.kind} {event.subject}: {event.message}")
    return Text(line, style=_SEVERITY_STYLE[event.severity], no_wrap=True, overflow="ellipsis")


def _outage(cluster: ClusterState) -> str:
    since = f" for {cluster.away_s:.0f} s" if cluster.away_s >= 1 else ""
    return f"waiting for etcd{since}: {cluster.error}"


class RunConsole(Console):
    """A console whose reader may go away: by default rich ends the process then."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError("nobody reads the output any more")


class LiveView:
    """Shows one run; ``tick`` may be called at any rate and never waits, ``close`` leaves the last state on the screen.

    A console that is gone ends the view, not the run.
    """

    def __init__(self, *, job: str, steps: int, steps_path: Path, etcd: EtcdClient, console: Console | None = None,
                 interval_s: float = 0.5, started_at: float | None = None, skip_past: bool = False,
                 past: Iterable[Record] = (), faults_path: Path | None = None, records: RecordSource | None = None,
                 lines_from: float = 0.0) -> None:
        """``started_at``: when the run was submitted, in unix seconds; now if it is not given. ``skip_past``: of the
        records that are there already only the last one gets a line. ``past``: records of before, for while there is
        no file at ``steps_path``. ``faults_path``: file of the faults that are injected. ``records``: where the records
        are read in place of that file, after ``past``; the view closes it. ``lines_from``: what is older, in unix
        seconds, is of a run before: it is in the curves, and gets no line."""
        self._job, self._reader = job, ClusterReader(etcd, Keys(job), interval_s=interval_s)
        self._tail, self.state = records or Tail(steps_path), RunState(steps)
        self._faults, self._past = Tail(faults_path) if faults_path is not None else None, list(past)
        self._console = console or RunConsole()
        self._interval_s, self._next, self._lines_from = interval_s, 0.0, lines_from
        self._started_at = time.time() if started_at is None else started_at
        # Records of before may come later than the first refresh, from a file that is made or an etcd that is away.
        self._awaits_past = bool(self._past) or (skip_past and records is not None)
        self._skips, self._doing = skip_past or self._awaits_past, ""
        self._printed: deque[str] = deque(maxlen=_MAX_SEEN)
        self._outages: dict[str, str] = {}
        """What this process waited for at the last refresh, for the plain lines."""
        self._waiting: Mapping[str, str] = {}
        self._run_waits = ""
        """Kind of the wait of the run that was printed last; empty while the run works."""
        self._broken = False
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        if self._live:
            self._live.start()

    def tick(self, waiting: Mapping[str, str] = MappingProxyType({}), doing: str = "") -> None:
        """Refreshes the view, at most every ``interval_s``. ``waiting``: services that do not run, and why. ``doing``:
        see ``render``."""
        if time.monotonic() >= self._next:
            self._waiting, self._doing = waiting, doing
            self._refresh()
            self._next = time.monotonic() + self._interval_s

    def _refresh(self) -> None:
        if self._broken:
            return
        try:
            self._show()
        except OSError as e:
            self._broken = True
            log.warning("the live view ends: %s", e)

    def _show(self) -> None:
        cluster = self._reader.latest()
        if not self.state.steps and cluster.status is not None:
            self.state.steps = cluster.status.steps  # it follows from the data
        past, found = None, self._tail.found
        while new := self._next_records():
            for record in new:
                self.state.add(record)
                if float(record.get("at") or 0.0) < self._lines_from:
                    continue
                if self._skips:
                    past = record
                elif self._live is None:
                    self._print(plain_line(record, self.state.steps))
        if self._live:
            self._print_events([e for e in cluster.events if e.kind in _KEPT])
            self._live.update(render(self._job, self.state, cluster, elapsed_s=max(0.0, time.time() - self._started_at),
                                     width=self._console.width, waiting=self._waiting, doing=self._doing), refresh=True)
            return
        if past is not None:
            self._print(plain_line(past, self.state.steps))
        self._skips = self._awaits_past and not found
        self._print_wait(cluster.status)
        self._print_outages({**({"etcd": _outage(cluster)} if cluster.error else {}),
                             **{name: f"{name} {why}" for name, why in self._waiting.items()}})
        self._print_events(cluster.events if self._lines_from else cluster.events[-EVENTS_SHOWN:])

    def _print_events(self, events: Iterable[Event]) -> None:
        """A line for each one that is new; above the view, where that has a terminal."""
        for event in events:
            if event.id not in self._printed and event.at >= self._lines_from:
                self._printed.append(event.id)
                self._print(f"event {event.kind} {event.subject}: {event.message}")

    def _next_records(self) -> list[Record]:
        past, self._past = self._past, []
        new = past or self._tail.records() or (self._faults.records() if self._faults is not None else [])
        return [record for record in new if record["kind"] != "history"]

    def _print_wait(self, status: JobStatus | None) -> None:
        """A line when the run begins to wait for another part of the system, and one when it goes on."""
        kind = status.waiting_kind if status else self._run_waits
        if kind == self._run_waits:
            return
        self._run_waits = kind
        self._print(waiting_line(status, time.time()) or "the run goes on")

    def _print_outages(self, now: dict[str, str]) -> None:
        """A line when something begins to be waited for, and one when it is there again."""
        for name in now.keys() - self._outages.keys():
            self._print(now[name])
        for name in self._outages.keys() - now.keys():
            self._print(f"{name} is back")
        self._outages = now

    def _print(self, line: str) -> None:
        self._console.print(printable(line), markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._reader.close()
        self._refresh()
        self._tail.close()
        if self._live:
            try:
                self._live.stop()
            except OSError as e:
                log.warning("the live view cannot be closed: %s", e)


def summary(report: Record, report_html: Path) -> Table:
    """The summary at the end of a run, from its report."""
    table = Table(title=f"{report['job']}: {report['status']}", title_justify="left", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column()
    rows = [*(_of_output(report["output"]) if report.get("output") else
              _of_rl(report) if report["steps"] or not report["sft"] else _of_sft(report["sft"])),
            ("wall time", f"{report['wall_s']:.0f} s{_of_last_run(report)}"), ("report", str(report_html)),
            *([("note", report["note"])] if report.get("note") else [])]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _of_last_run(report: Record) -> str:
    """Says of a job that was resumed that its wall time is that of the last run, and what else is."""
    last = report.get("last_run")
    return "" if last is None else (f" of this run, which made {last['steps']} steps from step {last['resumed_at']}; "
                                    "all else is of the whole job")


def _of_output(result: Record) -> list[tuple[str, str]]:
    """The results of an evaluation, or of rejection sampling."""
    if "sets" in result:
        return [(printable(name), _set_line(found)) for name, found in list(result["sets"].items())[:_SETS]]
    dropped = sum(result["dropped"].values())
    return [("prompts", f"{result['prompts']}, {dropped} of them dropped"),
            ("samples", f"{result['samples']}, reward {_f(result['reward_mean'])}"),
            ("kept", f"{result['kept']}, reward {_f(result['kept_reward_mean'])}"), ("file", result["file"])]


def _set_line(found: Record) -> str:
    error = f" ± {_f(found['standard_error'])}" if found["standard_error"] is not None else ""
    return f"{_f(found['reward_mean'])}{error} over {counted(found['prompts'], 'prompt')}" + "".join(
        f", pass@{k} {_f(value)}" for k, value in found["pass_at"].items()) + (
        f", {found['truncated']:.0%} truncated" if found["truncated"] else "") + (
        f", {found['failed_rewards']} rewards failed" if found["failed_rewards"] else "")


def _of_sft(sft: Record) -> list[tuple[str, str]]:
    return [("SFT steps", str(sft["steps"])), ("loss", f"{_f(sft['loss_first'])} → {_f(sft['loss_last'])}"),
            ("eval loss", f"{_f(sft.get('eval_loss_first'))} → {_f(sft.get('eval_loss_last'))}"),
            ("eval exact match", f"{_f(sft['eval_accuracy_first'])} → {_f(sft['eval_accuracy_last'])}")]


def _of_rl(report: Record) -> list[tuple[str, str]]:
    healed = sum(f["healed_at"] is not None for f in report["faults"])
    speed = throughput_line({"peak_memory_bytes": report["peak_memory_bytes"], **{
        name: report[f"{name}_p50"] for name in ("generate_tokens_per_s", "train_tokens_per_s", "mfu")}})
    return [("steps", f"{report['steps']} ({report['steps_redone']} repeated), "
                      f"{counted(report['samples_trained'], 'sample')}"),
            ("eval reward", f"{_f(report['eval_accuracy_first'])} → {_f(report['eval_accuracy_last'])}"),
            ("reward", f"{_f(report['reward_first'])} → {_f(report['reward_last'])}"),
            ("step time", f"{_f(report['step_s_p50'], 2)} s median, {_f(report['tokens_per_s'], 0)} tokens/s"),
            *([("throughput", speed)] if speed else []),
            ("log-prob difference", f"{_e(report['logprob_diff_max'])} between engines and trainer at most"),
            ("groups", f"{report['groups_lost']} lost, {report['groups_duplicated']} trained twice"
             + (f", {dropped} dropped" if (dropped := report.get("groups_dropped")) else "")),
            ("faults", f"{healed} of {len(report['faults'])} healed" if report["faults"] else "none injected")]
