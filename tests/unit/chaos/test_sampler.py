"""Samples of a run: what a process is, by its command line and those of its ancestors, and the kinds of keys."""

from __future__ import annotations

import os
from collections.abc import Sequence

import pytest

from chaos_tests import sampler
from chaos_tests.scenarios import SCENARIOS
from elastic_rl import config

FORKSERVER = ("python", "-B", "-c", "from multiprocessing.forkserver import main; main(10, 12)")
AGENT = ("python", "-m", "elastic_rl.trainer.group.agent", "--ranks=1")
HEAD = ("python", "/venv/bin/ray", "start", "--block", "--head", "--port=1")
WORKER = ("python", "/venv/bin/ray", "start", "--block", "--address=h:1")


@pytest.mark.parametrize(("command", "ancestors", "role"), (
    (("python", "-m", "elastic_rl.coordinator.service", "--config", "c"), (), "coordinator"),
    (("python", "-m", "elastic_rl.driver", "--context", "c"), (), "driver"),
    (AGENT, (), "trainer-agent"),
    (FORKSERVER, (AGENT,), "trainer-agent/forkserver"),
    (FORKSERVER, (FORKSERVER, AGENT), "rank"),
    (("python", "-c", "from multiprocessing.resource_tracker import main;main(10)"), (AGENT,),
     "trainer-agent/resource-tracker"),
    (("ray::ServeReplica:actor:actor.step    ",), (), "ray::ServeReplica:actor"),
    (("ray::ServeReplica:rollout:rollout",), (), "ray::ServeReplica:rollout"),
    (("ray::ServeController.listen_for_change",), (), "ray::ServeController"),
    (("ray::ComponentActor.wait",), (), "ray::ComponentActor"),
    (("sglang::scheduler",), (), "sglang::scheduler"),
    (("/opt/etcd", "--name", "etcd-0"), (), "etcd"),
    (("/site/ray/core/src/ray/raylet/raylet", "--x"), (HEAD,), "ray/raylet/head"),
    (("/site/ray/core/src/ray/raylet/raylet", "--x"), (WORKER,), "ray/raylet/worker"),
    (("/site/ray/core/src/ray/gcs/gcs_server",), (HEAD,), "ray/gcs_server/head"),
    (HEAD, (), "ray/ray/head"),
    ((), (), "unknown"),
))
def test_role_is_the_same_over_restarts(command: Sequence[str], ancestors: Sequence[Sequence[str]], role: str) -> None:
    assert sampler.role_of(command, ancestors) == role


@pytest.mark.parametrize(("key", "kind"), (
    ("/job/steps/0000000017", "steps"), ("/job/members/actor/a1", "members/actor"), ("/job/epoch", "epoch"),
    ("/job/dcs/streams/policy/versions/0000000003", "dcs/streams"), ("/job/run_log/tail/0/17", "run_log/tail")))
def test_keys_of_a_kind_have_one_prefix(key: str, kind: str) -> None:
    assert sampler.prefix_of(key, "/job/") == kind


def test_memory_of_a_process_grows_with_what_it_writes_to() -> None:
    before = sampler.anonymous_bytes(os.getpid())
    held = bytearray(os.urandom(1 << 20) * 64)
    assert (1 << 20) * 60 < sampler.anonymous_bytes(os.getpid()) - before < (1 << 20) * 80
    assert len(held) == 64 << 20


def test_settings_are_of_a_job_whose_rings_wrap_around_early() -> None:
    settings = SCENARIOS["growth"].settings.items()
    cfg = config.load(None, ["--job=growth", *(f"--{key}={value}" for key, value in settings)])
    assert cfg.coordinator.max_step_metrics == cfg.coordinator.max_events == 200
