"""The advantages role: computes advantages from the rewards of prompt groups. Stateless; any replica may answer."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from elastic_rl.algorithms.registry import algorithm_of, options_of
from elastic_rl.data.batch import Batch
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.user_code import describe
from elastic_rl.roles.base import Role


class AdvantagesRole(Role):
    name = "advantages"

    async def compute(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages [groups, samples] of rewards of the same shape. Raises PluginFailed for whatever the algorithm
        raises, and for advantages of another shape or that are not finite."""
        spec = algorithm_of(self.ctx.config)
        options, advantages = options_of(spec, self.ctx.config.algorithm), spec.advantages
        assert advantages is not None  # checked by algorithm_of
        given = torch.tensor(rewards, dtype=torch.float32)
        return self._checked("advantages", lambda: advantages(given.clone(), options), given.shape,
                             "the rewards").tolist()  # type: ignore[no-any-return]

    async def compute_of_tokens(self, raw: bytes) -> np.ndarray:
        """Advantages [L] fp32 of the loss tokens of a batch, in safetensors. Raises as ``compute``."""
        batch, spec, cfg = Batch.from_bytes(raw), algorithm_of(self.ctx.config), self.ctx.config.algorithm
        options, make = options_of(spec, cfg), spec.token_advantages
        assert make is not None
        return self._checked("token_advantages", lambda: make(batch, options, cfg), (batch.loss_tokens,),
                             "the loss tokens").numpy()

    def _checked(self, what: str, make: Callable[[], torch.Tensor], shape: tuple[int, ...], like: str) -> torch.Tensor:
        """What a user's function makes, fp32 of this shape."""
        named = f"the {what} of algorithm.name={self.ctx.config.algorithm.name}"
        try:
            found = torch.as_tensor(make()).detach()
            has, values = tuple(found.shape), found.to(torch.float32)
            finite = bool(torch.isfinite(values).all())
        except BaseException as e:  # whatever a user's function raises: also SystemExit; nothing here is awaited
            raise PluginFailed(f"{named} failed: {describe(e)}") from e
        if has != tuple(shape):
            raise PluginFailed(f"{named} must be {list(shape)} as {like}, not {list(has)}")
        if not finite:
            raise PluginFailed(f"{named} must be finite numbers")
        return values
