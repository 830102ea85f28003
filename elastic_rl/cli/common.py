"""What the commands share: settings from the command line, the cluster that is meant, consoles."""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console

from elastic_rl.cli.tables import Format
from elastic_rl.errors import ConfigError, EtcdUnavailable

if TYPE_CHECKING:
    from elastic_rl.config import Config
    from elastic_rl.coordinator.client.admin_client import AdminClient
    from elastic_rl.coordinator.client.cluster_info import ClusterInfo
    from elastic_rl.host.local_cluster import Cluster

EXTRA = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that takes any setting as ``--key.sub=value``."""
out = Console()
err = Console(stderr=True)

File = Annotated[Path | None, typer.Option("-c", "--config", help="YAML file of settings.")]
Output = Annotated[Format, typer.Option("-o", "--output", help="table, wide or json.")]
Url = Annotated[str, typer.Option("--url", envvar="ELASTIC_RL_URL", metavar="URL[,URL]", show_envvar=True, help=(
    "Admin API of a cluster elsewhere, one URL a replica; else the cluster of this folder."))]
TokenFile = Annotated[Path | None, typer.Option("--token-file", envvar="ELASTIC_RL_TOKEN_FILE", show_envvar=True, help=(
    "File with the token for --url."))]
Ca = Annotated[Path | None, typer.Option("--ca", envvar="ELASTIC_RL_CA", show_envvar=True, help=(
    "PEM file of the authority of the certificates of --url."))]

ELECTION_S = 10.0
"""How long a request waits for a leader, where the command line does not say."""


# -- settings ----------------------------------------------------------------------------------------------------------
def overrides(args: Sequence[str]) -> list[str]:
    """Settings of a command line: ``--key.sub=value`` and ``--key.sub value``. Raises ConfigError for anything else."""
    found, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        if not arg.startswith("--"):
            raise ConfigError(f"unexpected argument {arg!r}", hint="settings are given as --key.sub=value")
        if "=" not in arg:
            if not rest or rest[0].startswith("--"):
                raise ConfigError(f"{arg} has no value", hint=f"write {arg}=VALUE")
            arg += "=" + rest.pop(0)
        found.append(arg)
    return found


def load(ctx: typer.Context, file: Path | None) -> Config:
    """The configuration that a command line asks for. Raises ConfigError."""
    from elastic_rl import config as configuration
    return configuration.load(file, overrides(ctx.args))


def _names_job(ctx: typer.Context, file: Path | None) -> bool:
    return file is not None or any(a == "--job" or a.startswith("--job=") for a in ctx.args)


def find_cluster(ctx: typer.Context, file: Path | None) -> Cluster:
    """The cluster of the job; where no job was named and exactly one is up under run_dir, that one."""
    from elastic_rl.coordinator.client.cluster_info import ClusterInfo
    from elastic_rl.host.local_cluster import Cluster
    cluster = Cluster(load(ctx, file))
    if not _names_job(ctx, file) and ClusterInfo.load(cluster.dir) is None:
        up = [p.parent.parent.name for p in cluster.cfg.run_dir.glob("*/cluster/cluster.json")]
        if len(up) == 1:
            return Cluster(cluster.cfg.model_copy(update={"job": up[0]}))
        if up:
            raise ConfigError(f"several clusters are up: {', '.join(sorted(up))}", hint="name one with --job=NAME")
    return cluster


# -- the cluster that a command talks to -------------------------------------------------------------------------------
@dataclass(frozen=True)
class Target:
    """Where a command's cluster is: in this folder, or anywhere by the URLs of its admin API."""

    ctx: typer.Context
    file: Path | None = None
    url: str = ""
    token_file: Path | None = None
    ca: Path | None = None

    @property
    def remote(self) -> bool:
        """Whether ``--url`` counts. What is set in the environment gives way to a job named on the command line."""
        source = self.ctx.get_parameter_source("url")
        return bool(self.url) and not (source is not None and source.name == "ENVIRONMENT"
                                       and _names_job(self.ctx, self.file))

    @property
    def spelled(self) -> str:
        """What a next command has to add to mean the same cluster, by what was said on the command line."""
        said = [a for a in self.ctx.args if a.startswith(("--job=", "--run_dir="))]
        said += [f"-c {self.file}"] if self.file else []
        for option, value in (("url", self.url), ("token_file", self.token_file), ("ca", self.ca)):
            source = self.ctx.get_parameter_source(option)
            if value and source is not None and source.name == "COMMANDLINE":
                said.append(f"--{option.replace('_', '-')}={value}")
        return "".join(f" {word}" for word in said)

    def info(self) -> ClusterInfo:
        """How to reach it. Raises ConfigError, or EtcdUnavailable when no cluster is up."""
        if not self.remote:
            return find_cluster(self.ctx, self.file).connect()
        if self.ctx.args or self.file:
            load(self.ctx, self.file)  # a misspelt setting is an error here as well
        return _remote_info(self.url, self.token_file, self.ca)

    @contextmanager
    def api(self, *, see: str = "", patience_s: float = ELECTION_S) -> Iterator[AdminClient]:
        """A client of its admin API. Errors of the block get a hint what to do next; ``see``: the command that lists
        what there is. ``patience_s``: how long a request waits for a leader."""
        from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
        info = self.info()
        try:
            yield AdminClient(info, retry_budget_s=patience_s)
        except RequestRefused as e:
            e.hint = e.hint or _advice(e.status, info, see)
            raise
        except EtcdUnavailable as e:
            if self.remote:
                e.hint = "check --url (and --ca for https), and that a coordinator runs there"
            raise


