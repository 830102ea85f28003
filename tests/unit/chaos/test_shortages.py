"""What was short when the job was asked to stop did not come back by ending; what a series does in its first half only
is no growth; and a term is announced once."""

from __future__ import annotations

from typing import Any

import pytest
from support.chaos_log import CLUSTER, KEYS, Log
from test_end_of_run import SHORT, Ended, broken

from chaos_tests.event_log import Kind
from chaos_tests.validate import judge
from chaos_tests.validate.leadership import Leaders
from chaos_tests.validate.running import Presence
from chaos_tests.validate.trends import BLOCKS, LIMITS, Trend, trend_of


@pytest.mark.parametrize("name", SHORT)
def test_what_comes_back_after_the_stop_was_asked_for_was_short_then(name: str) -> None:
    rule, lost, back = SHORT[name]

    class BackAfterwards(Ended):
        """The part is back before the job has ended, and after it was asked to."""

        def put(self, *pairs: tuple[str, Any]) -> None:
            if any(key == KEYS.operation("o") for key, _ in pairs) and not getattr(self, "_stopping", False):
                self._stopping = True
                back(self)
            super().put(*pairs)

    assert broken(BackAfterwards(lost)) == {rule}
    assert broken(BackAfterwards(lambda log: (lost(log), back(log)))) == set()


@pytest.mark.parametrize("name", SHORT)
def test_what_is_short_is_found_also_after_a_gap_and_in_it(name: str) -> None:
    rule, lost, back = SHORT[name]
    assert broken(Ended(lambda log: (log.gap(), lost(log)))) == {rule}
    assert broken(Ended(lambda log: log.gap(lost))) == {rule}
    assert broken(Ended(lambda log: (log.gap(lost), back(log)))) == set()
    assert broken(Ended(lambda log: (lost(log), log.gap(back)))) == set()
    assert broken(Ended(lambda log: (lost(log), log.gap()))) == {rule}
    assert broken(Ended(lambda log: log.gap(lost, listed=False))) == set(), "nobody knows what there is"
    presence = Presence()
    for record in Ended(lambda log: log.gap(lost), stop=False).records:
        if record["kind"] in (Kind.CHANGE, Kind.GAP, Kind.PRESENT):
            {Kind.CHANGE: presence.see, Kind.GAP: presence.gap, Kind.PRESENT: presence.present}[record["kind"]](record)
            if record.get("listed"):
                assert len(presence.short()) == 1


def grows(values: list[float]) -> bool:
    found = trend_of([(float(step), value) for step, value in enumerate(values)])
    assert found is not None
    return Trend("anonymous_bytes", "", *found).grows


def test_series_that_grows_in_its_first_half_only_does_not_grow() -> None:
    """A cache that fills is no leak: its slope over all of the run is as that of one."""
    count, slope = 40 * BLOCKS, 20 * LIMITS["anonymous_bytes"]
    ramp = [slope * min(step, 0.65 * count) for step in range(count)]
    found = trend_of([(float(step), value) for step, value in enumerate(ramp)])
    assert found is not None and Trend("anonymous_bytes", "", *found).lower > LIMITS["anonymous_bytes"]
    assert not grows(ramp)
    assert grows([slope * step for step in range(count)])


def leaders(log: Log) -> list[str]:
    return [violation.what for violation in judge.broken(log.records, [Leaders])]


def test_term_is_announced_once() -> None:
    log = Log(steps=1)
    assert leaders(log) == []
    log.put((KEYS.leadership(), {"replica": "a", "term": 2}))
    assert len(leaders(log)) == 1 and "of 1 terms 2 were announced" in leaders(log)[0]


def test_next_term_is_announced_by_its_leader() -> None:
    log = Log(steps=1)
    log.put((CLUSTER.leader("a"), None))
    log.put((KEYS.leadership(), {"replica": "b", "term": 3}))
    assert leaders(log) == []
