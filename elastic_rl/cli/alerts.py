"""``elastic-rl alerts``: alerts, silences, and tests of the receivers."""

from __future__ import annotations

from typing import Annotated

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import Output, Target, api_command, err, out
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.cli.listings import ALERT, ALERT_WIDE, alert_rows
from elastic_rl.cli.tables import Format
from elastic_rl.errors import DeadlineExceeded

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="Alerts, and who is notified of them. Without a command: ls.")
_WAITING, _DELIVERED = "waiting", "delivered"
_SILENCE = ("id", "kind", "subject", "until_at", "by", "comment")


@api_command(app, "ls")
def ls(cluster: Target, output: Output = Format.TABLE) -> None:
    """List alerts that are open, or whose resolution was not delivered yet."""
    with cluster.api() as api:
        found = api.items("alerts")
    tables.show(out, found if output is Format.JSON else alert_rows(found), ALERT, output, wide=ALERT_WIDE)


@api_command(app, "silence")
def silence(cluster: Target, kind: Annotated[str, typer.Argument(metavar="KIND", help="Kind of alerts, such as "
                                                                "engine.dead or 'pool.*'.")],
            subject: Annotated[str, typer.Option(help="Only alerts about this, such as one engine.")] = "*",
            duration: Annotated[str, typer.Option("--for", help="90s, 15m, 2h, 7d.")] = "1h",
            comment: Annotated[str, typer.Option(help="Why, for other operators.")] = "",
            output: Output = Format.TABLE) -> None:
    """Suppress notifications of some alerts for a while."""
    from elastic_rl.config import durations
    body = {"kind": kind, "subject": subject, "duration_s": durations.seconds(duration), "comment": comment}
    with cluster.api(see="elastic-rl alerts silences") as api:
        made = api.post("silences", body)
    if output is Format.JSON:
        tables.write_json(made)
        return
    out.print(f"silenced for {duration}: {kind} of {subject} ({made['id']})\nend it with `elastic-rl alerts unsilence "
              f"{made['id']}{cluster.as_options}`", markup=False, highlight=False, soft_wrap=True)


@api_command(app, "unsilence")
def unsilence(cluster: Target, silence_id: Annotated[str, typer.Argument(metavar="ID")],
              output: Output = Format.TABLE) -> None:
    """End a silence."""
    with cluster.api(see="elastic-rl alerts silences") as api:
        answer = api.end_silence(silence_id)
    if output is Format.JSON:
        tables.write_json(answer)
    else:
        out.print(f"{silence_id} has ended", markup=False, highlight=False)


@api_command(app, "silences")
def silences(cluster: Target, output: Output = Format.TABLE) -> None:
    """List active silences."""
    with cluster.api() as api:
        found = api.items("silences")
    rows = found if output is Format.JSON else [{**s, "until_at": s["until"]} for s in found]
    tables.show(out, rows, _SILENCE, output, wide=("created_at",))


@api_command(app, "test")
def test(cluster: Target, timeout: Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help=(
             "Longest wait for the receivers."))] = 30.0, output: Output = Format.TABLE) -> None:
    """Send a test message to every receiver; code 1 if a delivery fails."""
    with cluster.api() as api:
        found = api.test_alerts(timeout)
    if output is Format.JSON:
        tables.write_json(found)
    elif found["receivers"]:
        tables.show(out, found["receivers"], ("receiver", "status", "detail"), output)
    if not found["receivers"]:
        err.print("no receiver is configured\nhint: name Apprise URLs in alerts.urls, and start the coordinators with "
                  "it (`elastic-rl down`, `elastic-rl up --alerts.urls=[...]`)", markup=False, highlight=False,
                  soft_wrap=True)
    if any(r["status"] == _WAITING for r in found["receivers"]):
        raise DeadlineExceeded(f"not every message was sent within {timeout:g} s",
                               hint="the receiver's limit of messages per minute is reached, or there is no leader "
                                    "(see `elastic-rl status`); waiting messages are still sent")
    if not found["receivers"] or any(r["status"] != _DELIVERED for r in found["receivers"]):
        raise typer.Exit(Exit.FAILED)
