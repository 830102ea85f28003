"""list-10k-*: how long a page, and a whole listing, takes in a job of ten thousand versions and ten thousand events.

A listing begins with the newest. etcd can return the newest of a range itself, but sorts the whole range for it: that
is the alternative. The limit is a range that begins at the first record of the page, whose key is known.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from statistics import median

import httpx

from elastic_rl.bench.control import large_job
from elastic_rl.bench.control.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.timing import seconds

_PAGE, _LARGE_PAGE = 100, 1000
_SETTLE_S = 2.0


def measure(testbed: Testbed) -> Iterator[Row]:
    samples = 10 if testbed.options.quick else 50
    with testbed.replicas("a", **large_job.SETTINGS) as replicas:
        large_job.write_history(testbed.etcd, replicas.keys)
        time.sleep(_SETTLE_S)
        prefixes = {"versions": replicas.keys.versions_prefix(large_job.STREAM),
                    "events": replicas.keys.events_prefix()}
        etcd = testbed.etcd
        with replicas.client("a", timeout=60.0) as client:
            for what, prefix in prefixes.items():
                path = f"{replicas.path}/{what}"
                keys = [kv.key for kv in etcd.range(prefix)[0]]
                page = seconds(partial(_page, client, path), samples)
                bare = seconds(partial(etcd.page, prefix, limit=_PAGE, after=keys[-_PAGE - 1]), samples)
                newest = seconds(partial(etcd.range, prefix, limit=_PAGE, newest_first=True), samples)
                yield Row.of(f"list-10k-{what}", f"the newest {_PAGE} of {len(keys):,} {what}", [t * 1e3 for t in page],
                             "ms", limit=median(bare) * 1e3,
                             alternatives={"etcd's own newest-first range": median(newest) * 1e3})
                whole = seconds(partial(_walk, client, path), 3)
                everything = seconds(partial(etcd.range, prefix), 3)
                yield Row.of(f"list-10k-{what}-all", f"… all of them, in pages of {_LARGE_PAGE}", whole, "s",
                             limit=median(everything))


def _page(client: httpx.Client, path: str) -> None:
    client.get(f"{path}?limit={_PAGE}").raise_for_status()


def _walk(client: httpx.Client, path: str) -> None:
    """Every page. Raises RuntimeError unless all records came."""
    seen, after = 0, ""
    while True:
        page = client.get(path, params={"limit": _LARGE_PAGE, **({"after": after} if after else {})})
        body = page.raise_for_status().json()
        seen, after = seen + len(body["items"]), body["next"]
        if not after:
            break
    if seen < large_job.VERSIONS:
        raise RuntimeError(f"only {seen} of {large_job.VERSIONS} of {path} came")
