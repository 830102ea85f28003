"""Large ranges: read in pages at one revision, over slow links, and while others write and compact."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import pytest
from support.etcd_server import EtcdServers
from support.tcp_link import Links

from elastic_rl.errors import Compacted
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, Op, Page
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.known_ranges import KnownRanges
from elastic_rl.etcd.records import StepMetrics
from elastic_rl.etcd.transaction import batches
from elastic_rl.pipeline.records.run_log import JobStatusWriter

RECORDS, RECORD_BYTES = 1200, 10_000


def _key(keys: Keys, n: int) -> str:
    return f"{keys.root}large/{n:06d}"


def _fill(etcd: EtcdClient, keys: Keys, records: int = RECORDS, nbytes: int = RECORD_BYTES) -> None:
    for batch in batches([Op.put(_key(keys, n), bytes(nbytes)) for n in range(records)]):
        etcd.txn([], batch)


class Interrupted(EtcdClient):
    """A client that calls ``between`` before each page but the first of a range."""

    between: Callable[[], None] = staticmethod(lambda: None)

    def page(self, prefix: str, *, limit: int, after: str = "", before: str = "", newest_first: bool = False,
             revision: int = 0) -> Page:
        if revision:
            self.between()
        return super().page(prefix, limit=limit, after=after, before=before, newest_first=newest_first,
                            revision=revision)


def test_large_range_arrives_over_a_slow_link(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys) -> None:
    _fill(etcd, keys)
    with Links() as links:
        link = links.add(int(etcd_servers.endpoints[0].rpartition(":")[2]), 10e6)
        with EtcdClient([f"127.0.0.1:{link.port}"], call_timeout_s=0.5, retry_budget_s=15.0) as far:
            before = link.sent.nbytes
            kvs, revision = far.range(keys.root + "large/")
        assert [kv.key for kv in kvs] == [_key(keys, n) for n in range(RECORDS)]
        assert all(len(kv.value) == RECORD_BYTES and kv.mod_revision <= revision for kv in kvs)
        assert link.sent.nbytes - before < 3 * RECORDS * RECORD_BYTES, "pages were asked for again without end"


def test_keys_arrive_without_their_values(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys) -> None:
    _fill(etcd, keys, 1500, 4000)
    with Links() as links:
        link = links.add(int(etcd_servers.endpoints[0].rpartition(":")[2]), 100e6)
        with EtcdClient([f"127.0.0.1:{link.port}"]) as far:
            assert [*far.keys(keys.root + "large/")] == [_key(keys, n) for n in range(1500)]
        assert link.sent.nbytes < 1500 * 400


def test_range_is_read_at_one_revision_while_others_write(etcd_servers: EtcdServers, etcd: EtcdClient,
                                                          keys: Keys) -> None:
    """The first key and the last one, which are on different pages, change together."""
    _fill(etcd, keys, 1100, 100)
    both, counter = [_key(keys, 0), _key(keys, 1099)], itertools.count()

    def write() -> None:
        value = str(next(counter)).encode()
        etcd.txn([], [*(Op.put(key, value) for key in both), Op.put(_key(keys, 2000 + int(value)), b"")])

    write()
    with Interrupted(etcd_servers.endpoints, call_timeout_s=2.0) as reader:
        reader.between = write
        kvs, revision = reader.range(keys.root + "large/")
    found = {kv.key: kv.value for kv in kvs}
    assert next(counter) > 1, "nothing was written between the pages"
    assert found[both[0]] == found[both[1]] == b"0" and max(kv.mod_revision for kv in kvs) <= revision
    assert len(kvs) == 1101, "keys of later revisions are not in it"


def test_range_starts_over_when_a_compaction_overtakes_it(etcd_servers: EtcdServers, etcd: EtcdClient,
                                                          keys: Keys) -> None:
    _fill(etcd, keys, 600, 10)
    compactions = iter(range(2))

    def compact() -> None:
        if next(compactions, None) is not None:
            etcd.compact(max(etcd.put(_key(keys, 9999), b"") for _ in range(2)))

    with Interrupted(etcd_servers.endpoints, call_timeout_s=2.0) as reader:
        reader.between = compact
        kvs, revision = reader.range(keys.root + "large/")
        assert len(kvs) == 601 and max(kv.mod_revision for kv in kvs) <= revision
        assert next(compactions, None) is None, "no page met a compaction"

        reader.between = lambda: etcd.compact(max(etcd.put(_key(keys, 9999), b"") for _ in range(2)))
        with pytest.raises(Compacted):  # a bound: compactions without end are not waited out
            reader.range(keys.root + "large/")


def test_pages_cover_the_range_exactly_once(etcd: EtcdClient, keys: Keys) -> None:
    _fill(etcd, keys, 1200, 4000)
    pages = list(etcd.pages(keys.root + "large/"))
    assert len(pages) > 3 and len({page.revision for page in pages}) == 1
    assert [kv.key for page in pages for kv in page.kvs] == [_key(keys, n) for n in range(1200)]
    assert [page.more for page in pages] == [True] * (len(pages) - 1) + [False]
    part = list(etcd.pages(keys.root + "large/", after=_key(keys, 9), before=_key(keys, 13)))
    assert [kv.key for page in part for kv in page.kvs] == [_key(keys, n) for n in (10, 11, 12)]
    assert [page.kvs for page in etcd.pages(keys.root + "none/")] == [[]]
    assert [*etcd.keys(keys.root + "large/")] == [_key(keys, n) for n in range(1200)]
    assert [*etcd.keys(keys.root + "none/")] == []
    first, _ = etcd.range(keys.root + "large/", limit=650)
    assert [kv.key for kv in first] == [_key(keys, n) for n in range(650)]
    newest, _ = etcd.range(keys.root + "large/", limit=2, newest_first=True)
    assert len(newest) == 2 and newest[0].create_revision >= newest[1].create_revision


def test_pages_shrink_until_one_arrives_in_time(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys) -> None:
    """Few and large records: the first page's size is far off."""
    for n in range(4):
        etcd.put(_key(keys, n), bytes(300_000))
    with Links() as links:
        link = links.add(int(etcd_servers.endpoints[0].rpartition(":")[2]), 1e6)
        with EtcdClient([f"127.0.0.1:{link.port}"], call_timeout_s=0.3, retry_budget_s=30.0) as far:
            kvs, _ = far.range(keys.root + "large/")
    assert len(kvs) == 4 and all(len(kv.value) == 300_000 for kv in kvs)


