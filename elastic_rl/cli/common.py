"""What the commands share: settings from the command line, the cluster that they address, consoles."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from rich.console import Console
from typer.core import TyperCommand

from elastic_rl.cli.hints import address
from elastic_rl.cli.tables import Format, printable
from elastic_rl.errors import ConfigError, ElasticRLError, EtcdUnavailable

if TYPE_CHECKING:
    from elastic_rl.config import Config
    from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
    from elastic_rl.coordinator.client.cluster_info import ClusterInfo
    from elastic_rl.host.cluster_logs import ClusterLogs
    from elastic_rl.host.local_cluster import Cluster

UNPARSED = {"allow_extra_args": True, "ignore_unknown_options": True}
"""Context settings of a command that gets words as they are."""


class SettingsCommand(TyperCommand):
    """A command that accepts any setting as ``--key.sub=value``, which gets into ``ctx.args``. Settings are taken out
    before arguments are told apart: else the first one would stand for an argument that was forgotten, and the command
    would go to another job than the one it names."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        takes_value = {name: not (getattr(option, "is_flag", False) or getattr(option, "count", False))
                       for option in self.get_params(ctx) for name in (*option.opts, *option.secondary_opts)}
        own, settings = split_settings(args, takes_value, strict=not ctx.resilient_parsing)
        left = super().parse_args(ctx, own)
        ctx.args = [*settings, *left]
        return ctx.args


def split_settings(words: Sequence[str], takes_value: Mapping[str, bool], *, strict: bool = True
                   ) -> tuple[list[str], list[str]]:
    """The words of a command line that are options and arguments of its command, and its settings, each as
    ``--key.sub=value``, however it is written. ``takes_value``: by name of each option of the command, such as ``-o``
    and ``--wait``. Raises ConfigError, if ``strict``, for an option or a setting that another one follows in the place
    of its value."""
    own, settings, left = list[str](), list[str](), list(words)
    while left:
        word = left.pop(0)
        if word == "--":
            return [*own, word, *left], settings
        name, _, _ = word.partition("=")
        is_setting = word.startswith("--") and name not in takes_value
        value = list[str]()
        if "=" not in word and (is_setting or takes_value.get(word)):
            if left and not left[0].startswith("--") and left[0] not in takes_value:
                value.append(left.pop(0))
            elif strict:
                raise ConfigError(f"{word} has no value",
                                  hint=f"write {word}{'=' if word.startswith('--') else ' '}VALUE")
        if is_setting:
            settings.append("=".join((word, *value)))
        else:
            own += word, *value
    return own, settings


EXTRA: dict[str, Any] = {"cls": SettingsCommand, "context_settings": UNPARSED}
"""What makes a command accept any setting as ``--key.sub=value``."""
out = Console()
err = Console(stderr=True)

File = Annotated[Path | None, typer.Option("-c", "--config", help="YAML file of settings.")]
Output = Annotated[Format, typer.Option("-o", "--output", help="table, wide or json.")]
URL_ENV = "ELASTIC_RL_URL"
Url = Annotated[str, typer.Option("--url", envvar=URL_ENV, metavar="URL[,URL]", show_envvar=True, help=(
    "Admin API of a cluster elsewhere, one URL a replica; else the cluster of run_dir."))]
TokenFile = Annotated[Path | None, typer.Option("--token-file", envvar="ELASTIC_RL_TOKEN_FILE", show_envvar=True, help=(
    "File with the token for --url, or a cluster's credentials.json."))]
Ca = Annotated[Path | None, typer.Option("--ca", envvar="ELASTIC_RL_CA", show_envvar=True, help=(
    "PEM file of the authority of the certificates of --url."))]

_ETCD_BUDGET_S = 2.0
ELECTION_S = 10.0
"""How long a request waits for a leader, unless the command line says otherwise."""


# -- settings ----------------------------------------------------------------------------------------------------------
def say(line: str, *, to_err: bool = False) -> None:
    """Prints a line as it is, without markup and without breaking it."""
    (err if to_err else out).print(printable(line), markup=False, highlight=False, soft_wrap=True)


def overrides(args: Sequence[str]) -> list[str]:
    """The settings of a command line, ``split_settings`` having put them first. Raises ConfigError for an argument that
    is left after them."""
    if stray := next((arg for arg in args if not arg.startswith("--")), None):
        raise ConfigError(f"unexpected argument {stray!r}",
                          hint="this command takes no more arguments; settings are given as --key.sub=value")
    return list(args)


def load(ctx: typer.Context, file: Path | None) -> Config:
    """The configuration of a command line. Raises ConfigError."""
    from elastic_rl import config as configuration
    return configuration.load(file, overrides(ctx.args))


