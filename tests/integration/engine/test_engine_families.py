"""Engines of other model families: they take published weights, and their log-probs are the trainer's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.engine_testbed import PROMPT, EngineTestbed
from support.etcd_server import EtcdServers
from support.rank_processes import Scenario, run_ranks
from support.tiers import full

from elastic_rl.config import parse


@full(proved_in="tests/integration/trainer/test_families.py tests/integration/engine/test_engine.py "
                "tests/integration/engine/test_folder_pool.py",
      why="engine and trainer face to face; by default each is compared with transformers")
@pytest.mark.parametrize("model", [{"family": "llama"}, {"family": "qwen2", "tied_embeddings": True},
                                   {"family": "qwen3_moe"}], ids=lambda m: m["family"])
def test_engine_takes_a_version_and_its_log_probs_are_the_trainers(
        etcd_servers: EtcdServers, tmp_path: Path, model: dict[str, Any]) -> None:
    testbed = EngineTestbed(etcd_servers, tmp_path, model)
    try:
        engine = testbed.serving_engine()
        testbed.publish(seed=1)  # staged beside the version that is served
        testbed.wait_ready(engine)
        testbed.assert_serves()
        samples = testbed.ask(4, temperature=1.0)
    finally:
        testbed.close()
    testbed.assert_logprobs(samples)
    testbed.checkpoint()
    rows = [[*PROMPT, *sample.response_ids] for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in rows], batch_first=True)
    save_file({"tokens": padded}, tmp_path / "tokens.safetensors")
    cfg = parse({"device": {"type": "cpu"}, "trainer": {"data_parallel": 1}})
    logits = run_ranks(tmp_path / "alone", cfg, [Scenario("all", "logits", tmp_path / "reference")])["all"]["logits"]
    for sample, row, of_row in zip(samples, rows, logits.log_softmax(-1), strict=True):
        trainers = [float(of_row[at - 1, row[at]]) for at in range(len(PROMPT), len(row))]
        assert [p for s in sample.segments for p in s.logprobs] == pytest.approx(trainers, abs=1e-4)
