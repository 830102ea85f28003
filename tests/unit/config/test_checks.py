"""Settings that depend on one another: each row of the tables refuses what it should, and says what to set."""

from __future__ import annotations

from typing import Any

import pytest

from elastic_rl import config
from elastic_rl.config import checks
from elastic_rl.config.checks import CHECKS, LIMITS, READERS, Ordered, Refused
from elastic_rl.environments.episode_time import WAITS
from elastic_rl.errors import ConfigError
from elastic_rl.roles.role_clients import call_timeout_s

_DEFAULTS = config.parse({})
_COLOCATED = config.parse({"placement": "colocated"})


def _ids(limit: Ordered) -> str:
    return f"{limit.smaller} below {limit.larger}"


def _base(limit: Ordered) -> config.Config:
    """A job of which the row is true, all else by default."""
    return _COLOCATED if limit.only_if == "colocated" else _DEFAULTS


def _with(cfg: config.Config, key: str, value: float) -> config.Config:
    section, _, name = key.partition(".")
    values: dict[str, Any] = {name: type(getattr(getattr(cfg, section), name))(value)}
    return cfg.model_copy(update={section: getattr(cfg, section).model_copy(update=values)})


@pytest.mark.parametrize("limit", LIMITS, ids=_ids)
def test_defaults_keep_each_limit(limit: Ordered) -> None:
    assert limit.holds(_base(limit))


@pytest.mark.parametrize("limit", LIMITS, ids=_ids)
def test_smaller_setting_that_exceeds_the_larger_one_is_refused(limit: Ordered) -> None:
    key = checks.keys_of(limit.smaller)[0]
    too_large = _with(_base(limit), key, checks.value_of(limit.larger, _DEFAULTS) + 1)
    assert not limit.holds(too_large)
    message = limit.explain(too_large)
    assert key in message and checks.keys_of(limit.larger)[0] in message and "set a larger" in message
    with pytest.raises(ConfigError) as e:
        config.parse(too_large.model_dump(mode="json"))
    assert message in e.value.message


@pytest.mark.parametrize("limit", LIMITS, ids=_ids)
def test_equal_values_are_refused_unless_the_row_allows_them(limit: Ordered) -> None:
    equal = checks.value_of(limit.smaller, _DEFAULTS)
    assert limit.holds(_with(_base(limit), checks.keys_of(limit.larger)[0], equal)) is limit.may_equal


@pytest.mark.parametrize("row", [row for row in CHECKS if isinstance(row, Refused)], ids=lambda row: row.fault[:60])
def test_text_of_a_refused_combination_names_settings_that_there_are(row: Refused) -> None:
    """A renamed one would raise another error than the one that is meant, or none."""
    assert list(row(_DEFAULTS)) == []
    [text] = Refused(lambda c: True, row.fault)(_DEFAULTS)
    assert "{" not in text
    named = [key for key in checks.keys_of(text) if key.partition(".")[0] in config.Config.model_fields]
    for section, _, name in (key.partition(".") for key in named if not key.startswith("pools.")):
        assert name in type(getattr(_DEFAULTS, section)).model_fields


def test_settings_that_a_job_may_not_read_are_settings() -> None:
    assert len(READERS) > 5
    for row in READERS:
        assert row.names and set(row.names) <= type(getattr(_DEFAULTS, row.section)).model_fields.keys()


def test_limit_of_colocated_engines_is_none_of_others() -> None:
    slow = {"drain_timeout_s": 300.0}
    config.parse({"engine": slow})
    config.parse({"placement": "colocated", "pools": {"judge": {"model": "/judge", "engine": slow}}})
    with pytest.raises(ConfigError, match="an engine whose phase is over"):
        config.parse({"placement": "colocated", "engine": slow})


def test_every_broken_limit_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as e:
        config.parse({"coordinator": {"hang_max_s": 31.0}, "dcs": {"io_timeout_s": 40.0}})
    for key in ("trainer.collective_timeout_s", "dcs.io_timeout_s"):
        assert f"coordinator.hang_max_s=31 must be larger than {key}" in e.value.message


def test_product_of_settings_can_be_a_limit() -> None:
    assert checks.value_of("engine.request_timeout_s * (rollout.max_attempts + 1)", _DEFAULTS) == 300


_EPISODES = {"model": {"path": "/m"}, "rollout": {"environment": "tools"}}


@pytest.mark.parametrize("changes", [
    {}, {"max_turns": 64}, {"generate_timeout_s": 3600}, {"max_attempts": 1}], ids=str)
def test_rollout_call_outlasts_an_episode_that_takes_all_its_limits(changes: dict[str, Any]) -> None:
    cfg = config.parse({**_EPISODES, "rollout": {**_EPISODES["rollout"], **changes}, "engine": {
        "request_timeout_s": 50}})
    attempts = cfg.rollout.max_attempts
    turns = cfg.rollout.max_turns * attempts * (50 + 2)  # with the pauses between attempts
    environment = 2 * (cfg.rollout.generate_timeout_s + 5)  # which it may take to end when it is cancelled
    waits = WAITS * cfg.rollout.generate_timeout_s
    assert call_timeout_s(cfg) > attempts * (turns + environment + waits)


def test_other_calls_of_the_rollout_role_have_shorter_limits() -> None:
    assert call_timeout_s(_DEFAULTS) == 300
    assert call_timeout_s(config.parse({"rollout": {"generate": "a.b:c", "generate_timeout_s": 900}})) == 960


@pytest.mark.parametrize(("changes", "refused"), [
    ({"rollout": {"filters": ["uniform_reward"]}}, True), ({}, False),
    ({"rollout": {"filters": ["uniform_reward"]}, "train": {"schedule": "sync"}}, False),
    ({"rollout": {"filters": ["uniform_reward"]}, "deterministic": False}, False)], ids=str)
def test_filters_of_a_deterministic_job_need_an_order_of_the_groups(changes: dict[str, Any], refused: bool) -> None:
    settings = {"deterministic": True, "train": {"schedule": "fully_async"}, **changes}
    if not refused:
        config.parse(settings)
        return
    with pytest.raises(ConfigError, match=r"set train\.schedule=sync"):
        config.parse(settings)


def test_shape_of_the_built_in_model_does_not_count_beside_a_path() -> None:
    with pytest.raises(ConfigError, match=r"model\.num_layers=2 is not a multiple of trainer\.pipeline_parallel=3"):
        config.parse({"trainer": {"pipeline_parallel": 3}})
    config.parse({"model": {"path": "/m"}, "trainer": {"pipeline_parallel": 3, "tensor_parallel": 7}})


@pytest.mark.parametrize("settings", [
    {"coordinator": {"hang_min_s": 8}}, {"coordinator": {"lease_ttl_s": 2}, "etcd": {"call_timeout_s": 2}},
    {"etcd": {"call_timeout_s": 2.0, "retry_budget_s": 1.0}}])
def test_unusual_settings_that_contradict_nothing_are_accepted(settings: dict[str, Any]) -> None:
    config.parse(settings)
