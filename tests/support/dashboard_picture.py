"""Makes docs/dashboard.png: ``PYTHONPATH=.:tests python -m support.dashboard_picture docs/dashboard.png``.

The page is that of real replicas on a real etcd; the records of the compute plane are made up: a run in which an engine
has just died and the operator has scaled the pool.
"""

from __future__ import annotations

import math
import random
import sys
import tempfile
import time
from pathlib import Path

from elastic_rl.etcd import event_kinds, events
from elastic_rl.etcd.records import (
    Engine,
    EngineState,
    Epoch,
    Event,
    JobStatus,
    Member,
    PoolSpec,
    PoolStatus,
    Record,
    SampleRecord,
    Severity,
    StepMetrics,
    Version,
    VersionState,
)
from elastic_rl.net import http_client
from support.api_cluster import ApiCluster
from support.browser import FLAGS, LONG_MS, dashboard_link, find_chromium, is_live, sync_api
from support.coordinators import AUTH
from support.etcd_server import EtcdServers
from support.waiting import wait_until

STEP, STEPS = 64, 400
_IDLE = {"generate": 0.05, "train": 0.09, "publish": 0.02}
_SECONDS = {"total": 1.05, "generate": 0.31, "train": 0.66, "sync": 0.05, "publish_stall": 0.03}


def main(target: Path, width: int = 1400, scheme: str = "light") -> None:
    """``width``: of the window in pixels; ``scheme``: light or dark."""
    with tempfile.TemporaryDirectory() as folder:
        servers = EtcdServers(Path(folder) / "etcd", 1).start()
        cluster = ApiCluster(servers, Path(folder) / "replicas", job="addition-grpo")
        try:
            cluster.start("coordinator-0", "coordinator-1")
            cluster.bulk(_records(cluster, time.time()))
            _operator_and_faults(cluster)
            _picture(cluster, target, width, scheme)
        finally:
            cluster.close()
            servers.close()


def _records(cluster: ApiCluster, now: float) -> list[tuple[str, Record]]:
    """The run before the fault."""
    keys, noise = cluster.keys, random.Random(4)

    def slowed(step: int) -> float:
        return 1 + 2.2 * math.exp(-((step - 38) / 4) ** 2) + noise.uniform(0, 0.12)

    def reward(step: int) -> float:
        return 0.29 + 0.31 / (1 + math.exp(-(step - 34) / 9)) + noise.uniform(-0.05, 0.05)

    steps = [StepMetrics(step=n, at=now - 1.1 * (STEP - n) - 6, reward=reward(n), samples=512, tokens=9200,
                         policy_version=n + 8, eval_accuracy=0.55 + 0.2 * n / STEP if n % 20 == 0 else None,
                         seconds={name: value * slowed(n) for name, value in _SECONDS.items()},
                         idle_s={name: value * slowed(n) * noise.uniform(0.8, 1.2) for name, value in _IDLE.items()},
                         response_tokens={"mean": 21 - n / 8 + noise.uniform(-1, 1), "max": 32.0},
                         truncated=max(0.0, 0.3 - n / 260 + noise.uniform(-0.04, 0.04)),
                         reward_parts={"answer": reward(n), "format": min(1.0, 0.6 + n / 90 + noise.uniform(0, 0.08))},
                         update=_update(n, noise), throughput=_throughput(slowed(n), noise))
             for n in range(1, STEP + 1)]
    versions = [Version(stream="policy", number=n, state=VersionState.COMMITTED if n > 68 else VersionState.GONE,
                        epoch=2, manifest="0", nbytes=845_000, nodes=["node-0"] if n > 68 else [],
                        created_at=now - 1.1 * (72 - n) - 14, committed_at=now - 1.1 * (72 - n) - 14,
                        meta={"step": n - 8}) for n in range(61, 73)]
    members = [Member(role=role, id=name, pid=pid, host="gpu-1", epoch=2, step=STEP if phase else 0, phase=phase,
                      progress_at=now - 2)
               for role, name, pid, phase in (("actor", "actor", 6079, "train"), ("advantages", "advantages", 6112, ""),
                                              ("dcs", "node-0", 6010, ""), ("rollout", "rollout", 6101, ""),
                                              ("trainer", "rank-0", 6234, "train"),
                                              ("trainer", "rank-1", 6235, "train"))]
    samples = [SampleRecord(step=STEP, group=64 * 63 + n, index=n, prompt=f"{a} + {b} =", response=response, at=now - 6,
                            reward=reward, reward_parts={"answer": reward, "format": 1.0}, advantage=advantage,
                            finish_reason="stop", versions=[72], prompt_tokens=6, response_tokens=len(response))
               for n, a, b, response, reward, advantage in (
                   (0, 17, 25, " 32", 0.0, -0.87), (5, 8, 41, " 49", 1.0, 0.93))]
    engines = [Engine(id=name, pool="rollout", state=state, epoch=2, version=version, host="gpu-1", updated_at=now - 9,
                      running=running, waiting=waiting, pull_apply_s=pull_apply_s)
               for name, state, version, running, waiting, pull_apply_s in (
                   ("rollout-5d07e1", EngineState.STARTING, 0, 0, 0, 0.0),
                   ("rollout-99c632", EngineState.READY, 72, 9, 2, 0.069),
                   ("rollout-ad1448", EngineState.READY, 72, 9, 0, 0.033))]
    return [
        (keys.epoch(), Epoch(number=2, holder="driver", started_at=now - 260)),
        (keys.pool_spec("rollout"), PoolSpec(name="rollout", desired=2)),
        (keys.pool_status("rollout"), PoolStatus(name="rollout", ready=2, starting=1, draining=0)),
        (keys.job_status(), JobStatus(phase="rl", step=STEP, steps=STEPS, started_at=now - 260, updated_at=now,
                                      reward=0.592, eval_accuracy=0.75, eval_measure="reward", eval_start=0.55,
                                      policy_version=72, stage="generate")),
        *((keys.step_metrics(s.step), s) for s in steps), *((keys.version(v.stream, v.number), v) for v in versions),
        *((keys.member(m.role, m.id), m) for m in members), *((keys.engine(e.id), e) for e in engines),
        *((keys.sample(n), sample) for n, sample in enumerate(samples)),
        *((keys.event(e.id), e) for e in _past_events(now))]


