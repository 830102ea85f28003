"""One health probe of an SGLang server over HTTP.

``/v1/loads`` is answered by the HTTP process, from shared memory that the scheduler writes: at each prefill, every 15
decode steps, and once a second while it is idle. So an answer says nothing about the scheduler, but numbers that have
moved since the last probe do. Where they have not, or no request runs, ``/health_generate`` asks the scheduler itself:
idle, it runs a request of one token through every tensor-parallel rank; busy, it answers after its next batch, however
long its queue. Do not ask a server whose generation is paused: it holds the request back, and calls itself unhealthy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from elastic_rl.errors import PortTaken
from elastic_rl.net import http_client
from elastic_rl.net.engine_key import EngineAccess

_LOAD_TIMEOUT_S = 2.0
_MOVES = ("num_running_reqs", "num_waiting_reqs", "num_used_tokens", "total_prefill_uncached_tokens", "decode_moments")
"""Fields of a load that change when requests make progress. Its time does not count: it also changes while a request
is stuck."""


@dataclass(frozen=True)
class Load:
    """Requests of a server. ``moves``: changes when they make progress."""

    running: int = 0
    waiting: int = 0
    token_usage: float | None = None
    """Used share of the KV cache over all ranks, 0 to 1; None where the server does not say it."""
    moves: tuple[object, ...] = ()

    @property
    def in_flight(self) -> int:
        return self.running + self.waiting


def parse_load(answer: dict[str, Any]) -> Load:
    """Reads the answer to ``/v1/loads``. Raises KeyError and TypeError when it is none."""
    ranks = answer["loads"]
    return Load(sum(r["num_running_reqs"] for r in ranks), sum(r["num_waiting_reqs"] for r in ranks),
                _token_usage(ranks), tuple(str(r.get(name)) for r in ranks for name in _MOVES))


def _token_usage(ranks: Sequence[dict[str, Any]]) -> float | None:
    room = sum(r.get("max_total_num_tokens") or 0 for r in ranks)
    if room <= 0:
        return None
    return min(1.0, max(0.0, sum(r.get("num_used_tokens") or 0 for r in ranks) / room))


class ServerProbe:
    """Probes one server. For one thread, but ``load`` may be read by others."""

    def __init__(self, url: Callable[[], str], *, timeout_s: float, access: EngineAccess = EngineAccess(),
                 hooks: Sequence[Callable[[httpx.Request], None]] = ()) -> None:
        """``timeout_s``: the limit in seconds of the generation of one token. ``access``: to the server.
        ``hooks``: called with each request."""
        self._url, self._timeout_s = url, timeout_s
        # Its own: others wait for minutes on theirs.
        self.http = http_client.client(timeout=timeout_s, users=None, event_hooks={"request": hooks}, **access.options)
        self.load: Load | None = None
        """Load as of the last probe; None when there was none, or it was not answered."""

    def sign_of_life(self) -> bool:
        """Whether the schedulers work. Bounded; raises nothing."""
        before, self.load = self.load, self._read_load()
        if before and self.load and self.load.moves != before.moves:
            return True
        return self._generates()

    def _read_load(self) -> Load | None:
        try:
            return parse_load(self.http.get(f"{self._url()}/v1/loads", timeout=_LOAD_TIMEOUT_S).json())
        except (httpx.HTTPError, PortTaken, ValueError, KeyError, TypeError):
            return None

    def _generates(self) -> bool:
        try:
            return self.http.get(f"{self._url()}/health_generate", timeout=self._timeout_s).is_success
        except (httpx.HTTPError, PortTaken):
            return False
