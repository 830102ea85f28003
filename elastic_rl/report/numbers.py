"""The numbers of a run's steps by name, from its records. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from elastic_rl.config.meant import suggestion
from elastic_rl.errors import ConfigError
from elastic_rl.report.build import Record, effective_steps, sft_evaluations
from elastic_rl.telemetry.trackers import scalars

USUAL = ("reward_mean", "eval_accuracy", "eval_loss", "loss", "kl", "entropy", "clip_fraction", "grad_norm", "lr",
         "response_tokens/mean", "seconds/total")
"""What is shown of a run where nothing is named."""
_PHASES = ("sft", "sampled", "rl")
"""Phases of a job, in order; each counts its own steps."""


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of one step of a phase (sft, rl, or sampled: a job that trains nothing), with those of the evaluation
    after it."""

    phase: str
    step: int
    values: Mapping[str, float]


def numbers(records: Sequence[Record]) -> list[StepNumbers]:
    """The steps of a run that were not undone, in order. Names are those of trackers, such as ``seconds/total``."""
    found: dict[tuple[str, int], dict[str, float]] = {}
    kept = (*sft_evaluations(records), *effective_steps(records, "sampled"), *effective_steps(records),
            *effective_steps(records, "eval"))
    for record in kept:
        try:
            made = scalars(record["kind"], {name: value for name, value in record.items() if name != "kind"})
        except (TypeError, ValueError, AttributeError, OverflowError):  # a record that somebody has changed
            continue
        if made is not None:
            phase, step, values = made
            row = found.setdefault((phase, step), {})
            row |= {name: value for name, value in values.items() if name not in row}
    order = sorted(found, key=lambda key: (_PHASES.index(key[0]), key[1]))
    return [StepNumbers(phase, step, found[phase, step]) for phase, step in order]


def chosen(steps: Sequence[StepNumbers], wanted: Sequence[str]) -> list[str]:
    """The names that are asked for, in the order of ``wanted``: each a name, its last part (``kl`` of ``algorithm/kl``)
    or a pattern (``seconds/*``); without any those of ``USUAL`` that there are. Raises ConfigError for one that no step
    has."""
    known = sorted({name for step in steps for name in step.values})
    found = list[str]()
    for name in wanted or USUAL:
        fitting = [name] if name in known else [one for one in known if one.rpartition("/")[2] == name] or [
            one for one in known if fnmatchcase(one, name)]
        if wanted and not fitting:
            raise ConfigError(f"no step has a metric {name!r}{suggestion(name, known)}",
                              hint=f"there are {', '.join(known) or 'none yet'}")
        found += fitting
    return list(dict.fromkeys(found))
