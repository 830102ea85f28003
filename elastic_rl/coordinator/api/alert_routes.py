"""Routes about notifications of alerts: silences, and tests of the receivers."""

from __future__ import annotations

from typing import Annotated

from fastapi import Body, FastAPI, Request, Response

from elastic_rl.coordinator import problems
from elastic_rl.coordinator.alerts import alert_test, silences
from elastic_rl.coordinator.alerts.alert_test import TestResult
from elastic_rl.coordinator.api import pages, route_docs
from elastic_rl.coordinator.api.context import JobContext, JobCtx, caller_of
from elastic_rl.coordinator.api.idempotency import Claim
from elastic_rl.coordinator.api.idempotent import Created, DryRun, Key, carry_out, forward
from elastic_rl.coordinator.api.models import NewSilence, SilencePage
from elastic_rl.coordinator.api.pages import After, Limit
from elastic_rl.coordinator.api.read_routes import Name
from elastic_rl.coordinator.api.route_docs import described
from elastic_rl.coordinator.api_paths import OF_JOB, job_path
from elastic_rl.etcd.records import Silence


def install(app: FastAPI) -> None:
    """Adds the routes."""
    app.get(OF_JOB + "/silences", response_model=SilencePage, **described(route_docs.LIST_SILENCES))(list_silences)
    app.post(OF_JOB + "/silences", response_model=Silence, **described(route_docs.SILENCE))(silence)
    app.delete(OF_JOB + "/silences/{silence_id}", response_model=Silence, **described(route_docs.END_SILENCE))(
        end_silence)
    app.post(OF_JOB + "/alerts/test", response_model=TestResult, **described(route_docs.TEST_ALERTS))(test_alerts)
    app.get(OF_JOB + "/alerts/tests/{test_id}", response_model=TestResult, **described(route_docs.TEST_RESULT))(
        test_result)


def list_silences(ctx: JobCtx, limit: Limit = 100, after: After = "") -> Response:
    """The oldest first. One that has ended is listed until the leader has deleted it."""
    return pages.stored(ctx.replica.etcd, ctx.keys.silences_prefix(), limit, after)


def silence(request: Request, ctx: JobCtx, body: Annotated[NewSilence, Body()], dry_run: DryRun = False,
            idempotency_key: Key = None) -> Response:
    """No receiver is notified of alerts whose kind and subject match; ``*`` stands for any text."""
    def change(claim: Claim | None) -> Created:
        made = silences.create_silence(ctx.replica.etcd, ctx.keys, ctx.replica.election, duration_s=body.duration_s,
                                       kind=body.kind, subject=body.subject, comment=body.comment,
                                       by=caller_of(request).name, claim=claim, dry_run=dry_run)
        return Created(job_path(ctx.keys.job, "silences", made.id), made.model_dump_json())

    return carry_out(request, ctx, body, idempotency_key, change, dry_run=dry_run, status=201)


def end_silence(request: Request, ctx: JobCtx, silence_id: Name, dry_run: DryRun = False) -> Response:
    """Answers with the silence as it was. Receivers are now notified of the alerts that still fire."""
    if not ctx.replica.election.is_leader:
        return forward(request, ctx)
    found = ctx.replica.etcd.get(ctx.keys.silence(silence_id))
    if found is None:
        raise problems.not_found("silence", silence_id)
    silences.delete_silence(ctx.replica.etcd, ctx.keys, ctx.replica.election, silence_id,
                            by=caller_of(request).name, dry_run=dry_run)
    return Response(found.value, media_type=pages.JSON)


def test_alerts(request: Request, ctx: JobCtx, dry_run: DryRun = False, idempotency_key: Key = None) -> Response:
    """Sends a message to each receiver; poll Location until none of them is ``waiting`` any more."""
    def change(claim: Claim | None) -> Created:
        if dry_run:
            return Created("", alert_test.planned(ctx.receivers).model_dump_json())
        test_id = alert_test.begin(ctx.replica.etcd, ctx.keys, ctx.replica.election, by=caller_of(request).name,
                                   claim=claim)
        return Created(job_path(ctx.keys.job, "alerts", "tests", test_id), _result(ctx, test_id))

    return carry_out(request, ctx, None, idempotency_key, change, dry_run=dry_run)


def test_result(ctx: JobCtx, test_id: Name) -> Response:
    """The result of a test so far, by receiver; it is kept for some minutes."""
    return Response(_result(ctx, test_id), media_type=pages.JSON)


def _result(ctx: JobContext, test_id: str) -> str:
    return alert_test.result(ctx.replica.etcd, ctx.keys, ctx.receivers, test_id).model_dump_json()
