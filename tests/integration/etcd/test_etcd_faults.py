"""The etcd client under faults of the cluster and the network: no quorum, a frozen disk, lost and late answers."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from support.etcd_server import EtcdServers
from support.tcp_link import Link, Links
from support.waiting import wait_until

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.keys import Keys


# -- no quorum ---------------------------------------------------------------------------------------------------------
def test_calls_without_quorum_end_in_their_budget_and_resume_with_it(etcd3_cluster: EtcdServers, keys: Keys) -> None:
    servers, key = etcd3_cluster, keys.root + "n"
    with EtcdClient(servers.endpoints, retry_budget_s=1.0) as etcd, \
            EtcdClient(servers.endpoints, retry_budget_s=30.0) as patient, ThreadPoolExecutor(1) as background, \
            etcd.keepalive(2) as short, etcd.keepalive(60) as long:
        etcd.put(keys.root + "short", b"", lease=short.id)
        etcd.put(keys.root + "long", b"", lease=long.id)
        revision = etcd.put(key, b"0")
        with etcd.watch(key, start_revision=revision + 1) as watch:
            victims = [servers.leader(), (servers.leader() + 1) % 3]
            servers.kill(victims[0])
            servers.stop(victims[1])
            assert servers.processes[victims[0]].returncode == -9
            for call in (lambda: etcd.get(key), lambda: etcd.put(key, b"maybe"), lambda: etcd.grant(5)):
                with pytest.raises(EtcdUnavailable):
                    call()
            waiting = background.submit(patient.put, keys.root + "patient", b"")
            assert short.lost.wait(30) and not short.alive
            assert long.alive
            servers.cont(victims[1])
            servers.restart(victims[0])
            assert waiting.result(timeout=30) > revision  # within its budget
            patient.put(key, b"after")
            seen: list[bytes] = []
            while not seen or seen[-1] != b"after":
                event = watch.get(15)
                assert event is not None
                seen.append(event.kv.value)
            assert seen in ([b"after"], [b"maybe", b"after"])  # the write whose answer was lost, if it happened
        assert etcd.get(keys.root + "long") is not None and long.alive and not long.lost.is_set()
        patients = etcd.get(keys.root + "patient")
        assert patients is not None and patients.version == 1
        wait_until(lambda: etcd.get(keys.root + "short") is None, what="the end of the short lease")


# -- lost answers and late copies --------------------------------------------------------------------------------------
@pytest.fixture
def link(etcd_servers: EtcdServers) -> Iterator[Link]:
    """A link to etcd that can lose etcd's answers."""
    with Links() as links:
        yield links.add(int(etcd_servers.endpoints[0].rpartition(":")[2]), 1e9)


@pytest.mark.parametrize("breaks", [True, False], ids=["the connection breaks", "the answer never comes"])
def test_write_with_a_lost_answer_is_known_to_be_applied(etcd: EtcdClient, link: Link, keys: Keys,
                                                                breaks: bool) -> None:
    key = keys.root + "x"
    with EtcdClient([f"127.0.0.1:{link.port}"], call_timeout_s=0.5, retry_budget_s=30.0) as far, \
            ThreadPoolExecutor(1) as background:
        far.put(keys.root + "warm", b"")
        link.pause()
        sent = link.received.nbytes
        write = background.submit(far.txn, [Compare.absent(key)], [Op.put(key, b"once"), Op.get(keys.root + "warm")],
                                  [Op.get(key)])
        wait_until(lambda: etcd.get(key), what="the write's effect")
        wait_until(lambda: link.held, what="its answer, which is held back")
        assert not write.done()
        if breaks:
            link.cut()
        else:
            wait_until(lambda: link.received.nbytes > sent + 1000, what="further attempts")
        link.resume()
        done = write.result(timeout=30)
        assert done.succeeded and done.get(keys.root + "warm") is not None
        kv = etcd.get(key)
        assert kv is not None and (kv.version, kv.value, kv.mod_revision) == (1, b"once", done.revision)


def test_refused_write_does_not_apply_when_a_stopped_member_resumes(etcd3_cluster: EtcdServers, keys: Keys) -> None:
    """A stopped member holds the first copies; another refuses; then the reason for the refusal is removed."""
    servers, n = etcd3_cluster, 16
    victim = (servers.leader() + 1) % 3
    with ExitStack() as cleanup, ThreadPoolExecutor(n) as background:
        near = cleanup.enter_context(servers.connect_at((victim + 1) % 3))
        stores = [cleanup.enter_context(servers.connect_at(victim, call_timeout_s=0.5)) for _ in range(n)]
        for i, etcd in enumerate(stores):
            etcd.put(f"{keys.root}warm/{i}", b"")
            near.put(f"{keys.root}busy/{i}", b"")
        servers.stop(victim)
        said = background.map(lambda i: stores[i].txn([Compare.absent(f"{keys.root}busy/{i}")],
                                                      [Op.put(f"{keys.root}x/{i}", b"")]).succeeded, range(n))
        assert not any(said) and all(etcd.endpoint != servers.endpoints[victim] for etcd in stores)
        near.delete_prefix(keys.root + "busy/")
        servers.cont(victim)
        wait_until(lambda: all(not s.error for s in near.statuses()), what="the member's return")
        at_victim = cleanup.enter_context(servers.connect_at(victim))
        at_victim.put(keys.root + "after", b"")  # it serves again
        assert near.range(keys.root + "x/")[0] == []