def test_rewind_of_a_long_run_reads_only_the_metrics_that_it_deletes(etcd_servers: EtcdServers, etcd: EtcdClient,
                                                                     keys: Keys) -> None:
    """As after months of steps: there are far more metrics than a recovery has the time to read."""
    epoch = fencing.raise_epoch(etcd, keys, "test").number
    steps = [StepMetrics(step=n, at=0.0, reward=0.5, seconds={f"phase {i} of a step": 1.5 for i in range(300)})
             for n in range(1, 1201)]
    for batch in batches([Op.put(keys.step_metrics(m.step), m.encode()) for m in steps]):
        etcd.txn([], batch)
    with Links() as links:
        link = links.add(int(etcd_servers.endpoints[0].rpartition(":")[2]), 1e6)
        with EtcdClient([f"127.0.0.1:{link.port}"], call_timeout_s=0.5, retry_budget_s=5.0) as far:
            JobStatusWriter(far, keys, FencedWriter.of_epoch(far, keys, epoch), steps=2000, seed=0).resume("rl", 1190)
    left = [StepMetrics.decode(kv.value).step for kv in etcd.range(keys.steps_prefix())[0]]
    assert left == list(range(1, 1191))


def test_page_over_a_slow_link_has_all_requested_keys(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys) -> None:
    for n in range(8):
        etcd.put(_key(keys, n), bytes(100_000))
    with Links() as links:
        link = links.add(int(etcd_servers.endpoints[0].rpartition(":")[2]), 1e6)
        with EtcdClient([f"127.0.0.1:{link.port}"], call_timeout_s=0.1, retry_budget_s=30.0) as far:
            forward = far.page(keys.root + "large/", limit=5)
            backward = far.page(keys.root + "large/", limit=5, newest_first=True, revision=forward.revision)
    assert [kv.key for kv in forward.kvs] == [_key(keys, n) for n in range(5)] and forward.more
    assert [kv.key for kv in backward.kvs] == [_key(keys, n) for n in range(7, 2, -1)] and backward.more


def test_ranges_of_which_only_changes_are_sent_have_what_etcd_has(etcd: EtcdClient, keys: Keys) -> None:
    large, small, single = f"{keys.root}large/", f"{keys.root}small/", f"{keys.root}single"
    known, rng = KnownRanges(etcd, [large, small], [single]), random.Random(7)
    for _ in range(60):
        for _ in range(rng.randrange(4)):
            key = rng.choice([*(_key(keys, n) for n in range(6)), f"{small}1", f"{small}2", single,
                              f"{keys.root}other"])
            etcd.delete(key) if rng.random() < 0.4 else etcd.put(key, rng.randbytes(4))
        known.read()
        for prefix in (large, small):
            assert list(known.ranges[prefix].values()) == etcd.range(prefix)[0]
        assert known.keys.get(single) == etcd.get(single) and known.revision == etcd.revision()
    before = dict(known.ranges)
    etcd.put(f"{keys.root}other", b"")
    known.read()
    assert all(known.ranges[prefix] is kvs for prefix, kvs in before.items())
