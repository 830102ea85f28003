"""Whether the checkpoint service has room for what a job publishes. Pure.

A lack of room is found when a job begins. It would else show at the first commit: the run would train, and then wait
for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_rl.config import Config
from elastic_rl.host.model_folder import Fault, shape_of
from elastic_rl.models.arch import ModelArch

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_HEADROOM = 1.25
"""What is suggested, over what is needed: space comes in chunks, and versions that are pulled stay a little longer."""
_MIB = 1 << 20
_RECORDS_SHARE = 16
"""The records of the run may take this part of a node's disk, or of its arena where it has no disk."""
_NEW_RECORDS_BYTES = 4 << 20
"""Most bytes of records that a version of ``run_log`` has and the one before it has not."""


@dataclass(frozen=True)
class VersionSizes:
    """Bytes of what is published. Small tensors, such as norms, are not counted."""

    policy: int
    trainer_state: int = 0
    """Bytes of the trainer's state with the weights, which are those of the policy of the same step and take no room
    twice; without the reference policy. 0 where there is no trainer."""
    reference: int = 0
    """Bytes of the reference policy, which all states of the trainer share."""
    critic_state: int = 0
    """Bytes of the critic's state with the weights. 0 where there is no critic."""


def version_sizes(cfg: Config, arch: ModelArch) -> VersionSizes:
    """Weights in the dtype of the run; of the trainer two moments of Adam in fp32 and, where weights are not in fp32,
    masters. The critic is taken to have the policy's shape."""
    parameters = sum(math.prod(shape) for name in arch.hf_names() if (shape := shape_of(name, arch)))
    item = _ITEM_BYTES[cfg.device.dtype]
    policy = parameters * item
    if not cfg.uses_trainer:
        return VersionSizes(policy)
    masters = 0 if item == 4 else 4 * parameters
    state = policy + 8 * parameters + masters
    return VersionSizes(policy, state, policy if cfg.mode == "rl" and cfg.algorithm.measures_kl else 0,
                        state if cfg.uses_critic else 0)


def faults(cfg: Config, sizes: VersionSizes) -> Iterator[Fault]:
    """What has no room on a node that serves the whole job, and what to set."""
    dcs = cfg.dcs
    in_memory, stored = _needs(cfg, sizes)
    if dcs.arena_bytes < in_memory:
        what = ("of the largest version and of the policy that is pulled meanwhile" if dcs.disk_bytes
                else "of all versions that are kept, and of the next one: there is no disk (dcs.disk_bytes=0)")
        yield Fault(f"dcs.arena_bytes={dcs.arena_bytes} ({dcs.arena_bytes // _MIB} MiB) has no room for the "
                    f"{in_memory // _MIB} MiB {what}", f"set --dcs.arena_bytes={_suggested(in_memory)}")
    if 0 < dcs.disk_bytes < stored:
        yield Fault(f"dcs.disk_bytes={dcs.disk_bytes} ({dcs.disk_bytes // _MIB} MiB) has no room for the "
                    f"{stored // _MIB} MiB of all versions that are kept, and of the next one",
                    f"set --dcs.disk_bytes={_suggested(stored)}, or a smaller --dcs.keep_versions")


def records_bytes(cfg: Config, sizes: VersionSizes) -> int:
    """Most bytes that the newest version of ``run_log`` may have: of the room for it and for the older ones that are
    kept, none is lacking for weights. It may be 0."""
    dcs = cfg.dcs
    in_memory, stored = _needs(cfg, sizes)
    limit, needed = (dcs.disk_bytes, stored) if dcs.disk_bytes else (dcs.arena_bytes, in_memory)
    return max(0, min(limit // _RECORDS_SHARE, limit - needed - dcs.keep_versions * _NEW_RECORDS_BYTES))


def _needs(cfg: Config, sizes: VersionSizes) -> tuple[int, int]:
    """Bytes that versions take in the arena, and on the disk (without one, they are among those in the arena)."""
    published = max(sizes.policy, sizes.trainer_state) + sizes.reference + sizes.critic_state
    pulled = sizes.policy if cfg.uses_engines and cfg.uses_trainer else 0
    stored = published + _kept(cfg, sizes)
    return published + pulled if cfg.dcs.disk_bytes else max(published + pulled, stored), stored


def _kept(cfg: Config, sizes: VersionSizes) -> int:
    """Bytes of the versions that are kept, beside the one that is published, when a run has made as many."""
    dcs = cfg.dcs
    if not cfg.uses_trainer or dcs.keep_age_s:
        # Without a trainer one version is published, and again the same; by age, the number depends on the speed.
        return sizes.trainer_state + sizes.critic_state
    states = sum(_limited(dcs.keep_versions * nbytes, nbytes, dcs.keep_bytes)
                 for nbytes in (sizes.trainer_state, sizes.critic_state))
    # Policies of steps whose state is not saved have weights of their own. The newest one often has a state.
    between = dcs.keep_versions - 1 if cfg.mode == "rl" and cfg.train.state_every_steps > 1 else 0
    return states + _limited(between * sizes.policy, 0, dcs.keep_bytes) + _older_references(cfg) * sizes.policy


def _older_references(cfg: Config) -> int:
    """Versions of the policy that the group ``reference`` may need besides the newest reference, at most: each state
    that is kept may have one of its own (``dcs/catalog/references.py``)."""
    every = cfg.algorithm.reference_every_steps
    if not cfg.uses_reference_group or not every:
        return 0
    return min(cfg.dcs.keep_versions, math.ceil(cfg.dcs.keep_versions * cfg.train.state_every_steps / every))


def _limited(nbytes: int, newest: int, keep_bytes: int) -> int:
    """Bytes kept of one stream, of which the newest version is always kept."""
    return max(newest, min(nbytes, keep_bytes)) if keep_bytes else nbytes


def _suggested(nbytes: int) -> int:
    """Bytes to suggest: with some room, in whole MiB."""
    return math.ceil(nbytes * _HEADROOM / _MIB) * _MIB
