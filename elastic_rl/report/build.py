"""Makes the numbers of a report from a run's records. Pure but for ``read_records``.

A step that was done again after a rewind counts once, as it was done last; what was thrown away still shows in the
timeline and in ``steps_redone``.
"""

from __future__ import annotations

import heapq
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from elastic_rl.data.ledger import Audit
from elastic_rl.etcd.records import Version

Record = dict[str, Any]
_OF_STEP = ("kind", "at", "step", "policy_version", "engines", "seconds", "throughput", "tokens", "samples",
            "dropped_groups", "reward_mean", "staleness", "logprob_diff_max")
"""What ``build`` reads of the record of a step."""
_TOGETHER = 500
"""Lines that are parsed together."""
_BLOCK_BYTES = 64 << 10
"""Bytes that are read at once from the end of a file."""


def read_records(path: Path) -> list[Record]:
    """Records of a steps.jsonl in order; a last line that is torn (its writer was killed) is left out."""
    return list(_records(path))


def read_for_build(path: Path) -> list[Record]:
    """Records of a steps.jsonl, as ``read_records`` gives them, of a step with what ``build`` reads of it alone: prompt
    groups and metrics are most of such a record."""
    return [{name: record[name] for name in _OF_STEP if name in record} if record["kind"] == "step" else record
            for record in _records(path)]


def _records(path: Path) -> Iterator[Record]:
    if path.exists():
        with path.open(encoding="utf-8", errors="replace") as lines:
            yield from parse_lines(lines)


def read_records_since(path: Path, at: float) -> list[Record]:
    """The records of a steps.jsonl from one before ``at`` (unix s) on, read from the end of the file, so that the time
    of reading does not grow with it."""
    if not path.exists():
        return []
    found = b""
    with path.open("rb") as file:
        begin = file.seek(0, os.SEEK_END)
        while begin:
            size = min(_BLOCK_BYTES, begin)
            begin = file.seek(begin - size)
            found = file.read(size) + found
            head, _, rest = found.partition(b"\n")  # the first line may be the end of one
            first = next(iter(parse_lines([(rest if begin else found).partition(b"\n")[0].decode(errors="replace")])),
                         None)
            written = None if first is None else first.get("at")
            if begin and written is not None and float(written) < at:
                found = rest
                break
    return list(parse_lines(found.decode(errors="replace").splitlines()))


def in_order(records: Sequence[Record], others: Sequence[Record]) -> list[Record]:
    """The records of two files by time, each file in its own order."""
    return list(heapq.merge(records, others, key=lambda record: float(record.get("at") or 0.0)))


def parse_lines(lines: Iterable[str]) -> Iterable[Record]:
    """Records of JSON lines; what is not a whole JSON object is skipped."""
    left = iter(lines)
    while some := list(islice(left, _TOGETHER)):
        for record in _parsed(some):
            if isinstance(record, dict) and "kind" in record:
                yield record


def _parsed(lines: Sequence[str]) -> Iterator[Any]:
    """What is JSON of some lines. Those that are parsed together share the names of their fields, of which a record has
    about eighty: half of its memory."""
    try:
        whole = json.loads(f"[{','.join(lines)}]")
    except json.JSONDecodeError:
        whole = ()
    if len(whole) == len(lines):  # else a line is none, or several
        yield from whole
        return
    for line in lines:
        with suppress(json.JSONDecodeError):
            yield json.loads(line)


def parse_parts(parts: Iterable[bytes]) -> Iterable[Record]:
    """Records of JSON lines that come in parts, which may end within a line."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        yield from parse_lines(line.decode(errors="replace") for line in lines)
    yield from parse_lines([rest.decode(errors="replace")])


def effective_steps(records: Iterable[Record], kind: str = "step") -> list[Record]:
    """Records of one kind that were not undone by a later rewind, one a step, by step."""
    kept: dict[int, Record] = {}
    for record in records:
        if record["kind"] == kind:
            kept[int(record["step"])] = record
        elif record["kind"] == "rewind":
            kept = {step: r for step, r in kept.items() if step <= int(record["to_step"])}
    return [kept[step] for step in sorted(kept)]


def percentile(values: Sequence[float], q: float) -> float | None:
    """Linear-interpolated percentile, ``q`` in [0, 1]; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    at = q * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (at - low)


