"""The docs against the code: the files, functions, settings, commands, kinds and examples of the pages exist."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from elastic_rl import config
from elastic_rl.cli.main import app
from elastic_rl.config.fixed_settings import FIXED
from elastic_rl.config.groups import TRAINER_GROUPS
from elastic_rl.config.reading import known_keys
from elastic_rl.etcd import event_kinds

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
"""The changelog is not among them: it names what is gone."""
KEYS = set(known_keys(config.Config))
SECTIONS = {key.partition(".")[0] for key in KEYS if "." in key}
ROLES = ("engine", "driver", "dcs", "coordinator", *TRAINER_GROUPS)
EVENTS = set(event_kinds.KINDS) | {kind.name for role in ROLES
                                   for kind in vars(event_kinds.of_members(role)).values()}
FIRST_WORDS = SECTIONS | {"run", "job", "publish", "version", "leader", "restart", "record", "pool"}
"""First words of settings and of kinds of events."""
FOLDERS = ("elastic_rl", "tests", "chaos_tests", "ops", "docs", "benchmarks")

pages = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))


def code_of(page: Path) -> list[str]:
    """Code spans and lines of code blocks, links' targets left out."""
    text = page.read_text()
    blocks = re.findall(r"^    .*$", text, re.MULTILINE)
    return [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", text)] + [line.strip() for line in blocks]


@cache
def product() -> str:
    """The text of all modules of the product."""
    return "\n".join(file.read_text() for file in (ROOT / "elastic_rl").rglob("*.py"))


def is_literal(text: str) -> bool:
    """Whether the code has this string, such as a kind of alert, the name of a span or of a file."""
    return f'"{text}"' in product()


@cache
def names_in(file: Path) -> set[str]:
    """Functions, classes, methods and assigned names of a Python file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                found.add(node.name)
            case ast.Name(ctx=ast.Store()):
                found.add(node.id)
    return found


def module_exists(dotted: str) -> bool:
    """Whether ``elastic_rl.a.b`` is a module, or a name in one."""
    path = ROOT.joinpath(*dotted.split("."))
    if path.is_dir() or path.with_suffix(".py").is_file():
        return True
    module = path.parent.with_suffix(".py")
    return module.is_file() and path.name in names_in(module)


# -- files, modules, functions ----------------------------------------------------------------------------------------
@pages
def test_files_and_modules_that_a_page_names_exist(page: Path) -> None:
    missing = set()
    for code in code_of(page):
        for path in re.findall(rf"(?<![\w/.-])(?:{'|'.join(FOLDERS)})/[\w./-]*\w", code):
            if not (ROOT / path).exists():
                missing.add(path)
        for path in re.findall(r"(?<![\w/.-])[a-z_]+/[\w/]+\.(?:py|sh|js|yml)\b", code):
            if not (ROOT / path).exists() and not (ROOT / "elastic_rl" / path).exists():
                missing.add(path)
        for dotted in re.findall(r"\belastic_rl(?:\.[a-z_]\w*)+", code):
            if not module_exists(dotted):
                missing.add(dotted)
    assert missing == set()


STEPS = "| step | function | file |\n|---|---|---|\n"


def steps_of(page: Path) -> Iterator[str]:
    """Rows of the tables that name functions and files."""
    for table in page.read_text().split(STEPS)[1:]:
        yield from table.partition("\n\n")[0].strip().splitlines()


@pytest.mark.parametrize("name", ["life-of-a-version.md", "life-of-a-fault.md"])
def test_functions_of_the_walks_are_in_the_files_that_are_named(name: str) -> None:
    rows = list(steps_of(ROOT / "docs" / name))
    assert len(rows) > 25
    wrong = []
    for row in rows:
        _, functions, files = row.strip("|").split(" | ")
        there = set().union(*(names_in(ROOT / file) for file in re.findall(r"`([^`]+)`", files)))
        named = {part for full in re.findall(r"`([A-Za-z_][\w.]*)`", functions) for part in full.split(".")}
        if not named or not named <= there:
            wrong.append((row, named - there))
    assert wrong == []


# -- settings, kinds, examples ----------------------------------------------------------------------------------------
@pages
def test_settings_and_kinds_that_a_page_names_exist(page: Path) -> None:
    unknown = set()
    for code in code_of(page):
        settings = set(re.findall(r"--([a-z_]+\.[a-z_]+)\b", code)) - {"key.sub"}  # that stands for any
        unknown |= settings - KEYS
        if re.fullmatch(r"[a-z_]+\.(?!py$)[a-z_]+", code) and code.partition(".")[0] in FIRST_WORDS:
            unknown |= set() if is_literal(code) else {code} - KEYS - EVENTS
    assert unknown == set()


@pages
def test_yaml_examples_of_a_page_are_valid_settings(page: Path) -> None:
    for block in re.findall(r"(?:^    .*\n|^\n(?=    ))+", page.read_text(), re.MULTILINE):
        first = block.strip().splitlines()[0] if block.strip() else ""
        if first.removesuffix(":") in SECTIONS:
            config.parse(yaml.safe_load("\n".join(line[4:] for line in block.splitlines())))


def test_alerts_of_the_code_are_listed_and_no_others() -> None:
    """``<group>`` stands for each group of ranks, and ``<role>`` for each role."""
    table = (ROOT / "docs/operating/alerts.md").read_text().partition("## Kinds")[2].partition("\n\nWhile")[0]
    listed = {kind for row in re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
              for kind in re.findall(r"`([a-z_<>]+\.[a-z_]+)`", row)}
    listed |= {kind.replace("<group>", group) for kind in listed for group in TRAINER_GROUPS}
    rules = ast.parse((ROOT / "elastic_rl/coordinator/alerts/conditions.py").read_text())
    calls = [node for node in ast.walk(rules) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
             and node.func.id == "Condition"]
    of_state = {call.args[0].value for call in calls if isinstance(call.args[0], ast.Constant)}
    of_events = {kind.alert for kind in event_kinds.KINDS.values() if kind.alert}
    of_members = {f"{role}.{what}" for role in ("<role>", *ROLES) for what in ("dead", "hung")}
    assert len(of_state) > 10 and len(of_events) > 25 and {"<role>.dead", "<role>.hung"} <= listed
    assert {kind for kind in listed - of_members if "<" not in kind} == (of_state | of_events) - of_members


def test_settings_that_are_fixed_for_a_job_are_listed() -> None:
    page = (ROOT / "docs/operating/command-line.md").read_text()
    section = page.partition("## What a job keeps")[2].partition("##")[0]
    listed = {(key, when) for keys, when in re.findall(r"^\| (`.*) \| (.*) \|$", section, re.MULTILINE)
              for key in re.findall(r"`([^`]+)`", keys)}
    assert listed == {(key.removesuffix("."), when) for rule in FIXED for key in rule.key.split(" or ") for when in (
        ["once the SFT phase is over"] if rule.after_sft
        else [f"with `mode: {mode}`" for mode in rule.modes] or ["in every job"])}


def test_every_kind_of_event_has_its_row() -> None:
    page = (ROOT / "docs/operating/events.md").read_text()
    assert "\n".join(event_kinds.table()) in page, "python -m elastic_rl.etcd.event_kinds prints the table"


# -- commands ---------------------------------------------------------------------------------------------------------
COMMANDS: Any = typer.main.get_command(app)


def commands_of(page: Path) -> Iterator[list[str]]:
    """The words of each ``elastic-rl …`` that a page shows."""
    for code in code_of(page):
        found = re.match(r"(?:\S*/bin/)?elastic-rl +([^#]*)", code)
        if found:
            try:
                yield shlex.split(found[1].replace("…", ""))
            except ValueError:  # text, not a command
                continue


@pages
def test_commands_that_a_page_shows_exist(page: Path) -> None:
    for words in commands_of(page):
        command, left = COMMANDS, list(words)
        while left and hasattr(command, "commands") and (left[0] in command.commands or command is COMMANDS):
            if left[0].startswith("-") or left[0] == "COMMAND":
                break
            assert left[0] in command.commands, f"elastic-rl {' '.join(words)}"
            command = command.commands[left.pop(0)]
        options = {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if hasattr(command, "commands") and "ls" in command.commands:  # a group without a command lists
            options |= {name for parameter in command.commands["ls"].params for name in parameter.opts}
        for word in left:
            option = word.partition("=")[0]
            if option.startswith("-") and option not in {"--help", "-"} | options:
                assert option.removeprefix("--") in KEYS, f"elastic-rl {' '.join(words)}: {option}"


def leaves(command: Any, path: str = "") -> Iterator[str]:
    for name, inner in getattr(command, "commands", {}).items():
        if hasattr(inner, "commands"):
            yield from leaves(inner, f"{path}{name} ")
        else:
            yield f"{path}{name}"


def test_every_command_is_in_the_manual() -> None:
    manual = (ROOT / "docs/operating/command-line.md").read_text().replace("[ls]", "ls")
    spans = " ".join(re.findall(r"`([^`]+)`", manual))
    missing = [c for c in leaves(COMMANDS) if c not in spans and c.removesuffix(" ls") not in spans]
    assert missing == []


@pages
def test_tests_that_a_page_selects_by_name_exist(page: Path) -> None:
    for path, word in re.findall(r"pytest [^#\n]*?(\S+) -k (\w+)", page.read_text()):
        place = ROOT / path
        files = [place] if place.is_file() else sorted(place.rglob("test_*.py"))
        assert any(word in name for file in files for name in names_in(file) if name.startswith("test_")), (path, word)


# -- the site ---------------------------------------------------------------------------------------------------------
def test_site_builds_without_warnings(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", tmp_path],
                          cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "index.html").read_text()
    assert re.findall(r'<(?:script|link|img)[^>]*(?:src|href)="https?://', page) == [], "the site needs another host"


def test_every_decision_is_listed() -> None:
    folder = ROOT / "docs/decisions"
    index = (folder / "index.md").read_text()
    assert [p.name for p in sorted(folder.glob("0*.md")) if f"({p.name})" not in index] == []
