"""Rewards that compare texts, the answer that they take out of a response, and sums of rewards."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.data.samples import EPISODE, Prompt, Sample, Segment
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.rewards.base import Reward, gold_answers
from elastic_rl.rewards.final_answer import boxed, final_answer
from elastic_rl.rewards.registry import REWARDS, make_reward
from elastic_rl.rewards.text import normalised_text, squad_tokens, token_f1


def _rewards(name: str, options: dict[str, Any], prompt: Prompt, *texts: str, **more: Any) -> list[Reward]:
    reward = make_reward(name, options, **more)
    return list(asyncio.run(reward(prompt, [Sample((), text=t) for t in texts])))  # type: ignore[arg-type]


def _answer(answer: Any) -> Prompt:
    return Prompt((1,), metadata={"answer": answer})


# -- exact match and F1 ------------------------------------------------------------------------------------------------


def test_exact_match_of_text_ignores_white_space_and_on_request_case() -> None:
    texts = (" The\n  answer", "the answer", "answer", "")
    found = _rewards("exact_match", {"compare": "text"}, _answer("The answer"), *texts)
    assert [r.value for r in found] == [1, 0, 0, 0]
    found = _rewards("exact_match", {"compare": "text", "ignore_case": True}, _answer("The answer"), *texts)
    assert [r.value for r in found] == [1, 1, 0, 0]
    assert _rewards("exact_match", {"compare": "text"}, _answer(["x", 7, None]), "7", "x", "8") == [
        Reward(1.0), Reward(1.0), Reward(0.0)]


def test_exact_match_of_tokens_takes_each_of_several_answers() -> None:
    """The first is the prompt's ``answer_ids``; the others are compared as text, with the token that ends a response.
    """
    def decode(ids: Any) -> str:
        return "".join("" if i == 0 else chr(i) for i in ids)

    def values(answer: Any, *responses: str, **more: Any) -> list[float]:
        prompt = Prompt((1,), answer_ids=(*map(ord, "1/2"), 0), metadata={"answer": answer})
        samples = [Sample((Segment(tuple(map(ord, text))),), text=decode(map(ord, text))) for text in responses]
        reward = make_reward("exact_match", {}, **more)
        return [r.value for r in asyncio.run(reward(prompt, samples))]  # type: ignore[arg-type]

    texts = ("1/2\0", "0.5\0", "5\0", "0.5", "1/2", "0.5\0\0", "\0", "")
    assert values(["1/2", "0.5", 5], *texts, decode=decode) == [1, 1, 1, 0, 0, 0, 0, 0]
    assert values(["1/2"], *texts) == values("1/2", *texts) == [1, 0, 0, 0, 0, 0, 0, 0]
    with pytest.raises(PluginFailed, match="several right answers"):
        values(["1/2", "0.5"], *texts)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_answer_that_is_a_number_is_its_decimal_digits(value: float) -> None:
    [text] = gold_answers(_answer(value), None)
    assert "e" not in text and float(text) == value


def test_answer_ids_stand_in_for_the_answer() -> None:
    prompt = Prompt((1,), answer_ids=(5, 6))
    assert _rewards("exact_match", {"compare": "text"}, prompt, "5 6", "5", decode=lambda ids: " ".join(map(str, ids))
                    ) == [Reward(1.0), Reward(0.0)]
    with pytest.raises(PluginFailed, match="answer"):
        _rewards("exact_match", {"compare": "text"}, prompt, "5 6")


@pytest.mark.parametrize("answer", [None, [], True, {"a": 1}, [None], [["x"]]])
def test_prompt_without_an_answer_is_a_failure_of_the_group(answer: Any) -> None:
    for name in ("f1", "exact_match"):
        with pytest.raises(PluginFailed, match='metadata\\["answer"\\]'):
            _rewards(name, {"compare": "text"} if name == "exact_match" else {}, _answer(answer), "x")


@given(st.text(), st.booleans())
def test_normalised_text_stays_as_it_is(text: str, ignore_case: bool) -> None:
    once = normalised_text(text, ignore_case=ignore_case)
    assert "  " not in once and once == once.strip()
    assert normalised_text(f"\n{text}\t ", ignore_case=ignore_case) == once


@pytest.mark.parametrize("marks", ["\u0316\u0301", "\u0f73\u0316"])  # the second one becomes marks, and is none
def test_text_of_marks_is_normalised_in_bounded_time(marks: str) -> None:
    text = "a" + 200_000 * marks
    began = time.monotonic()
    assert normalised_text(text, ignore_case=False) == normalised_text(text, ignore_case=False) != text
    assert time.monotonic() - began < 20.0


def test_ordinary_marks_are_composed_and_ordered() -> None:
    assert normalised_text("a\u0301\u0316", ignore_case=False) == normalised_text("\u00e1\u0316", ignore_case=False)
    assert normalised_text("\ufb01x\u00b2", ignore_case=False) == "fix2"


def test_f1_takes_the_nearest_answer() -> None:
    found = _rewards("f1", {}, _answer(["the cat sat", "a dog"]), "Dog!", "cat sat", "the cat", "fish", "")
    assert [r.value for r in found] == [1.0, 1.0, pytest.approx(2 / 3), 0.0, 0.0]


words = st.lists(st.sampled_from(["x", "y", "z", "w"]), max_size=8)


@given(words, words)
def test_f1_is_symmetric_bounded_and_1_for_the_same_bag(a: list[str], b: list[str]) -> None:
    assert 0.0 <= token_f1(a, b) == token_f1(b, a) <= 1.0
    assert (token_f1(a, b) == 1.0) == (sorted(a) == sorted(b))
    assert squad_tokens(" ".join(a)) == a


# -- the answer in a response ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "answer", "marked"), [
    ("so \\boxed{1} or \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}", True), ("\\boxed{1} then \\boxed{2", "2", False),
    ("<think>\\boxed{1}</think> it is 2", "it is 2", False), ("<think>x</think> \\boxed{3}", "3", True),
    ("<answer>1</answer> <answer> \\boxed{4} </answer>", "4", True), ("<answer>5</answer>", "5", True),
    ("6", "6", False), ("", "", False), ("<answer></answer>", "", False), ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}", True)])
def test_answer_is_found_where_it_is_marked(text: str, answer: str, marked: bool) -> None:
    assert final_answer(text, 1000) == (answer, marked)


@given(st.recursive(st.sampled_from(["", "a", "1 + 2", "\\{", "\\pi"]), lambda inner: st.builds(
    lambda a, b: f"{a}{{{b}}}", inner, inner)), st.text("ab{}", max_size=10))
def test_boxed_finds_balanced_contents(content: str, before: str) -> None:
    assert boxed(f"{before} \\boxed{{{content} }}") == f"{content} "


@given(st.text("\\boxed{} <think>/answer", max_size=60))
def test_answer_of_any_text_is_part_of_it(text: str) -> None:
    answer, marked = final_answer(text, 1000)
    assert answer in text and (answer or not marked)


def test_answer_is_looked_for_in_bounded_time() -> None:
    assert boxed("\\boxed{" * 20_000) == "" and final_answer("{" * 10**6, 1000)[0] == "{" * 1000


# -- sums --------------------------------------------------------------------------------------------------------------


def test_mix_adds_weighted_parts_and_shows_them() -> None:
    options = {"parts": [{"reward": "exact_match", "options": {"compare": "text"}, "weight": 2.0, "name": "right"},
                         {"reward": "f1", "weight": -0.5}]}
    assert _rewards("mix", options, _answer("a b c"), "b c", "b", "x") == [
        Reward(-0.5, {"right": 0.0, "f1": 1.0}),
        Reward(pytest.approx(-1 / 3), {"right": 0.0, "f1": pytest.approx(2 / 3)}),
        Reward(0.0, {"right": 0.0, "f1": 0.0})]
    nested = {"parts": [{"reward": "mix", "options": options, "name": "inner"}]}
    assert _rewards("mix", nested, _answer("x"), "x") == [
        Reward(1.5, {"inner": 1.5, "inner/right": 1.0, "inner/f1": 1.0})]


def test_mix_adds_the_weighted_rewards_of_turns() -> None:
    options = {"parts": [{"reward": "environment", "weight": 2.0}, {"reward": "exact_match", "options": {
        "compare": "text"}, "weight": 0.5}]}
    mix = make_reward("mix", options)
    sample = Sample((), text="x", metadata={EPISODE: {"reward": 1.5, "rewards": [1.0, 0.5], "parts": {}, "turns": 2}})
    [found] = asyncio.run(mix(_answer("x"), [sample]))  # type: ignore[arg-type]
    assert found.value == 3.5 and found.turns == (2.0, 1.0)


@pytest.mark.parametrize(("options", "named"), [
    ({}, "rollout.reward_options.parts"), ({"parts": []}, "at least 1"),
    ({"parts": [{"reward": "f2"}]}, "rollout.reward_options.parts.0.reward='f2' is not one of"),
    ({"parts": [{"reward": "f1"}, {"reward": "f1"}]}, "same name twice"),
    ({"parts": [{"reward": "f1", "name": "a\nb"}]}, "have the name 'a"),
    ({"parts": [{"reward": "f1", "options": {"x": 1}}]}, "rollout.reward_options.parts.0.options.x"),
    ({"parts": [{"reward": "f1", "weight": float("inf")}]}, "finite")])
def test_wrong_part_is_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_reward("mix", options)


def test_part_that_fails_fails_the_sum() -> None:
    with pytest.raises(PluginFailed, match="answer"):
        _rewards("mix", {"parts": [{"reward": "f1"}]}, Prompt((1,)), "x")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(REWARDS))
def test_unknown_option_is_named_and_no_value_is_shown(name: str) -> None:
    with pytest.raises(ConfigError) as failed:
        make_reward(name, {"tymeout": "a-secret"})
    assert "rollout.reward_options.tymeout" in str(failed.value) and "a-secret" not in str(failed.value)


def test_sample_keeps_its_segments_beside_its_text() -> None:
    assert Sample((Segment((1, 2)),), text="x").response_ids == (1, 2)