def _given(ctx: typer.Context, file: Path | None) -> dict[str, Any]:
    """The settings that a command line names, and no defaults. Raises ConfigError."""
    from elastic_rl import config as configuration
    return configuration.given(file, overrides(ctx.args))


def named_cluster(ctx: typer.Context, file: Path | None, *, say: Callable[[str], None] | None = None) -> Cluster:
    """The cluster of the job that the command line, or the default, names. A cluster that was started and not taken
    down keeps its settings where the command line names none."""
    return _cluster_of(_given(ctx, file), file, say=say)


def _cluster_of(given: Mapping[str, Any], file: Path | None, *, stored: bool = True, of_cluster: bool = False,
                say: Callable[[str], None] | None = None) -> Cluster:
    """``of_cluster``: with the settings of the cluster, and not those of the job."""
    from elastic_rl import config as configuration
    from elastic_rl.host import cluster_settings
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.host.paths import JobPaths
    where = Cluster(cluster_settings.location(given))
    location = {"job": where.cfg.job, "run_dir": str(where.cfg.run_dir), "cluster": where.cfg.cluster}
    if not stored or not where.known:
        cfg = configuration.parse({**given, **location})
    else:
        path = where.paths.settings if of_cluster else JobPaths.of(where.cfg).submitted_settings
        cfg = cluster_settings.on_top(path, {**given, **location}, of_file=configuration.given(file, ()))
        if where.named and not of_cluster:
            cfg = cluster_settings.with_sections_of_cluster(where.paths.settings, cfg, given)
    return Cluster(cfg, say=say) if say else Cluster(cfg)


def cluster_to_start(ctx: typer.Context, file: Path | None, *, say: Callable[[str], None]) -> tuple[Cluster, bool]:
    """The cluster that ``up`` starts, and whether the command line names a job that is to be on it. A cluster with a
    name starts without one."""
    given = _given(ctx, file)
    return _cluster_of(given, file, of_cluster=True, say=say), "job" in given


def cluster_to_stop(ctx: typer.Context, file: Path | None) -> Cluster:
    """The cluster that ``down`` stops: that of the job, or the only one of a job's own that is up. One with a name must
    be named, and no job, since it may have others too. Raises ConfigError."""
    from elastic_rl.host import cluster_settings, kept_state
    from elastic_rl.host.paths import jobs_with_cluster, named_clusters_up
    given = _given(ctx, file)
    where = cluster_settings.location(given)
    if where.cluster and "job" in given:
        raise ConfigError(f"job {where.job} is on cluster {where.cluster}, which other jobs may use",
                          hint=f"`elastic-rl stop {kept_state.options(where)}` stops the job, `elastic-rl down "
                               f"{kept_state.cluster_options(where)}` the cluster with all its jobs")
    if "cluster" not in given and not _names_job(ctx, file):
        up, run_dir = jobs_with_cluster(where.run_dir), where.run_dir
        if where.job not in up:
            given["job"] = _only(up, "clusters are up", "--job") or where.job
        if not up and (named := named_clusters_up(run_dir)):
            raise ConfigError(f"a cluster with a name is stopped by its name: {', '.join(named)} up",
                              hint="`elastic-rl down --cluster=NAME` stops it with all its jobs")
        given["cluster"] = ""
    return _cluster_of(given, file, stored=False)


def _only(names: Sequence[str], what: str, option: str) -> str:
    """The only one of the names; empty where there is none. Raises ConfigError where there are several."""
    if len(names) > 1:
        raise ConfigError(f"several {what}: {', '.join(names)}", hint=f"name one with {option}=NAME")
    return names[0] if names else ""


def _names_job(ctx: typer.Context, file: Path | None) -> bool:
    return file is not None or any(a.startswith("--job=") for a in ctx.args)


def names_target(ctx: typer.Context, file: Path | None) -> bool:
    """Whether the command line, or its file, names a job or a cluster."""
    return not _given(ctx, file).keys().isdisjoint(("job", "cluster"))


def set_job(ctx: typer.Context, job: str) -> None:
    """Turns the argument JOB of a command line, if it is given, into ``--job=JOB``."""
    if job:
        ctx.args.insert(0, f"--job={job}")


def location(ctx: typer.Context, file: Path | None) -> Config:
    """A configuration with nothing but the job and the run_dir of the command line."""
    from elastic_rl.host import cluster_settings
    return cluster_settings.location(_given(ctx, file))


