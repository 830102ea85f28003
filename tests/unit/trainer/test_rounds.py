"""What a round decides."""

from __future__ import annotations

import pytest
import torch

from elastic_rl.errors import ElasticRLError, EtcdUnavailable, NodeUnavailable, VersionNotFound
from elastic_rl.trainer.checkpoint import rounds as rounds_module
from elastic_rl.trainer.checkpoint.rounds import Cancelled, Job, Rounds, Unavailable, Verdict, verdict, while_away
from elastic_rl.trainer.megatron.parallel import ParallelDims

ALONE = ParallelDims(0, 1, 1, 0, 1, 0, torch.device("cpu"))


def test_nobody_goes_on_while_a_job_is_running() -> None:
    assert verdict(any_running=True, any_failed=False) is Verdict.WAIT
    assert verdict(any_running=True, any_failed=True) is Verdict.CANCEL
    assert verdict(any_running=False, any_failed=True) is Verdict.FAILED
    assert verdict(any_running=False, any_failed=False) is Verdict.DONE


def test_group_of_one_rank_needs_no_process_group() -> None:
    rounds = Rounds(ALONE, None, round_timeout_s=1)
    assert rounds.run(lambda job: 7) == 7

    def absent(job: Job[int]) -> int:
        raise VersionNotFound("ü" * 1000)

    with pytest.raises(Unavailable, match="rank 0: üü"):
        rounds.run(absent)

    def broken(job: Job[int]) -> int:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        rounds.run(broken)


def test_job_waits_for_etcd_or_the_node_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_RETRY_S", (0.0, 0.0))
    outages: list[ElasticRLError] = [EtcdUnavailable("no majority"), NodeUnavailable("no node")]
    answers, reasons = iter(outages), list[str]()

    def attempt() -> str:
        if (outage := next(answers, None)) is not None:
            raise outage
        return "restored"

    rounds = Rounds(ALONE, None, round_timeout_s=1)
    assert rounds.run(lambda job: while_away(job, attempt, lambda e: reasons.append(e.message))) == "restored"
    assert reasons == ["no majority", "no node"]


def test_cancelled_job_does_not_wait_for_what_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds_module, "_RETRY_S", (1000.0, 1000.0))
    job: Job[None] = Job(lambda job: None, torch.device("cpu"))

    def attempt() -> None:
        job.cancelled.set()
        raise NodeUnavailable("no node")

    with pytest.raises(Cancelled):
        while_away(job, attempt, lambda e: None)
