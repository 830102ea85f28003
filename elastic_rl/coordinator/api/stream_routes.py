"""Server-Sent Events: the log of events, and the changes of everything that the API shows."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import Annotated

import orjson
from fastapi import FastAPI, Header, Query, Request, Response
from starlette.concurrency import run_in_threadpool
from starlette.types import Receive, Scope, Send

from elastic_rl.coordinator.api import job_snapshot, pages
from elastic_rl.coordinator.api.change_projector import ObjectChange
from elastic_rl.coordinator.api.change_stream import ChangeStream, Subscription
from elastic_rl.coordinator.api.context import JobContext, JobCtx
from elastic_rl.coordinator.api.models import EventPage
from elastic_rl.coordinator.api.pages import After
from elastic_rl.coordinator.api.route_docs import CHANGES, EVENTS, described
from elastic_rl.coordinator.api_paths import OF_JOB
from elastic_rl.coordinator.problems import Kind, Problem
from elastic_rl.errors import Compacted, EtcdUnavailable
from elastic_rl.etcd.client import KeyValue

MEDIA_TYPE = "text/event-stream"
_POLL_S = 0.5
_KEEPALIVE_S = 10.0
_CHECK_S = 2.0
"""How often the credentials of an open stream are checked again."""
_SEND_S = 15.0
"""A stream is closed when its client reads nothing for so long."""
_MAX_LAG = 50_000
"""Revisions that a client may be behind and still get every change; beyond that a snapshot is less work."""
_MAX_EVENTS = 10_000

EventLimit = Annotated[int, Query(ge=0, le=pages.MAX_ITEMS, description="Most events to start with.")]
LastEventId = Annotated[str | None, Header(alias="Last-Event-ID", max_length=32,
                                           description="Revision to resume from: the ``id`` of the last frame.")]


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.get(OF_JOB + "/events", response_model=EventPage, **described(EVENTS))(list_events)
    app.get(OF_JOB + "/changes", response_model=None, **described(CHANGES))(follow_changes)


async def list_events(request: Request, ctx: JobCtx, limit: EventLimit = 100, after: After = "",
                      last_event_id: LastEventId = None) -> Response:
    """The newest events first, in pages.

    With ``Accept: text/event-stream``: the newest ``limit`` events in the order in which they happened, and then every
    new one. A stream resumes behind the revision in ``Last-Event-ID`` (or in ``after``).
    """
    if MEDIA_TYPE not in request.headers.get("accept", ""):
        return await run_in_threadpool(pages.events, ctx.replica.etcd, ctx.keys, limit, after)
    since = _revision(last_event_id or after)
    subscription = await ctx.changes.subscribe(frozenset({"event"}))
    try:
        kept, revision = await run_in_threadpool(_kept, ctx, limit, since)
    except BaseException:
        ctx.changes.unsubscribe(subscription)
        raise
    first = [_event_frame(kv.mod_revision, kv.value, str(pages.fields(kv).get("kind", ""))) for kv in kept]
    return _Stream(ctx.changes, subscription, _frames(ctx, subscription, request, b"".join(first), revision,
                                                      _event_change_frame))


async def follow_changes(request: Request, ctx: JobCtx, last_event_id: LastEventId = None) -> Response:
    """The job as it is, and then every change of it.

    The first frame is ``event: snapshot``: job, pools, engines, versions (the newest 20), operations (the running ones
    and the newest 20), alerts, events (the newest 50), members and steps (at most 500 points, oldest first). Then each
    change is a frame ``event: change`` with ``kind``, ``id`` and ``object``, which is null when it is gone. The ``id``
    of a frame is a revision of etcd. With it in ``Last-Event-ID`` a stream resumes with the changes since (those of
    that revision are repeated), or with a new snapshot where they are no longer kept.
    """
    since = await run_in_threadpool(_reachable, ctx, _revision(last_event_id or ""))
    subscription = await ctx.changes.subscribe(after=since)
    if since is not None and subscription.missed is not None:
        first, revision = b"".join(c.frame for c in subscription.missed), 0
    else:
        try:
            first, revision = await run_in_threadpool(_snapshot_frame, ctx)
        except BaseException:
            ctx.changes.unsubscribe(subscription)
            raise
    return _Stream(ctx.changes, subscription, _frames(ctx, subscription, request, first, revision,
                                                      lambda change: change.frame))


def _revision(text: str) -> int | None:
    """A client's revision. Raises a 422 problem for anything else."""
    if not text:
        return None
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise Problem(422, Kind.INVALID, "The request is not valid", f"Last-Event-ID {text!r} is not a revision",
                      errors=[{"pointer": "/Last-Event-ID", "detail": "a revision"}])
    return int(text)


