"""What the loop leaves behind of a step: the run's log, the status and metrics in etcd, a few samples for people."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from elastic_rl.data.queue.step_groups import StepGroups
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.data.sources import DataSource
from elastic_rl.errors import Fenced
from elastic_rl.etcd.records import Engine, SampleRecord, StepMetrics
from elastic_rl.etcd.transaction import Op
from elastic_rl.pipeline.records.run_log import RunLog
from elastic_rl.pipeline.records.sample_ring import SampleRing, pick
from elastic_rl.runtime.words import counted
from elastic_rl.telemetry import training_metrics

log = logging.getLogger(__name__)

_TRAINED = ("loss", "grad_norm", "lr", "kl", "logprob_diff_max", "clip_fraction", "tokens", "train_s")
"""What a line of the run's log has of the trainer's answer, beside ``algorithm`` and ``throughput``."""
_PARTS = 64
"""Names of reward parts that the record of a step has; samples may each have others."""
_ENGINES = 64
"""Engines that the record of a step lists."""


class SampleWriter:
    """Shows a few samples of each step. No step fails for them: where they cannot be read they are left out."""

    def __init__(self, ring: SampleRing, model_dir: str) -> None:
        self._ring, self._file = ring, Path(model_dir) / "tokenizer.json"
        self._tokenizer: Any = None

    def ops(self, step: int, groups: StepGroups, advantages: Sequence[float] | None) -> list[Op]:
        """What is to be written with the record of the step (``SampleRing.ops``). ``advantages``: of all samples, one
        group after the other; None where nothing is trained. Raises Fenced."""
        refs, chosen = groups.refs, pick([sample.reward for sample in groups.samples])
        try:
            shown = groups.reader.read([refs[n] for n in chosen])
            return self._ring.ops(step, [
                self._record(step, *refs[n], *found, None if advantages is None else advantages[n])
                for n, found in zip(chosen, shown, strict=True)])
        except Fenced:
            raise
        except Exception as e:  # they are for people only, and what a plug-in put into them may not fit
            log.warning("the samples of step %d are not shown: %s: %s", step, type(e).__name__, e)
            return []

    def _record(self, step: int, ordinal: int, index: int, prompt: Prompt, sample: Sample, advantage: float | None
                ) -> SampleRecord:
        response = sample.response_ids
        return SampleRecord(
            step=step, group=ordinal, index=index, prompt=prompt.text or self._text(prompt.token_ids),
            response=self._text(response), reward=sample.reward, reward_parts=dict(sample.reward_parts),
            advantage=advantage, finish_reason=sample.finish_reason, versions=list(sample.versions),
            prompt_tokens=len(prompt.token_ids), response_tokens=len(response))

    def _text(self, token_ids: Sequence[int]) -> str:
        if self._tokenizer is None:
            from tokenizers import Tokenizer

            try:
                self._tokenizer = Tokenizer.from_file(str(self._file))
            except Exception as e:  # the library raises plain Exception; ids are better than nothing
                log.warning("samples are shown as token ids: %s: %s", self._file, e)
                self._tokenizer = False
        if not self._tokenizer:
            return " ".join(map(str, token_ids))
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))


def step_metrics(step: int, groups: StepGroups, *, policy_version: int, dropped: dict[str, int]) -> StepMetrics:
    """Metrics of a step as they are known before it is trained. ``policy_version``: the newest one before the step. A
    step that trains nothing may have no groups: rewards of 0 then."""
    samples = groups.samples
    lengths = [s.response_tokens for s in samples]
    parts: dict[str, list[float]] = {}
    for sample in samples:
        for name, value in sample.reward_parts.items():
            if name in parts or len(parts) < _PARTS:
                parts.setdefault(name, []).append(value)
    # A repeated publish has a newer number than the step began with: its samples are not stale.
    staleness = max(0, policy_version - min((g.oldest_version for g in groups.groups), default=policy_version))
    return StepMetrics(
        step=step, at=time.time(), reward=sum(s.reward for s in samples) / max(1, len(samples)), staleness=staleness,
        samples=len(samples), tokens=sum(s.length for s in samples),
        reward_parts={name: sum(v) / len(v) for name, v in parts.items()},
        response_tokens={"mean": sum(lengths) / len(lengths), "max": float(max(lengths))} if lengths else {},
        truncated=sum(s.finish_reason == "length" for s in samples) / max(1, len(samples)),
        dropped_groups=sum(dropped.values()), dropped_by_reason=dropped)


def with_measured(metrics: StepMetrics, answer: Mapping[str, Any], seconds: Mapping[str, float]) -> StepMetrics:
    """The metrics with what is known of the step once it was trained. ``answer``: the trainer's; ``seconds``: by
    stage."""
    # Beside the steps it goes on all the time, so the step as a whole is its time.
    generate_s = seconds.get("total" if "groups" in seconds else "generate", 0.0)
    made = metrics.samples * metrics.response_tokens.get("mean", 0.0)
    rate = {"generate_tokens_per_s": made / generate_s} if generate_s > 0 else {}
    return metrics.replace(seconds=dict(seconds), update=training_metrics.of_update(answer),
                           throughput=training_metrics.of_throughput({**answer, **rate}))


def truncated_text(metrics: StepMetrics, source: DataSource) -> str:
    """What is wrong with a step of which every response ended at the limit."""
    return (f"all {counted(metrics.samples, 'response')} of step {metrics.step} ended at their limit of "
            f"{source.max_response_tokens} tokens, and none with a stop token ({list(source.stop_token_ids)[:8]}): "
            "raise the data source's max_response_tokens, or use a model and a template that end with one of these")


def log_step(run_log: RunLog, metrics: StepMetrics, groups: Sequence[int], versions: Sequence[int],
             pool: Sequence[Engine], trained: Mapping[str, Any]) -> None:
    """Appends the step to the run's log. ``groups``: ordinals; ``versions``: those that made its samples; ``trained``:
    what the trainer answered."""
    run_log.write(
        "step", step=metrics.step, reward_mean=metrics.reward, samples=metrics.samples,
        groups=list(groups), policy_version=metrics.policy_version, sample_versions=list(versions),
        staleness=metrics.staleness, seconds=metrics.seconds, idle_s=metrics.idle_s, truncated=metrics.truncated,
        reward_parts=metrics.reward_parts, response_tokens=metrics.response_tokens,
        dropped_groups=metrics.dropped_groups, throughput=metrics.throughput,
        **{k: trained.get(k) for k in _TRAINED},
        algorithm={k: v for k, v in trained.items() if k not in _TRAINED and k not in training_metrics.THROUGHPUT
                   and k not in training_metrics.PUBLISH},
        engines=_shown(pool))


def log_sampled(run_log: RunLog, metrics: StepMetrics, groups: Sequence[int], pool: Sequence[Engine],
                lines: int | None = None) -> None:
    """Appends a step of a job that trains nothing to the run's log. ``groups``: ordinals; ``lines``: that were written
    of its samples, where it is known."""
    run_log.write("sampled", step=metrics.step, reward_mean=metrics.reward, samples=metrics.samples, lines=lines,
                  groups=list(groups), policy_version=metrics.policy_version, seconds=metrics.seconds,
                  idle_s=metrics.idle_s, truncated=metrics.truncated, reward_parts=metrics.reward_parts,
                  response_tokens=metrics.response_tokens, dropped_groups=metrics.dropped_groups,
                  engines=_shown(pool))


def _shown(pool: Sequence[Engine]) -> list[dict[str, Any]]:
    return [e.model_dump(mode="json", include={"id", "state", "version", "pull_apply_s", "pause_s"})
            for e in pool[:_ENGINES]]
