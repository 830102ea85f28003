"""SGLang's parsers of tool calls, in a process of their own, which imports SGLang."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from support.tiers import full
from support.waiting import PATIENCE_S


def _call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


FORMATS = {
    "qwen25": _call("add", a=2, b=3), "hermes": _call("add", a=2, b=3),
    "llama3": '{"name": "add", "parameters": {"a": 2, "b": 3}}', "pythonic": "[add(a=2, b=3)]",
    "mistral": '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 2, "b": 3}}]'}
_PARSE = """
import asyncio, json, logging, sys
logging.basicConfig()
from elastic_rl.data.samples import Prompt
from elastic_rl.environments.tool_parser import ToolParser
from elastic_rl.environments.tools import Tools, ToolsOptions, named_tools
from elastic_rl.errors import ConfigError
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
formats, broken = json.load(sys.stdin)
for name, text in formats.items():
    parser = ToolParser(name, [("add", "Adds.", schema)], "parser")
    print(name, [(c.name, dict(c.arguments)) for _ in range(2) for c in parser.calls(text)], parser.calls("It is 5."),
          len(parser.calls(text.replace("add", "subtract"))), parser.calls(text.replace("add", "subtract"))[0].name)
for name, text in broken:
    tools = Tools(named_tools(["calculator"], ""), ToolParser(name, [("calculator", "", schema)], "parser"),
                  ToolsOptions(tools=["calculator"], timeout_s=1))
    found = asyncio.run(tools(Prompt(()), 0).step(text))
    print(found.done, *(m.content for m in found.messages), sep="|")
for name in ("qwen2", "dots", "response_template"):
    try:
        ToolParser(name, [], "parser")
    except ConfigError as e:
        print(e.message)
"""
_PARSE_ANYTHING = """
import random
from elastic_rl.environments.tool_parser import ToolParser
from elastic_rl.errors import ConfigError
ToolParser("qwen25", [], "parser")  # imports SGLang, with stand-ins for what it lacks on a CPU
from sglang.srt.function_call.function_call_parser import FunctionCallParser
schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
rng = random.Random(1)
used = 0
for name in sorted(FunctionCallParser.ToolCallParserEnum):
    try:
        parser = ToolParser(name, [("add", "Adds.", schema)], "parser")
    except ConfigError as e:
        print(name, "refused")
        continue
    used += 1
    begin = getattr(getattr(FunctionCallParser(parser_tools := [], name), "detector", None), "bot_token", "")
    for body in ("5", "null", '"x"', "[1]", '{"name": ["add"]}', '{"name": {}}', "[" * 3000, "{" * 3000, ""):
        for text in (begin + body, begin + "\\n" + body + "\\n</tool_call>", body):
            assert isinstance(parser.calls(text), list)
    for _ in range(50):
        parser.calls(begin + "".join(rng.choices('{}[]":, \\nadd<>|/=5', k=40)))
print(used)
"""
_UNREAD = "error: the call cannot be read"
BROKEN = [
    ("qwen25", "<tool_call>\n{broken", f"False|{_UNREAD}"),
    *(("qwen25", f"<tool_call>\n{body}\n</tool_call>", f"False|{_UNREAD}") for body in ("5", "null", '"x"', "[1]")),
    ("qwen25", _call("calculator", expression="1+1") + "<tool_call>\n{]\n</tool_call>", f"False|2|{_UNREAD}"),
    ("qwen25", _call("abacus", a=1), "False|error: there is no tool 'abacus', only calculator"),
    ("qwen25", '<tool_call>\n{"name": "calculator", "arguments": "1+1"}\n</tool_call>', f"False|{_UNREAD}"),
    ("qwen25", "x" * 40_000 + _call("calculator", expression="6*7"), "False|42"),
    ("qwen25", "It is 5.", "True"),
    ("pythonic", "[calculator(expression='6*7'), abacus(a=1), calculator(5), calculator(expression=f())]",
     f"False|42|error: there is no tool 'abacus', only calculator|{_UNREAD}|{_UNREAD}"),
    ("pythonic", "<|python_start|>[calculator(expression='1')]<|python_end|>", "False|1"),
    ("pythonic", "[calculator(" + "a=1, " * 2000, f"False|{_UNREAD}"), ("pythonic", "[1] is no call", "True")]


def run(program: str, given: object = None) -> list[str]:
    """Lines that a program has printed. None of what the policy wrote is in its log."""
    done = subprocess.run([sys.executable, "-c", program], input=json.dumps(given), text=True, capture_output=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "sglang.srt.function_call" not in done.stderr, "nothing that the policy wrote is in a log"
    return done.stdout.splitlines()


def test_parsers_of_sglang_read_the_formats_of_models() -> None:
    """A call that cannot be read is an error that the policy reads, and ends no episode without a word."""
    lines = run(_PARSE, [FORMATS, [pair[:2] for pair in BROKEN]])
    assert lines[:len(FORMATS)] == [f"{name} {[('add', {'a': 2, 'b': 3})] * 2} [] 1 subtract" for name in FORMATS]
    assert lines[len(FORMATS):-3] == [expected for _, _, expected in BROKEN]
    assert "parser='qwen2' is none of SGLang's tool-call parsers; did you mean 'qwen" in lines[-3]
    assert "parser='dots' is refused" in lines[-2] and "'response_template' cannot be used" in lines[-1]


@full(proved_in="tests/integration/environments/test_sglang_tool_parsers.py",
      why="texts written by chance, and every parser that SGLang has")
def test_no_parser_of_sglang_raises_for_any_text() -> None:
    lines = run(_PARSE_ANYTHING)
    assert {"dots refused", "hunyuan refused", "interns1 refused", "response_template refused"} <= set(lines)
    assert int(lines[-1]) > 30
