"""The advantages role: computes advantages from the rewards of prompt groups. Stateless; any replica may answer."""

from __future__ import annotations

import torch

from elastic_rl.algorithms.registry import algorithm_of
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins import describe
from elastic_rl.roles.base import Role


class AdvantagesRole(Role):
    name = "advantages"

    async def compute(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages [groups, samples] of rewards of the same shape. Raises PluginFailed for whatever the algorithm
        raises, and for advantages of another shape or that are not finite."""
        name = self.ctx.config.algorithm.name
        advantages = algorithm_of(self.ctx.config).advantages
        assert advantages is not None  # checked by algorithm_of
        given = torch.tensor(rewards, dtype=torch.float32)
        try:
            found = torch.as_tensor(advantages(given.clone(), self.ctx.config.algorithm)).detach()
            shape, values = tuple(found.shape), found.to(torch.float32)
            finite = bool(torch.isfinite(values).all())
        except BaseException as e:  # whatever a user's function raises: also SystemExit; nothing here is awaited
            raise PluginFailed(f"the advantages of algorithm.name={name} failed: {describe(e)}") from e
        if shape != tuple(given.shape):
            raise PluginFailed(f"the advantages of algorithm.name={name} must be {list(given.shape)} as the rewards, "
                               f"not {list(shape)}")
        if not finite:
            raise PluginFailed(f"the advantages of algorithm.name={name} must be finite numbers")
        return values.tolist()
