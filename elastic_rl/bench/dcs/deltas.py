"""P5: what a delta saves, and what it costs, for several fractions of changed elements.

bf16 weights change by one unit in the last place here and there, as small learning rates change them. Sizes are
compared with the plain ways to write the same change down. Speeds are of the dense bytes, on one core.
"""

from __future__ import annotations

import os
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from elastic_rl.bench.dcs.testbed import DCS, Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.dcs.codecs import delta

GOAL_FRACTION = 0.02
FRACTIONS = (GOAL_FRACTION, 0.005, 0.05, 0.20)
GOAL_FEWER, GOAL_ENCODE_GBPS = 20.0, 1.0
_MOST_BYTES = 256 << 20
"""Every chunk is coded alone, so more of them would only take longer."""
_ZLIB_BYTES = 8 << 20

Words = npt.NDArray[np.uint16]


@dataclass
class Coded:
    """Measurements of one fraction of changed elements, over all chunks."""

    dense: int = 0
    coded: int = 0
    encode_s: list[float] = field(default_factory=list)
    decode_s: list[float] = field(default_factory=list)
    plain: dict[str, float] = field(default_factory=dict)
    """Dense bytes over those of other ways to write the change down."""
    exact: bool = True


def measure(testbed: Testbed) -> Iterator[Row]:
    base = weights(min(testbed.nbytes, _MOST_BYTES) // 2)
    for fraction in FRACTIONS:
        with one_core():
            coded = code(base, changed(base, fraction), testbed.samples)
        yield from rows(fraction, coded)


def rows(fraction: float, c: Coded) -> Iterator[Row]:
    """Pure."""
    main = fraction == GOAL_FRACTION
    end = "" if main else f"-{fraction * 100:g}"
    text = f" at {fraction:.1%} changed"
    if not c.exact:
        for row in ("P5-bytes", "P5-encode", "P5-decode"):
            yield Row.unmeasured(row + end, f"delta{text}", "what was decoded is not what was encoded")
        return
    yield Row(id="P5-bytes" + end, name=f"delta: fewer bytes than dense{text}", value=c.dense / c.coded, unit="×",
              samples=1, goal=GOAL_FEWER if main else None, op=">=", alternatives=c.plain)
    yield Row.of("P5-encode" + end, f"delta: encode{text}", [c.dense / t / 1e9 for t in c.encode_s], "GB/s", op=">=",
                 goal=GOAL_ENCODE_GBPS if main else None)
    yield Row.of("P5-decode" + end, f"delta: decode{text}", [c.dense / t / 1e9 for t in c.decode_s], "GB/s", op=">=")


def weights(elements: int) -> Words:
    """bf16 bits of normal weights."""
    values = np.random.default_rng(0).standard_normal(elements, dtype=np.float32) * np.float32(0.02)
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def changed(base: Words, fraction: float) -> Words:
    """A copy with about that fraction of the elements one step up or down."""
    rng = np.random.default_rng(1)
    out = base.copy()
    step = 1 << 20
    for start in range(0, len(base), step):
        part = out[start:start + step]
        draw = rng.random(len(part), dtype=np.float32)
        part[draw < fraction / 2] += 1
        part[(draw >= fraction / 2) & (draw < fraction)] -= 1
    return out


def code(base: Words, new: Words, samples: int) -> Coded:
    """Encodes and decodes chunk by chunk, as nodes do. Times are those of this thread on its core, since neither waits
    for anything."""
    c = Coded()
    old, fresh = base.view(np.uint8).data, new.view(np.uint8).data
    out = memoryview(bytearray(len(old)))
    size = DCS.chunk_bytes
    chunks = [slice(at, min(at + size, len(old))) for at in range(0, len(old), size)]
    for i in range(samples + 1):
        start = time.thread_time()
        coded = [delta.encode(old[s], fresh[s]) for s in chunks]
        encoded = time.thread_time()
        for s, data in zip(chunks, coded, strict=True):
            if data is None:
                out[s] = fresh[s]  # dense was better
            else:
                delta.decode(memoryview(data), old[s], out[s])
        decoded = time.thread_time()
        if i:
            c.encode_s.append(encoded - start)
            c.decode_s.append(decoded - encoded)
        c.exact &= out == fresh
    c.dense = len(fresh)
    c.coded = sum(s.stop - s.start if d is None else len(d) for s, d in zip(chunks, coded, strict=True))
    c.plain = plain_ways(base, new)
    return c


def plain_ways(base: Words, new: Words) -> dict[str, float]:
    """How many fewer bytes than dense the usual ways take: a 32-bit index and a value for each change; a bit for each
    element and a value for each change; zlib over the difference."""
    changes = int(np.count_nonzero(base != new))
    head = slice(0, _ZLIB_BYTES // 2)
    xor = (base[head] ^ new[head]).tobytes()
    dense = 2 * len(new)
    return {"index and value": dense / max(6 * changes, 1), "bitmap and values": dense / (len(new) / 8 + 2 * changes),
            "zlib of the difference": len(xor) / len(zlib.compress(xor, 1))}


@contextmanager
def one_core() -> Iterator[None]:
    """Keeps this thread, and with it what it calls, on one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
