"""Calls of tools in what a policy wrote, by SGLang's parsers of the formats of many models.

A policy writes anything, by chance too: nothing that it writes may raise, or take long. The parsers of SGLang are for
servers, which answer one request with an error; so what they raise is caught here, the text is bounded, and those whose
regular expressions take more than quadratic time are refused.
"""

from __future__ import annotations

import ast
import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from elastic_rl.engine.sglang import sglang_cpu
from elastic_rl.errors import ConfigError
from elastic_rl.plugins.user_code import describe, did_you_mean

MAX_TEXT = 16_384
"""Characters at the end of a turn that are looked through for calls; the parsers take up to a second for such a text
that was made to be slow, which grows with its square."""
_PYTHONIC = "pythonic"
_SLOW = ("dots", "hunyuan", "interns1")
"""Parsers with an expression like ``\\s*(.*?)\\s*``: spaces without what must follow take them minutes."""
_NO_CALL = "It is 5."
_LIST = re.compile(r"\[\s*[A-Za-z_]\w*\(")
_PYTHON_TAGS = re.compile(r"<\|python_(?:start|end)\|>")


@dataclass(frozen=True)
class ToolCall:
    """A call that the policy wants."""

    name: str
    """"" where not even that can be read."""
    arguments: Mapping[str, Any] | None
    """The arguments of the call; None where they are no object of JSON."""


UNREADABLE = ToolCall("", None)
"""What looks like a call, but cannot be read."""


class Calls(Protocol):
    """Finds calls in a turn of the policy."""

    def calls(self, text: str) -> list[ToolCall]:
        """The calls in the text in their order, those that cannot be read among them or last. Raises nothing."""


class ToolParser:
    """Finds calls in one format: SGLang's, or ``pythonic``, for which SGLang's takes exponential time."""

    def __init__(self, name: str, tools: Sequence[tuple[str, str, Mapping[str, Any]]], setting: str) -> None:
        """``tools``: name, description and parameters (JSON schema) of each. Imports SGLang, which takes seconds,
        with stand-ins for what it lacks on a CPU: for a process of its own. Raises ConfigError for an unknown name, and
        for a parser that cannot be used."""
        self._read: Callable[[str], tuple[list[ToolCall], int]]
        self._read = _pythonic if name == _PYTHONIC else _of_sglang(name, tools, setting)

    def calls(self, text: str) -> list[ToolCall]:
        """See ``Calls``."""
        try:
            found, begun = self._read(text[-MAX_TEXT:])
        except Exception:  # whatever a parser raises: AttributeError, TypeError, RecursionError …
            return [UNREADABLE]
        return found + [UNREADABLE] * (begun - len(found))


def _of_sglang(name: str, tools: Sequence[tuple[str, str, Mapping[str, Any]]], setting: str
               ) -> Callable[[str], tuple[list[ToolCall], int]]:
    """Reads a text: the calls, and how many seem to be in it. Raises ConfigError."""
    if sglang_cpu.missing():
        sglang_cpu.install()
    from sglang.srt.entrypoints.openai.protocol import Function, Tool
    from sglang.srt.environ import envs
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    known = sorted(set(FunctionCallParser.ToolCallParserEnum) - set(_SLOW))
    if name not in known:
        why = ("is refused: some texts take it minutes" if name in _SLOW
               else f"is none of SGLang's tool-call parsers{did_you_mean(name, known)}")
        raise ConfigError(f"{setting}={name!r} {why}", hint=f"it has {', '.join(known)}")
    described = [Tool(function=Function(name=tool, description=text, parameters=dict(schema)))
                 for tool, text, schema in tools]
    # Else calls of tools that there are not would be left out, and the policy would not learn of it.
    envs.SGLANG_FORWARD_UNKNOWN_TOOLS.set(True)
    # They log whatever they cannot read, as errors: of a policy that learns to write calls that is each turn. The
    # policy reads that it failed, and the part tool_errors of the reward counts it.
    logging.getLogger("sglang.srt.function_call").setLevel(logging.CRITICAL)

    def read(text: str) -> tuple[list[ToolCall], int]:
        parser = FunctionCallParser(described, name)  # a new one each time: they keep what they have read
        if not parser.has_tool_call(text):
            return [], 0
        begins = getattr(parser.detector, "bot_token", "").strip()
        _, found = parser.parse_non_stream(text)
        return ([ToolCall(item.name or "", _arguments(item.parameters)) for item in found],
                max(1, text.count(begins) if begins else 0))

    try:
        usable = read(_NO_CALL) == ([], 0)
    except Exception as e:  # as of one that needs what only a server has
        raise ConfigError(f"{setting}={name!r} cannot be used: {describe(e)}", hint="name another format") from e
    if not usable:
        raise ConfigError(f"{setting}={name!r} takes any text for a call, so no episode would end",
                          hint="name another format")
    return read


def _arguments(given: str | None) -> dict[str, Any] | None:
    try:
        found = json.loads(given or "{}")
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _pythonic(text: str) -> tuple[list[ToolCall], int]:
    """``[add(a=1, b=2), …]``, as Llama 4 writes it; see ``_of_sglang``."""
    text = _PYTHON_TAGS.sub("", text)
    if (begin := _LIST.search(text)) is None:
        return [], 0
    try:
        found = ast.parse(text[begin.start():text.rfind("]") + 1], mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return [], 1
    return [_pythonic_call(one) for one in found.elts] if isinstance(found, ast.List) else [], 1


def _pythonic_call(node: ast.expr) -> ToolCall:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
        return UNREADABLE
    try:
        values = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in node.keywords}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return ToolCall(node.func.id, None)
    by_name = not node.args and all(keyword.arg for keyword in node.keywords)
    return ToolCall(node.func.id, values if by_name else None)
