"""The change projector: whoever applies its changes to the first state has the last one."""

from __future__ import annotations

import json
from collections.abc import Iterable
from operator import itemgetter
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator import pools
from elastic_rl.coordinator.alerts.state_machine import Alert, Phase, Severity
from elastic_rl.coordinator.api.change_projector import KINDS, ChangeProjector, ObjectChange
from elastic_rl.etcd.client import KeyValue, WatchEvent
from elastic_rl.etcd.heartbeats import HeartbeatIndex, merge
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    Epoch,
    Event,
    Heartbeat,
    HostHeartbeats,
    JobStatus,
    Leader,
    Member,
    PoolSpec,
    PoolStatus,
    StepMetrics,
    Version,
    VersionState,
)

KEYS = Keys("j")


class Etcd:
    """The keys of a job, and the watch events of their changes."""

    def __init__(self) -> None:
        self.now: dict[str, KeyValue] = {}
        self.revision = 1
        self.beats: dict[str, Heartbeat] = {}
        """The last one that host h has collected of each incarnation."""

    def put(self, key: str, value: bytes) -> WatchEvent:
        self.revision += 1
        prev = self.now.get(key)
        kv = KeyValue(key, value, prev.create_revision if prev else self.revision, self.revision,
                      prev.version + 1 if prev else 1, 0)
        self.now[key] = kv
        if key == KEYS.heartbeats("h") and value.startswith(b"{"):
            self.beats |= {beat.incarnation: beat for beat in HostHeartbeats.decode(value).beats}
        return WatchEvent("put", kv)

    def delete(self, key: str) -> WatchEvent | None:
        if self.now.pop(key, None) is None:
            return None
        self.revision += 1
        return WatchEvent("delete", KeyValue(key, b"", 0, self.revision, 0, 0))


def project(projector: ChangeProjector, event: WatchEvent | None) -> ObjectChange | None:
    changes = projector.apply(event) if event else []
    assert len(changes) <= 1, "of one record"
    return changes[0] if changes else None


def beat_of(name: str, step: int, beats: int, start: str = "a") -> Heartbeat:
    return Heartbeat(role="engine", id=name, incarnation=f"{name}-{start}", step=step, beat_at=float(beats),
                     beats=beats)


def collected(beats: Iterable[Heartbeat], host: str = "h") -> tuple[str, bytes]:
    """Key and value of the heartbeats of a host."""
    return KEYS.heartbeats(host), HostHeartbeats(host=host, beats=list(beats)).encode()


def engine(name: str, start: str = "a", **fields: Any) -> Member:
    """A member whose heartbeats are collected on host h, or on another one."""
    fields = {"collector": "h", **fields}
    return Member(role="engine", id=name, pid=1, host="h", incarnation=f"{name}-{start}", **fields)


def engine_record(name: str, version: int = 0) -> bytes:
    return Engine(id=name, pool="p", state=EngineState.READY, epoch=1, version=version).encode()


def alert_record(name: str) -> bytes:
    return Alert(id=name, kind="engine.dead", subject="e1", message="m", severity=Severity.ERROR, phase=Phase.FIRING,
                 since=0.0).encode()


def shown(change: ObjectChange | None) -> Any:
    assert change is not None and change.object is not None
    return json.loads(change.object)


KEY_AND_VALUE = st.one_of(
    st.builds(lambda n, d: (KEYS.pool_spec(f"p{n}"), PoolSpec(name=f"p{n}", desired=d).encode()),
              st.integers(0, 2), st.integers(1, 3)),
    st.builds(lambda n, r: (KEYS.pool_status(f"p{n}"), PoolStatus(
        name=f"p{n}", ready=r, starting=0, draining=0).encode()), st.integers(0, 2), st.integers(0, 3)),
    st.builds(lambda n, v: (KEYS.engine(f"e{n}"), engine_record(f"e{n}", v)),
              st.integers(0, 2), st.integers(0, 3)),
    st.builds(lambda n, beat, step: (KEYS.member("actor", f"m{n}"), Member(
        role="actor", id=f"m{n}", pid=1, host="h", step=step, beat_at=beat).encode()),
        st.integers(0, 2), st.floats(0, 9), st.integers(0, 1)),
    # Functions of the number that the next heartbeat has: a process makes no older ones.
    st.builds(lambda n, start, step, host: (KEYS.member("engine", f"e{n}"), lambda number: merge(
        engine(f"e{n}", start, collector=host), beat_of(f"e{n}", step, number, start)).encode()),
        st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 1), st.sampled_from(["h", ""])),
    st.builds(lambda beats: (KEYS.heartbeats("h"), lambda number: collected(
        beat_of(f"e{n}", step, number, start) for n, start, step in beats)[1]),
        st.lists(st.tuples(st.integers(0, 1), st.sampled_from("ab"), st.integers(0, 1)),
                 max_size=3, unique_by=itemgetter(0, 1))),
    st.builds(lambda n, v: (KEYS.version("policy", n), Version(
        stream="policy", number=n, state=VersionState.COMMITTED, epoch=1, nbytes=v).encode()),
              st.integers(1, 2), st.integers(0, 1)),
    st.builds(lambda n: (KEYS.alert(f"engine.dead/e1/a{n}"), alert_record(f"a{n}")), st.integers(0, 2)),
    st.builds(lambda n: (KEYS.epoch(), Epoch(number=n, holder="d", started_at=0).encode()), st.integers(1, 3)),
    st.builds(lambda n: (KEYS.leader(), Leader(replica=f"r{n}", url="u", pid=1).encode()), st.integers(0, 2)))


