"""Reads a version of ``trainer_state`` on one rank: tensor by tensor while its chunks arrive on this host, so that what
a rank holds besides its own part is one tensor and not the state.

The host's node fetches the chunks, once for all ranks of the host, into its arena; ranks read them there. A rank looks
at the names of all tensors, but verifies and reads only the chunks of those that it has a part of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from elastic_rl.dcs.connection import Progress
from elastic_rl.dcs.fetch.mapping import load_tensors, read_map
from elastic_rl.dcs.fetch.puller import Puller
from elastic_rl.dcs.fetch.version_map import to_ranges
from elastic_rl.etcd.records import Version
from elastic_rl.trainer.checkpoint.ownership import bucketed


class Target(Protocol):
    """Where the tensors go; see ``snapshot.StateLoader``."""

    def select(self, name: str) -> bool: ...

    def load(self, name: str, tensor: torch.Tensor) -> None: ...


def read(puller: Puller, stream: str, number: int, target: Target, *, bucket_bytes: int, on_progress: Progress,
         check: Callable[[], None]) -> Version:
    """Loads the selected tensors of a version; its record. What is read is verified first, in buckets of this size.

    ``on_progress``: bytes that are on this host, and bytes in all; about every second, also from another thread.
    ``check`` is called as often, and ends the read by raising. Raises as ``Puller.pull`` does, and what ``target``
    raises; the target has a part of the tensors then.
    """
    latest = (0, 0)

    def arrived(done: int, total: int) -> None:
        nonlocal latest
        check()
        latest = done, total
        on_progress(done, total)

    def load(reference: dict[str, Any]) -> None:
        for part in selected(reference, target.select, bucket_bytes):
            check()
            for name, tensor in load_tensors(part):
                target.load(name, tensor)
            on_progress(*latest)

    with puller.pull(stream, number, on_progress=arrived, on_part=load) as pulled:
        pulled.confirm()
        return pulled.version


def selected(reference: dict[str, Any], select: Callable[[str], bool], bucket_bytes: int) -> Iterator[dict[str, Any]]:
    """References to the selected tensors of a part of a version, at most ``bucket_bytes`` each (a larger tensor alone).
    """
    table = read_map(str(reference["path"]), *reference["map"])
    numbers: list[int] = []
    sizes: list[int] = []
    for first, end in reference.get("tensors", [[0, table.tensors]]):
        for number, tensor in enumerate(table.read([[first, end]]), first):
            if select(tensor.name):
                numbers.append(number)
                sizes.append(sum(nbytes for _, nbytes in tensor.pieces))
    for bucket in bucketed(range(len(numbers)), sizes, bucket_bytes):
        yield {**reference, "tensors": to_ranges(numbers[i] for i in bucket), "verify": True, "once": True}
