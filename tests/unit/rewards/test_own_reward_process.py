"""Rewards of a user's code in real processes: what hangs, dies or floods costs its group, and leaks nothing."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.data.samples import Group, Prompt, Sample, Segment
from elastic_rl.data.sources import make_source
from elastic_rl.engine.client import Sampling
from elastic_rl.engine.generation import PromptRequest
from elastic_rl.errors import ConfigError, Fenced, PluginFailed
from elastic_rl.pipeline.sampling.filtering import Filters
from elastic_rl.pipeline.sampling.rewarding import Rewarder
from elastic_rl.pipeline.sampling.sampler import Sampler
from elastic_rl.pipeline.waits import Waits
from elastic_rl.plugins.process import CallLost, PluginProcess
from elastic_rl.rewards.registry import close_reward, make_reward, start_reward
from elastic_rl.runtime.process import runs

pytestmark = pytest.mark.usefixtures("forked_plugins")

MODULE = r'''
import asyncio, os, re, signal, subprocess, sys, threading
from elastic_rl.rewards.base import Reward

calls = 0

async def poison(prompt, samples):
    """What happens is in the prompt's text."""
    global calls
    calls += 1
    what = prompt.text
    await asyncio.sleep(0)
    if begun := prompt.metadata.get("begun"): open(begun, "w").close()
    if what == "block": threading.Event().wait()
    if what == "regex": re.match(r"(a+)+$", "a" * 60 + "b")  # keeps the interpreter's lock
    if what == "thread": await asyncio.to_thread(threading.Event().wait)
    if what == "swallow":
        while True:
            try: await asyncio.sleep(60)
            except asyncio.CancelledError: pass
    if what == "say": print("to stdout")
    if what == "exit": sys.exit(3)
    if what == "_exit": os._exit(3)
    if what == "segv": os.kill(os.getpid(), signal.SIGSEGV)
    if what == "fork":
        if not os.fork(): threading.Event().wait()
        os._exit(3)
    if what == "fork that raises":
        if not (child := os.fork()): raise ValueError("in the fork")
        os.waitpid(child, 0)
    if what == "children":
        import psutil
        for child in psutil.Process().children(recursive=True): child.kill()
        try: os.wait()
        except ChildProcessError: pass
    if what == "detach": return [Reward(float(subprocess.Popen(["sleep", "600"], start_new_session=True).pid))]
    if what == "start": return [Reward(float(subprocess.Popen(["sleep", "600"]).pid)) for _ in samples]
    if what == "raise": raise ValueError("not this \udc80 one")
    if what == "nan": return [Reward(float("nan")) for _ in samples]
    if what == "string": return ["1.0" for _ in samples]
    if what == "number": return 1.0
    if what == "print": print("x" * 1_000_000); print("y" * 1_000_000, file=sys.stderr)
    if what == "calls": return [Reward(float(calls)) for _ in samples]
    if what == "pid": return [Reward(float(os.getpid())) for _ in samples]
    if what == "echo": return [Reward(float(samples[0].segments[0].token_ids[-1]), dict(prompt.metadata))]
    return [Reward(1.0) for _ in samples]

def drops(group):
    """What happens is in the prompt's text, as above."""
    what = group.prompt.text
    if what == "block": threading.Event().wait()
    if what == "regex": re.match(r"(a+)+$", "a" * 60 + "b")
    if what == "_exit": os._exit(3)
    if what == "raise": raise ValueError("not this one")
    if what == "number": return 1
    return what if what == "drop" else ""
