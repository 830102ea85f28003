"""The arithmetic and the form of the checkpoint service's measurements. Nothing here is timed."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from support.waiting import wait_until

from benchmarks import DCS
from elastic_rl.bench import dcs, timing
from elastic_rl.bench.dcs import (
    apply_latency,
    commit,
    deltas,
    fleet,
    link_throughput,
    memory,
    node_memory,
    plain_transfer,
    pull_latency,
    stall,
    token_gaps,
)
from elastic_rl.bench.dcs.links import Links, Pace
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.workers import Worker, WorkerFailed
from elastic_rl.dcs import protocol
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.errors import DeadlineExceeded
from elastic_rl.net.addresses import free_port


# -- the rows' arithmetic ---------------------------------------------------------------------------------------------
def by_id(rows: Iterable[Row]) -> dict[str, Row]:
    return {row.id: row for row in rows}


def listed(module: str) -> set[str]:
    return set(dcs.SUITE.rows[module])


def test_p1_is_the_time_at_most_processes_over_that_at_one() -> None:
    found = pull_latency.Measured(pulls={1: [1.0, 2.0, 3.0], 2: [2.0], 4: [2.0], 8: [2.0, 2.2, 2.4]},
                                  verified={1: [2.0], 2: [3.0], 4: [4.0], 8: [5.0]},
                                  others={"files": {1: [1.0], 2: [2.0], 8: [8.0]}}, why={"Ray": "no Ray here"})
    rows = by_id(pull_latency.rows(found))
    p1 = rows["P1"]
    assert p1.value == pytest.approx(1.1) and p1.met is True and p1.alternatives == {"files": 8.0}
    assert p1.unmeasured_alternatives == {"Ray": "no Ray here"}
    assert rows["P1-pull-2"].value == 2.0 and rows["P1-pull-8"].alternatives == {"files": 8.0}
    verified = by_id(pull_latency.verify_rows(found))
    assert verified["P1-verify"].value == pytest.approx(2.5) and verified["P1-verify-4"].value == 4.0
    assert rows.keys() | verified.keys() == listed("pull_latency")


def test_p1_is_missed_when_more_processes_take_longer() -> None:
    assert by_id(pull_latency.rows(pull_latency.Measured(pulls={1: [1.0], 8: [1.2]})))["P1"].met is False


def test_apply_is_compared_with_the_best_alternative_at_equal_engines() -> None:
    found = apply_latency.Measured(
        ours={1: [0.5, 0.5, 1.0]}, others={1: {"disk": [2.0], "gloo": [1.5, 1.5, 9.0]}}, pauses=[0.11, 0.12, 0.13],
        bare=[0.1, 0.1, 0.5], grown={"": [float(3 << 20)], "disk": [float(9 << 20)]}, why={"other": "needs CUDA"},
        gaps=[0.5], usual_gaps=[0.1])
    rows = by_id([*apply_latency.count_rows(found, 1, 64 << 20), *apply_latency.missing_rows(2, "no memory"),
                  *apply_latency.pause_rows(found), apply_latency.gap_row(found),
                  apply_latency.memory_row(found, 64 << 20)])
    one = rows["P1-apply-1"]
    assert one.value == pytest.approx(3.0) and one.met is True and one.op == ">="
    assert one.alternatives == pytest.approx({"disk": 4.0, "gloo": 3.0})
    assert one.unmeasured_alternatives == {"other": "needs CUDA"}
    assert rows["P1-apply-1-s"].alternatives == {"disk": 2.0, "gloo": 1.5}
    assert rows["P1-apply-2"].why == rows["P1-apply-2-s"].why == "no memory"
    assert rows["P4"].value == pytest.approx(1.2)
    assert rows["P4-pause-s"].alternatives == {"bare load_weights": pytest.approx(0.1)}
    assert rows["memory-engine"].value == 3.0 and rows["memory-engine"].alternatives == {"disk": 9.0}
    assert rows["P4-token-gap-s"].limit == 0.1
    assert rows.keys() == set(DCS.rows["apply_latency"])


def test_apply_has_no_speedup_before_an_alternative_was_measured() -> None:
    found = apply_latency.Measured(ours={1: [0.5]}, others={1: {}})
    assert list(by_id(apply_latency.count_rows(found, 1, 1 << 20))) == ["P1-apply-1-s"]
    found.why["disk"] = "full"
    assert by_id(apply_latency.count_rows(found, 1, 1 << 20))["P1-apply-1"].why


def test_longest_token_gap_is_that_around_the_update() -> None:
    at = [0.0, 9.0, 9.5, 10.0, 10.5, 13.0, 13.5, 30.0]
    assert token_gaps.longest(at, 10.2, 12.0) == 2.5, "9 s before and 16 s after do not belong to the update"
    assert token_gaps.longest([1.0], 0.0, 2.0) == 0.0


def test_link_row_is_a_share_of_the_raw_link() -> None:
    row = by_id(link_throughput.rows(10**9, [0.5, 0.5], [2.2, 2.5, 9.0]))["P2-link"]
    assert row.value == pytest.approx(0.8) and row.met is False and row.op == ">="


def test_fleet_is_measured_in_single_pulls_beside_measured_alternatives() -> None:
    found = fleet.Measured(64_000_000, 64e6, singles=[1.0, 1.1, 1.2], why={"RDMA": "no device"},
                           fleets={"": [2.0, 2.2, 2.4], "each": [17.6]},
                           sent={"": [70e6, 96e6, 100e6], "each": [1024e6]})
    rows = by_id(fleet.rows("P2-fleet", found))
    assert rows["P2-fleet"].value == pytest.approx(2.0) and rows["P2-fleet"].met is True
    assert rows["P2-fleet"].alternatives == pytest.approx({"each": 16.0})
    assert rows["P2-fleet-sent"].value == pytest.approx(1.5)
    assert rows["P2-fleet-sent"].alternatives == pytest.approx({"each": 16.0})
    assert rows["P2-fleet-s"].limit == pytest.approx(1.0) and rows["P2-fleet-s"].unmeasured_alternatives
    assert rows.keys() | by_id(fleet.rows("P2-fleet-slow", found)).keys() == listed("fleet")


def test_stall_and_memory_are_compared_with_their_base() -> None:
    rows = by_id(stall.rows(1 << 20, [1.0, 1.0, 4.0], [1.1, 1.3, 1.2], [10 << 20, 300 << 20]))
    assert rows.keys() == listed("stall")
    assert rows["P3"].value == pytest.approx(1.2) and rows["P3"].met is True
    assert rows["memory-trainer"].value == 300 and rows["memory-trainer"].met is False


def test_memory_of_a_node_is_in_bytes_and_as_a_ratio() -> None:
    rows = by_id(node_memory.rows(100 << 20, 25 << 20, 10 << 20))
    assert (rows["memory-node"].value, rows["memory-node-share"].value) == (25, 0.25)
    assert rows.keys() == listed("node_memory")


def test_deltas_have_rows_of_each_fraction() -> None:
    coded = deltas.Coded(dense=100, coded=4, encode_s=[1.0], decode_s=[1.0])
    assert by_id(row for f in deltas.FRACTIONS for row in deltas.rows(f, coded)).keys() == listed("deltas")


def test_samples_exclude_warm_up_runs() -> None:
    ran: list[str] = []
    times = timing.seconds(lambda: ran.append("run"), 3, before=lambda: ran.append("before"), warm=2)
    assert len(times) == 3 and ran == ["before", "run"] * 5
    assert timing.gbps(2_000_000_000, [0.5, 1.0]) == [4.0, 2.0]


# -- what is measured with --------------------------------------------------------------------------------------------
def test_every_element_of_a_new_version_differs() -> None:
    """A delta between two versions saves nothing: the link is measured, and not the codec."""
    weights = Weights(1 << 20)
    before = weights.flat.view(torch.int16).clone()
    weights.renew()
    assert float((weights.flat.view(torch.int16) != before).float().mean()) > 0.999


def test_weights_fill_their_size_and_no_page_of_any_version_equals_another() -> None:
    weights = Weights(40 << 20)
    assert sum(t.nbytes for _, t in weights.tensors) == weights.nbytes == 40 << 20
    assert all(bool(t.isfinite().all()) for _, t in weights.tensors)
    assert len({name for name, _ in weights.tensors}) == len(weights.tensors)
    seen = set()
    for _ in range(2):
        pages = weights.flat.view(-1, 4096).numpy()
        seen |= {digest_of(np.ascontiguousarray(page)) for page in pages}
        weights.renew()
    assert len(seen) == 2 * weights.nbytes // 4096


def test_small_tensors_differ_from_one_version_to_the_next() -> None:
    first, second = commit._Tensors(0), commit._Tensors(1)
    assert len({name for name, _ in first}) == commit.TENSORS and first.read_at > 0 == second.read_at
    assert commit.CHUNKS == 476_838
    assert not torch.equal(first._data.view(torch.int16), second._data.view(torch.int16))


def test_paced_link_keeps_its_rate_after_a_short_burst() -> None:
    now = 100.0
    pace = Pace(1000.0, clock=lambda: now)
    assert pace.pay(20) == pytest.approx(0.0)  # what an idle link has saved up
    assert pace.pay(500) == pytest.approx(0.5)
    assert pace.pay(500) == pytest.approx(1.0)
    now += 60.0
    assert pace.pay(1000) == pytest.approx(0.98), "a long idle time saved up more than a burst"
    assert pace.sent == 2020


def test_link_passes_bytes_unchanged_and_counts_them_at_both_ends() -> None:
    links = Links(1e9)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = links.add("server", listener.getsockname()[1])
        links.add("caller", free_port())
        with socket.create_connection(("127.0.0.1", link), timeout=10) as near:
            protocol.send(near, {"op": "hello", "job": "j", "id": "caller"})
            far, _ = listener.accept()
            far.settimeout(10)
            with far:
                assert protocol.receive(far)[0]["id"] == "caller"
                data = os.urandom(1 << 20)
                pouring = threading.Thread(target=protocol.send, args=(far, {}, data))
                pouring.start()
                assert bytes(protocol.receive(near)[1]) == data
                pouring.join(60)
            assert near.recv(1) == b"", "the end of one side did not reach the other"
    counts = links.counts()
    assert counts["server"]["out"] == counts["caller"]["into"] > 1 << 20
    assert counts["server"]["into"] == counts["caller"]["out"] == 0  # the hello itself is free


@pytest.mark.parametrize(("kind", "copies"), [("each", 3), ("chain", 1)])
def test_plain_transfer_brings_all_bytes_to_every_host(kind: str, copies: int) -> None:
    """Over real links; the source sends as many copies as the way of sending needs."""
    links, hosts, names = Links(1e9), plain_transfer.Hosts(3 << 20), ["source", "a", "b", "c"]
    ports = hosts.listen(names)["ports"]
    hosts.connect([links.add(name, port) for name, port in zip(names, ports, strict=True)])
    assert getattr(hosts, kind)()["seconds"] > 0
    counts = links.counts()
    assert counts["source"]["out"] == copies * 3 << 20
    assert [counts[name]["into"] for name in names[1:]] == [3 << 20] * 3


def test_memory_is_parsed_from_smaps_rollup() -> None:
    lines = ["55a000-7ff000 ---p 00000000 00:00 0    [rollup]", "Rss:      5000 kB", "Pss:      1024 kB",
             "Pss_Anon:       8 kB", "VmFlags: rd wr"]
    assert memory.parse_rollup(lines) == {"Rss": 5000 << 10, "Pss": 1 << 20, "Pss_Anon": 8 << 10}
    assert memory.pss([0]) == {"Pss": 0, "Pss_Anon": 0, "Pss_File": 0, "Pss_Shmem": 0}


def test_peak_is_recorded_though_the_memory_is_freed() -> None:
    with memory.Peak([os.getpid()]) as peak:
        block = np.ones(96 << 20, dtype=np.uint8)
        wait_until(lambda: peak.grown >= 48 << 20, what="a sample of the watcher")
        del block
    assert peak.grown >= 48 << 20


WORKER = """
from elastic_rl.bench.workers import serve
def fail():
    raise ValueError("as asked")
def prints():
    print("a library that prints")
    return {"ok": True}
serve({"add": lambda a, b: {"sum": a + b}, "fail": fail, "prints": prints, "end": lambda: exit()})
"""


@pytest.fixture
def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "bench_worker_of_a_test.py").write_text(WORKER)
    with Worker("bench_worker_of_a_test", log=tmp_path / "log", env={"PYTHONPATH": str(tmp_path)}) as made:
        yield made


def test_worker_answers_though_it_prints_and_returns_its_errors(worker: Worker) -> None:
    assert worker.call("add", a=2, b=3) == {"sum": 5}
    assert worker.call("prints") == {"ok": True}
    with pytest.raises(WorkerFailed, match="as asked"):
        worker.call("fail")
    assert worker.call("add", a=1, b=1) == {"sum": 2}, "an error ended the worker"


def test_worker_that_ends_or_does_not_answer_is_an_error(worker: Worker) -> None:
    worker.send("add", a=1, b=2)
    assert worker.answer(30)["sum"] == 3
    with pytest.raises(DeadlineExceeded):
        worker.answer(0.05)
    worker.send("end")
    with pytest.raises(WorkerFailed, match="ended"):
        worker.answer(30)
