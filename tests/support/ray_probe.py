"""What the drivers of the probes of Ray do, and the actors they make: ``python -m support.ray_probe ADDRESS NODE``.

Reads calls of the functions below from standard input, one a line, and prints their outcomes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import ray
from ray import serve
from ray.util.placement_group import get_placement_group, placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

NAMESPACE = "job"
_LIMIT_S = 240
PARTS = ("job/1/trainer", "job/1/engine-0")
GROUP, CALLER = "job/1/group", "job/1/caller"


class Stale(Exception):
    """The caller is not the newest one."""


class Part:
    """A detached part of a job. It refuses calls of an older epoch or generation than it has seen."""

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._newest = (0, 0)
        self._ranks: list[subprocess.Popen[bytes]] = []

    def start(self, epoch: int, generation: int, ranks: int) -> dict[str, Any]:
        """Starts the ranks that are not started yet."""
        self._check(epoch, generation)
        store = self._folder / "store"
        while len(self._ranks) < ranks:
            rank = len(self._ranks)
            self._ranks.append(subprocess.Popen([sys.executable, "-m", "support.ray_probe_rank", str(store), str(rank),
                                                 str(ranks), str(self._folder / f"rank-{rank}")]))
        return self.look()

    def _check(self, epoch: int, generation: int) -> None:
        if (epoch, generation) < self._newest:
            raise Stale(f"{(epoch, generation)} is older than {self._newest}")
        self._newest = (epoch, generation)

    def look(self) -> dict[str, Any]:
        return {"pid": os.getpid(), "node": _node(), "ranks": [r.pid for r in self._ranks if r.poll() is None]}

    def wait(self, seconds: float) -> int:
        time.sleep(seconds)
        return os.getpid()


class Caller:
    """Calls an application of Serve all the time."""

    def __init__(self) -> None:
        self._answers: list[tuple[float, int]] = []
        self._errors: list[str] = []
        self._last_at = time.monotonic()
        self._lock = threading.Lock()
        threading.Thread(target=self._call, daemon=True).start()

    def _call(self) -> None:
        handle = serve.get_app_handle("app")
        while True:
            try:
                pid = handle.remote().result(timeout_s=20)
                with self._lock:
                    self._answers.append((time.monotonic(), pid))
            except Exception as e:
                with self._lock:
                    self._errors.append(repr(e)[:200])
            time.sleep(0.2)

    def take(self) -> dict[str, Any]:
        """Answers since the last call, with the longest time without one, and the errors."""
        with self._lock:
            answers, self._answers = self._answers, []
            errors, self._errors = self._errors, []
        times = [self._last_at, *(at for at, _ in answers)]
        self._last_at = times[-1]
        return {"answers": len(answers), "pids": sorted({pid for _, pid in answers}), "errors": errors,
                "longest_gap_s": max((b - a for a, b in pairwise(times)), default=0.0)}


@serve.deployment(num_replicas=1, ray_actor_options={"num_cpus": 0.1})
class App:
    def __call__(self) -> int:
        return os.getpid()


def _node() -> str:
    return str(ray.get_runtime_context().get_node_id())


@cache
def _get(name: str) -> Any:
    """The handle of an actor. Only the first call for a name needs the GCS."""
    return ray.get_actor(name, namespace=NAMESPACE)


def _result(ref: Any) -> Any:
    return ray.get(ref, timeout=_LIMIT_S)


# -- what drivers do ---------------------------------------------------------------------------------------------------
def make(folder: str, ranks: int = 2, serve_app: bool = True, restarted: Sequence[str] = ()) -> dict[str, Any]:
    """Makes the parts of a job, which outlive this driver. ``restarted``: those which Ray may restart."""
    group = placement_group([{"CPU": 1}] * len(PARTS), name=GROUP, lifetime="detached")
    _result(group.ready())
    for index, name in enumerate(PARTS):
        body = ray.remote(num_cpus=1, max_concurrency=8, max_restarts=-1 if name in restarted else 0)(Part)
        actor = body.options(name=name, lifetime="detached",
                             scheduling_strategy=PlacementGroupSchedulingStrategy(group, index)).remote(folder)
        _result(actor.start.remote(1, 1, 0 if index else ranks))
    if serve_app:
        serve.start(proxy_location="Disabled")
        serve.run(App.bind(), name="app", route_prefix=None)
        caller = ray.remote(num_cpus=0.1, max_concurrency=2)(Caller).options(name=CALLER, lifetime="detached").remote()
        _result(caller.take.remote())
    return look()


def look() -> dict[str, Any]:
    """Parts and placement group, as a driver finds them by name."""
    return {"parts": {name: _result(_get(name).look.remote()) for name in PARTS}, "names": names(),
            "group": get_placement_group(GROUP).bundle_count}


def nodes_of_actors_without_cpus() -> list[str]:
    body = ray.remote(num_cpus=0, scheduling_strategy="SPREAD")(Part)
    made = [body.remote("") for _ in range(2)]
    return [str(_result(actor.look.remote())["node"]) for actor in made]


def look_at(name: str) -> dict[str, Any] | None:
    """None while it cannot be called."""
    try:
        return dict(_result(_get(name).look.remote()))
    except (ray.exceptions.RayActorError, ValueError):
        return None


def pids() -> list[int]:
    """Those of the parts, as they answer."""
    return [int(_result(_get(name).look.remote())["pid"]) for name in PARTS]


def names() -> list[str]:
    return sorted(ray.util.list_named_actors())


def take_calls() -> dict[str, Any]:
    return _result(_get(CALLER).take.remote())


def nodes() -> dict[str, str]:
    """The ids of the nodes that live, by name."""
    return {n["NodeName"]: n["NodeID"] for n in ray.nodes() if n["Alive"]}


def serve_actors() -> list[dict[str, Any]]:
    return [{"class": a["ActorClassName"], "node": a["Address"]["NodeID"], "state": a["State"],
             "restarts": a["NumRestarts"]} for a in ray._private.state.actors().values()
            if a["ActorClassName"].startswith("Serve")]


def app_status() -> str:
    return str(serve.status().applications["app"].status.value)


def call_app() -> int:
    return int(serve.get_app_handle("app").remote().result(timeout_s=_LIMIT_S))


def long_call(name: str, seconds: float) -> None:
    """Leaves a call running."""
    _pending.append(_get(name).wait.remote(seconds))


def end_of_long_call() -> int:
    return int(_result(_pending.pop()))


_pending: list[Any] = []


def start_part(name: str, epoch: int, generation: int) -> str:
    try:
        _result(_get(name).start.remote(epoch, generation, 0))
    except Stale:
        return "refused"
    return "done"


def kill_part(name: str) -> None:
    ray.kill(_get(name))


def main() -> None:
    address, node = sys.argv[1:]
    ray.init(address=address, namespace=NAMESPACE, _node_ip_address=node, log_to_driver=False, logging_level="ERROR")
    for line in sys.stdin:
        function, *arguments = json.loads(line)
        outcome = globals()[function](*arguments)
        print(json.dumps({"outcome": outcome}), flush=True)


if __name__ == "__main__":
    from support import ray_probe
    ray_probe.main()  # actors are of the importable module, not of __main__
