"""How a run begins: from nothing, or from the state that its job has committed, and what the number of its steps then
means for the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_rl.algorithms.schedule import learning_rate
from elastic_rl.config import Config, Stream
from elastic_rl.errors import ConfigError, Conflict
from elastic_rl.etcd import event_kinds, fencing
from elastic_rl.etcd.client import Compare, EtcdClient, Op
from elastic_rl.etcd.decoding import readable_one
from elastic_rl.etcd.events import build, put_op
from elastic_rl.etcd.fencing import FencedWriter
from elastic_rl.etcd.keys import Keys
from elastic_rl.etcd.records import JobStatus, OutputState, Severity, Version
from elastic_rl.runtime.words import counted

_TRIES = 8
_MAX_TEXT = 2000
"""Longest text of a warning, in characters."""
_SAME_RATE = 0.01
"""Learning rates whose ratio differs from 1 by less are the same to a person."""
_STEPS = {"sft": "sft.max_steps", "rl": "train.steps"}
"""The setting with the number of steps, by mode and by phase."""


@dataclass(frozen=True)
class ResumePoint:
    """The committed state that a run goes on from."""

    step: int
    """Its last step."""
    supervised: bool = False
    """Whether that is one of the supervised phase."""

    def __str__(self) -> str:
        return f"{'supervised ' if self.supervised else ''}step {self.step}"


def resume_point(etcd: EtcdClient, keys: Keys) -> ResumePoint | None:
    """The state of a job that its next run resumes from; None of one that has committed none. Where the record of the
    state cannot be read, its step is that of the job's status. Raises EtcdUnavailable."""
    if (head := etcd.get(keys.stream_head(Stream.TRAINER_STATE))) is not None:
        if (state := readable_one(head, Version)) is not None:
            return ResumePoint(int(state.meta.get("step", 0)), supervised=state.meta.get("phase") != "rl")
        status = readable_one(etcd.get(keys.job_status()), JobStatus)
        return ResumePoint(status.step if status is not None else 0)
    output = readable_one(etcd.get(keys.output()), OutputState)
    return ResumePoint(output.step) if output is not None and output.step else None


def already_done(cfg: Config, step: int) -> ConfigError:
    """The error of a run that is to begin although its job has done all its steps, ``step`` of them; 0: not known."""
    more = _STEPS.get(cfg.mode)
    return ConfigError(f"job {cfg.job} has already done " + (
        f"its {counted(done, 'step')}" if (done := step or cfg.total_steps) else "all its steps"), hint=(
        f"`--{more}=N` with N above {step or cfg.total_steps} goes on with it; or name a new job with --job=NAME"
        if more else "name a new job with --job=NAME"))


def open_run(etcd: EtcdClient, keys: Keys, cfg: Config, warnings: Sequence[str] = ()) -> None:
    """Replaces the end of an earlier run by the beginning of this one, with its events, in one transaction.
    ``warnings``: what its checks warn of. Raises ConfigError for a job that is done, Fenced when a driver starts
    meanwhile, Conflict and EtcdUnavailable."""
    writer = FencedWriter.of_epoch(etcd, keys, fencing.current_epoch(etcd, keys))
    for _ in range(_TRIES):
        found, point = etcd.get(keys.job_status()), resume_point(etcd, keys)
        status = readable_one(found, JobStatus)
        if status is not None and status.phase == "finished" and status.step >= cfg.total_steps:
            raise already_done(cfg, status.step)
        ops = [Op.put(keys.job_status(), status.replace(
            phase="starting", steps=cfg.total_steps or status.steps, message="").encode())] if status else []
        ops += [put_op(keys, build(event_kinds.RUN_WARNED, cfg.job, text[:_MAX_TEXT], severity=Severity.WARNING))
                for text in warnings]
        warning = rate_change(cfg, point, status) if point and status else ""
        total = f" of {cfg.total_steps}" if cfg.total_steps and not (point and point.supervised) else ""
        text = f"resumes at {point}{total}" if point else "begins"
        if writer.emit(event_kinds.RUN_RESUMED if point else event_kinds.RUN_STARTED, cfg.job,
                       f"{text}. {warning}" if warning else text,
                       severity=Severity.WARNING if warning else Severity.INFO, ops=ops,
                       compares=[Compare.mod(keys.job_status(), "==", found.mod_revision if found else 0)],
                       **({"step": point.step} if point else {})) is not None:
            return
    raise Conflict(f"{keys.job_status()} was changed concurrently in each of {_TRIES} tries")


def rate_change(cfg: Config, point: ResumePoint, before: JobStatus) -> str:
    """Says that another number of steps than that of ``before`` changes the learning rate of the steps to come, with
    the numbers; empty where it does not. The schedule runs over all steps, so more of them stretch it."""
    phase = "sft" if point.supervised else "rl"
    section, key = ("sft", "max_steps") if point.supervised else ("train", "steps")
    steps, old_steps = getattr(getattr(cfg, section), key), before.sft_steps if point.supervised else before.steps
    if old_steps in (0, steps) or point.step >= steps:
        return ""
    as_before = cfg.model_copy(update={section: getattr(cfg, section).model_copy(update={key: old_steps})})
    old, new = (learning_rate(c, phase, point.step + 1) for c in (as_before, cfg))
    if abs(new - old) <= _SAME_RATE * max(new, old):
        return ""
    decay = getattr(cfg, section).lr_decay
    return (f"The learning rate of step {point.step + 1} is {new:.3g}, and is {old:.3g} with the {old_steps} steps of "
            f"before: {section}.lr_decay={decay} runs over {section}.{key}, which is {steps} now. To keep the rate, "
            f"give --{section}.lr={old:.3g} --{section}.lr_decay=constant --{section}.lr_warmup_steps=0")


def forget_engines(etcd: EtcdClient, keys: Keys) -> None:
    """Deletes what a driver has counted of engines that are gone with it. For a job of which nothing runs. Raises
    Fenced when a driver starts meanwhile, and EtcdUnavailable."""
    epoch = fencing.current_epoch(etcd, keys)
    counted = [kv.key for kv in etcd.range(keys.pools_prefix())[0] if kv.key.endswith("/status")]
    if counted:
        fencing.write(etcd, keys, epoch, *(Op.delete(key) for key in counted))
