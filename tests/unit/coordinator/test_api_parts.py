"""Parts of the admin API that need no replica: cursors, downsampling, subscriptions, and the OpenAPI document."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.coordinator import job_view
from elastic_rl.coordinator.api import cluster_routes, job_snapshot, openapi, pages
from elastic_rl.coordinator.api.app import APP, query_parameters
from elastic_rl.coordinator.api.change_projector import ObjectChange
from elastic_rl.coordinator.api.change_stream import MAX_PENDING, Subscription
from elastic_rl.coordinator.api.route_docs import PROBLEMS
from elastic_rl.coordinator.api_paths import OF_JOB
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.etcd.client import KeyValue
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobHealth, JobProblem

ROOT = Path(__file__).parents[3]
DOCUMENT: dict[str, Any] = APP.openapi()
OPERATIONS = [(path, method, operation) for path, methods in DOCUMENT["paths"].items()
              for method, operation in methods.items()]


# -- listings ----------------------------------------------------------------------------------------------------------
@given(st.text(alphabet=st.characters(exclude_characters="\0", exclude_categories=["Cs"]), min_size=1))
def test_cursor_stands_for_its_place(place: str) -> None:
    assert pages.place(pages.cursor(place)) == place


@given(st.text(min_size=1, max_size=40))
def test_invalid_cursor_is_refused(after: str) -> None:
    try:
        assert pages.cursor(pages.place(after)) == after
    except Problem as refused:
        assert refused.status == 422


@given(st.integers(0, 60), st.integers(1, 20))
def test_downsampled_points_are_in_order_and_hold_the_last_one(n: int, most: int) -> None:
    kvs = [KeyValue(f"{i:09d}", b"", 1, 1, 1, 0) for i in range(n)]
    kept = job_snapshot.downsample(kvs, most)
    assert len(kept) == min(n, most) and kept == sorted(kept, key=lambda kv: kv.key) and kept[-1:] == kvs[-1:]
    assert len({kv.key for kv in kept}) == len(kept)


# -- subscriptions -----------------------------------------------------------------------------------------------------
def test_slow_subscriber_is_dropped_and_its_queue_is_bounded() -> None:
    async def read() -> tuple[int, bool]:
        subscription = Subscription(frozenset())
        for n in range(MAX_PENDING + 50):
            subscription.offer(ObjectChange(n, "engine", "e", b"{}"))
        return len(await subscription.take(1.0)), subscription.ended

    assert asyncio.run(read()) == (MAX_PENDING, True)


def test_subscription_gets_its_kinds_and_waits_for_the_next() -> None:
    async def read() -> list[str]:
        subscription = Subscription(frozenset({"event"}))
        subscription.offer(ObjectChange(1, "engine", "e", b"{}"))
        assert await subscription.take(0.01) == []
        subscription.offer(ObjectChange(2, "event", "a", b"{}"))
        first = await subscription.take(1.0)
        asyncio.get_running_loop().call_soon(subscription.offer, ObjectChange(3, "event", "b", b"{}"))
        return [c.id for c in first + await subscription.take(5.0)]

    assert asyncio.run(read()) == ["a", "b"]


# -- jobs --------------------------------------------------------------------------------------------------------------
def test_jobs_are_listed_by_name_in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(job_view, "read", lambda etcd, keys, replica, problem: job_view.view(
        keys, replica, [], problem))
    names = ["a", "b", "b-2", "c", "z"]
    jobs = {name: None for name in ("z", "b-2", "a", "c", "b")}
    ctx: Any = SimpleNamespace(jobs=SimpleNamespace(known=jobs.keys, problem=jobs.get), etcd=None,
                               election=SimpleNamespace(replica="r"))

    def page(limit: int, after: str = "") -> tuple[list[str], str | None]:
        body = json.loads(bytes(cluster_routes.list_jobs(ctx, limit, after).body))
        return [job["name"] for job in body["items"]], body["next"]

    assert page(5) == (names, None)
    first, after = page(2)
    assert first == names[:2] and after is not None
    del jobs["b"], jobs["c"]
    assert page(2, after) == (["b-2", "z"], None), "the place of a job that has gone"


def test_what_a_replica_knows_of_a_job_itself_counts_more_than_what_the_leader_has_written() -> None:
    keys = Keys("j")
    found = JobProblem(replica="a", health=JobHealth.FAILING, message="a bug")
    written = KeyValue(keys.leader_problem(), found.encode(), 1, 1, 1, 0)
    own = JobProblem(replica="b", health=JobHealth.NOT_OPEN, message="sealed")
    known: list[tuple[list[KeyValue], JobProblem | None]] = [([], None), ([written], None), ([written], own)]
    shown = [job_view.view(keys, "b", *each) for each in known]
    assert [(view.health, view.message) for view in shown] == [
        (JobHealth.OK, ""), (JobHealth.FAILING, "a: a bug"), (JobHealth.NOT_OPEN, "b: sealed")]


# -- the document ------------------------------------------------------------------------------------------------------
def test_checked_in_document_is_that_of_the_routes() -> None:
    kept = (ROOT / "docs/openapi.json").read_text()
    assert kept == openapi.text(APP), "renew it: python -m elastic_rl.coordinator.api > docs/openapi.json"


def test_query_parameters_of_a_route_are_those_of_the_document() -> None:
    """Others are refused (``app._reject_unknown_parameters``)."""
    known = {(route.path, method.lower()): set(query_parameters(route.dependant))
             for route in APP.routes if isinstance(route, APIRoute) for method in route.methods}
    assert {operation[:2]: known[operation[:2]] for operation in OPERATIONS} == {
        (path, method): {p["name"] for p in operation.get("parameters", ()) if p["in"] == "query"}
        for path, method, operation in OPERATIONS}
    assert known[OF_JOB + "/events", "get"] >= {"limit", "after"}


@pytest.mark.parametrize(("path", "method", "operation"), OPERATIONS, ids=[f"{m} {p}" for p, m, _ in OPERATIONS])
def test_every_route_is_documented_with_examples_and_errors(path: str, method: str, operation: Any) -> None:
    assert operation["summary"] and operation["description"] and operation["operationId"]
    answers = operation["responses"]
    [success] = [s for s in answers if s.startswith("2") and (s != "200" or not {"201", "202"} & set(answers))]
    content = answers[success]["content"]
    assert "text/plain" in content or any("example" in c for c in content.values())
    if path.startswith("/v1/"):
        assert operation["security"] and {"401", "403", "421", "422", "503"} <= set(answers)
        assert ("504" in answers) == (method != "get")
    if path.startswith("/v1/") and operation["tags"] != ["access"]:
        assert ("409" in answers) == (method != "get")
        assert ("404" in answers) == ("{" in path or method != "get")
    if method == "post":
        assert {"400", "408", "413", "415"} <= set(answers)
    if method == "post" and operation["tags"] != ["access"]:
        assert "Idempotency-Key" in {p["name"] for p in operation["parameters"]}
        assert "dry_run" in {p["name"] for p in operation["parameters"]}
    for status, answer in answers.items():
        if status >= "4":
            for example in answer["content"]["application/problem+json"]["examples"].values():
                assert example["value"]["status"] == int(status)


def test_every_problem_is_in_the_document_and_in_the_docs() -> None:
    assert set(PROBLEMS) == set(Kind)
    kinds = DOCUMENT["components"]["schemas"]["Problem"]["properties"]["type"]["enum"]
    assert kinds == [f"urn:elastic-rl:problem:{kind}" for kind in PROBLEMS]
    table = re.findall(r"^\| `([a-z-]+)` \| (\d+) \|", (ROOT / "docs/operating/api.md").read_text(), re.MULTILINE)
    assert table == [(kind.value, str(status)) for kind, (status, _) in PROBLEMS.items()]


def test_problem_that_quotes_invalid_unicode_can_be_sent() -> None:
    answer = Problem(422, Kind.INVALID, "t", "got '\ud800'", errors=[{"pointer": "/\udfff", "detail": "d"}])
    assert json.loads(bytes(answer.response("/v1/x").body))["detail"] == "got '\ud800'"