# -- a frozen disk -----------------------------------------------------------------------------------------------------
@contextmanager
def freezable(folder: Path, image: Path) -> Iterator[Path]:
    """A separate file system, which ``fsfreeze`` can freeze. Skips the test where none can be mounted."""
    folder.mkdir(parents=True)
    image.touch()
    os.truncate(image, 400 << 20)
    for command in (["mkfs.ext4", "-q", image], ["mount", "-o", "loop", image, folder]):
        if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("no file system can be mounted from a file here (needs root, CAP_SYS_ADMIN and loop devices)")
    try:
        yield folder
    finally:
        thaw(folder)
        subprocess.run(["umount", "--lazy", folder], check=True)


def thaw(folder: Path) -> None:
    """Thaws a frozen file system, whose writers cannot even be killed before. One that is not frozen is fine."""
    subprocess.run(["fsfreeze", "--unfreeze", folder], capture_output=True)


def _hangs_on_disk(pid: int) -> bool:
    """Whether a thread of the process is in uninterruptible sleep."""
    stats = Path(f"/proc/{pid}/task").glob("*/stat")
    return any(stat.read_text().rpartition(")")[2].split()[0] == "D" for stat in stats)


def test_client_leaves_a_leading_member_with_a_frozen_disk(tmp_path: Path, keys: Keys) -> None:
    """Its process runs and its sockets are open; only its disk is frozen."""
    servers = EtcdServers(tmp_path / "etcd", 3)
    with ExitStack() as cleanup:
        disks = [cleanup.enter_context(freezable(servers.data(i), tmp_path / f"{i}.img")) for i in range(3)]
        for disk in disks:
            (disk / "lost+found").rmdir()  # etcd wants a folder of its own
        cleanup.callback(servers.close)
        servers.start()
        victim = servers.leader()
        cleanup.callback(thaw, disks[victim])
        with EtcdClient(servers.endpoints) as etcd, etcd.watch(keys.root, start_revision=1) as watch:
            etcd.put(keys.root + "n", b"before")
            subprocess.run(["fsfreeze", "--freeze", disks[victim]], check=True)
            pid = servers.processes[victim].pid
            for n in range(10):
                etcd.put(keys.root + "n", str(n).encode())
            wait_until(lambda: _hangs_on_disk(pid), what="a thread of the member that hangs on its disk")
            assert servers.processes[victim].poll() is None
            assert servers.leader(besides=victim) != victim
            thaw(disks[victim])
            wait_until(lambda: all(not s.error for s in etcd.statuses()), what="the member's return")
            etcd.put(keys.root + "n", b"after")
            seen = []
            while not seen or seen[-1] != b"after":
                event = watch.get(30)
                assert event is not None
                seen.append(event.kv.value)
            assert seen == [b"before", *(str(n).encode() for n in range(10)), b"after"]
            kv = etcd.get(keys.root + "n")
            assert kv is not None and kv.version == 12


# -- members that come and go ------------------------------------------------------------------------------------------
def test_client_of_an_own_etcd_follows_its_members(etcd3_cluster: EtcdServers, keys: Keys) -> None:
    servers = etcd3_cluster
    with EtcdClient(servers.endpoints[:1], follow_members_s=30.0) as etcd, \
            EtcdClient(servers.endpoints[:1], retry_budget_s=0.5) as other, etcd.keepalive(10) as lease:
        etcd.put(keys.root + "leased", b"", lease=lease.id)
        assert {member.name for member in etcd.members()} == {"m0", "m1", "m2"} and other.members()
        assert set(etcd.endpoints) == set(servers.endpoints) and other.endpoints == servers.endpoints[:1]
        with etcd.watch(keys.root, start_revision=etcd.revision() + 1) as watch:
            servers.kill(0)
            etcd.put(keys.root + "n", b"")
            event = watch.get(15)
            assert event is not None and event.kv.key == keys.root + "n"
            with pytest.raises(EtcdUnavailable):
                other.get(keys.root + "n")
        servers.restart(0)
        assert lease.alive
