"""The catalog against a model: random publishers, crashes, epochs, pins and garbage collection, on a real etcd."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    rule,
    run_state_machine_as_test,
)
from support.budget import seeds
from support.etcd_server import EtcdServers

from elastic_rl.dcs.catalog import leader_writes, pins, reads, transitions
from elastic_rl.dcs.catalog.reads import read_identity
from elastic_rl.dcs.catalog.writer import PendingCommit, Staged, StreamWriter, commit_together
from elastic_rl.errors import Conflict, Fenced, VersionNotFound
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient, KeptLease
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import ReplicaSets, VersionState

STREAM = "policy"
TTL_S = 60


@dataclass
class Publishing:
    """One publisher process: its writer, its lease, and the version that it has begun and not ended."""

    epoch: int
    writer: StreamWriter
    lease: KeptLease
    staged: Staged | None = None
    begun: set[int] = field(default_factory=set)
    """Every number that it took: their owner keys are under its lease."""


@dataclass
class Model:
    """What the catalog must contain."""

    epoch: int = 0
    last: int = 0
    head: int = 0
    states: dict[int, VersionState] = field(default_factory=dict)
    epoch_of: dict[int, int] = field(default_factory=dict)
    owned: set[int] = field(default_factory=set)
    """Versions whose owner key exists."""
    pins: set[tuple[int, str]] = field(default_factory=set)

    def pinned(self, number: int) -> bool:
        return any(n == number for n, _ in self.pins)


class CatalogMachine(RuleBasedStateMachine):
    """Every rule does one thing to both; after each, both must agree."""

    etcd: EtcdClient  # set by the test

    publishers = Bundle("publishers")

    def __init__(self) -> None:
        super().__init__()
        self.keys = Keys(f"t-{secrets.token_hex(6)}")
        self.model = Model()
        self.leases: list[KeptLease] = []
        self.committed: list[int] = []
        self.raise_epoch()

    def teardown(self) -> None:
        for lease in self.leases:
            lease.close()

    # -- publishers ------------------------------------------------------------------------------------------------
    @rule()
    def raise_epoch(self) -> None:
        self.model.epoch += 1
        assert fencing.raise_epoch(self.etcd, self.keys, "test").number == self.model.epoch

    @rule(target=publishers, behind=st.sampled_from([0, 0, 0, 1]))
    def start(self, behind: int) -> object:
        """A publisher starts; some with an epoch that is over."""
        epoch = self.model.epoch - behind
        if not epoch or len(self.leases) > 8:
            return multiple()
        lease = self.etcd.keepalive(TTL_S)
        self.leases.append(lease)
        return Publishing(epoch, StreamWriter(self.etcd, self.keys, STREAM, epoch=epoch), lease)

    @rule(publisher=consumes(publishers))
    def crash(self, publisher: Publishing) -> None:
        """Its lease ends, and with it the keys under it; its staged version remains."""
        publisher.lease.close()
        self.model.owned -= publisher.begun

    # -- publishing --------------------------------------------------------------------------------------------------
    @rule(publisher=publishers)
    def begin(self, publisher: Publishing) -> None:
        if publisher.staged is not None:
            return
        if publisher.epoch != self.model.epoch:
            with pytest.raises(Fenced):
                publisher.writer.begin(owner="p", lease=publisher.lease.id, meta={})
            return
        publisher.staged = publisher.writer.begin(owner="p", lease=publisher.lease.id, meta={"by": publisher.epoch})
        self.model.last += 1
        number = publisher.staged.version.number
        assert number == self.model.last, "a number was skipped or used twice"
        self.model.states[number] = VersionState.STAGING
        self.model.epoch_of[number] = publisher.epoch
        self.model.owned.add(number)
        publisher.begun.add(number)

    @rule(publisher=publishers)
    def commit(self, publisher: Publishing) -> None:
        if publisher.staged is None:
            return
        staged, publisher.staged = publisher.staged, None
        number, model = staged.version.number, self.model
        pending = PendingCommit(publisher.writer, staged, "m", 1, ReplicaSets(parts=[["a"]]), {})
        may = (publisher.epoch == model.epoch and model.states.get(number) is VersionState.STAGING
               and number in model.owned and model.head < number)
        if not may:
            with pytest.raises((Fenced, Conflict)):
                commit_together([pending])
            return
        [version] = commit_together([pending])
        assert version.number == number
        model.states[number], model.head = VersionState.COMMITTED, number
        model.owned.discard(number)
        self.committed.append(number)

    @rule(publisher=publishers)
    def abort(self, publisher: Publishing) -> None:
        if publisher.staged is None:
            return
        staged, publisher.staged = publisher.staged, None
        publisher.writer.abort(staged)
        number, model = staged.version.number, self.model
        if publisher.epoch == model.epoch and model.states.get(number) is VersionState.STAGING:
            model.states[number] = VersionState.ABORTED
            model.owned.discard(number)

    # -- reading -----------------------------------------------------------------------------------------------------
    @rule(pick=st.one_of(st.none(), st.integers(1, 12)), holder=st.sampled_from("xy"))
    def pin(self, pick: int | None, holder: str) -> None:
        wanted = self.model.head if pick is None else pick
        if self.model.states.get(wanted) is not VersionState.COMMITTED:
            with pytest.raises(VersionNotFound):
                pins.pin(self.etcd, self.keys, STREAM, pick, holder, 0)
            return
        version = pins.pin(self.etcd, self.keys, STREAM, pick, holder, 0)
        assert (version.number, version.state) == (wanted, VersionState.COMMITTED)
        self.model.pins.add((wanted, holder))

    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        if self.model.pins:
            number, holder = data.draw(st.sampled_from(sorted(self.model.pins)))
            pins.unpin(self.etcd, self.keys, STREAM, number, holder)
            self.model.pins.discard((number, holder))

    # -- garbage collection --------------------------------------------------------------------------------------------
    @rule()
    def abort_orphans(self) -> None:
        """Of the staged versions, exactly those without an owner are aborted."""
        for entry in reads.list_entries(self.etcd, self.keys, STREAM):
            if entry.version.state is VersionState.STAGING:
                number = entry.version.number
                orphaned = number not in self.model.owned
                assert leader_writes.abort_orphan(self.etcd, self.keys, entry, []) is orphaned
                if orphaned:
                    self.model.states[number] = VersionState.ABORTED

    @rule(keep=st.integers(1, 3))
    def release_old(self, keep: int) -> None:
        """As the garbage collector does it: old versions go, all of them or, where one is pinned, the others."""
        entries = reads.list_entries(self.etcd, self.keys, STREAM)
        old = [e for e in entries if e.version.state is VersionState.COMMITTED][:-keep]
        if not old:
            return
        held = [e for e in old if self.model.pinned(e.version.number)]
        assert leader_writes.release(self.etcd, self.keys, old, []) is (not held)
        for entry in old:
            number = entry.version.number
            if held:
                assert leader_writes.release(self.etcd, self.keys, [entry], []) is (entry not in held)
            if entry in held:
                continue
            with pytest.raises(VersionNotFound):  # from now on it cannot be pinned
                pins.pin(self.etcd, self.keys, STREAM, number, "late", 0)
            assert not leader_writes.release(self.etcd, self.keys, [entry], []), "a stale entry was accepted"
            assert reads.read_replica_sets(self.etcd, self.keys, STREAM, number).revision == 0
            self.model.states[number] = VersionState.GONE

    @rule()
    def delete_records(self) -> None:
        for entry in reads.list_entries(self.etcd, self.keys, STREAM):
            if not transitions.TRANSITIONS[entry.version.state]:
                assert leader_writes.delete_record(self.etcd, self.keys, entry, [])
                del self.model.states[entry.version.number]

    # -- invariants -------------------------------------------------------------------------------------------
    @invariant()
    def catalog_agrees_with_model(self) -> None:
        """The head is never released here, so both of its keys hold the same bytes."""
        found = {v.number: v for v in reads.list_versions(self.etcd, self.keys, STREAM)}
        assert {number: version.state for number, version in found.items()} == self.model.states
        head = reads.head(self.etcd, self.keys, STREAM)
        assert (head.number if head else 0) == self.model.head
        if head is not None:
            assert found[head.number] == head
            assert reads.read_replica_sets(self.etcd, self.keys, STREAM, head.number).replica_sets.parts == [["a"]]
        assert pins.pinned(self.etcd, self.keys, STREAM) == {n for n, _ in self.model.pins}

    @invariant()
    def commits_grow_in_number_and_epoch(self) -> None:
        assert self.committed == sorted(set(self.committed))
        made_under = [self.model.epoch_of[n] for n in self.committed]
        assert made_under == sorted(made_under)

    @invariant()
    def identity_counts_commits(self) -> None:
        identity, _ = read_identity(self.etcd, self.keys)
        assert (identity.commits if identity else 0) == len(self.committed)


def test_catalog_follows_its_model(etcd_servers: EtcdServers) -> None:
    with EtcdClient(etcd_servers.endpoints, call_timeout_s=2.0) as etcd:
        CatalogMachine.etcd = etcd
        run_state_machine_as_test(CatalogMachine, settings=settings(
            max_examples=seeds(25), stateful_step_count=40, deadline=None,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much]))