def _update(step: int, noise: random.Random) -> dict[str, float]:
    near = noise.uniform
    return {"loss": -0.004 + near(-0.003, 0.003), "kl": 6e-4 + step * 4e-6 + near(0, 3e-4),
            "kl_reference": 0.08 * (1 - math.exp(-step / 30)) + near(0, 0.004),
            "entropy": 0.2 + 0.9 * math.exp(-step / 28) + near(-0.02, 0.02), "clip_fraction": 0.012 + near(0, 0.008),
            "ratio_mean": 1 + near(-0.002, 0.002), "grad_norm": 0.35 + 0.8 * math.exp(-step / 12) + near(0, 0.12),
            "lr": 1e-3 * min(1.0, step / 10) * (1 - step / STEPS), "logprob_diff_mean": 2e-7 + near(0, 4e-8),
            "logprob_diff_max": 1.6e-6 + near(0, 9e-7), "advantage_mean": 0.0, "advantage_std": 0.94 - step / 400,
            "advantage_min": -2.4 + near(-0.2, 0.2), "advantage_max": 2.5 + near(-0.2, 0.2)}


def _throughput(slowed: float, noise: random.Random) -> dict[str, float]:
    return {"train_tokens_per_s": 27_800 / slowed * noise.uniform(0.97, 1.03), "generate_tokens_per_s": 31_000 / slowed,
            "tflops_per_rank": 0.061 / slowed, "peak_memory_bytes": 455e6 + noise.uniform(0, 4e6)}


def _past_events(now: float) -> list[Event]:
    past = ((97, event_kinds.ENGINE_STARTING, "rollout-99c632", "starting rollout-99c632"),
            (83, event_kinds.ENGINE_READY, "rollout-99c632", "rollout-99c632 serves version 22"))
    return [events.build(kind, subject, message).replace(at=now - age, id=f"{int((now - age) * 1000):015d}-{n:032x}")
            for n, (age, kind, subject, message) in enumerate(past)]


def _operator_and_faults(cluster: ApiCluster) -> None:
    api = cluster.replicas.job_url("coordinator-0")
    # First: an alert on an engine is resolved while its pool is complete.
    http_client.request("POST", f"{api}/pools/rollout/scale", json={"desired": 3}, headers=AUTH,
                        timeout=20).raise_for_status()
    for event in (events.build(event_kinds.VERSION_DROPPED, "policy",
                               "version 73 was dropped: node-0 did not confirm 2 chunks", severity=Severity.WARNING),
                  events.build(event_kinds.ENGINE_DEAD, "rollout-344a45", "engine rollout-344a45 died (signal 9)",
                               severity=Severity.ERROR),
                  events.build(event_kinds.ENGINE_STARTING, "rollout-5d07e1",
                               "starting rollout-5d07e1 for rollout-344a45")):
        cluster.etcd.put(cluster.keys.event(event.id), event.encode())

    def firing() -> bool:
        alerts = http_client.request("GET", f"{api}/alerts", headers=AUTH, timeout=20).json()["items"]
        return len([a for a in alerts if a["phase"] == "firing"]) >= 2

    wait_until(firing, what="the alerts")


def _picture(cluster: ApiCluster, target: Path, width: int, scheme: str) -> None:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_chromium(), args=FLAGS)
        page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        sync_api.expect.set_options(timeout=LONG_MS)
        page.goto(dashboard_link(cluster, "coordinator-0"))
        is_live(page)
        sync_api.expect(page.locator("#alerts .alert")).to_have_count(2)
        sync_api.expect(page.locator("#operations .operation")).to_have_count(1)
        page.get_by_role("button", name="Show samples").click()
        sync_api.expect(page.locator("#samples li.sample")).to_have_count(2)
        page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        page.screenshot(path=target, full_page=True)
        browser.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(kind(arg) for kind, arg in zip((int, str), sys.argv[2:], strict=False)))
