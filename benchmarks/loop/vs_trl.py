"""vs-trl-small: the run's step in TRL's GRPOTrainer, in a process of its own on the same cores."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.loop import trl_program
from elastic_rl.bench.loop.bare_engines import requests_of_step
from elastic_rl.bench.loop.job import WARM_STEPS
from elastic_rl.bench.loop.overhead import tokens_row
from elastic_rl.bench.loop.steps import intervals
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.options import Unmeasurable
from elastic_rl.bench.workers import last_line
from elastic_rl.config import Config
from elastic_rl.data.sources import make_source
from elastic_rl.errors import DeadlineExceeded
from elastic_rl.host.processes import spawn, stop

PYTHON_ENV = "ELASTIC_RL_BENCH_TRL_PYTHON"
"""Environment variable: the Python interpreter that has TRL; this one by default."""
_ENV = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
_LIMIT_S = 1800.0


def measure(testbed: Testbed) -> Iterator[Row]:
    python = interpreter(testbed.folder)
    run, engines = testbed.run(), testbed.engines()
    trl = run_trl(python, spec(run.cfg, run.policy, testbed.rounds + WARM_STEPS), testbed.folder)
    yield from rows([s for _, s in intervals(run.records)], trl["seconds"][WARM_STEPS:], engines.seconds,
                    trl["versions"])
    yield tokens_row(run.records, mean(trl["tokens"][WARM_STEPS:]), "vs-trl-small-tokens", "TRL")


def rows(steps: Sequence[float], trl: Sequence[float], engines: Sequence[float], versions: str) -> list[Row]:
    """Rows from the seconds of each step of ours and of TRL's, and of each round of the bare engines. ``versions``:
    what TRL ran on. Pure."""
    return [Row.of("vs-trl-small", "TRL's seconds for a step over ours; limit: over those of bare engines alone",
                   [median(trl) / s for s in steps], "×", op=">=", limit=median(trl) / median(engines)),
            Row.of("vs-trl-small-s", f"a step of TRL ({versions})", trl, "s",
                   alternatives={"elastic-rl": median(steps)})]


def interpreter(folder: Path) -> str:
    """Absolute path of the Python that has TRL, and with it transformers. It is tried as the program is run later, in
    ``folder``. Raises Unmeasurable when there is none."""
    named = os.environ.get(PYTHON_ENV) or sys.executable
    found_at = shutil.which(os.path.expanduser(named))
    # Links are kept: the python of a virtual environment is one, and finds its packages by where it lies.
    python = os.path.abspath(found_at) if found_at else named
    try:
        probe = subprocess.run([python, "-c", "import importlib.metadata as m; print(m.version('trl'))"],
                               capture_output=True, timeout=60, check=False, cwd=folder,
                               env={**os.environ, **_ENV}, encoding="utf-8", errors="replace")
        found, why = probe.returncode == 0, "has no TRL"
    except (OSError, subprocess.TimeoutExpired) as e:
        found, why = False, f"cannot be run ({type(e).__name__})"
    if not found:
        raise Unmeasurable(f"{named} {why}: pip install 'elastic-rl[bench]', or name an interpreter that has it in "
                           f"{PYTHON_ENV}")
    return python


def spec(cfg: Config, policy: Path, steps: int, reward: str = "exact_match") -> dict[str, Any]:
    """What the program is to do: the prompts of the run's first steps, at the run's sizes. ``reward``: one that the
    program has."""
    source = make_source(cfg)
    prompts = [prompt for number in range(steps) for request in requests_of_step(cfg, source, number)
               for _, prompt in request]
    return {"model": str(policy), "steps": steps, "prompts": [list(p.token_ids) for p in prompts],
            "answers": [list(p.answer_ids or ()) for p in prompts], "prompts_per_step": cfg.train.prompts_per_step,
            "group_size": cfg.train.group_size, "updates": cfg.train.updates_per_step,
            "max_new_tokens": source.max_response_tokens, "stop_token_ids": list(source.stop_token_ids),
            "temperature": cfg.rollout.temperature, "reward": reward, "lr": cfg.train.lr,
            "seed": cfg.seed, "threads": len(os.sched_getaffinity(0))}


def run_trl(python: str, what: dict[str, Any], folder: Path) -> dict[str, Any]:
    """The result of TRL's program. Raises Unmeasurable with its reason, and DeadlineExceeded."""
    return run_program(python, Path(trl_program.__file__), what, folder, who="TRL")


def run_program(python: str, program: Path, what: dict[str, Any], folder: Path, *, who: str) -> dict[str, Any]:
    """What a program made of its specification. Raises Unmeasurable with its reason, and DeadlineExceeded."""
    given, result, log = (folder / f"{program.stem}{suffix}" for suffix in (".json", "-result.json", ".log"))
    given.write_text(json.dumps(what), encoding="utf-8")
    process = spawn([python, str(program), str(given), str(result)], log=log,
                    env={**_ENV, "OMP_NUM_THREADS": str(what["threads"])}, cwd=folder)
    try:
        process.wait(_LIMIT_S)
    except subprocess.TimeoutExpired as e:
        raise DeadlineExceeded(f"{who} did not do its steps in {_LIMIT_S:g} s: {last_line(log)}") from e
    finally:
        stop(process.pid, grace_s=2.0)
    if process.returncode or not result.exists():
        raise Unmeasurable(f"{who} ended with exit code {process.returncode}: {last_line(log)}")
    answer: dict[str, Any] = json.loads(result.read_text(encoding="utf-8"))
    return answer
