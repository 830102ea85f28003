"""The blast radius: what of a running cluster may be struck, as drawn and in the moment of the strike."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from chaos_tests import blast_radius
from chaos_tests.blast_radius import BlastRadius, OutOfRadius, guarded, parts
from chaos_tests.faults.catalogue import FAULTS, Part
from elastic_rl.errors import ConfigError

PLENTY = dict.fromkeys(Part, 3)


def test_everything_but_etcd_and_hosts_may_be_struck_where_nothing_is_named() -> None:
    radius = BlastRadius(parts=parts(""))
    allowed, refused = radius.allowed(dict.fromkeys(FAULTS, 1.0), PLENTY)
    assert {FAULTS[name].part for name in refused} >= {Part.ETCD, Part.HOSTS}
    assert {"all_engines_killed", "etcd_killed", "etcd_stopped", "host_agent_killed"} <= set(refused)
    assert not {FAULTS[name].part for name in allowed} & {Part.ETCD, Part.HOSTS}
    assert "engine_killed" in allowed and sorted(allowed) == allowed


def test_only_named_parts_are_struck() -> None:
    radius = BlastRadius(parts=parts("engines, etcd"), allow_last=True)
    allowed, refused = radius.allowed(dict.fromkeys(FAULTS, 1.0), PLENTY)
    assert {FAULTS[name].part for name in allowed} == {Part.ENGINES, Part.ETCD}
    assert refused["trainer_rank_killed"] == "trainer are not to be struck"
    with pytest.raises(ConfigError, match="engine, x"):
        parts("engine,x")


@pytest.mark.parametrize(("name", "count", "allow_last", "may"), [
    ("engine_killed", 2, False, True), ("engine_killed", 1, False, False), ("engine_killed", 0, False, False),
    ("engine_killed", 1, True, True), ("all_engines_killed", 4, False, False), ("all_engines_killed", 4, True, True),
    ("coordinator_killed", 2, False, True), ("coordinator_killed", 1, False, False)])
def test_last_replica_is_struck_only_where_that_is_allowed(name: str, count: int, allow_last: bool, may: bool) -> None:
    radius = BlastRadius(allow_last=allow_last)
    assert (radius.refusal(name, {FAULTS[name].part: count}) == "") is may


def test_fault_is_not_injected_once_it_would_take_the_last_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fault:
        name, said, injected = "engine_killed", "", 0

        def inject(self) -> tuple[str, str]:
            self.injected += 1
            return "e", "seen"

        def detected(self) -> bool:
            return True

        def healed(self) -> bool:
            return True

    replicas, fault, context = {Part.ENGINES: 2}, Fault(), SimpleNamespace()
    monkeypatch.setattr(blast_radius, "replicas_of", lambda of: replicas if of is context else pytest.fail("another"))
    made: Any = guarded(BlastRadius(), context)("engine_killed", fault)  # type: ignore[arg-type]
    assert made.inject() == ("e", "seen") and made.detected() and made.healed() and made.name == "engine_killed"
    replicas[Part.ENGINES] = 1
    with pytest.raises(OutOfRadius, match="the last one is not to be struck"):
        made.inject()
    assert fault.injected == 1
