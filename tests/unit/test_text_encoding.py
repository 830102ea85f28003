"""Text is UTF-8 whatever the locale says: a rule about the sources, and the command line in other locales."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import elastic_rl
from elastic_rl.cli import main as command_line
from elastic_rl.cli.exit_codes import Exit

ROOT = Path(elastic_rl.__file__).parent.parent
SOURCES = sorted(p for folder in ("elastic_rl", "benchmarks", "examples", "ops", "chaos_tests")
                 for p in (ROOT / folder).rglob("*.py") if "pb" not in p.parts)
_MODE_AT = {"open": 1, "fdopen": 1, "NamedTemporaryFile": 0, "TemporaryFile": 0, "SpooledTemporaryFile": 1}
_OF_SUBPROCESS = ("run", "Popen", "check_output", "check_call", "call")


def _text_io_without_encoding(tree: ast.AST) -> Iterator[str]:
    """Calls that read or write text in the encoding of the locale."""
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        named = {k.arg: k.value for k in call.keywords}
        if "encoding" not in named and None not in named and _is_text_io(call, named):
            yield f"{call.lineno}: {ast.unparse(call)[:100]}"


def _is_text_io(call: ast.Call, named: dict[str | None, ast.expr]) -> bool:
    method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    of = ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    if name in ("read_text", "write_text"):
        return len(call.args) < (1 if name == "read_text" else 2)
    if name == "TextIOWrapper":
        return len(call.args) < 2
    if name in _OF_SUBPROCESS:
        return of in ("subprocess", "") and bool({"text", "universal_newlines"} & named.keys())
    if name not in _MODE_AT or of == "os" and name == "open":
        return False
    at = 0 if name == "open" and method and of not in ("io", "gzip", "bz2", "lzma") else _MODE_AT[name]
    mode = named.get("mode", call.args[at] if len(call.args) > at else None)
    if name == "open" and method and at == 0 and (call.args or named) and not (
            isinstance(mode, ast.Constant) and isinstance(mode.value, str) and set(mode.value) <= set("rwaxbt+")):
        return False  # a method of something else than a path
    if name == "open" and method and at == 0 and not (call.args or named):
        return True
    default = "w+b" if "Temporary" in name else "rb" if of in ("gzip", "bz2", "lzma") else "r"
    found = mode.value if isinstance(mode, ast.Constant) else default
    return "b" not in str(found) and (of not in ("gzip", "bz2", "lzma") or "t" in str(found))


@pytest.mark.parametrize(("code", "found"), [
    ("Path(p).read_text()", True), ("p.read_text('utf-8')", False), ("p.write_text(t, encoding='utf-8')", False),
    ("p.write_text(t)", True), ("open(p)", True), ("open(p, 'rb')", False), ("open(p, mode='w')", True),
    ("p.open()", True), ("p.open('ab')", False), ("p.open('w')", True), ("webbrowser.open(url)", False),
    ("os.open(p, flags)", False), ("os.fdopen(fd, 'w')", True), ("os.fdopen(fd, 'wb')", False),
    ("gzip.open(p)", False), ("gzip.open(p, 'rt')", True), ("tempfile.TemporaryFile()", False),
    ("tempfile.TemporaryFile('w+')", True), ("io.TextIOWrapper(f)", True), ("subprocess.run(c, text=True)", True),
    ("subprocess.run(c, encoding='utf-8')", False), ("Sample(text=t)", False), ("open(p, **how)", False)])
def test_rule_sees_text_io_without_encoding(code: str, found: bool) -> None:
    assert bool([*_text_io_without_encoding(ast.parse(code))]) == found


def test_all_text_io_states_its_encoding() -> None:
    assert len(SOURCES) > 500
    found = [f"{path.relative_to(ROOT)}:{call}" for path in SOURCES
             for call in _text_io_without_encoding(ast.parse(path.read_text(encoding="utf-8")))]
    assert not found, 'write encoding="utf-8": the locale\'s is another one on some machines'


_LOCALES = {"ascii": {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
            "ascii_output": {"PYTHONIOENCODING": "ascii"}, "latin1_output": {"PYTHONIOENCODING": "latin-1"}}


@pytest.mark.parametrize("locale", _LOCALES)
def test_command_line_reads_and_prints_any_character_in_any_locale(locale: str, tmp_path: Path) -> None:
    folder = tmp_path / "grüße-😀"
    folder.mkdir()
    (folder / "ü.yaml").write_text("job: ä😀\n", encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LC_", "LANG", "PYTHONIO", "PYTHONUTF8"))}
    done = subprocess.run([sys.executable, "-m", command_line.__name__, "config", "show", "-c", folder / "ü.yaml"],
                          capture_output=True, env={**environment, **_LOCALES[locale]}, check=False, timeout=120)
    encoding = {"ascii_output": "ascii", "latin1_output": "latin-1"}.get(locale, "utf-8")
    assert "(got 'ä😀')".encode(encoding, "backslashreplace") in done.stderr
    assert done.returncode == Exit.USAGE


@pytest.mark.parametrize("arguments", [
    [b"--run_dir=/tmp/f\xfc"], [b"-c", b"/tmp/f\xfc"], [b"--job=\xff"], [b"--data.options.x=\xff"], [b"\xff"],
    [b"--\xff=1"]])
def test_argument_that_is_not_utf8_is_a_usage_error(arguments: list[bytes], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as e:
        command_line.main(["config", "show", *map(os.fsdecode, arguments)])
    assert e.value.code == Exit.USAGE
    capsys.readouterr().err.encode()