def state(etcd: Etcd) -> dict[tuple[str, str], Any]:
    """The state that a subscriber should have in the end, but for the job and alerts."""
    out: dict[tuple[str, str], Any] = {}
    prefixes = {"engine": KEYS.engines_prefix(), "member": KEYS.members_prefix()}
    for kind, prefix in prefixes.items():
        out |= {(kind, k.removeprefix(prefix)): json.loads(kv.value) for k, kv in etcd.now.items() if
                k.startswith(prefix)}
    # The host keeps the heartbeats of a process for as long as there may be a record of it.
    known = HeartbeatIndex([HostHeartbeats(host="h", beats=list(etcd.beats.values()))])
    for name, fields in out.items():
        if name[0] == "member":
            member = Member.model_validate(fields)
            out[name] = merge(member, known.of(member)).model_dump()
    out |= {("version", f"policy/{n}"): json.loads(kv.value) for n in (1, 2)
            if (kv := etcd.now.get(KEYS.version("policy", n)))}
    kvs = [kv for key, kv in etcd.now.items() if key.startswith(KEYS.pools_prefix())]
    return out | {("pool", p.name): p.model_dump() for p in pools.views(KEYS, kvs)}


@given(st.lists(st.tuples(KEY_AND_VALUE, st.booleans()), max_size=40), st.integers(0, 40))
def test_first_state_and_all_changes_make_the_last_one(history: list[tuple[tuple[str, Any], bool]], begins: int
                                                       ) -> None:
    etcd = Etcd()

    def change_key(key: str, value: Any, gone: bool) -> WatchEvent | None:
        if gone:  # a host's heartbeats end when the records are newer
            return etcd.delete(key) if key != KEYS.heartbeats("h") else None
        return etcd.put(key, value if isinstance(value, bytes) else value(etcd.revision))

    for (key, value), gone in history[:begins]:
        change_key(key, value, gone)
    projector = ChangeProjector(KEYS, "a")
    projector.load(kv for key, kv in etcd.now.items() if not key.startswith(KEYS.engines_prefix()))
    reader, job = state(etcd), None
    for (key, value), gone in history[begins:]:
        event = change_key(key, value, gone)
        for change in projector.apply(event) if event else []:
            assert change.kind in KINDS and change.revision == etcd.revision
            if change.kind == "job":
                job = shown(change)
            elif change.kind != "alert" and change.object is None:
                reader.pop((change.kind, change.id), None)
            elif change.kind != "alert":
                reader[change.kind, change.id] = shown(change)

    def without_beats(found: dict[tuple[str, str], Any]) -> Any:
        return {k: {**v, "beat_at": 0, "beats": 0} for k, v in found.items()}

    assert without_beats(reader) == without_beats(state(etcd))
    if job is not None:
        leader = etcd.now.get(KEYS.leader())
        assert job["leader"] == (json.loads(leader.value) if leader else None)
        epoch = etcd.now.get(KEYS.epoch())
        assert job["epoch"] == (Epoch.decode(epoch.value).number if epoch else 0)


def test_heartbeats_are_left_out() -> None:
    etcd, projector, key = Etcd(), ChangeProjector(KEYS, "a"), KEYS.member("actor", "m")
    member = Member(role="actor", id="m", pid=1, host="h", beat_at=1.0)
    assert shown(project(projector, etcd.put(key, member.encode())))["beat_at"] == 1.0
    assert project(projector, etcd.put(key, member.replace(beat_at=2.0).encode())) is None
    assert shown(project(projector, etcd.put(key, member.replace(beat_at=3.0, step=1).encode())))["step"] == 1
    gone = project(projector, etcd.delete(key))
    assert gone is not None and (gone.kind, gone.id, gone.object) == ("member", "actor/m", None)


