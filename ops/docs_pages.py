"""MkDocs hook: README, CONTRIBUTING and CHANGELOG, which lie in the root, are pages of the docs site too."""

from __future__ import annotations

from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_ROOT = Path(__file__).resolve().parents[1]
_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages; their links lead to where the site has the target."""
    for name, page in _PAGES.items():
        text = (_ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
        for other, target in _PAGES.items():
            text = text.replace(f"]({other}", f"]({target}")
        files.append(File.generated(config, page, content=text))
    return files
