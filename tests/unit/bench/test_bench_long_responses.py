"""The job with responses of widely different lengths, and the rows that are measured with it. Nothing here is timed."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from benchmarks import LOOP
from benchmarks.loop import sft_program, sft_vs_transformers, trl_program, vs_trl, vs_trl_long
from benchmarks.loop.vs_trl_long import Bare, Trl
from elastic_rl.bench.loop import long_responses, trainer_vs_megatron
from elastic_rl.bench.loop.bare_engines import EngineRounds, requests_of_step
from elastic_rl.bench.loop.overhead import tokens_row
from elastic_rl.bench.loop.testbed import Testbed
from elastic_rl.bench.options import Options, Unmeasurable
from elastic_rl.config import Config
from elastic_rl.data.batch import collate
from elastic_rl.data.order import sft_order
from elastic_rl.data.samples import Prompt, Sample, Segment, demonstration
from elastic_rl.data.sources import make_source
from elastic_rl.errors import ConfigError
from elastic_rl.host.paths import JobPaths


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return long_responses.configure_rl(tmp_path_factory.mktemp("bench") / "long", Options(), 4)


# -- the job ----------------------------------------------------------------------------------------------------------
def test_model_has_at_least_twenty_million_parameters(job: Config) -> None:
    from safetensors import safe_open
    with safe_open(Path(job.model.path) / "model.safetensors", "pt") as file:
        sizes = [torch.Size(file.get_slice(name).get_shape()).numel() for name in file.keys()]  # noqa: SIM118
    assert sum(sizes) >= 20_000_000


def test_prompts_are_text_of_the_model_and_fit_into_it(job: Config) -> None:
    source = make_source(job)
    assert source.tokenizer is not None and source.max_prompt_tokens + source.max_response_tokens <= 320
    for prompt in source.train[:20]:
        text = source.tokenizer.decode(prompt.token_ids)
        assert source.tokenizer.encode_batch([text], special_tokens=False) == [list(prompt.token_ids)]
        assert prompt.answer_ids and prompt.answer_ids[-1] in source.stop_token_ids
        assert set(source.stop_token_ids).isdisjoint(prompt.answer_ids[:-1])


def test_probability_of_the_end_is_that_of_the_answers(job: Config) -> None:
    """What makes responses equally long, whoever samples them."""
    from transformers import AutoModelForCausalLM
    source = make_source(job)
    rows = torch.tensor([list(p.token_ids) + [2 + i % 100 for i in range(32)] for p in source.train[:4]])
    with torch.no_grad():
        logits = AutoModelForCausalLM.from_pretrained(job.model.path)(rows).logits
    end = float(logits.softmax(-1)[:, 31:, source.stop_token_ids[0]].mean())
    assert 1 / 160 < end < 1 / 115


def test_lengths_of_answers_are_widely_different() -> None:
    draw = random.Random(0)
    lengths = sorted(long_responses.answer_tokens(draw) for _ in range(2000))
    assert lengths[0] <= 3 and lengths[-1] == long_responses.MAX_RESPONSE
    assert 100 < mean(lengths) < 120 and lengths[200] < 25 and lengths[-200] == long_responses.MAX_RESPONSE


def test_reward_does_not_depend_on_the_length() -> None:
    samples = [Sample((Segment(ids),)) for ids in ((2, 4), (2,) * 50, (2, 3) * 7, (3,), ())]
    rewards = asyncio.run(long_responses.even_tokens(Prompt((1,)), samples))
    assert [r.value for r in rewards] == [1.0, 1.0, 0.5, 0.0, 0.0]


def test_bare_engines_get_the_requests_of_the_product(job: Config) -> None:
    assert [len(request) * 4 for request in requests_of_step(job, make_source(job), 0)] == [16, 16]


def test_settings_of_the_options_hold_for_the_job(tmp_path: Path) -> None:
    cfg = long_responses.configure_rl(tmp_path / "long", Options(settings=(
        "--train.prompts_per_step=2", f"--model.path={tmp_path}")), 5)
    assert (cfg.train.prompts_per_step, cfg.train.steps, cfg.train.lr) == (2, 5, 1e-6)
    assert not (tmp_path / "long" / "model").exists(), "another model was named"
    with pytest.raises(ConfigError, match="--job"):
        long_responses.configure_sft(tmp_path / "sft", Options(settings=("--job=mine",)), 4, 2)


def test_source_refuses_options() -> None:
    with pytest.raises(ConfigError, match=r"data\.options"):
        long_responses.make_source({"x": 1}, seed=0, tokenizer=None)  # type: ignore[arg-type]


# -- vs-trl-long ------------------------------------------------------------------------------------------------------
def step(number: int, at: float, **fields: Any) -> dict[str, Any]:
    return {"kind": "step", "step": number, "at": at, "samples": 32, "response_tokens": {"mean": 100.0},
            "seconds": {"total": 9.0, "generate": 3.0, "train": 5.0, "sync": 1.0}, "train_s": 4.0,
            "throughput": {"train_tokens_per_s": 250.0}, **fields}


RECORDS = [step(n, 10.0 * n) for n in range(1, 7)]


def test_ratio_to_trl_is_of_whole_steps_and_says_what_bounds_it() -> None:
    bare = Bare([2.0], [3.0], 100.0)
    ratio, seconds = vs_trl_long.rows(RECORDS, Trl([14.0, 16.0, 18.0], [6.0] * 3, [100.0] * 3), bare, "trl 1")
    assert ratio.value == pytest.approx(1.6) and ratio.met is True and ratio.limit == pytest.approx(16.0 / 5.0)
    assert vs_trl_long.rows(RECORDS, Trl([14.0], [6.0], [100.0]), bare, "trl 1")[0].met is False
    longer = vs_trl_long.rows(RECORDS, Trl([16.0], [6.0], [125.0]), Bare([2.0], [3.0], 50.0), "trl 1")[0]
    assert longer.value == pytest.approx(1.6 / 1.25) and longer.limit == pytest.approx(16.0 / 5.0 / 1.25 / 2)
    assert seconds.value == 10.0 and seconds.limit == 5.0
    assert seconds.alternatives == {
        "its sync": 1.0, "its generate": 3.0, "its train": 5.0, "its between": 1.0, "bare engines": 2.0,
        "bare trainer": 3.0, "TRL (trl 1)": 16.0, "TRL's generation": 6.0}


def test_program_of_trl_has_the_reward_of_the_job(job: Config) -> None:
    given = vs_trl.spec(job, Path(job.model.path), 2, "even_tokens")
    assert given["reward"] in Path(trl_program.__file__).read_text()
    assert given["max_new_tokens"] == long_responses.MAX_RESPONSE and len(given["prompts"]) == 2 * 8


def test_rows_are_measured_on_one_run_with_its_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the run, for its bare parts and for TRL: what is asked of them, and how often."""
    asked: list[str] = []
    options = Options(quick=True, settings=("--train.prompts_per_step=2",))

    def run(cfg: Config, **_: object) -> None:
        asked.append("run")
        assert (cfg.train.steps, cfg.train.prompts_per_step) == (5, 2)
        JobPaths.of(cfg).folder.mkdir(parents=True)
        JobPaths.of(cfg).steps.write_text("".join(json.dumps(step(n, 10.0 * n)) + "\n" for n in range(1, 6)))

    def engines(cfg: Config, model: Path, folder: Path, rounds: int) -> EngineRounds:
        asked.append("engines")
        pairs = [(p := Prompt((5, 6), "", (7,) * 500), demonstration(p)) for _ in range(2)]
        for number in range(2 + rounds):
            (folder / str(number)).write_bytes(collate(pairs).to_bytes())
        return EngineRounds([2.0] * rounds, 100.0, [[folder / str(number)] for number in range(2 + rounds)])

    def trainer(cfg: Config, model: Path, folder: Path, shares: Any) -> list[float]:
        asked.append("trainer")
        return [3.0] * (len(shares) - 2)

    def trl(python: str, what: dict[str, Any], folder: Path) -> dict[str, Any]:
        asked.append("trl")
        assert len(what["prompts"]) == 2 * what["steps"] == 10 and Path(what["model"], "config.json").exists()
        return {"seconds": [99.0, 99.0, 15.0, 15.0, 15.0], "generate_s": [6.0] * 5, "tokens": [100.0] * 5,
                "versions": "trl 1"}

    monkeypatch.setattr("elastic_rl.bench.loop.job.run", run)
    monkeypatch.setattr("elastic_rl.bench.loop.testbed.measure_engines", engines)
    monkeypatch.setattr("elastic_rl.bench.loop.testbed.measure_trainer", trainer)
    monkeypatch.setattr(vs_trl_long, "interpreter", lambda folder: sys.executable)
    monkeypatch.setattr(vs_trl_long, "run_trl", trl)
    with Testbed.start(options) as testbed:
        rows = {r.id: r for r in (*vs_trl_long.measure(testbed), *trainer_vs_megatron.measure(testbed))}
    assert rows["vs-trl-long"].value == 1.5 and rows["vs-trl-long"].limit == 3.0
    assert rows["vs-trl-long-tokens"].value == 1.0
    assert rows["trainer-vs-megatron"].value == pytest.approx(200.0 / (2 * 2 * 502 / 3.0))
    assert asked == ["run", "trl", "engines", "trainer"]