def version_lags(steps: Sequence[Record]) -> dict[str, dict[int, int]]:
    """Engine id → step → versions that the engine lay behind the head the step began with.

    A step's record names the version published at its end, so the head it began with is the step before's; an engine
    that is not in a step's record, or not ready in it, did not serve it.
    """
    lags: dict[str, dict[int, int]] = {}
    head: int | None = None
    for record in steps:
        began_with = head if head is not None else int(record.get("policy_version") or 1) - 1
        for engine in record.get("engines") or []:
            if engine.get("state", "ready") != "ready":
                continue  # it is starting or leaving: the router sends it nothing
            # An engine may be ahead of the remembered head: a recovered trainer published again in between.
            lag = max(0, began_with - int(engine.get("version") or 0))
            lags.setdefault(str(engine["id"]), {})[int(record["step"])] = lag
        head = int(record.get("policy_version") or began_with)
    return lags


def _engines(steps: Sequence[Record], known: Sequence[str]) -> list[Record]:
    lags = version_lags(steps)
    last: dict[str, Record] = {}
    for record in steps:
        for engine in record.get("engines") or []:
            last[engine["id"]] = engine
    pulls, pauses = _per_version(steps, "pull_apply_s"), _per_version(steps, "pause_s")
    return [{"id": e, "steps_served": len(lags.get(e, {})), "last_version": int(last.get(e, {}).get("version") or 0),
             "last_state": str(last.get(e, {}).get("state") or "never ready"),
             "lag_max": max(lags.get(e, {}).values(), default=0),
             "pull_apply_s_p50": percentile(pulls.get(e, []), 0.5),
             "pause_s_p50": percentile(pauses.get(e, []), 0.5)}
            for e in sorted({*known, *last})]


def _per_version(steps: Sequence[Record], what: str) -> dict[str, list[float]]:
    """What each engine, by its id, took for each version."""
    took = {(e["id"], e["version"]): float(e[what]) for r in steps for e in r.get("engines") or [] if e.get(what)}
    found: dict[str, list[float]] = {}
    for (engine, _), seconds in took.items():
        found.setdefault(engine, []).append(seconds)
    return found


def _all(by_engine: Mapping[str, Sequence[float]]) -> list[float]:
    return [seconds for values in by_engine.values() for seconds in values]


def _fault(record: Record) -> Record:
    out = {k: record.get(k) for k in
           ("name", "step", "target", "injected_at", "detected_at", "healed_at", "may_go_unnoticed", "witness",
            "problem", "said", "meanwhile")}
    start = record.get("injected_at")
    for name, end in (("detect_s", record.get("detected_at")), ("heal_s", record.get("healed_at"))):
        out[name] = end - start if start is not None and end is not None else None
    return out


def _eval_accuracy(records: Sequence[Record]) -> list[float]:
    """Eval accuracies of RL by step, with the end of the SFT phase before them if step 0 was not measured."""
    evals = effective_steps(records, "eval")
    values = [float(r["eval_accuracy"]) for r in evals]
    warm = [float(r["eval_accuracy"]) for r in records if r["kind"] == "sft" and r.get("eval_accuracy") is not None]
    if warm and (not evals or int(evals[0]["step"]) > 0):
        values.insert(0, warm[-1])
    return values


def _by_name(records: Iterable[Record], key: str) -> dict[str, Record]:
    """First and last value of each name that evaluations have below a key."""
    found: dict[str, list[float]] = {}
    for record in effective_steps(records, "eval"):
        for name, accuracy in (record.get(key) or {}).items():
            found.setdefault(name, []).append(float(accuracy))
    return {name: {"first": values[0], "last": values[-1]} for name, values in found.items()}


def sft_evaluations(records: Iterable[Record]) -> list[Record]:
    """The newest of each step of the supervised phase, by step."""
    kept = {int(r["step"]): r for r in records if r["kind"] == "sft"}
    return [kept[step] for step in sorted(kept)]


def _sft(records: Sequence[Record]) -> Record | None:
    """The supervised phase, by its evaluations; None where there was none. ``loss``, and ``eval_loss`` of held-out
    answers: mean negative log-likelihood of a token, in nats; accuracy: of whole answers."""
    evals = sft_evaluations(records)
    if not evals:
        return None
    found: Record = {"steps": int(evals[-1]["step"])}
    for name in ("loss", "eval_loss", "eval_accuracy"):
        values = _numbers(evals, name)
        found |= {f"{name}_first": values[0] if values else None, f"{name}_last": values[-1] if values else None}
    return found


def _output(records: Iterable[Record]) -> Record | None:
    """The result of a job that trains nothing, once it is there: as eval.json or kept.json has it."""
    found = [r["result"] for r in records if r["kind"] == "output"]
    return dict(found[-1]) if found else None


def _numbers(steps: Sequence[Record], key: str) -> list[float]:
    return [float(r[key]) for r in steps if r.get(key) is not None]


