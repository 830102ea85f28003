"""Decoding of records: what cannot be read is reported and skipped, what a newer release wrote is kept."""

from __future__ import annotations

import json
import re
from typing import Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.etcd.decoding import RangeDecoder, decode, decode_all
from elastic_rl.etcd.record import may_be_odd
from elastic_rl.etcd.records import Engine, EngineState, OperationState
from elastic_rl.etcd.transaction import KeyValue


def kv(key: str, value: bytes, mod: int = 1) -> KeyValue:
    return KeyValue(key, value, 1, mod, 1, 0)


def engine(engine_id: str) -> Engine:
    return Engine(id=engine_id, pool="p", state=EngineState.READY, epoch=1)


def test_unreadable_record_is_reported_under_its_key() -> None:
    unreadable: dict[str, str] = {}
    assert decode(kv("k", b'{"id": "e", "pool": "p", "epoch": 1}'), Engine, unreadable) is None
    assert unreadable == {"k": "no Engine: state: Field required"}


@given(st.binary(max_size=40))
def test_unreadable_bytes_do_not_affect_other_records(junk: bytes) -> None:
    unreadable: dict[str, str] = {}
    found = decode_all([kv("a", engine("a").encode()), kv("junk", junk), kv("b", engine("b").encode())], Engine,
                       unreadable)
    assert [record.id for record, _ in found] == ["a", "b"] and list(unreadable) == ["junk"]


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "-1e999", str(1 << 64), "9" * 400, "-9" + "9" * 19])
@pytest.mark.parametrize("field", ['"applied_version": %s', '"owner": {"x": [%s]}', '"unknown": %s'])
def test_number_that_json_or_64_bits_lack_makes_a_record_unreadable(number: str, field: str) -> None:
    unreadable: dict[str, str] = {}
    raw = engine("a").encode()[:-1] + b", " + (field % number).encode() + b"}"
    assert decode(kv("k", raw), Engine, unreadable) is None and "k" in unreadable


@pytest.mark.parametrize("value", [(1 << 64) - 1, 1e308, 1e-300, "9" * 64, "NaN", "1e999", "a\\1e999"])
def test_record_with_plain_values_that_look_odd_is_read(value: object) -> None:
    raw = engine("a").encode()[:-1] + b', "unknown": ' + json.dumps(value).encode() + b"}"
    assert decode(kv("k", raw), Engine, {}) == engine("a")


def test_value_of_a_newer_release_survives_a_rewrite() -> None:
    raw = engine("e").encode().replace(b'"ready"', b'"hibernating"')
    found = decode(kv("e", raw), Engine, {})
    assert found is not None and found.state == "hibernating" and not found.state.known
    assert Engine.decode(found.replace(version=3).encode()).state == "hibernating"
    assert EngineState.READY.known and not any(found.state is state for state in EngineState)
    assert not OperationState("paused").ended


def test_record_under_another_key_than_its_own_is_unreadable() -> None:
    unreadable: dict[str, str] = {}
    decoder = RangeDecoder(Engine, lambda e: f"engines/{e.id}")
    found = decoder.decode([kv("engines/a", engine("a").encode()), kv("engines/b", engine("x").encode())], unreadable)
    assert [e.id for e in found] == ["a"] and unreadable == {"engines/b": "its record belongs under engines/x"}


def test_record_is_decoded_again_only_when_its_value_has_changed() -> None:
    decoded: list[bytes] = []

    class Counting(Engine):
        @classmethod
        def decode(cls, raw: bytes) -> Self:
            decoded.append(raw)
            return super().decode(raw)

    decoder = RangeDecoder(Counting)
    bad, unreadable = b"junk", dict[str, str]()
    for mod in (1, 1, 2):
        assert len(decoder.decode([kv("a", engine("a").encode(), mod=mod), kv("b", bad)], unreadable)) == 1
    assert len(decoded) == 2 and list(unreadable) == ["b"]
    decoder.decode([kv("a", engine("a").encode(), mod=2)], unreadable)
    assert len(decoded) == 2
    decoder.decode([kv("a", engine("a").encode(), mod=2), kv("b", bad)], unreadable)
    assert len(decoded) == 3, "a key that was gone is not remembered"


def test_record_of_a_restored_etcd_is_decoded_though_its_revision_is_known() -> None:
    decoder = RangeDecoder(Engine)
    assert [e.id for e in decoder.decode([kv("a", engine("before").encode(), mod=7)], {})] == ["before"]
    assert [e.id for e in decoder.decode([kv("a", engine("restored").encode(), mod=7)], {})] == ["restored"]


@given(st.text("NaInfity-+eE.0123456789,", max_size=40))
def test_numbers_that_may_be_odd_are_found_wherever_they_are(text: str) -> None:
    pattern = rb"NaN|Infinity|[eE]\+?[0-9]{3}|[0-9]{19}"
    assert may_be_odd(text.encode()) == bool(re.search(pattern, text.encode()))
    assert may_be_odd(f"[{text}NaN".encode()) and may_be_odd(f"1E+{text}E+123".encode())
    assert may_be_odd(f"{text}{10 ** 18}{text}".encode())
