"""What a test of real parts has to show beside its own assertions: that the rules hold in what the independent observer
saw, and that the clients' histories are explained by their models."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.observation import observe
from chaos_tests.validate import histories, judge
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys


def observed(etcd: EtcdClient, keys: Keys, since: int) -> list[Event]:
    """The changes of the job's keys from a revision on, as the observer saw them."""
    last = f"{keys.root}zz-end"
    etcd.put(last, b"end")
    return [{"kind": Kind.CHANGE, **asdict(change)} for change in observe(etcd.endpoint, keys.root, since, last)]


def broken_rules(events: Iterable[Event], history: Iterable[Operation] = ()) -> list[str]:
    """Why the observed changes break a rule, or no order of what clients were told follows the models."""
    operations = [{"kind": Kind.OPERATION, **asdict(operation)} for operation in history]
    return [str(violation) for violation in judge.broken([*events, *operations],
                                                         (*judge.OF_STORE, *histories.CHECKERS))]
