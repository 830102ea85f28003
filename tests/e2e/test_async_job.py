"""A whole asynchronous run of PPO with a judge, a teacher and a reference policy, of which each part is killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from support.collection import skip_module_without
from support.tiers import full
from support.whole_run import assert_recovered, assert_sound, whole_job

from elastic_rl import config
from elastic_rl.config.groups import ACTOR, ACTOR_FWD, CRITIC, REFERENCE
from elastic_rl.data.tiny_model import make_model_dir
from elastic_rl.faults.context import Fault, FaultContext
from elastic_rl.faults.kinds import EngineKilled, PoolRouterKilled, QueueActorKilled, RoleKilled, TrainerRankKilled

skip_module_without("transfer_queue", reason="pip install 'elastic-rl[transfer-queue]'")
pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), full(
    proved_in="tests/integration/pipeline/test_fully_async.py tests/integration/pipeline/test_transfer_queue.py",
    why="the asynchronous schedule, PPO, judge, teacher and queue together, each part killed in a whole run")]

STEPS, JUDGE = 50, "genrm"
SETTINGS = {
    "train.schedule": "fully_async", "train.max_staleness": 2, "train.queue": "transfer_queue", "train.steps": STEPS,
    "train.state_every_steps": 4, "train.prompts_per_step": 8, "train.group_size": 4, "sft.max_steps": 10,
    "data.options.operand_below": 30, "algorithm.name": "ppo", "critic.trainer": {"data_parallel": 1},
    "reference": {"enabled": True, "trainer": {"data_parallel": 1}}, "algorithm.kl_coef": 0.001,
    "actor_fwd": {"enabled": True, "trainer": {"data_parallel": 1}}, "algorithm.tis_cap": 2.0,
    # The judge's engines are the teacher's too, and it knows nothing: what it says of tokens weighs little.
    "algorithm.teacher": JUDGE, "algorithm.teacher_top_k": 2, "algorithm.teacher_coef": 0.001,
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
            (4, [RoleKilled(context, role) for role in ("rollout", "genrm", "teacher", "advantages")]),
            (5, [TrainerRankKilled(context, group) for group in (CRITIC, REFERENCE, ACTOR_FWD)]),
            (6, [TrainerRankKilled(context, ACTOR), TrainerRankKilled(context, CRITIC)]),
            (7, [RoleKilled(context, "actor"), PoolRouterKilled(context), PoolRouterKilled(context, JUDGE)]),
            (8, [QueueActorKilled(context, "TransferQueueController")])]


def test_no_group_is_lost_or_too_stale_whatever_part_is_killed(tmp_path: Path) -> None:
    policy = make_model_dir(tmp_path / "policy", config.parse({}))
    judge = make_model_dir(tmp_path / "judge", config.parse({"seed": 7, "model": {"family": "llama"}}))
    pools = {JUDGE: {"model": str(judge), "engine": {"max_total_tokens": 2048}}}
    with whole_job(tmp_path / "run", SETTINGS | {"model.path": str(policy), "pools": pools}) as job:
        report = job.run(every_part_killed)
        names = [fault["name"] for fault in report["faults"]]
        assert sorted(names) == sorted([
            "queue_storage_killed", "engine_killed", "genrm_engine_killed", "rollout_killed", "genrm_killed",
            "teacher_killed", "advantages_killed", "critic_rank_killed", "reference_rank_killed",
            "actor_fwd_rank_killed", "trainer_rank_killed", "critic_rank_killed", "actor_killed", "router_killed",
            "genrm_router_killed", "queue_controller_killed"])
        assert_recovered(report["faults"], "SIGKILL")
        assert_sound(job, report, STEPS)
        steps, kinds = job.step_records(), [e.kind for e in job.events()]
        assert max(record["staleness"] for record in steps) > 0, "nothing was asynchronous"
        assert job.epoch() == 1, "a part was answered by a global restart"
        assert not {"run.crash_loop", "logprob.mismatch", "staleness.exceeded"} & set(kinds)
        assert kinds.count("queue.replaced") == 2
        job.cluster.down()
        assert job.leftovers() == []
