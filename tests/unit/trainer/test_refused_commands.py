"""Which ends of a trainer group's ranks are for a command that needs too much memory: those with a refusal of the group
that was not there before. Events are made here; ranks leave theirs in tests/integration/trainer/test_out_of_memory.py.
"""

from __future__ import annotations

from typing import Any

import pytest

from elastic_rl.errors import EtcdUnavailable
from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.event_kinds import EventKind
from elastic_rl.etcd.records import Event
from elastic_rl.trainer.group.refused_commands import RefusedCommands

OF_TRAINER = event_kinds.TRAINER_GROUP_EVENTS["trainer"]
OF_CRITIC = event_kinds.TRAINER_GROUP_EVENTS["critic"]


class Log:
    """The event log, which etcd may not give."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[Event] = []
        self.is_away = False
        monkeypatch.setattr(events, "recent", self._recent)

    def _recent(self, etcd: Any, keys: Any) -> list[Event]:
        if self.is_away:
            raise EtcdUnavailable("etcd does not answer")
        return list(self.events)

    def add(self, kind: EventKind) -> None:
        self.events.append(events.build(kind, "trainer", "of the test"))

    def read_by_agent(self) -> RefusedCommands:
        etcd: Any = None
        return RefusedCommands(etcd, etcd, "trainer")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return Log(monkeypatch)


def test_refusal_that_was_there_before_the_agent_excuses_no_end(log: Log) -> None:
    log.add(OF_TRAINER.refused)
    assert not log.read_by_agent().take()


def test_each_refusal_excuses_one_end(log: Log) -> None:
    refused = log.read_by_agent()
    for _ in range(2):
        log.add(OF_TRAINER.refused)
        assert refused.take()
        assert not refused.take(), "the next end has no refusal of its own"


def test_refusals_of_several_ranks_for_one_command_excuse_one_end(log: Log) -> None:
    refused = log.read_by_agent()
    log.add(OF_TRAINER.refused)
    log.add(OF_TRAINER.refused)
    assert refused.take() and not refused.take()


def test_other_events_and_other_groups_excuse_no_end(log: Log) -> None:
    refused = log.read_by_agent()
    log.add(OF_TRAINER.restarts_exhausted)
    log.add(OF_CRITIC.refused)
    assert not refused.take()


def test_refusal_that_left_the_log_is_neither_new_nor_hides_a_new_one(log: Log) -> None:
    log.add(OF_TRAINER.refused)
    refused = log.read_by_agent()
    log.events.clear()
    assert not refused.take()
    log.add(OF_TRAINER.refused)
    assert refused.take()


def test_refusal_seen_before_an_outage_of_etcd_excuses_no_end_after_it(log: Log) -> None:
    refused = log.read_by_agent()
    log.add(OF_TRAINER.refused)
    assert refused.take()
    log.is_away = True
    assert not refused.take()
    log.is_away = False
    assert not refused.take()
