"""Runs examples with several seeds, and checks what each run learned against ``thresholds.toml``.

    python examples/run_examples.py [NAME …] [--seeds 0,1,2]       # from the root of the repository
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic_rl import config
from elastic_rl.errors import ConfigError
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import python

EXAMPLES = Path(__file__).resolve().parent
POLICY_OF = {"eval": "sft", "rejection_sampling": "sft"}
"""Examples whose engines serve the policy that another example has made."""
MODEL_OF = {"genrm": ("judge", "pools.genrm.model"), "on_policy_distillation": ("teacher", "pools.teacher.model"),
            "tool_use": ("tool_calls", "model.path"), "game": ("game_moves", "model.path")}
"""Examples for which another one makes a model → that one, and the setting that names its folder."""
_STOP_S = 180.0
"""For a run that is interrupted: it takes its cluster down."""


@dataclass(frozen=True)
class Threshold:
    """Fractions of held-out problems that are solved."""

    before: float
    """At most, at the beginning."""
    after: float
    """At least, at the end."""
    gain: float
    """The least by which the end is above the beginning: several standard errors of the two."""
    part: str = ""
    """Part of the reward that says whether a problem is solved, where the reward itself does not."""


@dataclass(frozen=True)
class Result:
    """One run of an example."""

    example: str
    seed: int
    job: str
    before: float | None
    after: float | None
    seconds: float
    fault: str
    """Why it failed; "" if it did not."""


def thresholds(path: Path = EXAMPLES / "thresholds.toml") -> dict[str, Threshold]:
    """The thresholds by the name of the example. Raises ConfigError for a table that cannot hold."""
    found = {name: Threshold(**entry) for name, entry in tomllib.loads(path.read_text(encoding="utf-8")).items()}
    for name, threshold in found.items():
        if not 0 <= threshold.before < threshold.after <= 1 or not 0 < threshold.gain <= threshold.after:
            raise ConfigError(f"{path.name}: {name} has before={threshold.before:g}, after={threshold.after:g} and "
                              f"gain={threshold.gain:g}", hint="all are fractions, and after is the largest one")
    return found


def examples(names: Sequence[str]) -> list[str]:
    """The names of the examples that are asked for; all of them for none. Raises ConfigError for an unknown one."""
    known = sorted(path.stem for path in EXAMPLES.glob("*.yaml"))
    wanted = [name.removesuffix(".yaml").rpartition("/")[2] for name in names]
    if unknown := [name for name in wanted if name not in known]:
        raise ConfigError(f"there is no example {', '.join(unknown)}", hint=f"examples: {', '.join(known)}")
    return wanted or known


def accuracies(report: Mapping[str, Any], of_part: str = "") -> tuple[float | None, float | None]:
    """Accuracy before and after, of a report: of RL, or of the supervised phase where there was nothing else.
    ``of_part``: by this part of the reward. Pure."""
    if of_part:
        found = (report.get("eval_reward_parts") or {}).get(of_part) or {}
        return found.get("first"), found.get("last")
    part: Mapping[str, Any] = report if report.get("steps") else report.get("sft") or {}
    return part.get("eval_accuracy_first"), part.get("eval_accuracy_last")


def fault_of(code: int, before: float | None, after: float | None, threshold: Threshold | None) -> str:
    """Why a run with this exit code failed; "" if it did not. Pure."""
    if code:
        return f"ended with exit code {code}"
    if threshold is None:
        return ""
    if before is None or after is None:
        return "was not evaluated before and after"
    faults = [f"began at {before:.2f}, more than {threshold.before:.2f}"] if before > threshold.before else []
    if after < threshold.after:
        faults.append(f"ended at {after:.2f}, less than {threshold.after:.2f}")
    if after - before < threshold.gain:
        faults.append(f"gained {after - before:.2f}, less than {threshold.gain:.2f}")
    return "; ".join(faults)


def table(results: Sequence[Result]) -> list[str]:
    """Lines for people. Pure."""
    rows = [("example", "seed", "before", "after", "seconds", "")]
    rows += [(r.example, str(r.seed), _number(r.before), _number(r.after), f"{r.seconds:.0f}",
              f"FAILED: {r.fault}" if r.fault else "ok") for r in results]
    widths = [max(len(row[i]) for row in rows) for i in range(6)]
    return ["  ".join(cell.ljust(width) if i in (0, 5) else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def job_of(name: str, seed: int) -> str:
    """A name for the job of a run, which no other one has."""
    return f"{name.replace('_', '-')[:20]}-s{seed}-{time.strftime('%m%d-%H%M%S')}"


def settings_of(seed: int, job: str) -> list[str]:
    """The settings of a run, on top of its example's."""
    return [f"--job={job}", f"--seed={seed}"]


def require_settings(names: Sequence[str], seeds: Sequence[int]) -> None:
    """Raises ConfigError for an example that cannot run with one of the seeds, its base included."""
    for name in (*names, *(POLICY_OF[name] for name in names if name in POLICY_OF),
                 *(MODEL_OF[name][0] for name in names if name in MODEL_OF)):
        for seed in seeds:
            config.load(EXAMPLES / f"{name}.yaml", settings_of(seed, job_of(name, seed)))


