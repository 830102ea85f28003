"""What the OpenAPI document says of each route beyond its types: summary, examples, and every error."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from elastic_rl.coordinator.problems import Kind
from elastic_rl.net.problem_details import MEDIA_TYPE, TYPE_PREFIX

PROBLEMS: Mapping[Kind, tuple[int, str]] = {
    Kind.MALFORMED: (400, "The request is not valid HTTP, its body is not JSON, or the connection ended before the "
                          "body did."),
    Kind.UNAUTHORIZED: (401, "The request has neither a token nor a session."),
    Kind.UNKNOWN_TOKEN: (401, "The token is not in the table; it is misspelt or was withdrawn."),
    Kind.UNKNOWN_SESSION: (401, "The browser session has expired, was ended, or its token was withdrawn."),
    Kind.UNKNOWN_LINK: (401, "The link of `elastic-rl dashboard` was used already, or has expired."),
    Kind.FORBIDDEN: (403, "The token or session is a viewer's, and this needs an operator's."),
    Kind.CROSS_SITE: (403, "A page of another site sent the request: see `Origin` and `Sec-Fetch-Site`."),
    Kind.NOT_FOUND: (404, "There is no such object (or no such path)."),
    Kind.METHOD_NOT_ALLOWED: (405, "The path does not take this method; `Allow` names those that it takes."),
    Kind.REQUEST_TIMEOUT: (408, "The request's body took longer than coordinator.request_timeout_s to arrive."),
    Kind.CONFLICT: (409, "The state does not allow it, or it was modified concurrently; `detail` says which."),
    Kind.GONE: (410, "The request was carried out, but what it created is no longer kept."),
    Kind.PRECONDITION_FAILED: (412, "The pool is not the one that If-Match names; GET it again."),
    Kind.BODY_TOO_LARGE: (413, "The body has more than coordinator.max_body_bytes."),
    Kind.UNSUPPORTED_MEDIA_TYPE: (415, "POST and PATCH, and every body, must be `application/json`."),
    Kind.UNKNOWN_HOST: (421, "The `Host` header names none of the replica's names; see coordinator.allowed_hosts."),
    Kind.INVALID: (422, "The request is well-formed and wrong; `errors` points at what."),
    Kind.UNKNOWN_PARAMETER: (422, "A query parameter that the route does not have."),
    Kind.IDEMPOTENCY_KEY_REUSED: (422, "The Idempotency-Key was used for another request."),
    Kind.PRECONDITION_REQUIRED: (428, "The change needs If-Match with the ETag of what it changes, or `*`."),
    Kind.HEADERS_TOO_LARGE: (431, "The headers have more than 32 KiB together, with the first line of the request."),
    Kind.NO_LEADER: (503, "There is no leader at the moment; retry after `Retry-After` seconds."),
    Kind.JOB_NOT_OPEN: (503, "The replica knows the job and has not taken it up; `detail` says why. Retry."),
    Kind.ETCD_UNAVAILABLE: (503, "etcd does not answer; nothing was changed."),
    Kind.TOKEN_TABLE: (503, "The replica cannot read its token table."),
    Kind.OVERLOADED: (503, "The replica works on coordinator.max_requests requests; retry."),
    Kind.TOO_MANY_STREAMS: (503, "coordinator.max_streams streams are open; use another replica."),
    Kind.STOPPING: (503, "The replica is stopping."),
    Kind.NOT_RECONCILING: (503, "Only from `/readyz`: this replica leads, and no reconcile pass over any job has "
                                "succeeded for `coordinator.reconcile_deadline_s`."),
    Kind.OUTCOME_UNKNOWN: (504, "The answer was lost and the change may have been applied; retry with the same "
                                "Idempotency-Key, or read the object."),
    Kind.INTERNAL: (500, "A bug; the replica's log has the traceback."),
    Kind.HTTP: (400, "Any other error of the protocol."),
}
"""Every problem: its usual status, and what it means."""

_ACCESS = (Kind.UNAUTHORIZED, Kind.UNKNOWN_TOKEN, Kind.UNKNOWN_SESSION, Kind.CROSS_SITE, Kind.UNKNOWN_HOST,
           Kind.TOKEN_TABLE, Kind.OVERLOADED, Kind.ETCD_UNAVAILABLE)
_READS = (*_ACCESS, Kind.INVALID, Kind.UNKNOWN_PARAMETER)
_JOB_READS = (*_READS, Kind.NOT_FOUND, Kind.JOB_NOT_OPEN)
_CHANGES = (*_JOB_READS, Kind.FORBIDDEN, Kind.REQUEST_TIMEOUT, Kind.CONFLICT, Kind.BODY_TOO_LARGE,
            Kind.UNSUPPORTED_MEDIA_TYPE, Kind.NO_LEADER, Kind.OUTCOME_UNKNOWN)
_HOST_CHANGES = tuple(kind for kind in _CHANGES if kind not in (Kind.JOB_NOT_OPEN, Kind.NO_LEADER))
_BODIES = (Kind.MALFORMED, Kind.REQUEST_TIMEOUT, Kind.BODY_TOO_LARGE, Kind.UNSUPPORTED_MEDIA_TYPE)
_SESSIONS = (*_READS, Kind.OUTCOME_UNKNOWN)
_POSTS = (*_CHANGES, Kind.MALFORMED, Kind.GONE, Kind.IDEMPOTENCY_KEY_REUSED)


@dataclass(frozen=True)
class Route:
    """The documentation of one route."""

    name: str
    summary: str
    tag: str
    errors: Sequence[Kind]
    example: Any = None
    status: int = 200
    success: str = "The object or listing."
    headers: Mapping[str, str] | None = None
    """Headers of the answer, and their meanings."""
    media_type: str = "application/json"
    dry_run: Any = None
    """Example of the answer of a dry run, which is 200, where the change itself has another status."""
    schema: str = ""
    """Name of the schema of ``dry_run``."""


def described(route: Route) -> dict[str, Any]:
    """The arguments of FastAPI's decorator."""
    content: dict[str, Any] = {route.media_type: {"example": route.example} if route.example is not None else {}}
    if route.media_type == "text/event-stream":
        content[route.media_type]["schema"] = {"type": "string"}
    success: dict[str, Any] = {"description": route.success, "content": content}
    if route.headers:
        success["headers"] = {name: {"description": text, "schema": {"type": "string"}}
                              for name, text in route.headers.items()}
    responses: dict[int | str, dict[str, Any]] = {route.status: success, **_errors(route.errors)}
    if route.dry_run is not None:
        responses[200] = {"description": "A dry run: what would be done.", "content": {
            "application/json": {"schema": {"$ref": f"#/components/schemas/{route.schema}"}, "example": route.dry_run}}}
    return {"operation_id": route.name, "summary": route.summary, "tags": [route.tag],
            "status_code": route.status, "responses": dict(sorted(responses.items(), key=lambda r: int(r[0])))}


