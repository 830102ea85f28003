"""Where a model folder has further chat templates: those with a name, beside the default one."""

from __future__ import annotations

from pathlib import Path

TEMPLATES = "additional_chat_templates"
"""Folder in a model folder with the template NAME in ``NAME.jinja``, as transformers reads and writes it."""


def named_templates(folder: Path) -> list[Path]:
    """The files of the named chat templates of a model folder, sorted."""
    return sorted(path for path in (folder / TEMPLATES).glob("*.jinja") if path.is_file())
