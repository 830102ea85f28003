"""The event log of a chaos run that never was, shaped like a real one: for tests of checkers and of the report."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from chaos_tests.event_log import FORM, Kind
from elastic_rl.etcd.keys import ClusterKeys, Keys

Record = dict[str, Any]
START, JOB, STEPS = 1_795_000_000.0, "job", 12
KEYS, CLUSTER = Keys(JOB), ClusterKeys(JOB)


class Log:
    """Records in their order. Changes of etcd have the revisions that follow one another."""

    def __init__(self, steps: int = STEPS, *, seed: int = 1, step_s: float = 1.0, faults: bool = True) -> None:
        self.records: list[Record] = []
        self.at, self.revision, self.steps, self._created = START, 1, steps, dict[str, int]()
        self._random, self._number, self._commits = random.Random(seed), 0, 0
        self._served = 0
        strikes = [{"step": steps // 3, "faults": ["engine_killed"]},
                   {"step": 2 * steps // 3, "faults": ["trainer_rank_killed"]}] if faults else []
        self.add(Kind.RUN, form=FORM, scenario="quick", seed=seed, target="one host", baseline=not faults,
                 schedule={"seed": seed, "steps": steps, "strikes": strikes, "minutes": 0.0, "settings": []},
                 settings={"job": JOB, "cluster": "", "deterministic": False, "device": {"dtype": "float32"},
                           "train": {"max_staleness": 0, "logprob_tolerance": None, "steps": steps}},
                 versions={"elastic-rl": "0.1.0"}, commit="abc1234")
        self._begin()
        self._run(step_s, faults)
        self._end(faults)

    def add(self, kind: Kind, **fields: Any) -> Record:
        self.records.append({"at": self.at, "kind": kind.value, **fields})
        return self.records[-1]

    def put(self, *pairs: tuple[str, Any]) -> None:
        """One transaction; None as a value deletes the key."""
        self.revision += 1
        for key, value in pairs:
            if value is None:
                self._created.pop(key, None)
            created = self._created.setdefault(key, self.revision) if value is not None else 0
            self.add(Kind.CHANGE, revision=self.revision, put=value is not None, key=key, create=created,
                     value=json.dumps(value) if value is not None else "")

    def gap(self, unseen: Callable[[Log], object] = lambda log: None, *, listed: bool = True) -> None:
        """What the observer did not see, and what it showed after it. ``unseen`` makes the changes."""
        first, before = self.revision + 1, len(self.records)
        self.put((f"{KEYS.root}unseen", {"n": first}))
        unseen(self)
        hidden, there = [r for r in self.records[before:] if r["kind"] == Kind.CHANGE], dict[str, Record]()
        self.records[before:] = [r for r in self.records[before:] if r["kind"] != Kind.CHANGE]
        self.add(Kind.GAP, first=first, last=self.revision)
        for record in [*self.records, *hidden]:
            if record["kind"] == Kind.CHANGE:
                there[record["key"]] = record
        for _, record in sorted(there.items()) if listed else ():
            if record["put"]:
                self.records.append({**record, "at": self.at, "kind": Kind.PRESENT.value})
        if listed:
            self.add(Kind.PRESENT, listed=self.revision)

    def event(self, name: str, subject: str, severity: str = "info") -> None:
        self.add(Kind.EVENT, id=f"{len(self.records)}", name=name, subject=subject, severity=severity, message=name)

    # -- the run -------------------------------------------------------------------------------------------------------
    def _begin(self) -> None:
        self.put((CLUSTER.leader("a"), {"replica": "a"}))
        self.put((CLUSTER.leader("b"), {"replica": "b"}))
        self.put((KEYS.leadership(), {"replica": "a", "term": 2}))
        self.put((KEYS.leader_heartbeat(), {"replica": "a", "term": 2}))
        for key, record in ((KEYS.epoch(), {"number": 1}), (KEYS.driver(), {"number": 1}),
                            (KEYS.actor_term(), {"number": 1}), (KEYS.job_spec(), {"settings": {"seed": 1}})):
            self.put((key, record))
        for role in ("driver", "actor", "trainer", "coordinator"):
            self.put((KEYS.member(role, f"{role}-0"), {"role": role, "incarnation": f"{role}-0"}))
        self.put((KEYS.dcs_node("node-0"), {"id": "node-0"}))
        self.put((KEYS.dcs_catalog(), {"id": "c", "commits": 0}))
        self.put((KEYS.pool_spec("rollout"), {"name": "rollout", "desired": 1}))
        self.engine("syncing", 0)
        self.pool(1)
        self.status("rl", 0)
        self.version(1, 0)
        self.event("run.started", JOB)

    def _run(self, step_s: float, faults: bool) -> None:
        step, healed = 1, list[Callable[[], object]]()
        while step <= self.steps:
            self.at += step_s
            self.step(step, step_s)
            while healed:
                healed.pop()()
            if faults and step == self.steps // 3:
                healed.append(self._engine_killed())
            if faults and step == 2 * self.steps // 3:
                rank = self._rank_killed()
                self.at += step_s
                self.step(step, step_s)  # it is done again
                rank()
            step += 1

    def _end(self, faults: bool) -> None:
        self.put((KEYS.operation("o"), {"id": "o", "state": "running"}))
        self.put((KEYS.operation("o"), {"id": "o", "state": "succeeded"}))
        self.status("finished", self.steps)
        self.event("run.finished", JOB)
        self.add(Kind.END, phase="finished", revision=1, committed_steps=list(range(1, self.steps + 1)), aborted="",
                 report={"steps": self.steps, "versions_committed": self.steps + 2, "groups_lost": 0,
                         "groups_duplicated": 0, "audit_problems": [], "eval_accuracy_last": 0.9},
                 alerts=[{"kind": "job.finished", "subject": JOB, "message": "it has finished", "severity": "info",
                          "phase": "firing", "id": "f"}])

    def step(self, step: int, seconds: float) -> Record:
        number = self._number
        made = self.add(
            Kind.STEP, step=step, samples=32, tokens=90.0, staleness=0, logprob_diff_max=5e-7, loss=step / 7,
            reward_mean=min(1.0, 0.2 + step / self.steps / 2 + self._random.uniform(0, 0.1)),
            groups=list(range(8 * (step - 1), 8 * step)), policy_version=number + 1, sample_versions=[number],
            seconds={"total": seconds})
        self.version(number + 1, step)
        self.status("rl", step)
        return made

    def version(self, number: int, step: int) -> None:
        self._number = number
        record = {"stream": "policy", "number": number, "epoch": 1, "created_at": self.at, "meta": {"step": step}}
        key = KEYS.version("policy", number)
        self.put((KEYS.stream_next("policy"), number), (KEYS.staging_owner("policy", number), "p"),
                 (key, record | {"state": "staging", "manifest": ""}))
        done = record | {"state": "committed", "manifest": f"m{step}", "committed_at": self.at}
        self._commits += 1
        self.put((key, done), (KEYS.stream_head("policy"), done), (KEYS.staging_owner("policy", number), None),
                 (KEYS.dcs_catalog(), {"id": "c", "commits": self._commits}),
                 (KEYS.replica_sets("policy", number), {"parts": [["node-0"]]}))
        self.engine("ready" if self._served else "syncing", self._served, applying=number)
        self._served = number
        self.engine("ready", number)

    def engine(self, state: str, version: int, *, applying: int = 0) -> None:
        self.put((KEYS.engine("rollout-1"), {
            "id": "rollout-1", "incarnation": "i", "pool": "rollout", "epoch": 1, "state": state, "version": version,
            "applying": applying, "layout": "float32", "checksum": f"sum of {version}" if version else ""}))

    def status(self, phase: str, step: int, waiting_for: str = "") -> None:
        self.put((KEYS.job_status(), {"phase": phase, "step": step, "waiting_for": waiting_for}))

    def pool(self, ready: int) -> None:
        self.put((KEYS.pool_status("rollout"), {"name": "rollout", "ready": ready, "released": 0}))

    def alert(self, id_: str, kind: str, subject: str, phase: str, since: float) -> None:
        self.put((f"{KEYS.alerts_prefix()}{kind}/{subject}/{id_}", {
            "id": id_, "kind": kind, "subject": subject, "severity": "error", "phase": phase, "since": since,
            "fired_at": since, "notify_resolved": True}))
        self.add(Kind.NOTIFICATION, alert=kind, subject=subject, phase=phase, key=id_)

    def _engine_killed(self) -> Callable[[], object]:
        """Returns what is called once the job has made a further step."""
        began = self.at
        self.event("engine.dead", "rollout-1", "error")
        self.alert("e1", "engine.dead", "rollout-1", "firing", began + 0.5)
        self.pool(0)
        self.status("rl", self.steps // 3, "engines")
        self.at += 10
        self.pool(1)
        self.alert("e1", "engine.dead", "rollout-1", "resolved", began + 0.5)
        return lambda: self.fault("engine_killed", "rollout-1", self.steps // 3, began, "engines: there is none")

    def _rank_killed(self) -> Callable[[], object]:
        began = self.at
        self.event("trainer.dead", "trainer", "error")
        self.put((KEYS.member("trainer", "trainer-0"), None))
        self.alert("t1", "trainer.dead", "trainer", "firing", began + 0.5)
        self.at += 4
        self.put((KEYS.member("trainer", "trainer-1"), {"role": "trainer", "incarnation": "trainer-1"}))
        self.alert("t1", "trainer.dead", "trainer", "resolved", began + 0.5)
        return lambda: self.fault("trainer_rank_killed", "trainer rank-0", 2 * self.steps // 3, began)

    def fault(self, name: str, target: str, step: int, began: float, said: str = "") -> Record:
        return self.add(Kind.FAULT, name=name, target=target, step=step, state="", problem="", said=said,
                        witness="pid 7 (python) was sent SIGKILL and seen to end", injected_at=began,
                        detected_at=began + 1.0, healed_at=self.at)


def value_of(record: Record) -> Record:
    return json.loads(record["value"])


def edited(records: list[Record], key: str, change: Callable[[Record], object], nth: int = 0) -> None:
    """Changes the record that the nth change of a key has put."""
    found = [record for record in records if record.get("key") == key][nth]
    value = value_of(found)
    change(value)
    found["value"] = json.dumps(value)


def of_kind(records: list[Record], kind: Kind) -> Iterator[Record]:
    return (record for record in records if record["kind"] == kind)
