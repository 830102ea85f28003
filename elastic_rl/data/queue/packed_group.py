"""Groups as they wait in memory for their step. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from elastic_rl.data.samples import Group


@dataclass(frozen=True, eq=False)
class PackedGroup:
    """A group whose responses are arrays: 4 bytes for a token and 4 for its log-prob, where Python's numbers take eight
    times as much. All else is held as it is, whatever a data source or a reward has put there."""

    bare: Group
    """The group without the tokens and log-probs of its segments."""
    sizes: np.ndarray
    """[S, 2] int32: tokens and log-probs of each segment of its samples."""
    tokens: np.ndarray
    """int32, of one segment after the other."""
    logprobs: np.ndarray
    """fp32, as they are trained on."""

    @classmethod
    def of(cls, group: Group) -> PackedGroup:
        segments = [segment for sample in group.samples for segment in sample.segments]
        bare = replace(group, samples=tuple(replace(sample, segments=tuple(
            replace(segment, token_ids=(), logprobs=()) for segment in sample.segments)) for sample in group.samples))
        numbers = [segment.arrays or (segment.token_ids, segment.logprobs) for segment in segments]
        sizes = np.array([[len(ids), len(logprobs)] for ids, logprobs in numbers], np.int32)
        tokens = [np.zeros(0, np.int32), *(np.asarray(ids, np.int32) for ids, _ in numbers)]
        logprobs = [np.zeros(0, np.float32), *(np.asarray(logprobs, np.float32) for _, logprobs in numbers)]
        return cls(bare, sizes, np.concatenate(tokens), np.concatenate(logprobs))

    def group(self) -> Group:
        """The group as it was, but for log-probs, which are rounded to float32."""
        sizes, at, logprob_at = iter(self.sizes.tolist()), 0, 0
        samples = []
        for sample in self.bare.samples:
            segments = []
            for segment in sample.segments:
                n_tokens, n_logprobs = next(sizes)
                segments.append(replace(segment, token_ids=tuple(self.tokens[at:at + n_tokens].tolist()),
                                        logprobs=tuple(self.logprobs[logprob_at:logprob_at + n_logprobs].tolist())))
                at, logprob_at = at + n_tokens, logprob_at + n_logprobs
            samples.append(replace(sample, segments=tuple(segments)))
        return replace(self.bare, samples=tuple(samples))
