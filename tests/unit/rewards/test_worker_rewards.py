"""Rewards that are computed in worker processes: real processes that hang, eat memory, die, and are replaced."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.host import MAX_MESSAGE
from elastic_rl.plugins.worker_pool import CallGivenUp, WorkerPool
from elastic_rl.rewards import forms
from elastic_rl.rewards.base import Reward, RewardFn, call_limit_s
from elastic_rl.rewards.registry import close_reward, make_reward
from elastic_rl.rewards.sandbox import find_bubblewrap
from elastic_rl.runtime.process import runs

pytestmark = pytest.mark.usefixtures("forked_plugins")

MODULE = '''
import os, subprocess, sys, time
from decimal import Decimal
from fractions import Fraction
from elastic_rl.rewards.base import Reward
from elastic_rl.rewards.forms import from_options, per_sample

calls = 0

def work(job):
    global calls
    calls += 1
    what, value = job
    if what == "pid": return os.getpid()
    if what == "slow pid":
        time.sleep(value)
        return os.getpid()
    if what == "calls": return calls
    if what == "sleep": time.sleep(value)
    if what == "while there is":
        open(value + ".begun", "w").close()
        while os.path.exists(value): time.sleep(0.02)
    if what == "raise": raise ValueError("wrong \\udc80 " + "x" * value)
    if what == "exit": os._exit(0)
    if what == "sys.exit": sys.exit(0)
    if what == "detached":
        if os.fork() == 0:
            os.setsid()
            child = subprocess.Popen(["sleep", "300"], start_new_session=True)
            with open(value, "w") as file: file.write(str(child.pid))
            os._exit(0)
        os.wait()
        with open(value) as file: return int(file.read())
    if what == "fork":
        if os.fork() == 0: raise ValueError("in the fork")
        time.sleep(value)
    if what == "answer for others":
        for fd in map(int, os.listdir("/proc/self/fd")):
            if fd < 3: continue
            try: os.write(fd, b"\\0\\0\\0\\x0c" + b'{"value": 7}')
            except OSError: pass
    if what == "say": print("to stdout"); print("to stderr", file=sys.stderr)
    if what == "memory": return len(bytearray(value))
    if what == "nan": return float("nan")
    if what == "child": return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"]).pid
    if what == "write":
        print("x" * 100_000, flush=True); print("x" * 100_000, file=sys.stderr, flush=True)
    return value

@per_sample
def length(text, prompt):
    return len(text) + prompt.metadata.get("more", 0)

@per_sample(timeout_s=3.0, processes=1)
def hangs_on_x(text, prompt):
    while text == "x": pass
    return Reward(1.0, {"part": 0.5})

@per_sample
async def later(text, prompt):
    return float(text)

@per_sample
def of_numpy(text, prompt):
    import numpy as np
    return {"float32": np.float32(0.5), "int": np.int64(2), "bool": True, "bool_": np.array([1]).all(),
            "array": np.array(0.5), "decimal": Decimal("0.5"), "fraction": Fraction(1, 2), "parts": Reward(
                np.float16(1.0), {"a": np.bool_(True), "b": np.array(2)}, [np.float32(0.5), np.bool_(False)])}[text]

@per_sample
async def later_of_numpy(text, prompt):
    import numpy as np
    return np.bool_(True)

@per_sample
def no_number(text, prompt):
    return {"text": "1", "none": None, "list": [0.5], "mapping": {"score": 0.5}, "nan": float("nan"),
            "part": Reward(1.0, {"a": None}), "huge": 10**400, "object": object()}[text]

def undecorated(text, prompt):
    return 1.0

async def whole(prompt, samples):
    return [Reward(float(len(samples))) for _ in samples]

class Judge:
    async def __call__(self, prompt, samples):
        return [Reward(2.0) for _ in samples]
judge = Judge()

@from_options
def scaled(options):
    if "by" not in options: raise KeyError("by")
    async def reward(prompt, samples):
        return [Reward(options["by"]) for _ in samples]
    return reward
'''
PROMPT = Prompt((1,), metadata={"more": 10})


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "reward_plugin.py").write_text(MODULE)
    (folder / "ends_its_process.py").write_text("import os; os._exit(1)")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    yield
    sys.path.remove(str(folder))


@pytest.fixture
def pool() -> Iterator[WorkerPool]:
    made = WorkerPool("reward_plugin:work", 1, memory_mb=1024)
    yield made
    made.close()


def _call(pool: WorkerPool, what: str, value: Any = 0, timeout_s: float = 20.0) -> Any:
    return asyncio.run(pool.call([what, value], timeout_s))


def test_libraries_of_numbers_reserve_memory_for_one_thread_however_many_cpus_there_are(
        monkeypatch: pytest.MonkeyPatch) -> None:
    """Address space, which has the limit: OpenBLAS takes 41 MB a CPU as numpy is imported."""
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "64")
    pool = WorkerPool("os:getenv", 1, memory_mb=1024)
    try:
        assert {name: asyncio.run(pool.call(name, 20.0)) for name in (
            "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")} == {
            "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    finally:
        pool.close()


def test_output_of_a_function_is_in_its_callers_log(pool: WorkerPool, capfd: pytest.CaptureFixture[str],
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    assert _call(pool, "say", 3) == 3
    assert sorted(capfd.readouterr().err.splitlines()) == ["to stderr", "to stdout"]


def _rewards(reward: RewardFn, prompt: Prompt, *texts: str) -> list[Reward]:
    try:
        return list(asyncio.run(reward(prompt, [Sample((), text=t) for t in texts])))  # type: ignore[arg-type]
    finally:
        close_reward(reward)


async def _under_way(pool: WorkerPool, path: Path, *more: list[Any]) -> asyncio.Task[list[Any]]:
    """Calls of which the first has begun, and ends when the file at ``path`` is removed."""
    path.touch()
    task = asyncio.ensure_future(pool.calls([["while there is", str(path)], *more], 300.0))
    async with asyncio.timeout(120):
        while not path.with_name(f"{path.name}.begun").exists():
            await asyncio.sleep(0.01)
    return task


# -- the pool ----------------------------------------------------------------------------------------------------------


def test_worker_serves_calls_until_one_takes_too_long(pool: WorkerPool) -> None:
    first = _call(pool, "pid")
    assert _call(pool, "pid") == first and _call(pool, "calls") == 3
    began = time.monotonic()
    with pytest.raises(CallGivenUp, match="took longer than 0.3 s and was killed"):
        _call(pool, "sleep", 60, timeout_s=0.3)
    assert time.monotonic() - began < 40.0 and not psutil.pid_exists(first)
    assert _call(pool, "pid") != first and _call(pool, "calls") == 2


@pytest.mark.parametrize("what", ["exit", "memory"])
def test_worker_that_dies_or_has_no_memory_is_replaced(pool: WorkerPool, what: str) -> None:
    first = _call(pool, "pid")
    with pytest.raises(CallGivenUp, match="died during the call, or ran out of memory"):
        _call(pool, what, 4 << 30)
    assert _call(pool, "pid") != first


def test_what_a_function_raises_is_a_short_text_and_its_worker_stays(pool: WorkerPool) -> None:
    first = _call(pool, "pid")
    with pytest.raises(PluginFailed, match="ValueError: wrong \\? x") as failed:
        _call(pool, "raise", 100_000)
    assert len(str(failed.value)) < 2200
    for what, named in (("sys.exit", "SystemExit"), ("nan", "Out of range")):
        with pytest.raises(PluginFailed, match=named):
            _call(pool, what)
    assert _call(pool, "write", 7) == 7
    assert _call(pool, "pid") == first


def test_fork_that_a_function_leaves_behind_answers_for_nobody(pool: WorkerPool) -> None:
    for value in (1.0, 0.0):  # the fork comes back before the function, and after it
        assert _call(pool, "fork", value) == value
        assert [_call(pool, "echo", i) for i in range(50)] == list(range(50))


def test_worker_with_an_answer_of_no_call_is_replaced(pool: WorkerPool) -> None:
    with pytest.raises(CallGivenUp):
        _call(pool, "answer for others")
    assert _call(pool, "echo", 5) == 5


def test_children_of_a_worker_end_with_it(pool: WorkerPool) -> None:
    child = psutil.Process(_call(pool, "child"))
    with pytest.raises(CallGivenUp):
        _call(pool, "sleep", 60, timeout_s=0.2)
    psutil.wait_procs([child], timeout=30)
    assert not runs(child)


@pytest.mark.parametrize("end", ["time", "exit", "close"])
def test_what_a_function_starts_in_another_session_ends_with_its_worker(pool: WorkerPool, tmp_path: Path, end: str
                                                                        ) -> None:
    child = psutil.Process(_call(pool, "detached", str(tmp_path / "pid")))
    if end == "close":
        pool.close()
    else:
        with pytest.raises(CallGivenUp):
            _call(pool, "sleep" if end == "time" else "exit", 60, timeout_s=3.0)
    assert child.pid not in psutil.pids() or psutil.wait_procs([child], timeout=30)[0]


def test_calls_have_outcomes_of_their_own_whatever_one_of_them_does(pool: WorkerPool) -> None:
    jobs = [["say", 1], ["raise", 1], ["sleep", 60], ["say", 2], ["exit", 0], ["say", 3]]
    found = asyncio.run(pool.calls(jobs, 2.0))
    assert [type(f) for f in found] == [int, PluginFailed, CallGivenUp, int, CallGivenUp, int]
    assert [f for f in found if isinstance(f, int)] == [1, 2, 3]
    assert asyncio.run(pool.calls([], 2.0)) == []


def test_slow_calls_next_to_each_other_are_spread_over_the_processes() -> None:
    pool = WorkerPool("reward_plugin:work", 2, memory_mb=1024)
    jobs = [*[["slow pid", 0.3]] * 4, *[["pid", 0]] * 4]
    try:  # again, since a process that is just being started takes none
        wait_until(lambda: len(set(asyncio.run(pool.calls(jobs, 60.0))[:4])) == 2, what="both processes")
    finally:
        pool.close()


def test_calls_of_which_nobody_waits_for_the_outcome_are_not_begun(pool: WorkerPool, tmp_path: Path) -> None:
    async def left() -> int:
        before = await pool.call(["calls", 0], 60.0)
        task = await _under_way(pool, tmp_path / "file", ["say", 1], ["say", 2])
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        (tmp_path / "file").unlink()
        return int(await pool.call(["calls", 0], 60.0)) - before

    assert asyncio.run(left()) == 2, "the one that was under way, and the question itself"


def test_close_ends_a_call_and_its_worker(pool: WorkerPool, tmp_path: Path) -> None:
    worker = _call(pool, "pid")

    async def closed_meanwhile() -> None:
        task = await _under_way(pool, tmp_path / "file")
        pool.close()
        [outcome] = await task
        assert isinstance(outcome, PluginFailed)

    asyncio.run(closed_meanwhile())
    assert not psutil.pid_exists(worker)


def test_close_ends_calls_that_wait_for_a_worker_too(pool: WorkerPool) -> None:
    async def closed_meanwhile() -> list[Any]:
        calls = [asyncio.ensure_future(pool.call(["sleep", 60], 50.0)) for _ in range(20)]
        await asyncio.sleep(0)
        pool.close()
        return await asyncio.gather(*calls, return_exceptions=True)

    assert {type(error) for error in asyncio.run(closed_meanwhile())} <= {PluginFailed, CallGivenUp}
    with pytest.raises(PluginFailed, match="is closed"):
        _call(pool, "pid")


def test_module_that_cannot_be_imported_is_a_fault_with_its_reason() -> None:
    pool = WorkerPool("no.such.module:work", 1, memory_mb=1024)
    with pytest.raises(PluginFailed, match="ModuleNotFoundError"):
        asyncio.run(pool.call(1, 5.0))
    pool.close()


def test_worker_that_dies_before_it_is_ready_fails_no_call() -> None:
    pool = WorkerPool("ends_its_process:work", 1, memory_mb=1024)
    with pytest.raises(PluginFailed, match="no worker of ends_its_process:work starts") as failed:
        asyncio.run(pool.call(1, 5.0))
    assert not isinstance(failed.value, CallGivenUp)
    pool.close()


def test_call_that_is_too_large_is_refused(pool: WorkerPool) -> None:
    with pytest.raises(PluginFailed, match="at most"):
        _call(pool, "echo", "x" * MAX_MESSAGE)
    with pytest.raises(PluginFailed, match="cannot be sent"):
        _call(pool, "echo", {1, 2})
    assert _call(pool, "echo", "x" * (1 << 20)) == "x" * (1 << 20)


def test_workers_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", f"""
import asyncio, sys
sys.path.insert(0, {next(p for p in sys.path if 'plugin' in p)!r})
from elastic_rl.plugins.worker_pool import WorkerPool
pool = WorkerPool("reward_plugin:work", 1, memory_mb=1024)
print(asyncio.run(pool.call(["pid", 0], 20.0)), flush=True)
asyncio.run(pool.call(["sleep", 300], 290.0))
"""], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    worker = psutil.Process(int(owner.stdout.readline()))
    owner.kill()
    owner.wait(60)
    psutil.wait_procs([worker], timeout=5)
    assert not runs(worker)


# -- forms of a user's reward ------------------------------------------------------------------------------------------


def test_function_of_one_sample_is_a_reward() -> None:
    assert _rewards(make_reward("reward_plugin:length", {}), PROMPT, "", "abc") == [Reward(10.0), Reward(13.0)]
    assert _rewards(make_reward("reward_plugin:later", {}), PROMPT, "1.5") == [Reward(1.5)]
    assert _rewards(make_reward("reward_plugin:hangs_on_x", {}), PROMPT, "y") == [Reward(1.0, {"part": 0.5})]
    assert _rewards(make_reward("reward_plugin:of_numpy", {}), PROMPT, "float32", "int", "bool") == [
        Reward(0.5), Reward(2.0), Reward(1.0)]


def test_scalars_of_numpy_and_numbers_of_the_standard_library_are_rewards_and_parts() -> None:
    given = ("bool_", "array", "decimal", "fraction", "parts")
    assert _rewards(make_reward("reward_plugin:of_numpy", {}), PROMPT, *given) == [
        Reward(1.0), *[Reward(0.5)] * 3, Reward(1.0, {"a": 1.0, "b": 2.0}, (0.5, 0.0))]
    assert _rewards(make_reward("reward_plugin:later_of_numpy", {}), PROMPT, "x") == [Reward(1.0)]


@pytest.mark.parametrize(("given", "named"), [
    ("text", "a number or a Reward, not str: return float"), ("none", "not None: see that each way through it ends"),
    ("list", "not list: return one number of it"), ("mapping", "not a mapping: return Reward.value, parts"),
    ("nan", "finite numbers as rewards, not nan"), ("huge", "finite numbers as rewards"),
    ("part", "finite numbers as rewards, not None"), ("object", "not object: return float.value")])
def test_what_is_no_reward_is_named_with_what_to_return(given: str, named: str) -> None:
    with pytest.raises(PluginFailed, match=named):
        _rewards(make_reward("reward_plugin:no_number", {}), PROMPT, given)


@pytest.mark.parametrize("limits", [{"timeout_s": 0.0}, {"timeout_s": float("inf")}, {"timeout_s": float("nan")},
                                    {"processes": 0}, {"processes": 10_000}, {"memory_mb": 1},
                                    {"memory_mb": 10**13}])
def test_limits_that_no_call_can_keep_are_refused(limits: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"per_sample: .*{next(iter(limits))}"):
        forms.per_sample(**limits)


def test_function_that_hangs_or_returns_nonsense_fails_its_group_only() -> None:
    reward = make_reward("reward_plugin:hangs_on_x", {})

    async def both() -> None:
        with pytest.raises(PluginFailed, match="took longer than 3 s"):
            await reward(PROMPT, [Sample((), text="y"), Sample((), text="x")])
        assert len(await reward(PROMPT, [Sample((), text="y")])) == 1

    asyncio.run(both())
    close_reward(reward)


def test_module_that_takes_longer_to_import_than_a_call_may_take_is_no_slow_call(
        tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text(
        "import time\nfrom elastic_rl.rewards.forms import per_sample\ntime.sleep(1.5)\n"
        "@per_sample(timeout_s=1.0)\ndef one(text, prompt):\n    while text == 'x': pass\n    return 1.0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    reward = make_reward("slow_to_import:one", {})

    async def calls() -> None:
        assert await reward(PROMPT, [Sample((), text="y")]) == [Reward(1.0)]
        with pytest.raises(PluginFailed, match="took longer than 1 s"):
            await reward(PROMPT, [Sample((), text="x")])
        assert await reward(PROMPT, [Sample((), text="y")]) == [Reward(1.0)], "by a worker that was started again"

    asyncio.run(calls())
    close_reward(reward)


def test_calls_of_which_all_are_needed_end_with_the_first_failure(pool: WorkerPool) -> None:
    jobs = [["say", 1], ["raise", 1], *[["sleep", 60]] * 50]
    found = asyncio.run(pool.calls(jobs, 50.0, all_or_none=True))
    assert found[0] == 1 and all(isinstance(outcome, PluginFailed) for outcome in found[1:])
    assert _call(pool, "calls") == 3


def test_reward_fn_of_a_user_is_taken_as_it_is() -> None:
    assert _rewards(make_reward("reward_plugin:whole", {}), PROMPT, "a", "b") == [Reward(2.0)] * 2
    assert _rewards(make_reward("reward_plugin:judge", {}), PROMPT, "a") == [Reward(2.0)]
    assert _rewards(make_reward("reward_plugin:scaled", {"by": 3.0}), PROMPT, "a") == [Reward(3.0)]


@pytest.mark.parametrize(("name", "options", "named"), [
    ("undecorated", {}, "put @per_sample"), ("Judge", {}, "no async function"), ("calls", {}, "no async function"),
    ("whole", {"x": 1}, "takes none"), ("length", {"x": 1}, "takes none"), ("scaled", {}, "KeyError: 'by'")])
def test_object_that_is_no_reward_is_a_wrong_setting(name: str, options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_reward(f"reward_plugin:{name}", options)


# -- mathematics -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def math() -> Iterator[RewardFn]:
    pytest.importorskip("math_verify")
    made = make_reward("math_verify", {"processes": 1, "timeout_s": 20.0})
    yield made
    close_reward(made)


@pytest.mark.parametrize(("answer", "right", "wrong"), [
    ("\\frac{1}{2}", ["so it is $0.5$", "\\boxed{\\frac{2}{4}}", "1/2"], ["\\boxed{\\frac{1}{3}}", "", "no idea"]),
    (42, ["The answer is 42.", "\\boxed{42}"], ["24", "\\boxed{41}"]),
    ("x^2 + 2x + 1", ["$(x+1)^2$"], ["$(x+2)^2$"]), ("$\\{1, 2\\}$", ["\\boxed{\\{2, 1\\}}"], ["\\boxed{\\{1, 3\\}}"]),
    (["3", "\\pi"], ["$\\pi$", "3"], ["4"]),
    (1e-05, ["\\boxed{0.00001}"], ["\\boxed{0.0001}"]), (6.02e23, [f"\\boxed{{602{'0' * 21}}}"], ["\\boxed{602}"]),
    ("\\$18.90", ["\\boxed{18.90}", "\\boxed{\\$18.9}", "it costs $18.90", "$x = \\$18.90$"], ["\\boxed{\\$18}"]),
    ("$18.90", ["\\boxed{18.90}"], ["\\boxed{18}"]), ("\\$1,250", ["\\boxed{1250}"], ["\\boxed{1}"]),
    ("36\\$", ["\\boxed{36}"], ["\\boxed{35}"]), ("\\$x + 2", ["\\boxed{x+2}"], ["\\boxed{2}"]),
    ("\\text{\\$}5", ["\\boxed{5}"], ["\\boxed{6}"]),
    ("\\sqrt2", ["so:\\\\$$\\sqrt{2}$$"], ["so:\\\\$$\\sqrt{3}$$"]), ("7", ["total:\\\\$$7$$"], ["total:\\\\$$8$$"]),
    ("£18.90", ["\\boxed{18.9}", "\\boxed{£18.90}"], ["\\boxed{18}"])])
def test_mathematical_result_is_compared_by_value(math: RewardFn, answer: Any, right: list[str], wrong: list[str]
                                                  ) -> None:
    prompt = Prompt((1,), metadata={"answer": answer})
    samples = [Sample((), text=t) for t in right + wrong]
    for _ in range(2):  # the same texts get the same rewards
        found = asyncio.run(math(prompt, samples))  # type: ignore[arg-type]
        assert [r.value for r in found] == [1.0] * len(right) + [0.0] * len(wrong)
        assert all(r.parts["given_up"] == 0.0 for r in found)


def test_endless_result_is_worth_nothing_and_holds_up_no_other() -> None:
    pytest.importorskip("math_verify")
    reward = make_reward("math_verify", {"processes": 1, "timeout_s": 3.0})
    prompt = Prompt((1,), metadata={"answer": "1"})
    began = time.monotonic()
    found = _rewards(reward, prompt, "$9^{9^{9^{9}}} - 1$ and \\boxed{9999999999^{9999999999^{99}}}", "\\boxed{1}")
    assert [r.value for r in found] == [0.0, 1.0]
    assert time.monotonic() - began < 60.0


def test_answer_that_is_no_mathematics_is_a_failure_of_the_group(math: RewardFn) -> None:
    with pytest.raises(PluginFailed, match="is no mathematical result"):
        asyncio.run(math(Prompt((1,), metadata={"answer": ""}), [Sample((), text="1")]))  # type: ignore[arg-type]


def test_deepscaler_rewards_result_and_format() -> None:
    pytest.importorskip("math_verify")
    reward = make_reward("deepscaler", {"processes": 1, "timeout_s": 20.0, "require_think": True, "format_weight": 0.2})
    prompt = Prompt((1,), metadata={"answer": "\\boxed{\\frac{1}{2}}"})
    found = _rewards(reward, prompt, "<think>hm</think> \\boxed{0.5}", "<think>hm</think> <answer>2</answer>",
                     "\\boxed{0.5}", "<think>hm</think> it is 0.5", "<think>\\boxed{0.5}")
    assert [(r.value, r.parts["correct"], r.parts["format"]) for r in found] == [
        (1.0, 1.0, 1.0), (pytest.approx(0.2), 0.0, 1.0), (0.0, 0.0, 0.0), (0.8, 1.0, 0.0), (0.0, 0.0, 0.0)]


def test_response_in_which_nothing_can_be_read_has_a_part_of_its_own(math: RewardFn) -> None:
    prompt, texts = Prompt((1,), metadata={"answer": "42"}), ("\\boxed{}", "\\boxed{41}", "\\boxed{42}")
    found = asyncio.run(math(prompt, [Sample((), text=t) for t in texts]))  # type: ignore[arg-type]
    assert [(r.value, r.parts["unread"]) for r in found] == [(0.0, 1.0), (0.0, 0.0), (1.0, 0.0)]
    found = _rewards(make_reward("deepscaler", {"processes": 1, "timeout_s": 20.0}), prompt, *texts, "2²")
    assert [(r.value, r.parts["unread"]) for r in found] == [(0.0, 1.0), (0.0, 0.0), (1.0, 0.0), (0.0, 0.0)]


def test_group_of_checks_that_hang_gets_its_0_within_the_limit_of_a_call() -> None:
    pytest.importorskip("math_verify")
    reward = make_reward("math_verify", {"processes": 2, "timeout_s": 0.5})
    texts = ["\\boxed{9999999999^{9999999999^{99}}}"] * 4

    async def within_its_limit() -> list[Reward]:
        async with asyncio.timeout(call_limit_s(reward, 0.1, len(texts))):
            return list(await reward(Prompt((1,), metadata={"answer": "1"}), [Sample((), text=t) for t in texts]))

    assert [(r.value, r.parts["given_up"]) for r in asyncio.run(within_its_limit())] == [(0.0, 1.0)] * 4
    close_reward(reward)


@pytest.mark.parametrize(("name", "options", "least_s"), [
    ("math_verify", {"timeout_s": 10.0, "processes": 2}, 80.0), ("deepscaler", {"timeout_s": 10.0}, 80.0),
    ("code", {"wall_s": 6.0, "max_tests": 20, "parallel": 2}, 480.0),
    ("remote", {"urls": ["http://x"], "timeout_s": 20.0, "attempts": 3}, 60.0),
    ("reward_plugin:hangs_on_x", {}, 24.0), ("reward_plugin:later", {}, 10.0),
    ("mix", {"parts": [{"reward": "exact_match"}, {"reward": "reward_plugin:hangs_on_x"}]}, 24.0)])
def test_limits_of_a_reward_for_its_samples_are_within_that_of_a_call(name: str, options: dict[str, Any], least_s: float
                                                                      ) -> None:
    if name in ("math_verify", "deepscaler"):
        pytest.importorskip("math_verify")
    if name == "code" and not find_bubblewrap():
        pytest.skip("code needs bubblewrap")
    reward = make_reward(name, options)
    assert call_limit_s(reward, 1.0, 8) >= least_s and call_limit_s(reward, 1e6, 8) == 1e6
    close_reward(reward)


def test_reward_without_limits_of_its_own_has_the_one_of_the_settings() -> None:
    for name in ("exact_match", "reward_plugin:whole"):
        reward = make_reward(name, {})
        assert call_limit_s(reward, 7.0, 8) == 7.0
        close_reward(reward)


def test_deepscaler_reads_an_amount_of_money_as_the_right_answer() -> None:
    pytest.importorskip("math_verify")
    reward = make_reward("deepscaler", {"processes": 1, "timeout_s": 20.0})
    prompt = Prompt((1,), metadata={"answer": "\\boxed{\\$18.90}"})
    assert [r.value for r in _rewards(reward, prompt, "\\boxed{18.9}", "\\boxed{7}")] == [1.0, 0.0]


def test_deepscaler_rewards_no_format_where_the_check_was_given_up() -> None:
    pytest.importorskip("math_verify")
    reward = make_reward("deepscaler", {"processes": 1, "timeout_s": 3.0, "format_weight": 0.2})
    [found] = _rewards(reward, Prompt((1,), metadata={"answer": "1"}), "\\boxed{9999999999^{9999999999^{99}}}")
    assert found == Reward(0.0, {"correct": 0.0, "format": 1.0, "given_up": 1.0, "unread": 0.0})


def test_only_workers_of_reasoning_gym_import_it_and_as_they_start(tmp_path: Path) -> None:
    """Else the first check of each worker would take the seconds of the import, and be given up on a busy machine. A
    stand-in shows who imports it: the package itself takes four seconds."""
    (tmp_path / "reasoning_gym").mkdir()
    (tmp_path / "reasoning_gym" / "__init__.py").touch()
    (tmp_path / "reasoning_gym" / "factory.py").write_text("def get_score_answer_fn(task): ...")
    shown = subprocess.run([sys.executable, "-c", "import sys, elastic_rl.rewards.reasoning\n"
                            "before = 'reasoning_gym' in sys.modules\nimport elastic_rl.rewards.reasoning_scorer\n"
                            "print(before, sys.modules['reasoning_gym'].__file__)"],
                           env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
                           capture_output=True, text=True, check=True)
    assert shown.stdout.split() == ["False", str(tmp_path / "reasoning_gym" / "__init__.py")]


def test_reasoning_gym_scores_with_the_verifier_of_the_task() -> None:
    if importlib.util.find_spec("reasoning_gym") is None:  # importing it takes long, and only the worker has to
        pytest.skip("reasoning-gym is not installed")
    entry = {"question": "Calculate 5 - 3 - 6.", "answer": "-4", "metadata": {"source_dataset": "basic_arithmetic"}}
    reward = make_reward("reasoning_gym", {"processes": 1, "timeout_s": 60.0})
    right = str(entry["answer"])

    async def both() -> None:
        prompt = Prompt((1,), metadata={"task": "basic_arithmetic", "entry": entry})
        found = await reward(prompt, [Sample((), text=t) for t in (
            f"<think>1</think><answer>{right}</answer>", right, "nothing of the kind")])
        assert [r.value for r in found] == [1.0, 1.0, 0.0]
        with pytest.raises(PluginFailed, match="'no_such_task' not registered"):
            await reward(Prompt((1,), metadata={"task": "no_such_task", "entry": entry}), [Sample((), text="1")])
        with pytest.raises(PluginFailed, match="of reasoning_gym"):
            await reward(Prompt((1,)), [Sample((), text="1")])

    asyncio.run(both())
    close_reward(reward)


@pytest.mark.parametrize(("name", "module"), [("math_verify", "math_verify"), ("reasoning_gym", "reasoning_gym")])
def test_missing_package_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch, name: str, module: str) -> None:
    monkeypatch.setattr("elastic_rl.rewards.math_rewards.importlib.util.find_spec", lambda found: None)
    with pytest.raises(ConfigError, match="pip install"):
        make_reward(name, {})
