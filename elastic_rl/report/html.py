"""The report as one HTML file: no script, style, font or picture from anywhere else. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from html import escape
from pathlib import Path
from typing import Any

from elastic_rl.host.paths import JobPaths
from elastic_rl.report import charts
from elastic_rl.report.build import effective_steps, percentile, sft_evaluations, version_lags
from elastic_rl.report.curves import curves
from elastic_rl.report.frame import MOST_MARKED
from elastic_rl.report.page import duration as _duration
from elastic_rl.report.page import legend as _legend
from elastic_rl.report.page import page
from elastic_rl.report.page import section as _section
from elastic_rl.report.page import table as _table
from elastic_rl.report.page import value as _value
from elastic_rl.runtime.files import replace_file
from elastic_rl.runtime.words import counted

_MOST_ROWS = 200
"""Rows of a table of engines or faults: the newest."""
_TILES = 6
"""Evaluation sets that have a tile; the table has all."""
_STAGE_WORDS = {"devices": "hand over devices", "sync": "wait for engines", "generate": "generate", "reward": "reward",
                "groups": "wait for groups",
                "teacher": "teacher", "advantage": "advantage", "train": "train", "publish_stall": "publish stall",
                "other": "other"}


def render(report: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> str:
    """HTML of a report (``build``'s) and the records it was made from."""
    steps = effective_steps(records)
    marks = [(float(f["step"]), str(f["name"])) for f in report["faults"] if f.get("step") is not None]
    eval_accuracy = [(float(r["step"]), float(r["eval_accuracy"])) for r in effective_steps(records, "eval")]
    rewards = [(float(r["step"]), float(r["reward_mean"])) for r in steps if r.get("reward_mean") is not None]
    sft = [(float(r["step"]), float(r["eval_accuracy"])) for r in sft_evaluations(records)
           if r.get("eval_accuracy") is not None]
    sections = [
        _section("Result", _result_table(report["output"])),
        _section("Every number", _number_table(report)),
    ] if report.get("output") else [
        _section("Learning", charts.learning([], sft, [], axis="SFT step"),
                 _legend(("c2", "accuracy on held-out demonstrations, of whole answers"))),
        _section("Every number", _number_table(report)),
    ] if _is_sft(report) else [
        _section("Learning", charts.learning(rewards, eval_accuracy, marks),
                 _legend(("c1", "mean reward of the step (moving average over the faint line)"),
                         ("c2", "mean reward of the evaluation set")),
                 _first_last_table("further evaluation set", "accuracy", report.get("eval_sets")),
                 _first_last_table("part of the reward", "value in evaluations", report.get("eval_reward_parts"))),
        _section("Training metrics", curves(steps)),
        _section("Where a step's time goes",
                 charts.step_seconds([(int(r["step"]), r.get("seconds") or {}) for r in steps], marks),
                 _legend(*((f"p-{p}", _STAGE_WORDS[p]) for p in charts.STAGE_ORDER
                           if any(p in (r.get("seconds") or {}) for r in steps))), _stage_table(steps)),
        _section("Version lag per engine",
                 charts.engine_lanes(version_lags(steps), [int(r["step"]) for r in steps],
                                     int(report["staleness_max"])),
                 _legend(("l0", "at the head"), ("l1", "behind, within the bound"), ("l2", "behind, out of bound"),
                         ("track", "not serving")), _engine_table(report["engines"])),
        _faults(report, records),
        _section("Every number", _number_table(report)),
    ]
    at = [float(r["at"]) for r in records if r.get("at") is not None]
    when = datetime.fromtimestamp(min(at), UTC).strftime("%Y-%m-%d %H:%M UTC") if at else ""
    return page(report["job"], (
        f'<header><div><h1>{escape(report["job"])}</h1><p>elastic-rl run report · {when} · seed {report["seed"]} · '
        f'{_duration(report["wall_s"])}{_periods(report)}</p></div><span class="badge {escape(report["status"])}">'
        f'{escape(report["status"])}</span></header>{_note(report)}{_tiles(report)}{"".join(sections)}'
        f'<footer>Made from steps.jsonl and etcd. The same numbers are in report.json.</footer>'))


def write(report: Mapping[str, Any], records: Sequence[dict[str, Any]], paths: JobPaths) -> Path:
    """Puts report.json and report.html into the job's folder, each whole or not at all; returns the page's path."""
    paths.folder.mkdir(parents=True, exist_ok=True)
    for path, text in ((paths.report, json.dumps(report, indent=2) + "\n"),
                       (paths.report_page, render(report, records))):
        replace_file(path, text)
    return paths.report_page


def _note(report: Mapping[str, Any]) -> str:
    return f'<section><p>{escape(report["note"])}</p></section>' if report.get("note") else ""


def _periods(report: Mapping[str, Any]) -> str:
    """Which of the numbers are of the last run alone, of a job that was resumed."""
    last = report.get("last_run")
    return "" if last is None else (
        f" in the last run, which resumed at step {last['resumed_at']} and made {last['steps']} more; "
        "all other numbers are of the whole job")


def _tiles(report: Mapping[str, Any]) -> str:
    cells = [f"<div><span>{escape(a)}</span><b>{escape(b)}</b><small>{escape(c)}</small></div>"
             for a, b, c in _tiles_of(report)]
    return f'<div class="tiles">{"".join(cells)}</div>'


def _tiles_of(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    if report.get("output"):
        return _output_tiles(report["output"])
    return _sft_tiles(report["sft"]) if _is_sft(report) else _rl_tiles(report)


def _output_tiles(result: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    if "sets" in result:
        return [(name, _value(found["reward_mean"], 3), f"± {_value(found['standard_error'], 3)}, {found['prompts']} "
                 "prompts") for name, found in list(result["sets"].items())[:_TILES]]
    return [("prompts", f"{result['prompts']:,}", f"{sum(result['dropped'].values()):,} of them dropped"),
            ("samples", f"{result['samples']:,}", f"reward {_value(result['reward_mean'], 3)}"),
            ("kept", f"{result['kept']:,}", f"reward {_value(result['kept_reward_mean'], 3)}")]


def _result_table(result: Mapping[str, Any]) -> str:
    """The result as a table: a row for each set of an evaluation, or the numbers of rejection sampling."""
    if "sets" not in result:
        return _number_table(result)
    ks = sorted({int(k) for found in result["sets"].values() for k in found["pass_at"]})
    head = ["set", "prompts", "samples", "mean reward", "standard error", *(f"pass@{k}" for k in ks), "truncated",
            "tokens, mean", "tokens, max", "rewards failed"]
    rows = [[name, str(f["prompts"]), str(f["samples"]), _value(f["reward_mean"], 4), _value(f["standard_error"], 4),
             *(_value(f["pass_at"].get(str(k)), 4) for k in ks), _value(f["truncated"], 3),
             _value(f["response_tokens"]["mean"], 1), str(f["response_tokens"]["max"]), str(f["failed_rewards"])]
            for name, f in result["sets"].items()]
    return _table(head, rows, numeric=True)


def _first_last_table(what: str, value: str, by_name: Mapping[str, Mapping[str, float]] | None) -> str:
    return _table([what, f"first {value}", f"last {value}"],
                  [[name, _value(f["first"], 3), _value(f["last"], 3)] for name, f in (by_name or {}).items()],
                  numeric=True)


def _is_sft(report: Mapping[str, Any]) -> bool:
    """Whether the run had a supervised phase only, so far."""
    return bool(report["sft"]) and not report["steps"]


def _sft_tiles(sft: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    return [("eval exact match", _value(sft["eval_accuracy_last"], 3), f"from {_value(sft['eval_accuracy_first'], 3)}"),
            ("eval loss", _value(sft["eval_loss_last"], 3), f"from {_value(sft['eval_loss_first'], 3)}"),
            ("training loss", _value(sft["loss_last"], 3), f"from {_value(sft['loss_first'], 3)}"),
            ("SFT steps", str(sft["steps"]), "")]


def _rl_tiles(report: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    faults = report["faults"]
    healed = sum(f.get("healed_at") is not None for f in faults)
    return [
        ("eval reward", _value(report["eval_accuracy_last"], 3), f"from {_value(report['eval_accuracy_first'], 3)}"),
        ("reward", _value(report["reward_last"], 3), f"from {_value(report['reward_first'], 3)}"),
        ("steps", str(report["steps"]), f"{report['samples_trained']:,} samples"),
        ("step time, median", _value(report["step_s_p50"], 2, " s"),
         f"{_value(report['generate_tokens_per_s_p50'], 0)} tokens/s generated, "
         f"{_value(report['train_tokens_per_s_p50'], 0)} trained"),
        ("groups lost / twice", f"{report['groups_lost']} / {report['groups_duplicated']}",
         f"staleness at most {report['staleness_max']}"),
        ("faults healed", f"{healed} of {len(faults)}" if faults else "none injected",
         f"{counted(report['steps_redone'], 'step')} done again"),
    ]


def _faults(report: Mapping[str, Any], records: Sequence[dict[str, Any]]) -> str:
    faults = report["faults"]
    if not faults:
        return _section("Faults", "<p>No fault was injected in this run.</p>")
    at = [float(r["at"]) for r in records if r.get("at") is not None]
    ends = [float(f[k]) for f in faults for k in ("injected_at", "healed_at") if f.get(k) is not None]
    start, end = min(at + ends), max(at + ends)
    times = [(float(r["at"]), int(r["step"])) for r in records if r["kind"] == "step"]
    rows = [[str(n), f["name"], str(f["target"] or ""), _value(f["step"], 0), _value(f["detect_s"], 1, " s"),
             _value(f["heal_s"], 1, " s"), _words(" — ".join(filter(None, (f["witness"], f.get("problem"))))),
             _words(f["meanwhile"])]
            for n, f in [*enumerate(faults, 1)][-_MOST_ROWS:]]
    head = ["", "fault", "target", "step", "detected after", "healed after", "seen by", "meanwhile"]
    return _section("Faults", charts.fault_timeline(faults, times, start, end),
                    _legend(("undetected", "injected, not yet detected"), ("healing", "detected, not yet healed"),
                            ("step", "a finished step")),
                    _newest(len(faults), "fault"), _table(head, rows))


def _newest(count: int, what: str) -> str:
    """What a reader must know of a table and a chart that have the newest of so many only."""
    return "" if count <= MOST_MARKED else (
        f"<p>Of {counted(count, what)} the newest {MOST_MARKED} are drawn, and the newest "
        f"{min(count, _MOST_ROWS)} listed; report.json has all.</p>")


def _stage_table(steps: Sequence[dict[str, Any]]) -> str:
    rows = []
    for stage in (*charts.STAGE_ORDER, "total"):
        spent = [float(s["seconds"][stage]) for s in steps if (s.get("seconds") or {}).get(stage) is not None]
        if spent:
            rows.append([_STAGE_WORDS.get(stage, stage), _value(percentile(spent, 0.5), 3, " s"),
                         _value(percentile(spent, 0.95), 3, " s"), _value(sum(spent), 1, " s")])
    return _table(["stage", "median", "95th percentile", "whole run"], rows, numeric=True)


def _engine_table(engines: Sequence[Mapping[str, Any]]) -> str:
    rows = [[e["id"], e["last_state"], str(e["steps_served"]), str(e["last_version"]), str(e["lag_max"]),
             _value(e["pull_apply_s_p50"], 3, " s"), _value(e["pause_s_p50"], 3, " s")]
            for e in sorted(engines, key=lambda engine: int(engine["last_version"]))]
    head = ["engine", "last state", "steps served", "last version", "largest lag", "pull and apply, median",
            "of it paused"]
    return _newest(len(rows), "engine") + _table(head, rows[-_MOST_ROWS:])


def _number_table(report: Mapping[str, Any]) -> str:
    rows = [[k, f"{v:.6g}" if isinstance(v, float) else str(v)] for k, v in report.items()
            if not isinstance(v, list | dict)]
    return _table(["key", "value"], rows)


def _words(value: Any) -> str:
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


