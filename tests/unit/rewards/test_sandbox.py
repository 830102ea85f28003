"""The sandbox against programs that mean harm, and the reward ``code``. Needs bubblewrap and user namespaces."""

from __future__ import annotations

import asyncio
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import ConfigError, PluginFailed
from elastic_rl.rewards.code import program_of
from elastic_rl.rewards.registry import close_reward, make_reward
from elastic_rl.rewards.sandbox import (
    Limits,
    Outcome,
    Sandbox,
    _has_byte,
    _supervise,
    find_bubblewrap,
    held_memory,
)
from elastic_rl.rewards.syscall_filter import syscall_filter
from elastic_rl.runtime.process import start_child

LIMITS = Limits(wall_s=60.0, cpu_s=4, memory_mb=256, processes=8, file_mb=4, output_bytes=10_000)
PROMPT = Prompt((1,))


def _why_not() -> str:
    try:
        Sandbox()
    except ConfigError as e:
        return str(e)
    return ""


WHY_NOT = _why_not()
needs_sandbox = pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)


@pytest.fixture(scope="module")
def sandbox() -> Sandbox:
    return Sandbox()


def _run(sandbox: Sandbox, program: str, stdin: str = "", **limits: object) -> Outcome:
    return sandbox.run({"main.py": program.encode()}, "main.py", stdin.encode(), replace(
        LIMITS, **limits))  # type: ignore[arg-type]


def _left(mark: str) -> list[psutil.Process]:
    return [p for p in psutil.process_iter() if mark in " ".join(_command(p))]


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def test_byte_of_a_descriptor_beyond_1024_is_seen() -> None:
    """``select.select`` raises for such a descriptor, which an actor with many connections gives to a pipe."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(4096, hard)) if hard >= 0 else 4096, hard))
    read, write = os.pipe()
    high = fcntl.fcntl(read, fcntl.F_DUPFD, 2000)
    try:
        assert not _has_byte(high)
        os.write(write, b"x")
        assert _has_byte(high) and not _has_byte(high)
    finally:
        for descriptor in (read, write, high):
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# -- ordinary programs -------------------------------------------------------------------------------------------------


@needs_sandbox
def test_program_reads_its_input_and_writes_its_output(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, "print(sum(map(int, input().split())))", "1 2 39\n")
    assert outcome == Outcome(b"42\n", 0)
    assert _run(sandbox, "import sys; sys.exit(3)").returncode == 3
    assert _run(sandbox, "open('/tmp/x', 'w').write('kept'); print(open('/tmp/x').read())").output == b"kept\n"
    assert _run(sandbox, "import os; print(os.path.exists('/tmp/x'))").output == b"False\n"


class _EndsWhenAsked(subprocess.Popen[bytes]):
    """Writes and ends between the wait for output and the question whether it has ended: the worst moment."""

    asked = False

    def poll(self) -> int | None:
        if not self.asked and self.stdin is not None:
            self.asked = True
            self.stdin.close()
            self.wait(60)
        return super().poll()


@pytest.mark.parametrize(("written", "outcome"), [
    (b"late", Outcome(b"late", 0)),
    (b"0123456789", Outcome(b"0123456789", 0)),
    (b"0123456789a", Outcome(b"0123456789", 0, "output")),
])
def test_what_is_written_just_before_the_end_is_read(written: bytes, outcome: Outcome) -> None:
    begun, begins = os.pipe()
    os.write(begins, b"b")
    try:
        with _EndsWhenAsked(["sh", "-c", f"read x; printf {written.decode()}"], stdin=subprocess.PIPE,
                            stdout=subprocess.PIPE, start_new_session=True) as process:
            assert _supervise(process, replace(LIMITS, output_bytes=10), begun) == outcome
            assert process.asked
    finally:
        os.close(begun)
        os.close(begins)


# -- programs that mean harm -------------------------------------------------------------------------------------------


@needs_sandbox
def test_fork_bomb_is_bounded_and_leaves_nothing(sandbox: Sandbox) -> None:
    # The number it reaches shows the limit; the mark is an argument, so it can be looked for afterwards.
    outcome = _run(sandbox, """
