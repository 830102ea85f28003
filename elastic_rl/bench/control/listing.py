"""list-10k: how long a listing takes in a job of ten thousand versions and ten thousand events."""

from __future__ import annotations

import time
from functools import partial

import httpx

from elastic_rl.bench.control.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import seconds
from elastic_rl.etcd import events
from elastic_rl.etcd.client import Op
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Version, VersionState

COUNT = 10_000
_BATCH = 100


def measure(testbed: Testbed) -> list[Row]:
    samples = 10 if testbed.options.quick else 50
    rows = []
    with testbed.replicas("a", coordinator={"max_events": COUNT + 1000}) as replicas:
        _fill(testbed, replicas.keys)
        ranges = {"versions": replicas.keys.versions_prefix("policy"), "events": replicas.keys.events_prefix()}
        with replicas.client("a", timeout=60.0) as client:
            pages: list[float] = []
            for what, prefix in ranges.items():
                page = seconds(partial(_page, client, what), samples)
                bare = seconds(partial(testbed.etcd.range, prefix, limit=100, newest_first=True), samples)
                whole = seconds(partial(_walk, client, what), 3)
                everything = seconds(partial(testbed.etcd.range, prefix), 3)
                pages += page
                rows += [Row.of(f"list-10k-{what}", f"a page of 100 of {COUNT:,} {what}", [t * 1e3 for t in page], "ms",
                                limit=sorted(bare)[len(bare) // 2] * 1e3),
                         Row.of(f"list-10k-{what}-all", f"… all {COUNT:,}, page by page", whole, "s",
                                limit=sorted(everything)[len(everything) // 2])]
    return [Row.of("list-10k", f"a page of 100 of {COUNT:,} versions or events", [t * 1e3 for t in pages], "ms",
                   goal=50.0), *rows]


def _page(client: httpx.Client, what: str) -> None:
    client.get(f"/v1/{what}?limit=100").raise_for_status()


def _walk(client: httpx.Client, what: str) -> None:
    """Every page. Raises RuntimeError unless all came."""
    seen, after = 0, ""
    while True:
        page = client.get(f"/v1/{what}", params={"limit": 1000, **({"after": after} if after else {})})
        body = page.raise_for_status().json()
        seen, after = seen + len(body["items"]), body["next"]
        if not after:
            break
    if seen < COUNT:
        raise RuntimeError(f"{seen} of {COUNT} {what} came")


def _fill(testbed: Testbed, keys: Keys) -> None:
    now = time.time()
    testbed.etcd.put(keys.stream_next("policy"), str(COUNT + 1).encode())  # as the catalog leaves it
    for start in range(0, COUNT, _BATCH):
        numbers = range(start + 1, start + _BATCH + 1)
        testbed.etcd.txn([], [Op.put(keys.version("policy", n), Version(
            stream="policy", number=n, state=VersionState.COMMITTED, epoch=1, manifest=f"{n:032x}", nbytes=1 << 30,
            sources=["node-0"], created_at=now + n, committed_at=now + n, meta={"step": n}).encode()) for n in numbers])
        testbed.etcd.txn([], [events.put_op(keys, events.build(
            "version.committed", "policy", f"version {n} is committed", at=now - COUNT + n)) for n in numbers])
