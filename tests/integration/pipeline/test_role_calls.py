"""Calls of roles on a real Ray Serve: those of an actor that was killed end, and its successor's take their places; and
what a caller gets while there is no replica."""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
from collections.abc import Generator, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import ray
from ray import serve
from ray.serve.handle import DeploymentHandle
from support import http_servers
from support.cluster_files import make_secret
from support.etcd_server import EtcdServers
from support.ray_cluster import start_ray
from support.waiting import PATIENCE_S, wait_until

from elastic_rl import config
from elastic_rl.config import Stream
from elastic_rl.data.samples import Prompt
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import ElasticRLError, EtcdUnavailable, Fenced, RoleUnavailable
from elastic_rl.etcd import fencing
from elastic_rl.etcd.client import EtcdClient
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.membership import members
from elastic_rl.etcd.records import Version, VersionState
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.roles.role_clients import RoleClients
from elastic_rl.roles.rollout import RolloutRole

REWARDS = [[1.0, 0.0]]
_AT_ONCE = 2
"""Requests that the role takes."""
_ENDLESS, _SHORT = 5, 6
"""Prompts."""


@pytest.fixture(scope="module", autouse=True)
def serving() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # for the workers, which import the tests' modules
        patch.setenv("PYTHONPATH", os.pathsep.join(path for path in sys.path if path))
        start_ray(4)
    serve.start(proxy_location="Disabled")
    yield
    serve.shutdown()
    ray.shutdown()


# -- requests of an actor that was killed ------------------------------------------------------------------------------
class Router(ThreadingHTTPServer):
    """Answers short prompts, and others never."""

    daemon_threads = True

    def __init__(self) -> None:
        self.open = 0
        """Endless prompts that are being answered."""
        self._lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)

    def change(self, by: int) -> None:
        with self._lock:
            self.open += by

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: Router

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["input_ids"][0] == [_ENDLESS]:
            self.server.change(len(body["input_ids"]))
            self.rfile.read(1)  # returns when the other side closes
            self.server.change(-len(body["input_ids"]))
            return
        answer = json.dumps([{"output_ids": [7], "meta_info": {
            "finish_reason": {"type": "stop"}, "weight_version": "1",
            "output_token_logprobs": [[-0.5, 7, None]]}} for _ in body["input_ids"]]).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None: ...


@pytest.fixture
def router() -> Iterator[Router]:
    with http_servers.serving(Router()) as made:
        yield made


@pytest.fixture
def ctx(etcd_servers: EtcdServers, etcd: EtcdClient, keys: Keys, router: Router, tmp_path: Path
        ) -> Iterator[RunContext]:
    """The context of a run whose rollout role is deployed as the driver does, but for the number of requests."""
    cfg = config.parse({"job": keys.job, "run_dir": str(tmp_path), "engine": {
        "request_timeout_s": 3600.0, "drain_timeout_s": 3600.0}, "etcd": {"call_timeout_s": 2.0}})
    make_secret(cfg)
    etcd.put(keys.stream_head(Stream.POLICY), Version(
        stream=Stream.POLICY, number=1, state=VersionState.COMMITTED, epoch=1).encode())
    made = RunContext(config=cfg, etcd_endpoints=etcd_servers.endpoints, job=keys.job, model_dir=str(tmp_path),
                      epoch=fencing.raise_epoch(etcd, keys, "test").number, host=LOOPBACK,
                      router_urls={"rollout": router.url})
    deploy(made)
    yield made
    serve.delete("rollout")


def deploy(ctx: RunContext, num_replicas: int = 1) -> None:
    serve.run(serve.deployment(RolloutRole).options(
        name="rollout", max_ongoing_requests=_AT_ONCE, num_replicas=num_replicas,
        ray_actor_options={"num_cpus": 0.25}).bind(ctx), name="rollout", route_prefix=None)


@ray.remote(num_cpus=0)
class Actor:
    """Sends requests in a term of its own, as the actor does."""

    def __init__(self, term: int) -> None:
        self._clients = clients(term)

    def ask(self) -> None:
        for _ in range(_AT_ONCE):
            threading.Thread(target=generate, args=(self._clients, [_ENDLESS]), daemon=True).start()


def clients(term: int) -> RoleClients:
    short = config.parse({"engine": {"request_timeout_s": 30.0}})  # 150 s for a call; the role has others
    return RoleClients({"rollout": serve.get_app_handle("rollout")}, short, lambda role: True, lambda: term)


def generate(roles: RoleClients, prompt: Sequence[int]) -> Any:
    [[(_, samples)]] = roles.generate([PromptRequest(0, Prompt(tuple(prompt)), Sampling(4), 1)], 1)
    return samples


