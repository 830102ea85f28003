"""When frames leave a link that is late, lossy or slow."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.host.test_hosts.impaired_link import Impairment, Way

seconds = st.floats(0.0, 2.0)
impairments = st.builds(Impairment, delay_s=seconds, jitter_s=seconds,
                        bytes_per_s=st.one_of(st.just(0.0), st.floats(100.0, 1e6)))
entries = st.lists(st.tuples(seconds, st.integers(1, 1500)), max_size=40)
LATER = 1e9


def leaving(way: Way) -> list[tuple[float, bytes]]:
    """Each frame with the time at which it leaves, as the caller that sleeps until then sees it."""
    found = []
    while way.next_at < LATER:
        at = way.next_at
        found += [(at, frame) for frame in way.leaving(at)]
    return found


@given(impairments, entries, st.integers())
def test_frames_leave_once_in_their_order_and_no_earlier_than_the_link_allows(
        impairment: Impairment, sizes: list[tuple[float, int]], seed: int) -> None:
    way, now, sent = Way(impairment, random.Random(seed)), 0.0, list[tuple[float, bytes]]()
    for number, (pause_s, nbytes) in enumerate(sizes):
        now += pause_s
        sent.append((now, number.to_bytes(2, "big") + bytes(nbytes)))
        way.enter(sent[-1][1], now)
    left = leaving(way)
    assert [frame for _, frame in left] == [frame for _, frame in sent] and way.queued_bytes == 0
    for (at, frame), (entered, _) in zip(left, sent, strict=True):
        transfer_s = len(frame) / impairment.bytes_per_s if impairment.bytes_per_s else 0.0
        assert at >= entered + impairment.delay_s + transfer_s - 1e-6
    if impairment.bytes_per_s and sent:
        assert left[-1][0] >= sent[0][0] + sum(len(f) for _, f in sent) / impairment.bytes_per_s - 1e-6
    elif sent:
        assert left[-1][0] <= now + impairment.delay_s + impairment.jitter_s + 1e-6


@pytest.mark.parametrize("loss", [0.0, 0.3, 1.0])
def test_share_of_frames_that_is_lost(loss: float) -> None:
    way = Way(Impairment(loss=loss), random.Random(3))
    for _ in range(5000):
        way.enter(b"x", 0.0)
    assert len(way.leaving(0.0)) == pytest.approx(5000 * (1 - loss), abs=200 if 0 < loss < 1 else 0)


def test_slow_link_holds_a_bounded_number_of_bytes_back() -> None:
    way = Way(Impairment(bytes_per_s=1.0), random.Random(0))
    for _ in range(100):
        way.enter(bytes(64 << 10), 0.0)
    assert 3 << 20 < way.queued_bytes <= 4 << 20


def test_impairment_says_what_it_is_and_refuses_what_cannot_be() -> None:
    assert str(Impairment(0.02, 0.05, 0.1, 2048.0)) == "20 to 70 ms of delay, 10% lost, 2 KiB/s"
    assert str(Impairment()) == "none"
    for wrong in ({"loss": 1.1}, {"delay_s": -1.0}, {"bytes_per_s": math.nan}, {"loss": math.nan},
                  {"delay_s": math.inf}):
        with pytest.raises(ValueError, match="no impairment"):
            Impairment(**wrong)
