"""Leader election: one leader, a prompt successor, and no write of the previous one."""

from __future__ import annotations

import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from support import forked
from support.etcd_server import EtcdServers
from support.tcp_link import Links
from support.waiting import wait_until

from elastic_rl.coordinator.election.election import Election
from elastic_rl.errors import Compacted, Fenced
from elastic_rl.etcd.client import Compare, EtcdClient, Op, Watch
from elastic_rl.etcd.keys import ClusterKeys, Keys

TTL_S = 3
Replicas = Callable[[str], subprocess.Popen[bytes]]


@pytest.fixture
def replica(etcd_servers: EtcdServers, keys: Keys, tmp_path: Path) -> Iterator[Replicas]:
    """Starts a replica process by its name."""
    started = []

    def start(name: str) -> subprocess.Popen[bytes]:
        started.append(forked.spawn("support.replica_process", ",".join(etcd_servers.endpoints), keys.job, name,
                                    str(TTL_S), log=tmp_path / f"{name}.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60)


def _leader(etcd: EtcdClient, keys: Keys) -> str:
    current = Election(etcd, ClusterKeys(keys.job), "observer", "", TTL_S).current()
    return current.replica if current else ""


def _wait_leader(etcd: EtcdClient, keys: Keys, name: str, timeout_s: float = 45) -> None:
    wait_until(lambda: _leader(etcd, keys) == name, timeout_s=timeout_s, what=f"the term of {name}", poll_s=0.02)


def _wait_writes(etcd: EtcdClient, keys: Keys, name: str, timeout_s: float = 45) -> None:
    def writes() -> bool:
        kv = etcd.get(keys.job_status())
        return kv is not None and kv.value.startswith(name.encode() + b" ")

    wait_until(writes, timeout_s=timeout_s, what=f"a write of {name}", poll_s=0.02)


def _wait_candidate(etcd: EtcdClient, keys: Keys, name: str) -> None:
    wait_until(lambda: etcd.get(ClusterKeys(keys.job).leader(name)), what=f"candidacy of {name}")


def test_next_candidate_leads_when_the_leader_resigns(etcd: EtcdClient, keys: Keys) -> None:
    a = Election(etcd, ClusterKeys(keys.job), "a", "http://a", 60).start()
    wait_until(lambda: a.is_leader, what="a")
    b = Election(etcd, ClusterKeys(keys.job), "b", "http://b", 60).start()
    try:
        _wait_candidate(etcd, keys, "b")
        assert not b.is_leader
        with pytest.raises(Fenced):
            _ = b.guard
        old = a.guard
        assert etcd.txn(old, [Op.put(keys.root + "x", b"a")]).succeeded
        a.resign()
        assert not a.is_leader
        wait_until(lambda: b.is_leader, what="b")  # at once, not after the lease
        assert not etcd.txn(old, [Op.put(keys.root + "x", b"late")]).succeeded
        current = b.current()
        assert current is not None and current.replica == "b" and current.url == "http://b"
        _wait_candidate(etcd, keys, "a")  # it campaigns again
        b.stop()
        wait_until(lambda: a.is_leader, what="a again")
        assert not etcd.txn(old, []).succeeded  # its new term does not make the old token valid
    finally:
        a.stop()
        b.stop()
    assert not etcd.range(ClusterKeys(keys.job).leader_prefix())[0]


def test_leader_with_a_revoked_lease_stops_leading_and_campaigns_again(etcd: EtcdClient, keys: Keys) -> None:
    a = Election(etcd, ClusterKeys(keys.job), "a", "", TTL_S).start()
    try:
        wait_until(lambda: a.is_leader, what="a")
        old, mine = a.guard, etcd.get(ClusterKeys(keys.job).leader("a"))
        assert mine is not None
        etcd.revoke(mine.lease)
        assert not etcd.txn(old, []).succeeded
        wait_until(lambda: a.is_leader and a.guard != old, what="a second term")
    finally:
        a.stop()


def test_killed_and_stopped_leaders_are_succeeded_within_the_ttl_and_write_nothing_more(
        etcd: EtcdClient, keys: Keys, replica: Replicas) -> None:
    first = replica("one")
    _wait_writes(etcd, keys, "one")
    second = replica("two")
    _wait_candidate(etcd, keys, "two")
    candidate = etcd.get(ClusterKeys(keys.job).leader("one"))
    assert candidate is not None
    old_guard = Compare.create(ClusterKeys(keys.job).leader("one"), "==", candidate.create_revision)
    assert etcd.txn([old_guard], [Op.put(keys.root + "x", b"in time")]).succeeded

    first.kill()
    assert first.wait(60) == -signal.SIGKILL
    replica("one")  # its old key has not expired yet
    _wait_leader(etcd, keys, "two", timeout_s=TTL_S + 60)
    assert not etcd.txn([old_guard], [Op.put(keys.root + "x", b"late")]).succeeded
    _wait_writes(etcd, keys, "two")
    _wait_candidate(etcd, keys, "one")
    again = etcd.get(ClusterKeys(keys.job).leader("one"))
    assert again is not None and again.create_revision > candidate.create_revision

    with etcd.watch(keys.job_status(), start_revision=etcd.revision() + 1) as watch:
        second.send_signal(signal.SIGSTOP)
        wait_until(lambda: psutil.Process(second.pid).status() == psutil.STATUS_STOPPED, what="SIGSTOP")
        _wait_writes(etcd, keys, "one")
        second.send_signal(signal.SIGCONT)
        _wait_candidate(etcd, keys, "two")  # it runs again and waits
        revision = etcd.revision()
        writers = []
        while (event := watch.get(30)) is not None and event.kv.mod_revision <= revision:
            writers.append(event.kv.value.split()[0])
    assert writers[-1] == b"one" and b"two" not in writers[writers.index(b"one"):]


class WatchCounter(EtcdClient):
    """A client that counts the watches it opens, by prefix."""

    def __init__(self, endpoint: str) -> None:
        super().__init__([endpoint], retry_budget_s=30.0)
        self.opened = Counter[str]()

    def watch(self, prefix: str, *, start_revision: int) -> Watch:
        self.opened[prefix] += 1
        return super().watch(prefix, start_revision=start_revision)


def test_leader_keeps_its_term_when_its_watch_meets_a_compaction(etcd_servers: EtcdServers, etcd: EtcdClient,
                                                                 keys: Keys) -> None:
    """An interrupted watch resumes from where it was, and those revisions may have been compacted meanwhile."""
    port = int(etcd_servers.endpoints[0].rpartition(":")[2])
    with Links() as links:
        link = links.add(port, 1e9)
        with WatchCounter(f"127.0.0.1:{link.port}") as far:
            election = Election(far, ClusterKeys(keys.job), "a", "", 60).start()
            try:
                wait_until(lambda: election.is_leader, what="the leader")
                token = election.guard
                for interruption in (1, 2):
                    wait_until(lambda n=interruption: far.opened[ClusterKeys(keys.job).leader_prefix()] == n,
                               what="the election's watch")
                    with far.watch(keys.root + "witness", start_revision=etcd.range(keys.root)[1] + 1) as witness:
                        assert witness.get(0.2) is None
                        etcd.compact(max(etcd.put("/elastic_rl/elsewhere", b"") for _ in range(3)))
                        link.cut()
                        with pytest.raises(Compacted):
                            while True:
                                witness.get(30)
                    wait_until(lambda n=interruption: far.opened[ClusterKeys(keys.job).leader_prefix()] == n + 1,
                               what="the election's next watch")
                    assert election.guard == token, "the term is another one"
                    assert far.txn(token, [Op.put(keys.root + "led", b"")]).succeeded
            finally:
                election.stop()
