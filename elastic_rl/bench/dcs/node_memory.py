"""memory-node: what a node holds in memory beyond the bytes of the versions in its arena."""

from __future__ import annotations

from elastic_rl.bench.dcs.memory import Peak, pss
from elastic_rl.bench.dcs.testbed import Testbed
from elastic_rl.bench.dcs.weights import Weights
from elastic_rl.bench.measurement import Row


def measure(testbed: Testbed) -> list[Row]:
    """Two nodes: one is published to and serves, the other pulls. The larger of the two counts, at its peak: its own
    memory, and what its arena uses more than the version has bytes."""
    weights = Weights(testbed.nbytes)
    with testbed.cluster() as cluster:
        for node in ("source", "target"):
            cluster.start(node, 2 * weights.nbytes)
        records = cluster.await_nodes()
        publisher, puller = cluster.publisher("source"), cluster.puller("target")
        peaks = {node: Peak([record.pid]) for node, record in records.items()}
        with peaks["source"], peaks["target"]:
            version = publisher.publish(weights.tensors, meta={})
            with puller.pull(version.stream, version.number) as pulled:
                used = sum(-(-n // 64) * 64 for n in pulled.manifest.chunks.values())
        idle = {node: pss([record.pid])["Pss_Anon"] for node, record in records.items()}
    over = used - weights.nbytes
    own = max(peak.most for peak in peaks.values())
    return rows(weights.nbytes, own + over, max(idle.values()))


def rows(nbytes: int, over: int, idle: int) -> list[Row]:
    """Pure. Bytes."""
    return [Row.of("memory-node", f"node: most memory beyond the {nbytes >> 20} MiB of a version", [over / 2**20],
                   "MiB"),
            Row.of("memory-node-share", "… of the version's bytes", [over / nbytes], "×"),
            Row.of("memory-node-idle", "… when it has nothing to do", [idle / 2**20], "MiB")]
