"""SGLang engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from elastic_rl.config.section import Positive, Seconds, Section

OWN_OPTIONS = {
    "--model-path": "", "--host": "", "--port": "", "--api-key": "", "--admin-api-key": "", "--weight-version": "",
    "--custom-weight-loader": "", "--ssl-certfile": "", "--ssl-keyfile": "", "--ssl-ca-certs": "",
    "--dist-init-addr": "", "--load-snapshot-publish-interval": "",
    "--skip-tokenizer-init": "", "--skip-server-warmup": "", "--dtype": "device.dtype", "--device": "device.type",
    "--random-seed": "seed", "--max-total-tokens": "engine.max_total_tokens",
    "--max-running-requests": "engine.max_running_requests"}
"""Options of ``sglang.launch_server`` that decide what the rest of the job goes by, and the setting of each; "" for
none."""
_KEYLESS = {
    "--tokenizer-worker-num": "SGLang does not ask for a key with several of its tokenizers, and engines ask for one",
    "--grpc-port": "SGLang serves no gRPC where a key is asked for", "--grpc-mode": "engines are asked over HTTP",
    "--smg-grpc-mode": "engines are asked over HTTP"}
"""Options with which an SGLang server would ask for no key, or not start with one, and why."""
_LOG_LEVELS = ("warning", "error")
"""Levels that SGLang may log at: with a lower one it writes all its arguments to its log, and the key is among them."""


class EngineConfig(Section):
    cpus: Annotated[float, Field(gt=0)] = 0.1
    """CPUs that Ray sets aside for an engine, of those that its host has, beside its GPUs. It places engines by that
    and limits none: by default GPUs bound how many a host takes, and on a CPU engines share what there is."""
    start_timeout_s: Seconds = 600.0
    """Seconds that the start of an engine may go on without progress before the engine is replaced. A start makes
    progress while its processes use or wait for a CPU, read files, or write to their log. A pool that has fewer engines
    than desired for this long raises ``pool.short``."""
    start_ceiling_s: Seconds = 14400.0
    """Seconds from the launch of an engine to its first answer, with or without progress; a slower one is replaced."""
    request_timeout_s: Seconds = 60.0
    """Seconds that one generation request may take before it fails and is retried."""
    apply_timeout_s: Seconds = 30.0
    """Seconds that one weight update of an engine may take; a slower engine is replaced."""
    fetch_timeout_s: Seconds = 300.0
    """Seconds for which an engine may fail to fetch or load newer weights that most other engines of its pool have;
    then it is replaced. It keeps serving, and waits, when they do not have them either, when no checkpoint node is
    registered, and while etcd does not answer."""
    probe_interval_s: Seconds = 5.0
    """Seconds between two health probes of an engine. A probe reads its load; where that has not moved, it has the
    engine generate one token."""
    frozen_after_s: Seconds = 30.0
    """Seconds for which an engine that answers no probe may wait before it is killed and replaced. Seconds in which its
    processes use a CPU (see ``busy_limit_s``) or wait for one do not count."""
    busy_limit_s: Seconds = 300.0
    """Seconds of CPU time that an engine may use without answering a probe before it is killed and replaced. Longer
    than the longest forward pass."""
    drain_mode: Literal["hand_over", "finish"] = "hand_over"
    """What happens to requests in flight in an engine that leaves, as when it is scaled in or its host is drained.
    ``hand_over``: it gives back what it has sampled, and the rest is asked for of other engines of its pool, with the
    tokens, log-probs and versions so far: it leaves within seconds. Where no other engine serves, and in a job with
    ``deterministic: true``, they are finished as with ``finish``. ``finish``: it finishes them, for up to
    ``drain_timeout_s``; those that are left then are handed over. For pools that others ask than the job, whose clients
    do not go on from an answer with the finish reason ``abort``."""
    drain_timeout_s: Seconds = 60.0
    """Seconds for which an engine that leaves may finish its requests in flight before it gives them back. The end of
    its host's drain, if it comes first, ends that time."""
    release_timeout_s: Seconds = 180.0
    """Seconds within which an engine with ``placement: colocated`` must release its memory after a phase of the trainer
    begins, and take it after one of the engines begins; a slower one is replaced, unless it is starting. The time
    begins again with an update of its weights, and with the end of one."""
    max_total_tokens: Positive = 16384
    """Capacity of an engine's KV cache, in tokens (SGLang's ``--max-total-tokens``)."""
    max_running_requests: Positive = 256
    """Largest number of sequences that an engine decodes at once; further ones wait in its queue. The samples of one
    step that an engine gets should fit."""
    staging_limit_bytes: Annotated[int, Field(ge=0)] = 2 << 30
    """Weights of up to this many bytes a tensor-parallel rank are loaded and verified beside the live ones while the
    engine serves, and swapped in during a short pause; that takes the same memory once more. Larger ones are loaded in
    place during a longer pause. 0: always in place."""
    pause_mode: Literal["retract", "in_place", "abort", "drain"] = "retract"
    """What happens to requests in flight when the weights change. ``retract``: they wait in the engine, and go on with
    their KV cache computed again by the new weights. ``in_place``: they go on with their KV cache, and the prefix cache
    is kept, of which new prompts take only what the same weights have computed: a shorter pause, and tokens whose
    attention mixes two versions. ``abort``: the engine gives back what it
    has sampled, and the rest is asked for again, of whichever engine the router chooses: none waits for an engine that
    updates slowly. ``drain``: the engine takes no new request and finishes those that it has, for up to
    ``drain_timeout_s``, before it updates (those that are left then are given back): a sample is of one version, and
    the engine idles until the longest is done. Not for samples of several turns, which would meet engines that take no
    request. With all but ``drain``, every part of a sample carries the version that made it."""
    max_unavailable: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^(auto|[1-9][0-9]?%|100%)$")] = "auto"
    """Most engines of the policy's pool that pause at once to apply a version: a number, or a percentage of the pool,
    rounded down to at least one. The others serve on with the version that they have; each applies what it has staged
    when its turn comes, and goes on to the newest version then. For jobs in which samples may be of an older version
    than the step that trains on them (``train.max_staleness`` above 0): elsewhere engines of older versions have
    nothing to do. ``auto``: no limit."""
    follow_quorum: Annotated[int, Field(ge=1)] | Annotated[str, Field(pattern=r"^([1-9][0-9]?%|100%)$")] = "50%"
    """How many engines of the policy's pool must serve a version that the run needs before others are given up for it:
    a number, or a percentage of those that have served one, rounded up. Engines that lack it then for longer than
    ``follow_timeout_s`` get no requests until they have caught up, and the run goes on with the others. With fewer it
    waits for all: then it is not they who are slow."""
    follow_timeout_s: Seconds = 15.0
    """Seconds for which the run waits for engines that lack a version once ``follow_quorum`` serves it, or as long as
    the slowest of those took to get it, if that is longer. An engine that was given up for the last version is not
    waited for again until it has got one within that time."""
    catch_up_timeout_s: Seconds = 600.0
    """Seconds within which an engine that was given up must catch up; then it is replaced."""
    seeded_sampling: Literal["auto", "on", "off"] = "auto"
    """Whether samples are drawn by seeds that follow from the run's ``seed``, the prompt group and the sample, so that
    the same run samples the same, whichever engine answers (SGLang's ``--enable-deterministic-inference``). On GPUs it
    needs kernels that do not depend on the batch, which are slower. ``auto``: on a CPU only, and not for a pool that is
    sampled with ``min_p``, for which SGLang has no seeds."""
    extra_args: list[str] = []
    """Further arguments of ``sglang.launch_server``, passed on unchanged. Options that the engine's own arguments set
    are refused: the last one of an option counts. So are those with which a server asks for no key, or writes it to
    its log: ``--tokenizer-worker-num``, ``--grpc-port``, and a ``--log-level`` other than warning and error."""

    @field_validator("extra_args")
    @classmethod
    def _require_free(cls, extra_args: list[str]) -> list[str]:
        """Raises ValueError for an option that the engine itself sets, and for one that would give its key away."""
        for word, following in zip(extra_args, [*extra_args[1:], ""], strict=False):
            name, has_value, value = word.partition("=")
            # argparse takes any unambiguous beginning of an option.
            named = [o for o in (*OWN_OPTIONS, *_KEYLESS) if name.startswith("--") and len(name) > 2 and
                     o.startswith(name)]
            if named and (instead := OWN_OPTIONS.get(named[0])) is not None:
                raise ValueError(f"{named[0]} is set by the engine itself; " + (
                    f"set {instead}" if instead else "leave it out"))
            if named:
                raise ValueError(f"leave {named[0]} out: {_KEYLESS[named[0]]}")
            if name == "--log-level" and (level := value if has_value else following).lower() not in _LOG_LEVELS:
                raise ValueError(f"--log-level is {' or '.join(_LOG_LEVELS)}, and not {level!r}, with "
                                 "which SGLang writes its arguments to its log, and the engine's key is among them")
        return extra_args