import os, sys, time
made = 0
try:
    while made < 200:
        if os.fork() == 0:
            os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(600)", "mark-of-the-fork-bomb"])
        made += 1
except OSError:
    pass
print(made)
""")
    assert not outcome.ended and 0 < int(outcome.output) < LIMITS.processes
    _wait(lambda: not _left("mark-of-the-fork-bomb"))  # the kernel ends them after it has ended their namespace


@needs_sandbox
def test_fork_bomb_without_end_ends_with_its_time(sandbox: Sandbox) -> None:
    began = time.monotonic()
    outcome = _run(sandbox, """
import os
while True:
    try:
        os.fork()
    except OSError:
        pass
""", wall_s=2.0)
    assert outcome.ended or outcome.returncode
    assert time.monotonic() - began < 45.0


@needs_sandbox
@pytest.mark.parametrize("program", [
    "x = bytearray(1 << 30)", "x = []\nwhile True: x.append(bytearray(1 << 20))",
    # Each below the limit of one process, together above it.
    """
import os, time
for _ in range(5):
    if os.fork() == 0:
        x = bytearray(100 << 20)
        for i in range(0, len(x), 4096): x[i] = 1
        time.sleep(600)
time.sleep(600)
""", "import os\nos.memfd_create('x')"])
def test_memory_hog_is_ended(sandbox: Sandbox, program: str) -> None:
    began = time.monotonic()
    outcome = _run(sandbox, program)
    assert outcome.ended == "memory" or (not outcome.ended and outcome.returncode != 0)
    assert time.monotonic() - began < 45.0


@needs_sandbox
def test_shared_memory_that_no_process_has_mapped_is_refused(sandbox: Sandbox) -> None:
    assert _run(sandbox, """
import ctypes
print(ctypes.CDLL(None, use_errno=True).shmget(0, 1 << 30, 0o1600), ctypes.get_errno())
""").output.split()[0] == b"-1"


@needs_sandbox
def test_endless_output_is_cut(sandbox: Sandbox) -> None:
    began = time.monotonic()
    outcome = _run(sandbox, "while True: print('x' * 1000)")
    assert outcome.ended == "output" and len(outcome.output) == LIMITS.output_bytes
    assert time.monotonic() - began < 45.0


@needs_sandbox
def test_endless_output_on_standard_error_and_huge_exit_texts_cost_nothing(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, "import sys; print('x' * 5_000_000, file=sys.stderr); sys.exit('y' * 5_000_000)")
    assert outcome == Outcome(b"", 1)


@needs_sandbox
@pytest.mark.parametrize("program", [
    "while True: pass", "import time; time.sleep(600)",
    "import signal, time\nfor s in range(1, 65):\n  try: signal.signal(s, signal.SIG_IGN)\n  except (OSError, "
    "ValueError): pass\ntime.sleep(600)"])
def test_program_that_does_not_end_is_ended(sandbox: Sandbox, program: str) -> None:
    began = time.monotonic()
    assert _run(sandbox, program, wall_s=1.0).ended == "time"
    assert time.monotonic() - began < 45.0


@needs_sandbox
def test_cpu_time_is_limited(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, "while True: pass", cpu_s=1, wall_s=30.0)
    assert not outcome.ended and outcome.returncode != 0


@needs_sandbox
def test_nothing_can_be_written_but_bounded_temporary_files(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, """
import os
for path in ("/x", "/usr/x", "/usr/bin/x", "/dev/x", "/dev/shm/x", "/sandbox/x", "/sandbox/main.py", "/proc/x",
             "/etc/x"):
    try:
        open(path, "w").write("x")
        print("wrote", path)
    except OSError:
        pass
size = 0
try:
    for i in range(20):
        with open(f"/tmp/{i}", "wb") as f:
            size += f.write(bytes(1 << 20))
except OSError:
    pass
print(size >> 20)
""")
    assert outcome.output.split() == [b"4"]


@needs_sandbox
def test_attributes_of_files_are_refused(sandbox: Sandbox) -> None:
    """The kernel holds 64 KiB for each, which no size of a file system counts."""
    outcome = _run(sandbox, """
