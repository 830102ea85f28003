"""Entries of SGLang's prefix cache by the weight version that computed them.

With ``engine.pause_mode=in_place`` the cache is kept over an update of the weights: it cannot be flushed under requests
that use it. Without anything else a new prompt would take the keys and values of a prefix that older weights have
computed, of whatever age, and its tokens would still say that the newest version made them. So the scheduler puts its
weight version into the ``extra_key`` of each request, which SGLang's radix cache matches beside the tokens: a prompt
finds only what the weights that compute it have left there. What older weights have left is evicted as the least
recently used.

It is the scheduler that does it, since nobody else knows the version: a client does not know which engine, of which
version, its request will reach, and the HTTP server hears of an update after the scheduler, which may have a request
of before the update in its queue. The turns of a conversation, and a sample that goes on in another engine, are new
prompts: they are computed again where the weights have changed in between.

A request that has been computed in part when the weights change keeps its key, as it keeps its keys and values, and
leaves them to no later one. One that waits, or was retracted, has none yet, and gets the key of the new version.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_PREFIX, _END = "elastic-rl/weights=", "|"


def of_version(extra_key: str | None, version: str) -> str:
    """The key of a request under these weights: what its sender gave as ``extra_key`` stays a part of it. Pure."""
    key = extra_key or ""
    given = key.partition(_END)[2] if key.startswith(_PREFIX) else key
    return f"{_PREFIX}{version}{_END}{given}"


def install(scheduler: Any, version: Callable[[], str]) -> None:
    """Has a scheduler set the keys. ``scheduler``: SGLang's class, of which two methods are wrapped that are no public
    API; ``version``: the weight version that it has now."""
    add, record = scheduler._add_request_to_queue, scheduler.record_weight_version_change

    def set_key(request: Any) -> None:
        request.extra_key = of_version(request.extra_key, version())

    @functools.wraps(add)
    def add_request_of_version(self: Any, req: Any, *args: Any, **kwargs: Any) -> None:
        set_key(req)  # of one that was retracted too, which has nothing in the cache any more
        add(self, req, *args, **kwargs)

    @functools.wraps(record)
    def record_and_set_keys(self: Any, *args: Any, **kwargs: Any) -> None:
        record(self, *args, **kwargs)
        for request in self.waiting_queue:
            set_key(request)

    scheduler._add_request_to_queue, scheduler.record_weight_version_change = (
        add_request_of_version, record_and_set_keys)


def run_scheduler_process(*args: Any, **kwargs: Any) -> None:
    """SGLang's scheduler, in a process that was forked or spawned for it, with these keys."""
    from sglang.srt.managers import scheduler

    install(scheduler.Scheduler, lambda: scheduler.get_serving().weight_version)
    scheduler.run_scheduler_process(*args, **kwargs)


def install_in_schedulers() -> None:
    """Has the schedulers of a server that this process starts do it."""
    from sglang.srt.entrypoints import http_server

    server: Any = http_server
    server.launch_server = functools.partial(server.launch_server, run_scheduler_process_func=run_scheduler_process)