def _errors(kinds: Sequence[Kind]) -> dict[int | str, dict[str, Any]]:
    found: dict[int | str, dict[str, Any]] = {}
    for kind in kinds:
        status, text = PROBLEMS[kind]
        answer = found.setdefault(status, {"description": "", "content": {
            MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}, "examples": {}}}})
        answer["description"] = f"{answer['description']} {text}".strip()
        answer["content"][MEDIA_TYPE]["examples"][kind.value] = {"value": {
            "type": TYPE_PREFIX + kind, "title": text, "status": status, "detail": text, "instance": "/v1/…"}}
        if status == 503:
            answer["headers"] = {"Retry-After": {"description": "Seconds.", "schema": {"type": "string"}}}
        if status == 401:
            answer["headers"] = {"WWW-Authenticate": {"description": "Bearer.", "schema": {"type": "string"}}}
    return found


# -- examples ----------------------------------------------------------------------------------------------------------
_POOL = {"name": "rollout", "desired": 4, "ready": 3, "starting": 1, "draining": 0, "revision": 812, "etag": '"812"'}
_AUTOSCALER = {
    "pool": "rollout", "source": "api", "mode": "automatic", "min_engines": 2, "max_engines": 16, "queue_high": 1.0,
    "token_usage_high": 0.85, "token_usage_low": 0.4, "min_trainer_idle": 0.1, "up_after_s": 30.0,
    "down_after_s": 300.0, "up_cooldown_s": 60.0, "down_cooldown_s": 600.0, "max_step_up": 4, "max_step_down": 1,
    "by": "ada", "at": 1763724040.1, "recommended": 0, "message": "2.4 requests wait in an engine, 91% of the KV cache "
    "is used, the trainer waits 38% of a step; high for 12 of 30 s", "updated_at": 1763724051.7, "etag": '"830"'}
