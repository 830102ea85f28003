"""The advantages role: computes advantages from the rewards of prompt groups. Stateless; any replica may answer."""

from __future__ import annotations

import torch

from elastic_rl.algorithms.registry import ALGOS
from elastic_rl.roles.base import Role


class AdvantagesRole(Role):
    name = "advantages"

    async def compute(self, rewards: list[list[float]]) -> list[list[float]]:
        """Advantages [groups, samples] of rewards of the same shape."""
        cfg = self.ctx.config.algorithm
        return ALGOS[cfg.name].advantages(torch.tensor(rewards, dtype=torch.float32), cfg.normalize_std).tolist()
