"""Commands that change something, and the operations that they begin."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import completion, tables
from elastic_rl.cli.common import ELECTION_S, Output, Target, api_command, err, out, say
from elastic_rl.cli.listings import OPERATION, OPERATION_WIDE, list_engines, operation_rows
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, DeadlineExceeded

if TYPE_CHECKING:
    from elastic_rl.coordinator.client.admin_client import AdminClient

app = typer.Typer()
operations = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=(
    "Changes that take longer than a request: scaling, drains, restarts, registrations. Without a command: ls."))
engines = typer.Typer(no_args_is_help=True, rich_markup_mode=None, help=(
    "Engines: drain one; external SGLang servers that join and leave. Without a command: ls."))
api_command(engines, "ls")(list_engines)

Wait = Annotated[bool, typer.Option("--wait/--no-wait", help="Wait until the operation has ended.")]
Timeout = Annotated[float, typer.Option("--timeout", min=0, metavar="SECONDS", help=(
    "Longest wait, also for a leader; 0: until the operation's own deadline."))]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only print what would be done.")]
OperationId = Annotated[str, typer.Argument(metavar="ID", autocompletion=completion.operations)]

_GRACE_S = 10.0
"""The leader ends an operation at its deadline; this long after, the end has been written."""
_CONFIRMED = (*completion.TRAINER_GROUPS, "job")
"""Targets whose restart costs the run time, and has to be confirmed."""


class OperationStates(StrEnum):
    """Values of ``--state``. Not ``OperationState`` itself: a command's help must not wait for pydantic."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"