import os
open("/tmp/a", "w").close()
fd = os.open("/tmp/a", os.O_RDWR)
for call in (lambda: os.setxattr("/tmp/a", "user.a", b"x"), lambda: os.setxattr(fd, "user.a", b"x"),
             lambda: os.setxattr("/tmp/a", "user.a", b"x", follow_symlinks=False)):
    try:
        call()
        print("set")
    except PermissionError:
        print("refused")
""")
    assert outcome.output.split() == [b"refused"] * 3


@needs_sandbox
@pytest.mark.parametrize("make", ["os.close(os.open(f'/tmp/{n}', os.O_CREAT))", "os.mkdir(f'/tmp/{n}')",
                                  "os.symlink('x', f'/tmp/{n}')",
                                  "n or open('/tmp/x', 'w')\n    os.link('/tmp/x', f'/tmp/{n}')"])
def test_empty_files_count_as_memory(sandbox: Sandbox, make: str) -> None:
    outcome = _run(sandbox, f"""
import os
for n in range(1_000_000):
    {make}
print("made")
""", memory_mb=64, cpu_s=60, wall_s=60.0)
    assert outcome.ended == "memory" and not outcome.output


@needs_sandbox
def test_sockets_keep_the_usual_size_of_their_buffers(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, """
import socket
a, b = socket.socketpair()
for option in (socket.SO_SNDBUF, socket.SO_RCVBUF, 32, 33):
    try:
        a.setsockopt(socket.SOL_SOCKET, option, 1 << 30)
        print("set")
    except PermissionError:
        print("refused")
a.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
""")
    assert outcome.returncode == 0 and outcome.output.split() == [b"refused"] * 4


def test_sockets_of_processes_count_as_memory() -> None:
    """A process of 10 MiB here, with 200 sockets of 208 KiB each."""
    pairs = [socket.socketpair() for _ in range(100)]
    process = start_child([sys.executable, "-S", "-c", "print(end='x', flush=True); import time; time.sleep(600)"],
                          pass_fds=[s.fileno() for pair in pairs for s in pair], stdout=subprocess.PIPE)
    assert process.stdout is not None
    try:
        before = held_memory(process.pid, started=False)
        assert process.stdout.read(1) == b"x" and before == 0, "it has no children"
        assert held_memory(os.getpid(), started=False) >= 200 * (208 << 10)
    finally:
        process.kill()
        process.communicate()
        for one in (s for pair in pairs for s in pair):
            one.close()


@needs_sandbox
def test_network_is_not_there(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        outcome = _run(sandbox, f"""
import socket
for address in (("127.0.0.1", {port}), ("1.1.1.1", 53)):
    try:
        socket.create_connection(address, 1)
        print("connected")
    except OSError:
        print("refused")
print(sum(":" in line for line in open("/proc/net/dev")))
""")
    assert outcome.output.split() == [b"refused", b"refused", b"1"]


@needs_sandbox
def test_sockets_are_pairs_of_one_family_only(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, """
import socket
for family, kind in ((40, 1), (16, 3), (17, 3), (38, 5), (1, 1), (2, 1), (10, 1)):  # vsock, netlink, packet, alg, …
    try:
        socket.socket(family, kind).close()
        print("made")
    except PermissionError:
        print("refused")
    except OSError as e:
        print(e)
print(all(s.fileno() > 0 for s in socket.socketpair()))
""")
    assert outcome.output.split() == [b"refused"] * 4 + [b"made"] + [b"refused"] * 2 + [b"True"]


@needs_sandbox
def test_other_processes_cannot_be_seen_or_killed(sandbox: Sandbox) -> None:
    outcome = _run(sandbox, f"""
import os, signal
seen = [p for p in os.listdir("/proc") if p.isdigit()]
print(len(seen) <= 3)
for pid in ({os.getpid()}, {os.getppid()}):
    try:
        os.kill(pid, signal.SIGKILL)
        print("killed")
    except OSError:
        print("refused")
try:
    os.kill(-1, signal.SIGKILL)  # all that it may signal
