"""The progress of a run for a person: a live view on a terminal, plain lines elsewhere.

Reads the run's steps.jsonl and a few records of etcd, and changes nothing. When etcd does not answer, the view says so.
``RunState`` is the pure part.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from elastic_rl.errors import ElasticRLError
from elastic_rl.etcd import events
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, EngineState, Event, JobStatus, Severity
from elastic_rl.report.build import Record, parse_lines

_BLOCKS = "▁▂▃▄▅▆▇█"
_READ_BYTES = 4 << 20
"""Most of steps.jsonl that is read at once."""
_MAX_POINTS = 4000
"""Points of a series that are kept; beyond it every second one of the older half is dropped."""
_MAX_ENGINES = 20
_MAX_NOTES = 3
_MAX_SEEN = 1000
_STATE_STYLE = {EngineState.READY: "green", EngineState.DEAD: "red", EngineState.QUARANTINED: "red"}
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
                    f"eval accuracy {_f(record.get('eval_accuracy'))}")
        case "step":
            ready = sum(e.get("state") == "ready" for e in record.get("engines") or [])
            return (f"step {record['step']}/{steps}: reward {_f(record.get('reward_mean'))}, version "
                    f"{record.get('policy_version')}, staleness {record.get('staleness')}, {ready} engines, log-prob "
                    f"difference {_e(record.get('logprob_diff_max'))}, "
                    f"{_f((record.get('seconds') or {}).get('total'), 2)} s")
        case "eval":
            return f"step {record['step']}/{steps}: eval accuracy {_f(record.get('eval_accuracy'))}"
        case "rewind":
            return f"back from step {record['from_step']} to {record['to_step']}: {record.get('reason', '')}"
        case "fault":
            start, end = record.get("injected_at"), record.get("healed_at")
            outcome = f"healed after {end - start:.1f} s" if start is not None and end is not None else "not healed yet"
            return f"fault {record['name']} at step {record.get('step')} on {record.get('target')}: {outcome}"
        case other:
            return f"{other}: {record}"


def _f(value: Any, digits: int = 3) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _e(value: Any) -> str:
    return "–" if value is None else f"{value:.1e}"


class Tail:
    """New complete lines of a file that another process appends to, in parts of a bounded size."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._incomplete = path, 0, b""

    def records(self) -> list[Record]:
        """The next ones; empty when the end of the file is reached."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as f:
            f.seek(self._offset)
            data = f.read(_READ_BYTES)
        self._offset += len(data)
        *lines, self._incomplete = (self._incomplete + data).split(b"\n")
        return list(parse_lines(line.decode(errors="replace") for line in lines))


@dataclass
class RunState:
    """The state of a run by its records so far."""

    steps: int
    rewards: dict[int, float] = field(default_factory=dict)
    eval_accuracy: dict[int, float] = field(default_factory=dict)
    last: Record = field(default_factory=dict)
    sft: Record = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def add(self, record: Record) -> None:
        """Applies the next record."""
        match record["kind"]:
            case "sft":
                self.sft = record
            case "step":
                self.last = record
                self.rewards[int(record["step"])] = float(record.get("reward_mean") or 0.0)
                _bound(self.rewards)
            case "eval":
                self.eval_accuracy[int(record["step"])] = float(record["eval_accuracy"])
                _bound(self.eval_accuracy)
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


@dataclass(frozen=True)
class ClusterState:
    """The records of etcd that the view shows; ``error`` is set instead when etcd does not answer."""

    status: JobStatus | None = None
    engines: tuple[Engine, ...] = ()
    """The first ones by id."""
    engine_count: int = 0
    events: tuple[Event, ...] = ()
    error: str = ""


def read_cluster(etcd: EtcdClient, keys: Keys, *, events_shown: int = 6) -> ClusterState:
    """Reads the records that the view shows."""
    try:
        found = etcd.get(keys.job_status())
        engines = etcd.page(keys.engines_prefix(), limit=_MAX_ENGINES)
        return ClusterState(
            JobStatus.decode(found.value) if found else None, tuple(Engine.decode(kv.value) for kv in engines.kvs),
            etcd.count(keys.engines_prefix()) if engines.more else len(engines.kvs),
            tuple(events.recent(etcd, keys, limit=events_shown)))
    except ElasticRLError as e:
        return ClusterState(error=e.message)


def render(job: str, state: RunState, cluster: ClusterState, *, elapsed_s: float, width: int = 80) -> RenderableType:
    """The whole view."""
    status, last = cluster.status, state.last
    phase = status.phase if status else "starting"
    done = int(last.get("step", 0))
    head = Table.grid(expand=True, padding=(0, 2))
    head.add_column()
    head.add_column(justify="right")
    head.add_row(Text.assemble((job, "bold"), f"  {phase}", (f"  step {done}/{state.steps}" if last else "", "bold")),
                 f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}")
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column()
    if state.sft and not last:
        facts.add_row("SFT phase", f"step {state.sft['step']}, eval accuracy {_f(state.sft.get('eval_accuracy'))}")
    rewards = sparkline([state.rewards[s] for s in sorted(state.rewards)], max(20, min(60, width - 40)))
    facts.add_row("reward", f"[cyan]{rewards}[/] {_f(last.get('reward_mean'))}")
    evals = [state.eval_accuracy[s] for s in sorted(state.eval_accuracy)]
    facts.add_row("eval accuracy", f"[yellow]{sparkline(evals, 60)}[/] {_f(evals[-1] if evals else None)}")
    facts.add_row("version", f"{last.get('policy_version', '–')}, staleness {last.get('staleness', '–')}, "
                             f"log-prob difference {_e(last.get('logprob_diff_max'))}")
    seconds = last.get("seconds") or {}
    facts.add_row("step time", f"{_f(seconds.get('total'), 2)} s  [dim]" + "  ".join(
        f"{k.replace('_', ' ')} {v:.2f}" for k, v in seconds.items() if k != "total" and v >= 0.005) + "[/]")
    parts: list[RenderableType] = [head, ProgressBar(total=state.steps, completed=done), facts, _engine_table(cluster)]
    if cluster.error:
        parts.append(Text(f"etcd does not answer: {cluster.error}", style="red"))
    parts += [Text(note, style="yellow") for note in state.notes]
    parts += [_event_line(e) for e in cluster.events]
    return Panel(Group(*parts), title="elastic-rl", border_style="dim")


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
    clock = datetime.fromtimestamp(event.at).strftime("%H:%M:%S")
    return Text(f"{clock} {event.kind} {event.subject}: {event.message}", style=_SEVERITY_STYLE[event.severity],
                no_wrap=True, overflow="ellipsis")


class LiveView:
    """Shows one run; ``tick`` may be called at any rate, ``close`` leaves the last state on the screen."""

    def __init__(self, *, job: str, steps: int, steps_path: Path, etcd: EtcdClient, console: Console | None = None,
                 interval_s: float = 0.5) -> None:
        self._job, self._etcd, self._keys = job, etcd, Keys(job)
        self._tail, self.state = Tail(steps_path), RunState(steps)
        self._console = console or Console()
        self._interval_s, self._next, self._start = interval_s, 0.0, time.monotonic()
        self._printed: deque[str] = deque(maxlen=_MAX_SEEN)
        self._live = Live(console=self._console, auto_refresh=False) if self._console.is_terminal else None
        if self._live:
            self._live.start()

    def tick(self) -> None:
        """Refreshes the view, at most every ``interval_s``."""
        if time.monotonic() >= self._next:
            self._refresh()
            self._next = time.monotonic() + self._interval_s

    def _refresh(self) -> None:
        while new := self._tail.records():
            for record in new:
                self.state.add(record)
                if self._live is None:
                    self._print(plain_line(record, self.state.steps))
        cluster = read_cluster(self._etcd, self._keys)
        if self._live:
            self._live.update(render(self._job, self.state, cluster, elapsed_s=time.monotonic() - self._start,
                                   width=self._console.width), refresh=True)
            return
        for event in cluster.events:
            if event.id not in self._printed:
                self._printed.append(event.id)
                self._print(f"event {event.kind} {event.subject}: {event.message}")

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        self._refresh()
        if self._live:
            self._live.stop()


def summary(report: Record, report_html: Path) -> Table:
    """The summary at the end of a run, from its report."""
    table = Table(title=f"{report['job']}: {report['status']}", title_justify="left", show_header=False, box=None)
    table.add_column(style="dim")
    table.add_column()
    healed = sum(f["healed_at"] is not None for f in report["faults"])
    rows = [("steps", f"{report['steps']} ({report['steps_redone']} repeated), {report['samples_trained']} samples"),
            ("eval accuracy", f"{_f(report['eval_accuracy_first'])} → {_f(report['eval_accuracy_last'])}"),
            ("reward", f"{_f(report['reward_first'])} → {_f(report['reward_last'])}"),
            ("step time", f"{_f(report['step_s_p50'], 2)} s median, {_f(report['tokens_per_s'], 0)} tokens/s"),
            ("log-prob difference", f"{_e(report['logprob_diff_max'])} between engines and trainer at most"),
            ("groups", f"{report['groups_lost']} lost, {report['groups_duplicated']} trained twice"),
            ("faults", f"{healed} of {len(report['faults'])} healed" if report["faults"] else "none injected"),
            ("wall time", f"{report['wall_s']:.0f} s"), ("report", str(report_html))]
    for name, value in rows:
        table.add_row(name, value)
    return table
