"""The load of an engine as its record has it."""

from __future__ import annotations

from elastic_rl.engine.runner import ReportedLoad
from elastic_rl.engine.server.probe import Load


def test_probe_without_an_answer_leaves_the_numbers_and_says_that_they_are_old() -> None:
    known = ReportedLoad().after(Load(running=3, waiting=2, token_usage=0.52))
    assert (known.running, known.waiting, known.token_usage, known.known) == (3, 2, 0.5, True)
    lost = known.after(None)
    assert (lost.running, lost.waiting, lost.token_usage, lost.known) == (3, 2, 0.5, False)
    assert lost.after(None) == lost, "it is written once"
    assert lost.after(Load(running=3, waiting=2, token_usage=0.5)) == known


def test_small_change_of_the_share_of_the_cache_is_not_written() -> None:
    known = ReportedLoad().after(Load(token_usage=0.5))
    assert known.after(Load(token_usage=0.51)) == known != known.after(Load(token_usage=0.6))
    assert known.after(Load()).token_usage is None
