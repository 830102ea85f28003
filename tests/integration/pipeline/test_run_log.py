"""The records of a run on a real etcd and real DCS nodes: whatever ends, is away, or is changed by a user, the history
goes on, and is the same bytes for everybody."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.dcs_cluster import DcsCluster, model
from support.etcd_server import EtcdServers
from support.forked import ForkedProcess
from support.run_log_terms import SEGMENT, TAIL, Term, use_small_segments
from support.waiting import wait_until

from elastic_rl.cli.record_reader import RecordReader
from elastic_rl.dcs.catalog import reads
from elastic_rl.errors import ChunkMissing, Fenced, NodeUnavailable
from elastic_rl.etcd.client import EtcdClient, KeyValue, Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import VersionState
from elastic_rl.pipeline.records import history_reader, spool
from elastic_rl.pipeline.records.history_reader import HistoryReader
from elastic_rl.pipeline.records.tail_keys import read_tail
from elastic_rl.report.build import Record, parse_lines


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsCluster]:
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path) as out:
        yield out


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    use_small_segments(monkeypatch.setattr)


def term(dcs: DcsCluster, folder: str = "host", *, most_bytes: int = 1 << 30, **settings: object) -> Term:
    (path := dcs.folder / folder).mkdir(exist_ok=True)
    found = Term(dcs.etcd, dcs.keys, path, most_bytes=most_bytes, **settings)
    dcs.stack.callback(found.end)
    return found


def ended_term(dcs: DcsCluster) -> tuple[Term, bytes]:
    """A term that has ended, with segments in the stream, and what its copy has."""
    old = term(dcs)
    old.steps(30)
    old.seal()
    before = old.copy()
    old.end()
    return old, before


def read(dcs: DcsCluster) -> bytes:
    """The history as anybody may read it, without a copy."""
    with HistoryReader(dcs.etcd, dcs.keys, io_timeout_s=10, security=None) as reader:
        return b"".join(reader.parts(dcs.folder / "none"))


def records(data: bytes) -> list[Record]:
    return list(parse_lines(data.decode().splitlines()))


def steps(data: bytes) -> list[tuple[int, int]]:
    return [(r["term"], r["step"]) for r in records(data) if r["kind"] == "step"]


def test_job_that_goes_on_in_an_empty_folder_has_the_same_bytes(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    first = term(dcs)
    first.steps(30)
    first.seal()
    first.steps(3)
    before = first.copy()
    assert first.history.sealed > 3 * SEGMENT and first.history.end - first.history.sealed > 1000
    assert read(dcs) == before and steps(before) == [(1, n) for n in range(1, 34)]
    first.end()

    second = term(dcs, "other host")
    second.step()
    after = second.copy()
    assert after == read(dcs) and after.startswith(before) and steps(after)[-1] == (2, 1)
    second.steps(20)
    second.seal()
    assert second.copy() == read(dcs)
    head = reads.head(dcs.etcd, dcs.keys, "run_log")
    assert head is not None and head.meta["end"] == second.history.sealed
    assert not [r for r in records(after) if r["kind"] == "gap"]


def test_versions_share_chunks_and_the_tail_in_etcd_stays_small(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    one, collector = term(dcs), dcs.collector(keep_versions=1)
    for _ in range(12):
        one.steps(9)
        one.seal()
        collector.sweep([])
        assert sum(len(kv.value) for kv in dcs.etcd.range(dcs.keys.run_log_prefix())[0]) < 2 * SEGMENT
    committed = [v for v in reads.list_versions(dcs.etcd, dcs.keys, "run_log") if v.state is VersionState.COMMITTED]
    assert len(committed) == 1 and committed[0].number == 12
    collector.sweep([])
    segments = one.spool._sealed.segments()
    assert dcs.stat()["chunks"] == len(segments) + 1 and dcs.stat()["held"] == 0, "a chunk a segment, and the manifest"
    assert len(segments) >= 12 and all(s.entry is not None for s in segments)
    assert read(dcs) == one.copy()


def test_actor_whose_term_is_over_writes_nothing(dcs: DcsCluster) -> None:
    dcs.start("a")
    old = term(dcs)
    old.steps(20)
    new = term(dcs, "other host")
    old.log.write("step", step=99, term=1)
    with pytest.raises(Fenced):
        old.status.write("rl")
    with pytest.raises(Fenced):
        old.seal()
    new.step()
    new.seal()
    with pytest.raises(Fenced):
        old.seal()
    assert steps(read(dcs)) == [*((1, n) for n in range(1, 21)), (2, 1)]
    assert steps(old.copy()) == [(1, n) for n in range(1, 21)], "its copy has what was committed"


@pytest.mark.parametrize("point", ["publish.begun", "publish.manifest", "publish.replicated", "publish.committed"])
def test_actor_that_is_killed_while_it_seals_loses_nothing(dcs: DcsCluster, point: str) -> None:
    dcs.start("a")
    (folder := dcs.folder / "host").mkdir()
    doomed = ForkedProcess(["run_log_actor", dcs.etcd_servers.endpoints[0], dcs.keys.job, str(folder), "100",
                            f"{point}:3"])
    assert doomed.wait(120) == -9
    before = read(dcs)
    assert steps(before) == [(1, n) for n in range(1, len(steps(before)) + 1)] and len(steps(before)) > 20
    new = term(dcs)
    new.step()
    new.seal()
    assert new.copy() == read(dcs) and new.copy().startswith(before) and steps(new.copy())[-1] == (2, 1)
    assert [path.name for path in folder.iterdir() if "steps" in path.name] == ["steps.jsonl"]


def test_run_goes_on_while_a_node_with_segments_is_away(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    old, before = ended_term(dcs)
    dcs.stop("a")
    dcs.start("b", disk_bytes=64 << 20)
    new = term(dcs, "other host")
    new.steps(9)
    with pytest.raises((NodeUnavailable, ChunkMissing)):
        new.seal()
    with pytest.raises((NodeUnavailable, ChunkMissing)):
        new.copy()
    assert not new.path.exists() and new.history.sealed == old.history.sealed
    lost = records(read(dcs))
    assert lost[0]["kind"] == "gap" and steps(read(dcs))[-1] == (2, 9), "a reader has what can be had"
    dcs.start("a", disk_bytes=64 << 20)
    new.seal()
    assert new.history.sealed > old.history.sealed
    assert new.copy() == read(dcs) and new.copy().startswith(before)


def test_segments_that_no_node_has_are_published_again_from_the_copy(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    old, before = ended_term(dcs)
    head = reads.head(dcs.etcd, dcs.keys, "run_log")
    assert head is not None
    dcs.stop("a")
    for chunk in (dcs.folder / "disk" / "a").glob("??/*"):
        if chunk.name != head.manifest:
            chunk.unlink()
    dcs.start("a", disk_bytes=64 << 20)
    new = term(dcs)
    new.steps(9)
    new.seal()
    dcs.collector(keep_versions=1).sweep([])
    new.path.unlink()
    assert new.copy() == read(dcs) and new.copy().startswith(before)


def test_records_that_are_lost_for_good_are_a_gap_and_the_run_goes_on(dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    dcs.start("a")  # without a disk
    old = term(dcs)
    old.steps(30)
    old.seal()
    sealed = old.history.sealed
    old.end()
    dcs.kill("a")
    dcs.start("b")
    new = term(dcs, "other host")
    new.steps(9)
    with pytest.raises((NodeUnavailable, ChunkMissing)):
        new.seal()
    while not new.history.full:
        new.step(2000)
    assert new.history.end - new.history.sealed <= TAIL
    with pytest.raises(ChunkMissing):
        new.seal()
    monkeypatch.setattr(spool, "_GIVE_UP_S", 0.0)
    new.seal()
    new.steps(2)
    found = records(new.copy())
    assert new.copy() == read(dcs)
    assert found[0] == {"kind": "gap", "start": 0, "end": sealed}
    assert [r["kind"] for r in found if r["kind"] == "gap" and "records" in r] == ["gap"]
    last = [n for number, n in steps(new.copy()) if number == 2]
    assert last == sorted(last) and last[-2:] == [last[-1] - 1, last[-1]], "what came after it is there"


def test_stream_whose_newest_manifest_is_lost_goes_on_from_the_version_before(
        dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    old = term(dcs)
    for _ in range(3):
        old.steps(9)
        old.seal()
    whole = old.copy()
    old.end()
    head = reads.head(dcs.etcd, dcs.keys, "run_log")
    before = reads.list_versions(dcs.etcd, dcs.keys, "run_log")[-2]
    assert head is not None and head.number == before.number + 1
    dcs.stop("a")
    [path] = (dcs.folder / "disk" / "a").glob(f"??/{head.manifest}")
    path.unlink()
    dcs.start("a", disk_bytes=64 << 20)
    new = term(dcs, "other host")
    while not new.history.full:
        new.step(2000)
    with pytest.raises(ChunkMissing):
        new.seal()
    monkeypatch.setattr(spool, "_GIVE_UP_S", 0.0)
    new.seal()
    found, end = new.copy(), before.meta["end"]
    assert found == read(dcs) and found[:end] == whole[:end]
    assert json.loads(found[end:].splitlines()[0]) == {"kind": "gap", "start": end, "end": old.history.sealed}


def test_chunks_that_came_back_are_waited_for_anew_when_they_are_away_again(dcs: DcsCluster,
                                                                            monkeypatch: pytest.MonkeyPatch) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    old = term(dcs)
    old.steps(30)
    old.seal()
    old.end()
    dcs.stop("a")
    dcs.start("b")
    new = term(dcs, "other host")
    new.steps(9)
    with pytest.raises((NodeUnavailable, ChunkMissing)):
        new.seal()
    assert new.spool._missing_since < float("inf")
    dcs.start("a", disk_bytes=64 << 20)

    def refuse(*_: object, **__: object) -> None:
        raise NodeUnavailable("another node")

    with monkeypatch.context() as patch, pytest.raises(NodeUnavailable):
        patch.setattr(new.spool._stream, "publish", refuse)
        new.seal()
    assert new.spool._missing_since == float("inf")


def test_history_larger_than_the_arena_leaves_room_for_weights(dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch
                                                               ) -> None:
    use_small_segments(lambda module, name, value: monkeypatch.setattr(module, name, value * 64))
    dcs.start("a", arena_bytes=2 << 20, disk_bytes=64 << 20)
    one = term(dcs)
    for _ in range(20):
        one.steps(3, nbytes=100_000)
        one.seal()
    assert one.history.sealed > 5 << 20
    weights = model(1, nbytes=1 << 20)
    version = dcs.publisher().publish(weights.items(), meta={})
    one.steps(3, nbytes=100_000)
    one.seal()
    assert dcs.stat()["held"] == 0 and reads.head(dcs.etcd, dcs.keys, "policy") == version
    assert one.copy() == read(dcs)
    with dcs.puller().pull("policy") as pulled:
        assert pulled.version.number == version.number


def test_second_node_has_the_history_when_the_first_is_lost(dcs: DcsCluster) -> None:
    dcs.start("a", "b", disk_bytes=64 << 20)
    old, collector = term(dcs, replicas=2), dcs.collector(keep_versions=1)
    for _ in range(5):
        old.steps(9)
        old.seal()
        collector.sweep([])
    before = old.copy()
    old.end()
    dcs.kill("a")
    assert read(dcs) == before
    new = term(dcs, "other host")
    new.steps(9)
    new.seal()
    assert new.copy() == read(dcs) and new.copy().startswith(before)


def test_file_of_a_job_that_was_purged_is_none_of_its_successor(dcs: DcsCluster) -> None:
    dcs.start("a")
    old = term(dcs)
    old.steps(5)
    before = old.copy()
    old.end()
    dcs.etcd.delete_prefix(dcs.keys.run_log_prefix())
    new = term(dcs)
    new.step()
    assert steps(new.copy()) == [(2, 1)] == steps(read(dcs))
    aside = [p for p in new.path.parent.glob("steps.*.jsonl")]
    assert [p.read_bytes() for p in aside] == [before]


def restore(dcs: DcsCluster, kvs: Sequence[KeyValue]) -> None:
    """etcd is what it was when it had these keys of the history. The catalog is recovered."""
    dcs.etcd.txn([], [Op.delete_prefix(dcs.keys.run_log_prefix())])
    for kv in kvs:
        dcs.etcd.put(kv.key, kv.value)


def test_history_goes_on_from_the_stream_when_etcd_was_restored_from_an_older_snapshot(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    old = term(dcs)
    old.steps(20)
    old.seal()
    snapshot = dcs.etcd.range(dcs.keys.run_log_prefix())[0]
    old.steps(40)
    old.seal()
    before, sealed = old.copy(), old.history.sealed
    old.end()
    restore(dcs, snapshot)
    assert read(dcs) == before[:sealed], "a reader has it before an actor begins"
    dcs.stop("a")

    new = term(dcs)
    new.step()
    assert new.history.sealed == sealed, "no node is needed to begin"
    dcs.start("a", disk_bytes=64 << 20)
    new.steps(20)
    new.seal()
    dcs.collector(keep_versions=1).sweep([])
    after = new.copy()
    assert after == read(dcs) and after.startswith(before[:sealed])
    assert steps(after) == [*steps(before[:sealed]), *((2, n) for n in range(1, 22))]
    assert [r["start"] for r in records(after) if r["kind"] == "gap"] == [sealed]
    assert [p.read_bytes() for p in new.path.parent.glob("steps.*.jsonl")] == [before]
    assert min(tail_segments(dcs)) == new.history.sealed, "etcd has nothing of the older tail"


def tail_segments(dcs: DcsCluster) -> set[int]:
    return {block.segment for block in read_tail(dcs.etcd, dcs.keys).blocks}


def test_gap_after_a_restored_snapshot_is_recorded_also_when_the_actor_is_killed_before_its_first_step(
        dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    old = term(dcs)
    snapshot = dcs.etcd.range(dcs.keys.run_log_prefix())[0]
    old.steps(20)
    old.seal()
    old.end()
    restore(dcs, snapshot)
    for _ in range(2):
        term(dcs)
    assert [r["start"] for r in records(read(dcs)) if r["kind"] == "gap"] == [old.history.sealed]


def test_oldest_records_are_a_gap_of_the_stream_once_it_has_its_share(dcs: DcsCluster) -> None:
    dcs.start("a")
    one = term(dcs, most_bytes=4 * SEGMENT)
    for _ in range(8):
        one.steps(9)
        one.copy()
        one.seal()
    whole, shared = one.copy(), read(dcs)
    assert steps(whole) == [(1, n) for n in range(1, 73)], "the copy still has all"
    gap = records(shared)[0]
    assert gap["kind"] == "gap" and whole[gap["end"]:] == shared.partition(b"\n")[2]
    assert len(shared) - 100 < 6 * SEGMENT


def test_stream_without_room_stores_no_records_and_the_copy_has_all(dcs: DcsCluster) -> None:
    dcs.start("a")
    one = term(dcs, most_bytes=0)
    for _ in range(3):
        one.steps(9)
        one.copy()
        one.seal()
    assert dcs.stat()["chunks"] <= 3, "manifests alone"
    assert steps(one.copy()) == [(1, n) for n in range(1, 28)]
    found = records(read(dcs))
    assert found[0] == {"kind": "gap", "start": 0, "end": one.history.sealed} and steps(read(dcs))[-1] == (1, 27)


def test_thread_of_the_spool_does_it_all_and_survives_its_errors(dcs: DcsCluster) -> None:
    one = term(dcs)
    one.spool.start()
    one.steps(30)
    wait_until(lambda: one.path.exists() and one.path.read_bytes() == read(dcs), what="the copy without a node")
    assert one.history.sealed == 0
    dcs.start("a")
    wait_until(lambda: one.history.sealed > 0, what="the first version")
    one.steps(9)
    one.spool.close()
    assert not one.spool.is_alive() and one.path.read_bytes() == read(dcs)
    assert steps(read(dcs)) == [(1, n) for n in range(1, 40)]


def test_reader_takes_a_copy_that_has_what_is_sealed_and_the_rest_from_etcd(dcs: DcsCluster) -> None:
    dcs.start("a")
    one = term(dcs)
    one.steps(30)
    one.seal()
    one.step()
    data = one.copy()
    one.step()
    whole = read(dcs)
    dcs.kill("a")

    def parts() -> bytes:
        with HistoryReader(dcs.etcd, dcs.keys, io_timeout_s=10, security=None) as reader:
            assert reader.end(100) == whole[-100:]
            return b"".join(reader.parts(one.path))

    assert whole.startswith(data) and len(whole) > len(data)
    for size in (len(data), one.history.sealed, len(data) - 5):
        one.path.write_bytes(data[:size])
        assert parts() == whole, "no node is needed"
    identity = json.loads(data.splitlines()[0])["id"].encode()
    for other in (data[:one.history.sealed - 1], data.replace(identity, b"another"), data + b"mine\n", b""):
        one.path.write_bytes(other)
        assert records(parts())[0]["kind"] == "gap", "it is not taken, and the stream is away"
    for make in (Path.mkdir, os.mkfifo):
        one.path.rename(one.path.with_name(make.__name__))
        make(one.path)
        assert records(parts())[0]["kind"] == "gap", "it is no file"
    dcs.start("a")


def test_reader_of_a_copy_that_grows_has_each_record_once(dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history_reader, "_PART_BYTES", 100)
    one = term(dcs)
    one.step()
    one.copy()
    one.step()
    whole = read(dcs)
    with HistoryReader(dcs.etcd, dcs.keys, io_timeout_s=10, security=None) as reader:
        parts = reader.parts(one.path)
        first = next(parts)
        assert one.copy() == whole
        assert first + b"".join(parts) == whole


def test_copy_with_gaps_is_taken_when_it_ends_as_the_history_does(dcs: DcsCluster) -> None:
    dcs.start("a")
    one = term(dcs, most_bytes=4 * SEGMENT)
    for _ in range(8):
        one.steps(9)
        one.copy()
        one.seal()
    one.path.unlink()
    rebuilt = one.copy()
    assert records(rebuilt)[0]["kind"] == "gap"
    with HistoryReader(dcs.etcd, dcs.keys, io_timeout_s=10, security=None) as reader:
        assert b"".join(reader.parts(one.path)) == rebuilt == read(dcs)


def test_follower_without_a_copy_gets_each_record_once_also_after_another_job_of_the_name(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    follower = RecordReader(dcs.etcd, dcs.keys, "", 0)  # before the job has begun
    got: list[Record] = []

    def has(count: int) -> bool:
        got.extend(follower.records())
        return len([r for r in got if r["kind"] == "step"]) >= count

    first = term(dcs)
    first.steps(10)
    wait_until(lambda: has(10), what="the first records")
    first.steps(20)
    wait_until(lambda: has(30), what="those of further segments")
    first.seal()
    first.step()
    wait_until(lambda: has(31), what="the record after the seal")
    assert follower.found and [r["step"] for r in got if r["kind"] == "step"] == list(range(1, 32))

    # One that begins now, knows what is there, and gets what is written later.
    with HistoryReader(dcs.etcd, dcs.keys, io_timeout_s=10, security=None) as reader:
        identity, offset = reader.stands_at
    assert (identity, offset) == (first.history.identity, first.history.end)
    later, unknowing = RecordReader(dcs.etcd, dcs.keys, identity, offset), RecordReader(dcs.etcd, dcs.keys, "", None)
    wait_until(lambda: unknowing.found, what="the reader that knows nothing")
    first.step()
    for each, begins in ((later, 32), (unknowing, None)):  # which gets what is in etcd, too
        found: list[int] = []

        def has_newest(each: RecordReader = each, found: list[int] = found) -> bool:
            found += [r["step"] for r in each.records() if r["kind"] == "step"]
            return 32 in found

        wait_until(has_newest, what="the new record")
        assert found == list(range(begins or min(found), 33)) and (begins or min(found) < 32)
        each.close()
    wait_until(lambda: has(32), what="the record")
    first.end()

    # The job is deleted, and another one has its name.
    dcs.etcd.delete_prefix(dcs.keys.root)
    got.clear()
    second = term(dcs, "second")
    second.steps(2)
    wait_until(lambda: has(2), what="the records of the other job")
    assert [r["step"] for r in got if r["kind"] == "step"] == [1, 2]
    follower.close()
