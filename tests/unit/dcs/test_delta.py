"""The delta codec: what goes in comes out, and malformed deltas are rejected. When deltas are requested."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.dcs.codecs import delta
from elastic_rl.dcs.codecs.digests import digest_of
from elastic_rl.dcs.fetch.delta_policy import DeltaPolicy, Outcome
from elastic_rl.dcs.manifest import Packer
from elastic_rl.errors import ChunkCorrupt

ANY = 1000.0
"""No limit: the header alone is many times the shortest chunk."""
ITEMSIZES = st.sampled_from([1, 2, 4, 8])


@st.composite
def changes(draw: st.DrawFn) -> tuple[bytes, bytes, int]:
    """(base, new, itemsize): some elements of random bytes changed, few or many, in runs or alone."""
    itemsize = draw(ITEMSIZES)
    elements = draw(st.integers(1, 3000))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    base = rng.integers(0, 256, elements * itemsize, dtype=np.uint8)
    new = base.copy()
    for _ in range(draw(st.integers(0, 40))):
        start = draw(st.integers(0, elements - 1)) * itemsize
        length = draw(st.sampled_from([1, itemsize, 5 * itemsize]))
        new[start:start + length] = rng.integers(0, 256, len(new[start:start + length]), dtype=np.uint8)
    return base.tobytes(), new.tobytes(), itemsize


def applied(encoded: bytes, base: bytes) -> bytes:
    out = bytearray(len(base))
    delta.decode(encoded, memoryview(base), memoryview(out))
    return bytes(out)


@given(changes())
def test_delta_round_trips_and_is_idempotent(case) -> None:
    base, new, itemsize = case
    encoded = delta.encode(memoryview(base), memoryview(new), itemsize, max_ratio=ANY)
    assert encoded is not None
    assert applied(encoded, base) == new
    assert applied(encoded, new) == new


@given(changes(), st.floats(0.01, 1.0))
def test_delta_is_never_larger_than_its_limit(case, ratio: float) -> None:
    base, new, itemsize = case
    encoded = delta.encode(memoryview(base), memoryview(new), itemsize, max_ratio=ratio)
    assert encoded is None or len(encoded) <= ratio * len(new)


@given(changes(), st.data())
def test_malformed_delta_is_rejected_or_stays_within_its_chunk(case, data) -> None:
    base, new, itemsize = case
    encoded = delta.encode(memoryview(base), memoryview(new), itemsize, max_ratio=ANY)
    assert encoded is not None
    broken = bytearray(encoded)
    if data.draw(st.booleans()):
        broken[data.draw(st.integers(0, len(broken) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        broken = broken[:data.draw(st.integers(0, len(broken) - 1))]
    fence = b"fence" * 10
    memory = bytearray(fence + bytes(len(base)) + fence)
    try:
        delta.decode(bytes(broken), memoryview(base), memoryview(memory)[len(fence):-len(fence)])
    except ChunkCorrupt:
        pass
    assert memory[:len(fence)] == fence and memory[-len(fence):] == fence, "it wrote outside of the chunk"


@pytest.mark.parametrize("gap", [0, 1, 254, 255, 256, 70_000])
def test_gaps_of_any_length_round_trip(gap: int) -> None:
    base = np.zeros(100_000, np.uint16)
    new = base.copy()
    new[gap] = 7
    new[-1] = 9
    encoded = delta.encode(base.view(np.uint8).data, new.view(np.uint8).data)
    assert encoded is not None and applied(encoded, base.tobytes()) == new.tobytes()


def test_delta_of_two_percent_of_bf16_takes_a_thirtieth() -> None:
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 16, 1 << 20, dtype=np.uint16)
    new = base.copy()
    new[rng.choice(len(new), len(new) // 50, replace=False)] ^= 1
    encoded = delta.encode(base.view(np.uint8).data, new.view(np.uint8).data)
    assert encoded is not None and len(encoded) * 30 < new.nbytes


@pytest.mark.parametrize("base, new", [(b"", b""), (b"ab", b"abcd"), (b"abc", b"abd")])
def test_chunks_of_other_lengths_have_no_delta(base: bytes, new: bytes) -> None:
    assert delta.encode(memoryview(base), memoryview(new)) is None


def test_bases_are_the_chunks_at_the_same_place_of_an_equal_layout() -> None:
    def manifest(seed: int, *, shape: tuple[int, ...] = (64,)):
        packer = Packer(256)
        packer.add("same", "uint8", (200,))
        packer.add("moves", "uint8", shape)
        packer.add("more", "uint8", (300,))
        return packer.manifest([digest_of(b"first"), *(digest_of(f"{i}-{seed}".encode())
                                                       for i in range(1, len(packer.sizes)))])

    old, new = manifest(1), manifest(2)
    chunks_old, chunks_new = list(old.chunks), list(new.chunks)
    assert delta.bases(old, new) == dict(zip(chunks_new[1:], chunks_old[1:], strict=True))
    assert delta.bases(old, old) == {}
    other = manifest(3, shape=(65,))
    assert set(delta.bases(old, other)) <= set(list(other.chunks)[2:]), "a tensor of another shape has no base"


def test_densely_changed_chunk_is_not_compared_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    base = rng.standard_normal(1 << 20).astype(np.float32)
    monkeypatch.setattr(delta, "_changes", lambda *_: pytest.fail("all of it was compared"))
    assert delta.encode(base.view(np.uint8).data, (base * 1.001).view(np.uint8).data) is None


@pytest.mark.parametrize("fraction", [0.0, 0.01, 0.2])
def test_sampling_does_not_reject_a_delta_that_is_worth_it(fraction: float) -> None:
    rng = np.random.default_rng(1)
    base = rng.integers(0, 1 << 16, 1 << 21, dtype=np.uint16)
    new = base.copy()
    new[rng.random(len(new)) < fraction] ^= 1
    encoded = delta.encode(base.view(np.uint8).data, new.view(np.uint8).data)
    assert encoded is not None and applied(encoded, base.tobytes()) == new.tobytes()


# -- when deltas are requested -----------------------------------------------------------------------------------------
MIB = 1 << 20


def recorded(policy: DeltaPolicy, stream: str, outcome: Outcome, seconds: float, count: int = 20) -> DeltaPolicy:
    for _ in range(count):
        policy.record(stream, outcome, MIB, seconds)
    return policy


def uses(policy: DeltaPolicy, stream: str, count: int = 640) -> int:
    return sum(policy.use(stream) for _ in range(count))


def test_delta_is_requested_until_its_cost_is_known() -> None:
    policy = recorded(DeltaPolicy(), "policy", Outcome.DENSE, 0.001)
    assert uses(policy, "policy") == 640
    recorded(policy, "policy", Outcome.DELTA, 9.0, count=7)
    assert policy.use("policy")


def test_delta_is_requested_while_it_is_cheaper_than_the_chunk() -> None:
    policy = recorded(DeltaPolicy(), "policy", Outcome.DENSE, 0.010)
    assert uses(recorded(policy, "policy", Outcome.DELTA, 0.004), "policy") == 640


def test_delta_that_costs_more_than_the_link_is_only_probed() -> None:
    policy = recorded(DeltaPolicy(), "policy", Outcome.DENSE, 0.001)
    assert uses(recorded(policy, "policy", Outcome.DELTA, 0.008), "policy") == 10


def test_streams_are_judged_apart() -> None:
    policy = recorded(DeltaPolicy(), "trainer_state", Outcome.REFUSED, 0.001)
    recorded(policy, "policy", Outcome.DELTA, 0.0005)
    assert uses(policy, "trainer_state") == 10 and uses(policy, "policy") == 640


def test_delta_is_used_again_when_the_link_becomes_slow() -> None:
    policy = recorded(DeltaPolicy(), "policy", Outcome.DENSE, 0.001)
    assert uses(recorded(policy, "policy", Outcome.DELTA, 0.008), "policy") == 10
    assert uses(recorded(policy, "policy", Outcome.DENSE, 0.100), "policy") == 640


def test_number_of_streams_is_bounded() -> None:
    policy = DeltaPolicy()
    for i in range(1000):
        recorded(policy, f"s{i}", Outcome.REFUSED, 0.001, count=1)
    assert len(policy._streams) <= 64
