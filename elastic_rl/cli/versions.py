"""``elastic-rl versions``. A version is named STREAM (its head), STREAM/12, or STREAM/-1 (the one before the head)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import EXTRA, File, Output, err, find_cluster, out, say
from elastic_rl.cli.exit_codes import Exit
from elastic_rl.cli.tables import Format
from elastic_rl.runtime.words import counted

if TYPE_CHECKING:
    from elastic_rl.dcs.manifest import Manifest
    from elastic_rl.dcs.versions.service import Progress, VersionService

app = typer.Typer(no_args_is_help=True, rich_markup_mode=None,
                  help="Versions in the checkpoint service. A version is named STREAM for its head, STREAM/12, or "
                       "STREAM/-1 for the one before the head.")
Name = Annotated[str, typer.Argument(metavar="STREAM[/N]", help="Such as policy, policy/12 or policy/-1.")]


@contextmanager
def _service(ctx: typer.Context, file: Path | None) -> Iterator[VersionService]:
    from elastic_rl.dcs.versions.service import VersionService
    from elastic_rl.host import inherited_model
    from elastic_rl.host.job_secrets import dcs_security
    cluster = find_cluster(ctx, file)
    info = cluster.connect()
    with VersionService(cluster.here, info.job, info.etcd_endpoints, dcs_security(cluster.cfg),
                        inherited_model.began_with(cluster.cfg)) as service:
        yield service


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    """A progress bar, on a terminal only."""
    if not err.is_terminal:
        yield lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(True), TransferSpeedColumn())
    with Progress(*columns, console=err, transient=True) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


# -- reads ------------------------------------------------------------------------------------------------------------
@app.command("ls", **EXTRA)
def ls(ctx: typer.Context, stream: Annotated[str, typer.Option("--stream", help="Only of this stream.")] = "",
       file: File = None, output: Output = Format.TABLE) -> None:
    """List versions, the oldest first."""
    with _service(ctx, file) as service:
        rows = service.listing(stream)
    if output is not Format.JSON:
        rows = [{**r, "is": "head" if r["head"] else "", "durable": "yes" if r["durable"] else "", "copies": _copies(r)}
                for r in rows]
    tables.show(out, rows, ("stream", "number", "state", "is", "nbytes", "step", "committed_at", "durable", "copies",
                             "sources", "pins"), output, wide=("epoch", "manifest", "meta"))


@app.command(**EXTRA)
def show(ctx: typer.Context, name: Name, file: File = None, output: Output = Format.TABLE) -> None:
    """Show one version and its tensors."""
    from elastic_rl.dcs.versions.service import tensor_rows
    with _service(ctx, file) as service:
        version = service.resolve(name)
        manifest = service.manifest(version)
        older = service.before(version)
        shared = _shared(manifest, service.manifest(older)) if older is not None else 0
        nodes = service.nodes(version)
    rows = tensor_rows(manifest)
    if output is Format.JSON:
        tables.write_json({"version": version.model_dump(mode="json"), "chunks": dict(manifest.chunks),
                            "shared_bytes": shared, "tensors": rows})
        return
    facts = {"version": f"{version.stream}/{version.number}", "state": version.state, "epoch": version.epoch,
             "committed": tables.cell(version.committed_at, "committed_at"), "bytes": tables.size(manifest.nbytes),
             "tensors": len(manifest.tensors), "chunks": len(manifest.chunks), "nodes": _some(nodes),
             "manifest": version.manifest, **version.meta}
    if older is not None:
        facts[f"as in {older.number}"] = tables.size(shared)
    for key, value in facts.items():
        out.print(f"{key:<14} {tables.cell(value, key)}", highlight=False, markup=False, soft_wrap=True)
    out.print()
    tables.show(out, rows, ("dtype", "shape", "nbytes", "name"), output, wide=("slices",))


def _copies(row: dict[str, Any]) -> str:
    """The copies of a version, and how many are wanted where these are fewer."""
    copies, wanted = row["copies"], row["copies_wanted"]
    if copies is None or wanted is None:
        return ""
    return f"{copies} of {wanted}" if copies < wanted else str(copies)


def _some(nodes: list[str], most: int = 5) -> str:
    return ", ".join(nodes[:most]) + (f" and {len(nodes) - most} more" if len(nodes) > most else "")


def _shared(new: Manifest, old: Manifest) -> int:
    return sum(n for d, n in new.chunks.items() if d in old.chunks)


@app.command(**EXTRA)
def diff(ctx: typer.Context, old: Name, new: Name, file: File = None, output: Output = Format.TABLE) -> None:
    """Show which tensors differ between two versions, and how much."""
    with _service(ctx, file) as service:
        changes = service.diff(old, new)
    rows: list[dict[str, Any]] = [{**asdict(c), "share": c.share} for c in changes]
    if output is Format.JSON:
        tables.write_json(rows)
        return
    if not rows:
        out.print("no difference", highlight=False)
        return
    shown = [{**r, "changed_%": 100 * r["share"] if r["what"] == "changed" else None} for r in rows]
    tables.show(out, shown, ("what", "elements", "changed_%", "max_abs", "relative_l2", "name"), output)
    changed, elements = sum(c.changed for c in changes), sum(c.elements for c in changes)
    differing = counted(len(changes), "tensor")
    out.print(f"{differing} with differences, in {changed} of {elements} elements", highlight=False)


@app.command(**EXTRA)
def verify(ctx: typer.Context, name: Name, file: File = None, output: Output = Format.TABLE) -> None:
    """Read every chunk on every node that should have it; code 1 when one is missing or corrupt."""
    with _service(ctx, file) as service, _bar("reading") as progress:
        version = service.resolve(name)
        findings, nbytes = service.verify(name, progress)
        nodes = service.nodes(version)
    if output is Format.JSON:
        tables.write_json({"version": f"{version.stream}/{version.number}", "read_bytes": nbytes,
                            "findings": [asdict(f) for f in findings]})
    elif findings:
        tables.show(out, [asdict(f) for f in findings], ("node", "what", "digest"), output)
    else:
        where = f"on {_some(nodes)}" if nodes else "(no node should have it)"
        out.print(f"{version.stream}/{version.number} is complete {where}: {tables.size(nbytes)} read", highlight=False)
    if findings:
        raise typer.Exit(Exit.FAILED)


# -- pins -------------------------------------------------------------------------------------------------------------
@app.command(**EXTRA)
def pin(ctx: typer.Context, name: Name, file: File = None,
        duration: Annotated[str, typer.Option("--for", help="90s, 15m, 2h, 7d.")] = "1d") -> None:
    """Keep a version from being released for a while."""
    with _service(ctx, file) as service:
        version = service.pin(name, duration)
        out.print(f"{version.stream}/{version.number} is pinned by {service.me} for {duration}", highlight=False)


@app.command(**EXTRA)
def unpin(ctx: typer.Context, name: Name,
          holder: Annotated[str, typer.Option(help="Holder of the pin; default: you.")] = "",
          file: File = None) -> None:
    """End a pin."""
    with _service(ctx, file) as service:
        service.unpin(name, holder)
    out.print(f"{name} is no longer pinned by {holder or 'you'}", highlight=False)


# -- export and import ------------------------------------------------------------------------------------------------
@app.command(**EXTRA)
def export(ctx: typer.Context, name: Name, folder: Annotated[Path, typer.Argument(help="New folder.")],
           like: Annotated[Path | None, typer.Option(help="Model folder to take config and tokenizer from.")] = None,
           shard: Annotated[float, typer.Option(min=0.001, help="Largest file, in GB.")] = 5.0,
           force: Annotated[bool, typer.Option("--force", help="Replace an existing model folder.")] = False,
           file: File = None) -> None:
    """Write a version as a Hugging Face model folder."""
    with _service(ctx, file) as service, _bar("writing") as progress:
        files = service.export(name, folder, like=like, shard_bytes=int(shard * 1e9), force=force, progress=progress)
    out.print(f"{folder}: {', '.join(files)}", highlight=False, soft_wrap=True)


@app.command("import", **EXTRA)
def import_(ctx: typer.Context, folder: Annotated[Path, typer.Argument(help="Model folder with safetensors.")],
            stream: Annotated[str, typer.Argument(help="Such as policy.")],
            yes: Annotated[bool, typer.Option("--yes", help="Also while a run is active.")] = False,
            file: File = None) -> None:
    """Publish a model folder's weights as a stream's next version."""
    with _service(ctx, file) as service, _bar("reading") as progress:
        version = service.import_(folder, stream, yes=yes, progress=progress)
    out.print(f"{version.stream}/{version.number}: {tables.size(version.nbytes)}", highlight=False)


# -- for other programs -----------------------------------------------------------------------------------------------
@app.command(**EXTRA)
def access(ctx: typer.Context, target: Annotated[Path, typer.Argument(metavar="ACCESS", help=(
               "File to write, such as access.json; it has secrets, so its owner alone may read it."))],
           file: File = None) -> None:
    """Write what a program on this host needs to publish and pull versions of a job: elastic_rl.dcs.connect(ACCESS)."""
    from elastic_rl.errors import OutputFailed
    from elastic_rl.host.job_secrets import service_access
    cluster = find_cluster(ctx, file)
    info = cluster.connect()
    found = service_access(cluster.cfg, info.etcd_endpoints)
    try:
        found.save(target)
    except OSError as e:
        raise OutputFailed(f"{target} cannot be written: {e.strerror}", hint="name a file in a folder of yours") from e
    say(f"{target}: versions of job {info.job}; keep it as you would a private key")


@app.command(**EXTRA)
def follow(ctx: typer.Context, stream: Annotated[str, typer.Argument(help="Such as policy.")],
           after: Annotated[int, typer.Option(min=0, help="Only versions with higher numbers.")] = 0,
           timeout: Annotated[float | None, typer.Option(min=0, metavar="SECONDS", show_default=False, help=(
               "End when no newer version was committed for so long; else only with Ctrl-C."))] = None,
           file: File = None, output: Output = Format.TABLE) -> None:
    """Print the newest version of a stream, then each newer one as it is committed, a line each.

    With -o json each line is a JSON object. A reader that is slow skips versions, and gets the newest."""
    with _service(ctx, file) as service:
        for version in service.follow(stream, after=after, timeout_s=timeout):
            if output is Format.JSON:
                print(version.model_dump_json(), flush=True)
            else:
                say(f"{version.stream}/{version.number}  {tables.size(version.nbytes)}  "
                    f"{tables.cell(version.committed_at, 'committed_at')}  "
                    + "  ".join(f"{k}={v}" for k, v in version.meta.items() if k != "trace"))


# -- recovery ---------------------------------------------------------------------------------------------------------
@app.command(**EXTRA)
def recover(ctx: typer.Context,
            catalog: Annotated[str, typer.Option(help="Id of the catalog, where nodes belong to several.")] = "",
            dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be recovered.")] = False,
            yes: Annotated[bool, typer.Option("--yes", help="Also while a trainer is running; it is fenced.")] = False,
            file: File = None, output: Output = Format.TABLE) -> None:
    """Rebuild the catalog of versions after etcd lost its data or was restored from an old backup.

    It is rebuilt from the disks of the registered nodes and from the durable store: start the nodes first. Publishing
    and the dropping of chunks, which are suspended until then, work again afterwards.
    """
    with _service(ctx, file) as service:
        planned, unreachable = service.plan_recovery(catalog)
        if not dry_run:
            planned = service.recover(catalog, yes=yes)
    rows = [{"stream": r.version.stream, "number": r.version.number, "nbytes": r.version.nbytes,
             "durable": "yes" if r.durable else "", "found": "whole"} for r in planned.versions]
    rows += [{"stream": v.stream, "number": v.number, "nbytes": v.nbytes, "durable": "", "found": why}
             for v, why in planned.lost]
    if output is Format.JSON:
        tables.write_json({"catalog": planned.catalog, "recovered": not dry_run, "versions": rows,
                           "unreachable_nodes": unreachable})
        return
    tables.show(out, rows, ("stream", "number", "nbytes", "durable", "found"), output)
    if unreachable:
        err.print(f"no answer from {_some(unreachable)}: run this again when they are back", highlight=False)
    out.print("nothing was changed (--dry-run)" if dry_run else
              f"recovered {counted(len(planned.versions), 'version')}", highlight=False)
