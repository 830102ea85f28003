"""What import-linter cannot see: modules of other packages that the durable plane must not touch."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import elastic_rl

ROOT = Path(elastic_rl.__file__).parent
DURABLE = sorted(p for part in ("coordinator", "dcs") for p in (ROOT / part).rglob("*.py"))


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


@pytest.mark.parametrize("path", sorted(p for p in ROOT.rglob("*.py") if "etcdpb" not in p.parts),
                         ids=lambda p: str(p.relative_to(ROOT)))
def test_module_is_short_and_not_called_utils(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 500
    assert path.name != "utils.py"
    if path.name == "__init__.py":
        assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize(("modules", "heavy"), [
    ("elastic_rl.train, elastic_rl.cli.run, elastic_rl.host.local_cluster, elastic_rl.coordinator.service",
     {"torch", "transformers", "ray"}),
    ("elastic_rl.roles.actor, elastic_rl.roles.rollout, elastic_rl.engine.actor, elastic_rl.driver.__main__",
     {"transformers"}),
])
def test_processes_import_no_heavy_package_that_they_do_not_use(modules: str, heavy: set[str]) -> None:
    """Each of these processes would start seconds later."""
    code = f"import sys, {modules}; print(*({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=300).stdout.split() == []
