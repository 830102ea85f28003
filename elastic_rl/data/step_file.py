"""The batch of one step in a file, as the trainer got it: the wire of ``Batch`` with a header that says of which step
of which job it is. A file can be trained from again, on any parallel sizes and without engines (``trainer.replay``)."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import save

from elastic_rl.data.batch import Batch, header
from elastic_rl.errors import ConfigError
from elastic_rl.runtime.files import delete_oldest, read_limited, replace_file

log = logging.getLogger(__name__)

MAX_FILES = 32
"""So many of the newest files of a job are kept."""
MAX_BYTES = 4 << 30
"""A larger batch is not kept, and a longer file not read: the actor has it in memory twice more while it writes it."""
_FORM = "elastic-rl-step-1"
_FILES = "step-*.safetensors"


@dataclass(frozen=True)
class StepFile:
    """The batch of an RL step."""

    job: str
    """Name of the job and its id, which another job of the name does not have."""
    step: int
    versions: tuple[int, ...]
    """Policy versions that made its tokens."""
    batch: Batch

    def encode(self) -> bytes:
        batch = self.batch.loaded()
        about = {"form": _FORM, "job": self.job, "step": str(self.step), "versions": json.dumps(self.versions)}
        return save({name: tensor.contiguous() for name, tensor in batch.tensors.items()}, metadata=about)

    @classmethod
    def decode(cls, raw: bytes) -> StepFile:
        """Raises ConfigError for what is no such file."""
        about = header(raw).get("__metadata__")
        if not isinstance(about, dict) or about.get("form") != _FORM:
            raise ConfigError("this is no file of a step's batch of this release")
        try:
            versions = tuple(int(version) for version in json.loads(about["versions"]))
            return cls(str(about["job"]), int(about["step"]), versions, Batch.from_bytes(raw))
        except (KeyError, ValueError, TypeError, RecursionError) as e:
            raise ConfigError(f"the header of the file cannot be read: {e}") from e


def identity(job: str, id_file: Path) -> str:
    """What a job's files are known by. ``id_file``: the file with its id, of which a job of an older release has none.
    """
    try:
        return f"{job} {id_file.read_text(encoding='utf-8').strip()}"
    except (OSError, UnicodeDecodeError):
        return f"{job} "


def path_of(folder: Path, step: int) -> Path:
    return folder / f"step-{step:06d}.safetensors"


def steps_in(folder: Path) -> list[int]:
    """The steps that have a file in a folder, in their order; none where there is no folder."""
    return sorted(int(number) for path in folder.glob(_FILES)
                  if (number := path.stem.removeprefix("step-")).isdecimal())


def first_of(folder: Path, step: int) -> Path:
    """Where the first batch of a step is that was made again. With the name of ``path_of`` it can be read."""
    return folder / f"step-{step:06d}-first.safetensors"


def read(folder: Path, step: int, job: str | None) -> StepFile:
    """The file of a step. ``job``: ``identity`` of the job; None: of any. Raises ConfigError for one that is not there,
    cannot be read, or is of another job or step."""
    path = path_of(folder, step)
    try:
        found = StepFile.decode(read_limited(path, MAX_BYTES))
    except FileNotFoundError:
        there = steps_in(folder)
        hint = (f"kept on this host: steps {', '.join(map(str, there))}" if there else f"train with "
                f"--train.keep_steps=[{step}] before that step, and call this on the host of the actor")
        raise ConfigError(f"the batch of step {step} was not kept: there is no {path}", hint=hint) from None
    except OSError as e:
        raise ConfigError(f"{path} cannot be read: {e.strerror}") from e  # read_limited says what is wrong with it
    except ConfigError as e:
        raise ConfigError(f"{path}: {e.message}", hint=e.hint) from e
    if job is not None and found.job != job:
        raise ConfigError(f"{path} is of job {found.job.partition(' ')[0]!r}, or of an earlier one of this name",
                          hint="use the file of this job, or name the other job with --job and its --run_dir")
    if found.step != step:
        raise ConfigError(f"{path} is of step {found.step}", hint="it was renamed: give it the name of its step")
    return found


class StepKeeper:
    """Writes the batches of chosen steps. What fails is logged: the step is made all the same."""

    def __init__(self, steps: Sequence[int], folder: Path, job: str) -> None:
        """``job``: as of ``read``."""
        self.steps, self._folder, self._job = frozenset(steps), folder, job
        self._made = dict[int, int]()
        """How often each of the steps was begun."""

    def keep(self, step: int, batch: Batch, versions: Sequence[int]) -> None:
        """Called before the step is made, which may fail because of this very batch. The first batch of a step that is
        made again, without the groups for which it failed, stays beside the newest one."""
        if step not in self.steps:
            return
        path = path_of(self._folder, step)
        try:
            if (nbytes := int(batch.sample_bytes.sum())) > MAX_BYTES:
                raise ConfigError(f"it has {nbytes / 2**30:.1f} GiB, and {MAX_BYTES >> 30} GiB are kept at most")
            self._folder.mkdir(parents=True, exist_ok=True)
            if self._made.get(step) == 1 and path.exists():
                os.replace(path, first_of(self._folder, step))
            self._made[step] = self._made.get(step, 0) + 1
            replace_file(path, StepFile(self._job, step, tuple(versions), batch).encode(), private=True)
            delete_oldest(self._folder, _FILES, MAX_FILES)
            log.info("the batch of step %d is in %s", step, path)
        except Exception as e:  # also too little memory, and samples that a queue has lost, which the step finds itself
            log.warning("the batch of step %d is not kept: %s", step, e)
