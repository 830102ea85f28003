"""The modes in which nothing is trained: what is kept, what an evaluation comes to, which sets are generated."""

from __future__ import annotations

import itertools
import json
import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl import config
from elastic_rl.config.rejection import RejectionConfig
from elastic_rl.data.generated_tasks import ENDLESS
from elastic_rl.data.ledger import ConsumedGroups
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.data.sources import CheckedSource, make_source
from elastic_rl.errors import ConfigError, OutputFailed
from elastic_rl.pipeline.sampling import evaluation
from elastic_rl.pipeline.sampling.evaluation import evaluate_sets, further_sets, generated_sets
from elastic_rl.pipeline.schedule import RunPlan
from elastic_rl.pipeline.untrained import eval_summary, keeping
from elastic_rl.pipeline.untrained.sampled_modes import EvaluationMode, rejection_groups

TWO_PARTS = {"data": {"source": "mix", "options": {"parts": [
    {"source": "addition", "name": "small", "options": {"operand_below": 6}},
    {"source": "addition", "name": "large", "options": {"operand_below": 8}}]}}}


def sample(reward: float, token: int = 2, *, finish: str = "stop", version: int = 3) -> Sample:
    return Sample((Segment((token,), (-0.1,), version=version),), finish_reason=finish, reward=reward, text=str(token))


# -- pass@k -----------------------------------------------------------------------------------------------------------
@given(st.integers(1, 9), st.data())
def test_pass_at_k_is_the_share_of_choices_with_a_right_one(samples: int, data: st.DataObject) -> None:
    right, k = data.draw(st.integers(0, samples)), data.draw(st.integers(1, samples))
    chosen = list(itertools.combinations(range(samples), k))
    expected = sum(any(i < right for i in choice) for choice in chosen) / len(chosen)
    assert eval_summary.pass_at_k(samples, right, k) == pytest.approx(expected)


@pytest.mark.parametrize(("samples", "right", "k"), [(4, 1, 5), (4, 5, 1), (4, 1, 0), (4, -1, 2)])
def test_pass_at_k_of_what_cannot_be_is_refused(samples: int, right: int, k: int) -> None:
    with pytest.raises(ValueError, match="pass@"):
        eval_summary.pass_at_k(samples, right, k)


