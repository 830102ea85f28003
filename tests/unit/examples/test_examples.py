"""The examples: what they name can be made, and nothing is wrong with them; and what runs and judges them."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import save_file
from support.local_plugin import runs_locally

from elastic_rl import config
from elastic_rl.data.samples import Group, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.errors import ConfigError
from elastic_rl.host.paths import JobPaths
from elastic_rl.job import check as job_check
from elastic_rl.pipeline.untrained.sampled_modes import RejectionMode
from elastic_rl.rewards.sandbox import find_bubblewrap

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_assets, run_examples, dcs_sglang = _load("make_assets"), _load("run_examples"), _load("dcs_sglang")


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the assets of the examples were made."""
    folder = tmp_path_factory.mktemp("examples")
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        make_assets.main()
    return folder


@pytest.mark.parametrize("example", sorted(EXAMPLES.glob("*.yaml")), ids=lambda path: path.stem)
def test_example_is_sound(example: Path, assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if example.stem == "code" and not find_bubblewrap():
        pytest.skip("needs bubblewrap")
    monkeypatch.chdir(assets)
    if example.stem in run_examples.MODEL_OF:  # what another example makes
        of, _ = run_examples.MODEL_OF[example.stem]
        made = config.load(EXAMPLES / f"{of}.yaml")
        shutil.copytree(made.model.path, assets / JobPaths.of(made).policy, dirs_exist_ok=True)
    if example.stem == "tool_use":  # it needs SGLang, for which it has a process, as all examples do in a run
        monkeypatch.syspath_prepend(EXAMPLES)
        found = list(job_check.check(config.load(example)))
    else:
        with runs_locally(EXAMPLES):
            found = list(job_check.check(config.load(example)))
    assert len(found) >= 6 and not [f for f in found if f.fault or f.hint], found
    assert example.stem in ROOT.joinpath("docs", "examples.md").read_text()


def test_text_tokenizer_writes_any_text_and_words_of_the_problems_as_tokens(assets: Path) -> None:
    from transformers import AutoTokenizer
    tokenizer = AutoTokenizer.from_pretrained(assets / "runs/examples/text-tokenizer")
    for text in ("def f(x): return (x + 12) * 3", "Größe: 7€\n\tx = [1]  # 数"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("State the final answer to 12")) == 8


def test_game_tokenizer_has_what_is_said_in_the_game(assets: Path) -> None:
    pytest.importorskip("textarena")
    from transformers import AutoTokenizer

    from elastic_rl.environments.textarena_games import Game, TextArenaOptions
    tokenizer = AutoTokenizer.from_pretrained(assets / "runs/examples/game-tokenizer")
    cfg = config.load(EXAMPLES / "game.yaml")
    options = TextArenaOptions(**cfg.rollout.environment_options)
    number = next(n for n in make_assets.GAME_NUMBERS if Game(options, 3).step(f"[{n}]").reward == 1)
    said = set()
    for moves in ([number - 1, number - 1], [number + 1], [""]):
        game = Game(options, 3)
        said |= {game.step(f"[{move}]").messages[0].content for move in moves}
    assert said == {make_assets.HIGHER, make_assets.LOWER, *make_assets.REFUSED}
    tokens = [tokenizer.encode(text) for text in (*said, *(f"[{n}]" for n in make_assets.GAME_NUMBERS))]
    assert all(len(ids) == 1 and tokenizer.unk_token_id not in ids for ids in tokens)


def test_assets_are_kept(assets: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(assets)
    before = {path: path.stat().st_mtime_ns for path in assets.rglob("*") if path.is_file()}
    run_examples.make_assets()
    assert {path: path.stat().st_mtime_ns for path in assets.rglob("*") if path.is_file()} == before


def test_supervised_fine_tuning_reads_what_rejection_sampling_keeps(assets: Path,
                                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(assets)
    path = EXAMPLES / "rejection_sampling.yaml"
    cfg = config.load(path, ["train.group_size=2"])
    source = make_source(cfg)
    mode = RejectionMode(cfg, source, None, None, cfg.model.path)  # type: ignore[arg-type]
    prompts = [source.train[i] for i in range(20)]
    assert all(len(p.answer_ids) > 1 for p in prompts)
    lines, _ = mode.output([Group(n, prompt, tuple(
        Sample((Segment(ids, (-0.1,) * len(ids), version=1),), reward=reward) for ids, reward in (
            (prompt.answer_ids, 1.0), (prompt.answer_ids[:1], 0.0)))) for n, prompt in enumerate(prompts)], {})
    kept = Path("runs/rejection-sums/kept.jsonl")
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(b"".join(lines))

    said = [line.removeprefix("#   ").split(" # ")[0].split(": ") for line in path.read_text().splitlines()
            if line.startswith("#   ") and ": " in line]
    read = make_source(config.load(EXAMPLES / "sft.yaml", [
        "data.options.template=''", "data.options.overlap=unchecked",
        *(f"data.options.{key}={value.strip()}" for key, value in said)]))
    made = {p.token_ids: p.answer_ids for part in (read.train, read.eval) for p in part}
    assert made == {p.token_ids: p.answer_ids for p in prompts}


# -- running them -----------------------------------------------------------------------------------------------------
NEED_ONLY_END = {
    "game": "one seed has been run",
    "game_moves": "makes a model for game",
    "teacher": "makes a model for on_policy_distillation, which has one",
    "tool_calls": "makes a model for tool_use, which has one",
}
"""Examples that train and have no threshold, and why."""


def test_thresholds_are_those_of_examples_that_train() -> None:
    trained = {name for name in run_examples.examples([]) if config.load(EXAMPLES / f"{name}.yaml").uses_trainer}
    assert {"eval", "rejection_sampling"}.isdisjoint(trained)
    assert set(run_examples.thresholds()) == trained - set(NEED_ONLY_END) and set(NEED_ONLY_END) <= trained


def test_threshold_that_proves_nothing_is_refused(tmp_path: Path) -> None:
    table = tmp_path / "thresholds.toml"
    for before, after, gain in ((0.5, 0.5, 0.1), (0.3, 0.5, 0.0), (0.3, 0.5, 0.6)):
        table.write_text(f"[sft]\nbefore = {before}\nafter = {after}\ngain = {gain}\n")
        with pytest.raises(ConfigError, match=rf"sft has before={before:g}, after={after:g} and gain={gain:g}"):
            run_examples.thresholds(table)


def test_examples_are_named_with_or_without_their_folder() -> None:
    assert run_examples.examples(["sft", "examples/code.yaml"]) == ["sft", "code"]
    with pytest.raises(ConfigError, match="no example cod"):
        run_examples.examples(["cod"])


@pytest.mark.parametrize(("report", "found"), [
    ({"steps": 9, "eval_accuracy_first": 0.3, "eval_accuracy_last": 0.7, "sft": {"eval_accuracy_first": 0.0}},
     (0.3, 0.7)),
    ({"steps": 0, "eval_accuracy_last": 0.9, "sft": {"eval_accuracy_first": 0.1, "eval_accuracy_last": 0.9}},
     (0.1, 0.9)),
    ({"steps": 0, "sft": None}, (None, None)), ({}, (None, None))])
def test_accuracies_are_those_of_the_phase_that_the_example_shows(report: dict[str, object], found: object) -> None:
    assert run_examples.accuracies(report) == found


def test_accuracies_may_be_those_of_a_part_of_the_reward() -> None:
    report = {"steps": 60, "eval_accuracy_first": 0.6, "eval_accuracy_last": 0.9,
              "eval_reward_parts": {"math_verify": {"first": 0.3, "last": 0.7}}}
    assert run_examples.accuracies(report, "math_verify") == (0.3, 0.7)
    assert run_examples.accuracies(report, "another") == (None, None) == run_examples.accuracies({}, "another")


@pytest.mark.parametrize(("code", "before", "after", "fault"), [
    (0, 0.3, 0.6, ""), (0, 0.2, 0.5, ""), (0, 0.4, 0.52, "gained 0.12"), (3, 0.3, 0.6, "exit code 3"),
    (0, 0.45, 0.6, "began at 0.45"), (0, 0.3, 0.49, "ended at 0.49"), (0, None, None, "not evaluated")])
def test_run_is_judged_by_its_threshold(code: int, before: float | None, after: float | None, fault: str) -> None:
    judged = run_examples.fault_of(code, before, after, run_examples.Threshold(0.4, 0.5, 0.15))
    assert fault in judged and bool(judged) is bool(fault)


def test_example_without_a_threshold_must_only_end_well() -> None:
    assert run_examples.fault_of(0, None, None, None) == "" and run_examples.fault_of(1, None, None, None)


def _program(folder: Path, accuracy: float, then: str) -> list[str]:
    """Command line of a program in place of ``elastic-rl``: it leaves a report behind, as a run does."""
    path = folder / "train.py"
    path.write_text(f"""
import json, sys, time
from pathlib import Path
[job] = [a.removeprefix("--job=") for a in sys.argv if a.startswith("--job=")]
job_dir = Path("runs", job)
if "down" in sys.argv:
    sys.exit((job_dir / ("is-purged" if "--purge" in sys.argv else "is-down")).touch())
job_dir.mkdir(parents=True)
(job_dir / "report.json").write_text(json.dumps(
    {{"steps": 5, "eval_accuracy_first": 0.3, "eval_accuracy_last": {accuracy}}}))
print("trained", *sys.argv[1:])
{then}
""")
    return [sys.executable, str(path)]


@pytest.mark.parametrize(("accuracy", "then", "code", "shown"), [
    (0.9, "", 0, "ok"), (0.37, "", 1, "FAILED: ended at 0.37, less than 0.38"),
    (0.9, "sys.exit(7)", 1, "FAILED: ended with exit code 7"),
    (0.9, "time.sleep(600)", 1, "FAILED: did not end in 5 s")])
def test_each_run_is_its_own_job_shown_and_judged(
        accuracy: float, then: str, code: int, shown: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    program = _program(tmp_path, accuracy, then)
    monkeypatch.setattr(run_examples, "python", lambda module, *args: [*program, *args])
    monkeypatch.setattr(run_examples, "make_assets", lambda: None)  # which the program does not read
    monkeypatch.setattr(run_examples, "thresholds", lambda: {"jsonl_math": run_examples.Threshold(0.37, 0.38, 0.10)})
    limit = ["--limit-s", "5"] if "sleep" in then else []
    assert run_examples.main(["jsonl_math", "--seeds", "0" if limit else "0,3", *limit]) == code
    out = capsys.readouterr().out
    assert shown in out.splitlines()[-1] and out.splitlines()[-1].startswith("jsonl_math")
    if not limit:
        logs = [tmp_path / line.rpartition("see ")[2] for line in out.splitlines() if ": see " in line]
        assert ["--seed=0" in logs[0].read_text(), "--seed=3" in logs[1].read_text()] == [True, True]


def test_example_that_takes_anothers_policy_runs_after_it(
        assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(assets)
    program = _program(tmp_path, 0.9, "")
    monkeypatch.setattr(run_examples, "python", lambda module, *args: [*program, *args])
    assert set(run_examples.POLICY_OF) | set(run_examples.POLICY_OF.values()) <= set(run_examples.examples([]))
    results = run_examples.run_all([("eval", 5), ("rejection_sampling", 5), ("sft", 5)], {}, 60.0)
    assert [(r.example, r.fault) for r in results] == [("sft", ""), ("eval", ""), ("rejection_sampling", "")]
    logs = {r.example: (assets / "runs" / f"{r.job}.log").read_text() for r in results}
    sft = results[0]
    assert "--keep-up" in logs["sft"] and "--from-job" not in logs["sft"]
    assert all(f"--from-job={sft.job}" in logs[name] for name in ("eval", "rejection_sampling"))
    assert all((assets / "runs" / r.job / "is-purged").exists() for r in results)


def test_cluster_that_stays_for_another_example_ends_however_the_runs_end(
        assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(assets)
    program, jobs = _program(tmp_path, 0.9, ""), []
    monkeypatch.setattr(run_examples, "python", lambda module, *args: [*program, *args])

    def interrupted(name: str, seed: int, job: str, *_: object) -> None:
        jobs.append(job)
        JobPaths.of(config.load(EXAMPLES / "sft.yaml", [f"--job={job}"])).folder.mkdir(parents=True)
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(run_examples, "run", interrupted)
        run_examples.run_all([("eval", 6)], {}, 60.0)
    assert len(jobs) == 1 and (assets / "runs" / jobs[0] / "is-down").exists()


def test_example_without_the_policy_that_it_takes_is_a_failure(
        assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(assets)
    program = _program(tmp_path, 0.9, "sys.exit(7)")
    monkeypatch.setattr(run_examples, "python", lambda module, *args: [*program, *args])
    results = run_examples.run_all([("eval", 7)], {}, 60.0)
    assert [(r.example, r.fault) for r in results] == [
        ("sft", "ended with exit code 7"), ("eval", "needs sft, which failed")]


def test_cluster_that_cannot_be_ended_costs_no_results(
        assets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(assets)
    program = _program(tmp_path, 0.9, "")
    monkeypatch.setattr(run_examples, "python", lambda module, *args: (
        [sys.executable, "-c", "raise SystemExit(3)"] if "down" in args else [*program, *args]))
    results = run_examples.run_all([("eval", 8)], {}, 60.0)
    assert [(r.example, r.fault) for r in results] == [("sft", "its cluster cannot be ended"), ("eval", "")]


@pytest.mark.parametrize("seeds", ["0,-1", "0,1234567890"])
def test_seed_that_an_example_cannot_have_ends_before_the_first_run(seeds: str, monkeypatch: pytest.MonkeyPatch,
                                                                    capsys: pytest.CaptureFixture[str]) -> None:
    def run_all(*_: object) -> None:
        raise AssertionError("a run has begun")

    monkeypatch.setattr(run_examples, "run_all", run_all)
    monkeypatch.setattr(run_examples.subprocess, "run", lambda *_, **__: None)
    with pytest.raises(SystemExit) as e:
        run_examples.main(["rejection_sampling", f"--seeds={seeds}"])
    assert e.value.code == 2 and ("job: " if "7" in seeds else "seed: ") in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["nonsense"], ["sft", "--seeds", "one"]])
def test_wrong_arguments_end_before_anything_is_run(arguments: list[str]) -> None:
    ended = subprocess.run([sys.executable, str(EXAMPLES / "run_examples.py"), *arguments], capture_output=True,
                           text=True, check=False)
    assert ended.returncode == 2 and arguments[-1] in ended.stderr


def test_example_of_sglang_takes_only_a_version_of_the_model_that_the_server_has(tmp_path: Path) -> None:
    wanted = {"a": torch.ones(2, 3), "lm_head.weight": torch.ones(4)}
    save_file(wanted, tmp_path / "model.safetensors")
    shapes = dcs_sglang.shapes_of(tmp_path)
    assert shapes == {"a": (2, 3), "lm_head.weight": (4,)}
    dcs_sglang.require_same("policy/1", shapes, shapes)
    dcs_sglang.require_same("policy/1", {"a": (2, 3)}, shapes)  # it is tied to the embedding
    for odd in ({}, {"a": (3, 2)}, {**shapes, "b": (1,)}, {**shapes, "lm_head.weight": (5,)}):
        with pytest.raises(RuntimeError, match="policy/1 has tensors of another model"):
            dcs_sglang.require_same("policy/1", odd, shapes)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(SystemExit, match="no \\*.safetensors"):
        dcs_sglang.shapes_of(tmp_path)
