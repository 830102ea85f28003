"""The parts of the etcd client that need no etcd: ranges, failure classes, backoff, and write deduplication."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc import _common
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.coordinator.election.protocol import leading
from elastic_rl.errors import (
    Compacted,
    ConfigError,
    ElasticRLError,
    EtcdRefused,
    EtcdUnavailable,
    LeaseLost,
    OutcomeUnknown,
)
from elastic_rl.etcd import channels, deduplication, event_kinds, events
from elastic_rl.etcd.call_errors import Failure, classify, refusal
from elastic_rl.etcd.keys import Keys, LeaderKeys
from elastic_rl.etcd.pb import etcd_pb2 as pb
from elastic_rl.etcd.transaction import Compare, KeyValue, Op, range_end

Code = grpc.StatusCode


@given(st.text(min_size=1, max_size=6), st.binary(max_size=8))
def test_range_end_bounds_exactly_the_keys_with_the_prefix(prefix: str, other: bytes) -> None:
    start, end = prefix.encode(), range_end(prefix)
    for key in (other, start + other):
        assert (start <= key < end) == key.startswith(start)


def test_range_end_of_the_empty_prefix_is_unbounded() -> None:
    assert range_end("") == b"\0"


@pytest.mark.parametrize(("code", "details", "expected"), [
    (Code.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", Failure.NOT_SENT),
    (Code.UNAVAILABLE, "etcdserver: no leader", Failure.NOT_SENT),
    (Code.RESOURCE_EXHAUSTED, "etcdserver: too many requests", Failure.NOT_SENT),
    (Code.UNAVAILABLE, "etcdserver: leader changed", Failure.UNKNOWN),
    (Code.UNAVAILABLE, "Socket closed", Failure.UNKNOWN),
    (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", Failure.UNKNOWN),
    (Code.RESOURCE_EXHAUSTED, "etcdserver: mvcc: database space exceeded", Failure.REFUSED),
    (Code.INVALID_ARGUMENT, "etcdserver: duplicate key given in txn request", Failure.REFUSED),
])
def test_classify_tells_whether_the_request_may_have_been_applied(code: Any, details: str, expected: Failure) -> None:
    assert classify(code, details) is expected


@pytest.mark.parametrize(("details", "kind"), [
    ("etcdserver: requested lease not found", LeaseLost),
    ("etcdserver: mvcc: required revision has been compacted", Compacted),
    ("etcdserver: request is too large", EtcdRefused),
])
def test_refusal_maps_etcd_messages_to_typed_errors(details: str, kind: type[ElasticRLError]) -> None:
    assert type(refusal(Code.INVALID_ARGUMENT, details)) is kind


def test_channels_reject_an_empty_endpoint_list() -> None:
    with pytest.raises(ConfigError, match="no etcd endpoint"):
        channels.Channels([], call_timeout_s=1, retry_budget_s=1)


def test_reader_of_a_stream_is_not_woken_while_nothing_arrives() -> None:
    waited = list[float]()
    _common.wait(lambda timeout: bool(waited.append(timeout)), lambda: bool(waited))  # type: ignore[func-returns-value]
    assert waited == [channels.STREAM_WAIT_S], "another grpcio waits in another way"


def test_oldest_candidate_leads() -> None:
    def candidate(name: str, created: int) -> KeyValue:
        return KeyValue(name, b"", created, created + 7, 1, 0)

    assert leading([]) is None
    first = leading([candidate("a", 9), candidate("b", 4), candidate("c", 5)])
    assert first is not None and first.key == "b"


@given(st.lists(st.floats(0, 4e9), min_size=2, max_size=2, unique_by=lambda at: int(at * 1000)))
def test_event_ids_sort_by_time(times: list[float]) -> None:
    early, late = (events.build(event_kinds.POOL_SCALED, "s", "m", at=at) for at in sorted(times))
    assert early.id < late.id


def test_event_ids_of_one_millisecond_differ() -> None:
    assert len({events.build(event_kinds.POOL_SCALED, "s", "m", at=1.0).id for _ in range(5000)}) == 5000


def test_keys_of_nothing_in_particular_cannot_be_made() -> None:
    """They would have no root, which shows at the first use only, perhaps on a path that no test takes."""
    with pytest.raises(TypeError, match="abstract"):
        LeaderKeys()  # type: ignore[abstract]


def test_write_tokens_are_outside_every_job() -> None:
    assert not deduplication.keys.write_token("c", 1).startswith(Keys("tokens").root)


class ModelEtcd:
    """Transactions of puts and single-key gets, as etcd runs them. Replaces Channels; delivery is scripted.

    ``script`` draws, for each call: how many copies arrive now, how many later, and whether the first answer is lost.
    """

    def __init__(self, script: list[tuple[int, int, bool]]) -> None:
        self.kv: dict[bytes, Any] = {}
        self.revision = 1
        self.late: list[Any] = []
        self.script = iter(script)

    def call(self, method: Any, request: Any, ambiguity: channels.Ambiguity | None = None) -> Any:
        if method is channels.GRANT:
            return None
        if method is channels.RANGE:
            found = [self.kv[request.key]] if request.key in self.kv else []
            return pb.RangeResponse(kvs=found)
        for old in self.late:
            self.run(old)
        now, later, lost = next(self.script, (1, 0, False))
        self.late = [request] * later
        answers = []
        for _ in range(now):
            self.between()
            answers.append(self.run(request))
        self.between()
        if ambiguity is not None:
            ambiguity.any |= now > 1 or later > 0
        return answers[-1] if lost or now > 1 else answers[0]

    def between(self) -> None:
        """What other clients do between two copies."""

    def run(self, txn: Any) -> Any:
        self.wrote = False
        answer = self.apply(txn, self.revision + 1)
        self.revision += self.wrote
        answer.header.revision = self.revision
        return answer

    def apply(self, txn: Any, revision: int) -> Any:
        held = all(self.holds(c) for c in txn.compare)
        answer = pb.TxnResponse(succeeded=held)
        for op in txn.success if held else txn.failure:
            out = answer.responses.add()
            if op.HasField("request_txn"):
                out.response_txn.CopyFrom(self.apply(op.request_txn, revision))
            elif op.HasField("request_range"):
                found = self.kv.get(op.request_range.key)
                out.response_range.kvs.extend([found] if found else [])
            else:
                put, old = op.request_put, self.kv.get(op.request_put.key)
                self.kv[put.key] = pb.KeyValue(
                    key=put.key, value=put.value, mod_revision=revision, version=old.version + 1 if old else 1,
                    create_revision=old.create_revision if old else revision)
                self.wrote = True
        return answer

    def holds(self, compare: Any) -> bool:
        kv = self.kv.get(compare.key, pb.KeyValue())
        if compare.target == pb.Compare.MOD:
            return bool(kv.mod_revision == compare.mod_revision)
        return bool(kv.create_revision == compare.create_revision)


@settings(max_examples=seeds(40))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans()), max_size=12))
def test_duplicated_and_delayed_writes_apply_once(script: list[tuple[int, int, bool]]) -> None:
    model = ModelEtcd(script)
    writes = deduplication.WriteDeduplicator(model)  # type: ignore[arg-type]
    for i in range(len(script)):
        done = writes.run([], [Op.put("counter", str(i).encode()), Op.get("counter")], [])
        assert done.succeeded and done.revision == model.kv[b"counter"].mod_revision
        assert model.kv[b"counter"].version == i + 1 and model.kv[b"counter"].value == str(i).encode()
        assert done.get("counter") is not None


@settings(max_examples=seeds(40))
@given(st.lists(st.tuples(st.integers(1, 3), st.integers(0, 2), st.booleans()), min_size=1, max_size=12),
       st.lists(st.booleans(), min_size=24, max_size=24))
def test_refused_write_never_applies_from_a_delayed_copy(
        script: list[tuple[int, int, bool]], comes_and_goes: list[bool]) -> None:
    """Another writer creates and deletes the key that each write is conditional on, also between its copies."""
    model = ModelEtcd(script)
    writes = deduplication.WriteDeduplicator(model)  # type: ignore[arg-type]
    toggles = iter(comes_and_goes)

    def between() -> None:
        if next(toggles, False) and model.kv.pop(b"busy", None) is None:
            model.kv[b"busy"] = pb.KeyValue(key=b"busy", create_revision=1)

    model.between = between
    wrote: list[bytes] = []
    for i in range(len(script)):
        value = str(i).encode()
        done = writes.run([Compare.absent("busy")], [Op.put("x", value)], [Op.get("busy")])
        if done.succeeded:
            wrote.append(value)
            assert model.kv[b"x"].mod_revision == done.revision
        else:
            assert done.get("busy") is not None
        assert (model.kv[b"x"].value if b"x" in model.kv else None) == (wrote[-1] if wrote else None)
    for old in model.late:
        model.run(old)
    assert (model.kv[b"x"].version if b"x" in model.kv else 0) == len(wrote)


def test_token_changed_by_another_process_is_an_unknown_outcome() -> None:
    model = ModelEtcd([])
    writes = deduplication.WriteDeduplicator(model)  # type: ignore[arg-type]
    writes.run([], [Op.put("a", b"")], [])
    (token_key,) = (key for key in model.kv if b"_tokens" in key)
    model.kv[token_key].mod_revision += 1
    with pytest.raises(OutcomeUnknown) as caught:
        writes.run([], [Op.put("a", b"")], [])
    assert isinstance(caught.value, EtcdUnavailable)
