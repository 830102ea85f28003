"""I1 of the fencing tokens: epochs, generations of drivers and assignments, terms, formations and restarts only grow,
and what names one was written while it was the present one. Replay checks of what etcd held."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from chaos_tests.event_log import Event
from chaos_tests.validate.replay import Checker, below, replay
from chaos_tests.validate.verdict import Violation
from elastic_rl.etcd.keys import ClusterKeys, Keys

_JOB, _CLUSTER = Keys("j"), ClusterKeys("c")
_NUMBERED = (below(_JOB.epoch()), below(_JOB.driver()), below(_JOB.actor_term()))
_EPOCH = below(_JOB.epoch())
_FORMATIONS, _RESTARTS = below(_JOB.formation("")), below(_JOB.restarts_prefix())
_ASSIGNMENTS, _RUN_STATUSES = below(_CLUSTER.assignments_prefix()), below(_CLUSTER.run_statuses_prefix())


def tokens(events: Iterable[Event]) -> Iterator[Violation]:
    """The epoch, the driver's generation and the actor's term count up by one with each put, over the whole run."""
    last = dict[str, int]()
    for found in replay(events, lambda key: below(key) in _NUMBERED):
        for step in found.steps:
            key, before = step.change.key, last.get(step.change.key)
            if not step.change.put:  # with the job: its keys are deleted together
                last.pop(key, None)
                continue
            if (number := step.new.get("number")) is None:
                continue
            if before is not None and step.before is None and not step.created:  # after a gap
                if number <= before:
                    yield Violation("I1", f"{step.at()} is {number} after {before}")
            elif before is not None and number != before + 1:
                yield Violation("I1", f"{step.at()} is {number} after {before}")
            elif before is None and step.created and number != 1:
                yield Violation("I1", f"{step.at()} begins with {number}")
            last[key] = number


def formations(events: Iterable[Event]) -> Iterator[Violation]:
    """A trainer group's formation is of the present epoch, and no formation is deleted while its job is there: its
    number is the version of its key."""
    for found in replay(events, lambda key: below(key) == _EPOCH or below(key).startswith(_FORMATIONS)):
        for step in found.steps:
            if not step.name.startswith(_FORMATIONS):
                continue
            epoch = found.before(step.scope + _EPOCH).get("number")
            if not step.change.put:
                if found.after.get(step.scope + _EPOCH):
                    yield Violation("I1", f"{step.at()} was deleted, so that its numbers are given out again")
            elif epoch is not None and step.new and step.new["epoch"] != epoch:
                yield Violation("I1", f"{step.at()} of epoch {step.new['epoch']} was written in epoch {epoch}")


def restarts(events: Iterable[Event]) -> Iterator[Violation]:
    """Each restart request of a target has the next number; what was carried out stays so, and none is carried out that
    was not requested."""
    for found in replay(events, lambda key: below(key).startswith(_RESTARTS)):
        for step in found.steps:
            old, new = step.old, step.new
            if not new:
                continue
            if new.get("observed_generation", 0) > new["generation"]:
                yield Violation("I1", f"{step.at()}: request {new['observed_generation']} of {new['generation']} was "
                                      "carried out")
            if old and not 0 <= new["generation"] - old["generation"] <= 1:
                yield Violation("I1", f"{step.at()} went from request {old['generation']} to {new['generation']}")
            if old and new.get("observed_generation", 0) < old.get("observed_generation", 0):
                yield Violation("I1", f"{step.at()}: request {old['observed_generation']} is open again")


def assignments(events: Iterable[Event]) -> Iterator[Violation]:
    """A singleton has one key, whose version is its generation: the key is never deleted, or a generation would be
    given out twice. The run's status is written by the holder of the present generation alone."""
    generation = dict[str, int]()
    for found in replay(events, lambda key: below(key).startswith((_ASSIGNMENTS, _RUN_STATUSES))):
        if found.after_gap:
            generation.clear()
        before = dict(generation)
        for step in found.steps:
            key = step.change.key
            if step.name.startswith(_ASSIGNMENTS):
                if not step.change.put:
                    yield Violation("I1", f"{step.at()} was deleted, so that its generations are given out again")
                    generation.pop(key, None)
                elif step.created:
                    generation[key] = 1
                elif step.before is not None and key in generation:
                    generation[key] += 1
                else:  # its past is unseen, and with it its generation
                    generation.pop(key, None)
        for step in found.steps:
            if step.name.startswith(_RUN_STATUSES) and (written := step.new.get("generation", 0)):
                job = step.name.removeprefix(_RUN_STATUSES)
                now = before.get(f"{step.scope}{_ASSIGNMENTS}driver/{job}")
                if now is not None and written != now:
                    yield Violation("I1", f"{step.at()} was written under generation {written} in generation {now}")


CHECKERS: tuple[tuple[str, Checker], ...] = (
    ("I1", tokens), ("I1", formations), ("I1", restarts), ("I1", assignments))
