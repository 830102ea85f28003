"""The report as one HTML file: no script, style, font or picture from anywhere else. Pure.

All that comes from a log is text here, whatever it has in it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from html import escape
from typing import Any

from chaos_tests.report import charts
from chaos_tests.validate.statistics import Timeline
from chaos_tests.validate.verdict import State
from elastic_rl.report.page import duration, legend, page, section, table, value
from elastic_rl.runtime.words import counted

_STYLE = """
.tiles { grid-template-columns: repeat(auto-fit, minmax(124px, 1fr)) } .tiles b { font-size: 22px }
.badge.passed { background: var(--good) }
.verdicts td:first-child { font-weight: 650; white-space: nowrap } .verdicts td { overflow-wrap: anywhere }
.verdicts small { color: var(--soft); font-size: 13px; display: block }
.state { font-weight: 650; white-space: nowrap }
.state.kept { color: var(--good) } .state.violated { color: var(--bad) }
.state.unseen { color: var(--soft) } .violations { margin: 6px 0 0; padding-left: 18px; font-size: 13.5px }
.violations li { margin-bottom: 4px } summary { cursor: pointer; color: var(--soft); font-size: 13px }
pre { margin: 6px 0; padding: 8px 10px; overflow-x: auto; border-radius: 6px; background: var(--page); font-size: 12px;
  max-height: 320px } pre:focus-visible, summary:focus-visible { outline: 2px solid var(--c1) }
