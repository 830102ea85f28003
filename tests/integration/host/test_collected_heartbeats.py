"""Heartbeats of real members, collected by the agent of their host while it works, and written by the members while it
does not."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support import forked
from support.host_agents import Hosts, HostUnderTest
from support.leader import Leader
from support.waiting import wait_until

from elastic_rl.config import parse
from elastic_rl.coordinator.api import pages
from elastic_rl.etcd import events, heartbeat_folder
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.records import HostHeartbeats, Member
from elastic_rl.etcd.witness import HostWitness

TTL_S = 2


@pytest.fixture
def h(host: Hosts) -> Iterator[HostUnderTest]:
    made = host()
    yield made
    for agent in made.agents:
        agent.kill()  # also a stopped one


@pytest.fixture
def member_here(own_etcd: EtcdClient, keys: Keys, h: HostUnderTest) -> Iterator[Callable[..., Membership]]:
    """Makes a member in this process."""
    made: list[Membership] = []

    def make(role: str, member_id: str, **more: Any) -> Membership:
        made.append(Membership(own_etcd, keys, role, member_id, ttl_s=TTL_S, heartbeats=h.heartbeats(keys.job), **more
                               ).start())
        return made[-1]

    yield make
    for member in made:
        member.close()


@pytest.fixture
def counter(own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, tmp_path: Path
            ) -> Iterator[Callable[[str], subprocess.Popen[bytes]]]:
    """Starts a process that is the member advantages/ID, and counts steps."""
    started: list[subprocess.Popen[bytes]] = []

    def start(member_id: str) -> subprocess.Popen[bytes]:
        folder = h.heartbeats(keys.job)
        started.append(forked.spawn("support.member_process", ",".join(own_etcd.endpoints), keys.job, "advantages",
                                    member_id, str(TTL_S), str(folder.path), folder.host,
                                    log=tmp_path / f"{member_id}.log"))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(60)


class Reader:
    """Reads one member again and again, as others do, and sees to it that it never becomes older."""

    def __init__(self, etcd: EtcdClient, keys: Keys, role: str, member_id: str) -> None:
        self._etcd, self._keys, self._role, self._id = etcd, keys, role, member_id
        self._last: Member | None = None

    def member(self) -> Member | None:
        found = next((m for m in members(self._etcd, self._keys, self._role) if m.id == self._id), None)
        if found is not None and self._last is not None and found.incarnation == self._last.incarnation:
            assert (found.beats, found.step) >= (self._last.beats, self._last.step)
        self._last = found or self._last
        return found

    def writes(self) -> int:
        """How often its record was written since it registered; 0 while it is not registered."""
        found = self._etcd.get(self._keys.member(self._role, self._id))
        return found.version if found is not None else 0

    def await_collected(self) -> Member:
        """The member, once its heartbeats are news while its record stays as it is, for longer than its own writes are
        apart."""
        def stays() -> Member | None:
            before, began = self.writes(), wait_until(self.member, what="the member")
            moved = wait_until(lambda: (m := self.member()) and m.beat_at > began.beat_at + 2 * TTL_S and m,
                               what="its heartbeats")
            return moved if before == self.writes() else None
        return wait_until(stays, what="heartbeats that the agent collects")

    def await_own_writes(self) -> None:
        before = self.writes()
        wait_until(lambda: self.member() and self.writes() > before + 1, what="a record that is written again")


def test_members_write_their_heartbeats_themselves_while_no_agent_does(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, counter: Callable[[str], subprocess.Popen[bytes]]) -> None:
    counter("a")
    reader = Reader(own_etcd, keys, "advantages", "a")
    reader.await_own_writes()
    assert not h.heartbeats(keys.job).path.parent.exists(), "nobody has asked for files"
    first = h.start_process()
    reader.await_collected()
    first.send_signal(signal.SIGSTOP)
    reader.await_own_writes()
    first.send_signal(signal.SIGCONT)
    reader.await_collected()
    first.kill()
    first.wait(60)
    reader.await_own_writes()
    wait_until(lambda: reader.member() and own_etcd.get(keys.heartbeats(h.name)) is None, what="the end of its lease")
    h.start_process()
    moved = reader.await_collected()
    (shown,) = json.loads(bytes(pages.members(own_etcd, keys, "advantages", 10, "").body))["items"]
    assert shown["beats"] >= moved.beats and shown["step"] >= moved.step
    found = own_etcd.get(keys.heartbeats(h.name))
    assert found is not None and HostHeartbeats.decode(found.value).beats[0].incarnation == moved.incarnation


def test_change_of_what_only_the_member_knows_is_written_at_once(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership]) -> None:
    member, reader = member_here("trainer", "rank-0"), Reader(own_etcd, keys, "trainer", "rank-0")
    h.start_process()
    reader.await_collected()
    written = reader.writes()
    member.progress(3, "train")
    wait_until(lambda: reader.member().step == 3, what="the step")  # type: ignore[union-attr]
    assert reader.writes() == written
    member.progress(3, "train", ready=True)
    wait_until(lambda: reader.writes() == written + 1, what="its readiness")
    assert reader.member().info == {"ready": True}  # type: ignore[union-attr]


def test_member_whose_file_cannot_be_collected_writes_itself_and_harms_no_other(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership],
        counter: Callable[[str], subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch) -> None:
    counter("other")
    long, full = member_here("engine", "long"), member_here("engine", "full")
    long_reader, full_reader = (Reader(own_etcd, keys, "engine", m) for m in ("long", "full"))
    h.start_process()
    folder = h.heartbeats(keys.job)
    wait_until(lambda: folder.is_collected(long.incarnation) and folder.is_collected(full.incarnation),
               what="the collection")
    (folder.path / f"{'0' * 16}.json").write_bytes(b"{")
    long.progress(1, "p" * heartbeat_folder.MAX_FILE_BYTES)
    wait_until(lambda: not folder.is_collected(long.incarnation), what="a file that is too long")
    assert folder.is_collected(full.incarnation)
    long_reader.await_own_writes()
    Reader(own_etcd, keys, "advantages", "other").await_collected()

    def no_space(*args: object, **more: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(heartbeat_folder, "replace_file", no_space)
    full_reader.await_own_writes()
    monkeypatch.undo()
    written = wait_until(lambda: folder.is_collected(full.incarnation) and full_reader.writes(), what="the collection")
    full.progress(5, "train")
    wait_until(lambda: full_reader.member().step == 5, what="the step")  # type: ignore[union-attr]
    assert full_reader.writes() <= written + 1


def test_collected_member_finds_out_that_its_entry_was_ended_or_replaced(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership]) -> None:
    older, folder = member_here("engine", "e"), h.heartbeats(keys.job)
    h.start_process()
    wait_until(lambda: folder.is_collected(older.incarnation), what="the collection")
    own_etcd.delete(keys.member("engine", "e"))  # as a witness does that has seen the process stopped
    (back,) = wait_until(lambda: members(own_etcd, keys, "engine"), what="its registration")
    assert back.incarnation == older.incarnation
    older.progress(7, "old")
    wait_until(lambda: members(own_etcd, keys, "engine")[0].step == 7, what="the step")
    younger = member_here("engine", "e")
    assert older.replaced.wait(60)
    wait_until(lambda: folder.is_collected(younger.incarnation), what="the younger one's collection")
    (seen,) = members(own_etcd, keys, "engine")
    assert (seen.incarnation, seen.step, seen.phase) == (younger.incarnation, 0, "")
    wait_until(lambda: [f.beat.incarnation for f in folder.contents().files] == [younger.incarnation],
               what="the end of the older one's file")


def test_member_whose_host_has_another_name_for_its_agent_writes_itself(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership]) -> None:
    """As after a change of the machine's name: readers would look for its heartbeats under the name of its record."""
    here = member_here("engine", "here")
    elsewhere = Membership(own_etcd, keys, "engine", "e", ttl_s=TTL_S,
                           heartbeats=replace(h.heartbeats(keys.job), host="renamed"))
    h.start_process()
    with elsewhere.start():
        wait_until(lambda: h.heartbeats(keys.job).is_collected(here.incarnation), what="the collection")
        Reader(own_etcd, keys, "engine", "e").await_own_writes()
        assert not h.heartbeats(keys.job).is_collected(elsewhere.incarnation)