except OSError:
    pass
print("alive")
""")
    assert outcome.output.split() == [b"True", b"refused", b"refused", b"alive"]
    assert psutil.pid_exists(os.getpid())


@needs_sandbox
def test_program_that_kills_its_init_ends_only_itself(sandbox: Sandbox) -> None:
    began = time.monotonic()
    _run(sandbox, "import os, signal\nos.kill(1, signal.SIGKILL)\nos.kill(os.getppid(), signal.SIGKILL)")
    assert time.monotonic() - began < 45.0
    assert _run(sandbox, "print('next')").output == b"next\n"


@needs_sandbox
def test_secrets_homes_and_the_environment_cannot_be_read(sandbox: Sandbox, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "in the environment")
    secret = tmp_path / "token"
    secret.write_text("in a file")
    secret.chmod(0o644)
    outcome = _run(sandbox, f"""
import glob, os
print(sorted(os.environ))
for path in ({str(secret)!r}, {__file__!r}, "/root", "/home", "/etc/passwd", "/etc/shadow", "/proc/1/environ", "/sys"):
    try:
        print("read", path, (os.listdir if os.path.isdir(path) else lambda p: open(p).read())(path))
    except OSError:
        pass
os.symlink("/proc/1/root", "/tmp/root")
os.symlink("../../../../../../.." + {str(secret)!r}, "/tmp/link")
for path in ("/tmp/root" + {str(secret)!r}, "/tmp/link", "/proc/self/root" + {str(secret)!r},
             "/proc/self/cwd/../.." + {str(secret)!r}):
    try:
        print("read", open(path).read())
    except OSError:
        pass
""")
    assert outcome.returncode == 0
    environment, *reads = outcome.output.decode().splitlines()
    assert "A_SECRET" not in environment and "in the environment" not in outcome.output.decode()
    assert all(line.startswith("read /proc/1/environ") for line in reads), reads  # of the sandbox's own init


@needs_sandbox
def test_children_do_not_outlive_their_program(sandbox: Sandbox) -> None:
    began = time.monotonic()
    outcome = _run(sandbox, """
import os, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "mark-of-the-sleeper"], start_new_session=True)
print("done", flush=True)
""")
    assert outcome.output == b"done\n"
    _wait(lambda: not _left("mark-of-the-sleeper"))
    assert time.monotonic() - began < 45.0


@needs_sandbox
@pytest.mark.parametrize("call", ["unshare(0x10000000)", "ptrace(0, 0, 0, 0)", "mount(0, b'/tmp', b'tmpfs', 0, 0)"])
def test_rights_cannot_be_got_back(sandbox: Sandbox, call: str) -> None:
    assert _run(sandbox, f"import ctypes; print(ctypes.CDLL(None).{call})").output == b"-1\n"


@needs_sandbox
def test_programs_end_when_their_owner_is_killed(tmp_path: Path) -> None:
    owner = subprocess.Popen([sys.executable, "-c", """
from elastic_rl.rewards.sandbox import Limits, Sandbox
sandbox = Sandbox()
print("ready", flush=True)
sandbox.run({"main.py": b"import subprocess, sys\\nsubprocess.run([sys.executable, '-c', "
             b"'import time; time.sleep(300)', 'mark-of-the-orphan'])"}, "main.py", b"", Limits(wall_s=300.0))