def find_cluster(ctx: typer.Context, file: Path | None, *, stored: bool = True,
                 say: Callable[[str], None] | None = None) -> Cluster:
    """The cluster of the job; where no job is named and exactly one is on a cluster that is up under run_dir, that one.
    The settings are those that it was started with, and those of the command line on top; without ``stored`` only the
    latter, for commands that must work with damaged settings too."""
    from elastic_rl.host import cluster_settings
    from elastic_rl.host.local_cluster import Cluster
    from elastic_rl.host.paths import jobs_with_cluster, named_clusters_up
    given = _given(ctx, file)
    where = Cluster(cluster_settings.location(given))
    if not _names_job(ctx, file):
        if where.named and "cluster" in given:
            up = where.jobs
        else:
            up = jobs_with_cluster(where.cfg.run_dir)
            for name in named_clusters_up(where.cfg.run_dir):
                up += Cluster(where.cfg.model_copy(update={"cluster": name})).jobs
        if where.cfg.job not in up:
            given["job"] = _only(up, "jobs are on clusters that are up", "--job") or where.cfg.job
    return _cluster_of(given, file, stored=stored, say=say)


def find_cluster_alone(ctx: typer.Context, file: Path | None) -> Cluster:
    """The cluster that a command line names, by itself or by one of its jobs, for a command that is about no job; where
    it names neither and exactly one cluster is up under run_dir, that one. Raises ConfigError."""
    from elastic_rl.host import cluster_settings
    from elastic_rl.host.paths import jobs_with_cluster, named_clusters_up
    given = _given(ctx, file)
    if "cluster" not in given and not _names_job(ctx, file):
        where = cluster_settings.location(given)
        own, named = jobs_with_cluster(where.run_dir), named_clusters_up(where.run_dir)
        if where.cluster not in named and where.job not in own:
            up = {f"--job={job}": {"job": job} for job in own} | {f"--cluster={c}": {"cluster": c} for c in named}
            given |= up.get(_only([*up], "clusters are up", "--cluster=NAME or --job"), {})
    return _cluster_of(given, file, stored=False)


def logs_of(cluster: Cluster) -> dict[str, Path]:
    """The logs of the cluster's services and the job's processes, by part."""
    from elastic_rl.host.paths import JobPaths
    folders = dict.fromkeys((cluster.paths.logs, JobPaths.of(cluster.cfg).logs))  # they may be the same
    return dict(sorted((path.stem, path) for folder in folders for path in folder.glob("*.log")))


@contextmanager
def logs_of_hosts(cluster: Cluster, *, required: bool) -> Iterator[ClusterLogs | None]:
    """The logs of the cluster's hosts; None where only this one has any, and where etcd cannot be asked, unless that is
    ``required``: what this host has is shown all the same."""
    far = None
    with ExitStack() as stack:
        try:
            if required and not cluster.named:
                raise ConfigError("--host is for a host of a cluster with a name", hint="leave it out")
            if required or cluster.named and not cluster.host.is_local:  # else nobody can have joined it
                from elastic_rl.host.cluster_logs import ClusterLogs
                far = stack.enter_context(ClusterLogs.of(cluster, retry_budget_s=_ETCD_BUDGET_S))
                far.where("")  # whether etcd answers
        except ElasticRLError as e:
            if required:
                raise
            say(f"other hosts cannot be asked, this is what this one has: {e.message}", to_err=True)
            far = None
        yield far


def cluster_to_delete(ctx: typer.Context, file: Path | None, *, asks: bool) -> Cluster:
    """The cluster whose state ``down --purge`` deletes: that of the job which the command line, or the default, names,
    and never the one that happens to be up instead. Raises ConfigError where it names none and nobody is asked, or the
    job is on a cluster with a name."""
    from elastic_rl.host import cluster_settings
    if not _names_job(ctx, file) and (not asks or "cluster" in _given(ctx, file)):
        raise ConfigError("no job is named whose state is to be deleted", hint="name it with --job=NAME")
    given = _given(ctx, file)
    named = bool(cluster_settings.location(given).cluster)
    return _cluster_of(given, file, stored=named)  # which has to reach the etcd of one with a name


