"""P3 and memory-trainer: what a publish costs a trainer of two tensor-parallel ranks.

The loop stands still while the weights are gathered and copied off the ranks; hashing, replication and the commit go on
behind the next step. The base of the comparison is the same gather, and one copy of each tensor into memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from elastic_rl import config
from elastic_rl.bench.dcs.memory import Peak
from elastic_rl.bench.dcs.testbed import DCS, STREAM, Cluster, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.workers import Worker
from elastic_rl.config import Config
from elastic_rl.data.tiny_model import hf_config
from elastic_rl.dcs.catalog import reads
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host.address import own_address
from elastic_rl.net.addresses import free_port
from elastic_rl.runtime.waiting import wait_until

TP = 2
GOAL_STALL = 1.2
_MOST_BYTES = 512 << 20
_LAYER_BYTES = 60 << 20
"""fp32, of Qwen3-0.6B."""
_SETUP_S, _STEP_S = 240.0, 120.0


def measure(testbed: Testbed) -> list[Row]:
    with testbed.cluster() as cluster:
        cfg = configure(testbed.folder, cluster.keys.job, min(testbed.nbytes, _MOST_BYTES))
        ranks = _ranks(cluster, cfg)
        owned = [int(answer["nbytes"]) for answer in _all(ranks, "setup")]
        nbytes = sum(owned)
        cluster.node("n0", 2 * nbytes + nbytes // 4)
        grown = _first_publish(cluster, ranks)
        _all(ranks, "prepare", nbytes=max(owned))
        base, stalls = [], []
        for _ in range(testbed.samples + 1):
            base.append(_slowest(_all(ranks, "gather")))
            stalls.append(_publish(cluster, ranks))
            cluster.settle()
        _all(ranks, "finish")
        return rows(nbytes, base[1:], stalls[1:], grown)


def rows(nbytes: int, base: Sequence[float], stalls: Sequence[float], grown: Sequence[int]) -> list[Row]:
    """Pure. ``base``, ``stalls``: seconds of the slowest rank; ``grown``: bytes of each rank at its peak."""
    middle = median(base)
    size = f"{nbytes >> 20} MiB, TP={TP}"
    return [Row.of("P3", f"trainer stall over gather and one copy ({size})", [s / middle for s in stalls], "×",
                   goal=GOAL_STALL, limit=1.0),
            Row.of("P3-stall-s", f"trainer stall ({size})", stalls, "s", limit=middle),
            Row.of("memory-trainer", f"trainer: most memory that a publish adds to a rank ({size})",
                   [max(grown) / 2**20], "MiB", goal=2 * DCS.bucket_bytes / 2**20)]


def configure(folder: Path, job: str, nbytes: int) -> Config:
    """A model of about so many bytes of fp32 weights."""
    return config.parse({
        "job": job, "run_dir": str(folder / "runs"), "etcd": {"call_timeout_s": 5.0},
        "trainer": {"tensor_parallel": TP, "collective_timeout_s": _STEP_S,
                    "start_timeout_s": _SETUP_S},
        "dcs": {"io_timeout_s": _STEP_S, "publish_timeout_s": _STEP_S + 1},
        "model": {"hidden_size": 1024, "intermediate_size": 3072, "num_heads": 16, "num_kv_heads": 8, "head_dim": 128,
                  "num_layers": max(round(nbytes / _LAYER_BYTES), 1)}})


def _context(cluster: Cluster, cfg: Config) -> Path:
    folder = cluster.testbed.folder / "trainer"
    hf_config(cfg).save_pretrained(folder)
    ctx = RunContext(config=cfg, etcd_endpoints=[cluster.testbed.endpoint], job=cluster.keys.job, epoch=cluster.epoch,
                     model_dir=str(folder), host=own_address())
    return ctx.save(folder / "context.json")


def _ranks(cluster: Cluster, cfg: Config) -> list[Worker]:
    common = {"MASTER_ADDR": own_address(), "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(TP),
              "OMP_NUM_THREADS": "1"}
    context = str(_context(cluster, cfg))
    return [cluster.worker("elastic_rl.bench.dcs.stall_rank", context,
                           env={**common, "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(TP)]


def _first_publish(cluster: Cluster, ranks: Sequence[Worker]) -> list[int]:
    """Bytes by which each rank grows at most in its first publish, when nothing is kept from an earlier one."""
    peaks = [Peak([r.pid]) for r in ranks]
    for peak in peaks:
        peak.__enter__()
    try:
        _publish(cluster, ranks)
    finally:
        for peak in peaks:
            peak.__exit__()
    return [peak.grown for peak in peaks]


def _publish(cluster: Cluster, ranks: Sequence[Worker]) -> float:
    """Seconds that the slowest rank stood still; returns when the version is committed."""
    answers = _all(ranks, "publish")
    number = max(int(answer["version"]) for answer in answers)

    def committed() -> bool:
        head = reads.head(cluster.etcd, cluster.keys, STREAM)
        return head is not None and head.number >= number

    wait_until(committed, timeout_s=_STEP_S, what=f"the commit of version {number}", poll_s=0.02)
    return _slowest(answers)


def _slowest(answers: Sequence[dict[str, float]]) -> float:
    return max(float(answer["seconds"]) for answer in answers)


def _all(ranks: Sequence[Worker], op: str, **fields: object) -> list[dict[str, float]]:
    for rank in ranks:
        rank.send(op, **fields)
    return [rank.answer(_SETUP_S if op == "setup" else _STEP_S) for rank in ranks]
