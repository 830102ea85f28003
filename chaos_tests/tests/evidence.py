"""What a test of real parts has to show beside its own assertions: that the rules hold in what the independent observer
saw, and that the clients' histories are explained by their models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict

from chaos_tests.event_log import Event, Kind
from chaos_tests.history import Operation
from chaos_tests.model.number import WRITE
from chaos_tests.observation import observe
from chaos_tests.validate import histories, judge
from chaos_tests.validate.leadership import Leaders
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import ClusterKeys, Keys


def observed(etcd: EtcdClient, keys: Keys, since: int, *, prefix: str = "") -> list[Event]:
    """The changes of the job's keys, or of those under ``prefix``, from a revision on, as the observer saw them."""
    last = f"{keys.root}zz-end"
    etcd.put(last, b"end")
    return [{"kind": Kind.CHANGE, **asdict(change)}
            for change in observe(etcd.endpoint, prefix or keys.root, since, last)]


def broken_rules(events: Iterable[Event], history: Iterable[Operation] = ()) -> list[str]:
    """Why the observed changes break a rule, or no order of what clients were told follows the models."""
    operations = [{"kind": Kind.OPERATION, **asdict(operation)} for operation in history]
    return [str(violation) for violation in judge.broken([*events, *operations],
                                                         (*judge.OF_STORE, *histories.CHECKERS))]


def terms(events: Iterable[Event], keys: Keys) -> list[str]:
    """Who led the cluster of a job, term by term, in changes that begin with its first candidate. Fails where one that
    did not lead has written."""
    checker = Leaders(first_revision=1)
    judge.show(events, [checker])
    assert checker.violations == ()
    return [name for _, name in checker.terms(ClusterKeys(keys.job).root)]


def announced(events: Iterable[Event], keys: Keys) -> list[str]:
    """The leaders that the job was told of, in their order."""
    return [json.loads(e["value"])["replica"] for e in events if e["put"] and e["key"] == keys.leadership()]


def lost(history: Sequence[Operation], events: Iterable[Event], keys: Keys, pool: str) -> list[Operation]:
    """The writes of a pool that were acknowledged and are not in the store: the acknowledged revision did not set this
    number. (A write of the number that was there already changes nothing and names the revision that had set it.)"""
    desired = {e["revision"]: json.loads(e["value"])["desired"] for e in events
               if e["put"] and e["key"] == keys.pool_spec(pool)}
    return [o for o in history if o.call == WRITE and o.ended_s is not None and desired.get(o.result[1]) != o.result[0]]
