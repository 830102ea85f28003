"""Commands that change something, and what is under way because of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import completion, tables
from elastic_rl.cli.common import ELECTION_S, Output, Target, api_command, err, out
from elastic_rl.cli.listings import OPERATION, OPERATION_WIDE, operation_rows
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from elastic_rl.coordinator.client.admin_client import AdminClient

app = typer.Typer()
operations = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                         help="What takes longer than a request: scaling, drains, restarts, adoptions. Alone: ls.")

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until it is done.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help=(
    "Longest wait, also for a leader; 0: as long as the operation may take."))]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only say what would be done.")]
OperationId = Annotated[str, typer.Argument(metavar="ID", autocompletion=completion.operations)]

_GRACE_S = 10.0
"""An operation ends by its deadline; so much later the leader surely has written that down."""
_WEIGHTY = ("trainer", "job")
"""Targets whose restart costs the run time."""


class OperationStates(StrEnum):
    """For ``--state``."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


# -- commands ----------------------------------------------------------------------------------------------------------
@api_command(app)
def scale(place: Target, desired: Annotated[int, typer.Argument(help="Number of engines.")],
          pool: Annotated[str, typer.Option(help="Pool to scale.", autocompletion=completion.pools)] = "rollout",
          wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Change the number of engines of a pool."""
    _change(place, lambda api: api.scale(pool, desired, dry_run=dry_run), "elastic-rl pools", wait=wait,
            timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(app)
def drain(place: Target, engine: Annotated[str, typer.Argument(metavar="ENGINE", help="Id of an engine.",
                                                              autocompletion=completion.engines)],
          no_replace: Annotated[bool, typer.Option("--no-replace", help="The pool is one engine smaller from then "
                                                   "on.")] = False,
          wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Let an engine finish its requests and leave."""
    _change(place, lambda api: api.drain(engine, replace=not no_replace, dry_run=dry_run), "elastic-rl engines",
            wait=wait, timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(app)
def adopt(place: Target, server: Annotated[str, typer.Argument(metavar="SERVER", help=(
              "Of an SGLang server that you run on a host of the job, as http://HOST:PORT."))],
          pool: Annotated[str, typer.Option(help="Pool that it joins.", autocompletion=completion.pools)] = "rollout",
          wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Have an engine that you run take part, beyond the pool's number."""
    _change(place, lambda api: api.adopt(server, pool, dry_run=dry_run), "elastic-rl engines", wait=wait,
            timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(app)
def restart(place: Target,
            target: Annotated[str, typer.Argument(metavar="TARGET", autocompletion=completion.targets, help=(
                "trainer, roles/NAME, engines/ID, or job: the whole compute plane, which goes on from what is "
                "committed."))],
            reason: Annotated[str, typer.Option(help="Why, for the events.")] = "",
            yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
            wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Start a part of the run anew."""
    if not (yes or dry_run):
        _confirm(target)
    _change(place, lambda api: api.restart(target, reason=reason, dry_run=dry_run), "elastic-rl members", wait=wait,
            timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(operations, "ls")
def ls(place: Target, state: Annotated[OperationStates | None, typer.Option(help="Only those in it.")] = None,
       limit: Annotated[int, typer.Option(min=1, help="Newest so many.")] = 20, output: Output = Format.TABLE) -> None:
    """Operations, the newest first."""
    with place.api() as api:
        found = api.items("/v1/operations" + (f"?state={state.value}" if state else ""), most=limit)
    tables.show(out, found if output is Format.JSON else operation_rows(found), OPERATION, output, wide=OPERATION_WIDE)


@api_command(operations, "show")
def show(place: Target, operation_id: OperationId, output: Output = Format.TABLE) -> None:
    """One operation: how far it is, or how it ended."""
    with place.api(see="elastic-rl operations") as api:
        _print(api.operation(operation_id), output)


@api_command(operations, "wait")
def wait_for(place: Target, operation_id: OperationId, timeout: Timeout = 0.0, output: Output = Format.TABLE) -> None:
    """Wait for the end of an operation; code 1 if it failed."""
    with place.api(see="elastic-rl operations", patience_s=timeout or ELECTION_S) as api:
        _await(place, api, api.operation(operation_id), timeout, output)


@api_command(operations, "cancel")
def cancel(place: Target, operation_id: OperationId, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Take back what an operation wants, if it is not too late."""
    with place.api(see="elastic-rl operations") as api:
        operation = api.cancel(operation_id, dry_run=dry_run)
    if output is Format.JSON:
        tables.write_json(operation)
    else:
        _tell(f"{'would be ' if dry_run else ''}{operation['state']}: {_name(operation)}"
              + (f" ({operation['error']})" if operation["error"] else ""))


# -- how ---------------------------------------------------------------------------------------------------------------
def _confirm(target: str) -> None:
    """Asks on a terminal. Raises ConfigError where nobody can be asked about something weighty, and Abort on a no."""
    import sys
    what = "the whole compute plane anew: every engine, role and the trainer" if target == "job" else f"{target} anew"
    if sys.stdin.isatty() and err.is_terminal:
        typer.confirm(f"Start {what}?", abort=True, err=True)
    elif target in _WEIGHTY:
        raise ConfigError(f"to start {what} must be confirmed", hint="there is no terminal to ask on: say --yes")


def _change(place: Target, begin: Callable[[AdminClient], dict[str, Any]], see: str, *, wait: bool, timeout_s: float,
            dry_run: bool, output: Format) -> None:
    end = time.monotonic() + timeout_s
    with place.api(see=see, patience_s=timeout_s or ELECTION_S) as api:
        operation = begin(api)
        if wait and not dry_run:
            left_s = round(max(0.1, end - time.monotonic()), 1) if timeout_s else 0.0
            _await(place, api, operation, left_s, output)
        elif output is Format.JSON:
            tables.write_json(operation)
        elif dry_run:
            _tell(f"would be done: {operation['message']}")
        else:
            _tell(f"begun: {_name(operation)}")
            _tell(_how_on(place, operation))


def _await(place: Target, api: AdminClient, operation: dict[str, Any], timeout_s: float,
           output: Format) -> None:
    """Waits and prints how it ended. Raises OperationFailed, DeadlineExceeded, KeyboardInterrupt; in the latter two
    the operation goes on, and how to go on with it is said."""
    from elastic_rl.coordinator.client.admin_client import OperationFailed
    timeout_s = timeout_s or max(0.0, operation["deadline_at"] - time.time()) + _GRACE_S
    try:
        with _progress(operation) as seen:
            operation = api.wait(operation, timeout_s, seen)
    except OperationFailed as e:
        if output is Format.JSON:
            tables.write_json(e.operation)
        e.hint = f"`elastic-rl operations show {operation['id']}{place.spelled}` tells more"
        raise
    except DeadlineExceeded as e:
        e.hint = "the operation goes on; " + _how_on(place, operation)
        raise
    except KeyboardInterrupt:
        _tell(f"{_name(operation)} goes on; " + _how_on(place, operation), to_err=True)
        raise
    _print(operation, output, brief=True)


def _how_on(place: Target, operation: dict[str, Any]) -> str:
    name = operation["id"] + place.spelled
    return (f"follow it with `elastic-rl operations wait {name}`, take it back with `elastic-rl operations cancel "
            f"{name}`")


def _name(operation: dict[str, Any]) -> str:
    wanted = f" to {operation['params']['desired']}" if operation["kind"] == "scale" else ""
    return f"{operation['kind']} of {operation['target']}{wanted} ({operation['id']})"


def _print(operation: dict[str, Any], output: Format, *, brief: bool = False) -> None:
    if output is Format.JSON:
        tables.write_json(operation)
    elif brief:
        _tell(f"{operation['state']}: {_name(operation)}, {operation['message']}, after "
              f"{operation['ended_at'] - operation['created_at']:.1f} s")
    else:
        tables.put(out, tables.facts({k: v for k, v in operation.items() if v not in (0, 0.0)}), output)


def _tell(line: str, *, to_err: bool = False) -> None:
    (err if to_err else out).print(line, markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _progress(operation: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows how far it is: as a bar on a terminal, elsewhere as a line where something changed. Never on stdout."""
    if not err.is_terminal:
        told = [""]

        def line(now: dict[str, Any]) -> None:
            counted = f" {now['done']}/{now['total']}" if now["total"] else ""
            text = f"{now['kind']} of {now['target']}: {now['phase']}{counted}" + (
                f", {now['message']}" if now["message"] else "")
            if text != told[0]:
                _tell(text, to_err=True)
            told[0] = text

        yield line
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
               TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(f"{operation['kind']} of {operation['target']}", total=None, count="")

        def move(now: dict[str, Any]) -> None:
            total = now["total"] or None
            bar.update(task, description=f"{now['kind']} of {now['target']}: {now['phase']}", total=total,
                       completed=now["done"], count=f"{now['done']}/{total}" if total else "")

        yield move
