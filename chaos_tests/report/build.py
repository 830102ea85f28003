"""What a report says, as a JSON object, and the files that it is written to."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from chaos_tests.event_log import Event, Records
from chaos_tests.faults.catalogue import Part
from chaos_tests.report.html import render
from chaos_tests.scenarios import SCENARIOS
from chaos_tests.validate.attribution import began
from chaos_tests.validate.judge import judge
from chaos_tests.validate.statistics import Timeline, statistics, timeline
from chaos_tests.validate.verdict import RULES, State, Verdict
from elastic_rl.config import Config
from elastic_rl.runtime.files import replace_file

FORM = 1
"""Form of report.json."""
EVENTS, BASELINE = "events.jsonl", "baseline"
REPORT, PAGE = "report.json", "report.html"
_PARTS = "|".join(Part)
_VALUES: Mapping[str, re.Pattern[str]] = {
    "--only": re.compile(f"(?:{_PARTS})(?:,(?:{_PARTS}))*"), "--at-once": re.compile(r"\d{1,6}"),
    "--recovery-minutes": re.compile(r"[\d.]{1,12}")}
"""Options of a line that strikes a job, and what their values look like."""
_SETTING = re.compile(r"--[a-z_]+(\.\w+)*=")
_OPTIONS = frozenset({"seed", "only"})
"""Names of settings that are options of the command, too."""
_MOST_RECORDS, _MOST_CHARS = 6, 1200
"""Most records of a violation, and characters of a value of them, that a report has: the log has all."""


@dataclass(frozen=True)
class Judged:
    """A run, its baseline, and what is said of them."""

    run: Timeline
    baseline: Timeline | None
    verdicts: Sequence[Verdict]

    @property
    def passed(self) -> bool:
        return all(verdict.state is not State.VIOLATED for verdict in self.verdicts)


def read(folder: Path) -> Judged:
    """Judges the log in a folder of results. Raises ValueError where a file is no log, and OSError."""
    log, its = Records(folder / EVENTS), folder / BASELINE / EVENTS
    if (its.exists() or its.is_symlink()) and not its.is_file():
        raise ValueError(f"{its} is no regular file")
    baseline = Records(its) if its.is_file() else None
    return Judged(timeline(log), timeline(baseline) if baseline is not None else None, judge(log, baseline))


def build(judged: Judged) -> dict[str, Any]:
    """``form``; ``passed``; of the run ``scenario``, ``seed``, ``target``, ``commit``, ``versions``, ``schedule``,
    ``job_phase``, ``aborted``; ``reproduce`` (a command line); ``verdicts``: a row for each rule with ``rule``,
    ``about``, ``state``, ``evidence``, ``violations`` (each ``what``, ``records``), ``further``; ``statistics``
    (``validate.statistics``); ``faults``: each as the log has it, with ``detect_s`` and ``heal_s``. A number that could
    not be measured is null."""
    run, end = judged.run.run, judged.run.end or {}
    return {
        "form": FORM, "passed": judged.passed,
        **{name: run.get(name) for name in ("scenario", "seed", "target", "commit", "versions", "schedule")},
        "began_at": run.get("at"), "job": (run.get("settings") or {}).get("job"), "job_phase": end.get("phase"),
        "aborted": end.get("aborted", ""), "has_baseline": judged.baseline is not None, "reproduce": reproduce(run),
        "verdicts": [_verdict(verdict) for verdict in judged.verdicts],
        "statistics": statistics(judged.run, judged.baseline),
        "faults": [_fault(fault) for fault in sorted(
            judged.run.faults, key=lambda f: began(f) if f.get("injected_at") is not None else math.inf)]}


def reproduce(run: Event) -> str:
    """The command line that draws the same schedule for the same job, quoted for a shell; secrets among its settings
    are to be filled in. "" of a log that names no scenario."""
    schedule: Mapping[str, Any] = run.get("schedule") or {}
    if not run.get("scenario"):
        return ""
    length = (["--minutes", f"{schedule['minutes']:g}"] if schedule.get("minutes") else
              ["--steps", str(schedule.get("steps", 0))])
    scenario = SCENARIOS.get(str(run["scenario"]))
    drawn = sum(len(strike["faults"]) for strike in schedule.get("strikes") or ())
    faults = ["--faults", str(drawn)] if scenario is None or scenario.faults or not drawn else []  # else its own
    chosen = schedule.get("baseline")
    baseline = [] if chosen is None else ["--baseline" if chosen is True else "--no-baseline"]
    settings = filter(_is_setting, map(str, schedule.get("settings") or ()))
    return shlex.join(["elastic-rl", "chaos", "run", "--scenario", str(run["scenario"]), "--seed", str(run.get("seed")),
                       *length, *faults, *baseline, *settings, *arguments(run)])


def arguments(run: Event) -> list[str]:
    """The words of ``arguments`` of a log that name a job and what of it may be struck. Somebody may have sent the log:
    others, such as one that would not ask, are left out."""
    found, words = list[str](), iter(map(str, run.get("arguments") or ()))
    for word in words:
        if word in _VALUES:
            value = next(words, "")
            found += [word, value] if _VALUES[word].fullmatch(value) else []
        elif word == "--allow-last" or _is_setting(word):
            found.append(word)
    return found


def _is_setting(word: str) -> bool:
    name = word.removeprefix("--").partition("=")[0]
    return bool(_SETTING.match(word)) and name.partition(".")[0] in Config.model_fields and name not in _OPTIONS


def write(folder: Path) -> Judged:
    """Writes report.json and report.html of the log in a folder of results, each whole or not at all; returns what they
    are of. Raises as ``read``."""
    judged = read(folder)
    report = build(judged)
    text = json.dumps(_finite(report), indent=1, allow_nan=False) + "\n"
    for name, content in ((REPORT, text), (PAGE, render(report, judged.run, judged.baseline))):
        # The name of a process, say, may have bytes that are no text.
        replace_file(folder / name, content.encode("utf-8", "replace").decode(), private=True)
    return judged


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {"rule": verdict.rule, "about": RULES[verdict.rule], "state": verdict.state.value,
            "evidence": verdict.evidence, "further": verdict.further,
            "violations": [{"what": violation.what,
                            "records": [_short(record) for record in violation.records[:_MOST_RECORDS]]}
                           for violation in verdict.violations]}


def _short(record: Event) -> dict[str, Any]:
    return {name: value if len(text := json.dumps(value)) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"
            for name, value in record.items()}


def _fault(fault: Event) -> dict[str, Any]:
    def after(moment: str) -> float | None:
        return fault[moment] - fault["injected_at"] if fault.get(moment) is not None and (
            fault.get("injected_at") is not None) else None
    return {**{name: value for name, value in fault.items() if name != "kind"},
            "detect_s": after("detected_at"), "heal_s": after("healed_at")}


def _finite(value: Any) -> Any:
    """Numbers that JSON does not have are null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return [_finite(each) for each in value] if isinstance(value, list | tuple) else value