_ENGINE = {"id": "rollout-3f2a", "pool": "rollout", "state": "ready", "epoch": 2, "url": "http://10.0.0.7:30000",
           "pid": 4711, "version": 118, "host": "gpu-7", "pull_apply_s": 0.84, "pause_s": 0.03}
_OPERATION = {"id": "op-1763724040123-5be1d2", "kind": "scale", "target": "pools/rollout", "params":
              {"desired": 4, "previous": 2}, "state": "running", "phase": "starting", "done": 3, "total": 4, "message":
              "3 of 4 engines ready", "by": "ada", "created_at": 1763724040.1, "updated_at": 1763724051.7,
              "deadline_at": 1763724280.1}
_VERSION = {"stream": "policy", "number": 118, "state": "committed", "epoch": 2, "manifest": "9f1c…", "nbytes": 1048576,
            "sources": ["node-0"], "created_at": 1763724031.2, "committed_at": 1763724031.9, "meta": {"step": 117}}
_MEMBER = {"role": "trainer", "id": "rank-0", "pid": 4242, "host": "gpu-1", "epoch": 2, "step": 117, "phase": "train",
           "progress_at": 1763724049.0, "beat_at": 1763724050.0}
_ALERT = {"id": "a81c", "kind": "engine.dead", "subject": "rollout-1b07", "message": "engine rollout-1b07 died",
          "severity": "error", "phase": "firing", "since": 1763724000.0}
_SILENCE = {"id": "s-1763724040123-0c41aa", "kind": "engine.*", "subject": "*", "created_at": 1763724040.1,
            "until": 1763727640.1, "by": "ada", "comment": "new kernel on gpu-7"}
_TEST = {"id": "5d1e0c9a7b42", "receivers": [{"receiver": "pager", "status": "waiting", "detail": ""}]}
_EVENT = {"id": "001763724040123-9c1e", "at": 1763724040.123, "kind": "pool.scaled", "subject": "rollout", "message":
          "rollout: 2 → 4 engines, by ada", "severity": "info", "data": {"previous": 2, "desired": 4}}
_STEP = {"step": 117, "at": 1763724049.0, "reward": 0.61, "eval_accuracy": 0.58, "staleness": 0, "policy_version": 118,
         "samples": 512, "tokens": 9216, "seconds": {"total": 3.1, "generate": 1.9, "train": 0.8},
         "idle_s": {"generate": 0.4}, "reward_parts": {"answer": 0.51, "format": 0.1}, "response_tokens":
         {"mean": 9.4, "max": 32}, "truncated": 0.02, "dropped_groups": 1, "dropped_by_reason": {"equal rewards": 1}}
_SAMPLE = {"step": 117, "group": 3744, "index": 2, "prompt": "17 + 25 =", "response": " 42", "reward": 1.1,
           "reward_parts": {"answer": 1.0, "format": 0.1}, "advantage": 0.87, "finish_reason": "stop",
           "versions": [118], "prompt_tokens": 6, "response_tokens": 3, "at": 1763724049.0, "cut": False}
_JOB = {"name": "quickstart", "status": {
    "phase": "rl", "step": 117, "steps": 400, "stage": "generate", "waiting_for":
    "an engine that serves version 118: rollout-3f2a syncing v117", "waiting_kind": "engines", "waiting_since":
    1763724041.0}, "epoch": 2, "leader":
        {"replica": "coordinator-0", "url": "http://10.0.0.1:8400", "pid": 311}, "health": "ok", "message": "",
        "replica": "coordinator-1"}
