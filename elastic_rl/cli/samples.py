"""``elastic-rl samples``: what the model wrote, with its rewards. Prompts and responses are shown without anything that
would steer the terminal: model output is hostile input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any
from urllib.parse import urlencode

import typer

from elastic_rl.cli import tables
from elastic_rl.cli.common import Output, Target, api_command, out
from elastic_rl.cli.tables import Format
from elastic_rl.errors import EtcdUnavailable

app = typer.Typer()

_COLUMNS = ("step", "group", "index", "reward", "advantage", "tokens", "finish_reason", "prompt", "response")
_WIDE = ("reward_parts", "versions", "prompt_tokens", "at")
_CELL_CHARS = 160
_PROMPT_CHARS = 60
"""Characters of a text in a table; ``--full`` and JSON have all that is kept."""


@api_command(app)
def samples(cluster: Target,
            step: Annotated[int | None, typer.Option(min=0, help="Only of this step.")] = None,
            group: Annotated[int | None, typer.Option(min=0, help="Only of this prompt group.")] = None,
            min_reward: Annotated[float | None, typer.Option(help="Only with at least this reward.")] = None,
            max_reward: Annotated[float | None, typer.Option(help="Only with at most this reward.")] = None,
            finish_reason: Annotated[str, typer.Option(help="Only those that ended so, such as length.")] = "",
            limit: Annotated[int, typer.Option(min=1, max=1000, help="Number of samples.")] = 20,
            full: Annotated[bool, typer.Option("--full", help="One below the other, with their whole texts.")] = False,
            output: Output = Format.TABLE) -> None:
    """Show samples of the last steps: what the model wrote, and its rewards."""
    given = {"step": step, "group": group, "min_reward": min_reward, "max_reward": max_reward,
             "finish_reason": finish_reason or None}
    query = urlencode({name: value for name, value in given.items() if value is not None})
    try:
        with cluster.api() as api:
            found = api.items(f"samples{'?' + query if query else ''}", limit=limit)
    except EtcdUnavailable as e:
        e.hint = f"samples are kept in etcd, and shown while it runs; `elastic-rl metrics` needs no cluster. {e.hint}"
        raise
    if full and output is not Format.JSON:
        _show_whole(found)
    else:
        tables.show(out, found if output is Format.JSON else _rows(found), _COLUMNS, output, wide=_WIDE)


def _rows(found: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**s, "tokens": s.get("response_tokens"), "prompt": _end(s.get("prompt", "")),
             "response": _shortened(s.get("response", ""))} for s in found]


def _shortened(text: str) -> str:
    return text if len(text) <= _CELL_CHARS else text[:_CELL_CHARS - 1] + "…"


def _end(prompt: str) -> str:
    """The question is at the end of a prompt, and what all prompts share at its beginning."""
    return prompt if len(prompt) <= _PROMPT_CHARS else "…" + prompt[1 - _PROMPT_CHARS:]


def _show_whole(found: Sequence[dict[str, Any]]) -> None:
    from rich.text import Text
    if not found:
        out.print("none")
    for sample in found:
        out.print(Text(f"step {sample['step']}, group {sample['group']}, sample {sample['index']}", style="bold"))
        tables.put(out, tables.facts({
            "reward": sample.get("reward"), "reward_parts": sample.get("reward_parts"), "advantage":
            sample.get("advantage"), "finish_reason": sample.get("finish_reason"), "versions": sample.get("versions"),
            "tokens": f"{sample.get('prompt_tokens')} + {sample.get('response_tokens')}", "at": sample.get("at"),
            "cut": "the middle of a text was left out" if sample.get("cut") else ""}), Format.WIDE)
        for name in ("prompt", "response"):
            out.print(Text(f"── {name}", style="dim"))
            out.print(Text(tables.printable(sample.get(name, ""))), soft_wrap=True)
        out.print()
