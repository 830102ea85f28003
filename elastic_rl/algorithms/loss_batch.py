"""What a token loss gets: the loss tokens of a micro-batch, and which sample each of them belongs to. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class LossBatch:
    """M loss tokens of S whole sequences. A micro-batch never cuts a sequence, so what is summed per sequence here is
    the same for every size of the micro-batches and of the parallel groups."""

    tensors: Mapping[str, Tensor]
    """[M] each, without gradient: those that the algorithm needs, by the names of ``data/batch.py``. A tensor of the
    batch that has one value a sample is repeated for each of its tokens."""
    sequence: Tensor
    """[M] int64 in [0, S): the sequence of each token."""
    sequences: int
    """S. Some may have no loss token."""

    def __getitem__(self, name: str) -> Tensor:
        """Raises KeyError for a tensor that the algorithm does not name in its ``needs``."""
        return self.tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self.tensors

    @property
    def advantages(self) -> Tensor:
        """[M]: ``token_advantages`` where the algorithm needs these, else ``advantages``."""
        return self.tensors["token_advantages" if "token_advantages" in self.tensors else "advantages"]

    def sequence_sum(self, values: Tensor) -> Tensor:
        """[S] sums of [M] values; 0 for a sequence without a token."""
        return values.new_zeros(self.sequences).index_add(0, self.sequence, values)

    def sequence_mean(self, values: Tensor) -> Tensor:
        """[S] means of [M] values; 0 for a sequence without a token."""
        count = values.new_zeros(self.sequences).index_add(0, self.sequence, values.detach().new_ones(values.shape))
        return self.sequence_sum(values) / count.clamp(min=1)

    def to_tokens(self, of_sequences: Tensor) -> Tensor:
        """[M] from [S]: the value of each token's sequence."""
        return of_sequences[self.sequence]
