"""Which samples the rollout role takes, and what becomes of a prompt that engines must not get."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

from elastic_rl.config import Config
from elastic_rl.data.samples import Prompt
from elastic_rl.engine.client import GenerateClient, Sampling
from elastic_rl.engine.generation import Generated, GenerateFault, PromptRequest, single_turn
from elastic_rl.roles.rollout import RolloutRole


def _role(client: Any) -> RolloutRole:
    role = RolloutRole.__new__(RolloutRole)
    role.ctx = SimpleNamespace(config=Config(), model_dir="")  # type: ignore[assignment]
    role.generate_fn, role.client, role._vocabulary = single_turn, client, 16
    return role


def _generate(role: RolloutRole, *token_ids: int, min_version: int = 1) -> Generated:
    return asyncio.run(role._bounded(PromptRequest(7, Prompt(token_ids), Sampling(4), 2), min_version))


def test_prompt_with_ids_that_the_model_does_not_have_is_a_fault_of_its_group() -> None:
    client = GenerateClient("http://127.0.0.1:9", timeout_s=1.0, retries=1, vocabulary=16)
    found = _generate(_role(client), 1, 16)
    assert isinstance(found, GenerateFault) and not found.away
    assert "group 7" in found.why and "token id 16" in found.why