@pytest.mark.parametrize(("samples", "expected"), [(1, []), (2, [1, 2]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
def test_pass_at_k_is_given_for_powers_of_two_and_all_samples(samples: int, expected: list[int]) -> None:
    assert eval_summary.ks(samples) == expected


# -- the summary of an evaluation -------------------------------------------------------------------------------------
def rows(name: str, rewards: list[list[float]], **more: Any) -> list[dict[str, Any]]:
    return [{"set": name, "index": i, "sample": n, "reward": r, "reward_parts": {"format": r / 2},
             "finish_reason": "stop", "response_tokens": 1 + n, **more}
            for i, own in enumerate(rewards) for n, r in enumerate(own)]


@given(st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=3, max_size=3), min_size=1, max_size=30))
def test_summary_is_that_of_the_prompts_means(rewards: list[list[float]]) -> None:
    [(name, found)] = eval_summary.summarise_rows(rows("math", rewards), samples=3, pass_reward=1.0, main="math",
                                                  parts=()).items()
    means = [sum(own) / 3 for own in rewards]
    assert (name, found["prompts"], found["samples"]) == ("math", len(rewards), 3 * len(rewards))
    assert found["reward_mean"] == pytest.approx(statistics.fmean(means))
    if len(means) > 1:
        assert found["standard_error"] == pytest.approx(statistics.stdev(means) / math.sqrt(len(means)), abs=1e-9)
    else:
        assert found["standard_error"] is None
    assert found["pass_at"]["3"] == pytest.approx(statistics.fmean(1.0 in own for own in rewards))
    assert found["pass_at"]["1"] == pytest.approx(statistics.fmean(own.count(1.0) / 3 for own in rewards))
    assert found["response_tokens"] == {"mean": 2.0, "max": 3}
    assert found["reward_parts"]["format"] == pytest.approx(found["reward_mean"] / 2)


def test_prompt_of_a_part_counts_for_the_main_set_too() -> None:
    found = eval_summary.summarise_rows(
        [*rows("a", [[1.0]]), *rows("b", [[0.0], [0.0]]), *rows("other", [[0.5]], finish_reason="length", failed="x")],
        samples=1, pass_reward=1.0, main="eval", parts=("a", "b"))
    assert {name: (s["prompts"], s["reward_mean"]) for name, s in found.items()} == {
        "eval": (3, pytest.approx(1 / 3)), "a": (1, 1.0), "b": (2, 0.0), "other": (1, 0.5)}
    assert list(found)[0] == "eval"
    assert (found["other"]["truncated"], found["other"]["failed_rewards"]) == (1.0, 1)


def test_failed_reward_is_never_right() -> None:
    given = [*rows("a", [[-1.0, 0.5]]), *(row | {"index": 1} for row in rows("a", [[0.0, 0.0]], failed="no answer"))]
    found = eval_summary.summarise_rows(given, samples=2, pass_reward=-0.5, main="a", parts=())
    assert found["a"]["pass_at"] == {"1": 0.25, "2": 0.5} and found["a"]["failed_rewards"] == 1


def test_file_of_samples_that_is_cut_off_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").write_text('{"set": "eval"}\n{"set"')
    with pytest.raises(OutputFailed, match="cannot be read"):
        list(eval_summary.read_rows(tmp_path / "eval.jsonl"))


# -- evaluation sets --------------------------------------------------------------------------------------------------
def answers(source: CheckedSource, seen: list[tuple[str, range]]) -> evaluation.EvaluatePiece:
    """Every second prompt of a set is answered right."""
    def evaluate(name: str, indices: range) -> list[Group]:
        seen.append((name, indices))
        return [Group(i, source.evals[name][i], (sample(float(i % 2 == 0)),)) for i in indices]

    return evaluate


def test_each_set_is_evaluated_in_pieces_and_each_part_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(evaluation, "PIECE", 3)
    source = make_source(config.parse(TWO_PARTS))
    assert generated_sets(source) == ["small", "large"] == list(source.eval_parts)
    seen: list[tuple[str, range]] = []
    scores = evaluate_sets(source, answers(source, seen))
    small, large = len(source.evals["small"]), len(source.evals["large"])
    assert all(len(indices) <= 3 for _, indices in seen)
    for name, count in (("small", small), ("large", large)):
        assert [i for of, indices in seen if of == name for i in indices] == list(range(count)), "each once, in order"
    right = [(n + 1) // 2 for n in (small, large)]
    assert scores["eval"].prompts == len(source.eval) == small + large
    assert scores["eval"].accuracy == sum(right) / (small + large)
    assert further_sets(scores, "eval") == {"small": right[0] / small, "large": right[1] / large}
    assert scores["eval"].newest_version == 3


def test_score_has_the_mean_of_each_part_of_the_reward() -> None:
    score = evaluation.SetScore()
    for right, extra in ((1.0, {}), (0.0, {f"p{n}": 1.0 for n in range(100)}), (1.0, {"late": 1.0})):
        of = replace(sample(0.5), reward_parts={"right": right, **extra})
        score.add([Group(0, Prompt((1,)), (of,))])
    score.add([Group(1, Prompt((1,)), (), "it could not be generated")])
    assert score.reward_parts["right"] == 0.5 and score.reward_parts["p0"] == 0.25
    assert len(score.reward_parts) == 64 and "late" not in score.reward_parts


def test_score_of_a_prompt_is_the_mean_of_its_samples() -> None:
    score = evaluation.SetScore()
    score.add([Group(0, Prompt((1,)), tuple(replace(sample(reward), reward_parts={"right": reward})
                                            for reward in (1.0, 0.0, 0.0, 0.0))),
               Group(1, Prompt((1,)), (sample(1.0),)), Group(2, Prompt((1,)), (), "it could not be generated")])
    assert score.accuracy == 1.25 / 3 and score.reward_parts == {"right": 0.25 / 3} and score.prompts == 3
    assert score.error == pytest.approx(statistics.stdev([0.25, 1.0, 0.0]) / 3 ** 0.5)
    assert evaluation.SetScore(prompts=1, rewards=0.5, squares=0.25).error == 0.0


class _Source:
    """A user's, whose main set is not among its named ones, and one of those is empty."""

    stop_token_ids, max_prompt_tokens, max_response_tokens = (1,), 4, 4
    train = [Prompt((1,), answer_ids=(2, 1))]

    def __init__(self, options: object) -> None: ...

    @property
    def eval(self) -> list[Prompt]:
        return [Prompt((2,)), Prompt((3,))]

    @property
    def evals(self) -> dict[str, list[Prompt]]:
        return {"hard": [Prompt((4,))], "none": []}


def test_main_set_that_the_source_does_not_name_is_eval() -> None:
    source = make_source(config.parse({"data": {"source": f"{__name__}:_Source"}, "sft": {"max_steps": 0}}))
    assert source.eval_name == "eval" and source.eval_parts == ()
    assert generated_sets(source) == ["eval", "hard"]
    scores = evaluate_sets(source, answers(source, []))
    assert {name: score.prompts for name, score in scores.items()} == {"eval": 2, "hard": 1}


def test_prompts_to_train_on_are_not_looked_at_where_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"data": {"source": f"{__name__}:_Source"}, "sft": {"max_steps": 0}}
    monkeypatch.setattr(_Source, "train", property(lambda self: 1 / 0))
    source = make_source(config.parse({**settings, "mode": "eval"}))
    assert len(source.train) == 0 and len(source.eval) == 2
    for mode in ("rl", "rejection_sampling"):
        with pytest.raises(ConfigError, match="ZeroDivisionError"):
            make_source(config.parse({**settings, "mode": mode}))


# -- what is kept -----------------------------------------------------------------------------------------------------
@given(st.lists(st.builds(sample, st.sampled_from([0.0, 0.5, 1.0]), st.integers(0, 3),
                          finish=st.sampled_from(["stop", "length", "abort"])), max_size=8),
       st.integers(1, 4), st.sampled_from([None, 0.5, 1.0]))
def test_best_whole_and_different_samples_are_kept(samples: list[Sample], keep: int, least: float | None) -> None:
    chosen = [samples[i] for i in keeping.best(samples, RejectionConfig(keep=keep, min_reward=least))]
    able = [s for s in samples if s.finish_reason == "stop" and (least is None or s.reward >= least)]
    assert len(chosen) == min(keep, len({s.response_ids for s in able}))
    assert len({s.response_ids for s in chosen}) == len(chosen) and all(s in able for s in chosen)
    assert [s.reward for s in chosen] == sorted((s.reward for s in chosen), reverse=True)
    left = [s.reward for s in able if s.response_ids not in {c.response_ids for c in chosen}]
    assert not chosen or max(left, default=0.0) <= min(c.reward for c in chosen)


def test_best_of_equal_responses_and_earliest_of_equal_rewards_are_kept() -> None:
    rule = RejectionConfig(keep=4)
    assert keeping.best([sample(0.5, 1), sample(1.0, 1), sample(1.0, 2), sample(1.0, 2)], rule) == [1, 2]
    assert keeping.best([sample(0.5, 1), sample(0.5, 2), sample(1.0, 3)], rule) == [2, 0, 1]


def test_summary_of_what_was_kept_has_no_mean_of_nothing() -> None:
    empty = keeping.kept_summary({}, ConsumedGroups())
    assert (empty["samples"], empty["reward_mean"], empty["kept_reward_mean"]) == (0, None, None)
    groups = [Group(0, Prompt((1,)), (sample(1.0), sample(0.0, finish="length")))]
    totals = keeping.add_totals(keeping.add_totals({}, groups, [groups[0].samples[0]]), groups, [])
    found = keeping.kept_summary(totals, ConsumedGroups(), job="j")
    assert (found["samples"], found["kept"], found["reward_mean"], found["kept_reward_mean"]) == (4, 1, 0.5, 1.0)
    assert found["truncated"] == 0.5 and found["job"] == "j"


def test_line_holds_any_text_and_any_metadata() -> None:
    line = keeping.kept_line(7, 1, "half of a pair: \ud800\n", replace(sample(1.0), text="é\n"), {"of": Path("a")})
    assert line.count(b"\n") == 1
    row = json.loads(line)
    assert (row["prompt"], row["response"], row["ordinal"]) == ("half of a pair: \ud800\n", "é\n", 7)


@pytest.mark.parametrize("answer", [{(1, 2): "a tuple as a key"}, float("nan"), {1, 2}])
def test_answer_that_json_does_not_have_is_written_as_text(answer: Any) -> None:
    row = json.loads(keeping.kept_line(7, 1, "p", sample(1.0), answer), parse_constant=pytest.fail)
    assert row["answer"] == str(answer)


def test_response_that_cannot_be_decoded_is_written_without_text() -> None:
    class Tokenizer:
        def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
            if 9 in ids:
                raise ValueError("no token 9")
            return " ".join(map(str, ids))

    cfg = config.parse({"mode": "eval"})
    source = replace(make_source(cfg), tokenizer=Tokenizer())  # type: ignore[arg-type]
    mode = EvaluationMode(cfg, source, None, None, "")  # type: ignore[arg-type]
    groups = [Group(i, Prompt((1,), text), (replace(sample(0.0, token), text=""),), failed)
              for i, (text, token, failed) in enumerate([("1+1=", 2, ""), ("1+2=", 9, "reward failed"), ("", 3, "")])]
    lines, _ = mode.output(groups, {})
    assert [(row["prompt"], row["response"], row.get("failed")) for row in map(json.loads, lines)] == [
        ("1+1=", "2", None), ("1+2=", "", "reward failed"), ("1", "3", None)]


# -- settings ---------------------------------------------------------------------------------------------------------
def test_source_without_end_needs_a_number_of_prompts() -> None:
    class Endless(Sequence[Prompt]):
        def __len__(self) -> int:
            return ENDLESS

        def __getitem__(self, index: Any) -> Any:
            return Prompt((1,))

    source = replace(make_source(config.parse(TWO_PARTS)), train=Endless())
    with pytest.raises(ConfigError, match="without end"):
        rejection_groups(config.parse({"mode": "rejection_sampling"}), source)
    assert rejection_groups(config.parse({"rejection": {"prompts": 5}}), source) == 5


def test_steps_of_a_job_that_trains_nothing_follow_from_its_prompts() -> None:
    plan = RunPlan.of(config.parse({"mode": "eval", "eval": {"prompts_per_step": 4}}), groups=9)
    assert (plan.steps, plan.groups_per_step, plan.groups) == (3, 4, 9)
    assert config.parse({"mode": "eval"}).total_steps == 0


@pytest.mark.parametrize(("values", "said"), [
    ({"mode": "eval", "eval": {"samples": 2}}, "eval.temperature=0"),
    ({"mode": "rejection_sampling", "rejection": {"keep": 9}}, "rejection.keep=9 is more than train.group_size=8"),
    ({"mode": "rejection"}, "rejection_sampling")])
def test_settings_that_contradict_each_other_are_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config.parse(values)
