"""Commands that read: status, pools, engines, members, events, and the built-in failure policy."""

from __future__ import annotations

import fnmatch
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import tables, watch_loop
from elastic_rl.cli.common import EXTRA, File, Output, Target, api_command, find_cluster, load, out
from elastic_rl.cli.jobs import row_of
from elastic_rl.cli.step_lines import throughput_line, update_line
from elastic_rl.cli.tables import Format
from elastic_rl.cli.watch_loop import Reading

if TYPE_CHECKING:
    from elastic_rl.coordinator.client.admin_client import AdminClient

app = typer.Typer()
Watch = Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it, until Ctrl-C.")]

_POOL = ("name", "desired", "ready", "starting", "pending", "released", "behind", "draining", "external", "message")
_WAITING = ("part", "state", "message")
_EVAL = {"reward": "eval reward", "exact_match": "eval exact match"}
_ENGINE = ("id", "state", "host", "version", "pull_apply_s", "pause_s", "updated_at", "reason")
_POOL_WIDE = ("stream", "model", "router_url")
_ENGINE_WIDE = ("pool", "url", "pid", "external", "applying", "epoch", "started_at")
_CHECKED = "starting"
"""State of a run whose settings are checked; its job's status is that of the run before."""
_BEGUN = (_CHECKED, "running")
"""States of a run that is there, whether or not it has reported how far it is."""
_MEMBER = ("role", "id", "pid", "step", "progress_at", "phase")
_MEMBER_WIDE = ("expected_s", "host", "url", "epoch", "beat_at")
OPERATION = ("id", "kind", "target", "state", "phase", "done", "created_at", "message")
OPERATION_WIDE = ("by", "ended_at", "deadline_at")
ALERT = ("severity", "kind", "subject", "phase", "since_at", "message")
ALERT_WIDE = ("silenced_by", "resolved_at", "cause", "notified")
_EVENT = ("at", "severity", "kind", "message")
_EVENT_WIDE = ("subject", "data")


def _listing(cluster: Target, path: str, columns: Sequence[str], wide: Sequence[str], output: Format, *,
             watch: bool = False) -> None:
    with cluster.api() as api:
        def read() -> Reading:
            rows = api.items(path)
            return Reading(rows, tables.table(rows, columns, output, wide=wide))

        watch_loop.show(read, output, watch=watch)


# -- state -------------------------------------------------------------------------------------------------------------
@api_command(app)
def status(cluster: Target, watch: Watch = False, output: Output = Format.TABLE) -> None:
    """Show the run's progress, pools, running operations, alerts and members."""
    with cluster.api() as api:
        watch_loop.show(lambda: _status(api, _run(cluster), output), output, watch=watch)


def _run(cluster: Target) -> dict[str, Any]:
    """What this machine's files say of the run, which etcd does not know before all is checked, nor when it was
    refused; empty for a cluster elsewhere."""
    return {} if cluster.remote else {"run": row_of(find_cluster(cluster.ctx, cluster.file))}


def _status(api: AdminClient, run: dict[str, Any], output: Format) -> Reading:
    from rich.console import Group
    found = {"job": api.get(""), "steps": api.items("steps", limit=1), "pools": api.items("pools"),
             "operations": api.items("operations?state=running"), "alerts": api.items("alerts"),
             "members": _members(api), **run}
    facts = {name: message if (message := row["message"]).startswith(row["state"]) else
             f"{row['state']} {message}".strip() for name, row in run.items()}
    facts |= {"phase": said} if (said := _phase_of_start(found["job"], run)) else {}
    parts = [tables.facts(job_facts(found["job"]) | facts | step_facts(found["steps"])), "",
             tables.table(found["pools"], _POOL, output)]
    if found["operations"]:
        parts += ["", tables.table(operation_rows(found["operations"]), OPERATION, output, wide=OPERATION_WIDE)]
    # What is pending may pass by itself, as at a normal start: `elastic-rl alerts` has it.
    if firing := [alert for alert in found["alerts"] if alert.get("phase") == "firing"]:
        parts += ["", tables.table(alert_rows(firing), ALERT, output, wide=ALERT_WIDE)]
    if waits := waiting_rows(found["members"]):
        parts += ["", tables.table(waits, _WAITING, output)]
    parts += ["", tables.table(found["members"], _MEMBER, output, wide=_MEMBER_WIDE)]
    return Reading(found, Group(*parts))


