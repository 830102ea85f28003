"""The model families, one module each. A new one is a module here, a line below, and its tests."""

from __future__ import annotations

from elastic_rl.models.families.llama import LLAMA
from elastic_rl.models.families.qwen2 import QWEN2
from elastic_rl.models.families.qwen3 import QWEN3
from elastic_rl.models.families.qwen3_moe import QWEN3_MOE
from elastic_rl.models.family import Family

FAMILIES: dict[str, Family] = {family.model_type: family for family in (LLAMA, QWEN2, QWEN3, QWEN3_MOE)}
"""The families by the ``model_type`` of config.json."""
