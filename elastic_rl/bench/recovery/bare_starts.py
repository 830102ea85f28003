"""Bare starts: seconds from the start of one part alone, by the command that the product starts it with, until it
answers. What is started ends here."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

from elastic_rl.bench.control import testbed as control
from elastic_rl.bench.dcs import testbed as dcs
from elastic_rl.bench.etcd import start_etcd
from elastic_rl.bench.options import Options
from elastic_rl.config import Config


def etcd(options: Options, samples: int) -> list[float]:
    """A member without data, until it is healthy."""
    out = []
    for _ in range(samples):
        with tempfile.TemporaryDirectory(prefix="erl-bench-recovery-") as folder, contextlib.ExitStack() as stack:
            began = time.monotonic()
            start_etcd(Path(folder), stack)
            out.append(time.monotonic() - began)
    return out


def coordinator(options: Options, samples: int) -> list[float]:
    """The only replica beside an etcd of its own, until it is ready."""
    out = []
    with control.Testbed.start(options) as testbed, testbed.replicas() as replicas:
        for number in range(samples):
            began = time.monotonic()
            replicas.start(f"r{number}")
            out.append(time.monotonic() - began)
            replicas.end(f"r{number}")
    return out


def dcs_node(options: Options, samples: int) -> list[float]:
    """A node without data beside an etcd of its own, until it has registered."""
    out = []
    with dcs.Testbed.start(options) as testbed:
        for _ in range(samples):
            with testbed.cluster() as cluster:
                began = time.monotonic()
                cluster.node("node-0", dcs.DCS.arena_bytes)
                out.append(time.monotonic() - began)
    return out


def engine(cfg: Config, model: Path, folder: Path, samples: int) -> list[float]:
    """The server of one engine of a run, until it answers. Raises EngineFailed."""
    from elastic_rl.bench.loop.bare_engines import started  # it imports torch
    one = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"engines": 1})})
    out: list[float] = []
    for number in range(samples):
        logs = folder / str(number)
        logs.mkdir()
        with started(one, model, logs) as (_, seconds):
            out += seconds
    return out
