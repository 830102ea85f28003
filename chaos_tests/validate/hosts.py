"""Whether a run on test hosts kept the rules. A pure check of its event log."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import groupby

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.observation import Change
from chaos_tests.traffic import cluster_changes
from chaos_tests.traffic.cluster_changes import wanted_of_host
from chaos_tests.traffic.driver_writes import PREFIX, Driver
from chaos_tests.traffic.pool_changes import POOL
from chaos_tests.validate import assignments, leadership
from chaos_tests.validate.verdict import Violation
from elastic_rl.etcd.keys import ClusterKeys, Keys

_LEAST_ANSWERS = 20
_CHANGE = ("revision", "put", "key", "create", "value")
_OPERATION = ("client", "key", "call", "argument", "began_s", "ended_s", "result")


def check(log: Iterable[Event], *, cluster: str) -> list[Violation]:
    """What is wrong. ``cluster``: name of the cluster that the run was on."""
    records = defaultdict[str, list[Event]](list)
    for event in log:
        records[event["kind"]].append(event)
    return [Violation(rule, what) for rule, what in _found(records, cluster)]


def _found(records: dict[str, list[Event]], cluster: str) -> Iterator[tuple[str, str]]:
    yield from _faults(records)
    changes = [Change(**{name: event[name] for name in _CHANGE}) for event in records[Kind.CHANGE]]
    history = [Operation(**{name: event[name] for name in _OPERATION}) for event in records[Kind.OPERATION]]
    end = records[Kind.END]
    if not end or end[-1]["aborted"]:
        yield "run", f"it was aborted: {end[-1]['aborted'] if end else 'it has no end'}"
    if sum(operation.ended_s is not None for operation in history) < _LEAST_ANSWERS:
        yield "run", f"the clients had fewer than {_LEAST_ANSWERS} answers"
    job = _job_of(changes)
    if not job:
        yield "run", "the run has written nothing"
        return
    keys, cluster_keys = Keys(job), ClusterKeys(cluster)
    verdict = leadership.check(changes, keys, POOL, cluster=cluster)
    yield from (("I1", fault) for fault in verdict.faults)
    yield from (("I1", problem) for problem in assignments.check(changes, cluster_keys))
    drivers = [Driver(**json.loads(c.value)) for c in changes if c.put and c.key.startswith(PREFIX)]
    yield from (("I1", problem) for problem in assignments.superseded([d for d, _ in groupby(drivers)]))
    observed: dict[str, dict[int, int]] = {POOL: verdict.desired}
    of_specs = cluster_keys.host_specs_prefix()
    for key in {operation.key for operation in history} - {POOL}:
        observed[key] = {0: cluster_changes.USED} | {
            c.revision: wanted_of_host(json.loads(c.value)) for c in changes if c.put and c.key == of_specs + key}
    yield from (("I1", problem) for problem in cluster_changes.violations(history, observed))
    yield from (("I8", f"{event['what']} is left") for event in records[Kind.LEFTOVER])


def _job_of(changes: Iterable[Change]) -> str:
    return next((c.key.removeprefix(PREFIX).partition("/")[0] for c in changes if c.key.startswith(PREFIX)), "")


def _faults(records: dict[str, list[Event]]) -> Iterator[tuple[str, str]]:
    """What was planned happened, was noticed, and is over."""
    planned = Counter(name for event in records[Kind.RUN] for strike in event["schedule"]["strikes"]
                      for name in strike["faults"])
    happened = Counter(event["name"] for event in records[Kind.FAULT] if event["witness"])
    for name, times in sorted((planned - happened).items()):
        problems = [event["problem"] for event in records[Kind.FAULT] if event["name"] == name]
        yield "run", f"{name} was planned, and {times} of {planned[name]} did not happen: {'; '.join(problems)}"
    for event in records[Kind.FAULT]:
        moments = [event[moment] if event[moment] is not None else math.nan
                 for moment in ("injected_at", "detected_at", "healed_at")]
        if event["witness"] and not moments[0] <= moments[1] <= moments[2]:
            yield "I10", f"{event['name']} of {event['target']}: {event['problem']}"
