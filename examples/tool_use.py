"""The reward of examples/tool_use.yaml.

    PYTHONPATH=examples elastic-rl train -c examples/tool_use.yaml --with-cluster
"""

from __future__ import annotations

from elastic_rl.data.samples import Prompt
from elastic_rl.rewards.forms import per_sample


@per_sample
def reward(text: str, prompt: Prompt) -> float:
    """Whether the last turn is the product. ``text`` is that turn alone."""
    return float(text == prompt.metadata["product"])