def run(name: str, seed: int, job: str, limit_s: float, threshold: Threshold | None, *arguments: str) -> Result:
    """Trains an example as a job of its own, on a cluster of its own. Its output goes to a file that is named.
    ``arguments``: further ones of ``elastic-rl train``."""
    settings = settings_of(seed, job)
    cfg = config.load(EXAMPLES / f"{name}.yaml", settings)
    log = cfg.run_dir / f"{job}.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    print(f"{name}, seed {seed}: see {log}", flush=True)
    began = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(python("elastic_rl.cli.main", "train", "-c", str(EXAMPLES / f"{name}.yaml"),
                                          "--with-cluster", *settings, *arguments),
                                   stdout=output, stderr=subprocess.STDOUT,
                                   env={**os.environ, "PYTHONPATH": os.pathsep.join(  # for code of examples
                                       filter(None, (str(EXAMPLES), os.environ.get("PYTHONPATH"))))})
        with _stopped(process):
            try:
                fault = ""
                process.wait(limit_s)
            except subprocess.TimeoutExpired:
                fault = f"did not end in {limit_s:g} s"
    before, after = accuracies(_report(JobPaths.of(cfg).report), threshold.part if threshold else "")
    return Result(name, seed, job, before, after, time.monotonic() - began,
                  fault or fault_of(process.returncode, before, after, threshold))


def _policy(name: str, job: str) -> Path:
    """Folder of the policy that a run has left."""
    return JobPaths.of(config.load(EXAMPLES / f"{name}.yaml", [f"--job={job}"])).policy


def _report(path: Path) -> dict[str, Any]:
    """{} where the run has left none."""
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}


@contextlib.contextmanager
def _stopped(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Ends the process at the end, if it runs: with a signal on which it takes its cluster down, unless that is to
    stay. No SIGINT: started in the background of a shell script, it would ignore that."""
    try:
        yield
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="examples", description="Runs examples, and checks what they learn.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="examples, as jsonl_math (default: all)")
    parser.add_argument("--seeds", default="0", help="seeds, as 0,1,2 (default: 0)")
    parser.add_argument("--limit-s", type=float, default=3600.0, help="seconds that a run may take (default: 3600)")
    given = parser.parse_args(arguments)
    try:
        known, names = thresholds(), examples(given.names)
        seeds = [int(seed) for seed in given.seeds.split(",")]
        require_settings(names, seeds)  # before the first run, since a fault of a later one would cost all results
    except ConfigError as e:
        parser.error(f"{e.message}; {e.hint}")
    except ValueError:
        parser.error(f"--seeds={given.seeds} is no list of numbers, as 0,1,2")
    make_assets()
    results = run_all([(name, seed) for name in names for seed in seeds], known, given.limit_s)
    print("", *table(results), sep="\n")
    return int(any(result.fault for result in results))


def make_assets() -> None:
    """Models, tokenizers and data of the examples, those that are not there."""
    subprocess.run([sys.executable, str(EXAMPLES / "make_assets.py")], check=True, stdout=subprocess.DEVNULL)


def run_all(wanted: Sequence[tuple[str, int]], known: Mapping[str, Threshold], limit_s: float) -> list[Result]:
    """Runs examples, each by name and seed, and before them those whose policy they take: the cluster of such a one
    stays up to the end, however that comes; one that cannot be ended is its run's fault. The state of a run that ended
    well is deleted. What would take the policy of a run that failed is not started."""
    done: dict[tuple[str, int], Result] = {}
    taken = {(POLICY_OF[name], seed) for name, seed in wanted if name in POLICY_OF}
    with contextlib.ExitStack() as clusters:
        def require(name: str, seed: int) -> Result:
            if (name, seed) not in done:
                done[name, seed] = result = start(name, seed, job_of(name, seed))
                print(table([result])[-1], flush=True)
            return done[name, seed]

        def start(name: str, seed: int, job: str) -> Result:
            arguments = []
            if name in POLICY_OF:
                base = require(POLICY_OF[name], seed)
                if base.fault:
                    return Result(name, seed, job, None, None, 0.0, f"needs {base.example}, which failed")
                arguments.append(f"--from-job={base.job}")
            if name in MODEL_OF:
                of, setting = MODEL_OF[name]
                base = require(of, seed)
                if base.fault:
                    return Result(name, seed, job, None, None, 0.0, f"needs {base.example}, which failed")
                arguments.append(f"--{setting}={_policy(of, base.job)}")
            if (name, seed) in taken:
                arguments.append("--keep-up")
                clusters.callback(end, name, seed, job)
            result = run(name, seed, job, limit_s, known.get(name), *arguments)
            if not result.fault and (name, seed) not in taken:
                _down(name, job, purge=True)
            return result

        def end(name: str, seed: int, job: str) -> None:
            result = done.get((name, seed))  # None: the run was interrupted
            ended = _down(name, job, purge=result is not None and not result.fault)
            if result is not None and not ended:
                done[name, seed] = replace(result, fault=result.fault or "its cluster cannot be ended")

        for name, seed in wanted:
            require(name, seed)
    return list(done.values())


def _down(name: str, job: str, *, purge: bool) -> bool:
    """Ends the cluster of a run, and says whether it could; why not is on stderr. ``purge``: the state of the job is
    deleted too; its report and its policy stay."""
    command = python("elastic_rl.cli.main", "down", "-c", str(EXAMPLES / f"{name}.yaml"), f"--job={job}",
                     *(["--purge", "--yes"] if purge else []))
    return not subprocess.run(command, check=False, stdout=subprocess.DEVNULL).returncode


if __name__ == "__main__":
    os.chdir(EXAMPLES.parent)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
