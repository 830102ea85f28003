"""The addition source, tokenizer, prompt order, rewards and filters, interval sets, the run context, the tiny model."""

from __future__ import annotations

import asyncio
import stat
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.data.addition import Addition
from elastic_rl.data.intervals import IntervalSet
from elastic_rl.data.order import PromptOrder, fingerprint, groups, order_of, sft_order, sft_ordinals
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.data.tokenizer import CHARACTERS, EOS_ID, VOCAB_SIZE, VOCABULARY, encode, make_tokenizer
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.host import model_folder
from elastic_rl.models.arch import ModelArch
from elastic_rl.net.addresses import LOOPBACK
from elastic_rl.rewards.filters import make_filter, uniform_reward
from elastic_rl.rewards.registry import make_reward

thorough = settings(deadline=None, max_examples=seeds(40))

# -- addition ------------------------------------------------------------------------------------------------------


@thorough
@given(st.integers(5, 120), st.floats(0.05, 0.8), st.integers(0, 9))
def test_eval_and_train_problems_are_disjoint_and_complete(below: int, fraction: float, seed: int) -> None:
    task = Addition({"operand_below": below}, seed=seed, eval_fraction=fraction)
    train, evaluated = {p.text for p in task.train}, {p.text for p in task.eval}
    assert not train & evaluated
    assert len(train) + len(evaluated) == len(task.train) + len(task.eval) == below**2


@thorough
@given(st.one_of(st.integers(5, 40), st.sampled_from([100, 101])), st.sampled_from(["normal", "reversed"]))
@example(500, "normal")
@example(500, "reversed")
def test_prompts_and_answers_have_one_length_and_are_right(below: int, order: str) -> None:
    task = Addition({"operand_below": below, "answer_order": order}, seed=3, eval_fraction=0.1)
    for p in task.train[:200] + task.eval[:50]:
        assert p.answer_ids is not None
        left, right = p.text, "".join(CHARACTERS[i - 2] for i in p.answer_ids[:-1])
        assert sum(map(int, left.rstrip("=").split("+"))) == int(right[::-1] if order == "reversed" else right)
        assert list(p.token_ids) == encode(left) and len(p.token_ids) == task.max_prompt_tokens
        assert p.answer_ids[-1] == EOS_ID and len(p.answer_ids) == task.max_response_tokens


def test_split_depends_on_the_seed_only() -> None:
    one, again, other = (Addition({}, seed=s, eval_fraction=0.1) for s in (4, 4, 5))
    assert one.train == again.train and one.eval == again.eval
    assert {p.text for p in one.eval} != {p.text for p in other.eval}


@pytest.mark.parametrize(("settings", "named"), [
    ("--data.options.operand_bellow=9", "operand_bellow"), ("--data.options.operand_below=3", "operand_below"),
    ("--data.source=additon", "did you mean 'addition'"), ("--data.source=no.such.module:make", "no.such.module"),
    ("--data.source=elastic_rl.data.addition:Nope", "has no 'Nope'")])
def test_wrong_source_or_option_is_named(settings: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_source(config.load(overrides=[settings]))


def test_source_without_answers_cannot_be_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Addition, "_prompt", lambda self, a, b: Prompt((1, a % 10, b % 10)))
    with pytest.raises(ConfigError, match="sft.max_steps"):
        make_source(Config())
    assert make_source(config.load(overrides=["--sft.max_steps=0"])).train


# -- rewards and filters ----------------------------------------------------------------------------------------


def _answer(*token_ids: int) -> Sample:
    return Sample((Segment(token_ids),))


def test_exact_match_rewards_only_the_complete_right_answer() -> None:
    prompt = Addition({}, seed=0, eval_fraction=0.1).train[0]
    right = prompt.answer_ids
    assert right is not None
    wrong = (right[:-1], (*right, EOS_ID), (), right[::-1], (right[0] ^ 1, *right[1:]))
    split = Sample((Segment(right[:2], version=3), Segment(right[2:], version=4)))
    reward = make_reward("exact_match", {})
    rewards = asyncio.run(reward(prompt, [_answer(*right), split, *(_answer(*w) for w in wrong)]))
    assert [r.value for r in rewards] == [1.0, 1.0, *[0.0] * len(wrong)]


def test_group_of_equal_rewards_is_dropped_by_its_filter() -> None:
    def group(*rewards: float) -> Group:
        return Group(0, Prompt((1,)), tuple(_answer(2).rewarded(r, {}) for r in rewards))

    assert uniform_reward(group(0.5, 0.5)) and not uniform_reward(group(0.5, 0.6))


