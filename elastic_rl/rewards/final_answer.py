"""Which part of a response is its answer. Pure, and in linear time."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

THINK_END = "</think>"
_ANSWER, _ANSWER_END = "<answer>", "</answer>"
_BOX = re.compile(r"\\{1,4}(?:boxed|fbox|framebox)[ \t]{0,2}(?:\{|(?=[^\s{\\$]))|\\.|[{}]", re.DOTALL)
"""The beginning of a box, which has a brace or is of one word (``\\boxed 7``), or a brace. An escaped character is
passed over, so that an escaped brace is none. Some models double the backslash, as in a string of JSON."""
_WORD = re.compile(r"[^\s$]*")
_LINE = re.compile(r"^[ \t]*####(.*)$", re.MULTILINE)
"""The line that ends a solution of GSM8K."""
_END_OF_LINE = re.compile(r"[^\n]*")


class Answer(NamedTuple):
    """An answer, without white space around it; "" where there is none. ``form``: how it is given. ``text``: it is
    somewhere in the text, which is all of the response behind its thinking."""

    text: str
    form: Literal["box", "open box", "tags", "line", "text"]


def answer_of(text: str) -> Answer:
    """The answer of a response: behind the last ``</think>``, and there in the last pair of ``<answer>`` tags if there
    is one. In what is left the last ``\\boxed{}`` or ``\\fbox{}`` counts, also where it is empty or has no end; without
    any, the last line that begins with ``####``; without that, all of it."""
    behind = text.rpartition(THINK_END)[2]
    before, closed, _ = behind.rpartition(_ANSWER_END)
    _, opened, inside = before.rpartition(_ANSWER)
    scope = inside if closed and opened else behind
    if (box := _last_box(scope)) is not None:
        return box._replace(text=box.text.strip())
    if scope is behind and (lines := _LINE.findall(scope)):
        return Answer(lines[-1].strip(), "line")
    return Answer(scope.strip(), "tags" if scope is inside else "text")


def final_answer(text: str, last_characters: int) -> tuple[str, bool]:
    """The answer of a response, which is looked for in so many characters at its end, and whether it is marked as such:
    by a whole box or by tags."""
    answer = answer_of(text.rpartition(THINK_END)[2][-last_characters:])
    return answer.text, bool(answer.text) and answer.form in ("box", "tags")


def boxed(text: str) -> str:
    """What the last box of a text holds; "" where there is none."""
    box = _last_box(text)
    return box.text if box is not None else ""


def _last_box(text: str) -> Answer | None:
    """The box that begins last, so of nested ones the inner one. One without an end ends with its line."""
    open_at, is_box = list[int](), list[bool]()
    last, end = -1, -1
    for found in _BOX.finditer(text):
        token = found[0]
        if token in "{}":
            if token == "{":
                open_at.append(found.end())
                is_box.append(False)
            elif open_at:
                start = open_at.pop()
                if is_box.pop() and start > last:
                    last, end = start, found.start()
        elif token.endswith("{") and len(token) > 2:
            open_at.append(found.end())
            is_box.append(True)
        elif len(token) > 2 and found.end() > last:  # of one word
            last, end = found.end(), _ends(_WORD, text, found.end())
    unclosed = max((at for at, box in zip(open_at, is_box, strict=True) if box), default=-1)
    if unclosed > last:
        content = text[unclosed:_ends(_END_OF_LINE, text, unclosed)]
        return Answer(_without_end(content), "open box")
    return Answer(text[last:end], "box") if last >= 0 else None


def _without_end(line: str) -> str:
    """A line without what ends the mathematics, bold type or the sentence."""
    while (shorter := line.rstrip(" \t\r.$*").removesuffix("\\)").removesuffix("\\]")) != line:
        line = shorter
    return line


def _ends(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at
