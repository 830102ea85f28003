"""The environment ``tools``: the policy may call functions, reads what they return, and ends with a turn without a
call."""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field, PydanticUserError, TypeAdapter, ValidationError, validate_call

from elastic_rl.config.options import Options, read_options
from elastic_rl.data.samples import Prompt
from elastic_rl.environments.base import EnvironmentContext, Message, NewEpisode, Observation
from elastic_rl.environments.calculator import calculator
from elastic_rl.environments.threads import OwnThreads
from elastic_rl.environments.tool_parser import Calls, ToolCall, ToolParser
from elastic_rl.errors import ConfigError, PluginAway
from elastic_rl.plugins.user_code import describe, plain, resolve, text_of
from elastic_rl.runtime.abandonable import CallTookTooLong

log = logging.getLogger(__name__)

TOOLS: dict[str, Callable[..., Any]] = {"calculator": calculator}
"""The built-in tools by name. The name is the function's own. They take microseconds, and run where the episodes do."""
_NAME = 100
"""Characters of a name that the policy gives, at most."""


class ToolsOptions(Options):
    tools: Annotated[list[str], Field(min_length=1, max_length=64)]
    """Functions that the policy may call: ``calculator``, or your own as ``package.module:function``, plain or async,
    with annotated parameters. Its name is what the policy calls it by."""
    parser: str = "qwen25"
    """How the policy writes a call: a name of SGLang's tool-call parsers (``--tool-call-parser``)."""
    timeout_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Seconds that a call may take, from when it begins; then the policy reads that it took too long."""
    threads: Annotated[int, Field(ge=1, le=1024)] = 16
    """Calls of a plain function that run at once, in each replica of the rollout role; further ones wait. While as many
    took too long and still run, the tool counts as away, and the episodes that need it are tried again."""
    max_calls: Annotated[int, Field(ge=1, le=64)] = 8
    """Calls of one turn that are made; further ones are answered with an error."""
    max_result_characters: Annotated[int, Field(ge=1, le=1_000_000)] = 2000
    """Characters of a result that the policy reads."""


@dataclass(frozen=True)
class Tool:
    """A function that the policy may call."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of its arguments, an object."""
    arguments: Callable[..., tuple[tuple[Any, ...], dict[str, Any]]]
    """The positional and named arguments of a call, from those that the policy gives. Raises ValidationError."""
    call: Callable[..., Any]

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Tool:
        """Raises ConfigError for a function whose parameters are not annotated with what JSON can say."""
        name = getattr(function, "__name__", "")
        if not callable(function) or not name.isidentifier():
            raise ConfigError(f"the tool {function!r:.100} is no function with a name")

        @functools.wraps(function)
        def arguments(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
            return args, kwargs

        try:
            untyped = [p.name for p in inspect.signature(function).parameters.values() if p.annotation is p.empty]
            schema = TypeAdapter(function).json_schema()  # type: ignore[arg-type]
            checked = validate_call(arguments)
        except (PydanticUserError, NameError, TypeError, ValueError) as e:
            raise ConfigError(f"the parameters of the tool {name!r} cannot be described: {describe(e)}",
                              hint="annotate them with int, float, str, bool, lists and dictionaries of these") from e
        if untyped:
            raise ConfigError(f"the parameters {', '.join(untyped)} of the tool {name!r} have no annotation",
                              hint="annotate them with int, float, str, bool, lists and dictionaries of these")
        if schema.get("type") != "object":
            raise ConfigError(f"the tool {name!r} has parameters without a name",
                              hint="a policy gives arguments by name: leave out *args and positional-only ones")
        return cls(name, inspect.getdoc(function) or "", schema, checked, function)


class Tools:
    """Begins episodes whose policy may call some tools."""

    examples = ((Message("tool", "4", "calculator", "000000001"),),
                (Message("tool", "4", "calculator", "000000001"), Message("tool", "5", "calculator", "000000002")))
    """See ``NewEpisode``."""

    def __init__(self, by_name: Mapping[str, Tool], parser: Calls, options: ToolsOptions) -> None:
        self.by_name, self.parser, self.options = by_name, parser, options
        self.threads = {name: OwnThreads(f"the tool {name!r}", options.threads, options.timeout_s) for name in by_name}

    def __call__(self, prompt: Prompt, seed: int) -> ToolEpisode:
        return ToolEpisode(self)


def tools(options: Mapping[str, Any], context: EnvironmentContext) -> NewEpisode:
    """Raises ConfigError."""
    chosen = read_options(ToolsOptions, options, of="the environment 'tools'", setting=context.setting)
    by_name = named_tools(chosen.tools, f"{context.setting}.tools")
    parser = ToolParser(chosen.parser, [(t.name, t.description, t.parameters) for t in by_name.values()],
                        f"{context.setting}.parser")
    return Tools(by_name, parser, chosen)


def named_tools(names: Sequence[str], setting: str) -> dict[str, Tool]:
    """The tools by the names that the policy calls them by. Raises ConfigError."""
    made = [Tool.of(resolve(name, TOOLS, setting=setting)) for name in names]
    if len({tool.name for tool in made}) < len(made):
        raise ConfigError(f"{setting} has two of one name", hint="give the functions other names")
    return {tool.name: tool for tool in made}


class ToolEpisode:
    """One episode. It rewards nothing: what the last turn is worth is for the job's reward to say."""

    def __init__(self, tools: Tools) -> None:
        self._tools, self._parser, self._options = tools.by_name, tools.parser, tools.options
        self._threads = tools.threads
        self._turn = 0

    async def step(self, text: str) -> Observation:
        """The results of the calls of a turn, a message each; the end of the episode where there is none. Raises
        PluginAway."""
        self._turn += 1
        calls = self._parser.calls(text)
        if not calls:
            return Observation(done=True)
        found = await asyncio.gather(*(self._result(call, i) for i, call in enumerate(calls)))
        failed = sum(not works for _, works in found)
        # The id has the form that Mistral's templates want: 9 letters or digits.
        return Observation(tuple(
            Message("tool", result, call.name[:_NAME], f"{self._turn % 10_000:04d}{i % 100_000:05d}")
            for i, (call, (result, _)) in enumerate(zip(calls, found, strict=True))), parts={
                "tool_calls": float(len(calls)), "tool_errors": float(failed)})

    async def close(self) -> None:
        """There is nothing to close."""

    async def _result(self, call: ToolCall, number: int) -> tuple[str, bool]:
        """What the policy reads, and whether the call was made without an error. Raises PluginAway."""
        if number >= self._options.max_calls:
            return f"error: at most {self._options.max_calls} calls at once", False
        tool = self._tools.get(call.name)
        if tool is None and call.name:
            return f"error: there is no tool {call.name[:_NAME]!r}, only {', '.join(sorted(self._tools))}", False
        if tool is None or call.arguments is None:
            return "error: the call cannot be read", False
        try:
            args, kwargs = tool.arguments(**call.arguments)
        except (ValidationError, TypeError) as e:  # TypeError: names that are none in Python
            return self._cut(f"error: wrong arguments: {_faults(e)}"), False
        try:
            return await self._called(tool, args, kwargs), True
        except PluginAway:
            raise
        except CallTookTooLong:
            return f"error: {tool.name} took longer than {self._options.timeout_s:g} s", False
        except BaseException as e:  # whatever a user's function raises: also SystemExit, which would end the process
            task = asyncio.current_task()
            if isinstance(e, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            log.info("the tool %s failed: %s", tool.name, describe(e))
            # The place is left out: the policy shall read the same on each host.
            text = text_of(e)
            return self._cut(f"error: {plain(type(e).__name__, 100)}{': ' * bool(text)}{text}"), False

    async def _called(self, tool: Tool, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
        """Raises CallTookTooLong, PluginAway, and whatever the function raises."""
        if tool.call in TOOLS.values():
            return self._text(tool.call(*args, **kwargs))
        found = tool.call(*args, **kwargs) if inspect.iscoroutinefunction(inspect.unwrap(tool.call)) else (
            await self._threads[tool.name].run(lambda: self._unless_awaited(tool.call(*args, **kwargs))))
        if not isinstance(found, Awaitable):
            return self._text(found)
        bound = asyncio.timeout(self._options.timeout_s)
        try:
            async with bound:
                return await asyncio.to_thread(self._text, await found)
        except TimeoutError:
            if bound.expired():
                raise CallTookTooLong(f"{tool.name} took too long") from None
            raise  # the function's own

    def _unless_awaited(self, value: Any) -> Any:
        """Written in the function's thread: a large result takes long."""
        return value if isinstance(value, Awaitable) else self._text(value)

    def _text(self, value: Any) -> str:
        return self._cut(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=_plain))

    def _cut(self, text: str) -> str:
        return text[:self._options.max_result_characters]


def _plain(value: Any) -> Any:
    """What a function returned within what it returned: of NumPy as JSON has it, of any other type as text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _faults(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return text_of(error)
    return "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()[:4])


def described(functions: Sequence[Callable[..., Any]]) -> list[dict[str, Any]]:
    """Tools as chat templates take them (``data.options.chat_template_options.tools``). Raises ConfigError."""
    return [{"type": "function", "function": {"name": t.name, "description": t.description,
                                              "parameters": dict(t.parameters)}} for t in map(Tool.of, functions)]