def test_requests_of_a_killed_actor_end_and_let_those_of_its_successor_in(
        ctx: RunContext, etcd: EtcdClient, keys: Keys, router: Router) -> None:
    first = Actor.remote(fencing.begin_term(etcd, keys, ctx.epoch, "first"))
    ray.get(first.ask.remote())
    wait_until(lambda: router.open == _AT_ONCE, what="the requests of the first actor")
    ray.kill(first)
    term = fencing.begin_term(etcd, keys, ctx.epoch, "second")
    [sample] = generate(clients(term), [_SHORT])  # all places were taken
    assert sample.response_ids == (7,)
    wait_until(lambda: router.open == 0, what="the end of the requests at the engines")
    with pytest.raises(Fenced, match="term 1 of the actor is over"):
        generate(clients(term - 1), [_SHORT])


def test_group_is_answered_while_another_of_its_request_is_under_way(
        ctx: RunContext, etcd: EtcdClient, keys: Keys, router: Router) -> None:
    """Closed, the call ends what it has left at the engines."""
    long = Sampling(4096)  # each is an HTTP request by itself
    answers = clients(fencing.begin_term(etcd, keys, ctx.epoch, "first")).generate(
        [PromptRequest(i, Prompt((token,)), long, 1) for i, token in enumerate((_ENDLESS, _SHORT))], 1)
    assert isinstance(answers, Generator)
    [(place, [sample])] = next(answers)
    assert (place, sample.response_ids) == (1, (7,))
    wait_until(lambda: router.open == 1, what="the other group")
    answers.close()
    wait_until(lambda: router.open == 0, what="the end of the other group")


def test_lost_replica_loses_its_own_requests_only(ctx: RunContext, etcd: EtcdClient, keys: Keys, router: Router
                                                  ) -> None:
    """The term fences the calls of every replica."""
    deploy(ctx, num_replicas=2)
    term = fencing.begin_term(etcd, keys, ctx.epoch, "first")
    found = wait_until(lambda: found if len(found := members(etcd, keys, "rollout")) == 2 else None,
                       what="two replicas")
    outcomes: queue.SimpleQueue[str] = queue.SimpleQueue()

    def ask() -> None:
        try:
            generate(clients(term), [_ENDLESS])
        except ElasticRLError as e:
            outcomes.put(type(e).__name__)

    threads = [threading.Thread(target=ask, daemon=True) for _ in range(2 * _AT_ONCE)]
    for thread in threads:
        thread.start()
    wait_until(lambda: router.open == 2 * _AT_ONCE, what="requests at all places of both replicas")
    os.kill(found[0].info["pid"], signal.SIGKILL)
    assert [outcomes.get(timeout=PATIENCE_S) for _ in range(_AT_ONCE)] == ["RoleUnavailable"] * _AT_ONCE
    wait_until(lambda: router.open == _AT_ONCE, what="the end of its requests at the engines")
    assert outcomes.empty(), "those of the other one go on"
    fencing.begin_term(etcd, keys, ctx.epoch, "second")
    assert [outcomes.get(timeout=PATIENCE_S) for _ in range(_AT_ONCE)] == ["Fenced"] * _AT_ONCE


# -- calls while there is no replica -----------------------------------------------------------------------------------
class Advantages:
    async def compute(self, rewards: list[list[float]]) -> list[list[float]]:
        return rewards


def _deployed(name: str, **resources: float) -> DeploymentHandle:
    role = serve.deployment(Advantages).options(
        name=name, ray_actor_options={"num_cpus": 0.1, "resources": resources},
        graceful_shutdown_timeout_s=0.1)  # Serve waits as long for the end of a replica that was never placed
    serve.run_many([serve.RunTarget(role.bind(), name=name, route_prefix=None)],
                   wait_for_ingress_deployment_creation=True, wait_for_applications_running=False)
    return serve.get_app_handle(name)


def test_role_without_a_replica_is_away_long_before_a_calls_limit() -> None:
    handle = _deployed("without-room", nowhere=1.0)
    cfg = config.parse({"engine": {"request_timeout_s": 3600.0, "drain_timeout_s": 3600.0}})
    with pytest.raises(RoleUnavailable, match="role advantages has no replica"):
        RoleClients({"advantages": handle}, cfg, lambda role: False, int).advantages(REWARDS)


def test_call_waits_for_a_replica_that_is_registered_or_unknown() -> None:
    handle = _deployed("without-room", nowhere=1.0)
    cfg = config.parse({"engine": {"request_timeout_s": 1.0}, "rollout": {"max_attempts": 4}})
    looks = 0

    def has_replica(role: str) -> bool:
        nonlocal looks
        looks += 1
        if looks % 2:
            raise EtcdUnavailable("no member answers")
        return True

    with pytest.raises(RoleUnavailable, match="did not answer within 5 s"):
        RoleClients({"advantages": handle}, cfg, has_replica, int).advantages(REWARDS)
    assert looks


def test_call_is_answered_by_a_replica() -> None:
    clients = RoleClients({"advantages": _deployed("working")}, config.parse({}), lambda role: True, int)
    assert clients.advantages(REWARDS) == REWARDS
