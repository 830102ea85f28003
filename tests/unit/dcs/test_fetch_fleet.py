"""A fleet of fetch schedulers over simulated links."""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass

import pytest

from elastic_rl.dcs.fetch.model import FetchLimits, GetChunk, ListNodes, QueryHave
from elastic_rl.dcs.fetch.scheduler import FetchScheduler


@dataclass
class Flow:
    source: str
    sink: str
    get: GetChunk
    left: float


class Fleet:
    """Schedulers joined by links of one chunk a second each way, shared evenly; the publisher's node has everything.

    ``slots``: chunks that a node sends at once; the others are queued.
    """

    STEP_S = 0.1

    def __init__(self, nodes: int, chunks: int, *, slots: int = 32) -> None:
        self.slots = slots
        self.chunks = [hashlib.md5(b"%d" % i).hexdigest() for i in range(chunks)]
        self.has: dict[str, set[str]] = {"publisher": set(self.chunks), **{f"n{i}": set() for i in range(nodes)}}
        # Scaled to a chunk a second: a real one takes some 0.06 s.
        limits = FetchLimits(query_every_s=4.0, list_every_s=32.0, hedge_after_s=16.0, backoff_s=4.0)
        self.schedules = {n: FetchScheduler(limits, n) for n in self.has if n != "publisher"}
        self.flows: list[Flow] = []
        self.sent: Counter[str] = Counter()
        self.now = 0.0

    def run(self) -> float:
        """Runs until all nodes have everything; returns the seconds."""
        for schedule in self.schedules.values():
            schedule.request(self.chunks)
        while any(len(held) < len(self.chunks) for held in self.has.values()):
            for node in self.schedules:
                self._act(node)
            self._move()
            self.now += self.STEP_S
            assert self.now < 100 * len(self.chunks), "the fleet does not fill"
        return self.now

    def _act(self, node: str) -> None:
        schedule = self.schedules[node]
        while action := schedule.next(self.now):
            match action:
                case ListNodes():
                    schedule.on_nodes({n: "1" for n in self.has if n != node}, self.now)
                case QueryHave():
                    missing = [d for d in action.digests if d not in self.has[action.peer]]
                    load = sum(f.source == action.peer for f in self.flows)
                    schedule.on_have(action, missing, load, self.now)
                case GetChunk():
                    assert action.digest in self.has[action.peer]
                    self.flows.append(Flow(action.peer, node, action, 1.0))
                case _:
                    raise AssertionError(action)

    def _move(self) -> None:
        active: list[Flow] = []
        sending: Counter[str] = Counter()
        for flow in self.flows:
            if sending[flow.source] < self.slots:
                sending[flow.source] += 1
                active.append(flow)
        receiving = Counter(f.sink for f in active)
        for flow in active:
            moved = self.STEP_S / max(sending[flow.source], receiving[flow.sink])
            flow.left -= moved
            self.sent[flow.source] += moved  # type: ignore[assignment]
        for flow in [f for f in active if f.left <= 0]:
            if flow not in self.flows:
                continue
            self.flows.remove(flow)
            self.has[flow.sink].add(flow.get.digest)
            losers = self.schedules[flow.sink].on_received(flow.get.number, self.now)
            self.flows = [f for f in self.flows if f.sink != flow.sink or f.get.number not in losers]


@pytest.mark.parametrize(("nodes", "chunks", "slots"),
                         [(4, 128, 32), (8, 128, 32), (16, 128, 32), (16, 128, 4), (16, 64, 32)])
def test_fleet_fills_in_less_than_two_single_pulls(nodes: int, chunks: int, slots: int) -> None:
    fleet = Fleet(nodes, chunks, slots=slots)
    took = fleet.run()
    assert took / chunks <= 1.75
    assert fleet.sent["publisher"] / chunks <= 1.6
