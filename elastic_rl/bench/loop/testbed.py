"""What the rows share: one measured run, and the bare parts at the same work, each measured once."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

from elastic_rl.bench.loop import job
from elastic_rl.bench.loop.bare_engines import EngineRounds, measure_engines
from elastic_rl.bench.loop.bare_trainer import measure_trainer
from elastic_rl.bench.options import Options
from elastic_rl.config import Config
from elastic_rl.faults.injector import FaultPlan
from elastic_rl.host import inherited_model
from elastic_rl.host.paths import JobPaths
from elastic_rl.report.build import Record, in_order, read_records

T = TypeVar("T")


@dataclass(frozen=True)
class Run:
    """A run that has ended."""

    cfg: Config
    records: list[Record]
    policy: Path
    """Folder of the model that the bare parts and others start from."""


class Testbed:
    """One run of the bench. Everything that it starts ends with the ``with`` block."""

    def __init__(self, options: Options, stack: contextlib.ExitStack) -> None:
        """Raises ConfigError."""
        self.options = options
        self.folder = Path(tempfile.mkdtemp(prefix="erl-bench-loop-"))
        stack.callback(shutil.rmtree, self.folder, ignore_errors=True)
        self.cfg = job.configure(self.folder, options)
        # The bare parts see the GPUs that the run's processes see.
        os.environ.update(self.cfg.device.environment())
        self._results: dict[str, Any] = {}

    @classmethod
    @contextmanager
    def start(cls, options: Options) -> Iterator[Self]:
        with contextlib.ExitStack() as stack:
            yield cls(options, stack)

    # -- the run ------------------------------------------------------------------------------------------------------
    def run(self) -> Run:
        """The measured run; the first call trains. Raises ElasticRLError when it failed."""
        return self._once("run", self._train)

    def records(self) -> list[Record]:
        """Records of the measured run as far as it came."""
        return read_records(JobPaths.of(self.cfg).steps)

    def _train(self) -> Run:
        policy = self.folder / "policy"
        job.run(self.cfg, then=lambda cfg, info: inherited_model.keep_policy(cfg, info, policy))
        return Run(self.cfg, self.records(), policy)

    def variant(self, name: str, settings: Sequence[str], plan: FaultPlan | None = None) -> list[Record]:
        """Records of a run as the measured one with further settings; the first call of a name trains. ``plan``: faults
        of it. Raises ElasticRLError."""
        return self._once(name, lambda: _trained(
            job.configure(self._new_folder(name), self.options, settings), plan))

    def long_variant(self, name: str, settings: Sequence[str], plan: FaultPlan | None = None) -> list[Record]:
        """The variant, as ``variant`` has it, of the run with long responses."""
        from elastic_rl.bench.loop import long_responses
        return self._once(name, lambda: _trained(long_responses.configure_rl(
            self.folder / name, self.options, job.WARM_STEPS + self.long_rounds, settings), plan))

    def long_run(self) -> Run:
        """A run with responses of widely different lengths; the first call trains. Raises ElasticRLError."""
        return self._once("long run", self._train_long)

    @property
    def long_rounds(self) -> int:
        """The rounds, as ``rounds`` has them, of the run with long responses, whose steps take far longer."""
        return 3 if self.options.quick else 8

    def _train_long(self) -> Run:
        from elastic_rl.bench.loop import long_responses
        cfg = long_responses.configure_rl(self.folder / "long", self.options, job.WARM_STEPS + self.long_rounds)
        job.run(cfg)
        return Run(cfg, read_records(JobPaths.of(cfg).steps), inherited_model.began_with(cfg))

    def require_run(self) -> None:
        """Raises what ended the measured run, if it failed."""
        if isinstance(failure := self._results.get("run"), Exception):
            raise failure

    # -- the bare parts -----------------------------------------------------------------------------------------------
    @property
    def rounds(self) -> int:
        """Steps of work that the bare parts and others are measured at, besides those that do not count."""
        return 8 if self.options.quick else 30

    def engines(self) -> EngineRounds:
        """Bare engines at the work of the run's steps, with the policy that it ended with. Raises ElasticRLError."""
        run = self.run()
        return self._once("engines", lambda: measure_engines(run.cfg, run.policy, self._new_folder("engines"),
                                                             self.rounds))

    def trainer(self) -> list[float]:
        """Seconds of each step of a bare trainer on what the bare engines generated. Raises ElasticRLError."""
        run, shares = self.run(), self.engines().shares
        return self._once("trainer", lambda: measure_trainer(run.cfg, run.policy, self._new_folder("trainer"), shares))

    def long_engines(self) -> EngineRounds:
        """The engines, as ``engines`` measures them, of the run with long responses, with the model that it began with.
        Raises ElasticRLError."""
        run = self.long_run()
        return self._once("long engines", lambda: measure_engines(
            run.cfg, run.policy, self._new_folder("long-engines"), self.long_rounds))

    def long_trainer(self) -> list[float]:
        """The trainer, as ``trainer`` measures it, of the run with long responses. Raises ElasticRLError."""
        run, shares = self.long_run(), self.long_engines().shares
        return self._once("long trainer", lambda: measure_trainer(
            run.cfg, run.policy, self._new_folder("long-trainer"), shares))

    def _new_folder(self, name: str) -> Path:
        folder = self.folder / name
        folder.mkdir()
        return folder

    def _once(self, name: str, make: Callable[[], T]) -> T:
        if name not in self._results:
            try:
                self._results[name] = make()
            except Exception as e:  # it would fail again, minutes later
                self._results[name] = e
        if isinstance(found := self._results[name], Exception):
            raise found
        return found


def _trained(cfg: Config, plan: FaultPlan | None) -> list[Record]:
    job.run(cfg, plan=plan)
    paths = JobPaths.of(cfg)
    return in_order(read_records(paths.steps), read_records(paths.faults))
