"""The reward ``code``: the program in a response is run against the prompt's tests, in a sandbox."""

from __future__ import annotations

import asyncio
import re
import secrets
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.numbers import number_text
from elastic_rl.data.samples import Prompt, Sample
from elastic_rl.errors import PluginFailed
from elastic_rl.plugins.worker_pool import MAX_MEMORY_MB
from elastic_rl.rewards.base import Reward, RewardContext, rounds
from elastic_rl.rewards.sandbox import Limits, Sandbox

_FENCE = re.compile(r"([ \t]*(?:(?:[-*+]|\d{1,9}[.)])[ \t]+)?)(`{3,}(?=[^`]*$)|~{3,})[ \t]*(.*)")
"""A line that begins or ends a block of Markdown: its indentation, with the mark of a list item if it begins one, its
fence, and what follows it. What has backticks before and behind it is code within a line."""
_INFO = re.compile(r"\{?\.?\w\S*(?:[ \t]+[^\s=]+=\S*)*\s*$")
"""What follows a fence that begins a block, not one that ends one: a language, with attributes or without."""
_PYTHON = re.compile(r"\{?\.?py(thon)?[\d.]*(?![\w+#-])", re.IGNORECASE)
"""What follows the fence of a Python block: ``python``, ``py``, ``python3.11`` or ``{.python}``, with attributes or
without."""
_NEARER = 4
"""Columns: a fence that is indented by so many more than the block's first one is a line of the program."""
_THINK_END = "</think>"
_START_S = 1.0
"""What the start and the end of a sandbox take on a busy machine."""
_MAX_PROGRAM = 1 << 18
"""Characters of a program."""
_CALLER = """
import os, sys
mark = sys.stdin.buffer.readline()
answers, nothing = os.dup(1), os.open("/dev/null", os.O_RDWR)
os.dup2(nothing, 0), os.dup2(nothing, 1)
import program
with open(os.path.dirname(__file__) + "/test.py", encoding="utf-8") as file:
    exec(compile(file.read(), "test.py", "exec", dont_inherit=True), vars(program))
os.write(answers, mark)
"""
"""Imports a program and then runs a test in its scope. Dataclasses, type hints and pickle look for the module of a
class in ``sys.modules``, by its name. Only the end of the test writes the mark: a program that ends the process with
success before has not passed."""


class CodeOptions(Options):
    partial: bool = False
    """Whether the reward is the fraction of the tests that pass; else it is 1 if all pass, and 0 if not."""
    max_tests: Annotated[int, Field(ge=1, le=1000)] = 20
    """Number of tests of a prompt that are run, the first ones."""
    parallel: Annotated[int, Field(ge=1, le=256)] = 2
    """Number of programs that run at once."""
    wall_s: Annotated[float, Field(gt=0, le=600)] = 6.0
    """Seconds that a program may take for one test."""
    cpu_s: Annotated[int, Field(ge=1, le=600)] = 4
    """Seconds of CPU that each of its processes may use."""
    memory_mb: Annotated[int, Field(ge=64, le=MAX_MEMORY_MB)] = 512
    """Memory in MiB: address space of each process, and resident memory of all together."""
    processes: Annotated[int, Field(ge=2, le=1024)] = 16
    """Processes and threads of a program at once, with the first one."""
    file_mb: Annotated[int, Field(ge=1, le=MAX_MEMORY_MB)] = 16
    """Size in MiB of the folder for temporary files, the only one that it can write to."""
    output_kb: Annotated[int, Field(ge=1, le=65_536)] = 64
    """Output in KiB. What writes more has failed."""
    python: str = ""
    """Path of the interpreter; else the one of the run where the sandbox can see it, else the system's."""
    bwrap: str = ""
    """Path of bubblewrap; else it is looked for on PATH."""


