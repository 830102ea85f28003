"""``elastic-rl train --only``: one half of a run, to debug it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_rl.cli.common import say
from elastic_rl.cli.debug import initial_weights
from elastic_rl.cli.step_lines import update_line
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:
    from elastic_rl.config import Config

_STEP_LIMIT_S = 3600.0
"""Longest time for a step. A collective whose rank is gone ends by ``trainer.collective_timeout_s``."""
_LOCK = "lock"
_NAME_CHARS = 40
"""Longest name of a job (``config.root.JOB_NAME``)."""


class Only(StrEnum):
    ROLLOUT = "rollout"
    TRAIN = "train"


def require(part: Only | None, from_steps: Path | None, **options: bool) -> None:
    """Raises ConfigError for options of ``train`` that do not go together. ``options``: whether each one of a whole run
    was given, by its name."""
    if from_steps is not None and part is not Only.TRAIN:
        raise ConfigError("--from-steps is for `train --only train`", hint="add --only train, or leave it out")
    given = [f"--{name.replace('_', '-')}" for name, is_given in options.items() if is_given]
    if part is Only.TRAIN and given:
        raise ConfigError(f"--only train starts no cluster, and no run that has {', '.join(given)}",
                          hint=f"leave {', '.join(given)} out")
    if part is Only.ROLLOUT and options["faults"]:
        raise ConfigError("--faults are for whole runs", hint="leave --faults or --only out")


def rollout(cfg: Config, *, with_cluster: bool) -> Config:
    """The settings of the job that generates the steps of another one, of ``cfg``, and trains nothing. It has a name of
    its own, which no job under this ``run_dir`` has had. ``with_cluster``: it gets a cluster for this run only. Raises
    ConfigError."""
    from elastic_rl import config
    from elastic_rl.data.step_file import MAX_FILES
    _require_rl(cfg, Only.ROLLOUT)
    if not (with_cluster or cfg.cluster):
        raise ConfigError("--only rollout runs as a job of its own, for which there is no cluster",
                          hint="add --with-cluster, or --cluster=NAME of one that is up")
    steps = min(cfg.train.steps, MAX_FILES)
    values = cfg.model_dump(mode="json")
    values |= {"job": _free_name(cfg), "mode": "rejection_sampling", "placement": "disaggregated"}
    values["rejection"]["prompts"] = steps * cfg.train.prompts_per_step
    values["train"]["keep_steps"] = list(range(1, steps + 1))
    for group in cfg.forward_groups:
        values[group]["enabled"] = False
    return config.parse(values)


def say_rollout(cfg: Config, of: str) -> None:
    """Says what the job of these settings is; ``of``: name of the job that it was made from."""
    from elastic_rl.host.paths import JobPaths
    say(f"debugging run: job {cfg.job} generates {len(cfg.train.keep_steps)} steps of job {of} and trains nothing; "
        f"their groups are kept in {JobPaths.of(cfg).kept_steps} on the host of its actor, for `train --only train "
        f"--from-steps=FOLDER`; versions and records of job {of} stay as they are")


def _free_name(cfg: Config) -> str:
    """JOB-rollout-N, with the least N that is free; JOB is cut where the name would be too long for a job's."""
    from elastic_rl.host.paths import JobPaths
    ends = (f"-rollout-{number}" for number in count(1))
    names = (cfg.job[:_NAME_CHARS - len(end)].rstrip("-") + end for end in ends)
    return next(name for name in names if not JobPaths.of(cfg.model_copy(update={"job": name})).folder.exists())


def _require_rl(cfg: Config, part: Only) -> None:
    if cfg.mode != "rl":
        raise ConfigError(f"--only {part} is about RL steps, and job {cfg.job} has mode={cfg.mode}",
                          hint="give --mode=rl, with the other settings of an RL job")


def train(cfg: Config, from_steps: Path | None) -> None:
    """Trains from all steps that are kept, one after the other, with ranks on this host; prints what each one
    measured. ``from_steps``: a folder of kept steps of any job; else those of this job. Nothing of the job changes.
    Raises ConfigError, and as ``replay.run``."""
    from elastic_rl.data import step_file
    from elastic_rl.host.paths import JobPaths
    from elastic_rl.trainer import replay
    _require_rl(cfg, Only.TRAIN)
    paths = JobPaths.of(cfg)
    files = _kept(cfg, from_steps or paths.kept_steps,
                  None if from_steps else step_file.identity(cfg.job, paths.job_id))
    weights = initial_weights(cfg, None, option="--model.path")
    with _emptied(paths.only_train) as folder:
        say(f"debugging run: trains {len(files)} kept steps with {cfg.trainer.ranks} ranks of this host, from the "
            f"weights in {weights}; versions and records of job {cfg.job} stay as they are")
        replay.run(cfg, files, weights, folder, timeout_s=_STEP_LIMIT_S, on_step=lambda step, metrics: say(
            f"step {step}: loss {metrics.get('loss', float('nan')):.4g}, {update_line(metrics)}, log-prob difference "
            f"{metrics.get('logprob_diff_max', float('nan')):.1e}, {metrics.get('train_s', float('nan')):.2f} s"))
        say(f"metrics of all steps, and the logs of the ranks: {folder}")


def _kept(cfg: Config, folder: Path, job: str | None) -> dict[int, Path]:
    """The files of the steps in a folder, each of which was read once: what is wrong shows before anything runs.
    ``job``: ``step_file.identity``; None: of any one job. Raises ConfigError."""
    from elastic_rl.data import step_file
    from elastic_rl.trainer import replay
    steps = step_file.steps_in(folder)
    if not steps:
        raise ConfigError(f"no step is kept in {folder}", hint=(
            "train with --train.keep_steps=[1,2] first, on this host, or name the folder kept_steps of another job "
            "with --from-steps=FOLDER"))
    for step in steps:
        kept = step_file.read(folder, step, job)
        job = kept.job
        replay.require_replayable(cfg, kept.batch)
    return {step: step_file.path_of(folder, step).resolve() for step in steps}


@contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """A folder without what an earlier command left in it, for this process alone. Raises ConfigError where another
    one uses it, and PreflightFailed where it cannot be written."""
    from elastic_rl.host.file_lock import taken
    from elastic_rl.runtime.files import preflight_writes
    with preflight_writes(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / _LOCK).open("a", encoding="utf-8")
    with lock:
        if not taken(lock):
            raise ConfigError(f"another `train --only train` uses {folder}",
                              hint="wait for its end, or give another --run_dir or --job, with --from-steps")
        with preflight_writes(folder):
            for path in folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()
        yield folder
