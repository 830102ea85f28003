"""Which settings a job keeps: the table, what is recorded of them, and what contradicts the record."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.config import fixed_settings as fixed
from elastic_rl.config.fixed_settings import FIXED, changes, fixed_settings


def settings(**values: Any) -> dict[str, Any]:
    return fixed_settings(config.parse(values))


def changed(new: dict[str, Any], *, sft_is_over: bool = True, old: dict[str, Any] | None = None) -> list[str]:
    return [c.key for c in changes(settings(**(old or {})), settings(**new), sft_is_over=sft_is_over)]


@pytest.mark.parametrize("rule", FIXED, ids=lambda r: r.key)
def test_each_rule_of_the_table_covers_a_setting(rule: fixed.Fixed) -> None:
    mode = rule.modes[0] if rule.modes else "rl"
    assert [key for key in settings(mode=mode) if rule.covers(key, mode)]


@pytest.mark.parametrize(("new", "key"), [
    ({"seed": 1}, "seed"), ({"deterministic": True}, "deterministic"),
    ({"data": {"eval_fraction": 0.2}}, "data.eval_fraction"),
    ({"model": {"hidden_size": 128}}, "model.hidden_size"), ({"model": {"path": "/models/x"}}, "model.path"),
    ({"train": {"prompts_per_step": 32}}, "train.prompts_per_step"), ({"train": {"group_size": 4}}, "train.group_size"),
    ({"device": {"dtype": "bfloat16"}}, "device.dtype")])
def test_setting_that_the_job_has_decided_is_a_contradiction(new: dict[str, Any], key: str) -> None:
    assert changed(new) == [key]


@pytest.mark.parametrize("new", [
    {"train": {"steps": 9, "lr": 0.1, "updates_per_step": 4, "max_staleness": 2}}, {"rollout": {"engines": 5}},
    {"trainer": {"tensor_parallel": 1, "distributed_optimizer": True, "collective_timeout_s": 30}},
    {"engine": {"request_timeout_s": 30}},
    {"run_dir": "/elsewhere"}, {"dcs": {"keep_versions": 9}}, {"algorithm": {"options": {"clip_high": 0.3}}},
    {"alerts": {"urls": ["json://x"]}}, {"failure_policy": {"max_faults": 2}}, {"telemetry": {"log_level": "debug"}}])
def test_setting_that_decides_nothing_may_change(new: dict[str, Any]) -> None:
    assert changed(new) == []


@pytest.mark.parametrize(("mode", "new", "key"), [
    ("eval", {"rollout": {"reward": "f1"}}, "rollout.reward"), ("eval", {"eval": {"samples": 1, "pass_reward": 0.5}},
                                                               "eval.pass_reward"),
    ("rejection_sampling", {"rollout": {"temperature": 0.5}}, "rollout.temperature"),
    ("rejection_sampling", {"rollout": {"top_p": 0.5}}, "rollout.top_p"),
    ("rejection_sampling", {"rollout": {"filters": ["uniform_reward"]}}, "rollout.filters"),
    ("rejection_sampling", {"rejection": {"min_reward": 0.5}}, "rejection.min_reward")])
def test_settings_of_an_output_are_fixed_in_its_mode_only(mode: str, new: dict[str, Any], key: str) -> None:
    assert changed({"mode": mode, **new}, old={"mode": mode}) == [key]
    assert changed(new) == []


def test_settings_of_the_sft_phase_may_change_until_it_is_over() -> None:
    assert changed({"sft": {"max_steps": 10}}, sft_is_over=False) == []
    assert changed({"sft": {"max_steps": 10}}, sft_is_over=True) == ["sft.max_steps"]
    assert changed({"sft": {"batch_size": 10}}, sft_is_over=False) == ["sft.batch_size"]


def test_reference_policy_stays_once_rl_has_begun_and_its_weight_may_change() -> None:
    kept = "algorithm.kl_coef or algorithm.report_kl"
    assert changed({"algorithm": {"kl_coef": 0.1}}) == changed({"algorithm": {"report_kl": True}}) == [kept]
    assert changed({}, old={"algorithm": {"kl_coef": 0.1}}) == [kept]
    assert changed({"algorithm": {"kl_coef": 0.1}}, sft_is_over=False) == []
    assert changed({"algorithm": {"kl_coef": 0.2}}, old={"algorithm": {"kl_coef": 0.1}}) == []
    assert changed({"algorithm": {"report_kl": True}}, old={"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}}) == []
    assert changed({"algorithm": {"reference_every_steps": 5}}) == ["algorithm.reference_every_steps"]


def test_shape_of_the_built_in_model_is_not_recorded_beside_a_path() -> None:
    assert [key for key in settings(model={"path": "/m"}) if key.startswith("model.")] == ["model.path"]
    assert changed({"model": {"path": "/m", "hidden_size": 7}}, old={"model": {"path": "/m"}}) == []


def test_key_that_only_one_release_knows_is_not_compared() -> None:
    old = {**settings(), "data.of_an_older_release": 1}
    del old["train.group_size"]
    assert changes(old, settings(), sft_is_over=True) == []
    assert changes(settings(), old, sft_is_over=True) == []


def test_every_changed_setting_is_named_with_both_values_and_the_reason() -> None:
    found = changes(settings(), settings(seed=4, train={"group_size": 4}), sft_is_over=True)
    assert [str(c).partition(":")[0] for c in found] == ["seed was 0 and is now 4",
                                                         "train.group_size was 8 and is now 4"]
    assert all(c.why for c in found)


def test_long_value_is_kept_as_its_digest() -> None:
    kept = fixed._bounded("data.anything", ["x" * 1000])
    assert kept.startswith("sha256:") and len(kept) < 40
    assert kept != fixed._bounded("data.anything", ["y" * 1000])
    assert fixed._bounded("data.anything", ["x"]) == ["x"]
