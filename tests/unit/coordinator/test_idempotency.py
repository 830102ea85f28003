"""Idempotency keys: which requests are the same, and which records are kept."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator.api import idempotency
from elastic_rl.coordinator.api.idempotency import Done
from elastic_rl.coordinator.api.idempotent import Created, carry_out
from elastic_rl.coordinator.problems import Problem
from elastic_rl.errors import EtcdUnavailable, OutcomeUnknown
from elastic_rl.etcd.keys import Keys

KEYS = Keys("j")


class AwayFromSecondRead:
    """An etcd that has no key, and that does not answer from the second read on."""

    reads = 0

    def get(self, key: str) -> None:
        self.reads += 1
        if self.reads > 1:
            raise EtcdUnavailable("no member answers")


@pytest.mark.parametrize("failure", [OutcomeUnknown("no member answers"), Problem(409, "conflict", "t", "d")])
def test_failed_change_is_reported_although_its_record_cannot_be_read(failure: Exception) -> None:
    def change(claim: idempotency.Claim | None) -> Created:
        raise failure

    ctx: Any = SimpleNamespace(keys=KEYS, replica=SimpleNamespace(
        election=SimpleNamespace(is_leader=True), etcd=AwayFromSecondRead()))
    request: Any = SimpleNamespace(headers={}, url=SimpleNamespace(path="/v1/x", query=""), method="POST",
                                   state=SimpleNamespace(caller=SimpleNamespace(name="ada")))
    with pytest.raises(type(failure)) as raised:
        carry_out(request, ctx, None, "k", change, dry_run=False)
    assert raised.value is failure


@given(st.lists(st.text()), st.lists(st.text()))
def test_digest_differs_unless_all_parts_are_equal(one: list[str], other: list[str]) -> None:
    assert (idempotency.digest(*one) == idempotency.digest(*other)) == (one == other)


def test_same_key_of_two_callers_is_two_keys() -> None:
    keys = {idempotency.claim(KEYS, caller, "k", "r", 1.0).key for caller in ("ada", "eve", "ad")}
    assert len(keys) == 3


@pytest.mark.parametrize("header", ["", " ", "a b", "ä", "k" * 201, "a\tb"])
def test_invalid_key_is_refused(header: str) -> None:
    with pytest.raises(Problem) as refused:
        idempotency.claim(KEYS, "ada", header, "r", 1.0)
    assert (refused.value.status, refused.value.kind) == (422, "invalid")


def test_record_names_the_request_and_its_outcome() -> None:
    claim = idempotency.claim(KEYS, "ada", "k", "r", 7.0)
    location = "/v1/jobs/j/operations/op-1"
    [op] = claim.ops(location)
    assert op.key == claim.key and Done.decode(op.data) == Done(request="r", location=location, at=7.0)


@given(st.lists(st.floats(0, 3 * idempotency.KEPT_S), max_size=60), st.integers(1, 40), st.floats(0, 1e6))
def test_trimming_deletes_records_of_a_day_ago_and_beyond_the_limit(ages: list[float], most: int, now: float) -> None:
    entries = [(f"k{n}", now - age) for n, age in enumerate(ages)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(idempotency, "MAX_RECORDS", most)
        gone = set(idempotency.outdated(entries, now))
    kept = [at for key, at in entries if key not in gone]
    assert len(kept) == min(most, sum(at >= now - idempotency.KEPT_S for _, at in entries))
    assert all(at >= now - idempotency.KEPT_S for at in kept)
    assert not kept or all(at <= min(kept) or at < now - idempotency.KEPT_S for key, at in entries if key in gone)