def _reachable(ctx: JobContext, since: int | None) -> int | None:
    """The revision, unless it is of another etcd or too old to resume from."""
    if since is None:
        return None
    present = ctx.replica.etcd.page(ctx.keys.job_status(), limit=1).revision
    return since if 0 < since <= present and present - since <= _MAX_LAG else None


def _snapshot_frame(ctx: JobContext) -> tuple[bytes, int]:
    try:
        taken, revision = job_snapshot.take(ctx)
    except Compacted:  # between two of its reads
        taken, revision = job_snapshot.take(ctx)
    return b"id: %d\nevent: snapshot\ndata: " % revision + taken + b"\n\n", revision


def _kept(ctx: JobContext, limit: int, since: int | None) -> tuple[list[KeyValue], int]:
    """Events that a stream starts with, in the order of their revisions, and the revision at which they were read."""
    found: list[KeyValue] = []
    before, revision, more = "", 0, True
    while more and len(found) < (limit if since is None else _MAX_EVENTS):
        page = pages.newest_events(ctx.replica.etcd, ctx.keys, limit if since is None else pages.MAX_ITEMS,
                                   before=before)
        revision = revision or page.revision
        fresh = [kv for kv in page.kvs if since is None or kv.mod_revision > since]
        found += [kv for kv in fresh if pages.fields(kv)]
        more = page.more and bool(fresh)
        before = page.kvs[-1].key.removeprefix(ctx.keys.events_prefix()) if page.kvs else ""
    return sorted((kv for kv in found if kv.mod_revision <= revision), key=lambda kv: kv.mod_revision), revision


def _event_change_frame(change: ObjectChange) -> bytes:
    raw = change.object or b"{}"
    return _event_frame(change.revision, raw, str(orjson.loads(raw).get("kind", "")))


def _event_frame(revision: int, raw: bytes, kind: str) -> bytes:
    one_line = orjson.dumps(orjson.loads(raw)) if b"\n" in raw or b"\r" in raw else raw
    return f"id: {revision}\nevent: {kind.splitlines()[0] if kind else 'event'}\ndata: ".encode() + one_line + b"\n\n"


async def _frames(ctx: JobContext, subscription: Subscription, request: Request, first: bytes, revision: int,
                  encode: Callable[[ObjectChange], bytes]) -> AsyncGenerator[bytes, None]:
    """``first``, then the changes of revisions after ``revision``, until the subscription ends, the replica stops, or
    the caller's token or session does. Yields nothing now and then, so that the sender sees a client that has gone."""
    sent_at = checked_at = time.monotonic()
    yield b"retry: 1000\n\n" + first
    while not ctx.replica.stopping.is_set():
        changes = await subscription.take(_POLL_S)
        if frames := [encode(c) for c in changes if c.revision > revision]:
            yield b"".join(frames)
            sent_at = time.monotonic()
        elif subscription.ended:
            return
        else:
            yield b""
        if time.monotonic() - checked_at > _CHECK_S:
            if not await run_in_threadpool(_still_admitted, ctx, request):
                return
            checked_at = time.monotonic()
        if time.monotonic() - sent_at > _KEEPALIVE_S:
            yield b": still here\n\n"
            sent_at = time.monotonic()


def _still_admitted(ctx: JobContext, request: Request) -> bool:
    """Whether the caller's token or session still counts; true while etcd cannot be asked."""
    try:
        ctx.replica.authenticator.identify(ctx.replica.authenticator.credentials(request.headers))
    except Problem:
        return False
    except EtcdUnavailable:
        return True
    return True


class _Stream(Response):
    """A body of frames that ends when its client goes, or reads nothing for too long."""

    media_type = MEDIA_TYPE

    def __init__(self, changes: ChangeStream, subscription: Subscription, frames: AsyncGenerator[bytes, None]) -> None:
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._changes, self._subscription, self._frames = changes, subscription, frames

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        gone = asyncio.create_task(_disconnected(receive))
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for frame in self._frames:
                if gone.done() or scope["state"]["head"]:
                    break
                if frame:
                    async with asyncio.timeout(_SEND_S):
                        await send({"type": "http.response.body", "body": frame, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except TimeoutError:
            pass  # the server closes the connection, since the answer is not complete
        finally:
            self._changes.unsubscribe(self._subscription)
            gone.cancel()
            await self._frames.aclose()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