'''
SAMPLE = Sample((Segment((1, 2), (-0.5, -0.5), version=3),))
NAME = "poison_reward:poison"


@pytest.fixture(scope="module", autouse=True)
def _module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "poison_reward.py").write_text(MODULE)
    (folder / "dying_reward.py").write_text("import os\nos._exit(7)\n")
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing here hangs for ever, so no test depends on these limits but for its time."""
    monkeypatch.setattr("elastic_rl.plugins.process.CANCEL_S", 0.5)
    monkeypatch.setattr("elastic_rl.pipeline.waits._RETRY_S", (0.001, 0.01))
    monkeypatch.setattr("elastic_rl.pipeline.sampling.rewarding._RETRY_S", (0.001, 0.01))


@pytest.fixture(scope="module")
def made(_module: None) -> Iterator[Any]:
    """The reward of this file's tests. Its process is replaced where a test ends it."""
    made = make_reward(NAME, {})
    yield made
    close_reward(made)


@pytest.fixture
def reward(made: Any) -> Any:
    start_reward(made)
    return made


async def _one(reward: Any, what: str, limit_s: float = 60.0, **metadata: Any) -> float:
    async with asyncio.timeout(limit_s):
        [found] = await reward(Prompt((1,), what, metadata=metadata), [SAMPLE])
    return float(found.value)


def _rewarder(stopping: threading.Event, *settings: str, texts: list[str] | None = None) -> Rewarder:
    """Calls of a reward that do not end are given up after some seconds. ``texts``: gets those of its waits."""
    cfg = config.load(overrides=[f"--rollout.reward={NAME}", "--rollout.reward_timeout_s=3",
                                 "--rollout.reward_attempts=1", *settings])
    return Rewarder(cfg, _waits(stopping, texts), other=_other)


def _filters(texts: list[str] | None = None, *settings: str) -> Filters:
    return Filters(config.load(overrides=["--rollout.filters=['poison_reward:drops']", "--rollout.reward_attempts=1",
                                          *settings]), _waits(threading.Event(), texts), other=_other)


def _waits(stopping: threading.Event, texts: list[str] | None) -> Waits:
    return Waits(lambda stage, kind, what: texts.append(what) if kind and texts is not None else None, stopping)


def _other(number: int) -> tuple[Prompt, Sample]:
    return Prompt((1,), "other"), SAMPLE


def _groups(rewarder: Rewarder, *texts: str) -> list[Group]:
    return rewarder.groups([PromptRequest(i, Prompt((1,), text), Sampling(4), 1) for i, text in enumerate(texts)],
                           [[SAMPLE] for _ in texts])


def _children() -> set[int]:
    return {p.pid for p in psutil.Process().children(recursive=True) if runs(p)}


def test_own_reward_keeps_its_state_over_calls_and_loops(reward: Any) -> None:
    before = asyncio.run(_one(reward, "calls"))
    assert [asyncio.run(_one(reward, "calls")) for _ in range(2)] == [before + 1, before + 2]
    assert "poison_reward" not in sys.modules, "the process of the run imported it"
    assert asyncio.run(_one(reward, "echo", a=1.5, b=2)) == 2.0
    asyncio.run(_one(reward, "print"))


@pytest.mark.parametrize("what", ["block", "regex", "swallow"])
def test_process_of_a_call_that_does_not_end_is_killed(reward: Any, what: str) -> None:
    pid = int(asyncio.run(_one(reward, "pid")))
    with pytest.raises(CallLost, match="did not end when it was cancelled"):
        asyncio.run(_one(reward, what, 0.2))
    wait_until(lambda: not psutil.pid_exists(pid), what="the end of the process")
    start_reward(reward)
    assert asyncio.run(_one(reward, "calls")) == 1.0


def test_process_whose_call_was_cancelled_is_replaced(reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The call may have left a thread behind."""
    monkeypatch.setattr("elastic_rl.plugins.process.CANCEL_S", 60.0)
    pid = int(asyncio.run(_one(reward, "pid")))
    with pytest.raises(TimeoutError):
        asyncio.run(_one(reward, "thread", 0.2))
    start_reward(reward)
    assert int(asyncio.run(_one(reward, "pid"))) != pid
    wait_until(lambda: not psutil.pid_exists(pid), what="the end of the process")


def test_cancelled_call_costs_those_beside_it_nothing(reward: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.plugins.process.CANCEL_S", 60.0)

    async def both() -> list[Any]:
        started = asyncio.Event()

        async def second() -> float:
            await started.wait()
            return await _one(reward, "ok")

        async def first() -> None:
            try:
                await _one(reward, "thread", 0.2)
            finally:
                started.set()

        return await asyncio.gather(first(), second(), _one(reward, "ok"), return_exceptions=True)

    given_up, *found = asyncio.run(both())
    assert isinstance(given_up, TimeoutError) and found == [1.0, 1.0]


@pytest.mark.parametrize(("what", "named"), [
    ("_exit", "died .exit status 3"), ("segv", "died .signal 11"), ("fork", "died .exit status 3")])
def test_process_that_dies_loses_its_call_and_is_replaced(reward: Any, what: str, named: str) -> None:
    with pytest.raises(CallLost, match=named):
        asyncio.run(_one(reward, what))
    start_reward(reward)
    assert asyncio.run(_one(reward, "ok")) == 1.0


def test_fork_that_a_function_leaves_behind_answers_for_nobody(reward: Any) -> None:
    assert asyncio.run(_one(reward, "fork that raises")) == 1.0
    assert asyncio.run(_one(reward, "ok")) == 1.0


def test_function_that_ends_or_waits_for_its_children_finds_only_its_own(reward: Any) -> None:
    pid = asyncio.run(_one(reward, "pid"))
    assert asyncio.run(_one(reward, "children")) == 1.0 and asyncio.run(_one(reward, "pid")) == pid


@pytest.mark.parametrize(("what", "named"), [
    ("raise", "ValueError: not this . one"), ("exit", "SystemExit: 3"), ("nan", "finite numbers as rewards, not nan"),
    ("string", "1 objects Reward, one per sample, not list of str"), ("number", "one per sample, not float")])
def test_what_a_reward_raises_or_returns_is_named_and_its_process_stays(reward: Any, what: str, named: str) -> None:
    pid = asyncio.run(_one(reward, "pid"))
    with pytest.raises(PluginFailed, match=named):
        asyncio.run(_one(reward, what))
    assert asyncio.run(_one(reward, "pid")) == pid


def test_metadata_that_cannot_be_sent_fail_their_call(reward: Any) -> None:
    with pytest.raises(PluginFailed, match="metadata of prompts"):
        asyncio.run(_one(reward, "ok", lock=threading.Lock()))
    assert asyncio.run(_one(reward, "ok")) == 1.0


def test_reward_that_cannot_be_started_is_a_wrong_setting() -> None:
    before = _children()
    with pytest.raises(ConfigError, match=r"rollout.reward=dying_reward:f died .exit status 7"):
        make_reward("dying_reward:f", {})
    with pytest.raises(ConfigError, match="no 'missing'"):
        make_reward("poison_reward:missing", {})
    with pytest.raises(ConfigError, match="cannot be imported.*ModuleNotFoundError"):
        make_reward("no_such_module:f", {})
    with pytest.raises(ConfigError, match=r"rollout.reward_options.parts.0.reward='no_such_module:f'"):
        make_reward("mix", {"parts": [{"reward": "no_such_module:f"}]})
    wait_until(lambda: _children() <= before, what="the end of their processes")


def test_filters_end_when_the_reward_beside_them_cannot_be_made() -> None:
    before, threads = _children(), threading.active_count()
    cfg = config.load(overrides=["--rollout.filters=['poison_reward:drops']", "--rollout.reward=no_such_module:f"])
    for _ in range(3):  # as the loop tries again
        with pytest.raises(ConfigError, match="no_such_module"):
            Sampler(cfg, make_source(cfg), lambda *asked: [], _waits(threading.Event(), None))
    wait_until(lambda: _children() <= before and threading.active_count() <= threads + 1,
               what="the end of their processes and threads")


@pytest.mark.parametrize(("make", "setting"), [(Rewarder, "--rollout.reward=slow_reward:poison"),
                                               (Filters, "--rollout.filters=['slow_reward:drops']")])
def test_slow_import_is_shown_and_does_not_keep_the_loop_from_ending(
        monkeypatch: pytest.MonkeyPatch, tmp_path: Path, make: type[Rewarder | Filters], setting: str) -> None:
    released = tmp_path / "released"
    (tmp_path / "slow_reward.py").write_text(
        f"import os, time\nwhile not os.path.exists({str(released)!r}): time.sleep(0.05)\n"
        "from poison_reward import drops, poison\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("elastic_rl.pipeline.sampling.user_calls.SHOWN_AFTER_S", 0.1)
    stopping, shown, before, threads = threading.Event(), list[str](), _children(), threading.active_count()

    def report(stage: str, kind: str, what: str) -> None:
        if "taken longer" in what:
            shown.append(f"{kind}: {what}")
            stopping.set()

    with pytest.raises(Fenced):
        make(config.load(overrides=[setting]), Waits(report, stopping), other=_other)
    assert shown[0].startswith("plugin: the start of ") and "slow_reward" in shown[0]
    released.touch()
    wait_until(lambda: _children() <= before and threading.active_count() <= threads + 1,
               what="the end of what was made when nobody waited for it any more")


def test_process_ends_with_the_reward_and_with_its_owner() -> None:
    made = make_reward("mix", {"parts": [{"reward": NAME}]})
    assert asyncio.run(_one(made, "ok")) == 1.0
    close_reward(made)
    with pytest.raises(PluginFailed, match="waits for its process"):
        asyncio.run(_one(made, "ok"))
    with pytest.raises(PluginFailed, match="is closed"):
        start_reward(made)
    script = ("import asyncio\nfrom elastic_rl.data.samples import Prompt, Sample\n"
              "from elastic_rl.rewards.registry import make_reward\n"
              f"reward = make_reward({NAME!r}, {{}})\n"
              "for what in 'pid', 'start', 'detach':\n"
              "    print(int(asyncio.run(reward(Prompt((1,), what), [Sample(())]))[0].value), flush=True)\n"
              "asyncio.run(reward(Prompt((1,), 'block'), [Sample(())]))\n")
    owner = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE,
                             env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)})
    assert owner.stdout is not None
    processes = [psutil.Process(int(owner.stdout.readline())) for _ in range(3)]
    owner.kill()  # while a call is under way
    owner.wait(60)
    owner.stdout.close()
    wait_until(lambda: all(not runs(p) for p in processes),
               what="the end of the process and of those that its function started")


def test_group_that_hangs_or_kills_costs_itself_and_leaves_nothing() -> None:
    stopping, before = threading.Event(), threading.active_count()
    rewarder = _rewarder(stopping, "--rollout.max_failed_groups=1", "--rollout.reward_timeout_s=2")
    kinds = ("block", "regex", "_exit", "swallow", "thread", "segv")
    assert [bool(g.failed) for g in _groups(rewarder, "ok", *kinds, "ok")] == [False, *[True] * len(kinds), False]
    rewarder.close()
    wait_until(lambda: threading.active_count() <= before + 1, what="the end of the threads")


def test_group_that_keeps_ending_its_process_ends_no_others() -> None:
    """It is tried again without end, in a process of its own, and the others keep theirs."""
    stopping, texts, pids, before = threading.Event(), list[str](), list[float](), _children()
    rewarder = _rewarder(stopping, "--rollout.max_failed_groups=0", texts=texts)
    seen = _children()

    def answer(ordinal: int, text: str) -> Any:
        return PromptRequest(ordinal, Prompt((1,), text), Sampling(4), 1), [SAMPLE]

    def more() -> list[Any]:
        """Another group whenever there is another process."""
        is_new = bool(texts) and not _children() <= seen
        seen.update(_children())
        return [answer(len(seen), "pid")] if is_new else []

    def give(group: Group) -> None:
        pids.append(group.rewards[0])
        if len(pids) == 5:
            stopping.set()

    with pytest.raises(Fenced):
        rewarder.stream([answer(0, "_exit")], more, give)
    assert len(pids) >= 5 and len(set(pids)) == 1
    assert any("rollout.reward=poison_reward:poison died (exit status 3)" in text for text in texts)
    rewarder.close()
    wait_until(lambda: _children() <= before, what="the end of both processes")


def test_process_of_probation_ends_with_the_last_group() -> None:
    """It takes as much memory as that of the others."""
    rewarder = _rewarder(threading.Event(), "--rollout.max_failed_groups=1")
    one = len(_children())
    assert [bool(g.failed) for g in _groups(rewarder, "ok", "_exit", "ok")] == [False, True, False]
    wait_until(lambda: len(_children()) <= one, what="the end of the second process")
    assert [bool(g.failed) for g in _groups(rewarder, "ok", "_exit")] == [False, True], "there is another one then"
    rewarder.close()


def test_actor_whose_first_group_hangs_goes_on() -> None:
    rewarder = _rewarder(threading.Event(), "--rollout.reward_timeout_s=0.5", "--rollout.reward_attempts=3")
    [group] = _groups(rewarder, "block")
    assert "did not end when it was cancelled" in group.failed
    rewarder.close()


def test_reward_that_hangs_does_not_keep_the_loop_from_ending(tmp_path: Path) -> None:
    """The loop ends once the call is under way, which a file shows."""
    stopping, begun = threading.Event(), tmp_path / "begun"

    def stop() -> None:
        wait_until(begun.exists, what="the call")
        stopping.set()

    rewarder = _rewarder(stopping, "--rollout.reward_timeout_s=600")
    threading.Thread(target=stop, daemon=True).start()
    with pytest.raises(Fenced):
        rewarder.groups([PromptRequest(0, Prompt((1,), "block", metadata={"begun": str(begun)}), Sampling(4), 1)],
                        [[SAMPLE]])
    rewarder.close()


def test_calls_of_many_threads_and_a_closing_owner_all_end() -> None:
    process = PluginProcess("the test", "elastic_rl.rewards.own:serve", NAME, {}, "x", "y")
    process.start()
    ended: list[BaseException | float] = []

    def call(what: str) -> None:
        try:
            ended.append(asyncio.run(process.call(Prompt((1,), what), (SAMPLE,)))[0][0])
        except BaseException as e:
            ended.append(e)

    threads = [threading.Thread(target=call, args=("block" if i == 8 else "ok",)) for i in range(12)]
    for thread in threads[:8]:
        thread.start()
    wait_until(lambda: len(ended) == 8, what="the calls before the one that blocks")
    for thread in threads[8:]:
        thread.start()
    process.close()
    for thread in threads:
        thread.join(60)
    assert len(ended) == 12 and all(e == 1.0 or isinstance(e, PluginFailed) for e in ended)


def test_filter_that_hangs_kills_or_fails_for_a_group_drops_it() -> None:
    before = threading.active_count()
    filters = _filters(None, "--rollout.reward_timeout_s=2")
    texts = ("ok", "drop", "block", "ok", "regex", "_exit", "raise", "number", "ok")
    found = [filters.drop_reason(Group(i, Prompt((1,), text), (SAMPLE,))) for i, text in enumerate(texts)]
    failed = "filter failed"
    assert found == ["", "drop", failed, "", failed, failed, failed, failed, ""]
    filters.close()
    wait_until(lambda: threading.active_count() <= before + 1, what="the end of the threads")


def test_filter_that_fails_names_its_error() -> None:
    texts: list[str] = []
    filters = _filters(texts)
    assert filters.drop_reason(Group(0, Prompt((1,), "raise"), (SAMPLE,))) == "filter failed"
    filters.close()
    assert "the filter poison_reward:drops failed for group 0: ValueError: not this one" in texts[0]


def test_output_of_a_reward_is_in_its_callers_log(capfd: pytest.CaptureFixture[str],
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """At once: its process may be killed."""
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)
    reward = make_reward("poison_reward:poison", {})
    try:
        start_reward(reward)
        asyncio.run(reward(Prompt((1,), "say"), [Sample((Segment((1,), (-0.5,), version=1),))]))
        assert "to stdout" in capfd.readouterr().err.splitlines()
    finally:
        close_reward(reward)
