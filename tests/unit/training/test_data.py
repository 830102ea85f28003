"""Tasks, tokenizer, prompt order, rewards, the ledger's audit, the run context, the tiny model."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.budget import seeds

from elastic_rl.config import Config, DataConfig
from elastic_rl.data.order import PromptOrder
from elastic_rl.data.tasks import Addition
from elastic_rl.data.tokenizer import CHARACTERS, EOS_ID, VOCAB_SIZE, VOCABULARY, encode, make_tokenizer
from elastic_rl.errors import ConfigError
from elastic_rl.etcd.records import LedgerEntry
from elastic_rl.etcd.run_context import RunContext
from elastic_rl.rewards.registry import REWARDS

thorough = settings(deadline=None, max_examples=seeds(60))

# -- tasks ------------------------------------------------------------------------------------------------------


@thorough
@given(st.integers(5, 120), st.floats(0.05, 0.8), st.integers(0, 9))
def test_eval_and_train_problems_are_disjoint_and_complete(below: int, fraction: float, seed: int) -> None:
    task = Addition(DataConfig(operand_below=below, eval_fraction=fraction), seed)
    train, evaluated = {p.text for p in task.train}, {p.text for p in task.eval}
    assert not train & evaluated
    assert len(train) + len(evaluated) == len(task.train) + len(task.eval) == below**2


@thorough
@given(st.one_of(st.integers(5, 40), st.sampled_from([100, 101, 500])), st.sampled_from(["normal", "reversed"]))
def test_prompts_and_answers_have_one_length_and_are_right(below: int, order: str) -> None:
    task = Addition(DataConfig(operand_below=below, answer_order=order), 3)
    for p in task.train[:200] + task.eval[:50]:
        left, right = p.text.split("=")
        assert sum(map(int, left.split("+"))) == int(right[::-1] if order == "reversed" else right)
        assert p.prompt_ids == encode(left + "=") and len(p.prompt_ids) == task.prompt_len
        assert p.answer_ids == [*encode(right), EOS_ID] and len(p.answer_ids) == task.response_len


def test_split_depends_on_the_seed_only() -> None:
    one, again, other = (Addition(DataConfig(), s) for s in (4, 4, 5))
    assert one.train == again.train and one.eval == again.eval
    assert {p.text for p in one.eval} != {p.text for p in other.eval}


def test_exact_match_rewards_only_the_complete_right_answer() -> None:
    problem = Addition(DataConfig(), 0).train[0]
    reward, right = REWARDS["exact_match"], problem.answer_ids
    assert reward(problem, right) == 1.0 == reward(problem, tuple(right))
    for wrong in (right[:-1], [*right, EOS_ID], [], right[::-1], [right[0] ^ 1, *right[1:]]):
        assert reward(problem, wrong) == 0.0


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


def test_order_rejects_negative_ordinals_and_an_empty_problem_list() -> None:
    with pytest.raises(ValueError, match="at least one"):
        PromptOrder(0, 0)
    with pytest.raises(ValueError, match="count from 0"):
        PromptOrder(3, 0).groups(-1, 2)


# -- run context ------------------------------------------------------------------------------------------------


def _context() -> RunContext:
    return RunContext(config=Config(job="ctx", seed=7), etcd_endpoints=["127.0.0.1:1"], job="ctx", epoch=3,
                      model_dir="/m")


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


# -- ledger -----------------------------------------------------------------------------------------------------


def _clean(steps: int, per_step: int) -> list[LedgerEntry]:
    return [LedgerEntry(step=s, epoch=1, groups=list(range((s - 1) * per_step, s * per_step)), samples=8 * per_step)
            for s in range(1, steps + 1)]


@thorough
@given(st.integers(1, 12), st.integers(1, 6), st.data())
def test_audit_finds_every_lost_and_duplicated_group(steps: int, per_step: int, data: st.DataObject) -> None:
    from elastic_rl.data.ledger import audit_entries

    entries = _clean(steps, per_step)
    assert audit_entries(entries, up_to_step=steps, per_step=per_step).lost == []
    every = list(range(steps * per_step))
    lost = data.draw(st.sets(st.sampled_from(every)))
    twice = data.draw(st.sets(st.sampled_from(every))) - lost
    at = data.draw(st.integers(0, steps - 1))
    planted = [e.replace(groups=[g for g in e.groups if g not in lost]) for e in entries]
    planted[at] = planted[at].replace(groups=planted[at].groups + sorted(twice))
    found = audit_entries(planted, up_to_step=steps, per_step=per_step)
    assert found.lost == sorted(lost) and found.duplicated == sorted(twice)


def test_audit_ignores_entries_after_its_last_step() -> None:
    from elastic_rl.data.ledger import audit_entries

    late = _clean(1, 4)[0].replace(step=5)
    assert audit_entries([*_clean(4, 4), late], up_to_step=4, per_step=4).duplicated == []