def _advice(status: int, info: ClusterInfo, see: str) -> str:
    source = info.tokens_file or "nowhere: name a file with --token-file"
    match status:
        case 401:
            return f"the token is taken from {source}"
        case 403:
            return f"this needs an operator's token; the one in use is from {source}"
        case 412:
            return "somebody else changed it in between: look at it again, then repeat" + (f" (`{see}`)" if see else "")
        case 404 | 409 | 410 if see:
            return f"`{see}` shows what there is"
        case _:
            return ""


def _remote_info(url: str, token_file: Path | None, ca: Path | None) -> ClusterInfo:
    from elastic_rl.coordinator.client.cluster_info import ClusterInfo

    class Remote(ClusterInfo):
        def token(self, role: str) -> str:
            return read_token(Path(self.tokens_file), role) if self.tokens_file else ""

    urls = [u.strip().rstrip("/") for u in url.split(",") if u.strip()]
    for each in urls:
        if not each.startswith(("http://", "https://")):
            raise ConfigError(f"{each!r} is no URL of an admin API", hint="write it as https://HOST:PORT")
    if ca is not None and not ca.exists():
        raise ConfigError(f"there is no file {ca}", hint="--ca names the PEM file of an authority")
    return Remote("", [], urls, str(token_file or ""), "", "", str(ca or ""))


def read_token(path: Path, role: str) -> str:
    """The token of a file: the file's only word, or that of the role in a cluster's ``{role: token}`` (a viewer's where
    it has no operator's). Raises ConfigError."""
    try:
        text = path.read_text().strip()
        if not text.startswith("{"):
            return text
        tokens = json.loads(text)
    except (OSError, ValueError) as e:
        raise ConfigError(f"no token can be read from {path}: {e}",
                          hint="--token-file names a file with a token, or a cluster's tokens.json") from e
    return str(tokens.get(role) or tokens.get("viewer") or "")


def api_command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function a command of ``app`` that talks to a cluster: its first parameter is the Place, from options
    that all these commands have."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        hints = get_type_hints(function, include_extras=True)
        own = [p.replace(annotation=hints[p.name]) for p in inspect.signature(function).parameters.values()][1:]
        common = {"file": (File, None), "url": (Url, ""), "token_file": (TokenFile, None), "ca": (Ca, None)}
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters = [inspect.Parameter("ctx", kind, annotation=typer.Context), *(p.replace(kind=kind) for p in own),
                      *(inspect.Parameter(n, kind, annotation=a, default=d) for n, (a, d) in common.items())]

        @functools.wraps(function)
        def command(**given: Any) -> None:
            function(Target(given.pop("ctx"), *(given.pop(n) for n in common)), **given)

        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {p.name: p.annotation for p in parameters}
        app.command(name, context_settings=EXTRA)(command)
        return function

    return register