# -- commands ----------------------------------------------------------------------------------------------------------
@api_command(app)
def scale(cluster: Target, desired: Annotated[int, typer.Argument(help="Number of engines.")],
          pool: Annotated[str, typer.Option(help="Pool to scale.", autocompletion=completion.pools)] = "rollout",
          wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Change the number of engines of a pool."""
    _change(cluster, lambda api: api.scale(pool, desired, dry_run=dry_run), "elastic-rl pools", wait=wait,
            timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(engines, "drain")
def drain_engine(cluster: Target, engine: Annotated[str, typer.Argument(
                     metavar="ID", help="Id of an engine.", autocompletion=completion.engines)],
                 no_replace: Annotated[bool, typer.Option(
                     "--no-replace", help="Reduce the pool's desired number by one.")] = False,
                 wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE
                 ) -> None:
    """Drain an engine: it finishes its requests and leaves."""
    _change(cluster, lambda api: api.drain_engine(engine, replace=not no_replace, dry_run=dry_run),
            "elastic-rl engines", wait=wait, timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(engines, "register")
def register(cluster: Target, server: Annotated[str, typer.Argument(metavar="URL", help=(
                 "SGLang server that you run on a host of the cluster, as http://ADDRESS:PORT or https://ADDRESS:PORT."))],
             pool: Annotated[str, typer.Option(help="Pool that it joins.",
                                               autocompletion=completion.pools)] = "rollout",
             via: Annotated[str, typer.Option(metavar="HOST", autocompletion=completion.hosts, help=(
                 "Host of the cluster that the server is on, whose checkpoint node gives it its weights. Without it: "
                 "that of the run."))] = "",
             wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE
             ) -> None:
    """Have an external SGLang server join a pool, beyond its desired number."""
    _change(cluster, lambda api: api.register_engine(server, pool, via=via, dry_run=dry_run), "elastic-rl engines",
            wait=wait, timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(engines, "deregister")
def deregister(cluster: Target, engine: Annotated[str, typer.Argument(metavar="ID", help="Id of an external engine.",
                                                                     autocompletion=completion.external_engines)],
               wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE
               ) -> None:
    """Have an external engine leave its pool; its server keeps running."""
    _change(cluster, lambda api: api.deregister_engine(engine, dry_run=dry_run), "elastic-rl engines", wait=wait,
            timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(app)
def restart(cluster: Target,
            target: Annotated[str, typer.Argument(metavar="TARGET", autocompletion=completion.targets, help=(
                f"{', '.join(completion.TRAINER_GROUPS)}, roles/NAME, engines/ID, driver: the next one takes over what "
                "runs, or job: the whole compute plane, which resumes from the last committed state."))],
            reason: Annotated[str, typer.Option(help="Why, for the events.")] = "",
            yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
            wait: Wait = False, timeout: Timeout = 0.0, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Restart a part of the run."""
    if not (yes or dry_run):
        _confirm(target)
    _change(cluster, lambda api: api.restart(target, reason=reason, dry_run=dry_run), "elastic-rl members", wait=wait,
            timeout_s=timeout, dry_run=dry_run, output=output)


@api_command(operations, "ls")
def ls(cluster: Target, state: Annotated[OperationStates | None, typer.Option(help="Only those in this state.")] = None,
       limit: Annotated[int, typer.Option(min=1, help="Number of operations.")] = 20,
       output: Output = Format.TABLE) -> None:
    """List operations, the newest first."""
    with cluster.api() as api:
        found = api.items("operations" + (f"?state={state.value}" if state else ""), limit=limit)
    tables.show(out, found if output is Format.JSON else operation_rows(found), OPERATION, output, wide=OPERATION_WIDE)


@api_command(operations, "show")
def show(cluster: Target, operation_id: OperationId, output: Output = Format.TABLE) -> None:
    """Show one operation: its progress, or its result."""
    with cluster.api(see="elastic-rl operations") as api:
        _print(api.operation(operation_id), output)


@api_command(operations, "wait")
def wait_for(cluster: Target, operation_id: OperationId, timeout: Timeout = 0.0, output: Output = Format.TABLE) -> None:
    """Wait until an operation has ended; code 1 if it failed."""
    with cluster.api(see="elastic-rl operations", patience_s=timeout or ELECTION_S) as api:
        _await(cluster, api, api.operation(operation_id), timeout, output)


@api_command(operations, "cancel")
def cancel(cluster: Target, operation_id: OperationId, dry_run: DryRun = False, output: Output = Format.TABLE) -> None:
    """Cancel an operation, if it is not too late."""
    with cluster.api(see="elastic-rl operations") as api:
        operation = api.cancel(operation_id, dry_run=dry_run)
    if output is Format.JSON:
        tables.write_json(operation)
    else:
        say(f"{'would be ' if dry_run else ''}{operation['state']}: {_name(operation)}"
              + (f" ({operation['error']})" if operation["error"] else ""))


# -- helpers -----------------------------------------------------------------------------------------------------------
def _confirm(target: str) -> None:
    """Asks on a terminal. Raises Abort on a no, and ConfigError where there is no terminal and the target needs it."""
    import sys
    what = "the whole compute plane (every engine, every role and the trainer)" if target == "job" else target
    if sys.stdin.isatty() and err.is_terminal:
        typer.confirm(f"Restart {what}?", abort=True, err=True)
    elif target in _CONFIRMED:
        raise ConfigError(f"a restart of {what} must be confirmed", hint="there is no terminal to ask on: add --yes")


def _change(cluster: Target, begin: Callable[[AdminClient], dict[str, Any]], see: str, *, wait: bool, timeout_s: float,
            dry_run: bool, output: Format) -> None:
    end = time.monotonic() + timeout_s
    with cluster.api(see=see, patience_s=timeout_s or ELECTION_S) as api:
        operation = begin(api)
        if wait and not dry_run:
            left_s = round(max(0.1, end - time.monotonic()), 1) if timeout_s else 0.0
            _await(cluster, api, operation, left_s, output)
        elif output is Format.JSON:
            tables.write_json(operation)
        elif dry_run:
            say(f"would be done: {operation['message']}")
        else:
            say(f"begun: {_name(operation)}")
            say(_next_commands(cluster, operation))


def _await(cluster: Target, api: AdminClient, operation: dict[str, Any], timeout_s: float,
           output: Format) -> None:
    """Waits, and prints the result. Raises OperationFailed, DeadlineExceeded, KeyboardInterrupt; in the latter two the
    operation continues, and the commands that follow or cancel it are printed."""
    from elastic_rl.coordinator.client.admin_client import OperationFailed
    timeout_s = timeout_s or max(0.0, operation["deadline_at"] - time.time()) + _GRACE_S
    try:
        with _progress(operation) as show_progress:
            operation = api.wait(operation, timeout_s, show_progress)
    except OperationFailed as e:
        if output is Format.JSON:
            tables.write_json(e.operation)
        e.hint = f"see `elastic-rl operations show {operation['id']}{cluster.as_options}`"
        raise
    except DeadlineExceeded as e:
        e.hint = "the operation continues; " + _next_commands(cluster, operation)
        raise
    except KeyboardInterrupt:
        say(f"{_name(operation)} continues; " + _next_commands(cluster, operation), to_err=True)
        raise
    _print(operation, output, brief=True)


def _next_commands(cluster: Target, operation: dict[str, Any]) -> str:
    name = operation["id"] + cluster.as_options
    return f"follow it with `elastic-rl operations wait {name}`, cancel it with `elastic-rl operations cancel {name}`"


def _name(operation: dict[str, Any]) -> str:
    desired = f" to {operation['params']['desired']}" if operation["kind"] == "scale" else ""
    return f"{operation['kind']} of {operation['target']}{desired} ({operation['id']})"


def _print(operation: dict[str, Any], output: Format, *, brief: bool = False) -> None:
    if output is Format.JSON:
        tables.write_json(operation)
    elif brief:
        say(f"{operation['state']}: {_name(operation)}, {operation['message']}, after "
              f"{operation['ended_at'] - operation['created_at']:.1f} s")
    else:
        tables.put(out, tables.facts({k: v for k, v in operation.items() if v not in (0, 0.0)}), output)


@contextmanager
def _progress(operation: dict[str, Any]) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Shows the progress on stderr: as a bar on a terminal, elsewhere as a line for each change."""
    if not err.is_terminal:
        last = ""

        def print_change(now: dict[str, Any]) -> None:
            nonlocal last
            counted = f" {now['done']}/{now['total']}" if now["total"] else ""
            text = f"{now['kind']} of {now['target']}: {now['phase']}{counted}" + (
                f", {now['message']}" if now["message"] else "")
            if text != last:
                say(text, to_err=True)
            last = text

        yield print_change
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
    columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=20),
               TextColumn("{task.fields[count]}"), TimeElapsedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(f"{operation['kind']} of {operation['target']}", total=None, count="")

        def update(now: dict[str, Any]) -> None:
            total = now["total"] or None
            bar.update(task, description=f"{now['kind']} of {now['target']}: {now['phase']}", total=total,
                       completed=now["done"], count=f"{now['done']}/{total}" if total else "")

        yield update
