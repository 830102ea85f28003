"""Which data-parallel replica gets which samples of a batch. Pure: every call with the same arguments, in any process,
gives the same answer, so that who sends shares can put what comes back in order again."""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def balanced(lengths: Sequence[int], count: int) -> list[list[int]]:
    """The rows of each of ``count`` replicas, in ascending order, of a batch whose sequences have these lengths.

    The longest sequence that is left goes to the replica with the fewest tokens: Graham's rule for the schedule with
    the longest processing time first. No replica has more tokens than the average and one sequence together. It is by
    tokens: the part of the attention that grows with their square is small until a sequence is several times as long as
    the model is wide.
    """
    rows: list[list[int]] = [[] for _ in range(count)]
    least = [(0, share) for share in range(count)]  # (tokens, replica)
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        tokens, share = least[0]
        heapq.heapreplace(least, (tokens + lengths[row], share))
        rows[share].append(row)
    return [sorted(of_share) for of_share in rows]
