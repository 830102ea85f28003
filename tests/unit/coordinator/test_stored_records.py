"""What goes out of records as they are stored."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.coordinator.api import pages
from elastic_rl.coordinator.api.change_projector import ChangeProjector
from elastic_rl.coordinator.api.stored_records import kind_of
from elastic_rl.etcd.client import KeyValue, WatchEvent
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import Engine, Event, Operation, StepMetrics, Version

KEYS = Keys("j")
ODD = st.one_of(st.none(), st.booleans(), st.integers(), st.just(1 << 70), st.floats(), st.text(), st.just("\ud83d"),
                st.just([]), st.just({"a": [1]}))
PLACES = {KEYS.engine("e"): Engine, KEYS.operation("o"): Operation, KEYS.event("1"): Event,
          KEYS.step_metrics(3): StepMetrics, f"{KEYS.root}dcs/streams/policy/versions/0001": Version}


WHOLE: dict[str, dict[str, Any]] = {
    KEYS.event("1"): {"id": "1-a", "at": 0.0, "kind": "k", "subject": "s", "message": "m"}}
"""Records that their kind decodes, of which a part is replaced."""


def _records() -> st.SearchStrategy[tuple[str, bytes]]:
    def of(key: str) -> st.SearchStrategy[tuple[str, bytes]]:
        odd = st.fixed_dictionaries({}, optional={name: ODD for name in PLACES[key].model_fields})
        raw = st.one_of(odd.map(lambda fields: json.dumps({**WHOLE.get(key, {}), **fields}).encode()),
                        st.binary(max_size=20), st.sampled_from([b"[]", b"1e999", b'{"step": NaN}', b'{"x": 1e400}']))
        return raw.map(lambda found: (key, found))

    return st.sampled_from(sorted(PLACES)).flatmap(of)


def _refuse(text: str) -> Any:
    raise AssertionError(f"{text} is no JSON")


@settings(max_examples=seeds(200), deadline=None)
@given(st.lists(_records(), max_size=5))
def test_odd_record_leaves_every_answer_valid_with_records_of_its_kind(stored: list[tuple[str, bytes]]) -> None:
    """Listings have what the leader can read, and nothing else; the change stream has the same."""
    kvs = [KeyValue(key, raw, 1, n + 1, 1, 0) for n, (key, raw) in enumerate(stored)]
    readable = []
    for kv in kvs:
        try:
            PLACES[kv.key].decode(kv.value)
            readable.append(kv)
        except ValueError:
            pass
    found = json.loads(bytes(pages.page(pages.readable(kvs), None).body), parse_constant=_refuse)["items"]
    assert found == [fields for kv in readable if (fields := json.loads(kv.value))]
    assert all(math.isfinite(pages.created_at(kv)) for kv in kvs)
    for kv in kvs:
        changes = ChangeProjector(KEYS, "r").apply(WatchEvent("put", kv))
        assert bool(changes) == (kv in readable)
        assert all(json.loads(change.object or b"", parse_constant=_refuse) is not None for change in changes)


@pytest.mark.parametrize("key", [f"{KEYS.root}dcs/streams/policy/head", f"{KEYS.root}job", f"{KEYS.root}epoch", "x"])
def test_key_of_another_record_has_no_kind(key: str) -> None:
    assert kind_of(key) is None
