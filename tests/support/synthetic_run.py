"""Records of a run that never was, shaped like a real one with faults: for tests of the report and the live view."""

from __future__ import annotations

import math
import random
from typing import Any

START = 1_760_000_000.0


def records(steps: int = 200, *, faults: bool = True, seed: int = 0) -> list[dict[str, Any]]:
    """``steps`` RL steps; with faults: an engine and a rank killed, a rewind of four steps, a third engine at times."""
    rng = random.Random(seed)
    out: list[dict[str, Any]] = []
    at = START
    for step in range(25, 176, 25):
        at += 2.2
        out.append({"kind": "sft", "step": step, "loss": 2.3 - step / 110, "eval_loss": 2.4 - step / 120,
                    "eval_accuracy": 0.41 * step / 175, "at": at})
    out.append({"kind": "eval", "step": 0, "eval_accuracy": 0.41, "at": at + 1})
    version, rewound, step = 1, False, 0
    while step < steps:
        step += 1
        out.append(_step(rng, step, steps, version, at, faults))
        at = out[-1]["at"]
        version += 1
        if step % 20 == 0:
            out.append({"kind": "eval", "step": step, "eval_accuracy": _eval_accuracy(step, steps), "at": at + 0.2})
        if faults and step == 94 and not rewound:
            out.append({"kind": "rewind", "from_step": 94, "to_step": 90, "at": at + 9, "reason": "rank 1 ended"})
            out[-2]["at"], at, version, rewound, step = at, at + 11, version + 1, True, 90
    if faults:
        out += _faults(out)
    return out


def _eval_accuracy(step: int, steps: int) -> float:
    return 0.41 + 0.55 * (1 - math.exp(-3.2 * step / steps))


def _step(rng: random.Random, step: int, steps: int, version: int, at: float, faults: bool) -> dict[str, Any]:
    phases = {"sync": 0.18, "generate": 0.62, "reward": 0.01, "advantage": 0.02, "train": 0.55, "publish_stall": 0.06,
              "other": 0.03}
    seconds = {k: v * rng.uniform(0.85, 1.25) for k, v in phases.items()}
    if faults and step in (51, 52):
        seconds["generate"] *= 1.9
    seconds["total"] = sum(seconds.values())
    names = ["engine-0", "engine-1"]
    if faults:
        names = ["engine-0"] if 50 <= step < 68 else ["engine-0", "engine-2"] if step >= 68 else names
        names += ["engine-3"] if 150 <= step < 175 else []
    lag = {n: int(faults and n != "engine-0" and step in (68, 150)) for n in names}
    return {"kind": "step", "step": step, "at": at + seconds["total"], "loss": rng.uniform(-0.02, 0.02),
            "reward_mean": min(1.0, _eval_accuracy(step, steps) - 0.03 + rng.gauss(0, 0.03)),
            "grad_norm": rng.uniform(0.2, 0.9), "logprob_diff_max": rng.uniform(1e-6, 4e-6), "clip_fraction": 0.01,
            "groups": list(range((step - 1) * 64, step * 64)), "samples": 512, "tokens": 4600,
            "train_s": 0.9 * seconds["train"], "kl": rng.uniform(4e-4, 9e-4), "lr": 1e-3 * (1 - 0.9 * step / steps),
            "truncated": 0.2 * (1 - step / steps), "reward_parts": {"answer": rng.random(), "format": 1.0},
            "algorithm": {"entropy": 1.1 - 0.8 * step / steps, "advantage_std": rng.uniform(0.6, 0.9),
                          "logprob_diff_mean": rng.uniform(1e-7, 2e-7), "ratio_mean": 1.0, "my_stat": rng.random()},
            "throughput": {"train_tokens_per_s": 4600 / seconds["train"], "tflops_per_rank": 0.05,
                           "generate_tokens_per_s": 2000 / seconds["generate"], "peak_memory_bytes": 4.5e8},
            "response_tokens": {"mean": 3.8, "max": 4.0},
            "idle_s": {"sync": 0.9 * seconds["sync"]},
            "policy_version": version + 1, "sample_versions": [version], "staleness": 0, "seconds": seconds,
            "engines": [{"id": n, "state": "ready", "version": version - lag[n],
                         "pull_apply_s": rng.uniform(0.02, 0.05), "pause_s": rng.uniform(0.005, 0.01)} for n in names]}


def _faults(out: list[dict[str, Any]]) -> list[dict[str, Any]]:
    def when(step: int) -> float:
        return next(r["at"] for r in out if r["kind"] == "step" and r["step"] == step)
    rows = [("kill-engine", 50, 0.9, 24.0, "engine-1", "the server's pid is gone", "18 steps trained on one engine"),
            ("kill-rank", 94, 1.4, 10.6, "rank-1", "the rank's pid is gone", "engines stayed up; 4 steps done again"),
            ("kill-coordinator", 120, 2.9, 3.2, "coordinator-0", "the leader key changed", "3 steps trained"),
            ("scale 2→3→2", 150, 0.1, 31.0, "rollout", "the pool's status", "25 steps trained")]
    return [{"kind": "fault", "name": n, "step": s, "at": when(s) + h, "injected_at": when(s),
             "detected_at": when(s) + d, "healed_at": when(s) + h, "witness": w, "meanwhile": m, "target": t}
            for n, s, d, h, t, w, m in rows]
