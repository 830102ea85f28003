"""Faults of test hosts under the injector: when they have struck, who is told, and that each is ended once."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd.cluster_records import HostPhase
from elastic_rl.faults.context import InjectionEnded
from elastic_rl.faults.hosts import FaultNotSeen, HostFault, HostsContext, LastingFault, Victim


class Context(HostsContext):
    """Two hosts, of which "a" is every victim."""

    away, lacks = False, ""

    def __init__(self, folder: Path) -> None:
        hosts: Any = SimpleNamespace(all=lambda: [SimpleNamespace(name=name, address=name) for name in ("a", "b")])
        nothing: Any = None
        super().__init__(hosts, config.parse({"job": "j", "run_dir": str(folder)}), nothing, nothing, 2)

    def candidates(self, victim: Victim) -> list[str]:
        if self.away:
            raise EtcdUnavailable("no member answers")
        return ["a"]

    def names_on(self, host: str) -> list[str]:
        return [host, "node-0"]

    def phase(self, host: str) -> HostPhase:
        return HostPhase.READY

    def missing(self, *, run: bool = True) -> str:
        if self.away:
            raise EtcdUnavailable("no member answers")
        return self.lacks


class Done:
    """What a fault has done, in the place of a network."""

    look_s = 0.0

    def __init__(self, *, seen: bool = True) -> None:
        self.begun, self.ended, self.seen = 0, 0, seen

    def _begin(self) -> str:
        self.begun += 1
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
    assert [what for _, what in context.struck] == ["leader_host_cut of a"]
    assert context.take_host(Victim.LEADER) == "", "the host has a fault"
    context.lacks = "the run"
    assert not fault.healed() and not fault.healed() and fault.ended == 1
    context.lacks = ""
    assert fault.healed() and (fault.begun, fault.ended) == (1, 1) and context.take_host(Victim.LEADER) == "a"


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
