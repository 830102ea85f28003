"""The pure parts of the interface for other programs: what is accepted, in which order shards are, the access file."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config, dcs
from elastic_rl.dcs import api
from elastic_rl.dcs.manifest import DTYPES, Slice, TensorEntry
from elastic_rl.dcs.publish import parts
from elastic_rl.dcs.publish.parts import Part
from elastic_rl.dcs.security import Security
from elastic_rl.dcs.service_access import ServiceAccess
from elastic_rl.errors import ConfigError, TensorMismatch
from elastic_rl.net.tls import TlsFolder

NAMES = st.text("abcdefgh.", min_size=1, max_size=3)
SHAPES = st.lists(st.integers(0, 3), max_size=3).map(tuple)
PLAIN = st.sampled_from(sorted(DTYPES.keys() - {"complex32", "float4_e2m1fn_x2"}))
TENSORS = st.dictionaries(NAMES, st.tuples(PLAIN, SHAPES), max_size=8)


def made(of: dict[str, tuple[str, tuple[int, ...]]]) -> dict[str, torch.Tensor]:
    return {name: torch.empty(shape, dtype=getattr(torch, dtype)) for name, (dtype, shape) in of.items()}


def entries(of: dict[str, tuple[str, tuple[int, ...]]]) -> list[TensorEntry]:
    return [TensorEntry(name, dtype, shape, ()) for name, (dtype, shape) in of.items()]


# -- what is published -------------------------------------------------------------------------------------------------
@settings(max_examples=seeds(40))
@given(TENSORS)
def test_plain_tensors_are_storable_as_mapping_and_as_pairs(of: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    tensors = made(of)
    for given_ in (tensors, tensors.items(), iter(tensors.items())):
        found = list(api.storable(given_))
        assert [name for name, _ in found] == list(tensors)
        assert all(tensor is tensors[name] for name, tensor in found)


class Sharded(torch.Tensor):
    """A tensor with the method that torch's DTensor has."""

    def to_local(self) -> torch.Tensor:
        return self


@pytest.mark.parametrize(("odd", "why"), [
    ([("a", torch.ones(1)), ("a", torch.ones(1))], "two tensors"), ([("", torch.ones(1))], "name of a tensor"),
    ([(3, torch.ones(1))], "name of a tensor"), ({"step": 7}, "int and no tensor"),
    ({"a": torch.ones(2, 2).to_sparse()}, "sparse"), ({"a": torch.ones(1, device="meta")}, "meta"),
    ({"a": torch.ones(1).as_subclass(Sharded)}, "DTensor")])