# -- the cluster that a command addresses ------------------------------------------------------------------------------
@dataclass(frozen=True)
class Target:
    """The cluster that a command addresses: one started in this folder, or any other by the URLs of its admin API."""

    ctx: typer.Context
    file: Path | None = None
    url: str = ""
    token_file: Path | None = None
    ca: Path | None = None

    @property
    def remote(self) -> bool:
        """Whether ``--url`` counts. One from the environment gives way to a run_dir or a cluster that the command line
        or its file names, which are of this machine; a job is one of the cluster at the URL."""
        source = self.ctx.get_parameter_source("url")
        return bool(self.url) and not (source is not None and source.name == "ENVIRONMENT"
                                       and not _given(self.ctx, self.file).keys().isdisjoint(("run_dir", "cluster")))

    @property
    def as_options(self) -> str:
        """The options, each after a space, with which another command addresses the same cluster: those of this command
        line."""
        words = [*self.ctx.args, *(("-c", str(self.file)) if self.file else ())]
        for option, value in (("url", self.url), ("token_file", self.token_file), ("ca", self.ca)):
            source = self.ctx.get_parameter_source(option)
            if source is not None and source.name == "COMMANDLINE":
                words.append(f"--{option.replace('_', '-')}={value or ''}")
        return "".join(f" {option}" for option in address(words))

    def info(self, *, of_job: bool = True) -> ClusterInfo:
        """How to connect to it. ``of_job``: as of ``api``. Raises ConfigError, or EtcdUnavailable when no cluster is
        up."""
        if not self.remote:
            return self._cluster_here(of_job).connect()
        if self.ctx.args or self.file:
            load(self.ctx, self.file)  # a misspelt setting is an error here as well
        job = str(_given(self.ctx, self.file).get("job", ""))
        return _remote_info(job, self.url, self.token_file, self.ca)

    def _cluster_here(self, of_job: bool) -> Cluster:
        return (find_cluster if of_job else find_cluster_alone)(self.ctx, self.file)

    @contextmanager
    def api(self, *, see: str = "", patience_s: float = ELECTION_S, of_job: bool = True) -> Iterator[AdminClient]:
        """A client of its admin API. Errors of the block get a hint what to do next.

        ``see``: the command that lists the objects. ``patience_s``: how long a request waits for a leader. ``of_job``:
        whether the command is about a job, so that one of the cluster's jobs has to be meant.
        """
        from elastic_rl.coordinator.client.admin_client import AdminClient, RequestRefused
        from elastic_rl.host.agent.status import reported_problems
        info = self.info(of_job=of_job)
        try:
            yield AdminClient(info, retry_budget_s=patience_s)
        except RequestRefused as e:
            e.hint = e.hint or _advice(e, info, see)
            raise
        except EtcdUnavailable as e:
            if self.remote:
                e.hint = "check --url (and --ca for https), and that a coordinator runs there"
            elif said := reported_problems(self._cluster_here(of_job)):
                e.hint = f"the agent of this host says: {said}"
            raise


def _advice(refused: RequestRefused, info: ClusterInfo, see: str) -> str:
    match refused.status:
        case 401 if not info.tokens_file:
            return "name a file with a token: --token-file=FILE, or ELASTIC_RL_TOKEN_FILE"
        case 401:
            return f"the token in use is from {info.tokens_file}"
        case 403 if refused.kind == "forbidden":
            return f"this needs an operator's token; the one in use is from {info.tokens_file}"
        case 412:
            return "it was modified concurrently: read it again, then repeat" + (f" (`{see}`)" if see else "")
        case 404 | 409 | 410 if see:
            return f"`{see}` lists what there is"
        case _:
            return ""


def _remote_info(job: str, url: str, token_file: Path | None, ca: Path | None) -> ClusterInfo:
    from elastic_rl.coordinator.client.cluster_info import ClusterInfo
    urls = [u.strip().rstrip("/") for u in url.split(",") if u.strip()]
    if not urls:
        raise ConfigError(f"--url={url} names no URL", hint="write it as https://HOST:PORT")
    for each in urls:
        if not _is_http(each):
            raise ConfigError(f"{each!r} is not the URL of an admin API", hint="write it as https://HOST:PORT")
    if ca is not None and not ca.exists():
        raise ConfigError(f"there is no file {ca}", hint="--ca names the PEM file of an authority")
    if token_file is not None and (clear := [each for each in urls if _is_in_clear(each)]):
        say(f"warning: the token crosses the network in clear to {', '.join(clear)}: who reads it, or takes that "
            "address, has it; serve the admin API with TLS", to_err=True)
    return ClusterInfo(job, [], urls, str(token_file or ""), str(ca or ""))


def _is_in_clear(url: str) -> bool:
    """Whether the URL is one without TLS of another host. What another user of this one has taken is looked at with
    each connection (``net.listeners``)."""
    from ipaddress import ip_address
    from urllib.parse import urlsplit
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return parts.scheme == "http" and not loopback


def _is_http(url: str) -> bool:
    """Whether this is an http or https URL with a host and, if any, a valid port."""
    from urllib.parse import urlsplit
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def api_command(app: typer.Typer, name: str | None = None) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Registers a function as a command of ``app`` that addresses a cluster. The function's first parameter is the
    Target, which is made from options that all these commands have."""

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
        app.command(name, **EXTRA)(command)
        return function

    return register
