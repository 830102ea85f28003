"""Calling many nodes at once: none waits for another that is slow, stopped or gone."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from elastic_rl.dcs.client import DcsClient
from elastic_rl.dcs.connection import NodeConnection
from elastic_rl.errors import ElasticRLError

T = TypeVar("T")
K = TypeVar("K")

_THREADS = 32
"""Calls at once: they mostly wait for the other side."""


def in_parallel(items: Iterable[K], call: Callable[[K], T], *, threads: int = _THREADS
                ) -> tuple[dict[K, T], dict[K, ElasticRLError]]:
    """What ``call`` returned for each item, and what it raised for the others, both in the order of the items. Takes as
    long as the slowest ones, ``threads`` at a time; other errors than ours are raised."""
    todo = list(dict.fromkeys(items))
    if not todo:
        return {}, {}

    def one(item: K) -> T | ElasticRLError:
        try:
            return call(item)
        except ElasticRLError as e:
            return e

    if len(todo) == 1:
        outcomes = [one(todo[0])]
    else:
        with ThreadPoolExecutor(min(threads, len(todo)), thread_name_prefix="fan-out") as pool:
            outcomes = list(pool.map(one, todo))
    done: dict[K, T] = {}
    failed: dict[K, ElasticRLError] = {}
    for item, outcome in zip(todo, outcomes, strict=True):
        if isinstance(outcome, ElasticRLError):
            failed[item] = outcome
        else:
            done[item] = outcome
    return done, failed


def on_each(client: DcsClient, node_ids: Iterable[str], call: Callable[[NodeConnection], T], *,
            threads: int = _THREADS) -> tuple[dict[str, T], dict[str, ElasticRLError]]:
    """``in_parallel`` over nodes, each through the client's kept connection. A node that could not be reached lately
    fails at once (``DcsClient.connect``), so that it costs the caller a timeout only now and then."""
    return in_parallel(node_ids, lambda node_id: call(client.connect(node_id)), threads=threads)