def test_nothing_is_left_of_a_job_that_has_ended(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership]) -> None:
    member, folder = member_here("engine", "e"), h.heartbeats(keys.job)
    h.start_process()
    wait_until(lambda: folder.is_collected(member.incarnation), what="the collection")
    assert own_etcd.count(keys.heartbeats_prefix()) == 1
    member.close()
    wait_until(lambda: own_etcd.count(keys.heartbeats_prefix()) == 0 and not folder.path.exists(), what="the end")


def test_agent_without_the_name_of_its_host_collects_nothing(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership]) -> None:
    member, folder = member_here("engine", "e"), h.heartbeats(keys.job)
    first = h.start_process()
    wait_until(lambda: folder.is_collected(member.incarnation), what="the collection")
    first.send_signal(signal.SIGSTOP)
    own_etcd.put(ClusterKeys().host(h.name), b'{"id": "h1", "incarnation": "of another machine"}')
    before = own_etcd.get(keys.heartbeats(h.name))
    first.send_signal(signal.SIGCONT)
    wait_until(lambda: not folder.is_collected(member.incarnation), what="the end of the mark")
    Reader(own_etcd, keys, "engine", "e").await_own_writes()
    after = own_etcd.get(keys.heartbeats(h.name))
    assert before is not None and (after is None or after.mod_revision == before.mod_revision)


