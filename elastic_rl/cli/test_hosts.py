"""``elastic-rl test-hosts``: the hosts that ``up --hosts`` has made on this machine, and faults of them."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, UNPARSED, File, Output, find_cluster_alone, out, say
from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError

if TYPE_CHECKING:
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="Hosts in namespaces of this machine, which `up --hosts` makes: list them, and try faults.")
_Host = Annotated[str, typer.Argument(metavar="HOST", help="Name of the host, such as host-2.")]
_COLUMNS = ("host", "state", "address", "pid", "run_dir")


def hosts_of(cluster: Cluster) -> ClusterHosts:
    """The test hosts of a cluster, which may have none."""
    from elastic_rl.host.test_hosts.cluster_hosts import ClusterHosts
    return ClusterHosts(cluster, say)


def _hosts(ctx: typer.Context, file: Path | None) -> ClusterHosts:
    """The test hosts of the cluster that a command line names, or of the only one that is up, with its settings."""
    from elastic_rl.host import cluster_settings
    from elastic_rl.host.local_cluster import Cluster
    cluster = find_cluster_alone(ctx, file)
    if not cluster.named:
        raise ConfigError("hosts on this machine are of a cluster with a name", hint="give --cluster=NAME")
    location = {"run_dir": str(cluster.cfg.run_dir), "cluster": cluster.cfg.cluster}
    return hosts_of(Cluster(cluster_settings.on_top(cluster.paths.settings, location)))


@app.command("ls", **EXTRA)
def ls(ctx: typer.Context, file: File = None, output: Output = Format.TABLE) -> None:
    """List the hosts, and whether they have power and network. What the cluster knows of them, `hosts` shows."""
    rows: list[dict[str, Any]] = [asdict(host) for host in _hosts(ctx, file).all()]
    tables.show(out, [{**row, "host": row.pop("name"), "run_dir": str(row["run_dir"])} for row in rows], _COLUMNS,
                output)


@app.command("power-off", **EXTRA)
def power_off(ctx: typer.Context, host: _Host, file: File = None) -> None:
    """End everything on a host at once, as a power cut does. What is on its disk stays."""
    was_on = _hosts(ctx, file).power_off(host)
    say(f"powered off {host}" if was_on else f"{host} was off")


@app.command("power-on", **EXTRA)
def power_on(ctx: typer.Context, host: _Host, file: File = None) -> None:
    """Bring up a host that is off, as a host of its cluster."""
    _hosts(ctx, file).power_on(host)
    say(f"{host} is on")


@app.command("cut", **EXTRA)
def cut(ctx: typer.Context, host: _Host, file: File = None) -> None:
    """Take a host off the network; what is on it runs on."""
    _hosts(ctx, file).cut(host)
    say(f"{host} is cut off")


@app.command("block", **EXTRA)
def block(ctx: typer.Context, sender: _Host, receiver: Annotated[str, typer.Argument(
              metavar="RECEIVER", help="Name of the host that it does not reach.")], file: File = None) -> None:
    """Have what a host sends to another one get lost. What the other one sends arrives."""
    if sender == receiver:
        raise ConfigError(f"{sender} does not reach itself over the network", hint="name two hosts")
    _hosts(ctx, file).block(sender, receiver)
    say(f"{sender} does not reach {receiver}")


@app.command("impair", **EXTRA)
def impair(ctx: typer.Context, host: _Host, file: File = None,
           delay: Annotated[float, typer.Option(min=0, max=60e3, metavar="MS", help="Delay, each way.")] = 0.0,
           jitter: Annotated[float, typer.Option(min=0, max=60e3, metavar="MS", help=(
               "Up to so much more, drawn for each frame."))] = 0.0,
           loss: Annotated[float, typer.Option(min=0, max=1, metavar="SHARE", help=(
               "Share of the frames that get lost, each way, such as 0.05."))] = 0.0,
           rate: Annotated[float, typer.Option(min=0, metavar="KIB", help=(
               "KiB that pass in a second, each way. 0: any number."))] = 0.0) -> None:
    """Have a host's link to the network be late, lossy or slow."""
    from elastic_rl.host.test_hosts.impaired_link import Impairment
    try:
        impairment = Impairment(delay / 1e3, jitter / 1e3, loss, rate * 1024)
    except ValueError as e:
        raise ConfigError(str(e), hint="numbers are finite") from e
    if impairment == Impairment():
        raise ConfigError("nothing is to be impaired", hint="give --delay, --jitter, --loss or --rate")
    _hosts(ctx, file).impair(host, impairment)
    say(f"the link of {host} has {impairment}")


@app.command("heal", **EXTRA)
def heal(ctx: typer.Context, host: _Host, file: File = None) -> None:
    """Put a host on the network again that was cut off, blocked or impaired."""
    _hosts(ctx, file).heal(host)
    say(f"{host} is on the network")


@app.command("run", context_settings=UNPARSED)
def run(ctx: typer.Context, words: Annotated[list[str], typer.Argument(
            metavar="HOST [--cluster=NAME] COMMAND...", help="Options of this command stand before COMMAND.")],
        file: File = None) -> None:
    """Run a command on a host, in its namespaces; this command becomes it."""
    left, found = list(words), list[str]()
    while left and len(found) < 2:
        (ctx.args if left[0].startswith("--") else found).append(left.pop(0))
    if len(found) < 2:
        raise ConfigError("a host and a command are needed", hint="write it as `test-hosts run host-2 ip addr`")
    host, command = found
    line = _hosts(ctx, file).inside(host, command, *left, cwd=Path.cwd())
    os.execvp(line[0], line)