def _phase_of_start(job: dict[str, Any], run: dict[str, Any]) -> str:
    """The phase of a job whose run begins, which its status does not say: it has none, or that of the run before."""
    from elastic_rl.etcd.job_records import ENDED_PHASES
    phase, states = _mapping(job.get("status")).get("phase"), [row["state"] for row in run.values()]
    if not phase and any(state in _BEGUN for state in states):
        return "starting: its actor has reported nothing yet"
    if phase in ENDED_PHASES and _CHECKED in states:
        return f"starting: checks of model, data and plug-ins; the run before: {phase}"
    return ""


def _members(api: AdminClient, role: str = "") -> list[dict[str, Any]]:
    """The registered ones, and those that may be slow or dead."""
    from urllib.parse import urlencode
    query = {"role": role} if role else {}
    found = [*api.items(f"members?{urlencode(query)}"),
             *api.items(f"members?{urlencode({**query, 'suspected': 'true'})}")]
    return [{**member, "expected_s": _expected_s(member.get("work"))} if member.get("work") else member
            for member in found]


def _expected_s(work: Any) -> float | None:
    try:
        return round(work["flops"] * work["s_per_flop"], 1) or None
    except (KeyError, TypeError, ValueError, OverflowError):  # a record that another release, or anybody, has written
        return None


def job_facts(job: dict[str, Any]) -> dict[str, Any]:
    """A job of the API for a table of one object."""
    run, leader = job.get("status") or {}, job.get("leader") or {}
    health = f"{job['health']}: {job['message']}" if job.get("message") else ""
    steps = f"{run['step']} of {run['steps']}" if run.get("steps") else run.get("step")
    if run.get("phase") == "sft":
        steps = f"{run.get('sft_step', 0)} of at most {run.get('sft_steps', 0)} of the supervised phase"
    led_by = f"{leader['replica']} at {leader['url']}" if leader else "none: changes wait for an election"
    return {"job": job["name"], "phase": run.get("phase") or "no run has begun", "stage": run.get("stage"),
            "step": steps, "waiting for": waiting_for(run), "generation cap": run.get("generation_cap"),
            "reward": run.get("reward"),
            _EVAL.get(run.get("eval_measure") or "", "eval"): evaluated(run), "eval sets": eval_sets(run),
            "policy_version": run.get("policy_version"), "staleness": run.get("staleness"), "message":
            run.get("message"), "started_at": run.get("started_at"), "updated_at": run.get("updated_at"),
            "epoch": job.get("epoch"), "leader": led_by, "health": health}