def _group(prompt_tokens: int, *answers: tuple[int, float]) -> Group:
    """``answers``: tokens and reward of each."""
    return Group(0, Prompt((1,) * prompt_tokens), tuple(_answer(*[2] * n).rewarded(r, {}) for n, r in answers))


@thorough
@given(st.floats(0, 1), st.floats(0, 1), st.lists(st.floats(0, 1), min_size=1, max_size=5))
def test_difficulty_keeps_groups_whose_mean_reward_is_in_its_range(one: float, other: float, rewards: list[float]
                                                                   ) -> None:
    low, high = sorted((one, other))
    name, drop = make_filter({"name": "difficulty", "low": low, "high": high})
    mean = sum(rewards) / len(rewards)
    assert name == "difficulty"
    assert drop(_group(1, *((1, r) for r in rewards))) == ("too hard" if mean < low else "too easy" if mean > high
                                                           else "")


def test_length_drops_long_prompts_and_responses_of_the_wrong_mean_length() -> None:
    _, drop = make_filter({"name": "length", "max_prompt_tokens": 3, "min_response_tokens": 2,
                           "max_response_tokens": 4})
    assert [drop(_group(p, (n, 0.0), (m, 1.0))) for p, n, m in ((3, 2, 6), (4, 2, 2), (1, 1, 2), (1, 1, 8))] == [
        "", "long prompt", "short responses", "long responses"]
    assert not make_filter("length")[1](_group(10**4, (10**4, 0.0)))


@pytest.mark.parametrize(("setting", "named"), [
    ("uniform", "did you mean 'uniform_reward'"), ({"name": "difficult"}, "did you mean 'difficulty'"),
    ({"name": "difficulty", "lowest": 1}, "cannot be made: TypeError.*lowest"),
    ({"name": "difficulty", "low": 2}, "low=2 and high=1.0"), ({"name": "length", "max_response_tokens": "x"}, "'x'"),
    ({"name": "length", "max_prompt_tokens": "500 tokens"}, "max_prompt_tokens='500 tokens' must be a number"),
    ({"name": "uniform_reward", "low": 1}, "has no options"), ({"name": "no.such:make", "a": 1}, "no.such")])
def test_wrong_filter_is_a_wrong_setting(setting: str | dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_filter(setting)


def test_filter_with_options_is_set_by_its_name() -> None:
    cfg = config.load(overrides=["--rollout.filters=[uniform_reward, {name: difficulty, low: 0.2}]"])
    assert [make_filter(entry)[0] for entry in cfg.rollout.filters] == ["uniform_reward", "difficulty"]
    with pytest.raises(ConfigError, match="a filter with options needs a name"):
        config.load(overrides=["--rollout.filters=[{low: 0.2}]"])


# -- intervals --------------------------------------------------------------------------------------------------

values = st.sets(st.integers(0, 60), max_size=40)


@thorough
@given(values, values, st.integers(0, 70))
def test_interval_sets_behave_as_sets(a: set[int], b: set[int], stop: int) -> None:
    one, other = IntervalSet.from_values(a), IntervalSet.from_values(b)
    assert set(one | other) == a | b and set(one & other) == a & b and set(one - other) == a - b
    assert set(one.complement(stop)) == set(range(stop)) - a and len(one) == len(a)
    assert one.stop == max(a, default=-1) + 1
    assert [v in one for v in range(62)] == [v in a for v in range(62)]
    assert IntervalSet.from_json(one.to_json()) == one == IntervalSet.from_values(sorted(a, reverse=True))
    for result in (one | other, one & other, one - other):
        assert IntervalSet.from_json(result.to_json()) == result, "spans ascend and do not touch"


@thorough
@given(values, st.integers(0, 30))
def test_first_missing_are_the_lowest_values_outside(a: set[int], count: int) -> None:
    assert IntervalSet.from_values(a).first_missing(count) == sorted(set(range(200)) - a)[:count]


@pytest.mark.parametrize("raw", [None, 3, [[2, 1]], [[0, 2], [2, 3]], [[3, 4], [0, 1]], [[-1, 2]], ["ab", 3], [[1]]])
def test_wrong_intervals_are_refused(raw: object) -> None:
    with pytest.raises(ValueError, match=r"not a list of \[start, stop\)|must ascend and not touch"):
        IntervalSet.from_json(raw)


# -- tokenizer and model ----------------------------------------------------------------------------------------


@thorough
@given(st.text(CHARACTERS, min_size=1, max_size=12))
def test_tokenizer_has_one_token_per_character_and_round_trips(text: str) -> None:
    tokenizer = make_tokenizer()
    ids = tokenizer(text)["input_ids"]
    assert ids == encode(text) and len(ids) == len(text)
    assert tokenizer.decode(ids) == text


def test_token_ids_fit_the_models_vocabulary() -> None:
    assert max(VOCABULARY.values()) < VOCAB_SIZE
    assert sorted(VOCABULARY.values()) == list(range(len(VOCABULARY)))


def test_model_folder_is_complete_and_seeded_and_keeps_the_random_state(tmp_path: Path) -> None:
    from safetensors.torch import load_file
    from transformers import AutoTokenizer, GenerationConfig, Qwen3Config

    from elastic_rl.data.tiny_model import make_model_dir

    state = torch.get_rng_state()
    folders = [make_model_dir(tmp_path / name, Config(seed=s)) for name, s in (("a", 1), ("b", 1), ("c", 2))]
    assert torch.equal(state, torch.get_rng_state())
    a, b, c = (load_file(f / "model.safetensors") for f in folders)
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)
    assert all(t.dtype == torch.float32 for t in a.values())
    assert "lm_head.weight" in a and "model.layers.0.self_attn.q_norm.weight" in a
    config = Qwen3Config.from_pretrained(folders[0])
    assert not config.attention_bias and not config.tie_word_embeddings
    assert GenerationConfig.from_pretrained(folders[0]).eos_token_id == EOS_ID
    assert AutoTokenizer.from_pretrained(folders[0]).eos_token_id == EOS_ID
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.parametrize("settings", [{"family": "llama"}, {"family": "qwen2", "tied_embeddings": True},
                                      {"family": "qwen3_moe", "num_experts": 3}])
