"""The staleness that a step states is that of its oldest sample, and engines had what samples name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from chaos_tests.event_log import Event, Kind
from chaos_tests.validate.judge import broken
from chaos_tests.validate.weights import Checksums, StatedStaleness, VersionsOfSamples
from elastic_rl.etcd.keys import Keys

JOB = Keys("job")


def step(made: int, named: list[int], staleness: int, **more: Any) -> Event:
    return {"kind": Kind.STEP, "at": float(made), "step": made - 1, "policy_version": made, "sample_versions": named,
            "staleness": staleness, "loss": 0.1, "logprob_diff_max": None, **more}


def stated(*steps: Event) -> list[str]:
    return [violation.what for violation in broken(steps, [StatedStaleness])]


BEGIN = (step(2, [1], 0), step(3, [2], 0), step(4, [3], 0))


@pytest.mark.parametrize(("last", "sound"), [
    (step(5, [4], 0), True), (step(5, [3, 4], 1), True), (step(5, [2, 4], 2), True), (step(5, [3], 0), False),
    (step(5, [2, 4], 1), False), (step(5, [4], 1), False), (step(7, [6], 0), True), (step(7, [3], 1), True),
    (step(7, [3], 3), True), (step(7, [3], 0), False), (step(7, [3], 4), False), (step(4, [3], 0), False),
    (step(3, [2], 0), False), (step(5, [], 0), True), (step(5, [], 0, logprob_diff_max=1e-7), False)],
    ids=["newest", "one behind", "two behind", "one behind and unsaid", "two behind and one said", "said and is not",
         "published again", "sample of before it was published again", "counted with it", "behind and unsaid",
         "more than there are", "no newer version", "an older version", "its loop had ended", "no version"])
def test_staleness_is_that_of_the_oldest_sample(last: Event, sound: bool) -> None:
    assert (stated(*BEGIN, last) == []) == sound


def test_one_odd_version_is_one_violation() -> None:
    assert len(stated(*BEGIN, step(4, [3], 0), step(6, [5], 0), step(7, [6], 0))) == 1


def engine(revision: int, version: int, at: float, pool: str = "rollout") -> Event:
    return {"kind": Kind.CHANGE, "at": at, "revision": revision, "put": True, "create": 1, "key": JOB.engine("e"),
            "value": json.dumps({"id": "e", "pool": pool, "state": "ready", "version": version})}


def version(revision: int, number: int, manifest: str) -> Event:
    return {"kind": Kind.CHANGE, "at": 1.0, "revision": revision, "put": True, "create": revision,
            "key": JOB.version("policy", number),
            "value": json.dumps({"stream": "policy", "number": number, "state": "committed", "manifest": manifest})}


def with_checksum(event: Event, checksum: str) -> Event:
    return {**event, "value": json.dumps({**json.loads(event["value"]), "checksum": checksum})}


@pytest.mark.parametrize(("manifests", "checksums", "sound"), [
    ("abcd", "wxyz", True), ("abcd", "wwww", False), ("abca", "wxyw", True), ("aaaa", "wwww", True), ("ab", "ww", True),
    ("abc", "www", False)],
    ids=["each its own", "one for all", "the same weights again", "weights that do not change",
         "one manifest cut in two ways", "more than two"])
def test_versions_of_different_weights_have_different_checksums(manifests: str, checksums: str, sound: bool) -> None:
    """Also where one engine is all that there is."""
    events = [event for n, (manifest, checksum) in enumerate(zip(manifests, checksums, strict=True), 1)
              for event in (version(2 * n, n, manifest), with_checksum(engine(2 * n + 1, n, 1.0), checksum))]
    assert (broken(events, [Checksums]) == []) == sound


def had(*events: Event) -> list[str]:
    return [violation.what for violation in broken(events, [VersionsOfSamples])]


def test_versions_of_samples_were_in_an_engine_before() -> None:
    assert had(engine(1, 4, 1.0), engine(2, 5, 2.0), step(6, [4, 5], 1)) == []
    assert had(step(6, [4], 1), engine(1, 4, 20.0)) == [], "the observer is late"
    assert len(had(engine(1, 4, 1.0), step(6, [5], 0))) == 1
    assert len(had(engine(1, 4, 1.0), engine(2, 5, 200.0), step(6, [5], 0))) == 1, "it had it long afterwards"
    assert had(engine(1, 4, 1.0), step(6, [3], 2)) == [], "before the log began"
    assert had(step(6, [5], 0)) == [], "there are no engines"
    assert had(engine(1, 4, 1.0), {"kind": Kind.GAP, "first": 2, "last": 9}, step(6, [5], 0)) == []


def test_version_of_another_stream_is_none_of_the_policy() -> None:
    judge_pool = {"kind": Kind.CHANGE, "at": 0.0, "revision": 1, "put": True, "create": 1,
                  "key": JOB.pool_spec("genrm"), "value": json.dumps({"name": "genrm", "stream": "judge"})}
    assert len(had(judge_pool, engine(2, 4, 1.0), engine(3, 5, 2.0, pool="genrm"), step(6, [5], 0))) == 1