def step_facts(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Training metrics of the last step, for the same table; ``steps``: the newest one, if there is any."""
    last = steps[0] if steps else {}
    facts = {"update": update_line(last.get("update") or {}),
             "throughput": throughput_line(last.get("throughput") or {})}
    return {name: line for name, line in facts.items() if line}


def evaluated(run: dict[str, Any]) -> str:
    """The last evaluation, and that of step 0 of RL; empty before the first one."""
    last, start = run.get("eval_accuracy"), run.get("eval_start")
    if not isinstance(last, int | float):
        return ""
    return f"{last:.3g}" + (f" ({start:.3g} at step 0)" if isinstance(start, int | float) and run.get("step") else "")


def eval_sets(run: dict[str, Any], most: int = 8) -> str:
    """Accuracies of the evaluation sets beside the main one."""
    found = {name: value for name, value in _mapping(run.get("eval_sets")).items()
             if isinstance(value, int | float) and abs(value) < 1e18}
    return ", ".join(f"{name} {accuracy:.3f}" for name, accuracy in list(found.items())[:most]) + (
        f" and {len(found) - most} more" if len(found) > most else "")


def waiting_for(run: dict[str, Any]) -> str:
    """What a run waits for, and since when; empty while it works."""
    if not run.get("waiting_for"):
        return ""
    since = tables.cell(run.get("waiting_since"), "since_at")
    return f"{run['waiting_for']} ({run.get('waiting_kind') or 'unknown'}, since {since})"


def waiting_rows(members: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What drivers report of the parts that fail or wait, for a table."""
    return [{"part": part, "state": state, "message": why} for member in members if member.get("role") == "driver"
            for state, key in (("failing", "faults"), ("waiting", "waiting"))
            for part, why in _mapping(_mapping(member.get("info")).get(key)).items()]


def _mapping(value: Any) -> dict[str, Any]:
    """A value that should be a mapping; empty for anything else, which a record may have there."""
    return value if isinstance(value, dict) else {}


def operation_rows(operations: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operations for a table: progress in one cell, and an error in place of the message."""
    return [{**o, "done": f"{o.get('done')}/{o['total']}" if o.get("total") else "",
             "message": o.get("error") or o.get("message")}
            for o in operations]


def alert_rows(alerts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Alerts for a table."""
    return [{**a, "since_at": a.get("since")} for a in alerts]


@api_command(app)
def pools(cluster: Target, watch: Watch = False, output: Output = Format.TABLE) -> None:
    """List pools of engines, with desired and actual numbers."""
    _listing(cluster, "pools", _POOL, _POOL_WIDE, output, watch=watch)


def list_engines(cluster: Target, watch: Watch = False, output: Output = Format.TABLE) -> None:
    """List engines with their state and the version they serve."""
    _listing(cluster, "engines", _ENGINE, _ENGINE_WIDE, output, watch=watch)


@api_command(app)
def members(cluster: Target, role: Annotated[str, typer.Option(help="Only members of this role.")] = "",
            watch: Watch = False, output: Output = Format.TABLE) -> None:
    """List processes and their progress; one that sends no heartbeats is ``suspected``."""
    with cluster.api() as api:
        def read() -> Reading:
            rows = _members(api, role)
            return Reading(rows, tables.table(rows, _MEMBER, output, wide=_MEMBER_WIDE))

        watch_loop.show(read, output, watch=watch)


@app.command(**EXTRA)
def failure_policy(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """Show what is done when a part fails."""
    from elastic_rl.coordinator.failure.policy import POLICY
    cfg = load(ctx, file).failure_policy
    rows = [asdict(r) for r in POLICY]
    if output is Format.JSON:
        tables.write_json({"rules": rows, "budgets": cfg.model_dump(mode="json")})
        return
    rows = [{**r, "counts": "yes" if r["counts"] else ""} for r in rows]
    tables.show(out, rows, ("part", "fault", "action", "counts", "does"), output, wide=("meanwhile",))
    out.print(f"\nFaults that count use up a part's budget: more than {cfg.max_faults}, each within "
              f"{cfg.fault_window_s:g} s of the one before and without a step in between, cause a global restart, and "
              f"{cfg.max_global_restarts} of those without progress end the run.", highlight=False)


# -- events ------------------------------------------------------------------------------------------------------------
@api_command(app)
def events(cluster: Target, follow: Annotated[bool, typer.Option("--follow", "-f", help="And new ones, until Ctrl-C."
                                                                )] = False,
           limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of past events.")] = 50,
           kind: Annotated[str, typer.Option(metavar="GLOB", help="Only these, such as 'engine.*'.")] = "*",
           since: Annotated[str, typer.Option(metavar="TIME", help="Not before 15m ago, 14:05 or "
                                              "2026-11-21T14:05.")] = "",
           output: Output = Format.TABLE) -> None:
    """List events, newest last."""
    from elastic_rl.config import durations
    begin = durations.moment(since, time.time()) if since else 0.0
    filtered = bool(since) or kind != "*"

    def matches(event: dict[str, Any]) -> bool:
        return event["at"] >= begin and fnmatch.fnmatchcase(event["kind"], kind)

    if follow:
        _follow(cluster, limit, matches, output)
        return
    with cluster.api() as api:
        found = [e for e in api.items("events", limit=0 if filtered else limit) if matches(e)][:limit][::-1]
    tables.show(out, found, _EVENT, output, wide=_EVENT_WIDE)


def _follow(cluster: Target, limit: int, matches: Callable[[dict[str, Any]], bool], output: Format) -> None:
    from elastic_rl.coordinator.client.event_stream import EventFollower
    try:
        with cluster.api() as api:
            for event in EventFollower(api.info, limit=limit):
                if not matches(event):
                    continue
                if output is Format.JSON:
                    tables.write_json(event, line=True)
                else:
                    out.print(event_line(event, wide=output is Format.WIDE), markup=False, highlight=False,
                              soft_wrap=True)
    except KeyboardInterrupt:
        return  # the way to end it


def event_line(event: dict[str, Any], *, wide: bool) -> str:
    """``14:02:11  warning  engine.dead  …``."""
    more = f"  {event['subject']}  {tables.cell(event['data'], 'data')}" if wide else ""
    return f"{tables.cell(event['at'], 'at')}  {event['severity']:<7}  {event['kind']:<20}  {event['message']}{more}"