# -- trainer-vs-megatron ----------------------------------------------------------------------------------------------
def test_trainer_is_compared_by_tokens_a_second() -> None:
    ratio, rate = trainer_vs_megatron.rows(RECORDS, [900, 1100], [4.0, 4.0])
    assert rate.value == 200.0 and rate.limit == 250.0 and ratio.value == pytest.approx(0.8) and ratio.met is False
    assert rate.alternatives == {"the same ranks alone": 250.0, "the ranks' own step, in the run": 250.0}


def test_tokens_of_a_batch_are_those_of_all_its_files(tmp_path: Path) -> None:
    pairs = [(p := Prompt((5, 6), "", tuple(range(7, 7 + n))), demonstration(p)) for n in (1, 4, 9)]
    paths = [tmp_path / str(i) for i in range(2)]
    for path, share in zip(paths, collate(pairs).shares(2), strict=True):
        path.write_bytes(share.to_bytes())
    assert trainer_vs_megatron.sequence_tokens(paths) == 3 * 2 + 14


# -- sft-vs-transformers ----------------------------------------------------------------------------------------------
def test_trainer_of_transformers_gets_the_batches_of_the_run(tmp_path: Path) -> None:
    cfg = long_responses.configure_sft(tmp_path / "sft", Options(settings=("--sft.batch_size=4",)), 3, 1)
    source = make_source(cfg)
    given = sft_vs_transformers.spec(cfg, Path("model"), 1)
    second = [source.train[sft_order(source, cfg.seed).problem(ordinal)[0]] for ordinal in range(4, 8)]
    assert given["rows"][4:8] == [{"prompt": list(p.token_ids), "answer": list(p.answer_ids or ())} for p in second]
    assert len(given["rows"]) == 12 and given["batch_size"] == 4 and given["passes"] == 1
    by_length = sft_vs_transformers.spec(cfg, Path("model"), 4)["rows"]
    for batch in (slice(0, 4), slice(4, 8), slice(8, 12)):
        assert by_length[batch] == sorted(given["rows"][batch], key=lambda row: len(row["answer"]))


