"""The ranks of a trainer group on one host: the body of a Ray actor, whose child is torch elastic's agent."""

from __future__ import annotations

import logging
import re
import threading
import time
from pathlib import Path

from elastic_rl.config.groups import CRITIC
from elastic_rl.errors import ConfigError, ElasticRLError
from elastic_rl.etcd import event_kinds
from elastic_rl.etcd.records import Severity
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import processes, stacks
from elastic_rl.host.address import own_address
from elastic_rl.host.here import context_here
from elastic_rl.host.leftovers import remove_files, tagged_files
from elastic_rl.host.model_folder import fingerprint
from elastic_rl.host.paths import JobPaths
from elastic_rl.host.processes import StoppedProcesses

log = logging.getLogger(__name__)

_KEPT = 100
"""Files of so many earlier formations are looked for, and removed."""


class TrainerHost:
    """The agent is a child of the actor's process and dies with it."""

    def __init__(self, ctx: RunContext, ranks: int, hosts: int, model: str, gpus: str = "") -> None:
        """``ctx``: of the group, in its formation. ``ranks``: number of this host's, of a group on so many ``hosts``.
        ``model``: the ``fingerprint`` of the model's folder on the driver's host; empty for ranks that only that host's
        processes talk to. ``gpus``: as ``CUDA_VISIBLE_DEVICES`` has them; empty: those that Ray gives this actor."""
        self._ctx, self._ranks, self._hosts, self._model = ctx, ranks, hosts, model
        self._env = {"CUDA_VISIBLE_DEVICES": gpus} if gpus else {}
        self._stop, self._hangs = threading.Event(), False

    def run(self) -> int | str:
        """Blocks until the agent ends; returns its exit code, or why this host cannot have ranks of the group. An agent
        that is stopped (SIGSTOP) for longer than a member's lease can neither end nor restart its ranks, so it is
        killed, and they die with it."""
        try:
            ctx = self._with_model(context_here(self._ctx))
        except ConfigError as e:
            return str(e)
        if self._stop.is_set():
            return 0
        paths = JobPaths.of(ctx.config)
        context = paths.context(ctx.group.name, ctx.formation)
        for number in range(max(1, ctx.formation - _KEPT), ctx.formation):
            paths.context(ctx.group.name, number).unlink(missing_ok=True)
        self._remove_files_of_earlier(paths, ctx)
        agent = processes.spawn(processes.python(
            "elastic_rl.trainer.group.agent", "--context", str(ctx.save(context)),
            f"--ranks={self._ranks}", f"--hosts={self._hosts}",
            f"--address={ctx.host if self._model else own_address()}"),
            log=paths.log(ctx.group.name).resolve(), env=self._env)
        watched = StoppedProcesses(ctx.config.coordinator.lease_ttl_s)
        while agent.poll() is None and not self._stop.wait(0.1):
            if watched.lost(time.monotonic(), [agent.pid] if processes.is_stopped(agent.pid) else []):
                log.warning("the trainer agent %d is stopped: it is killed", agent.pid)
                agent.kill()
        written = self._write_stacks(ctx, agent.pid) if self._hangs else None
        processes.stop(agent.pid)
        code = agent.wait(timeout=30.0)
        if written is not None:
            self._report_stacks(ctx, written)
        return code

    @staticmethod
    def _write_stacks(ctx: RunContext, pid: int) -> Path | None:
        group = ctx.group.name
        return stacks.write_of_hang(JobPaths.of(ctx.config).hangs, group, [pid], f"the group {group} hangs")

    @staticmethod
    def _report_stacks(ctx: RunContext, path: Path) -> None:
        group = ctx.group.name
        try:
            with ctx.connect() as etcd:
                ctx.writer_of_group(etcd).emit(
                    event_kinds.TRAINER_GROUP_EVENTS[group].stacks, group,
                    f"the group {group} hung; the stacks of its processes on {ctx.host}: {path}",
                    severity=Severity.WARNING, file=str(path))
        except ElasticRLError as e:  # the file is there
            log.warning("the stacks in %s are not reported: %s", path, e)

    @staticmethod
    def _remove_files_of_earlier(paths: JobPaths, ctx: RunContext) -> None:
        """Removes what agents of earlier formations have left here that were killed: the driver that was to have it
        removed may have been, too."""
        tag = paths.file_tag(ctx.group.name)
        numbers = {int(found[1]) for path in tagged_files(tag)
                   if (found := re.search(rf"{re.escape(tag)}([0-9]+)\.", path.name))}
        for number in sorted(n for n in numbers if n < ctx.formation):
            remove_files(paths.file_tag(ctx.group.name, str(number)))

    def _with_model(self, ctx: RunContext) -> RunContext:
        """The context with the model's folder on this host; one that the settings do not name is made here, too.
        Raises ConfigError for one that is not there, or is another one: replicas would compute different functions."""
        if not self._model:
            return ctx  # the agent says what is wrong with it
        if not (Path(ctx.model_dir) / "config.json").exists():
            if ctx.config.model.path or (ctx.group is CRITIC and ctx.config.critic.model):
                raise ConfigError(f"the model {ctx.model_dir} is not there",
                                  hint="copy the folder to the same path on each host that may have ranks")
            ctx = self._with_own_model(ctx)
        if not self._stop.is_set() and fingerprint(Path(ctx.model_dir)) != self._model:
            raise ConfigError(f"the model {ctx.model_dir} is another one than on the driver's host",
                              hint="copy one folder to all hosts")
        return ctx

    def _with_own_model(self, ctx: RunContext) -> RunContext:
        paths = JobPaths.of(ctx.config)
        ctx = ctx.model_copy(update={"model_dir": str(paths.model)})
        maker = processes.spawn(processes.python("elastic_rl.data.tiny_model", str(ctx.save(
            paths.context(ctx.group.name, "model")))), log=paths.log("model").resolve())
        while maker.poll() is None:
            if self._stop.wait(0.1):
                processes.stop(maker.pid)
                return ctx
        if maker.wait() and not (paths.model / "config.json").exists():  # another group may have made it meanwhile
            raise ConfigError("the model cannot be made", hint=f"see {paths.log('model')}")
        return ctx

    def stop(self) -> None:
        self._stop.set()

    def stop_hung(self) -> None:
        """Stops ranks that hang, after their stacks were written (``host.stacks``)."""
        self._hangs = True
        self._stop.set()

    def is_stopping(self) -> bool:
        """Whether it was told to stop."""
        return self._stop.is_set()
