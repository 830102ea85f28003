"""The blast radius: what of a running cluster may be struck, as drawn and in the moment of the strike."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from chaos_tests import blast_radius
from chaos_tests.blast_radius import BlastRadius, OutOfRadius, guarded, parts, replicas_of
from chaos_tests.faults.catalogue import FAULTS, Need, Part, met
from elastic_rl import config
from elastic_rl.errors import ConfigError, EtcdUnavailable
from elastic_rl.etcd.keys import Keys
from elastic_rl.faults.context import Fault

PLENTY = dict.fromkeys(Part, 3)


def test_everything_but_etcd_and_hosts_may_be_struck_where_nothing_is_named() -> None:
    radius = BlastRadius()
    allowed, refused = radius.allowed(dict.fromkeys(FAULTS, 1.0), PLENTY)
    assert {FAULTS[name].part for name in refused} >= {Part.ETCD, Part.HOSTS}
    assert {"all_engines_killed", "etcd_killed", "etcd_stopped", "host_agent_killed"} <= set(refused)
    assert not {FAULTS[name].part for name in allowed} & {Part.ETCD, Part.HOSTS}
    assert "engine_killed" in allowed and sorted(allowed) == allowed


@pytest.mark.parametrize("text", ["", " ", ",,"])
def test_list_without_a_part_is_refused(text: str) -> None:
    """It is of a variable that is not set, and does not mean whatever may be struck."""
    with pytest.raises(ConfigError, match="no part is named"):
        parts(text)


def test_only_named_parts_are_struck() -> None:
    radius = BlastRadius(parts=parts("engines, etcd"), allow_last=True)
    allowed, refused = radius.allowed(dict.fromkeys(FAULTS, 1.0), PLENTY)
    assert {part for name in allowed for part in FAULTS[name].parts} == {Part.ENGINES, Part.ETCD}
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


class Wound(Fault):
    def __init__(self, name: str) -> None:
        self.name, self.is_healed, self.injected = name, False, 0

    def inject(self) -> tuple[str, str]:
        self.injected += 1
        return "e", "seen"

    def detected(self) -> bool:
        return True

    def healed(self) -> bool:
        return self.is_healed


def test_fault_is_not_injected_once_it_would_take_the_last_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas, fault, context = {Part.ENGINES: 2}, Wound("engine_killed"), SimpleNamespace(struck=[])
    monkeypatch.setattr(blast_radius, "replicas_of", lambda of: replicas if of is context else pytest.fail("another"))
    fault.is_healed = True
    made: Any = guarded(BlastRadius(), context)("engine_killed", fault)  # type: ignore[arg-type]
    assert made.inject() == ("e", "seen") and made.detected() and made.healed() and made.name == "engine_killed"
    replicas[Part.ENGINES] = 1
    with pytest.raises(OutOfRadius, match="the last one is not to be struck"):
        made.inject()
    assert fault.injected == 1


@pytest.mark.parametrize(("name", "only", "why"), [
    ("chunks_torn", "dcs", "engines are not to be struck"), ("chunk_bits_flipped", "engines", "dcs are not"),
    ("etcd_compacted_past_watcher", "etcd", "coordinators are not to be struck")])
def test_fault_that_strikes_another_part_too_needs_both(name: str, only: str, why: str) -> None:
    assert why in BlastRadius(parts=parts(only)).refusal(name, PLENTY)
    radius = BlastRadius(parts=FAULTS[name].parts)
    assert radius.refusal(name, PLENTY) == ""
    assert "the last one" in radius.refusal(name, PLENTY | {Part.COORDINATORS: 1, Part.ENGINES: 1})


def test_fault_that_takes_no_replica_needs_no_other_one() -> None:
    assert BlastRadius().refusal("racing_requests", {}) == ""
    assert "it takes all coordinators" in BlastRadius().refusal("coordinator_killed_taking_over", PLENTY)


def test_fault_whose_needs_are_not_met_is_refused() -> None:
    allowed, refused = BlastRadius().allowed({"actor_exited": 1.0, "chunks_torn": 1.0, "engine_killed": 1.0}, PLENTY,
                                             {Need.OUTSIDE, Need.ONE_HOST})
    assert allowed == ["engine_killed"] and "ptrace" in refused["actor_exited"]
    assert "dcs.disk_bytes" in refused["chunks_torn"]


@pytest.mark.parametrize("name", ["chunks_torn", "chunk_bits_flipped", "coordinator_clock_set_ahead"])
def test_what_nobody_could_give_back_is_destroyed_on_clusters_of_the_run_alone(name: str, tmp_path: Path) -> None:
    """The only copies of versions, and silences that end by a clock that is ahead."""
    cfg = config.parse({"job": "j", "run_dir": str(tmp_path)})
    attached = met(cfg, own=False)
    assert Need.OWN_CLUSTER in met(cfg) - attached and Need.OWN_CLUSTER in FAULTS[name].all_needs
    assert "leave --job out" in blast_radius.unmet(name, frozenset(Need) - {Need.OWN_CLUSTER})
    assert BlastRadius(allow_last=True).allowed({name: 1.0}, PLENTY, attached)[0] == []


def test_every_part_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = {"run": [7], "gcs": [8], "raylet": [9, 10]}
    monkeypatch.setattr(blast_radius, "PROCESS_KINDS", {
        name: SimpleNamespace(pids=lambda context, found=found: found) for name, found in pids.items()})
    nothing: Any = SimpleNamespace(
        etcd=SimpleNamespace(count=lambda prefix: 2, endpoints=["e"]), cfg=SimpleNamespace(cluster_name="c"),
        keys=Keys("j"), ready=lambda: {"a"}, members=lambda role: ["m"], trainer_ranks=lambda: ["r"],
        router_pid=lambda: 5)
    found = replicas_of(nothing)
    assert found.keys() == {*Part} and (found[Part.RUN], found[Part.RAY], found[Part.API]) == (1, 1, 2)


def test_faults_that_are_under_way_do_not_count_on_the_same_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    replicas = {Part.ENGINES: 3}
    monkeypatch.setattr(blast_radius, "replicas_of", lambda of: replicas)
    guard = guarded(BlastRadius(at_once=3), cast("Any", SimpleNamespace(struck=[])))
    wounds = [Wound("engine_killed") for _ in range(3)]
    first, second, third = (guard("engine_killed", cast("Any", wound)) for wound in wounds)
    first.inject()  # of which the records say nothing yet
    second.inject()
    with pytest.raises(OutOfRadius, match="the last one is not to be struck"):
        third.inject()
    wounds[0].is_healed = wounds[1].is_healed = True
    assert first.healed() and second.healed()
    third.inject()
    assert [wound.injected for wound in wounds] == [1, 1, 1]


@pytest.mark.parametrize("struck", [True, False])
def test_fault_that_fails_gives_its_place_back_unless_it_has_struck(struck: bool, monkeypatch: pytest.MonkeyPatch
                                                                    ) -> None:
    """An etcd that is away after the strike makes the injector wait, and nothing of the victim is back."""
    class Failing(Wound):
        def inject(self) -> tuple[str, str]:
            raise EtcdUnavailable("no member answers")

    monkeypatch.setattr(blast_radius, "replicas_of", lambda of: {Part.ENGINES: 2})
    context: Any = SimpleNamespace(struck=[(1.0, "pid 1 was sent SIGKILL")] if struck else [])
    guard = guarded(BlastRadius(at_once=3), context)
    with pytest.raises(EtcdUnavailable):
        guard("engine_killed", cast("Any", Failing("engine_killed"))).inject()
    following = guard("engine_killed", cast("Any", Wound("engine_killed")))
    if struck:
        with pytest.raises(OutOfRadius, match="the last one is not to be struck"):
            following.inject()
    else:
        following.inject()