_HOST = {
    "id": "gpu-7", "phase": "ready", "phase_age_s": 8120.4, "reason": "", "registered": True, "not_ready": "",
    "preemption": None, "preemption_pending": False, "preemption_problem": "", "incarnation": "5f0c9e1b7a42d386",
    "address": "10.0.0.7", "cpus": 128, "gpus": 8, "memory_bytes": 1082331758592,
    "shm_bytes": 541165879296, "labels": {"rack": "b4"}, "release": "0.2.0",
    "spec": {"cordoned": False, "drain": None, "reason": "", "by": "", "at": 0.0}, "etag": '"0"',
    "services": {"driver/quickstart": {"state": "running", "pid": 4711, "generation": 3, "restarts": 0, "reason": ""}},
    "assignments": {"driver/quickstart": {"generation": 3, "incarnation": "5f0c9e1b7a42d386", "reason":
                                          "host gpu-3 is lost"}}, "unreadable": {}}
_SESSION = {"name": "operator", "role": "operator", "expires_at": 1763767240.1}
_LOCATION = {"Location": "Path of the operation."}
_ETAG = {"ETag": "For If-Match of a change."}


def _page(item: Any) -> dict[str, Any]:
    return {"items": [item], "next": "cm9sbG91dC0zZjJh"}


def _operation(name: str, summary: str, errors: Sequence[Kind]) -> Route:
    return Route(name, summary, "operations", errors, _OPERATION, 202,
                 "The operation that was created; follow it at Location.", _LOCATION, dry_run=_OPERATION,
                 schema="Operation")


HEALTH = Route("health", "Liveness of the process", "probes", (), {"status": "ok", "replica": "coordinator-0"})
READY = Route("readiness", "Readiness to serve requests", "probes",
              (Kind.ETCD_UNAVAILABLE, Kind.STOPPING, Kind.NOT_RECONCILING),
              {"status": "ready", "replica": "coordinator-0", "leader": "coordinator-1"})
METRICS = Route("metrics", "Metrics for Prometheus", "probes", _ACCESS, media_type="text/plain")
JOBS = Route("listJobs", "The jobs of the cluster", "state", _READS, _page(_JOB))
JOB = Route("getJob", "One job: its progress, and its leader", "state", _JOB_READS, _JOB)
HOSTS = Route("listHosts", "The hosts of the cluster, those included that are lost or have left", "hosts", _READS,
              _page(_HOST))
HOST = Route("getHost", "One host", "hosts", (*_READS, Kind.NOT_FOUND), _HOST, headers=_ETAG)
CHANGE_HOST = Route("changeHost", "Cordon or drain a host that has not changed since it was read, or take that back",
                    "hosts", (*_HOST_CHANGES, Kind.MALFORMED, Kind.PRECONDITION_FAILED, Kind.PRECONDITION_REQUIRED),
                    _HOST, headers=_ETAG)
FORGET_HOST = Route("forgetHost", "Forget a host that is lost or has left", "hosts", _HOST_CHANGES, _HOST,
                    headers=_ETAG)
POOLS = Route("listPools", "Pools of engines", "pools", _JOB_READS, _page(_POOL))
POOL = Route("getPool", "One pool", "pools", _JOB_READS, _POOL, headers=_ETAG)
PATCH_POOL = Route("changePool", "Change a pool that has not changed since it was read", "pools",
                   (*_CHANGES, Kind.MALFORMED, Kind.PRECONDITION_FAILED, Kind.PRECONDITION_REQUIRED), _POOL,
                   headers=_ETAG)
AUTOSCALERS = Route("listAutoscaling", "Autoscaling of the pools", "pools", _JOB_READS, _page(_AUTOSCALER))
AUTOSCALER = Route("getAutoscaling", "Autoscaling of one pool", "pools", _JOB_READS, _AUTOSCALER,
                   headers=_ETAG)
SET_AUTOSCALER = Route("setAutoscaling", "Set autoscaling of a pool that has not changed since it was read", "pools",
                       (*_CHANGES, Kind.MALFORMED, Kind.PRECONDITION_FAILED, Kind.PRECONDITION_REQUIRED), _AUTOSCALER,
                       headers=_ETAG)
DISABLE_AUTOSCALER = Route("disableAutoscaling", "Disable autoscaling of a pool", "pools",
                           (*_CHANGES, Kind.PRECONDITION_FAILED), _AUTOSCALER, headers=_ETAG)