"""], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"ready\n"
        _wait(lambda: bool([p for p in _left("mark-of-the-orphan") if "-c" in _command(p)]))
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait(60)
    _wait(lambda: not _left("mark-of-the-orphan"))


def _wait(holds: object) -> None:
    end = time.monotonic() + 15.0
    while not holds():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.05)


@needs_sandbox
def test_sandbox_that_ends_before_its_program_is_a_failure_and_no_outcome(tmp_path: Path) -> None:
    broken, program = tmp_path / "broken", tmp_path / "bwrap"
    program.write_text(f"#!/bin/sh\ntest -e {broken} && exit 1\nexec {find_bubblewrap()} \"$@\"\n")
    program.chmod(0o755)
    for folder in (tmp_path, *tmp_path.parents):  # a sandbox of root is started as another user
        if folder.is_relative_to(tempfile.gettempdir()) and not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    sandbox = Sandbox(program=str(program))
    assert _run(sandbox, "exit(1)").returncode == 1
    broken.touch()
    with pytest.raises(PluginFailed, match="before it began the program"):
        _run(sandbox, "print(1)")
    with pytest.raises(PluginFailed, match="before it began the program"):
        sandbox.run({"main.py": b"print(1)"}, "main.py", b"", replace(LIMITS, file_mb=1 << 60))


# -- what cannot run ---------------------------------------------------------------------------------------------------


def test_missing_bubblewrap_is_a_wrong_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("elastic_rl.rewards.sandbox.find_bubblewrap", lambda: "")
    with pytest.raises(ConfigError, match="apt-get install bubblewrap"):
        make_reward("code", {})


def test_bubblewrap_that_does_not_work_is_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="cannot run Python"):
        make_reward("code", {"bwrap": "/bin/false"})
    if find_bubblewrap():
        with pytest.raises(ConfigError, match="there is no such program"):
            make_reward("code", {"python": "/no/such/python"})


@needs_sandbox
def test_limits_within_which_nothing_runs_are_a_wrong_setting() -> None:
    with pytest.raises(ConfigError, match="cannot run Python"):
        Sandbox(limits=replace(LIMITS, file_mb=1 << 60))
    with pytest.raises(ConfigError, match="cannot run Python"):
        Sandbox(limits=replace(LIMITS, memory_mb=1))


@pytest.mark.parametrize("option", ["memory_mb", "file_mb"])
def test_limits_above_what_the_kernel_holds_are_refused(option: str) -> None:
    with pytest.raises(ConfigError, match=option):
        make_reward("code", {option: 10**13})


def test_filter_is_made_for_known_machines_only() -> None:
    assert len(syscall_filter("x86_64")) == len(syscall_filter("aarch64")) and not len(syscall_filter("aarch64")) % 8
    with pytest.raises(ConfigError, match="riscv64"):
        syscall_filter("riscv64")


# -- the reward --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "program"), [
    ("```python\na\n```\nand\n```py\nb\n```", "b\n"), ("print(1)", "print(1)"), ("```\nc\n```", "c\n"),
    ("```cpp\nint main\n```", ""), ("", ""), (" \n ", ""), ("```python\nno end", ""),
    ("<think>```python\na\n```</think>", ""), ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
    ("```python title=x\nd\n```\n```bash\nls\n```", "d\n"), ("x" * 300_000, ""),
    ("```python\na\n```\nOutput:\n```\n1\n```", "a\n"), ("```\na\n```\n```\nb\n```", "b\n"),
    ("1. So:\n\n   ```python\n   if a:\n     b\n   ```", "if a:\n  b\n"),
    ("````python\na\n```\nb\n````", "a\n```\nb\n"), ("~~~py\na\n~~~", "a\n"),
    ("```python3.11\na\n```", "a\n"), ("```{.python}\na\n```", "a\n"),
    ("```pycon\n>>> a\n```", ""), ("``` Python\r\na\r\n```\r\n", "a\r\n"), ("Use ```a```.", ""),
    ("```python\na\n```\n```x``` is wrong.", "a\n"), ("```x``` is wrong.\n```python\na\n```", "a\n"),
    ("```python\na\n# ...\n```python\nb\n```", "b\n"), ("```\nno end\n```python\nb\n```\n", "b\n"),
    ("````md\n```python\na\n```\n````", ""), ("<answer>\n```python\na\n```</answer>", "a\n"),
    ("```python\na\n```. It prints a.", "a\n"), ("```python\na\n```py" + " a==b" * 200 + " !", "a\n"),
    ("```python\na\n```\n```python\n\n```", "a\n"), ("```python\n```", ""), ("```python\na\n```\n```py\n```", "a\n"),
    ("- ```python\n  if a:\n    b\n  ```\n- So", "if a:\n  b\n"), ("1. ```python\n   a\n   ```", "a\n"),
    ("```python\nx = \"\"\"\n- ```\n\"\"\"\n```", "x = \"\"\"\n- ```\n\"\"\"\n"),
    ('```python\n"""\n    ```\n    x\n    ```\n"""\n```', '"""\n    ```\n    x\n    ```\n"""\n')])
def test_program_is_the_last_python_block_of_the_answer(text: str, program: str) -> None:
    assert program_of(text) == program


def _rewards(options: dict[str, object], tests: object, *texts: str) -> list[tuple[float, float]]:
    reward = make_reward("code", options)
    try:
        found = asyncio.run(reward(Prompt((1,), metadata={"tests": tests}), [  # type: ignore[arg-type]
            Sample((), text=text) for text in texts]))
        return [(r.value, r.parts["passed"]) for r in found]
    finally:
        close_reward(reward)


@needs_sandbox
def test_program_is_rewarded_for_its_output() -> None:
    tests = [{"stdin": "1 2", "stdout": "3"}, {"stdin": "5 5", "stdout": "10\n"}]
    add, constant = "print(sum(map(int, input().split())), ' ')", "print(3)"
    assert _rewards({}, tests, add, constant, "", "1/0", "print(3); exit(1)") == [
        (1.0, 1.0), (0.0, 0.5), (0.0, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert _rewards({"partial": True}, tests, constant) == [(0.5, 0.5)]


@needs_sandbox
def test_program_is_rewarded_when_the_test_code_ends_after_it() -> None:
    tests = [{"code": "assert f(2) == 4"}]
    assert _rewards({}, tests, "def f(x):\n    print('noise')\n    return 2 * x", "def f(x): return x",
                    "import os; os._exit(0)", "import sys; sys.exit(0)", "def f(x): raise SystemExit(0)",
                    "import os; os.write(1, b'x' * 40)") == [(1.0, 1.0), *[(0.0, 0.0)] * 5]


@needs_sandbox
@pytest.mark.parametrize(("program", "test"), [
    ("from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass P:\n    x: int",
     "assert P(1).x == 1"),
    ("import typing\nclass P:\n    x: 'P'\ndef hints(): return typing.get_type_hints(P)", "assert hints() == {'x': P}"),
    ("import pickle\nclass P: ...\ndef copied(): return pickle.loads(pickle.dumps(P()))", "assert type(copied()) is P"),
    ("import inspect\ndef source(): return inspect.getsource(source)", "assert 'getsource' in source()"),
    ("def f(): return 1", "from program import f\nimport program\nassert f() == 1 and program.f is f"),
    ("n = 0\ndef count():\n    global n\n    n += 1", "count(); assert n == 1"),
    ("x = 1", "from __future__ import annotations\nfrom dataclasses import dataclass\n@dataclass\nclass Q:\n    y: int"
     "\nassert Q(x).y == 1")])
def test_program_under_test_code_is_a_module_that_python_finds_by_its_name(program: str, test: str) -> None:
    assert _rewards({}, [{"code": test}], program) == [(1.0, 1.0)]


@needs_sandbox
def test_key_of_a_test_that_is_null_is_not_there() -> None:
    """As in a row of Parquet, whose tests have all keys that others have."""
    filled = {"code": None, "stdin": None, "stdout": None}
    tests = [{**filled, "stdin": "2", "stdout": "2"}, {**filled, "code": "assert x"}, {**filled, "stdout": "3"},
             {**filled, "stdin": 5, "stdout": 5}]
    assert _rewards({"partial": True}, tests, "import sys\nx = 1\nprint(sys.stdin.read() or 3)") == [(1.0, 1.0)]


@needs_sandbox
@pytest.mark.parametrize("tests", [None, [], [{}], [{"stdin": "1"}], "x", [{"code": 1}], [{"code": 1, "stdout": "1"}],
                                   [{"stdin": "1", "stdout": None}], [{"stdout": True}], [None]])
def test_prompt_without_tests_is_a_failure_of_the_group(tests: object) -> None:
    with pytest.raises(PluginFailed, match='metadata\\["tests"\\]'):
        _rewards({}, tests, "print(1)")
