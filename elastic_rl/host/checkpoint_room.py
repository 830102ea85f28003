"""Whether the checkpoint service has room for what a job publishes. Pure.

Found when a job begins, since it would else show at the first commit: the run would train, and wait for ever.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from elastic_rl.config import Config
from elastic_rl.host.model_folder import Fault, shape_of
from elastic_rl.models.arch import ModelArch

_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_ROOM = 1.25
"""What is suggested, over what is needed: space comes in chunks, and versions that are pulled stay a little longer."""
_MIB = 1 << 20


@dataclass(frozen=True)
class VersionSizes:
    """Bytes of one version of each stream. Small tensors, such as norms, are not counted."""

    policy: int
    trainer_state: int
    """0 where there is no trainer. Its weights are those of the policy of the same step, so they take no room twice."""


def version_sizes(cfg: Config, arch: ModelArch) -> VersionSizes:
    """Weights in the dtype of the run; of the trainer two moments of Adam in fp32 and, where weights are not in fp32,
    masters, and the weights of the reference policy."""
    parameters = sum(math.prod(shape) for name in arch.hf_names() if (shape := shape_of(name, arch)))
    item = _ITEM_BYTES[cfg.device.dtype]
    policy = parameters * item
    if not cfg.uses_trainer:
        return VersionSizes(policy, 0)
    masters = 0 if item == 4 else 4 * parameters
    reference = policy if cfg.mode == "rl" and cfg.algorithm.measures_kl else 0
    return VersionSizes(policy, policy + 8 * parameters + masters + reference)


def faults(cfg: Config, sizes: VersionSizes) -> Iterator[Fault]:
    """What has no room on a node that serves the whole job, and what to set."""
    dcs = cfg.dcs
    largest = max(sizes.policy, sizes.trainer_state)
    in_memory = largest + (sizes.policy if cfg.uses_engines and cfg.uses_trainer else 0)
    kept = max(sizes.policy, sizes.trainer_state) * dcs.keep_versions
    if dcs.keep_bytes:
        kept = max(largest, min(kept, dcs.keep_bytes))
    if not dcs.disk_bytes:
        in_memory = max(in_memory, kept + largest)
    if dcs.arena_bytes < in_memory:
        what = ("of the largest version and of the policy that is pulled meanwhile" if dcs.disk_bytes
                else "of all versions that are kept, and of the next one: there is no disk (dcs.disk_bytes=0)")
        yield Fault(f"dcs.arena_bytes={dcs.arena_bytes} ({dcs.arena_bytes // _MIB} MiB) has no room for the "
                    f"{in_memory // _MIB} MiB {what}", f"set --dcs.arena_bytes={_suggested(in_memory)}")
    elif dcs.disk_bytes and dcs.arena_bytes + dcs.disk_bytes < kept + largest:
        yield Fault(f"dcs.disk_bytes={dcs.disk_bytes} ({dcs.disk_bytes // _MIB} MiB) and the arena have no room for "
                    f"the {(kept + largest) // _MIB} MiB of {dcs.keep_versions} versions and of the next one",
                    f"set --dcs.disk_bytes={_suggested(kept + largest)}, or a smaller --dcs.keep_versions")


def _suggested(nbytes: int) -> int:
    """With some room, in whole MiB."""
    return math.ceil(nbytes * _ROOM / _MIB) * _MIB
