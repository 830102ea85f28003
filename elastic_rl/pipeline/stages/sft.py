"""The stages of ``mode: sft``."""

from __future__ import annotations

import contextlib

from elastic_rl.pipeline import schedule
from elastic_rl.pipeline.sampling.prompt_reader import PromptReader
from elastic_rl.pipeline.schedule import RunPlan
from elastic_rl.pipeline.stages.term import ActorTerm
from elastic_rl.pipeline.stages.trainer import TrainerAccess, TrainerStages


class SftStages(TrainerStages):
    """The parts that such a job has: no engine, and none of the user's functions but the source."""

    def __init__(self, term: ActorTerm, closing: contextlib.ExitStack) -> None:
        """Waits for the source. Raises Fenced."""
        trainer = TrainerAccess(term)
        closing.callback(trainer.close)
        source, reads = term.open_source()
        prompts = term.waits.retry("source", lambda: PromptReader(term.cfg, source, term.waits, reads))
        super().__init__(term, trainer, source, prompts)
        self.effects = schedule.run_sft(RunPlan.of(term.cfg))
