"""What a worker process does to render chat templates (``chat_rendering.py``): a template is a program of strangers,
which may loop or take memory without an end.

Imported in the worker alone. Its imports are its start, which no limit of a conversation counts.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from transformers.utils.chat_template_utils import render_jinja_template

from elastic_rl.data.chat_rendering import MAX_CHARACTERS, NOW
from elastic_rl.plugins.user_code import describe, text_of


def render(job: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Renders conversations of one template. ``job``: ``template``; ``variables``, which all conversations have;
    ``now``, what the template reads of the clock, in ISO 8601; ``conversations``, each its messages and its options.

    The answer has for each conversation, in order, one of ``text``; ``syntax``, with the ``line``; ``refused``. It ends
    with the first one that is no text, as nobody needs those after it. Raises MemoryError, which ends the worker."""
    now = datetime.datetime.fromisoformat(job["now"])
    answers = list[dict[str, Any]]()
    for messages, options in job["conversations"]:
        answers.append(_rendered(job["template"], messages, {**job["variables"], NOW: now.strftime, **options}))
        if "text" not in answers[-1]:
            break
    return answers


def _rendered(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> dict[str, Any]:
    try:
        [text], _ = render_jinja_template(conversations=[messages], chat_template=template, **variables)
    except MemoryError:
        raise
    except jinja2.TemplateSyntaxError as e:
        return {"syntax": text_of(e), "line": e.lineno}
    except Exception as e:  # whatever the template raises
        return {"refused": describe(e)}
    if len(text) > MAX_CHARACTERS:
        return {"refused": f"it writes {len(text)} characters; at most {MAX_CHARACTERS} are read"}
    return {"text": text}
