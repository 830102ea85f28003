"""Functions that a policy calls: how they are described, called and answered, and what they may not do."""

from __future__ import annotations

import ast
import asyncio
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from elastic_rl.data.samples import Prompt
from elastic_rl.environments.base import Message, Observation
from elastic_rl.environments.calculator import _BINARY, calculator
from elastic_rl.environments.registry import make_environment
from elastic_rl.environments.tool_parser import UNREADABLE, ToolCall
from elastic_rl.environments.tools import Tool, Tools, ToolsOptions, described, named_tools
from elastic_rl.errors import ConfigError, PluginAway


def add(a: int, b: int = 1) -> int:
    """Adds two numbers."""
    return a + b


async def wait(seconds: float) -> str:
    await asyncio.sleep(seconds)
    return "awake"


def fails(text: str) -> str:
    raise RuntimeError(f"no {text}")


class Inner(BaseModel):
    secret: int


def times_out() -> str:
    raise TimeoutError("the socket's own")


def leaves() -> str:
    raise SystemExit(2)


def validates() -> int:
    return Inner(secret="x").secret  # type: ignore[arg-type]


async def cancels() -> str:
    raise asyncio.CancelledError


RELEASED = threading.Event()


def hangs() -> str:
    RELEASED.wait(60)
    return "over"


def large() -> list[int]:
    assert threading.current_thread() is not threading.main_thread()
    return list(range(10_000))


def measures() -> dict[str, Any]:
    return {"n": np.int64(3), "ok": np.bool_(True), "x": np.array([0.5]), "of": Path("a")}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class PlainCalls:
    """Reads calls as Qwen's models write them. SGLang's parsers are for a process of their own."""

    def calls(self, text: str) -> list[ToolCall]:
        found = [json.loads(part.partition("</tool_call>")[0]) for part in text.split("<tool_call>")[1:]]
        return [ToolCall(one["name"], one["arguments"]) if isinstance(one, dict) else UNREADABLE for one in found]


NAMES = ["calculator", *(f"{__name__}:{name}" for name in (
    "add", "wait", "fails", "times_out", "leaves", "validates", "cancels", "hangs", "large", "measures"))]


def make(**options: Any) -> Tools:
    return Tools(named_tools(NAMES, "tools"), PlainCalls(), ToolsOptions(tools=NAMES, **options))


def step(text: str, **options: Any) -> Observation:
    async def one() -> Observation:
        return await make(**options)(Prompt(()), 0).step(text)
    return asyncio.run(one())


def test_results_of_the_calls_of_a_turn_are_read_in_order() -> None:
    found = step("I need " + call("add", a=2, b=3) + call("calculator", expression="6*7") + call("wait", seconds=0))
    assert found.messages == (
        Message("tool", "5", "add", "000100000"), Message("tool", "42", "calculator", "000100001"),
        Message("tool", "awake", "wait", "000100002"))
    assert not found.done and found.parts == {"tool_calls": 3.0, "tool_errors": 0.0}


def test_result_is_written_as_json() -> None:
    [message] = step(call("measures")).messages
    assert json.loads(message.content) == {"n": 3, "ok": True, "x": [0.5], "of": "a"}


def test_turn_without_a_call_ends_the_episode() -> None:
    assert step("It is 5.") == Observation(done=True)


@pytest.mark.parametrize(("text", "said"), [
    (call("add", a="two"), "error: wrong arguments: a: Input should be a valid integer"),
    (call("add"), "error: wrong arguments: a: Missing required argument"),
    (call("multiply", a=1), "error: there is no tool 'multiply', only add, calculator, cancels, fails, "),
    (call("fails", text="luck"), "error: RuntimeError: no luck$"), (call("leaves"), "error: SystemExit: 2$"),
    (call("times_out"), "error: TimeoutError: the socket's own$"), (call("cancels"), "error: CancelledError$"),
    (call("validates"), "error: ValidationError: 1 validation error for Inner"),
    (call("wait", seconds=30), "error: wait took longer than 0.2 s$"),
    ("<tool_call>5", "error: the call cannot be read$"),
    (call("calculator", expression="__import__('os')"), "error: ValueError: it is no arithmetic expression")])
def test_call_that_fails_is_answered_with_what_is_wrong(text: str, said: str) -> None:
    found = step(text, timeout_s=0.2)
    text = found.messages[0].content
    assert text == said[:-1] if said.endswith("$") else text.startswith(said)
    assert found.parts["tool_errors"] == 1.0 and not found.done


