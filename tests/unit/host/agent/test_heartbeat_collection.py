"""What a host agent makes of heartbeat files: nothing becomes older, and no dead process counts as alive."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd import membership
from elastic_rl.etcd.heartbeat_folder import MAX_FILES, HeartbeatFile
from elastic_rl.etcd.process_state import ProcessState
from elastic_rl.etcd.records import Heartbeat, HostHeartbeats
from elastic_rl.host.agent import heartbeat_collector
from elastic_rl.host.agent.heartbeat_collection import KEPT_LEASES, FoundFile, collect

LEASE_S = 9.0


def found(n: int, beats: int, state: ProcessState = ProcessState.RUNNING, *, written_s: float = 0.0) -> FoundFile:
    beat = Heartbeat(role="engine", id=f"e{n}", incarnation=f"{n:016x}", beats=beats, phase=f"phase {beats}")
    return FoundFile(HeartbeatFile(beat=beat, pid=n + 1, started=1, machine="m", lease_s=LEASE_S, written_s=written_s),
                     state)


def numbers(record: HostHeartbeats) -> dict[str, tuple[int, int]]:
    """Number of the heartbeat and revision of each member."""
    return {beat.id: (beat.beats, beat.revision) for beat in record.beats}


@dataclass
class Process:
    state: ProcessState = ProcessState.RUNNING
    beats: int = 0
    written_s: float = 0.0
    has_file: bool = True
    last_ran: int = 0
    """Revision of etcd when it ran last."""


STEPS = st.lists(st.tuples(st.sampled_from(["beat", "stop", "continue", "kill", "look", "look", "restart the agent",
                                            "wait"]), st.integers(0, 2)), max_size=40)


@given(STEPS)
def test_heartbeats_only_get_newer_and_revisions_are_of_times_when_the_process_ran(steps: list[tuple[str, int]]
                                                                                  ) -> None:
    processes = [Process() for _ in range(3)]
    now_s, revision, known, record = 0.0, 1, 1, None
    for what, n in steps:
        process = processes[n]
        revision += 1
        if what == "stop" and process.state is ProcessState.RUNNING:
            process.state = ProcessState.STOPPED
        elif what == "continue" and process.state is ProcessState.STOPPED:
            process.state = ProcessState.RUNNING
        elif what == "kill":
            process.state = ProcessState.GONE
        elif what == "wait":
            now_s += 10.0
        elif what == "restart the agent":  # it reads what etcd has, at the revision of that time
            known = revision
        for p in processes:
            if p.state is ProcessState.RUNNING:
                p.last_ran = revision
        if what == "beat" and process.state is ProcessState.RUNNING:
            process.beats, process.written_s = process.beats + 1, now_s
        if what != "look":
            continue
        files = [found(i, p.beats, p.state, written_s=p.written_s) for i, p in enumerate(processes)
                 if p.beats and p.has_file]
        made = collect("h", record, files, known, now_s)
        before, after = numbers(record or HostHeartbeats(host="h")), numbers(made.record)
        for i, p in enumerate(processes):
            name, incarnation = f"e{i}", f"{i:016x}"
            assert (incarnation in made.over) == (p.state is ProcessState.GONE and p.has_file and p.beats > 0
                                                  and now_s - p.written_s > KEPT_LEASES * LEASE_S)
            if incarnation in made.over:
                p.has_file = False
                assert name not in after
            elif p.beats and p.has_file:
                assert after[name][0] == p.beats and after[name] >= before.get(name, (0, 0))
                assert after[name][1] <= p.last_ran, "it did not run then"
            assert (incarnation in made.collected) == (name in after and p.state is not ProcessState.GONE)
        record, known = made.record, revision


def test_new_heartbeat_of_a_running_process_carries_the_revision_that_etcd_had_before() -> None:
    first = collect("h", None, [found(0, 1), found(1, 1, ProcessState.STOPPED)], 7, 0.0).record
    assert numbers(first) == {"e0": (1, 7), "e1": (1, 0)}
    second = collect("h", first, [found(0, 2), found(1, 1)], 9, 3.0).record
    assert numbers(second) == {"e0": (2, 9), "e1": (1, 0)}, "the other has only been continued"
    third = collect("h", second, [found(0, 3, ProcessState.GONE), found(1, 2)], 11, 6.0).record
    assert numbers(third) == {"e0": (3, 9), "e1": (2, 11)}, "it may have ended before"


def test_nothing_changes_without_a_new_heartbeat() -> None:
    files = [found(n, 4) for n in range(3)]
    first = collect("h", None, files, 7, 0.0)
    assert collect("h", first.record, reversed(files), 8, 1.0).record == first.record


def test_heartbeat_stays_while_the_file_of_its_process_cannot_be_read() -> None:
    before = collect("h", None, [found(0, 3), found(1, 5)], 7, 0.0).record
    made = collect("h", before, [found(0, 4)], 9, 1.0, unread={f"{1:016x}", f"{2:016x}"})
    assert numbers(made.record) == {"e0": (4, 9), "e1": (5, 7)}
    assert made.collected == {f"{0:016x}"}, "it is to write for itself"


@given(st.integers(0, 5), st.integers(1, 40))
def test_full_folder_keeps_those_that_it_has(more: int, gone: int) -> None:
    first = collect("h", None, [found(n, 1) for n in range(100, 100 + MAX_FILES + more)], 1, 0.0)
    assert len(first.record.beats) == len(first.collected) == MAX_FILES
    others = [found(n, 1) for n in range(100 + gone, 100 + MAX_FILES + more)] + [found(n, 1) for n in range(90)]
    second = collect("h", first.record, others, 2, 0.0)
    kept = {f"{n:016x}" for n in range(100 + gone, 100 + MAX_FILES)}
    assert len(second.collected) == MAX_FILES and kept <= second.collected


@given(st.integers(2, 600))
def test_members_write_for_themselves_before_the_lease_of_an_ended_agent_is_over(period_s: int) -> None:
    """When an agent ends, two thirds of its lease are left at least, and a whole mark at most; a member then waits for
    up to a period, so that not all write at once."""
    left_s = 2 / 3 * heartbeat_collector._LEASE_PERIODS * period_s
    noticed_s = heartbeat_collector._MARK_PERIODS * period_s + membership._FILE_INTERVAL_S
    assert left_s > noticed_s + 2 * period_s
    assert KEPT_LEASES > 1, "the entry of a process that is gone is there for its lease"