class Code:
    """Runs the program in each response (``program_of``) against ``metadata["tests"]``, a list. A test is ``{"stdin":
    TEXT, "stdout": TEXT}``, where no ``stdin`` is an empty one: the output must be the same but for white space at the
    ends of lines and of the output. Or it is ``{"code": TEXT}``: Python that runs in the program's scope and must not
    raise."""

    def __init__(self, options: Mapping[str, Any], context: RewardContext) -> None:
        """Raises ConfigError, also where no sandbox works."""
        self._options = chosen = read_options(CodeOptions, options, of="the reward 'code'", setting=context.setting)
        self._limits = Limits(wall_s=chosen.wall_s, cpu_s=chosen.cpu_s, memory_mb=chosen.memory_mb, processes=
                              chosen.processes, file_mb=chosen.file_mb, output_bytes=chosen.output_kb << 10)
        self._sandbox = Sandbox(program=chosen.bwrap, python=chosen.python, limits=self._limits)
        self._threads = ThreadPoolExecutor(chosen.parallel, "reward-code")
        self._closing = threading.Event()

    async def __call__(self, prompt: Prompt, samples: Sequence[Sample]) -> list[Reward]:
        tests = _tests(prompt)[:self._options.max_tests]
        given_up = threading.Event()
        try:
            return list(await asyncio.gather(*(asyncio.wrap_future(
                self._threads.submit(self._one, sample.text, tests, given_up)) for sample in samples)))
        finally:
            given_up.set()  # nobody waits for what is left

    def least_timeout_s(self, samples: int) -> float:
        chosen = self._options
        return rounds(samples, chosen.parallel) * chosen.max_tests * (chosen.wall_s + _START_S)

    def close(self) -> None:
        self._closing.set()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _one(self, text: str, tests: Sequence[_Test], given_up: threading.Event) -> Reward:
        program = program_of(text)
        if not program:
            return Reward(0.0, {"passed": 0.0, "program": 0.0})
        passed = 0
        for test in tests:
            if given_up.is_set() or self._closing.is_set():
                raise PluginFailed("the run of a program was given up")
            if self._passes(program, test):
                passed += 1
            elif not self._options.partial:
                break
        fraction = passed / len(tests)
        return Reward(fraction if self._options.partial else float(passed == len(tests)),
                      {"passed": fraction, "program": 1.0})

    def _passes(self, program: str, test: _Test) -> bool:
        if test.code is not None:
            mark = secrets.token_hex(16).encode() + b"\n"
            outcome = self._sandbox.run({"main.py": _CALLER.encode(), "program.py": _bytes(program),
                                         "test.py": _bytes(test.code)}, "main.py", mark, self._limits)
            return not outcome.ended and outcome.output == mark
        outcome = self._sandbox.run({"main.py": _bytes(program)}, "main.py", _bytes(test.stdin), self._limits)
        return (not outcome.ended and outcome.returncode == 0
                and _lines(outcome.output.decode("utf-8", "replace")) == _lines(test.stdout))


def program_of(text: str) -> str:
    """The last block of a response behind ``</think>`` that says it is Python, else the last that names no language: a
    program's output is often shown in such a block after it. Empty blocks do not count. Without any block the program
    is all that is there. It is "" for blocks in other languages, for one without an end, and for a program that is too
    long."""
    behind = text.rpartition(_THINK_END)[2]
    blocks = [(info, block) for info, block in _blocks(behind) if block.strip()]
    programs = [block for info, block in blocks if _PYTHON.match(info)] or [block for info, block in blocks if not info]
    if not programs and not any(map(_FENCE.match, behind.splitlines())) and "```" not in behind:
        programs = [behind]
    program = programs[-1] if programs else ""
    return program if len(program) <= _MAX_PROGRAM and program.strip() else ""


def _blocks(text: str) -> Iterator[tuple[str, str]]:
    """The fenced blocks of a text that have an end: what follows the first fence, and the lines between the two without
    the indentation of the first. One in which another one begins has no end: the writer has started again."""
    begin: re.Match[str] | None = None
    block: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if begin is None:
            begin, block = fence, []
        elif fence and fence[2].startswith(begin[2]) and not fence[1].strip() and (
                _columns(fence[1]) < _columns(begin[1]) + _NEARER):
            if _INFO.match(fence[3]):
                begin, block = fence, []
                continue
            yield begin[3].strip(), "".join(block)
            begin = None
        else:
            indentation = len(line) - len(line.lstrip(" \t"))
            block.append(line[min(len(begin[1]), indentation):])


def _columns(indentation: str) -> int:
    return len(indentation.expandtabs(_NEARER))


@dataclass(frozen=True)
class _Test:
    """``code``: what runs in the program's scope; None: its output is compared."""

    code: str | None
    stdin: str = ""
    stdout: str = ""


def _tests(prompt: Prompt) -> list[_Test]:
    """Raises PluginFailed for a prompt without tests."""
    tests = prompt.metadata.get("tests")
    found = [_test(test) for test in tests] if isinstance(tests, list | tuple) else []
    if not found or None in found:
        raise PluginFailed('the prompt has no metadata["tests"], a list of {"stdin": TEXT, "stdout": TEXT} or '
                           '{"code": TEXT}')
    return [test for test in found if test is not None]


def _test(given: Any) -> _Test | None:
    """None for what is no test. A key of null is one that is not there: Arrow fills in those that other tests have."""
    if not isinstance(given, Mapping):
        return None
    code, stdin, stdout = (given.get(key) for key in ("code", "stdin", "stdout"))
    if isinstance(code, str):
        return _Test(code)
    given_in, wanted = _text("" if stdin is None else stdin), _text(stdout)
    return None if code is not None or given_in is None or wanted is None else _Test(None, given_in, wanted)


def _text(value: Any) -> str | None:
    """The text of a text or a number; None of anything else."""
    if isinstance(value, str):
        return value
    return number_text(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]