def test_tool_whose_calls_hang_is_away_and_holds_up_no_other() -> None:
    """The policy reads that single calls take too long, but learns nothing of a tool that answers nobody."""
    RELEASED.clear()

    async def play() -> None:
        tools = make(timeout_s=0.2, threads=2)

        async def one(text: str) -> Any:
            return await tools(Prompt(()), 0).step(text)

        found = await asyncio.gather(*(one(call("hangs")) for _ in range(5)), return_exceptions=True)
        assert sorted(type(f).__name__ for f in found) == ["Observation"] * 2 + ["PluginAway"] * 3
        with pytest.raises(PluginAway, match="all of its 2 threads") as away:
            await one(call("hangs"))
        assert not away.value.replace
        others = await one(call("add", a=1) + call("calculator", expression="1+1") + call("fails", text="x"))
        assert [m.content for m in others.messages] == ["2", "2", "error: RuntimeError: no x"]
        assert await asyncio.to_thread(lambda: 5) == 5
        RELEASED.set()
        while True:
            try:
                assert (await one(call("hangs"))).messages[0].content == "over"
                break
            except PluginAway:
                await asyncio.sleep(0.01)

    asyncio.run(play())


def test_time_of_a_call_begins_with_the_call() -> None:
    found = step(call("add", a=1) * 8, threads=1, timeout_s=5.0)
    assert [m.content for m in found.messages] == ["2"] * 8
    assert step(call("large")).messages[0].content.startswith("[0, 1, 2")


def test_calls_and_results_are_bounded() -> None:
    found = step(call("add", a=1) * 3, max_calls=2)
    assert [m.content for m in found.messages] == ["2", "2", "error: at most 2 calls at once"]
    assert step(call("calculator", expression="9**500"), max_result_characters=5).messages[0].content == str(9**500)[:5]


@pytest.mark.parametrize(("options", "named"), [
    ({"tools": "calculator"}, r"write \[a, b\], or \[a\] for a single one"), ({"tools": ["abacus"]}, "abacus"),
    ({"tools": []}, "at least 1"),
    ({"tools": ["calculator", "calculator"]}, "two of one name"), ({"tool": 1}, "no such option")])
def test_wrong_options_are_named(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        make_environment("tools", options, None)  # type: ignore[arg-type]


def test_tools_are_described_for_chat_templates() -> None:
    [found] = described([add])
    assert found["function"]["name"] == "add" and found["function"]["description"] == "Adds two numbers."
    assert found["function"]["parameters"]["required"] == ["a"]

    def positional(a: int, /) -> int:
        return a

    def untyped(a, b: int):  # type: ignore[no-untyped-def]
        return a

    def calls(f: Callable[[int], int]) -> int:
        return f(1)

    def unknown(a: Missing) -> int:  # type: ignore[name-defined]  # noqa: F821
        return 1

    for function, named in ((positional, "without a name"), (untyped, "parameters a of"),
                            (calls, "cannot be described"), (unknown, "cannot be described")):
        with pytest.raises(ConfigError, match=named):
            Tool.of(function)


@given(st.recursive(st.integers(0, 99).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(
    lambda parts: f"({parts[0]} {parts[1]} {parts[2]})"), max_leaves=8))
def test_calculator_computes(expression: str) -> None:
    assert calculator(expression) == str(eval(expression))  # numbers and operators that were generated above


@pytest.mark.parametrize("expression", [
    "9**9**9", "2**(10**10)", "*".join(["(10**999)"] * 9), "1e300*1e300", "(10**999)**1000", "1e999", "-1e999",
    "'a'*9", "True+1", "x", "f()", "[1]", "1;2", "", "(" * 200 + "1", "1e400*1", "1/0", "(-1)**0.5", "1" * 600])
def test_calculator_refuses_what_is_no_arithmetic_or_too_large(expression: str) -> None:
    with pytest.raises(ValueError):
        calculator(expression)


def test_calculator_computes_no_power_that_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[int] = []

    def power(first: Any, second: Any) -> Any:
        computed.append(max(1, first).bit_length() * second)
        return first ** second

    monkeypatch.setitem(_BINARY, ast.Pow, power)
    assert calculator("2**1000") == str(2**1000)
    for expression in ("(10**999)**1000", "9**9**9", "2**13001"):
        with pytest.raises(ValueError, match="too large"):
            calculator(expression)
    assert max(computed) <= 13_000
