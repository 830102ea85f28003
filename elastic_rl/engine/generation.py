"""The ``GenerateFn`` seam: from a prompt to samples, by one or many calls of the engines."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Protocol

import numpy as np

from elastic_rl.data.samples import MAX_TOKEN_IDS, Prompt, Sample, Segment
from elastic_rl.engine.client import GenerateClient, Sampling


@dataclass(frozen=True)
class PromptRequest:
    """One prompt group to generate."""

    ordinal: int
    prompt: Prompt
    sampling: Sampling
    samples: int
    min_version: int = 0
    """The oldest version of the policy that is accepted of what is trained on."""


class GenerateFn(Protocol):
    """Generates the samples of one prompt. It may call the engines many times (turns, tools, environments): every
    segment that a policy generated has the log-probs and the version of the call that made it."""

    async def __call__(self, request: PromptRequest, engines: GenerateClient) -> Sequence[Sample]:
        """Generates as many samples as requested. Raises EngineFailed; whatever else it raises is a failure of this
        group: it is tried again, and then the group is dropped."""


@dataclass(frozen=True)
class GenerateFault:
    """Why the ``GenerateFn`` failed for a group."""

    why: str
    shared: bool = False
    """Whether its process ended, so that groups which were generated at the same time failed with it, and which of them
    is to blame is not known."""
    away: str = ""
    """Kind of the wait where something does not answer, which says nothing about the group: it is tried again for as
    long as that lasts. "engines" or "plugin"."""
    unanswered: bool = False
    """Whether it is engines that did not answer, which may be the group's fault all the same: it may be what ends them.
    """


Generated = list[Sample] | GenerateFault
"""What becomes of one prompt group."""
Answers = Sequence[tuple[int, Generated]]
"""What becomes of some groups of a request, which have ended, each with its place in the request."""


_NUMBERS = tuple | list | np.ndarray
_MAX_LOGPROB = 1e30
"""What fp32 holds, with room for sums."""
_VERSIONS = 1 << 63


def fault_of(samples: object, request: PromptRequest, vocabulary: int = MAX_TOKEN_IDS) -> str:
    """What is wrong with what a ``GenerateFn`` returned; "" for nothing. ``vocabulary``: number of the model's tokens.
    Raises whatever the objects of a user's own classes raise."""
    if not isinstance(samples, Sequence) or len(samples) != request.samples:
        return f"must give {request.samples} samples"
    for sample in samples:
        if not isinstance(sample, Sample):
            return "gave something else than samples"
        if not isinstance(sample.segments, tuple | list) or not isinstance(sample.finish_reason, str):
            return "gave a sample whose segments are no tuple, or whose finish_reason is no text"
        if not isinstance(sample.text, str):
            return "gave a sample whose text is none"
        for segment in sample.segments:
            if fault := _fault_of_segment(segment, vocabulary):
                return fault
        if not any(segment.loss for segment in sample.segments):
            return "gave a sample without a segment that is trained on"
        if (size := sum(segment.size for segment in sample.segments)) > request.sampling.max_new_tokens:
            return (f"gave a response of {size} tokens, and the data source allows {request.sampling.max_new_tokens} "
                    "with all its segments")
    return ""


def oldest_version(samples: Iterable[Sample]) -> int:
    """The oldest version of what is trained on; 0 for a segment without one. Whatever is older than what was asked for
    is not trained on: the rollout role generates it again, and the actor does not take it from the role either."""
    return min((sample.oldest_version for sample in samples), default=0)


def version_fault(samples: Sequence[Sample], min_version: int, answered: Collection[int]) -> str:
    """What is wrong with the versions that a ``GenerateFn`` gave, where it is to blame; "" where they are right, or
    where an engine is behind: then they are generated again. ``answered``: the versions that engines gave it for
    them."""
    oldest = oldest_version(samples)
    made_up = {s.version for sample in samples for s in sample.segments if s.loss and s.version}.difference(answered)
    if answered and made_up and max(made_up) > max(answered):
        return (f"gave samples of policy version {max(made_up)}, with which no engine has answered it: a segment must "
                "have the version of the call that made it, as in the segments that engines.generate returns")
    if oldest >= min_version or any(version < min_version for version in answered):
        return ""
    found = f"samples of policy version {oldest}" if oldest else "a segment that is trained on, with version=0"
    return (f"gave {found}, and {min_version} or newer was asked for: every segment that is trained on must have the "
            "version of the call that made it, as in the segments that engines.generate returns")


def _fault_of_segment(segment: object, vocabulary: int) -> str:
    if not isinstance(segment, Segment):
        return "gave something else than segments in a sample"
    ids, logprobs = segment.arrays or (segment.token_ids, segment.logprobs)
    if not isinstance(ids, _NUMBERS) or not isinstance(logprobs, _NUMBERS):
        return "gave a segment whose token_ids or logprobs are no tuple"
    if type(segment.loss) is not bool:
        return "gave a segment whose loss is neither True nor False"
    if type(segment.version) is not int or not 0 <= segment.version < _VERSIONS:
        return ("gave a segment whose version is no int from 0 to 2**63 - 1: it must be the version of the call that "
                "made it, as in the segments that engines.generate returns, or 0 for what no policy generated")
    if not _are_ids(ids, vocabulary):
        return f"gave a token id that is no int from 0 to {vocabulary - 1}"
    if len(logprobs) not in (0, len(ids)):
        return f"gave a segment of {len(ids)} tokens with {len(logprobs)} log-probs"
    if segment.loss and len(ids) > len(logprobs):
        return "gave a segment that is trained on, without log-probs"
    if not _are_logprobs(logprobs):
        return "gave a log-prob that is not finite, or no number"
    return ""


def _are_ids(values: Sequence[int] | np.ndarray, vocabulary: int) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "i" and (not len(values) or bool(0 <= values.min() <= values.max() < vocabulary))
    # By type first, in passes that run in C: a response may have a hundred thousand tokens.
    return {*map(type, values)} <= {int} and (not values or 0 <= min(values) <= max(values) < vocabulary)


def _are_logprobs(values: Sequence[float] | np.ndarray) -> bool:
    if isinstance(values, np.ndarray):
        return values.dtype.kind == "f" and (not len(values) or bool(
            -_MAX_LOGPROB < values.min() <= values.max() < _MAX_LOGPROB))  # neither is so where one is no number
    if {*map(type, values)} <= {float}:
        # Where one is no number or infinite, so is the sum, and then the smallest and the largest say nothing.
        return not values or (math.isfinite(sum(values)) and -_MAX_LOGPROB < min(values) <= max(values) < _MAX_LOGPROB)
    return all(isinstance(p, Real) and abs(p) < _MAX_LOGPROB for p in values)


async def single_turn(request: PromptRequest, engines: GenerateClient) -> list[Sample]:
    """One response to the prompt."""
    return await engines.generate(request.prompt.token_ids, request.sampling, request.samples)


GENERATE_FNS: dict[str, GenerateFn] = {"single_turn": single_turn}
