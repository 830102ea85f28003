"""Prompts of the data source for the loop, which waits for them: a source may be lazy, and what it reads away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.order import Order, fingerprint, sft_order, sft_ordinals
from elastic_rl.data.samples import Prompt
from elastic_rl.data.sources import CheckedSource, read_order, read_prompts
from elastic_rl.errors import SourceFailed
from elastic_rl.pipeline.sampling.source_reads import SourceReads
from elastic_rl.pipeline.waits import Waits

PROMPTS = "prompts"
"""Key in the cursor that says which prompts the source has (``data.order.fingerprint``), since ordinals stand for
prompts by it."""


class PromptReader:
    """Used by one thread."""

    def __init__(self, cfg: Config, source: CheckedSource, waits: Waits, reads: SourceReads) -> None:
        self._cfg, self._source, self._waits, self._reads = cfg, source, waits, reads
        self._order, self._sft_order = reads.read("be ordered", lambda: (
            source.order(cfg.seed) if cfg.uses_training_prompts else None,
            sft_order(source, cfg.seed) if cfg.imitates_answers else None))

    def indices(self, ordinals: Sequence[int]) -> list[int]:
        """The indices of the training prompts of these ordinals."""
        assert self._order is not None  # the mode has training prompts
        return self._indices(self._order, ordinals)

    def _indices(self, order: Order, ordinals: Sequence[int]) -> list[int]:
        return [index for index, _ in self._waits.retry("source", lambda: self._reads.read(
            "give an order", lambda: read_order(
                order, ordinals, len(self._source.train), named=self._cfg.data.source)))]

    def read(self, prompts: Sequence[Prompt], indices: Sequence[int], *, answers: bool = False) -> list[Prompt]:
        """Prompts of the source, as soon as it gives them. ``answers``: those without one are a fault of the source
        too."""
        return self._waits.retry("source", lambda: self._reads.read(
            f"give {len(indices)} prompts",
            lambda: read_prompts(prompts, indices, named=self._cfg.data.source, answers=answers,
                                 vocabulary=self._source.vocabulary)))

    def training(self, ordinals: Sequence[int]) -> list[tuple[int, Prompt]]:
        """The training prompts of ordinals, each with its ordinal."""
        return list(zip(ordinals, self.read(self._source.train, self.indices(ordinals)), strict=True))

    def demonstrations(self, step: int) -> dict[int, Prompt]:
        """The training prompts whose answers a supervised step imitates, by ordinal: the same ones whenever it is
        made."""
        assert self._sft_order is not None  # the settings have supervised steps
        ordinals = sft_ordinals(self._cfg.sft.batch_size, step)
        return dict(zip(ordinals, self.read(self._source.train, self._indices(self._sft_order, ordinals), answers=True),
                        strict=True))

    def require_same(self, cursor: Mapping[str, Any], prompts: Sequence[Prompt]) -> str:
        """The fingerprint of ``prompts``. Waits while they are others than the job began with, by its cursor (I13)."""
        named = self._cfg.data.source

        def check() -> str:
            known, now = cursor.get(PROMPTS), self._reads.read("give its first prompts", lambda: fingerprint(prompts))
            if known is not None and known != now:
                raise SourceFailed(
                    f"data.source={named} has other prompts ({now}) than this job began with ({known}): "
                    "groups would stand for other prompts, and some be used twice",
                    hint="restore the data and `elastic-rl restart roles/actor`; or begin a new job with `elastic-rl "
                         f"train --from-job {self._cfg.job}`")
            return now

        return self._waits.retry("source", check)
