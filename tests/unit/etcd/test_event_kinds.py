"""The table of event kinds: nothing else says what a kind means, and no kind is written that it lacks."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.event_kinds import KINDS, EventKind, find, of_members

ROOT = Path(__file__).resolve().parents[3] / "elastic_rl"
TABLE = ROOT / "etcd" / "event_kinds.py"
ROLES = ("engine", "dcs", "coordinator", "driver", "rollout", *TRAINER_GROUPS)


@cache
def nodes() -> Sequence[tuple[str, ast.Call | ast.Attribute]]:
    """The calls and attributes in all modules but the table, each with its file."""
    return [(str(file.relative_to(ROOT)), node) for file in ROOT.rglob("*.py") if file != TABLE
            for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, ast.Call | ast.Attribute)]


def name_of(call: ast.Call) -> str:
    """The name of the function or method that is called, without what it is of."""
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


@pytest.mark.parametrize("kind", [EventKind("engine.raedy", "misspelt"), EventKind("engine.ready", "another meaning")])
def test_event_of_an_undeclared_kind_is_refused_where_it_is_built(kind: EventKind) -> None:
    with pytest.raises(ValueError, match="no declared kind"):
        events.build(kind, "e0", "m")


def test_declared_kinds_are_found_by_the_name_that_events_carry() -> None:
    for kind in KINDS.values():
        assert find(events.build(kind, "s", "m").kind) is kind
    for role in ROLES:
        for what, kind in vars(of_members(role)).items():
            assert kind.name == f"{role}.{what}" and find(events.build(kind, "s", "m").kind) is kind
    for group, kinds in event_kinds.TRAINER_GROUP_EVENTS.items():
        assert [kind.name for kind in vars(kinds).values()] == [f"{group}.{what}" for what in vars(kinds)]


@pytest.mark.parametrize("name", ["engine.raedy", "dead", ".dead", "engine.", "", "newer.release"])
def test_kind_of_another_release_is_not_found(name: str) -> None:
    assert find(name) is None


def test_kinds_are_declared_in_the_table_only() -> None:
    assert {file for file, node in nodes() if isinstance(node, ast.Call) and name_of(node) == "EventKind"} == set()


def test_every_emit_site_names_a_constant_of_the_table() -> None:
    """A text in place of a constant is no kind: neither type check nor ``find`` would see a misspelt one."""
    found = [(file, ast.unparse(a)) for file, node in nodes()
             if isinstance(node, ast.Call) and name_of(node) in ("build", "emit", "_emit")
             for a in node.args if isinstance(a, ast.Constant | ast.JoinedStr)]
    assert [(file, text) for file, text in found if re.fullmatch(r"f?'[\w{}.]+\.[\w{}.]+'", text)] == []


def test_every_constant_of_the_table_is_written_somewhere() -> None:
    names = {name for name, value in vars(event_kinds).items() if isinstance(value, EventKind)}
    used = {node.attr for _, node in nodes() if isinstance(node, ast.Attribute)}
    assert names <= used


def test_dashboard_has_a_lane_for_the_events_of_every_part() -> None:
    control = {"restart", "operation", "alerts", "leader", "etcd", "coordinator", "driver", "compute", "tracker",
               "bench", "host"}
    script = (ROOT / "coordinator/dashboard/events.js").read_text()
    lanes = re.search(r"const LANES = \[\n(.*?)\n\];", script, re.DOTALL)
    assert lanes is not None
    listed = [part for parts in re.findall(r"new Set\(\[(.*?)\]\)", lanes[1], re.DOTALL)
              for part in re.findall(r'"(\w+)"', parts)]
    roles = {"actor", "rollout", "advantages", "genrm", "teacher", "coordinator", "dcs", "driver"}
    parts = {kind.component for kind in KINDS.values()} | roles
    assert len(listed) == len(set(listed)) and {*listed, *TRAINER_GROUPS} == parts - control
    assert control <= parts


def test_alert_that_a_kind_ends_is_one_that_another_opens() -> None:
    opened = {kind.alert for kind in KINDS.values()}
    assert {kind.ends_alert for kind in KINDS.values()} - {""} <= opened
    assert all(kind.ends_alert for kind in KINDS.values() if kind.also_ends)
    assert all(kind.alert for kind in KINDS.values() if kind.one_time)


@pytest.mark.parametrize("group", TRAINER_GROUPS)
def test_faults_of_a_trainer_group_end_when_the_whole_group_works(group: str) -> None:
    begins = {kind.name for kind in event_kinds.begins_fault(group)}
    assert begins == {f"{group}.{what}" for what in ("failed", "agent_ended", "dead", "hung")}
    assert {kind.fault(subject) for kind in event_kinds.begins_fault(group) for subject in ("rank-0", group)} == {
        f"{group}/"}
    members = of_members(group)
    assert (members.recovered.ends, members.resumed.ends, members.returned.ends) == (True, True, False)
    assert members.recovered is event_kinds.TRAINER_GROUP_EVENTS[group].recovered