def test_tensor_that_cannot_be_stored_is_refused_with_its_reason(odd: api.Tensors, why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        list(api.storable(odd))


@pytest.mark.parametrize(("meta", "why"), [
    ({"run": 2 ** 100}, "no number of 64 bits"), ({"trace": "x"}, "no key for the meta"),
    ({"lr": math.nan}, "JSON"), ({"config": object()}, "JSON"), ({"weights": torch.ones(1)}, "JSON"),
    ({"text": "x" * 20_000}, "16384 are allowed"), ({"half": "\ud800"}, "surrogate")])
def test_meta_that_readers_could_not_get_is_refused(meta: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why) as caught:
        api._checked_meta(meta)
    assert "quotes" not in str(caught.value), "the caller writes no YAML"


# -- what is pulled into -----------------------------------------------------------------------------------------------
@settings(max_examples=seeds(100))
@given(TENSORS, TENSORS, st.booleans())
def test_tensors_match_a_version_exactly_when_each_has_its_dtype_and_shape(
        theirs: dict[str, tuple[str, tuple[int, ...]]], ours: dict[str, tuple[str, tuple[int, ...]]], strict: bool
        ) -> None:
    mixed = {**ours, **{name: theirs[name] for name in list(theirs)[::2]}}
    for here in (ours, mixed, theirs):
        fits = here.items() <= theirs.items() and (not strict or here.keys() == theirs.keys())
        try:
            api.require_match("policy/3", entries(theirs), made(here), strict=strict)
        except TensorMismatch as e:
            assert not fits
            odd = [n for n in here.keys() | theirs.keys() if here.get(n) != theirs.get(n)]
            assert any(name in e.message for name in odd)
        else:
            assert fits


@settings(max_examples=seeds(100))
@given(TENSORS, TENSORS)
def test_tensors_follow_a_version_exactly_when_they_are_the_same_model_s(
        theirs: dict[str, tuple[str, tuple[int, ...]]], ours: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    for here in (ours, {**ours, **theirs}, dict(list(theirs.items())[1:]), theirs):
        passed = list[str]()
        try:
            for name, _ in api.same_model("policy/3", theirs, made(here).items()):
                passed.append(name)
        except TensorMismatch:
            assert here != theirs
        else:
            assert here == theirs
        assert all(theirs.get(name) == here[name] for name in passed), "a tensor of another model was stored"


# -- the order of shards -----------------------------------------------------------------------------------------------
@settings(max_examples=seeds(100))
@given(st.lists(st.permutations(range(4)).flatmap(
    lambda order: st.integers(0, 4).map(lambda n: [i for i in order if i < n])), max_size=4))
def test_version_has_the_tensors_of_each_shard_after_those_before(orders: list[list[int]]) -> None:
    given_ = [Part(f"n{r}", "i", tuple((place, TensorEntry(f"r{r}.{place}", "uint8", (1,), (Slice(f"d{r}", place, 1),)))
                                       for place in order), {f"d{r}": 8} if order else {})
              for r, order in enumerate(orders)]
    manifest, _ = parts.merge(parts.in_order(given_))
    assert [t.name for t in manifest.tensors] == [f"r{r}.{p}" for r, order in enumerate(orders) for p in sorted(order)]


# -- the access file ---------------------------------------------------------------------------------------------------
def test_access_file_is_private_and_gives_back_settings_and_token(tmp_path: Path) -> None:
    cfg = config.parse({"job": "weights", "dcs": {"chunk_bytes": 1 << 20, "replicas": 2, "token_file": "/gone"},
                        "etcd": {"call_timeout_s": 2}})
    path = tmp_path / "access.json"
    ServiceAccess.of(cfg, ["127.0.0.1:2379"], Security("s3cret")).save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    found = ServiceAccess.read(path)
    assert (found.job, found.etcd_endpoints, found.security().token) == ("weights", ["127.0.0.1:2379"], "s3cret")
    assert found.config().dcs == cfg.dcs.model_copy(update={"token_file": ""}) and found.config().etcd == cfg.etcd
    assert "s3cret" not in repr(found)
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="640"):
        dcs.connect(path)


def test_access_file_names_the_certificate_of_its_host(tmp_path: Path) -> None:
    tls = TlsFolder(tmp_path)
    assert ServiceAccess.of(config.parse({}), [], Security(), tls).config().dcs.tls_key == str(tls.key)
    own = config.parse({"dcs": {"tls_cert": "/c", "tls_key": "/k", "tls_ca": "/a"}})
    assert ServiceAccess.of(own, [], Security(), tls).config().dcs == own.dcs


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"job": 3}', "\x00"])
def test_damaged_access_file_is_refused_with_how_to_write_it(tmp_path: Path, text: str) -> None:
    path = tmp_path / "access.json"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(ConfigError) as caught:
        dcs.connect(path)
    assert "versions access" in caught.value.hint


def test_access_of_a_newer_release_is_read(tmp_path: Path) -> None:
    path = tmp_path / "access.json"
    path.write_text(json.dumps({"job": "a", "etcd_endpoints": ["h:1"], "region": "eu"}))
    path.chmod(0o600)
    assert ServiceAccess.read(path).job == "a"
