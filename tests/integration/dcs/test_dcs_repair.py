"""Repair on real nodes: copies that a node took with it are made again, part by part."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.dcs_cluster import DcsCluster, model
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.config.dcs import Replicas
from elastic_rl.dcs.catalog import leader_writes, reads
from elastic_rl.dcs.catalog.holders import HeadHolders
from elastic_rl.dcs.catalog.repair import Repairer, RepairThread
from elastic_rl.errors import ChunkMissing
from elastic_rl.etcd.client import Compare, EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys


@pytest.fixture
def dcs(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, tmp_path: Path) -> Iterator[DcsCluster]:
    with DcsCluster.open(etcd_servers, etcd, keys, tmp_path) as out:
        yield out


def repairer(dcs: DcsCluster, replicas: Replicas = 2) -> Repairer:
    return Repairer(dcs.etcd, dcs.keys, dcs.client(io_timeout_s=20), replicas=replicas)


def require_replica_sets(dcs: DcsCluster, number: int) -> list[list[str]]:
    """The replica sets of a version, after every node in them has shown that it has its parts and the manifest."""
    version, client = reads.get_version(dcs.etcd, dcs.keys, "policy", number), dcs.client()
    assert version is not None
    placed = dcs.parts(number)
    with dcs.puller(placed[0][0]).pull("policy", number) as pulled:
        digests = pulled.manifest.part_digests()
    for nodes, part in zip(placed, digests, strict=True):
        assert all(client.connect(n).has([version.manifest, *part]) == [] for n in nodes)
    return placed


def test_version_of_a_single_node_is_copied_to_the_second_one(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.publish(1, replicas="auto")
    repairing = repairer(dcs, "auto")
    assert repairing.round([]) == [], "there is no other node to have a copy"
    dcs.start("b")
    assert repairing.round([]) == ["copied policy version 1 to node b"]
    dcs.kill("a")
    dcs.require(model(1), 1, node="b")


def test_versions_survive_the_loss_of_both_nodes_one_after_the_other(dcs: DcsCluster) -> None:
    dcs.start("a", "b", "c")
    dcs.publish(1, 2, replicas=2)
    repairing = repairer(dcs)
    [[_, other]] = dcs.parts(1)
    dcs.kill("a")
    lines = repairing.round([])
    assert sorted(lines) == [f"copied policy version {n} to node {'c' if other == 'b' else 'b'}" for n in (1, 2)]
    assert all(sorted(require_replica_sets(dcs, n)[0]) == ["b", "c"] for n in (1, 2))
    assert repairing.round([]) == [], "a version with all its copies was repaired again"
    assert dcs.head() == reads.get_version(dcs.etcd, dcs.keys, "policy", 2), "the head's two records differ"
    assert set(dcs.head().sources) <= {"b", "c"}
    dcs.kill(other)
    [last] = {"b", "c"} - {other}
    for number in (1, 2):
        dcs.require(model(number), number, node=last)
    assert "has 1 of 2 copies" in repairing.round([])[0]
    dcs.kill(last)
    assert repairing.round([]) == [], "there is none to copy to"
    short, complete = repairing.short([])
    assert complete and sorted((v.number, v.copies, v.wanted) for v in short) == [(1, 0, 2), (2, 0, 2)]


def test_only_the_parts_of_a_lost_node_are_copied(dcs: DcsCluster) -> None:
    """A version of two hosts: no node ever gets all of it."""
    dcs.start("a", "b", "c", "d")
    version, tensors = dcs.publish_from("ab", replicas=2)
    assert dcs.parts(1) == [["a", "b"], ["b", "c"]]
    repairing = repairer(dcs)
    assert repairing.round([]) == [], "a version published from two hosts was copied as a whole"
    assert dcs.stat("d")["chunks"] == 0
    dcs.kill("c")
    assert repairing.round([]) == ["copied parts of policy version 1 to node d"]
    assert require_replica_sets(dcs, 1) == [["a", "b"], ["b", "d"]]
    with dcs.puller("b").pull("policy") as pulled:
        part = pulled.manifest.part_digests()[1]
    assert dcs.stat("d")["chunks"] == len(part) + 1, "more than the lost part and the manifest was copied"
    dcs.kill("b")  # of the first part a has the last copy, of the second one d
    repairing.round([])
    assert require_replica_sets(dcs, 1) == [["a", "d"], ["d", "a"]]
    dcs.require(tensors, version.number, node="d")


def test_restarted_node_counts_with_its_disk_and_not_without(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.start("b", disk_bytes=64 << 20)
    dcs.publish(1, replicas=2)
    repairing = repairer(dcs)
    assert require_replica_sets(dcs, 1) == [["a", "b"]]
    dcs.stop("b")  # which saves what it has
    dcs.start("b", disk_bytes=64 << 20)
    assert repairing.round([]) == [] and require_replica_sets(dcs, 1) == [["a", "b"]]
    dcs.kill("a")
    dcs.start("a")
    assert repairing.round([]) == ["copied policy version 1 to node a"]
    assert sorted(require_replica_sets(dcs, 1)[0]) == ["a", "b"]


def test_sweep_fetches_the_manifest_that_a_restarted_node_lost(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.start("b", disk_bytes=64 << 20)
    dcs.publish(1, replicas=2)
    [[_, _]] = require_replica_sets(dcs, 1)
    manifest, chunks = dcs.head().manifest, dcs.stat("b")["chunks"]
    dcs.stop("b")
    [file] = dcs.folder.rglob(manifest)
    file.unlink()
    dcs.start("b", disk_bytes=64 << 20)
    assert dcs.client().connect("b").has([manifest]) == [manifest] and dcs.stat("b")["chunks"] == chunks - 1
    dcs.collector(io_timeout_s=20).sweep([])
    assert dcs.stat("b")["chunks"] == chunks, "chunks of a live version were dropped"
    require_replica_sets(dcs, 1)


def test_version_whose_manifest_no_node_has_any_more_does_not_fill_the_nodes(dcs: DcsCluster) -> None:
    dcs.start("a", disk_bytes=64 << 20)
    dcs.publish(1, stream="run_log")
    dcs.stop("a")  # which saves its chunks
    [file] = dcs.folder.rglob(dcs.head("run_log").manifest)
    file.write_bytes(b"rotten")
    dcs.start("a", disk_bytes=64 << 20)
    collector, said, chunks = dcs.collector(keep_versions=1), set[str](), list[int]()
    for seed in range(2, 7):
        dcs.publish(seed)
        said |= {*collector.sweep([]), *collector.sweep([])}
        chunks.append(dcs.stat("a")["chunks"])
    assert any(line.startswith("node a keeps the chunks that it had before it lost some") for line in said), said
    # The first of them was there when the loss was found.
    assert chunks[1] > chunks[0] and set(chunks[1:]) == {chunks[1]}, "no chunk of the old versions was dropped"
    dcs.require(model(6))


def test_chunk_that_a_running_node_lost_is_copied_again(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.start("b", disk_bytes=64 << 20)
    dcs.publish(1, replicas=2)
    dcs.stop("b")  # which saves its chunks
    dcs.start("b", disk_bytes=64 << 20)  # with none of them in the arena
    repairing = repairer(dcs)
    assert repairing.round([]) == [] and repairing.round([]) == []
    with dcs.puller("a").pull("policy") as pulled:
        lost = pulled.manifest.part_digests()[0][0]
    [file] = dcs.folder.rglob(lost)
    file.write_bytes(b"rotten")
    with pytest.raises(ChunkMissing):
        dcs.client().connect("b").get(lost)
    assert dcs.client().connect("b").has([lost]) == [lost]
    wait_until(lambda: {n.id: n.lost_chunks for n in dcs.registered()} == {"a": 0, "b": 1},
               what="its record")
    assert repairing.round([]) == ["copied policy version 1 to node b"]
    assert sorted(require_replica_sets(dcs, 1)[0]) == ["a", "b"] and repairing.round([]) == []


def test_versions_that_are_short_of_copies_are_known_until_they_are_repaired(dcs: DcsCluster) -> None:
    dcs.start("a", "b")
    dcs.publish(1, 2, replicas=2)
    repairing = repairer(dcs)

    def short(*guard: Compare) -> list[tuple[int, int, int]]:
        found, complete = repairing.short(guard)
        assert complete
        return sorted((v.number, v.copies, v.wanted) for v in found)

    assert repairing.short([]) == ([], False), "nothing is known before the first round"
    repairing.round([])
    assert short() == []
    dcs.kill("b")
    repairing.round([])
    assert short() == [(1, 1, 2), (2, 1, 2)]
    other = Compare.absent("x")
    assert repairing.short([other]) == ([], False), "another leader may have repaired them"
    repairing.round([other])
    assert short(other) == [(1, 1, 2), (2, 1, 2)]
    dcs.start("c")
    repairing.round([other])
    assert short(other) == []


@pytest.mark.parametrize("readings", [0, 1])
def test_version_that_is_released_during_a_round_is_not_short(
        readings: int, dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """``readings``: of its replica sets before."""
    dcs.start("a")
    dcs.publish(1, 2, replicas="auto")
    read, seen = reads.read_replica_sets, list[int]()

    def meanwhile(etcd: EtcdClient, keys: Keys, stream: str, number: int) -> reads.ReplicaSetsEntry:
        if number == 1:
            seen.append(number)
            if len(seen) == readings + 1:
                assert (entry := reads.get_entry(etcd, keys, stream, 1)) is not None
                assert leader_writes.release(etcd, keys, [entry], [])
        return read(etcd, keys, stream, number)

    monkeypatch.setattr(reads, "read_replica_sets", meanwhile)
    repairing = repairer(dcs, "auto")
    assert repairing.round([]) == [] and repairing.short([]) == ([], True) and len(seen) == 2


def test_version_that_does_not_fit_elsewhere_is_known_with_the_reason(dcs: DcsCluster) -> None:
    dcs.start("a")
    dcs.publisher(replicas="auto").publish(model(1, nbytes=4 << 20).items(), meta={})
    dcs.start("b", arena_bytes=1 << 20)
    repairing = repairer(dcs, "auto")
    [line] = repairing.round([])
    [version] = repairing.short([])[0]
    assert (version.number, version.copies, version.wanted) == (1, 1, 2)
    assert version.why and version.why in line
    dcs.start("c")
    repairing.round([])
    assert repairing.short([])[0] == [], "it does not wait for its backoff where there is another node"


def test_all_versions_are_known_to_be_short_while_the_copies_of_one_are_made(
        dcs: DcsCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    dcs.start("a", "b")
    dcs.publish(1, 2, replicas=2)
    dcs.kill("b")
    dcs.start("c")
    repairing, known = repairer(dcs), list[set[int]]()
    copy = repairing._copy

    def look(*args: Any) -> dict[str, str]:
        known.append({v.number for v in repairing.short([])[0]})
        return copy(*args)

    monkeypatch.setattr(repairing, "_copy", look)
    repairing.round([])
    assert known == [{1, 2}, {1}] and repairing.short([]) == ([], True)


def test_repairer_that_no_longer_leads_changes_no_record(dcs: DcsCluster) -> None:
    dcs.start("a", "b", "c")
    dcs.publish(1, replicas=2)
    [before] = dcs.parts(1)
    dcs.kill("b")
    repairer(dcs).round([Compare.exists(ClusterKeys(dcs.keys.job).leader("nobody"))])
    assert dcs.parts(1) == [before]
    thread = RepairThread(repairer(dcs))
    thread.start()
    thread.request([])
    wait_until(lambda: dcs.parts(1) == [["a", "c"]], what="the repair")
    thread.close()
    assert not thread.is_alive()
    require_replica_sets(dcs, 1)


def test_repair_thread_survives_an_unexpected_error(dcs: DcsCluster) -> None:
    dcs.start("a", "b", "c")
    dcs.publish(1, replicas=2)
    dcs.kill("b")
    failed = []

    class Failing(Repairer):
        def _committed(self):  # type: ignore[no-untyped-def]
            if not failed:
                failed.append(True)
                raise KeyError("a bug")
            return super()._committed()

    thread = RepairThread(Failing(dcs.etcd, dcs.keys, dcs.client(), replicas=2))
    thread.start()
    try:
        wait_until(lambda: thread.request([]) or dcs.parts(1) == [["a", "c"]], what="the repair",
                   poll_s=0.3)
        assert failed, "the error did not happen"
    finally:
        thread.close()


def test_node_of_another_catalog_is_given_no_copies(dcs: DcsCluster) -> None:
    dcs.start("a", "b")
    dcs.publish(1, replicas=2)
    dcs.start("c", disk_bytes=64 << 20)
    dcs.client().connect("c").call({"op": "note_versions", "catalog": "other", "commits": 3, "versions": []})
    wait_until(lambda: any(n.catalog == "other" for n in dcs.registered()), what="its record")
    dcs.kill("b")
    assert "has 1 of 2 copies" in repairer(dcs).round([])[0]
    assert dcs.stat("c")["chunks"] == 0


def test_version_is_lost_only_when_no_node_has_some_chunk_of_it_and_all_have_said_so(dcs: DcsCluster) -> None:
    dcs.start("a", "b", "c", "d")
    holders = HeadHolders(dcs.etcd, dcs.keys, dcs.client(io_timeout_s=20), "policy")
    assert not holders.is_lost(), "there is no version yet"
    dcs.publish(1, replicas=1)
    [[holder]] = dcs.parts(1)
    reader, *others = {"a", "b", "c", "d"} - {holder}
    assert not holders.is_lost()
    dcs.require(model(1), 1, node=reader)
    dcs.kill(holder)
    assert not holders.is_lost(), "a host that has pulled it has it, too"
    dcs.kill(reader)
    assert holders.is_lost()
    dcs.etcd.put(dcs.keys.durable("policy", 1), b"{}")
    assert not holders.is_lost(), "nodes get it from the durable store"
    dcs.etcd.delete(dcs.keys.durable("policy", 1))
    dcs.freeze(others[0])
    assert not HeadHolders(dcs.etcd, dcs.keys, dcs.client(io_timeout_s=0.5), "policy").is_lost(), (
        "one that does not answer may have it")
