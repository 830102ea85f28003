"""The configuration: every way of setting a key, the errors for a wrong one, and the descriptions in the schema."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import get_args

import pytest
from pydantic import BaseModel

from elastic_rl import config
from elastic_rl.cli.common import overrides
from elastic_rl.config import secrets
from elastic_rl.environments.registry import ENVIRONMENTS
from elastic_rl.errors import ConfigError


@pytest.mark.parametrize(("written", "read"), [
    (["--train.steps=7"], 7), (["train.steps=7"], 7), (["--train.steps=3", "--train.steps=7"], 7),
    (["--train={steps: 7}"], 7),
])
def test_override_wins_in_every_form(written: list[str], read: int, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("train: {steps: 5}\n")
    assert config.load(file, written).train.steps == read


def test_override_changes_one_of_two_sections_that_an_anchor_made_equal(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("pools: {a: &judge {model: /judge}, b: *judge}\n")
    pools = config.load(file, ["pools.a.model=/other"]).pools
    assert (pools["a"].model, pools["b"].model) == ("/other", "/judge")


def test_argument_that_is_no_setting_is_refused() -> None:
    assert config.load(None, overrides(["--coordinator.ports=[1, 2]"])).coordinator.ports == [1, 2]
    for args in (["stray"], ["--train.steps=7", "stray"]):
        with pytest.raises(ConfigError, match="unexpected argument 'stray'"):
            overrides(args)


@pytest.mark.parametrize(("written", "read"), [
    ("Is it #1?", "Is it #1?"), ("# alone", "# alone"), ("a#b", "a#b"), ("'a #b'", "a #b"), ("x  #y z", "x  #y z")])
def test_text_of_the_command_line_is_not_cut_where_yaml_has_comments(written: str, read: str) -> None:
    found = config.load(None, [f"--data.options.system_prompt={written}"])
    assert found.data.options == {"system_prompt": read}


@pytest.mark.parametrize("written", ["[1, 2] # ports", "{a: b} # x", "'a' # b", "a: b # c"])
def test_comment_after_a_value_that_is_no_plain_text_is_refused(written: str) -> None:
    with pytest.raises(ConfigError, match="put text with one in quotes"):
        config.load(None, [f"--data.options.x={written}"])


def test_comments_in_several_lines_of_the_command_line_are_left_out() -> None:
    assert config.load(None, ["--data.options=a: 1 # one\nb: 2"]).data.options == {"a": 1, "b": 2}


@pytest.mark.parametrize(("key", "near"), [
    ("train.stepz", "train.steps"), ("trainer.tensorparallel", "trainer.tensor_"), ("rolout.engines", "rollout"),
    ("jbo", "job")])
def test_unknown_key_names_the_nearest_one(key: str, near: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.load(None, [f"{key}=1"])
    assert "unknown key" in e.value.message
    assert near in e.value.message


@pytest.mark.parametrize(("override", "said"), [
    ("train.steps=many", "train.steps"), ("train.steps=0", "train.steps"), ("job=Not_A_Name", "job"),
    ("trainer.tensor_parallel=3", "multiple of trainer.tensor_parallel=3"),
    ("trainer.pipeline_parallel=7", "multiple of trainer.pipeline_parallel=7"),
    ("dcs.host=0.0.0.0", "set dcs.advertise_host"), ("coordinator.ports=[1]", "as coordinator.replicas=2"),
    ("train.steps.deeper=1", "train.steps"), ("train.steps=[", "not YAML"),
    ("seed=9223372036854775808", "seed"), ("train.lr=0", "train.lr"), ("sft.lr=-1e-3", "sft.lr"),
    ("train.weight_decay=-1", "train.weight_decay"), ("train.max_grad_norm=0", "train.max_grad_norm"),
    ("train.logprob_tolerance=-1", "train.logprob_tolerance"), ("model.rope_theta=0", "model.rope_theta"),
    ("model.rms_norm_eps=0", "model.rms_norm_eps"), ("model.head_dim=15", "model.head_dim=15 is odd"),
    ("rollout.temperature=1e-300", "rollout.temperature"), ("dcs.arena_bytes=99999999999999999999", "dcs.arena_bytes"),
    ("device={type: cpu, dist_backend: nccl}", "nccl connects GPUs"),
    ("rollout.frequency_penalty=0.5", "frequency_penalty=0.5 in rollout with mode=rl"),
    ("rollout.top_k=1", "all samples of a prompt would be the same"), ("rollout.top_k=1000000000000", "rollout.top_k"),
    ("eval.stop_token_ids=[99999999999]", "eval.stop_token_ids"),
    ("eval={samples: 2, temperature: 1, top_k: 1}", "eval.top_k=1"), ("rollout.top_p=0", "rollout.top_p"),
    ("eval.stop=[a]", "the built-in model, which has no text"), ("rollout.stop=['']", "rollout.stop"),
    ("trainer={context_parallel: 2, packing: false}", "trainer.context_parallel=2 with trainer.packing=false"),
    ("trainer={context_parallel: 2, moe_aux_loss_coef: 0.1}", "the load-balancing loss of split sequences"),
    ("coordinator.hang_min_s=601", "hang_max_s=600"), ("failure_policy.backoff_initial_s=301", "backoff_max_s=300"),
    ("mode=fully_async", "(got 'fully_async'); how generation and training follow each other is train.schedule"),
    ("engine.api_key=x", "unknown key 'engine.api_key'; engines ask for the key in <run_dir>/<job>/cluster"),
    ("genrm.model=/m", "unknown key 'genrm'; a judge is a pool: set pools.genrm.model"),
    ("pools=[genrm]", "(got ['genrm']); write pools by name, such as {genrm: {model: /models/judge}}"),
    ("algorithm.teacher={model: x}", "; it is the name of a pool: set algorithm.teacher=large and pools.large.model"),
    ("rollout.filters=uniform_reward", "(got 'uniform_reward'); write [a, b], or [a] for a single one"),
])
def test_invalid_value_is_reported_with_its_key(override: str, said: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.load(None, [override])
    assert said in str(e.value)


@pytest.mark.parametrize("text", ["- a list", "a: [", "just words"])
def test_file_that_is_not_a_mapping_is_refused_by_name(text: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"bad\.yaml"):
        config.load(file)


@pytest.mark.parametrize("key", ["run_dir", "model.path", "dcs.disk_dir", "dcs.token_file", "alerts.config_file"])
@pytest.mark.parametrize("path", ["~nosuch-user/x", "a\\0b", "\\ud800"])
def test_path_that_no_file_has_is_refused(key: str, path: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.load(None, [f'--{key}="{path}"'])
    assert f"{key}: " in str(e.value)
    assert config.load(None, [f"--{key}=~/x"])


def test_pool_has_what_those_need_who_sample_from_it() -> None:
    """A tokenizer for texts that end a response, and no seeds with min_p, which SGLang refuses by an assertion."""
    judges = {"reward": "mix", "reward_options": {"parts": [
        {"reward": "genrm", "options": {"pool": "strict", "stop": ["."]}},
        {"reward": "genrm", "options": {"pool": "other", "min_p": 0.2}}]}}
    cfg = config.parse({"model": {"path": "/m"}, "rollout": judges, "eval": {"temperature": 1, "min_p": 0.1},
                        "pools": {name: {"model": "/j"} for name in ("strict", "other", "idle")}})
    pools = cfg.pool_settings("/m")
    assert {name: (pool.reads_text, pool.engine.seeded_sampling) for name, pool in pools.items()} == {
        "rollout": (False, "off"), "strict": (True, "auto"), "other": (False, "off"), "idle": (False, "auto")}
    for settings in ({"deterministic": True}, {"engine": {"seeded_sampling": "on"}}):
        with pytest.raises(ConfigError, match="SGLang has no seeds"):
            config.parse({"eval": {"min_p": 0.1}, **settings})
        with pytest.raises(ConfigError, match="min_p in the options of genrm"):
            config.parse({"model": {"path": "/m"}, "rollout": judges, "pools": {
                name: {"model": "/j"} for name in ("strict", "other")}, **settings})


def test_missing_file_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        config.load("nowhere.yaml")


def test_shown_configuration_can_be_loaded() -> None:
    first = config.load(None, ["--train.steps=9", "--rollout.engines=3"])
    assert config.parse(first.model_dump(mode="json")) == first


def _settings(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, str | None]]:
    """Key and description of every setting; sections are described by their own settings."""
    for name, field in model.model_fields.items():
        inner = [k for k in (field.annotation, *get_args(field.annotation)) if isinstance(k, type)
                 and issubclass(k, BaseModel)]
        if inner and field.annotation is inner[0]:
            yield from _settings(inner[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", field.description


def test_every_setting_has_a_description_that_stands_alone() -> None:
    found = dict(_settings(config.Config))
    assert len(found) > 120
    bad = [key for key, text in found.items()
           if not text or not text[0].isupper() or text.rstrip()[-1] not in "." or "..." in text
           or text.startswith(("And ", "But ", "The same", "Also "))]
    assert bad == []


def test_gpus_are_hidden_only_from_runs_on_the_cpu() -> None:
    def environment(kind: str) -> dict[str, str]:
        return config.parse({"job": "j", "device": {"type": kind}}).device.environment()

    assert environment("cpu") == {"CUDA_VISIBLE_DEVICES": ""}
    assert environment("auto") == environment("cuda") == {}


@pytest.mark.parametrize(("overrides", "tolerance"), [
    ([], 1e-4), (["device.dtype=bfloat16"], 0.5), (["device.dtype=bfloat16", "train.logprob_tolerance=0.01"], 0.01),
    (["train.logprob_tolerance=0"], 0)])
def test_logprob_tolerance_follows_the_dtype_unless_it_is_set(overrides: list[str], tolerance: float) -> None:
    assert config.load(overrides=overrides).logprob_tolerance == tolerance


def test_misspelt_durable_stream_is_refused() -> None:
    assert config.parse({"job": "j", "dcs": {"durable_streams": ["policy"]}}).dcs.durable_streams == ["policy"]
    with pytest.raises(ConfigError, match="durable_streams"):
        config.parse({"job": "j", "dcs": {"durable_streams": ["polcy"]}})


@pytest.mark.parametrize(("grace_s", "ttl_s"), [(10, 10), (3, 10), (15, 20)])
def test_orphan_grace_that_ends_before_the_publishers_lease_is_refused(grace_s: float, ttl_s: int) -> None:
    with pytest.raises(ConfigError, match=rf"orphan_grace_s={grace_s} must be larger than dcs\.staging_ttl_s={ttl_s}"):
        config.parse({"job": "j", "dcs": {"orphan_grace_s": grace_s, "staging_ttl_s": ttl_s}})


def test_orphan_grace_beyond_the_publishers_lease_is_accepted() -> None:
    assert config.parse({"job": "j", "dcs": {"orphan_grace_s": 25, "staging_ttl_s": 20}}).dcs.orphan_grace_s == 25
    assert config.parse({"job": "j", "dcs": {"orphan_grace_s": 0}}).dcs.orphan_grace_s == 0


@pytest.mark.parametrize("override", ["--job=2024-13-45", "--seed=[", "--train.steps=2024-99-99T00:00:00"])
def test_value_that_yaml_cannot_read_is_a_config_error(override: str) -> None:
    with pytest.raises(ConfigError, match="is not YAML"):
        config.load(None, [override])


@pytest.mark.parametrize("content", [b"\xff\xfe", b"job: 2024-13-45", b"job: [secret-token"])
def test_file_that_cannot_be_decoded_is_a_config_error_without_its_text(content: bytes, tmp_path: Path) -> None:
    file = tmp_path / "bad.yaml"
    file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"bad\.yaml") as e:
        config.load(file)
    assert "secret-token" not in str(e.value)


def test_key_that_is_given_twice_is_refused_with_its_line(tmp_path: Path) -> None:
    file = tmp_path / "twice.yaml"
    file.write_text("train:\n  steps: 3\nseed: 1\ntrain:\n  group_size: 4\n")
    with pytest.raises(ConfigError, match=r"twice\.yaml is not YAML: .*second time in line 4, column 1"):
        config.load(file)
    file.write_text("train:\n  steps: 3\n  steps: 4\n")
    with pytest.raises(ConfigError, match="in line 3, column 3"):
        config.load(file)
    with pytest.raises(ConfigError, match=r"--train is not YAML.*second time"):
        config.load(None, ["--train={steps: 3, steps: 4}"])


def test_key_that_is_merged_may_be_given_again(tmp_path: Path) -> None:
    file = tmp_path / "merged.yaml"
    file.write_text("train: &a {steps: 3, group_size: 4}\ndata: {options: {of: {b: &b {<<: *a, steps: 5}}}}\n"
                    "rollout: {reward_options: {<<: *b, steps: 6}}\n")
    cfg = config.load(file)
    assert cfg.data.options["of"]["b"] == {"steps": 5, "group_size": 4}
    assert cfg.rollout.reward_options == {"steps": 6, "group_size": 4}


@pytest.mark.parametrize("ports", ["[0, 1]", "[1, 65536]", "[-1, 2]", "[8400, 8400]"])
def test_coordinator_ports_are_valid_and_distinct(ports: str) -> None:
    with pytest.raises(ConfigError, match=r"coordinator"):
        config.load(None, [f"--coordinator.ports={ports}"])


@pytest.mark.parametrize("override", [
    "--alerts=slack://secret-token", "--alerts.urls=slack://secret-token", "--alerts.urls=[[slack://secret-token]]",
    "--alerts.routes=[slack://secret-token]", "--dcs.durable_url=[s3://secret-token@bucket]",
    "--alerts.urls=[slack://secret-token", "--dcs={durable_url: 's3://secret-token@host/b', ]",
    "--dcs=s3://secret-token@host/b", "--=s3://secret-token@host/b", "--telemetry=http://secret-token@host",
    "--telemetry.otlp_endpoint=[http://secret-token@host]", "--data.options.hf_token=[secret-token"])
def test_errors_hold_no_secrets(override: str) -> None:
    with pytest.raises(ConfigError) as e:
        config.load(None, [override])
    assert "secret-token" not in str(e.value)


def test_shown_settings_hold_no_secrets() -> None:
    values = config.parse({
        "alerts": {"urls": ["slack://secret/secret"], "routes": [{"url": "json://u:secret@host/", "tags": ["error"]}]},
        "dcs": {"durable_url": "s3://key:secret@bucket/path?token=secret"}}).model_dump(mode="json")
    shown = secrets.redacted(values)
    assert "secret" not in str(shown)
    assert shown["alerts"]["urls"] == ["slack://…"] and shown["alerts"]["routes"][0]["tags"] == ["error"]
    assert shown["dcs"]["durable_url"] == "s3://…@bucket/path?…"
    assert "secret" in str(values), "the settings themselves are unchanged"
    plain = config.parse({"dcs": {"durable_url": "file:///mnt/checkpoints"}}).model_dump(mode="json")
    assert secrets.redacted(plain) == plain


def test_options_whose_names_are_those_of_secrets_are_not_shown() -> None:
    hidden = {"api_key": "secret", "apiKey": "secret", "APIKEY": "secret", "token": 7_5_3, "hf_token": "secret",
              "client_secret": "secret", "db-password": "secret", "AWS_SECRET_ACCESS_KEY": "secret",
              "api_keys": ["secret"], "inner": [{"password": {"of": "secret"}}], "url": "http://u:secret@host/x"}
    kept = {"max_tokens": 5, "prompt_key": "question", "answer_key": "answer", "metadata_keys": ["topic"],
            "token_file": "/run/t", "secretary": "x", "cost_per_token": 2, "send_token_ids": True,
            "password": "", "api_key": None, "url": "http://host/a@b"}
    values = config.parse({
        "telemetry": {"otlp_endpoint": "http://u:secret@host:4318/?api-key=secret"}, "data": {"options": hidden},
        "rollout": {"reward_options": hidden, "filters": [{"name": "x", **hidden}]}}).model_dump(mode="json")
    shown = secrets.redacted(values)
    assert "secret" not in str(shown).lower().replace("client_secret", "").replace("aws_secret", "")
    assert "753" not in str(shown["data"]) and shown["data"]["options"]["url"] == "http://…@host/x"
    assert shown["telemetry"]["otlp_endpoint"] == "http://…@host:4318/?…"
    values = config.parse({"data": {"options": kept}, "rollout": {"environment_options": kept}}).model_dump(mode="json")
    assert secrets.redacted(values) == values


def test_head_dim_is_ignored_beside_a_model_of_its_own() -> None:
    assert config.parse({"model": {"path": "/m", "head_dim": 15}}).model.path == "/m"


# -- values that YAML reads and nothing else does ----------------------------------------------------------------------
@pytest.mark.parametrize("value", ["[" * 600, "!!bool perhaps", "!!timestamp soon", "!!int ''"])
def test_value_that_breaks_the_yaml_reader_is_a_config_error(value: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"--data\.options is not YAML") as e:
        config.load(None, [f"--data.options={value}"])
    assert len(str(e.value)) < 600
    file = tmp_path / "odd.yaml"
    file.write_text(f"data: {value}")
    with pytest.raises(ConfigError, match=r"odd\.yaml is not YAML"):
        config.load(file)


@pytest.mark.parametrize(("options", "said"), [
    ("{a: !!binary /w==}", "a bytes"), ("{a: &x [*x]}", "contains itself"), ("{a: &x {b: *x}}", "contains itself"),
    ("{a: 2024-01-01}", "a date"), ("{a: {1: 2}}", "a key of a mapping is a int"), ("{a: .nan}", "a number is nan"),
    ("{a: [.inf]}", "a number is inf"), ("{a: !!set {x}}", "a set"), ('{a: "\\ud800"}', "surrogate"),
    ("{a: " + "[" * 120 + "]" * 120 + "}", "nested more than"), (f"{{a: 0x{'f' * 5000}}}", "bits"),
    ("{a: &a [1,1,1,1,1,1,1,1,1,1], " + ", ".join(f"{x}: &{x} [{','.join(['*' + y] * 10)}]" for x, y in zip(
        "bcdefg", "abcdef", strict=True)) + "}", "more than")])
def test_options_that_json_does_not_have_are_refused(options: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"data\.options") as e:
        config.load(None, [f"--data.options={options}"])
    assert said in str(e.value)


@pytest.mark.parametrize(("entry", "said"), [
    ("{name: difficulty, high: .inf}", "a number is inf"), ('{name: "m:f", a: "\\ud800"}', "surrogate"),
    ('"\\ud800"', "surrogate"), ("&x {name: length, a: *x}", "contains itself"), ("{name: length, 1: 2}", "filters")])
def test_filters_that_json_does_not_have_are_refused(entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.filters") as e:
        config.load(None, [f"--rollout.filters=[{entry}]"])
    assert said in str(e.value)


def test_options_that_json_has_are_kept() -> None:
    options = {"a": [1, 2.5, True, None, "é", {"b": [[]]}]}
    shared = ["x"]
    assert config.parse({"data": {"options": options}}).data.options == options
    assert config.parse({"data": {"options": {"a": shared, "b": shared}}}).data.options["b"] == shared


def test_number_of_thousands_of_digits_is_not_shown() -> None:
    with pytest.raises(ConfigError, match=r"seed: .*thousands of digits"):
        config.load(None, [f"--seed=0x{'f' * 5000}"])


def test_number_beyond_a_floats_range_is_refused_with_its_key() -> None:
    with pytest.raises(ConfigError, match=r"too large a number for coordinator.lease_ttl_s$"):
        config.load(None, [f"--coordinator.lease_ttl_s={'9' * 400}", "--train.steps=7"])


@pytest.mark.parametrize("rollout", [{"environment": "tools"}, {"generate": "mine:generate"}])
def test_engines_do_not_drain_under_samples_of_several_turns(rollout: dict[str, str]) -> None:
    settings = {"rollout": rollout, "model": {"path": "/m"}}
    with pytest.raises(ConfigError, match="pause_mode to retract"):
        config.parse({**settings, "engine": {"pause_mode": "drain"}})
    config.parse({**settings, "engine": {"pause_mode": "abort"}})
    config.parse({"engine": {"pause_mode": "drain"}})


def test_environment_is_all_that_says_that_samples_are_episodes() -> None:
    found = config.parse({"rollout": {"environment": "tools"}, "model": {"path": "/m"}}).rollout
    assert found.plays_episodes and found.generates_apart and found.generated_by == "rollout.environment=tools"
    with pytest.raises(ConfigError, match="either an environment or a function generates samples"):
        config.parse({"rollout": {"environment": "tools", "generate": "mine:generate"}, "model": {"path": "/m"}})


@pytest.mark.parametrize("name", ["environment", *ENVIRONMENTS])
def test_environment_as_the_way_to_generate_is_refused_with_what_to_set(name: str) -> None:
    with pytest.raises(ConfigError, match=f"rollout.generate={name}: leave it out, and set rollout.environment"):
        config.parse({"rollout": {"generate": name}})


@pytest.mark.parametrize("also", [{"environment": "tools"}, {"reward": "environment"}], ids=str)
def test_wrong_way_to_generate_is_reported_once(also: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as e:
        config.parse({"rollout": {"generate": "tools", **also}, "model": {"path": "/m"}})
    assert e.value.message.count("rollout.generate=tools") == 1


def test_more_engines_than_a_pool_may_be_scaled_to_are_refused() -> None:
    config.parse({"rollout": {"engines": 64}})
    with pytest.raises(ConfigError, match=r"rollout\.engines=65 is more than coordinator\.max_engines=64"):
        config.parse({"rollout": {"engines": 65}})
    with pytest.raises(ConfigError, match=r"pools\.judge\.engines=3 is more than coordinator\.max_engines=2"):
        config.parse({"pools": {"judge": {"model": "m", "engines": 3}}, "coordinator": {"max_engines": 2}})


def test_more_storage_actors_than_a_queue_can_use_are_refused() -> None:
    assert config.parse({"train": {"queue_units": 256}}).train.queue_units == 256
    with pytest.raises(ConfigError, match="queue_units"):
        config.parse({"train": {"queue_units": 257}})


def test_word_of_a_choice_is_what_is_written_where_yaml_has_a_truth_value() -> None:
    for word in ("on", "off", "auto"):
        assert config.load(None, [f"--engine.seeded_sampling={word}"]).engine.seeded_sampling == word
    assert config.load(None, ["--deterministic=on"]).deterministic is True
