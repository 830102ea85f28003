"""``elastic-rl dashboard``: opens the dashboard by a link that works once."""

from __future__ import annotations

import os
import sys
import time
from typing import Annotated
from urllib.parse import urlsplit

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import Output, Target, api_command, err, out
from elastic_rl.cli.tables import Format

app = typer.Typer()


@api_command(app)
def dashboard(cluster: Target, viewer: Annotated[bool, typer.Option("--viewer", help=(
                  "A link that may only read."))] = False,
              no_open: Annotated[bool, typer.Option("--no-open", help="Only print the link.")] = False,
              output: Output = Format.TABLE) -> None:
    """Open the dashboard in a browser, or print its link."""
    with cluster.api() as api:
        link = api.dashboard_link("viewer" if viewer else "")
    if output is Format.JSON:
        tables.write_json(link)
        return
    out.print(link["url"], markup=False, highlight=False, soft_wrap=True)
    if not no_open and out.is_terminal and _open(link["url"]):
        return
    minutes = max(1, round((link["expires_at"] - time.time()) / 60))
    err.print(f"open it within {minutes} min; it works once, as {link['role']}{_forward(link['url'])}", markup=False,
              highlight=False, soft_wrap=True)


def _open(url: str) -> bool:
    """Whether a browser was started. One in the terminal would not do: the dashboard needs JavaScript."""
    import webbrowser
    graphical = sys.platform != "linux" or any(map(os.environ.get, ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY")))
    return graphical and webbrowser.open(url)


def _forward(url: str) -> str:
    """How to get there from another machine, for an address of this machine only."""
    parts = urlsplit(url)
    if parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        return ""
    return f"\non another machine, run first: ssh -L {parts.port}:{parts.netloc} <this host>"
