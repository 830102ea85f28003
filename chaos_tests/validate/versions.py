"""I1 to I3 of the catalog of versions: replay checks of what etcd held. What an operator's recovery of the catalog
writes, while the catalog is suspended, is not judged."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from chaos_tests.event_log import Event
from chaos_tests.validate.replay import Checker, Step, Transaction, below, replay
from chaos_tests.validate.verdict import Violation
from elastic_rl.etcd.keys import Keys

_JOB = Keys("j")
_EPOCH, _CATALOG = below(_JOB.epoch()), below(_JOB.dcs_catalog())
_STREAMS, _PINS = below(_JOB.streams_prefix()), below(_JOB.pins_prefix("")).rstrip("/") + "/"
_OF_VERSION = re.compile(re.escape(_STREAMS) + r"([^/]+)/versions/(\d+)")
_OF_HEAD, _OF_NEXT = (re.compile(re.escape(_STREAMS) + rf"([^/]+)/{name}") for name in ("head", "next"))
_OF_PIN = re.compile(re.escape(_PINS) + r"([^/]+)/(\d+)/.+")

STAGING, COMMITTED, RELEASING, RELEASED, ABORTED = "staging", "committed", "releasing", "gone", "aborted"
_ALLOWED = {STAGING: {COMMITTED, ABORTED}, COMMITTED: {COMMITTED, RELEASING, RELEASED}, RELEASING: {RELEASED},
            RELEASED: set[str](), ABORTED: set[str]()}
_FIXED = ("stream", "number", "epoch", "created_at", "meta")
_FIXED_BY_COMMIT = ("manifest", "nbytes", "committed_at")


def _transactions(events: Iterable[Event]) -> Iterator[Transaction]:
    """Those of catalogs that are not, and were not, suspended, with the steps of suspended ones left out."""
    relevant = (_EPOCH, below(_JOB.root + "dcs/"))
    for found in replay(events, lambda key: below(key).startswith(relevant)):
        judged = list[Step]()
        for step in found.steps:
            catalog = step.scope + _CATALOG
            if not found.before(catalog).get("suspended") and not found.after.get(catalog).get("suspended"):
                judged.append(step)
        yield Transaction(found.revision, judged, found.after, found.absent_before, found.after_gap)


def _versions(found: Transaction) -> Iterator[tuple[Step, str, int]]:
    for step in found.steps:
        if match := _OF_VERSION.fullmatch(step.name):
            yield step, match[1], int(match[2])


def _catalog_deleted(found: Transaction, scope: str) -> bool:
    """Whether the job was taken off its cluster with all that it had."""
    step = found.step(scope + _CATALOG)
    return step is not None and not step.change.put


def states(events: Iterable[Event]) -> Iterator[Violation]:
    """A version goes STAGING → COMMITTED → GONE, or STAGING → ABORTED, and in no other way; what its publisher said of
    it does not change; only the record of one that is GONE or ABORTED is deleted."""
    for found in _transactions(events):
        for step, _, _ in _versions(found):
            old, new = step.old, step.new
            if not step.change.put:
                if old and _ALLOWED.get(old["state"]) and not _catalog_deleted(found, step.scope):
                    yield Violation("I3", f"{step.at()} was deleted while it was {old['state']}")
            elif step.created and new.get("state") != STAGING:
                yield Violation("I3", f"{step.at()} begins as {new.get('state')}")
            elif old and new:
                if new["state"] not in _ALLOWED.get(old["state"], ()):
                    yield Violation("I3", f"{step.at()} went from {old['state']} to {new['state']}")
                fixed = _FIXED if old["state"] == STAGING else _FIXED + _FIXED_BY_COMMIT
                if changed := [name for name in fixed if old.get(name) != new.get(name)]:
                    yield Violation("I3", f"{step.at()} has another {', '.join(changed)} than before")


def numbers(events: Iterable[Event]) -> Iterator[Violation]:
    """Numbers of a stream only grow and none is used twice: each begin takes the next one, in one transaction."""
    highest = dict[tuple[str, str], int]()
    for found in _transactions(events):
        for step in found.steps:
            if (match := _OF_NEXT.fullmatch(step.name)) is None:
                continue
            if not step.change.put:
                if not _catalog_deleted(found, step.scope):
                    yield Violation("I3", f"{step.at()} was deleted")
                highest = {k: n for k, n in highest.items() if k[0] != step.scope}
                continue
            number, stream = int(step.change.value), (step.scope, match[1])
            if number <= highest.get(stream, 0):
                yield Violation("I3", f"{step.at()} is {number} after {highest[stream]}")
            highest[stream] = max(number, highest.get(stream, 0))
            if found.step(Keys(step.job).version(match[1], number)) is None:
                yield Violation("I3", f"{step.at()} took number {number} without its version")
        for step, stream_name, number in _versions(found):
            counted = found.step(Keys(step.job).stream_next(stream_name))
            if step.created and (counted is None or counted.change.value != str(number)):
                yield Violation("I3", f"{step.at()} was begun with a number that the stream did not give it")


def heads(events: Iterable[Event]) -> Iterator[Violation]:
    """The head of a stream never goes back, and its record is that of a committed version."""
    last = dict[str, int]()
    for found in _transactions(events):
        for step in found.steps:
            if (match := _OF_HEAD.fullmatch(step.name)) is None:
                continue
            if not step.change.put:
                if not _catalog_deleted(found, step.scope):
                    yield Violation("I3", f"{step.at()} was deleted")
                last.pop(step.change.key, None)
                continue
            number = int(step.new.get("number", 0))
            if number < last.get(step.change.key, 0):
                yield Violation("I3", f"{step.at()} went back from {last[step.change.key]} to {number}")
            last[step.change.key] = max(number, last.get(step.change.key, 0))
            version = found.after.present.get(Keys(step.job).version(match[1], number))
            if step.new.get("state") != COMMITTED:
                yield Violation("I2", f"{step.at()} names version {number}, which is {step.new.get('state')}")
            elif version is not None and version.value != step.change.value:
                yield Violation("I2", f"{step.at()} differs from the record of version {number}")
        for step, stream, number in _versions(found):
            head = Keys(step.job).stream_head(stream)
            if (step.new.get("state") != COMMITTED and found.after.get(head).get("number") == number
                    and not _catalog_deleted(found, step.scope)):
                yield Violation("I3", f"{step.at()} is the head, and was made {step.new.get('state', 'absent')}")


def commits(events: Iterable[Event]) -> Iterator[Violation]:
    """A version is committed in one transaction with its head, its replica sets and the end of its publisher's key,
    which was there until then; every part is on a node that is registered; the catalog counts the commit."""
    for found in _transactions(events):
        committed = dict[str, int]()
        for step, stream, number in _versions(found):
            if step.new.get("state") != COMMITTED or step.old.get("state") != STAGING:
                continue
            keys = Keys(step.job)
            committed[step.scope] = committed.get(step.scope, 0) + 1
            yield from (Violation("I2", f"{step.at()} was committed {why}")
                        for why in _why_incomplete(found, step.new, keys, stream, number))
        for scope in committed:
            counted = found.step(scope + _CATALOG)
            if counted is None or counted.old and counted.new.get("commits") != counted.old.get("commits", 0) + 1:
                yield Violation("I2", f"revision {found.revision}: a commit that {scope}{_CATALOG} does not count")
        for step in found.steps:
            if step.name == _CATALOG and step.old and step.new:
                if step.old["id"] != step.new["id"]:
                    yield Violation("I3", f"{step.at()} became another catalog")
                elif step.new.get("commits", 0) < step.old.get("commits", 0):
                    yield Violation("I3", f"{step.at()} counts fewer commits than before")


def _why_incomplete(found: Transaction, version: dict[str, Any], keys: Keys, stream: str, number: int
                    ) -> Iterator[str]:
    if not version.get("manifest"):
        yield "without a manifest"
    if found.step(keys.stream_head(stream)) is None:
        yield "without becoming the head"
    owner = found.step(keys.staging_owner(stream, number))
    if owner is None or owner.change.put or keys.staging_owner(stream, number) in found.absent_before:
        yield "after the end of its publisher's lease"
    sets = found.step(keys.replica_sets(stream, number))
    if sets is None or not sets.change.put:
        yield "without its replica sets"
        return
    if not sets.change.omitted_bytes:
        parts = sets.new.get("parts", [])
        if not parts or not all(parts):
            yield f"although not all of its parts are stored: {parts}"
        if lost := sorted({node for part in parts for node in part if keys.dcs_node(node) in found.after.absent}):
            yield f"on nodes that are gone: {', '.join(lost)}"


def epochs(events: Iterable[Event]) -> Iterator[Violation]:
    """A version is begun and committed in the epoch that it names, which is the run's present one."""
    for found in _transactions(events):
        for step, _, _ in _versions(found):
            begun = step.created or step.old.get("state") == STAGING and step.new.get("state") == COMMITTED
            epoch = found.before(step.scope + _EPOCH).get("number")
            if begun and epoch is not None and step.new.get("epoch") != epoch:
                yield Violation("I1", f"{step.at()} became {step.new.get('state')} under epoch {step.new.get('epoch')} "
                                      f"in epoch {epoch}")


def pins(events: Iterable[Event]) -> Iterator[Violation]:
    """Only a committed version is pinned, and none is released while somebody pins it."""
    for found in _transactions(events):
        for step, stream, number in _versions(found):
            if step.new.get("state") == RELEASED and (
                    held := found.after.under(Keys(step.job).pins_prefix(stream, number))):
                yield Violation("I3", f"{step.at()} was released while {held[0]} pinned it")
        for step in found.steps:
            if (match := _OF_PIN.fullmatch(step.name)) is not None and step.change.put:
                key = Keys(step.job).version(match[1], int(match[2]))
                state = found.after.get(key).get("state")
                if key in found.after.absent or state not in (None, COMMITTED):
                    yield Violation("I3", f"{step.at()} pins a version that is {state or 'deleted'}")


CHECKERS: tuple[tuple[str, Checker], ...] = (
    ("I3", states), ("I3", numbers), ("I3", heads), ("I2", commits), ("I1", epochs), ("I3", pins))