def _throughput(steps: Sequence[Record]) -> dict[str, float | None]:
    """Medians of the steps' throughput, and the peak of the memory."""
    measured = [r.get("throughput") or {} for r in steps]
    memory = _numbers(measured, "peak_memory_bytes")
    return {**{f"{name}_p50": percentile(_numbers(measured, name), 0.5)
               for name in ("train_tokens_per_s", "generate_tokens_per_s", "tflops_per_rank", "mfu")},
            "peak_memory_bytes": max(memory, default=None)}


def _committed(versions: Sequence[Version], records: Sequence[Record]) -> int:
    """Policy versions that were ever committed: by the catalog, or by the run's own records where the catalog has
    already forgotten old ones."""
    seen = {int(r["policy_version"]) for r in records if r["kind"] in ("step", "eval") and r.get("policy_version")}
    return len(seen | {v.number for v in versions if v.committed_at > 0})


def _last_run(records: Sequence[Record], began_at: float) -> Record | None:
    """What the last run of a job made, by the times of its records: ``resumed_at``, the last step of the runs before
    that is part of the job, and the number of its ``steps``. None where it is the job's only run."""
    def made(records: Sequence[Record]) -> list[Record]:
        return effective_steps(records) or effective_steps(records, "sampled") or sft_evaluations(records)

    if not made([r for r in records if float(r.get("at") or 0.0) < began_at]):
        return None
    steps = made(records)
    resumed_at = max((int(r["step"]) for r in steps if float(r.get("at") or 0.0) < began_at), default=0)
    return {"resumed_at": resumed_at, "steps": max(int(r["step"]) for r in steps) - resumed_at}


def build(records: Sequence[Record], *, job: str, seed: int, versions: Sequence[Version], audit: Audit,
          status: str = "ended", engines: Sequence[str] = (), wall_s: float | None = None,
          run_began_at: float = 0.0, note: str = "") -> dict[str, Any]:
    """The report of a run. Times are seconds; a number that could not be measured is None.

    ``versions``: the policy stream's catalog, as it is or was; ``audit``: what the ledger says of the whole run;
    ``status``: the job's last phase; ``engines``: ids that are listed even if they never served; ``wall_s`` None: from
    the first record to the last; ``run_began_at``: when the last run began, unix seconds; ``note``: what a reader must
    know about these numbers.

    Every number is of the whole job, but for ``wall_s``, which is of the last run; ``last_run`` has what else is.
    """
    steps = effective_steps(records)
    seconds = [r.get("seconds") or {} for r in steps]
    total = [float(s["total"]) for s in seconds if s.get("total") is not None]
    stalls = [float(s["publish_stall"]) for s in seconds if s.get("publish_stall") is not None]
    rewards, eval_accuracy, at = _numbers(steps, "reward_mean"), _eval_accuracy(records), _numbers(list(records), "at")
    done = sum(1 for r in records if r["kind"] == "step")
    return {
        "job": job, "seed": seed, "status": status, "note": note,
        "sft": _sft(records), "output": _output(records),
        "steps": len(steps), "steps_redone": done - len(steps),
        "reward_first": rewards[0] if rewards else None, "reward_last": rewards[-1] if rewards else None,
        "eval_accuracy_first": eval_accuracy[0] if eval_accuracy else None,
        "eval_accuracy_last": eval_accuracy[-1] if eval_accuracy else None,
        "eval_sets": _by_name(records, "eval_sets"),
        "eval_reward_parts": _by_name(records, "eval_reward_parts"),
        "versions_committed": _committed(versions, records),
        "staleness_max": int(max(_numbers(steps, "staleness"), default=0)),
        "logprob_diff_max": max(_numbers(steps, "logprob_diff_max"), default=None),
        "samples_trained": int(sum(_numbers(steps, "samples"))),
        "groups_dropped": int(sum(_numbers(steps, "dropped_groups"))),
        "groups_lost": audit.lost, "groups_duplicated": audit.duplicated,
        "audit_problems": list(audit.problems),
        **_throughput(steps),
        "tokens_per_s": sum(_numbers(steps, "tokens")) / sum(total) if sum(total) > 0 else None,
        "step_s_p50": percentile(total, 0.5), "step_s_p95": percentile(total, 0.95),
        "publish_stall_s_p50": percentile(stalls, 0.5),
        "pull_apply_s_p50": percentile(_all(_per_version(steps, "pull_apply_s")), 0.5),
        "pause_s_p50": percentile(_all(_per_version(steps, "pause_s")), 0.5),
        "last_run": _last_run(records, run_began_at),
        "wall_s": wall_s if wall_s is not None else (max(at) - min(at) if at else 0.0),
        "engines": _engines(steps, engines),
        "faults": [_fault(r) for r in records if r["kind"] == "fault"],
    }
