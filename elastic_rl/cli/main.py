"""The ``elastic-rl`` command: its parts put together, and its exit code.

Every command takes ``-c FILE`` and any setting as ``--key.sub=value``; the exit codes are in ``exit_codes.py``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import (
    alerts,
    autoscale,
    changes,
    chaos,
    completion,
    dashboard,
    debug,
    etcd,
    hosts,
    jobs,
    listings,
    logs,
    metrics,
    run,
    samples,
    stacks,
    test_hosts,
    versions,
)
from elastic_rl.cli.common import EXTRA, err
from elastic_rl.cli.completion import COMPLETE_VAR, PROGRAM, Shell
from elastic_rl.cli.exit_codes import Exit, code_of, describe
from elastic_rl.cli.hints import with_address
from elastic_rl.cli.tables import printable
from elastic_rl.errors import ElasticRLError
from elastic_rl.runtime.files import os_error_text
from elastic_rl.runtime.text_encoding import use_utf8

if TYPE_CHECKING:
    from elastic_rl.bench import Benches

log = logging.getLogger(__name__)

_LISTS = ("engines", "versions", "operations", "alerts", "etcd", "test-hosts")
"""Groups that run their ``ls`` where no command of theirs is named."""

_STYLE: dict[str, Any] = {"rich_markup_mode": None, "pretty_exceptions_enable": False}

app = typer.Typer(add_completion=False, no_args_is_help=True, **_STYLE,
                  help="Fault-tolerant, elastic reinforcement learning for LLMs. Any setting is also --key.sub=value.",
                  epilog=describe())
for _part in (run.app, jobs.app, logs.app, stacks.app, listings.app, hosts.app, metrics.app, samples.app, changes.app,
              autoscale.app, dashboard.app):
    app.add_typer(_part)
app.add_typer(changes.engines, name="engines")
app.add_typer(changes.operations, name="operations")
app.add_typer(alerts.app, name="alerts")
app.add_typer(test_hosts.app, name="test-hosts")
app.add_typer(versions.app, name="versions")
app.add_typer(debug.app, name="debug")
app.add_typer(etcd.app, name="etcd")
app.add_typer(chaos.app, name="chaos")
app.add_typer(run.config_app, name="config")


@app.command("completion")
def _completion(shell: Annotated[Shell, typer.Argument(help="The shell that sources it.")]) -> None:
    """Print a completion script: source <(elastic-rl completion bash)."""
    sys.stdout.write(completion.script(shell) + "\n")


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``elastic-rl``. ``argv``: of a caller in the same process, which has its own output."""
    if argv is None:
        use_utf8()
    args = list(sys.argv[1:] if argv is None else argv)
    if args[:1] and args[0] in _LISTS and (
            len(args) == 1 or (args[1].startswith("-") and args[1] not in ("-h", "--help"))):
        args.insert(1, "ls")
    if COMPLETE_VAR in os.environ:
        from typer.completion import completion_init
        completion_init()
    with _errors_reported(args):
        app(args=args, prog_name=PROGRAM)


def run_benches(benches: Benches, argv: Sequence[str]) -> None:
    """Entry point of a program that is the command ``bench``, with other benches than the package's own."""
    program = typer.Typer(add_completion=False, **_STYLE)
    program.command(**EXTRA, no_args_is_help=True)(run.bench)
    with _errors_reported(argv):
        program(args=list(argv), prog_name=benches.program, obj=benches)


@contextlib.contextmanager
def _errors_reported(args: Sequence[str]) -> Iterator[None]:
    """Inside, the project's own errors become a message, a hint and an exit code, those of the system a message; a
    traceback is a bug. ``args``: the command line."""
    try:
        yield
    except ElasticRLError as e:
        err.print(f"error: {printable(e.message)}", markup=False, highlight=False, soft_wrap=True)
        if e.hint:
            err.print(f"hint: {printable(with_address(e.hint, args))}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(code_of(e))
    except OSError as e:  # of a full disk, most likely, wherever it was written to
        log.debug("the command failed", exc_info=True)
        err.print(f"error: {printable(os_error_text(e))}", markup=False, highlight=False, soft_wrap=True)
        sys.exit(Exit.FAILED)
    except KeyboardInterrupt:
        err.print("interrupted")
        sys.exit(Exit.INTERRUPTED)


if __name__ == "__main__":
    main()