SCALE = _operation("scalePool", "Scale a pool to a number of engines", (*_POSTS, Kind.PRECONDITION_FAILED))
ENGINES = Route("listEngines", "Engines", "engines", _JOB_READS, _page(_ENGINE))
ENGINE = Route("getEngine", "One engine", "engines", _JOB_READS, _ENGINE)
DRAIN = _operation("drainEngine", "Drain an engine: it finishes its requests and leaves", _POSTS)
REGISTER = _operation("registerEngine", "Register an external engine, which joins a pool", _POSTS)
DEREGISTER = _operation("deregisterEngine", "Deregister an external engine, which leaves its pool",
                        (*_CHANGES, Kind.GONE, Kind.IDEMPOTENCY_KEY_REUSED))
RESTART = _operation("restart", "Restart a part of the compute plane", _POSTS)
OPERATIONS = Route("listOperations", "Operations, the newest first", "operations", _JOB_READS, _page(_OPERATION))
OPERATION = Route("getOperation", "One operation", "operations", _JOB_READS, _OPERATION)
CANCEL = _operation("cancelOperation", "Cancel an operation", _CHANGES)
VERSIONS = Route("listVersions", "Versions of the weights and of the trainer's state, the newest first", "state",
                 _JOB_READS, _page(_VERSION))
MEMBERS = Route("listMembers", "Processes that are registered, or suspected", "state", _JOB_READS, _page(_MEMBER))
ALERTS = Route("listAlerts", "Alerts that are open, or whose resolution not every receiver was notified of", "alerts",
               _JOB_READS, _page(_ALERT))
LIST_SILENCES = Route("listSilences", "Silences", "alerts", _JOB_READS, _page(_SILENCE))
SILENCE = Route("silence", "Silence alerts for a while", "alerts", _POSTS, _SILENCE, 201,
                "The silence that was created.", {"Location": "Path of the silence, for DELETE."}, dry_run=_SILENCE,
                schema="Silence")
END_SILENCE = Route("endSilence", "End a silence", "alerts", _CHANGES, _SILENCE)
TEST_ALERTS = Route("testAlerts", "Send a test to every receiver of alerts", "alerts", _POSTS, _TEST, 202,
                    "The test that was started; follow it at Location.", {"Location": "Path of the test."},
                    dry_run=_TEST, schema="TestResult")
TEST_RESULT = Route("getTest", "Result of a test", "alerts", _JOB_READS, _TEST)
STEPS = Route("listSteps", "Step metrics of the run, the newest step first", "state", _JOB_READS, _page(_STEP))
SAMPLES = Route("listSamples", "A few samples of each of the last steps, the newest step first", "state", _JOB_READS,
                _page(_SAMPLE))
EVENTS = Route("listEvents", "Events, as a listing or as a stream", "state", (*_JOB_READS, Kind.TOO_MANY_STREAMS),
               _page(_EVENT))
CHANGES = Route("followChanges", "The state of the job as a stream of changes", "state",
                (*_JOB_READS, Kind.TOO_MANY_STREAMS), 'id: 812\nevent: change\ndata: {"kind":"pool","id":"rollout",'
                '"object":{…}}\n\n', media_type="text/event-stream")
SESSION_LINK = Route("createSessionLink", "Create a one-time link to the dashboard", "access",
                     (*_SESSIONS, Kind.FORBIDDEN, *_BODIES), {**_SESSION, "link": "kX3…"}, 201,
                     "The link. Open `/#link=<link>` of any replica, or `/jobs/{job}#link=<link>` for one job.")
OPEN_SESSION = Route("openSession", "Open a browser session with a link or a token", "access",
                     (*_SESSIONS, Kind.UNKNOWN_LINK, *_BODIES), _SESSION,
                     headers={"Set-Cookie": "The session: HttpOnly, SameSite=Strict, for coordinator.session_ttl_s."})
SESSION = Route("getSession", "The caller: name, role, and when the session ends", "access", _READS, _SESSION)
END_SESSION = Route("endSession", "End the caller's browser session", "access", (*_SESSIONS, Kind.NOT_FOUND), _SESSION)