def test_supervised_batch_is_padded_and_only_answers_are_labels() -> None:
    found = sft_program.padded([{"prompt": [5, 6], "answer": [7]}, {"prompt": [8], "answer": [9, 1, 1]}], pad_id=0)
    assert found == {"input_ids": [[5, 6, 7, 0], [8, 9, 1, 1]], "attention_mask": [[1, 1, 1, 0], [1, 1, 1, 1]],
                     "labels": [[-100, -100, 7, -100], [-100, 9, 1, 1]]}


def test_supervised_rate_counts_the_steps_between_two_records() -> None:
    records = [{"kind": "sft", "step": n, "at": at} for n, at in ((2, 100.0), (4, 104.0), (6, 112.0))]
    whole, by_length = [50.0, 50.0, 2.0, 6.0, 8.0, 8.0], [50.0, 50.0, 1.0, 3.0, 4.0, 4.0]
    ratio, rate = sft_vs_transformers.rows(records, [9, 9, 200, 200, 400, 400], whole, by_length, "t 5")
    assert rate.value == 100.0
    assert rate.alternatives == {"Trainer (t 5)": 50.0, "Trainer, 4 passes by length (t 5)": 100.0}
    assert ratio.value == 1.0 and ratio.met is True and ratio.samples == 2, "the faster way counts"


def test_rows_of_a_run_without_records_have_a_reason() -> None:
    bare = Bare([1.0], [1.0], 1.0)
    made = [*sft_vs_transformers.rows([], [], [], [], ""), *vs_trl_long.rows([], Trl([1.0], [1.0], [1.0]), bare, ""),
            tokens_row([], 1.0, "vs-trl-long-tokens", "TRL"), *trainer_vs_megatron.rows([], [1], [1.0])]
    assert all(row.value is None and row.why for row in made)
    assert {row.id for row in made} == {
        row for module in ("vs_trl_long", "trainer_vs_megatron", "sft_vs_transformers") for row in LOOP.rows[module]}


def test_program_that_fails_is_a_reason(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("raise SystemExit('no such package')")
    with pytest.raises(Unmeasurable, match="the Trainer ended with exit code 1: no such package"):
        vs_trl.run_program(sys.executable, program, {"threads": 1}, tmp_path, who="the Trainer")