# -- the leader --------------------------------------------------------------------------------------------------------
@pytest.fixture
def leader(own_etcd: EtcdClient, keys: Keys) -> Iterator[Leader]:
    cfg = parse({"job": "x", "coordinator": {"lease_ttl_s": 2, "reconcile_interval_s": 0.1, "suspicion_s": 600.0,
                                             "host_lost_s": 600.0}})
    # Not validated: nothing works here, so no wait of the work bounds these from below.
    made = Leader(own_etcd, keys, cfg.model_copy(update={"coordinator": cfg.coordinator.model_copy(
        update={"hang_min_s": 1.0, "hang_max_s": 2.0, "hang_factor": 2.0})}), "a")
    yield made
    made.close()


def has_event(etcd: EtcdClient, keys: Keys, kind: str, subject: str) -> bool:
    return any((e.kind, e.subject) == (kind, subject) for e in events.recent(etcd, keys, 1000))


def test_leader_finds_a_hang_in_heartbeats_that_are_collected(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership], leader: Leader
        ) -> None:
    rank, reader = member_here("trainer", "rank-0"), Reader(own_etcd, keys, "trainer", "rank-0")
    h.start_process()
    reader.await_collected()
    written = reader.writes()
    rank.progress(1, "train")
    wait_until(lambda: has_event(own_etcd, keys, "trainer.hung", "rank-0"), what="the hang")
    rank.progress(1, "idle")
    wait_until(lambda: has_event(own_etcd, keys, "trainer.resumed", "rank-0"), what="the end of the hang")
    assert reader.writes() == written


def test_replacement_that_registers_before_the_last_heartbeat_is_collected_counts_as_one(
        own_etcd: EtcdClient, keys: Keys, h: HostUnderTest, member_here: Callable[..., Membership], leader: Leader,
        counter: Callable[[str], subprocess.Popen[bytes]]) -> None:
    victim = counter("a")
    agent = h.start_process()
    Reader(own_etcd, keys, "advantages", "a").await_collected()
    entry = keys.registry_entry("advantages", "a")
    wait_until(lambda: own_etcd.get(entry), what="the leader's entry")
    with HostWitness(own_etcd, keys, "w", ttl_s=4 * TTL_S).start():
        wait_until(lambda: own_etcd.count(keys.witnesses_prefix()), what="the witness, which has seen it alive")
        agent.send_signal(signal.SIGSTOP)
        victim.kill()
        victim.wait(60)
        member_here("advantages", "b")
        before = own_etcd.get(keys.heartbeats(h.name))
        assert before is not None
        agent.send_signal(signal.SIGCONT)
        wait_until(lambda: (kv := own_etcd.get(keys.heartbeats(h.name))) and kv.mod_revision > before.mod_revision,
                   what="the last heartbeat of the victim")
        wait_until(lambda: own_etcd.get(entry) is None, what="its replacement")
    assert has_event(own_etcd, keys, "advantages.dead", "a")
    assert has_event(own_etcd, keys, "advantages.recovered", "a")
