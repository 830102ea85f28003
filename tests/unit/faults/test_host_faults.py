"""Faults of test hosts under the injector: when they have struck, who is told, and that each is ended once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fault_gate import end_waits

from elastic_rl import config
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.faults import injector
from elastic_rl.faults.context import Fault, InjectionEnded, VictimTaken, WrappedFault
from elastic_rl.faults.hosts import FaultNotSeen, HostFault, HostsContext, LastingFault, Victim
from elastic_rl.pipeline.records.run_log import LineFile, RunLog


class Context(HostsContext):
    """Two hosts, of which "a" is every victim."""

    away, lacks, leads_now, writes = False, "", "a", 0

    def __init__(self, folder: Path) -> None:
        hosts: Any = SimpleNamespace(all=lambda: [SimpleNamespace(name=name, address=name) for name in ("a", "b")])
        nothing: Any = None
        super().__init__(hosts, config.parse({"job": "j", "run_dir": str(folder)}), nothing, nothing, 2)
        self._etcd, self.asked_since = cast(EtcdClient, self), list[int]()

    def revision(self) -> int:
        """Of its etcd, which another writes to."""
        if self.away:
            raise EtcdUnavailable("no member answers")
        self.writes += 1
        return self.writes

    def candidates(self, victim: Victim) -> list[str]:
        if self.away:
            raise EtcdUnavailable("no member answers")
        return [self.leads_now]

    def names_on(self, host: str) -> list[str]:
        return [host, "node-0"]

    def phase(self, host: str) -> HostPhase:
        return HostPhase.READY

    def step(self) -> int:
        return 5

    def finished(self) -> bool:
        return False

    def ready(self, pool: str = "") -> set[str]:
        return set()

    def missing(self, *, run: bool = True, since: int = 0) -> str:
        self.asked_since.append(since)
        if self.away:
            raise EtcdUnavailable("no member answers")
        return self.lacks


class Done:
    """What a fault has done, in the place of a network."""

    look_s = 0.0

    def __init__(self, *, seen: bool = True) -> None:
        self.begun, self.ended, self.seen = 0, 0, seen
        self.waits = list[bool]()
        """Whether an abort would have had to wait, while the host was struck and while the witness was looked for."""

    def _begin(self) -> str:
        fault = cast(HostFault, self)
        with fault._striking():
            self.begun += 1
            self.waits.append(end_waits(fault.context))
        self.waits.append(end_waits(fault.context))
        if not self.seen:
            raise FaultNotSeen("nothing has happened")
        return "seen"

    def _end(self) -> None:
        self.ended += 1


class Cut(Done, HostFault):
    kind = "cut"

    def __init__(self, context: HostsContext, **more: bool) -> None:
        Done.__init__(self, **more)
        HostFault.__init__(self, context, Victim.LEADER)


class Slow(Done, LastingFault):
    kind = "slow"

    def __init__(self, context: HostsContext, seconds: float) -> None:
        Done.__init__(self)
        LastingFault.__init__(self, context, Victim.LEADER, seconds)


def test_fault_strikes_once_is_ended_once_and_gives_its_host_back(tmp_path: Path) -> None:
    context = Context(tmp_path)
    fault = Cut(context)
    assert fault.inject() == ("leader on a, node-0", "seen") and fault.state == "leader"
    assert [what for _, what in context.struck] == ["leader_host_cut of a"] and fault.waits == [True, False]
    assert context.take_host(Victim.LEADER) == "", "the host has a fault"
    context.lacks = "the run"
    assert not fault.healed() and not fault.healed() and fault.ended == 1
    context.lacks = ""
    assert fault.healed() and (fault.begun, fault.ended) == (1, 1) and context.take_host(Victim.LEADER) == "a"


def test_fault_of_a_host_does_not_speak_for_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fault = Cut(Context(tmp_path))
    fault.inject()
    assert not fault.detected()
    monkeypatch.setattr(Context, "phase", lambda self, host: HostPhase.LOST)
    assert fault.detected() and fault.said == ""


def test_fault_has_healed_once_the_run_has_worked_since_its_end(tmp_path: Path) -> None:
    """A write from before proves nothing, nor does one from before etcd has answered again."""
    context = Context(tmp_path)
    fault = Cut(context)
    fault.inject()
    context.away = True
    assert not fault.healed() and fault.ended == 1 and context.asked_since == []
    context.writes, context.away, context.lacks = 70, False, "the run"
    assert not fault.healed() and not fault.healed()
    context.lacks = ""
    assert fault.healed() and context.asked_since == [71, 71, 71]


def test_fault_that_has_not_struck_may_be_begun_again(tmp_path: Path) -> None:
    context = Context(tmp_path)
    fault, context.away = Cut(context), True
    with pytest.raises(EtcdUnavailable):
        fault.inject()
    assert context.struck == [] and not fault.begun
    context.away = False
    fault.inject()
    assert fault.begun == 1


def test_fault_that_is_not_seen_is_ended(tmp_path: Path) -> None:
    context = Context(tmp_path)
    fault = Cut(context, seen=False)
    with pytest.raises(FaultNotSeen):
        fault.inject()
    assert fault.ended == 1 and context.take_host(Victim.LEADER) == "a"


def test_fault_that_an_error_of_any_kind_ends_is_undone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(tmp_path)
    fault = Cut(context)

    def breaks() -> str:
        fault.begun += 1
        raise ProcessLookupError("it has ended meanwhile")

    monkeypatch.setattr(fault, "_begin", breaks)
    with pytest.raises(ProcessLookupError):
        fault.inject()
    assert (fault.begun, fault.ended) == (1, 1) and context.take_host(Victim.LEADER) == "a"


@pytest.mark.parametrize("wrap", [lambda fault: fault, WrappedFault])
def test_fault_that_is_not_detected_in_time_is_ended_and_gives_its_host_back(
        wrap: Callable[[Fault], Fault], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(injector, "_DETECT_TIMEOUT_S", 1e-9)
    context, records = Context(tmp_path), LineFile(tmp_path / "faults.jsonl")
    fault = Cut(context)  # its host is said to be ready
    played = injector.FaultInjector(context, RunLog(records), [(0, [wrap(fault)])], tmp_path / "steps.jsonl")
    played.run()
    [record] = played.over
    assert "detection of leader_host_cut was not seen" in record["problem"] and record["witness"] == "seen"
    assert (fault.begun, fault.ended) == (1, 1) and context.take_host(Victim.LEADER) == "a"


def test_host_that_is_the_victim_no_more_is_not_struck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = Context(tmp_path)
    fault = Cut(context)
    monkeypatch.setattr(fault, "_prepare", lambda: setattr(context, "leads_now", "b"))
    with pytest.raises(VictimTaken):
        fault.inject()
    assert context.struck == [] and (fault.begun, fault.ended) == (0, 0)
    assert fault.inject() == ("leader on b, node-0", "seen") and fault.begun == 1
    context.leads_now = "a"
    assert context.take_host(Victim.LEADER) == "a", "the host was given back"


def test_fault_that_never_began_is_given_up_without_a_word(tmp_path: Path) -> None:
    fault = Cut(Context(tmp_path))
    fault.give_up()
    assert (fault.begun, fault.ended) == (0, 0)


def test_no_fault_strikes_once_the_injection_has_ended(tmp_path: Path) -> None:
    context = Context(tmp_path)
    fault = Cut(context)
    context.end()
    with pytest.raises(InjectionEnded):
        fault.inject()
    assert not fault.begun


def test_fault_that_lasts_for_a_time_is_detected_by_nobody_and_ended_then(tmp_path: Path) -> None:
    for seconds, over in ((3600.0, False), (0.0, True)):
        fault = Slow(Context(tmp_path), seconds)
        fault.inject()
        assert fault.may_go_unnoticed and not fault.detected()
        assert fault.healed() == over and bool(fault.ended) == over