code { font-size: 13px; overflow-wrap: anywhere; user-select: all }
.span { opacity: .16 } .span:hover { opacity: .4 } .struck { stroke: var(--bad); stroke-opacity: .35; stroke-width: 1 }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 4px 18px; margin: 0; font-size: 13.5px }
dt { color: var(--soft) } dd { margin: 0; overflow-wrap: anywhere }
"""
_WORDS = {State.KEPT: "✓ kept", State.VIOLATED: "✗ violated", State.UNSEEN: "– unseen"}


def render(report: Mapping[str, Any], run: Timeline, baseline: Timeline | None) -> str:
    """HTML of a report (``build``'s), with the steps of the run and of its baseline."""
    at = report.get("began_at")
    when = ""
    with suppress(ValueError, OverflowError, OSError, TypeError):  # a time of another age, or none
        when = datetime.fromtimestamp(float(at), UTC).strftime("%Y-%m-%d %H:%M UTC")  # type: ignore[arg-type]
    state = "passed" if report["passed"] else "failed"
    numbers = report["statistics"]
    head = (f'<header><div><h1>Chaos run: {escape(str(report.get("scenario") or "without a scenario"))}</h1>'
            f'<p>seed {escape(str(report.get("seed")))} · {counted(numbers["faults"], "fault")} · '
            f'{duration(numbers["wall_s"])} · {escape(when)} · {escape(str(report.get("target") or ""))}</p></div>'
            f'<span class="badge {state}">{state}</span></header>')
    return page(f"Chaos run {report.get('scenario') or ''} {report.get('seed')}", "".join((
        head, _tiles(report), section("Rules", _verdicts(report["verdicts"])), _throughput(run, baseline),
        _reward(run, baseline), _by_fault(numbers["by_fault"]), _faults(report["faults"]), _reproduced(report),
        "<footer>Made from events.jsonl. The same numbers are in report.json.</footer>")), _STYLE)


def _tiles(report: Mapping[str, Any]) -> str:
    numbers, verdicts = report["statistics"], report["verdicts"]
    states = [verdict["state"] for verdict in verdicts]
    lost, twice = numbers["groups_lost"], numbers["groups_duplicated"]
    tiles = [
        ("rules kept", f"{states.count(State.KEPT)} of {len(states)}",
         f"{states.count(State.VIOLATED)} violated, {states.count(State.UNSEEN)} unseen"),
        ("faults healed", f"{numbers['faults_healed']} of {numbers['faults']}",
         f"{numbers['faults_planned']} planned"),
        ("throughput kept", _percent(numbers["throughput_kept"]),
         "of the run without faults" if report["has_baseline"] else "there is no baseline"),
        ("effective training time", _percent(numbers["effective_training_time_ratio"]), "of the wall time"),
        ("groups lost / twice", "–" if lost is None else f"{lost} / {twice}",
         f"{counted(numbers['steps_redone'], 'step')} done again"),
        ("alerts", str(numbers["alerts"]), f"{counted(numbers['parts_struck'], 'part')} struck"),
        ("wrong-version tokens", str(numbers["wrong_version_tokens"]), f"{numbers['samples']:,} samples"),
    ]
    cells = [f"<div><span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small></div>" for a, b, c in tiles]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _percent(ratio: float | None) -> str:
    return "–" if ratio is None else f"{ratio * 100:.1f} %"


def _verdicts(verdicts: Sequence[Mapping[str, Any]]) -> str:
    rows = "".join(
        f'<tr><td>{escape(verdict["rule"])}</td><td>{escape(verdict["about"])}<small>{escape(verdict["evidence"])}'
        f'</small>{_violations(verdict)}</td><td class="state {escape(verdict["state"])}">'
        f'{escape(_WORDS[State(verdict["state"])])}</td></tr>' for verdict in verdicts)
    return ('<div class="scroll"><table class="verdicts"><thead><tr><th scope="col">rule</th><th scope="col">what it '
            f'says, and what was looked at</th><th scope="col">verdict</th></tr></thead><tbody>{rows}</tbody></table>'
            "</div>")


def _violations(verdict: Mapping[str, Any]) -> str:
    if not verdict["violations"]:
        return ""
    items = "".join(f"<li>{escape(violation['what'])}{_records(violation['records'])}</li>"
                    for violation in verdict["violations"])
    further = f"<li>and {verdict['further']} more</li>" if verdict["further"] else ""
    return f'<ul class="violations">{items}{further}</ul>'


def _records(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return ""
    lines = escape("\n".join(json.dumps(record) for record in records))
    return (f"<details><summary>{counted(len(records), 'record')} of the log</summary>"
            f'<pre tabindex="0">{lines}</pre></details>')


def _throughput(run: Timeline, baseline: Timeline | None) -> str:
    if not run.steps:
        return section("Throughput", "<p>The job has done no step.</p>")
    start, end = min(s.began_at for s in run.steps), max(s.ended_at for s in run.steps)
    words = [("c1", "samples a second")]
    words += [("c2", "of the run without faults")] if baseline is not None and baseline.steps else []
    return section(
        "Faults over throughput",
        charts.throughput(run.kept, run.happened, baseline.kept if baseline is not None else (), start=start, end=end),
        legend(*words, ("undetected", "injected, not yet detected"), ("healing", "detected, not yet healed")))


def _reward(run: Timeline, baseline: Timeline | None) -> str:
    mine, its = ([(float(s.step), s.reward) for s in of.kept if s.reward is not None] if of is not None else []
                 for of in (run, baseline))
    if not mine:
        return ""
    words = [("c1", "mean reward of the step")]
    words += [("c2", "the same seed without faults")] if its else []
    return section("Reward", charts.reward(mine, its, run.happened), legend(*words))


def _by_fault(kinds: Sequence[Mapping[str, Any]]) -> str:
    def spread(of: Mapping[str, Any], digits: int = 1) -> str:
        return " · ".join(value(of[what], digits) for what in ("median", "p95", "max")) if of["n"] else "–"

    rows = [[kind["name"], f"{kind['happened']} of {kind['planned']}", str(kind["heal_s"]["n"]),
             spread(kind["detect_s"]), spread(kind["heal_s"]), spread(kind["lost_s"]), spread(kind["redone"], 0),
             value(kind["alerts"]["max"], 0)] for kind in kinds]
    head = ["fault", "happened", "healed", "detected after, s", "healed after, s", "training lost, s", "steps redone",
            "alerts"]
    return section("Recovery by fault", table(head, rows, numeric=True) or "<p>No fault was planned.</p>",
                   "<p><small>Spreads are median · 95th percentile · largest; alerts are the most of one fault. "
                   "Training lost: the time until the first step after the recovery, less what the steps made "
                   "meanwhile take without a fault.</small></p>" if rows else "")


def _faults(faults: Sequence[Mapping[str, Any]]) -> str:
    happened = [fault for fault in faults if fault.get("witness")]
    rows = [[str(number), fault["name"], str(fault.get("target") or ""), str(fault.get("step")),
             value(fault["detect_s"], 1, " s"), value(fault["heal_s"], 1, " s"), str(fault.get("witness")),
             str(fault.get("said") or ""), str(fault.get("problem") or "")] for number, fault in enumerate(happened, 1)]
    rows += [["", fault["name"], str(fault.get("target") or ""), str(fault.get("step")), "–", "–", "it did not happen",
              "", str(fault.get("problem") or "")] for fault in faults if not fault.get("witness")]
    head = ["", "fault", "target", "step", "detected after", "healed after", "seen by", "the job said", "problem"]
    return section("Faults", f"<details><summary>{counted(len(faults), 'fault')}, one a row</summary>"
                             f"{table(head, rows)}</details>") if faults else ""


def _reproduced(report: Mapping[str, Any]) -> str:
    entries = [("the same faults again", "<code>elastic-rl chaos replay FOLDER</code>, the folder of this file")]
    if report["reproduce"]:
        entries += [("drawn again", f"<code>{escape(report['reproduce'])}</code>, by this release")]
    entries += [(name, escape(str(report.get(key)))) for name, key in (
        ("job", "job"), ("it ended as", "job_phase"), ("aborted", "aborted"), ("commit", "commit")) if report.get(key)]
    entries += [("versions", escape(", ".join(f"{name} {of}" for name, of in (report.get("versions") or {}).items())))]
    return section("Reproduce", "<dl>" + "".join(f"<dt>{escape(a)}</dt><dd>{b}</dd>" for a, b in entries) + "</dl>")
