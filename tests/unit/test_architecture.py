"""What import-linter cannot see: modules of other packages that the durable plane must not touch."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import elastic_rl

ROOT = Path(elastic_rl.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
[_PLANE] = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"] == "The durable plane knows no Ray"]
DURABLE = sorted(p for module in _PLANE["source_modules"]
                 for p in (ROOT.parent / module.replace(".", "/")).rglob("*.py"))


def _imports(path: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


@pytest.mark.parametrize("path", DURABLE, ids=lambda p: str(p.relative_to(ROOT)))
def test_durable_plane_has_no_collective_and_no_unpickling(path: Path) -> None:
    bad = {"torch.distributed", "pickle", "cloudpickle", "dill", "ray"}
    assert not {name for name in _imports(path) if any(name == b or name.startswith(b + ".") for b in bad)}


@pytest.mark.parametrize("path", sorted(p for p in ROOT.rglob("*.py") if "pb" not in p.parts),
                         ids=lambda p: str(p.relative_to(ROOT)))
def test_module_is_not_called_utils_and_packages_have_docstrings(path: Path) -> None:
    assert path.name != "utils.py"
    if path.name == "__init__.py":
        assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(("modules", "heavy"), [
    ("elastic_rl.train, elastic_rl.cli.run, elastic_rl.host.local_cluster, elastic_rl.coordinator.service",
     {"torch", "transformers", "ray"}),
    ("elastic_rl.roles.actor, elastic_rl.roles.rollout, elastic_rl.engine.actor, elastic_rl.driver.__main__",
     {"transformers"}),
    ("elastic_rl.rewards.own", {"pydantic", "numpy", "torch"}),  # in the process of a user's reward
    ("elastic_rl.engine.own_generate", {"pydantic", "torch"}),  # in that of a user's way to generate
])
def test_processes_import_no_heavy_package_that_they_do_not_use(modules: str, heavy: set[str]) -> None:
    """Each of these processes would start seconds later."""
    code = f"import sys, {modules}; print(*({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=300).stdout.split() == []


def test_processes_are_started_in_one_place() -> None:
    """A process that is started elsewhere has the user's umask: others may write to its sockets."""
    starts = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
              if re.search(r"\bsubprocess\.Popen\(|create_subprocess_|\bos\.(posix_)?spawn", path.read_text())}
    assert starts == {"runtime/process.py"}


def test_names_of_test_modules_are_unique() -> None:
    """Test folders are no packages, so pytest cannot collect two modules of one name in one process."""
    names = [p.stem for folder in ("tests", "chaos_tests") for p in (ROOT.parent / folder).rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def _ours(path: Path) -> set[tuple[str, str]]:
    """Modules of ours that a file imports, each with a name that it takes from it, or none."""
    found: set[tuple[str, str]] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {(alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {(node.module, alias.name) for alias in node.names}
    return {(module, name) for module, name in found if module.partition(".")[0] == "elastic_rl"}


def _names(module: str) -> set[str] | None:
    """What a module defines or imports at any level, and its submodules; None when there is no such module."""
    base = ROOT.parent / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        return None
    names = {p.stem for p in base.iterdir()} if base.is_dir() else set()
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
    return names


def test_imported_modules_and_names_exist() -> None:
    """Also those of imports within functions, which no other test may reach."""
    missing, names = [], {}
    for path in (p for part in ("elastic_rl", "tests", "chaos_tests") for p in (ROOT.parent / part).rglob("*.py")):
        for module, name in _ours(path):
            if module not in names:
                names[module] = _names(module)
            found = names[module]
            if not module.startswith("elastic_rl.etcd.pb") and (found is None or name and name not in found):
                missing.append(f"{path.relative_to(ROOT.parent)}: {module} {name}")
    assert not missing
