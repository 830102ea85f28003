"""The advantages role: rewards of sampled groups in, advantages out. Stateless; any replica may answer."""

from __future__ import annotations

import torch

from elastic_rl.algorithms.advantages import group_relative
from elastic_rl.roles.contract import Role


class AdvantagesRole(Role):
    name = "advantages"

    async def compute(self, rewards: list[list[float]]) -> list[list[float]]:
        """Rewards [groups, samples] → advantages of the same shape."""
        out = group_relative(torch.tensor(rewards, dtype=torch.float32),
                             normalize_std=self.ctx.config.algorithm.normalize_std)
        return out.tolist()
