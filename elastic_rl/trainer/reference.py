"""The reference policy: the policy with which RL began, or of a later step, from which the divergence is measured.

Each rank keeps the reference's weights of its own shards in host memory, and exchanges them with the model's for a
forward pass: there is no second model on the device. They are part of the trainer_state, so a group that re-forms, at
any parallel sizes, has the reference that belongs to its weights, however far it went back; and which step's policy it
is, is a function of the step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from elastic_rl.config.algorithm import reference_step
from elastic_rl.errors import ConfigError
from elastic_rl.trainer.megatron.policy import Policy
from elastic_rl.trainer.progress import Progress


class Reference:
    """This rank's part of the reference policy. All ranks make the same calls in the same order."""

    def __init__(self, policy: Policy, every: int | None, bucket_bytes: int) -> None:
        """``every``: as in ``reference_step``. ``bucket_bytes``: device memory that an exchange may take."""
        self._policy, self._every, self._bucket_bytes = policy, every, bucket_bytes
        self._shards: dict[str, torch.Tensor] = {}

    def shards(self) -> dict[str, torch.Tensor]:
        """The weights, by the names of the policy's parameters and of their shapes and dtypes, on the CPU; pinned where
        the model is on a GPU. Of any content until ``renew`` or until they were filled."""
        if not self._shards:
            self._shards = {name: torch.empty(param.shape, dtype=param.dtype, device="cpu",
                                              pin_memory=param.device.type == "cuda")
                            for name, param in self._policy.parameters()}
        return self._shards

    def renew(self, progress: Progress) -> Progress:
        """Takes the policy as the reference of the next steps where that is due at this progress; the progress then."""
        if progress.phase != "rl" or reference_step(progress.step + 1, self._every) != progress.step:
            return progress
        shards = self.shards()
        with torch.no_grad():
            for name, param in self._policy.parameters():
                shards[name].copy_(param)
        return progress.replace(reference=progress.step)

    def fault(self, progress: Progress) -> ConfigError | None:
        """What is wrong when the trainer's state has no reference for its next step, or another one."""
        wanted = reference_step(progress.step + 1, self._every)
        if progress.reference == wanted:
            return None
        has = ("no reference policy" if progress.reference is None
               else f"the policy of RL step {progress.reference} as the reference")
        return ConfigError(
            f"the trainer's state of RL step {progress.step} has {has}, and algorithm.kl_coef, algorithm.report_kl and "
            f"algorithm.reference_every_steps ask for that of RL step {wanted}",
            hint="set these back to what the job began RL with, or begin a new job with `elastic-rl train --from-job`")

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the model has the reference's weights; after it, whatever happens inside, its own, bit for bit. No
        backward pass may be pending; gradients that were accumulated stay."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    @torch.no_grad()
    def _exchange(self) -> None:
        shards = self.shards()
        for name, param in self._policy.parameters():
            # Not ``.data``: torch counts changes, by which a publish tells changed tensors from tied ones.
            for own, kept in zip(self._buckets(param.detach()), self._buckets(shards[name]), strict=True):
                held = own.clone()
                own.copy_(kept)
                kept.copy_(held)

    def _buckets(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Views of a contiguous tensor, each of so many bytes at most."""
        return tensor.view(-1).split(max(1, self._bucket_bytes // tensor.element_size()))
