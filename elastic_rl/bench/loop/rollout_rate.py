"""rollout-rate: tokens that replicas of the rollout role bring from engines to the process that asks, as the actor
does, by their CPU seconds. The engine answers at once, without a router (``scripted_engine``)."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from elastic_rl.bench.loop.scripted_engine import SHORT_TOKENS, TOKENS
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.measurement import Row
from elastic_rl.bench.workers import Worker

_GOAL = 5e6
_REPLICAS = (1, 2, 4)
_REQUESTS, _QUICK_REQUESTS = 24, 8
"""Requests of 16 groups for each replica."""
_START_S, _RATE_S = 180.0, 300.0
_ENVIRONMENT = {
    # Ray reads these when it is imported, and listens on every address.
    "RAY_AUTH_MODE": "token", "RAY_USAGE_STATS_ENABLED": "0"}


@dataclass(frozen=True)
class Rate:
    """What some replicas did."""

    tokens: int
    seconds: float
    replica_cpu_s: float
    """CPU seconds of all replicas."""
    caller_cpu_s: float
    """CPU seconds of the process that asked them."""


@dataclass(frozen=True)
class Parsed:
    """Tokens a second of one process that reads an engine's answers, and does nothing else."""

    packed: float
    """Answers as our engines pack them, made into samples."""
    json: float
    """SGLang's JSON, by ``orjson.loads``."""


def measure(testbed: Testbed) -> Iterator[Row]:
    folder = testbed.folder / "rollout-rate"
    folder.mkdir()
    requests = _QUICK_REQUESTS if testbed.options.quick else _REQUESTS
    with (Worker("elastic_rl.bench.loop.scripted_engine", log=folder / "engine.log") as engine,
          Worker("elastic_rl.bench.loop.rollout_worker", log=folder / "worker.log",
                 env={**_ENVIRONMENT, "RAY_AUTH_TOKEN": secrets.token_hex(16)}) as worker):
        parsed = Parsed(**engine.call("parse"))
        worker.call("start", timeout_s=_START_S, folder=str(folder), engine=engine.call("start")["url"])
        rates = {replicas: Rate(**worker.call("rate", timeout_s=_RATE_S, replicas=replicas,
                                              requests=requests * replicas, tokens=TOKENS))
                 for replicas in _REPLICAS}
        short = Rate(**worker.call("rate", timeout_s=_RATE_S, replicas=1, requests=2 * requests, tokens=SHORT_TOKENS))
        worker.call("close")
    yield from rows(rates, short, parsed)


def rows(rates: Mapping[int, Rate], short: Rate, parsed: Parsed) -> list[Row]:
    """``rates``: by the number of replicas; ``short``: of one, with responses of ``SHORT_TOKENS``. Pure."""
    one = rates[1]
    per_cpu_s = {n: rate.tokens / rate.replica_cpu_s for n, rate in rates.items()}
    per_s = {n: rate.tokens / rate.seconds for n, rate in rates.items()}
    several = [n for n in rates if n > 1]
    return [
        Row(id="rollout-rate", name=f"tokens of responses of {TOKENS} that a replica of the rollout role brings from "
            "engines to the actor in a CPU second; beside it with several replicas, with shorter responses, and by the "
            "CPU seconds of the actor's side",
            value=per_cpu_s[1], unit="1/s", goal=_GOAL, op=">=", samples=one.tokens, alternatives={
                **{f"{n} replicas": per_cpu_s[n] for n in several},
                f"responses of {SHORT_TOKENS} tokens": short.tokens / short.replica_cpu_s,
                "the actor's side": one.tokens / one.caller_cpu_s}),
        Row(id="rollout-rate-wall", name="the same in a second of the wall, with the engine and the actor's side on "
            "the same cores", value=per_s[1], unit="1/s", op=">=", samples=one.tokens,
            alternatives={f"{n} replicas": per_s[n] for n in several}),
        Row(id="rollout-rate-parse", name="CPU time of a replica over that of one process which only reads the same "
            "answers into samples; beside it orjson.loads of SGLang's JSON of them", value=parsed.packed / per_cpu_s[1],
            unit="×", samples=one.tokens, alternatives={"SGLang's JSON": parsed.packed / parsed.json})]
