"""Where a job's history stands, by what etcd and the stream say of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd.records import RunLogHead, Version, VersionState
from elastic_rl.pipeline.records import history
from elastic_rl.pipeline.records.history import Block, History, record_line
from elastic_rl.pipeline.records.tail_keys import Tail, tail_of


@pytest.fixture(autouse=True, scope="module")
def small_segments() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(history, "SEGMENT_BYTES", 64)
        yield


@dataclass(frozen=True)
class Etcd:
    """What etcd has of a history. It never changes, so each state is a snapshot as well."""

    head: RunLogHead = field(default_factory=lambda: RunLogHead(id="h"))
    blocks: tuple[Block, ...] = ()


@dataclass
class Actor:
    """Appends lines, a block each, and publishes what is closed."""

    etcd: Etcd
    stream: bytes = b""

    def __post_init__(self) -> None:
        self.history = History("h", self.etcd.head.sealed, self.etcd.blocks)

    def steps(self, first: int, sizes: list[int]) -> None:
        for step, size in enumerate(sizes, first):
            self.history.append(record_line("step", step=step, x="." * size))
            blocks, _ = self.history.pending()
            self.etcd = Etcd(self.etcd.head, (*self.etcd.blocks, *blocks))
            self.history.commit(blocks)

    def seal(self) -> None:
        for segment in self.history.closed():
            self.stream += segment.data
            self.etcd = Etcd(RunLogHead(id="h", sealed=segment.end),
                             tuple(b for b in self.etcd.blocks if b.segment != segment.start))
            self.history.seal(segment.end)


def version(end: object, identity: object = "h") -> Version:
    return Version(stream="run_log", number=1, state=VersionState.COMMITTED, epoch=1,
                   meta={"history": identity, "end": end})


def found(etcd: Etcd, end: object, identity: object = "h") -> Tail:
    return tail_of(etcd.head, 7, version(end, identity), etcd.blocks)


sizes = st.lists(st.integers(0, 60), max_size=20)


@given(before=sizes, between=sizes, after=sizes, is_same_actor=st.booleans())
def test_snapshot_that_is_older_than_the_stream_costs_whole_lines_and_only_those_that_the_stream_does_not_have(
        before: list[int], between: list[int], after: list[int], is_same_actor: bool) -> None:
    actor = Actor(Etcd())
    actor.steps(1000, before)
    actor.seal()
    snapshot = actor.etcd
    actor.steps(2000, between)
    actor.seal()
    # Whoever writes between the restore and the recovery cannot publish.
    writer = actor if is_same_actor else Actor(snapshot)
    writer.etcd = snapshot
    writer.steps(3000, after)

    tail = found(writer.etcd, len(actor.stream))
    assert tail.head is not None and tail.head.sealed == len(actor.stream)
    assert tail.lost == (snapshot.head.sealed < len(actor.stream)) and tail.revision == 7
    goes_on = History("h", tail.head.sealed, tail.blocks)
    lines = (goes_on.read(len(actor.stream)) or b"").splitlines()
    steps = [json.loads(line)["step"] for line in lines if line.startswith(b'{"kind": "step"')]
    assert steps == sorted(steps)
    if tail.lost:
        assert all(step >= 2000 for step in steps)
        assert {b.segment for b in writer.etcd.blocks} - {b.segment for b in tail.blocks} == set(tail.older)
        assert not is_same_actor or [s for s in steps if s >= 3000] == [*range(3000, 3000 + len(after))]
    else:
        assert tail.blocks == list(writer.etcd.blocks) and not tail.older


@pytest.mark.parametrize(("end", "identity"), [(500, "another"), (500, None), (None, "h"), ("x", "h"), (100, "h"),
                                               (99, "h")])
def test_version_that_is_no_newer_one_of_this_history_changes_nothing(end: object, identity: object) -> None:
    etcd = Etcd(RunLogHead(id="h", sealed=100), (Block(100, 100, b"{}\n"),))
    assert found(etcd, end, identity) == Tail(etcd.head, list(etcd.blocks), 7)
    assert tail_of(etcd.head, 7, None, etcd.blocks) == Tail(etcd.head, list(etcd.blocks), 7)


def test_history_without_a_head_is_that_of_the_stream() -> None:
    assert tail_of(None, 0, version(500), ()) == Tail(RunLogHead(id="h", sealed=500), [], lost=True)
    assert tail_of(None, 0, version(None), ()).head is None
    assert tail_of(None, 0, None, ()).head is None