def test_heartbeats_that_a_host_collects_change_the_members_that_made_progress() -> None:
    etcd, projector = Etcd(), ChangeProjector(KEYS, "a")

    def put(key: str, value: bytes) -> list[tuple[str, int]]:
        """Members that have changed, with their steps."""
        changes = projector.apply(etcd.put(key, value))
        assert {change.revision for change in changes} <= {etcd.revision}
        return [(change.id, shown(change)["step"]) for change in changes]

    for name in ("e0", "e1", "gone"):
        put(KEYS.member("engine", name), engine(name).encode())
    put(KEYS.member("engine", "other"), engine("other", collector="h2").encode())
    assert project(projector, etcd.delete(KEYS.member("engine", "gone"))) is not None
    names = ("e0", "e1", "gone", "other", "unknown")
    assert put(*collected(beat_of(name, 1, 1) for name in names)) == [("engine/e0", 1), ("engine/e1", 1)]
    assert put(*collected(beat_of(name, 1, 2) for name in names)) == [], "time alone"
    assert put(*collected([beat_of("e0", 1, 3), beat_of("e1", 2, 3), beat_of("e1", 9, 9, "b")])) == [("engine/e1", 2)]
    assert put(KEYS.member("engine", "e1"), engine("e1").encode()) == [], "an older heartbeat"
    ready = engine("e1", info={"ready": True}).encode()
    assert put(KEYS.member("engine", "e1"), ready) == [("engine/e1", 2)], "with its newest heartbeat"
    assert project(projector, etcd.delete(KEYS.heartbeats("h"))) is None
    assert put(KEYS.heartbeats("h"), b"not json") == put(*collected([beat_of("e0", 7, 9)], host="h2")) == []


def test_deletion_of_an_old_alert_keeps_the_newer_one_of_its_condition() -> None:
    etcd, projector = Etcd(), ChangeProjector(KEYS, "a")
    old, new = KEYS.alert("engine.dead/e1/old"), KEYS.alert("engine.dead/e1/new")
    assert project(projector, etcd.put(old, alert_record("old"))).id == "engine.dead/e1"  # type: ignore[union-attr]
    project(projector, etcd.put(new, alert_record("new")))
    assert project(projector, etcd.delete(old)) is None
    gone = project(projector, etcd.delete(new))
    assert gone is not None and gone.object is None and gone.id == "engine.dead/e1"


def test_trimming_of_logs_and_other_keys_are_no_changes() -> None:
    etcd, projector = Etcd(), ChangeProjector(KEYS, "a")
    event = Event(id="1-a", at=0.0, kind="k", subject="s", message="m")
    assert project(projector, etcd.put(KEYS.event("1-a"), event.encode())).kind == "event"  # type: ignore[union-attr]
    assert project(projector, etcd.delete(KEYS.event("1-a"))) is None
    step = project(projector, etcd.put(KEYS.step_metrics(7), StepMetrics(step=7, at=0.0, reward=0.0).encode()))
    assert step is not None and (step.kind, step.id) == ("step", "7")
    for key in (KEYS.group_lease("actor"), KEYS.registry_entry("a", "b"), KEYS.stream_head("policy"),
                KEYS.pin("policy", 1, "h")):
        assert project(projector, etcd.put(key, b"{}")) is None


def test_unreadable_record_is_skipped() -> None:
    etcd, projector = Etcd(), ChangeProjector(KEYS, "a")
    assert shown(project(projector, etcd.put(KEYS.job_status(), b"not json")))["status"] is None
    for garbage in (b"not json", b"[]", b"", b"\xff", b"7"):
        for key in (KEYS.engine("e"), KEYS.member("actor", "m"), KEYS.alert("k/s/a"), KEYS.event("1-a"),
                    KEYS.version("policy", 1), KEYS.step_metrics(1), KEYS.operation("o"), KEYS.pool_spec("p")):
            assert project(projector, etcd.put(key, garbage)) is None, (key, garbage)
    ok = project(projector, etcd.put(KEYS.job_status(), JobStatus(phase="rl", step=3).encode()))
    assert shown(ok)["status"]["step"] == 3


def test_frame_is_one_server_sent_event() -> None:
    etcd, projector = Etcd(), ChangeProjector(KEYS, "a")
    record = engine_record("a\nb").replace(b"{", b"{\n").replace(b"}", b"\r}")
    pretty = project(projector, etcd.put(KEYS.engine("e"), record))
    assert pretty is not None and pretty.frame.count(b"\n") == 4
    assert shown(pretty)["id"] == "a\nb"
    frame = ObjectChange(7, "engine", 'e"1', b'{"id":1}').frame
    assert frame == b'id: 7\nevent: change\ndata: {"kind":"engine","id":"e\\"1","object":{"id":1}}\n\n'
