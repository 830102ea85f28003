"""Workers in a sandbox: what a model writes may run in them, and reaches nothing. Needs bubblewrap."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.plugins.worker_pool import CallGivenUp, WorkerPool
from elastic_rl.rewards.registry import close_reward, make_reward
from elastic_rl.rewards.worker_sandbox import WorkerSandbox

COUNTDOWN = {"question": "Make 24 of 4 and 6.", "answer": "4*6", "metadata": {
    "source_dataset": "countdown", "numbers": [4, 6], "target": 24}}


def _why_not() -> str:
    try:
        WorkerSandbox("json")
    except ConfigError as e:
        return str(e)
    return ""


WHY_NOT = _why_not()
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)
needs_reasoning_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None,
                                         reason="reasoning-gym is not installed")


@contextlib.contextmanager
def _new_pool() -> Iterator[WorkerPool]:
    """Its function evaluates Python, as some verifiers do."""
    made = WorkerPool("builtins:eval", 1, memory_mb=1024, sandbox=WorkerSandbox("json"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with _new_pool() as made:
        yield made


def _eval(pool: WorkerPool, text: str, timeout_s: float = 60.0) -> object:
    return asyncio.run(pool.call(text, timeout_s))


@needs_sandbox
def test_worker_in_a_sandbox_serves_many_calls(pool: WorkerPool) -> None:
    assert _eval(pool, "1 + 1") == 2
    assert _eval(pool, "__import__('builtins').__dict__.update(kept=3)") is None and _eval(pool, "kept") == 3


@needs_sandbox
def test_worker_sees_neither_environment_files_nor_processes_of_the_run(
        pool: WorkerPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    secret = tmp_path / "token"
    secret.write_text("secret")
    monkeypatch.setenv("A_SECRET", "secret")
    with _new_pool() as fresh:
        assert "A_SECRET" not in str(_eval(fresh, "sorted(__import__('os').environ)"))
    for call in (f"open({str(secret)!r}).read()", f"open({str(tmp_path / 'new')!r}, 'w')", "open('/usr/new', 'w')",
                 "open('/etc/passwd')", f"open({__file__!r})", f"__import__('os').kill({os.getpid()}, 9)",
                 "__import__('socket').create_connection(('127.0.0.1', 1), 1)", "__import__('os').listdir('/proc')"):
        with pytest.raises(PluginFailed, match="Error"):
            _eval(pool, call)
    assert not (tmp_path / "new").exists()


@needs_sandbox
@pytest.mark.parametrize("call", ["__import__('os').fork()", "__import__('subprocess').run(['/usr/bin/true'])"])
def test_worker_in_a_sandbox_starts_threads_but_no_process(pool: WorkerPool, call: str) -> None:
    with pytest.raises(PluginFailed, match="PermissionError"):
        _eval(pool, call)
    assert _eval(pool, "__import__('threading').Thread(target=print).start()") is None


@needs_sandbox
def test_worker_that_makes_files_without_end_is_replaced(pool: WorkerPool) -> None:
    """In a call, and over many of them."""
    assert _eval(pool, "setattr(__import__('builtins'), 'seen', 1)") is None
    many = "[open(f'/tmp/{n}', 'w').close() for n in range(%d)] and 1"
    with pytest.raises(CallGivenUp):
        _eval(pool, many % 10**8)
    assert _eval(pool, "setattr(__import__('builtins'), 'seen', 1)") is None
    assert _eval(pool, many % 9000) == 1
    with pytest.raises(PluginFailed, match="NameError"):
        _eval(pool, "seen")


@needs_sandbox
def test_worker_in_a_sandbox_is_killed_and_replaced() -> None:
    others = psutil.Process().children()
    with _new_pool() as pool:
        assert _eval(pool, "1") == 1
        [sandbox] = set(psutil.Process().children()) - set(others)
        family = [sandbox, *sandbox.children(recursive=True)]
        with pytest.raises(CallGivenUp, match="took longer"):
            _eval(pool, "__import__('time').sleep(300)", timeout_s=0.3)
        assert len(family) == 3 and not psutil.wait_procs(family, timeout=30)[1]
        assert _eval(pool, "2") == 2


@needs_sandbox
def test_worker_in_a_sandbox_ends_when_its_owner_is_killed() -> None:
    owner = subprocess.Popen([sys.executable, "-c", """
import asyncio
from elastic_rl.plugins.worker_pool import WorkerPool
from elastic_rl.rewards.worker_sandbox import WorkerSandbox
pool = WorkerPool("builtins:eval", 1, memory_mb=1024, sandbox=WorkerSandbox("json"))
print(asyncio.run(pool.call("1", 60.0)), flush=True)
asyncio.run(pool.call("__import__('time').sleep(300)", 290.0))
"""], stdout=subprocess.PIPE)
    assert owner.stdout is not None and owner.stdout.readline() == b"1\n"
    family = psutil.Process(owner.pid).children(recursive=True)
    owner.kill()
    owner.wait(60)
    assert len(family) == 3 and not psutil.wait_procs(family, timeout=30)[1]


# -- the rewards -------------------------------------------------------------------------------------------------------


@needs_sandbox
@needs_reasoning_gym
def test_answer_that_a_verifier_evaluates_reaches_nothing(tmp_path: Path) -> None:
    reward = make_reward("reasoning_gym", {"processes": 1, "timeout_s": 60.0})
    prompt = Prompt((1,), metadata={"task": "countdown", "entry": COUNTDOWN})
    touched = tmp_path / "touched"
    found = asyncio.run(reward(prompt, [Sample((), text=text) for text in (  # type: ignore[arg-type]
        "<answer>4*6</answer>", f"<answer>__import__('os').system('touch {touched}')</answer>",
        f"<answer>open({str(touched)!r}, 'w').write('x')</answer>")]))
    close_reward(reward)
    assert found[0].value == 1.0 and max(r.value for r in found[1:]) < 0.1 and not touched.exists()


@pytest.mark.parametrize("program", ["", "/bin/false"])
def test_checks_that_run_answers_need_a_sandbox_or_the_setting_unsandboxed(monkeypatch: pytest.MonkeyPatch, program: str
                                                                         ) -> None:
    pytest.importorskip("math_verify")
    monkeypatch.setattr("elastic_rl.rewards.reasoning.require_package", lambda *_: None)
    monkeypatch.setattr("elastic_rl.rewards.worker_sandbox.find_bubblewrap", lambda: program)
    with pytest.raises(ConfigError, match="unsandboxed: true"):
        make_reward("reasoning_gym", {})
    close_reward(make_reward("reasoning_gym", {"unsandboxed": True}))
    close_reward(make_reward("math_verify", {}))  # it parses answers, and runs none