def test_model_of_another_family_is_seeded_with_the_set_shape(tmp_path: Path, settings: dict[str, Any]) -> None:
    from safetensors.torch import load_file

    from elastic_rl.data.tiny_model import make_model_dir

    a, b, c = (load_file(make_model_dir(tmp_path / name, config.parse({"seed": s, "model": settings}))
                         / "model.safetensors") for name, s in (("a", 1), ("b", 1), ("c", 2)))
    assert all(torch.equal(a[k], b[k]) for k in a) and any(not torch.equal(a[k], c[k]) for k in a)
    arch = ModelArch.read(tmp_path / "a")
    assert set(a) == set(arch.hf_names()) and arch.family.model_type == settings["family"]
    assert arch.tied == settings.get("tied_embeddings", False) and (arch.moe.experts if arch.moe else 0) == (
        settings.get("num_experts", 0))


def test_model_is_made_to_the_vocabulary_of_a_given_tokenizer(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

    from elastic_rl.data.tiny_model import make_model_dir

    def save(name: str, **special: str) -> Path:
        core = Tokenizer(models.WordLevel({f"w{i}": i for i in range(37)}, unk_token="w0"))
        PreTrainedTokenizerFast(tokenizer_object=core, **special).save_pretrained(tmp_path / name)
        return tmp_path / name

    made = make_model_dir(tmp_path / "m", Config(), save("tokenizer", eos_token="w9", pad_token="w3"))
    assert ModelArch.read(made).vocab == 48, "37 tokens, in rows that split over 16 ranks"
    assert GenerationConfig.from_pretrained(made).eos_token_id == AutoTokenizer.from_pretrained(made).eos_token_id == 9
    assert model_folder.faults(config.parse({"model": {"path": str(made)}})) == []
    with pytest.raises(ConfigError, match="no eos_token"):
        make_model_dir(tmp_path / "n", Config(), save("without"))
    with pytest.raises(ConfigError, match="no tokenizer that can be read"):
        make_model_dir(tmp_path / "n", Config(), tmp_path / "nowhere")


@pytest.mark.parametrize(("settings", "named"), [
    ("--trainer.expert_parallel=2", "has no experts"), ("--model.family=qwen3_moe --model.num_experts=3 "
                                                        "--trainer.expert_parallel=2", "model.num_experts=3"),
    ("--model.family=qwen3_moe --model.num_experts=2 --model.experts_per_token=3", "more than model.num_experts=2"),
    ("--model.family=qwen3_moe --trainer.data_parallel=1 --trainer.expert_parallel=2", "data_parallel=1"),
    ("--model.family=qwen3_moe --model.expert_intermediate_size=5 --trainer.tensor_parallel=2", "=5 is not a multiple"),
    ("--model.family=qwen2 --model.hidden_size=36", "twice model.num_heads=4"), ("--model.family=gpt2", "qwen3_moe")])
def test_settings_of_a_model_that_do_not_fit_are_named(settings: str, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        config.load(overrides=settings.split())


def test_existing_model_folder_is_kept(tmp_path: Path) -> None:
    from elastic_rl.data.tiny_model import make_model_dir

    first = (make_model_dir(tmp_path / "m", Config(seed=1)) / "model.safetensors").read_bytes()
    assert (make_model_dir(tmp_path / "m", Config(seed=2)) / "model.safetensors").read_bytes() == first


# -- order ------------------------------------------------------------------------------------------------------


@thorough
@given(st.integers(1, 50), st.integers(0, 5), st.integers(0, 4))
def test_epoch_covers_every_problem_exactly_once(n: int, seed: int, epoch: int) -> None:
    assert sorted(PromptOrder(n, seed).groups(epoch * n, n)) == list(range(n))


@thorough
@given(st.integers(1, 30), st.integers(0, 5), st.integers(0, 100), st.integers(0, 80))
def test_any_range_of_ordinals_equals_the_slice_of_the_whole(n: int, seed: int, first: int, count: int) -> None:
    order = PromptOrder(n, seed)
    whole = PromptOrder(n, seed).groups(0, first + count)
    assert order.groups(first, count) == whole[first:]
    assert order.groups(0, min(5, count)) == whole[:min(5, count)]  # going back


def test_epochs_and_seeds_have_different_shuffles() -> None:
    order = PromptOrder(200, 0)
    assert order.groups(0, 200) != order.groups(200, 200) != PromptOrder(200, 1).groups(200, 200)


@thorough
@given(st.integers(1, 40), st.integers(1, 9), st.integers(0, 5))
def test_supervised_steps_take_every_prompt_once_in_each_pass(n: int, batch_size: int, seed: int) -> None:
    source = type("Source", (), {"train": range(n)})
    order = sft_order(source, seed)
    taken = [order.problem(ordinal)[0] for step in range(1, 2 * n + 1) for ordinal in sft_ordinals(batch_size, step)]
    for data_pass in range(2 * batch_size):
        assert sorted(taken[data_pass * n:(data_pass + 1) * n]) == list(range(n))


def test_supervised_steps_take_prompts_in_another_order_than_rl() -> None:
    source = type("Source", (), {"train": range(200)})
    assert groups(sft_order(source, 3), 0, 200) != groups(order_of(source, 3), 0, 200)
    assert groups(sft_order(source, 3), 0, 200) != groups(sft_order(source, 4), 0, 200)


def test_order_rejects_negative_ordinals_and_an_empty_problem_list() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, 0)
    with pytest.raises(ValueError, match="count from 0"):
        PromptOrder(3, 0).groups(-1, 2)


# -- run context ------------------------------------------------------------------------------------------------


def _context() -> RunContext:
    return RunContext(config=Config(job="ctx", seed=7), etcd_endpoints=["127.0.0.1:1"], job="ctx", epoch=3,
                      model_dir="/m", host=LOOPBACK)


def test_run_context_round_trips_through_a_private_file(tmp_path: Path) -> None:
    path = _context().save(tmp_path / "deep" / "context.json")
    assert RunContext.load(path) == _context()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [p.name for p in path.parent.iterdir()] == ["context.json"]
    assert RunContext.load(path).keys.epoch() == "/elastic_rl/ctx/epoch"


@pytest.mark.parametrize("content", [None, "{", "{}", '{"nope": 1}'])
def test_missing_or_invalid_run_context_raises_config_error_with_its_name(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "context.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match="context.json"):
        RunContext.load(path)


def test_fingerprint_tells_other_data_and_another_order() -> None:
    prompts = [Prompt((n, n + 1)) for n in range(90)]
    assert fingerprint(prompts) == fingerprint(list(prompts)) != fingerprint(prompts[::-1])
    assert len({fingerprint(prompts), fingerprint(prompts[:-1]), fingerprint([*prompts, Prompt((1,))]),
                fingerprint([Prompt((5,)), *prompts[1:]]), fingerprint([])}) == 5
