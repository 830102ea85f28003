"""How a change is carried out: by the leader, once per Idempotency-Key, or as a dry run."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, NamedTuple

from fastapi import Header, Query, Request, Response
from pydantic import BaseModel

from elastic_rl.coordinator.alerts import alert_test
from elastic_rl.coordinator.api import idempotency, pages
from elastic_rl.coordinator.api.context import JobContext, caller_of
from elastic_rl.coordinator.api.idempotency import Claim
from elastic_rl.coordinator.problems import Kind, Problem, no_leader
from elastic_rl.coordinator.records import COORDINATOR
from elastic_rl.errors import EtcdUnavailable, OutcomeUnknown
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.records import Leader, Member
from elastic_rl.telemetry import traces

REPLAYED = "Idempotency-Replayed"

DryRun = Annotated[bool, Query(description="Only say what would be done, and change nothing.")]
Key = Annotated[str | None, Header(alias="Idempotency-Key", pattern=idempotency.PATTERN, description=(
    "Chosen by the client, at most 200 printable characters. The same request with the same key counts once within a "
    "day: a repetition is answered with what the first one created."))]

IfMatch = Annotated[str | None, Header(alias="If-Match", max_length=100, description=(
    "The ETag of what is to be changed, or *."))]


class Created(NamedTuple):
    """What a change has created: its path, and itself as JSON."""

    location: str
    body: str


def forward(request: Request, ctx: JobContext) -> Response:
    """The leader's answer to the request. Raises a problem when there is no leader to forward to."""
    leader = ctx.replica.election.current()
    if leader is not None:
        _require_registered(leader, ctx)
    return ctx.replica.forwarder.send(request, request.state.body, leader)


def _require_registered(leader: Leader, ctx: JobContext) -> None:
    """Raises a problem unless the leader's URL is the one that its live member record has. A forwarded request carries
    the caller's token, so a leader record alone must not decide where it goes."""
    found = readable_one(ctx.replica.etcd.get(ctx.keys.member(COORDINATOR, leader.replica)), Member)
    if found is None or found.url != leader.url:
        raise no_leader(f"the URL of leader {leader.replica} is not that of a registered coordinator")


def carry_out(request: Request, ctx: JobContext, body: BaseModel | None, key: str | None, change: Callable[
        [Claim | None], Created], *, dry_run: bool, status: int = 202) -> Response:
    """Answers with what ``change`` creates, or with what the same request has created before."""
    if not ctx.replica.election.is_leader:
        return forward(request, ctx)
    with traces.span("api.change", parent=traces.extract(request.headers), path=request.url.path):
        if dry_run:
            return Response(change(None).body, 200, media_type=pages.JSON)
        claim = _claim(request, ctx, body, key) if key is not None else None
        if claim is None:
            return _answer(change(None), status)
        if (replayed := _replay(ctx, claim, status)) is not None:
            return replayed
        try:
            return _answer(change(claim), status)
        except (Problem, OutcomeUnknown) as failure:
            # The same request may have come twice at the same time; or it was applied, and the answer was lost.
            try:
                replayed = _replay(ctx, claim, status)
            except EtcdUnavailable:  # that would say that the change was not made
                raise failure from None
            if replayed is not None:
                return replayed
            raise


def _claim(request: Request, ctx: JobContext, body: BaseModel | None, key: str) -> Claim:
    digest = idempotency.digest(request.method, request.url.path, request.url.query,
                                request.headers.get("if-match", ""), body.model_dump_json() if body else "")
    return idempotency.claim(ctx.keys, caller_of(request).name, key, digest, time.time())


def _answer(created: Created, status: int, **headers: str) -> Response:
    return Response(created.body, status, {"Location": created.location, **headers}, pages.JSON)


def _replay(ctx: JobContext, claim: Claim, status: int) -> Response | None:
    """The answer to a request that was carried out before; None if it was not."""
    done = idempotency.found(ctx.replica.etcd, claim)
    if done is None:
        return None
    body = _current(ctx, done.location)
    if body is None:
        raise Problem(410, Kind.GONE, "What the request has created is gone",
                      f"the request was carried out, as {done.location}, which is no longer kept")
    return _answer(Created(done.location, body), status, **{REPLAYED: "true"})


def _current(ctx: JobContext, location: str) -> str | None:
    """The record of the job that is at a location now."""
    *_, collection, name = location.split("/")
    if collection == "tests":
        try:
            return alert_test.result(ctx.replica.etcd, ctx.keys, ctx.receivers, name).model_dump_json()
        except Problem:
            return None
    kv = ctx.replica.etcd.get(ctx.keys.silence(name) if collection == "silences" else ctx.keys.operation(name))
    return kv.value.decode() if kv else None
