"""One rank's side of a publish: writes the tensors that it owns to the arena of this host's DCS node."""

from __future__ import annotations

import contextlib
import logging
from typing import Any

import torch

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.publish.part_writer import LocalArena, PartWriter
from elastic_rl.errors import ElasticRLError, NodeUnavailable

log = logging.getLogger(__name__)


class OwnedTensorWriter:
    """Writes one rank's tensors of one publish, in named parts. ``add`` never raises for a fault of the node, since the
    other ranks wait for this one in a collective; ``seal`` reports it."""

    def __init__(self, dcs: DcsClient, arena: LocalArena, cfg: DcsConfig) -> None:
        self._dcs, self._arena, self._cfg = dcs, arena, cfg
        self._writers: dict[str, PartWriter] = {}
        self._failure: ElasticRLError | None = None

    def add(self, part: str, name: str, tensor: torch.Tensor, order: int) -> None:
        """Copies a tensor into the arena, as an element of the named part."""
        if self._failure is not None:
            return
        try:
            if part not in self._writers:
                self._writers[part] = PartWriter(self._arena, chunk_bytes=self._cfg.chunk_bytes,
                                                 digest=self._cfg.digest)
            self._writers[part].add(name, tensor, order)
        except ElasticRLError as e:
            self._failure = e

    @property
    def copy_s(self) -> float:
        return sum(w.copy_s for w in self._writers.values())

    def seal(self, deadline: float) -> dict[str, Any]:
        """``{"parts": {name: Part as JSON}}``, or ``{"error": message}``; JSON-able."""
        if self._failure is None:
            try:
                return {"parts": {name: w.seal(deadline).to_json() for name, w in self._writers.items()}}
            except ElasticRLError as e:
                self._failure = e
        return {"error": str(self._failure)}

    def end(self, committed: bool) -> None:
        """Ends the publish. The node releases this rank's hold on the chunks: at once if they are committed, else after
        its grace period, with the connection."""
        if committed:
            with contextlib.suppress(NodeUnavailable):  # then nothing is held any more
                self._dcs.local().release_holds()
        else:
            self._dcs.close()
