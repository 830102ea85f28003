"""The etcd client against real members, also while they are killed and stopped."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import psutil
import pytest
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl.errors import Compacted, EtcdRefused, EtcdUnavailable, Fenced, LeaseLost
from elastic_rl.etcd import event_kinds, events, fencing
from elastic_rl.etcd import watch as watch_module
from elastic_rl.etcd.client import Compare, EtcdClient, Op, Watch
from elastic_rl.etcd.keys import Keys
from elastic_rl.net.addresses import free_port
from elastic_rl.trainer.group.refused_commands import RefusedCommands


def test_put_get_range_and_delete(etcd: EtcdClient, keys: Keys) -> None:
    revision = etcd.put(keys.root + "a", b"1")
    kv = etcd.get(keys.root + "a")
    assert kv is not None and (kv.value, kv.version) == (b"1", 1)
    assert kv.mod_revision == kv.create_revision == revision
    etcd.put(keys.root + "b", b"2")
    kvs, at = etcd.range(keys.root)
    assert [k.key for k in kvs] == [keys.root + "a", keys.root + "b"] and at > revision
    assert [k.value for k in etcd.range(keys.root, newest_first=True, limit=1)[0]] == [b"2"]
    assert etcd.delete(keys.root + "a") and not etcd.delete(keys.root + "a")
    assert etcd.get(keys.root + "a") is None
    assert etcd.delete_prefix(keys.root) == 1


def test_transaction_runs_only_while_its_comparison_holds(etcd: EtcdClient, keys: Keys) -> None:
    key = keys.root + "x"
    made = etcd.txn([Compare.absent(key)], [Op.put(key, b"first")])
    again = etcd.txn([Compare.absent(key)], [Op.put(key, b"second")], [Op.get(key)])
    assert made.succeeded and not again.succeeded
    assert again.kvs[0].value == b"first" and again.kvs[0].mod_revision == made.revision
    assert etcd.txn([Compare.mod(key, "==", made.revision)], [Op.put(key, b"third")]).succeeded
    assert not etcd.txn([Compare.mod(key, "==", made.revision)], [Op.put(key, b"late")]).succeeded


def test_concurrent_updates_are_all_applied(etcd: EtcdClient, keys: Keys) -> None:
    def work() -> None:
        for _ in range(20):
            etcd.update(keys.root + "n", lambda old: str(int(old or b"0") + 1).encode())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(30)
    kv = etcd.get(keys.root + "n")
    assert kv is not None and kv.value == b"80" and kv.version == 80


def test_update_deletes_and_is_fenced_by_its_guards(etcd: EtcdClient, keys: Keys) -> None:
    key = keys.root + "n"
    etcd.put(key, b"1")
    with pytest.raises(Fenced):
        etcd.update(key, lambda old: b"2", guards=[Compare.exists(keys.root + "token")])
    assert etcd.update(key, lambda old: None, guards=[Compare.absent(keys.root + "token")]) is None
    assert etcd.get(key) is None


def test_write_of_an_old_epoch_is_refused(etcd: EtcdClient, keys: Keys) -> None:
    assert fencing.current_epoch(etcd, keys) == 0
    old = fencing.raise_epoch(etcd, keys, "first driver")
    guard = fencing.epoch_guard(keys, old.number)
    assert old.number == 1 and etcd.txn([guard], [Op.put(keys.root + "x", b"1")]).succeeded
    assert fencing.raise_epoch(etcd, keys, "second driver").number == fencing.current_epoch(etcd, keys) == 2
    assert not etcd.txn([guard], [Op.put(keys.root + "x", b"2")]).succeeded
    with pytest.raises(Fenced, match="epoch 1 .* is over"):
        fencing.require_epoch(etcd, keys, old.number)


def test_concurrent_drivers_get_different_epochs(etcd: EtcdClient, keys: Keys) -> None:
    got: list[int] = []
    threads = [threading.Thread(target=lambda: got.append(fencing.raise_epoch(etcd, keys, "d").number))
               for _ in range(6)]
    for t in threads:
        t.start()
    for t in threads:
        t.join(20)
    assert sorted(got) == [1, 2, 3, 4, 5, 6]


def test_recent_events_are_ordered_oldest_first(etcd: EtcdClient, keys: Keys) -> None:
    for i in range(5):
        events.emit(etcd, keys, event_kinds.POOL_SCALED, "rollout", f"event {i}", n=i)
        time.sleep(0.002)  # ids have the milliseconds' resolution
    assert [e.data["n"] for e in events.recent(etcd, keys, limit=3)] == [2, 3, 4]


@pytest.mark.parametrize("odd", [b"{}", b"null", b"[", b'{"id":"1","at":"a","kind":"k","subject":"s","message":"m"}'])
def test_event_that_cannot_be_read_hides_no_other_and_stops_no_agent(etcd: EtcdClient, keys: Keys, odd: bytes) -> None:
    etcd.put(keys.event("0"), odd)
    refused = RefusedCommands(etcd, keys, "trainer")
    assert not refused.take()
    written = events.emit(etcd, keys, event_kinds.TRAINER_GROUP_EVENTS["trainer"].refused, "trainer", "no memory")
    etcd.put(keys.event("999999999999999-odd"), odd)
    assert events.recent(etcd, keys) == [written]
    assert refused.take() and not refused.take()


# -- leases ------------------------------------------------------------------------------------------------------------
def test_key_expires_with_its_lease_unless_kept_alive(etcd: EtcdClient, keys: Keys) -> None:
    with etcd.keepalive(20) as kept:
        etcd.put(keys.root + "kept", b"", lease=kept.id)
        left = etcd.grant(2)
        etcd.put(keys.root + "left", b"", lease=left)
        assert etcd.lease_left(left) <= 2
        wait_until(lambda: etcd.get(keys.root + "left") is None, what="the end of the lease")
        assert etcd.lease_left(left) == 0
        assert etcd.get(keys.root + "kept") is not None and kept.alive and not kept.lost.is_set()
    assert etcd.get(keys.root + "kept") is None


def test_revoked_lease_is_noticed_and_its_puts_are_refused(etcd: EtcdClient, keys: Keys) -> None:
    with etcd.keepalive(2) as kept:
        etcd.revoke(kept.id)
        assert kept.lost.wait(30)
        with pytest.raises(LeaseLost):
            etcd.put(keys.root + "x", b"", lease=kept.id)


def test_lease_counts_as_lost_when_etcd_is_silent_for_its_ttl(etcd3_cluster: EtcdServers) -> None:
    with EtcdClient(etcd3_cluster.endpoints) as etcd, etcd.keepalive(3) as kept:
        for i in range(3):
            etcd3_cluster.stop(i)
        assert all(psutil.Process(p.pid).status() == psutil.STATUS_STOPPED for p in etcd3_cluster.processes)
        assert kept.lost.wait(15)
        assert not kept.alive
        for i in range(3):
            etcd3_cluster.cont(i)


# -- faults and bad input ----------------------------------------------------------------------------------------------
def test_call_without_etcd_ends_and_names_the_endpoints() -> None:
    nowhere = f"127.0.0.1:{free_port()}"
    with EtcdClient([nowhere], retry_budget_s=1.0) as etcd, pytest.raises(EtcdUnavailable, match=nowhere):
        etcd.get("x")


def test_too_large_value_is_refused_with_a_hint(etcd: EtcdClient, keys: Keys) -> None:
    with pytest.raises(EtcdRefused, match="too large.*checkpoint service"):
        etcd.put(keys.root + "x", b"x" * 2_000_000)


# -- watches -----------------------------------------------------------------------------------------------------------
def test_watch_delivers_puts_and_deletes_in_order(etcd: EtcdClient, keys: Keys) -> None:
    _, revision = etcd.range(keys.root)
    with etcd.watch(keys.root, start_revision=revision + 1) as watch:
        etcd.put(keys.root + "a", b"1")
        etcd.put(keys.root + "a", b"2")
        etcd.delete(keys.root + "a")
        seen = [watch.get(30) for _ in range(3)]
        assert [(e.type, e.kv.value) for e in seen if e] == [("put", b"1"), ("put", b"2"), ("delete", b"")]
        assert watch.get(0.05) is None


def test_closed_watch_ends_its_iteration(etcd: EtcdClient, keys: Keys) -> None:
    watch = etcd.watch(keys.root, start_revision=etcd.put(keys.root + "a", b"1"))
    seen: list[str] = []
    reader = threading.Thread(target=lambda: seen.extend(e.kv.key for e in watch))
    reader.start()
    wait_until(lambda: seen, what="the first event")
    watch.close()
    reader.join(60)
    assert not reader.is_alive() and seen == [keys.root + "a"]


def test_closed_watch_ends_while_etcd_is_silent(etcd: EtcdClient, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module.StreamLife, "due_s", lambda life, now: 3600.0)
    watch = etcd.watch(keys.root, start_revision=etcd.put(keys.root + "a", b"1"))
    assert watch.get(30) is not None
    watch.close()
    assert not watch._thread.is_alive(), "it waits for an answer that does not come"


def test_watch_from_compacted_revisions_raises(etcd: EtcdClient, keys: Keys) -> None:
    first = etcd.put(keys.root + "a", b"1")
    last = max(etcd.put(keys.root + "a", b"2") for _ in range(3))
    etcd.compact(last)
    with etcd.watch(keys.root, start_revision=first) as watch:
        for _ in range(2):  # for good, not once
            with pytest.raises(Compacted):
                watch.get(30)


# -- failing members ---------------------------------------------------------------------------------------------------
def _on(member: str, endpoints: list[str]) -> EtcdClient:
    """A client that starts with the given member, so that the fault hits it."""
    while True:
        etcd = EtcdClient(endpoints)
        if etcd.endpoint == member:
            return etcd
        etcd.close()


class Traffic:
    """Counts one key up by plain puts, from a thread, as fast as possible."""

    def __init__(self, etcd: EtcdClient, key: str) -> None:
        self.etcd, self.key, self.sent, self.longest_s = etcd, key, 0, 0.0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._done.wait(0.005):
            began = time.monotonic()
            self.etcd.put(self.key, str(self.sent).encode())
            self.sent, self.longest_s = self.sent + 1, max(self.longest_s, time.monotonic() - began)

    def finish(self) -> int:
        self._done.set()
        self._thread.join(20)
        assert not self._thread.is_alive()
        return self.sent


def _values(watch: Watch, until: bytes) -> list[bytes]:
    out: list[bytes] = []
    while not out or out[-1] != until:
        event = watch.get(30)
        assert event is not None, f"nothing after {out[-1:]}; wanted {until!r}"
        out.append(event.kv.value)
    return out


def _survives(servers: EtcdServers, keys: Keys, fault: Callable[[int], None], witness: Callable[[int], bool]) -> None:
    """While the leading member fails under load, no write is lost or doubled, and the watch misses nothing."""
    victim = servers.leader()
    with _on(servers.endpoints[victim], servers.endpoints) as etcd:
        revision = etcd.put(keys.root + "warm", b"")
        with etcd.watch(keys.root + "n", start_revision=revision + 1) as watch:
            traffic = Traffic(etcd, keys.root + "n")
            wait_until(lambda: traffic.sent > 20, what="traffic")
            fault(victim)
            assert witness(victim)
            at_fault = traffic.sent
            wait_until(lambda: traffic.sent > at_fault + 50, what="traffic after the fault")
            sent = traffic.finish()
            assert etcd.endpoint != servers.endpoints[victim]
            assert _values(watch, str(sent - 1).encode()) == [str(i).encode() for i in range(sent)]
        kv = etcd.get(keys.root + "n")
        assert kv is not None and kv.version == sent  # the version counts puts: each one exactly once
        assert traffic.longest_s < 6


def test_writes_and_watches_survive_kill_of_the_leading_member(etcd3_cluster: EtcdServers, keys: Keys) -> None:
    _survives(etcd3_cluster, keys, etcd3_cluster.kill,
              lambda i: etcd3_cluster.processes[i].returncode == -9)


def test_writes_and_watches_survive_stop_of_the_leading_member(etcd3_cluster: EtcdServers, keys: Keys) -> None:
    def is_stopped(i: int) -> bool:
        return bool(wait_until(lambda: psutil.Process(etcd3_cluster.processes[i].pid).status()
                               == psutil.STATUS_STOPPED, what="SIGSTOP"))

    _survives(etcd3_cluster, keys, etcd3_cluster.stop, is_stopped)
    victim = next(p for p in etcd3_cluster.processes if psutil.Process(p.pid).status() == psutil.STATUS_STOPPED)
    with EtcdClient(etcd3_cluster.endpoints) as etcd:
        before = etcd.get(keys.root + "n")
        etcd3_cluster.cont(etcd3_cluster.processes.index(victim))
        wait_until(lambda: all(not s.error for s in etcd.statuses()), what="the member's return")
        assert etcd.get(keys.root + "n") == before  # requests of ours that it still held changed nothing
