"""What is reported of publishes that are dropped."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from elastic_rl.config import DcsConfig
from elastic_rl.errors import NodeUnavailable
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.trainer.checkpoint import async_publish
from elastic_rl.trainer.checkpoint.async_publish import AsyncPublisher, InFlightPublish
from elastic_rl.trainer.megatron.parallel import ParallelDims

_ALONE = ParallelDims(rank=0, world=1, tp=1, tp_rank=0, dp=1, dp_rank=0, device=torch.device("cpu"))


class Publishes:
    """Publishes of one rank, each of which the nodes take or do not take, under a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.events, self.takes = 0.0, list[str](), True
        monkeypatch.setattr(async_publish, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(async_publish.fencing, "emit", self._emit)
        anything: Any = SimpleNamespace(abort=lambda staged: None)
        self._background = AsyncPublisher(_ALONE, DcsConfig(), anything, anything,
                                          {"policy": anything}, lambda: None, "trainer")
        self._background._commit = self._commit  # type: ignore[method-assign]

    def _emit(self, _etcd: object, _keys: object, _epoch: int, kind: EventKind, subject: str, _message: str,
              **_data: object) -> None:
        assert subject == "trainer"
        self.events.append(kind.name)

    def _commit(self, *_: object) -> None:
        if not self.takes:
            raise NodeUnavailable("the node has died")

    def publish_at(self, now: float, *, takes: bool) -> None:
        self.now, self.takes = now, takes
        staged: Any = SimpleNamespace(version=SimpleNamespace(number=1, epoch=1))
        assert self._background._lead({}, InFlightPublish({"policy": staged}, {}, 1), now + 1.0) is takes


def test_publishes_fail_once_none_was_committed_for_a_while_after_one_was_dropped(
        monkeypatch: pytest.MonkeyPatch) -> None:
    publishes = Publishes(monkeypatch)
    publishes.publish_at(100.0, takes=False)
    publishes.publish_at(110.0, takes=False)
    publishes.publish_at(115.0, takes=True)
    publishes.publish_at(500.0, takes=False)
    assert publishes.events == ["version.dropped"] * 3, "each of them was published again"
    publishes.publish_at(529.0, takes=False)
    publishes.publish_at(530.0, takes=False)
    publishes.publish_at(531.0, takes=False)
    assert publishes.events[3:] == ["version.dropped", "version.failing", "version.failing"]
