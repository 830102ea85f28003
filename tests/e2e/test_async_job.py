"""A whole asynchronous run of PPO with a judge, of which each part is killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.whole_run import assert_recovered, assert_sound, whole_job

from elastic_rl import config
from elastic_rl.config.groups import ACTOR, CRITIC
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import EngineKilled, QueueActorKilled, RoleKilled, TrainerRankKilled

pytest.importorskip("transfer_queue", reason="pip install 'elastic-rl[transfer-queue]'")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

STEPS, JUDGE = 50, "genrm"
SETTINGS = {
    "train.schedule": "fully_async", "train.max_staleness": 2, "train.queue": "transfer_queue", "train.steps": STEPS,
    "train.state_every_steps": 4, "train.prompts_per_step": 8, "train.group_size": 4, "sft.max_steps": 10,
    "data.options.operand_below": 30, "algorithm.name": "ppo", "critic.trainer": {"data_parallel": 1},
    "rollout.engines": 1, "rollout.groups_per_request": 2, "rollout.reward": "mix",
    # The judge knows nothing: its verdicts are noise beside the reward that says what is right.
    "rollout.reward_options": {"parts": [
        {"reward": "exact_match"},
        {"reward": JUDGE, "weight": 0.1, "options": {
            "prompt": "{question}{response}", "chat_template": False, "verdict": r"(\d)", "low": 0, "high": 9,
            "max_tokens": 2, "read_cut_answers": True}}]}}


def every_part_killed(context: FaultContext, _steps: int) -> list[tuple[int, Sequence[Fault]]]:
    return [(2, [QueueActorKilled(context, "SimpleStorageUnit")]),
            (3, [EngineKilled(context), EngineKilled(context, JUDGE)]),
            (4, [RoleKilled(context, "rollout"), RoleKilled(context, "genrm"), RoleKilled(context, "advantages")]),
            (5, [TrainerRankKilled(context, CRITIC)]),
            (6, [TrainerRankKilled(context, ACTOR), TrainerRankKilled(context, CRITIC)]),
            (7, [RoleKilled(context, "actor")]),
            (8, [QueueActorKilled(context, "TransferQueueController")])]


def test_no_group_is_lost_or_too_stale_whatever_part_of_an_asynchronous_run_is_killed(tmp_path: Path) -> None:
    judge = make_model_dir(tmp_path / "judge", config.parse({"seed": 7, "model": {"family": "llama"}}))
    pools = {JUDGE: {"model": str(judge), "engine": {"max_total_tokens": 2048}}}
    with whole_job(tmp_path / "run", SETTINGS | {"pools": pools}) as job:
        report = job.run(every_part_killed)
        names = [fault["name"] for fault in report["faults"]]
        assert sorted(names) == sorted([
            "queue_storage_killed", "engine_killed", "genrm_engine_killed", "rollout_killed", "genrm_killed",
            "advantages_killed", "critic_rank_killed", "trainer_rank_killed", "critic_rank_killed", "actor_killed",
            "queue_controller_killed"])
        assert_recovered(report["faults"], "SIGKILL")
        assert_sound(job, report, STEPS)
        steps, kinds = job.step_records(), [e.kind for e in job.events()]
        assert max(record["staleness"] for record in steps) > 0, "nothing was asynchronous"
        assert job.epoch() == 1, "a part was answered by a global restart"
        assert not {"run.crash_loop", "logprob.mismatch", "staleness.exceeded"} & set(kinds)
        assert kinds.count("queue.replaced") == 2
        job.cluster.down()
        assert job.leftovers() == []
