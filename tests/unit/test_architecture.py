"""What import-linter cannot see: modules of other packages that the durable plane must not touch."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import elastic_rl

ROOT = Path(elastic_rl.__file__).parent
PROJECT = tomllib.loads((ROOT.parent / "pyproject.toml").read_text())
[_PLANE] = [c for c in PROJECT["tool"]["importlinter"]["contracts"] if c["name"] == "The durable plane knows no Ray"]
DURABLE = sorted(p for module in _PLANE["source_modules"]
                 for p in (ROOT.parent / module.replace(".", "/")).rglob("*.py"))


class Source:
    """What the rules need of a file. Its tree is made once and not kept: those of all files take half a GiB."""

    def __init__(self, path: Path) -> None:
        self.imports: set[tuple[str, str]] = set()
        """Modules that it imports at any level, each with a name that it takes from it, or none."""
        self.names: set[str] = set()
        """What it defines or imports at any level."""
        self.texts: list[str] = []
        """Its string constants, those in f-strings too, without docstrings and other statements of text."""
        self.joined: set[str] = set()
        """Constant names that it joins to a path: ``… / "name"``, ``joinpath``, ``os.path.join``, ``Path(…, "name")``
        and the last part of a text with slashes."""
        self.joins_run_dir = False
        """Whether it joins something to ``….run_dir``, or lists that folder."""
        tree, prose = ast.parse(path.read_text()), set[int]()
        for node in ast.walk(tree):  # a statement comes before its expression
            self._add(node, prose)
        self.joined |= {text.rpartition("/")[2] for text in self.texts if re.fullmatch(r"[\w.-]*(/[\w.-]+)+", text)}

    def _add(self, node: ast.AST, prose: set[int]) -> None:
        match node:
            case ast.Expr(value=value):
                prose.add(id(value))
            case ast.Constant(str() as text) if id(node) not in prose:
                self.texts.append(text)
            case ast.Import(names=names):
                self.imports |= {(alias.name, "") for alias in names}
                self.names |= {alias.asname or alias.name for alias in names}
            case ast.ImportFrom(module=module, names=names):
                self.imports |= {(module, alias.name) for alias in names if module}
                self.names |= {alias.asname or alias.name for alias in names}
            case ast.Name(ctx=ast.Store()):
                self.names.add(node.id)
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                self.names.add(node.name)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                self.joins_run_dir |= isinstance(left, ast.Attribute) and left.attr == "run_dir"
                if isinstance(right, ast.Constant) and isinstance(right.value, str):
                    self.joined.add(right.value)
            case ast.Call(func=ast.Attribute(attr="joinpath" | "join") | ast.Name("Path"), args=args):
                self.joined |= {arg.value for arg in args
                                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
            case ast.Attribute(value=ast.Attribute(attr="run_dir"), attr="joinpath" | "glob" | "rglob" | "iterdir"):
                self.joins_run_dir = True


@functools.cache
def _source(path: Path) -> Source:
    return Source(path)


@functools.cache
def _modules() -> tuple[Path, ...]:
    return tuple(sorted(ROOT.rglob("*.py")))


def test_durable_plane_has_no_collective_and_no_unpickling() -> None:
    bad = ("torch.distributed.", "pickle.", "cloudpickle.", "dill.", "ray.")
    found = {(str(path.relative_to(ROOT)), module, name) for path in DURABLE for module, name in _source(path).imports
             if f"{module}.{name}.".startswith(bad)}
    assert not found and len(DURABLE) > 100


def test_no_module_is_called_utils_and_packages_have_docstrings() -> None:
    modules = [path for path in ROOT.rglob("*.py") if "pb" not in path.parts]
    assert not [path for path in modules if path.name == "utils.py"]
    packages = [path for path in modules if path.name == "__init__.py"]
    assert packages and not [path for path in packages if not ast.get_docstring(ast.parse(path.read_text()))]


@pytest.mark.parametrize(("modules", "heavy"), [
    ("elastic_rl.run_service, elastic_rl.cli.run, elastic_rl.host.local_cluster, elastic_rl.coordinator.service",
     {"torch", "transformers", "ray"}),
    ("elastic_rl.roles.actor, elastic_rl.roles.rollout, elastic_rl.engine.actor", {"transformers"}),
    ("elastic_rl.driver.__main__", {"torch", "transformers"}),  # the run waits for it when its predecessor was killed
    ("elastic_rl.rewards.own", {"pydantic", "numpy", "torch"}),  # in the process of a user's reward
    ("elastic_rl.engine.own_generate", {"pydantic", "torch"}),  # in that of a user's way to generate
    ("elastic_rl.engine.sglang.launch", {"elastic_rl.config", "elastic_rl.telemetry"}),
    ("chaos_tests.scenarios, chaos_tests.validate.judge", {"torch"}),  # `chaos list` and `chaos check`
])
def test_processes_import_no_heavy_package_that_they_do_not_use(modules: str, heavy: set[str]) -> None:
    """Each of these processes would start seconds later."""
    code = f"import sys, {modules}; print(*({heavy!r} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True,
                          timeout=300).stdout.split() == []


@pytest.mark.parametrize("module", ["elastic_rl.engine.sglang.launch", "elastic_rl.trainer.group.preload"])
def test_large_imports_are_not_searched_for_garbage_and_what_follows_is(module: str) -> None:
    """Torch alone is searched hundreds of times otherwise, a fifth of the time in which such a process starts."""
    code = f"""
import gc, sys
searched = []
gc.callbacks.append(lambda phase, info: searched.append(phase == "start" and gc.isenabled() and "torch" in sys.modules))
import {module}
print(gc.isenabled(), sum(searched))
"""
    enabled, automatic = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True,
                                        check=True, timeout=300).stdout.split()
    assert enabled == "True" and int(automatic) < 10


def test_processes_are_started_in_one_place() -> None:
    """A process that is started elsewhere has the user's umask: others may write to its sockets."""
    starts = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
              if re.search(r"\bsubprocess\.Popen\(|create_subprocess_|\bos\.(posix_)?spawn", path.read_text())}
    assert starts == {"runtime/process.py"}


def test_http_servers_are_made_in_one_place() -> None:
    """One that is made elsewhere has no limits on what a client without a token sends."""
    makes = {str(path.relative_to(ROOT)) for path in ROOT.rglob("*.py")
             if re.search(r"\buvicorn\.(Config|Server|run)\(|HTTPServer\(|web\.AppRunner\(|\bHttpServer\(",
                          path.read_text())}
    assert {path for path in makes if not path.startswith(("bench/", "faults/"))} == {"net/http_server.py"}


def test_names_of_test_modules_are_unique() -> None:
    """Test folders are no packages, so pytest cannot collect two modules of one name in one process."""
    names = [p.stem for folder in ("tests", "chaos_tests") for p in (ROOT.parent / folder).rglob("test_*.py")]
    assert sorted(names) == sorted(set(names))


def test_http_servers_of_tests_are_ended_in_one_place() -> None:
    """One whose socket is closed while its thread serves takes a core until the test process ends."""
    found = {str(path.relative_to(ROOT.parent)) for folder in ("tests", "chaos_tests")
             for path in (ROOT.parent / folder).rglob("*.py")
             if re.search(r"=[\w.]+\.serve_forever|\.server_close\(", path.read_text())}
    assert found == {"tests/support/http_servers.py", "chaos_tests/receiver.py"}, "the suite has no helpers of tests"


def _names(module: str) -> set[str] | None:
    """What a module defines or imports at any level, and its submodules; None when there is no such module."""
    base = ROOT.parent / module.replace(".", "/")
    path = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
    if not path.exists():
        return None
    return _source(path).names | ({p.stem for p in base.iterdir()} if base.is_dir() else set())


def test_imported_modules_and_names_exist() -> None:
    """Also those of imports within functions, which no other test may reach."""
    missing, names = [], {}
    for path in (p for part in ("elastic_rl", "tests", "chaos_tests") for p in (ROOT.parent / part).rglob("*.py")):
        for module, name in _source(path).imports:
            if module.partition(".")[0] != "elastic_rl":
                continue
            if module not in names:
                names[module] = _names(module)
            found = names[module]
            if not module.startswith("elastic_rl.etcd.pb") and (found is None or name and name not in found):
                missing.append(f"{path.relative_to(ROOT.parent)}: {module} {name}")
    assert not missing


def _modules_with(matches: Callable[[str], object]) -> set[str]:
    return {str(path.relative_to(ROOT)) for path in _modules() if any(map(matches, _source(path).texts))}


LAYOUT = "host/paths.py"
"""The only module that knows where files are."""


def test_layout_of_folders_and_files_is_known_in_one_place() -> None:
    """A second module that knows it would look at the old place when the layout changes."""
    names = {text for text in _source(ROOT / LAYOUT).texts if re.fullmatch(r"[\w-]+\.[a-z]+", text)}
    assert {"cluster.json", "steps.jsonl", "engine.key", "train.lock"} <= names
    found = _modules_with(lambda text: text.rpartition("/")[2] in names)
    assert found - {LAYOUT} == {"telemetry/trackers.py",  # run.json in wandb's own folder
                                "config/reading.py"}  # engine.key as a setting that somebody may look for


def test_names_in_the_layout_are_joined_in_one_place() -> None:
    """Names without a suffix, such as ``secret``, are common words: only what is joined to a path counts."""
    layout = _source(ROOT / LAYOUT).joined
    assert {"secret", "etcd", "services", "agents", "logs", "disk", "unsaved", "cluster"} <= layout
    found = {(str(path.relative_to(ROOT)), name) for path in _modules() for name in layout & _source(path).joined}
    assert {(module, name) for module, name in found if module != LAYOUT} == {
        ("host/etcd_server.py", "etcd"),  # the program
        ("bench/etcd.py", "etcd"), ("bench/dcs/engines.py", "model"), ("bench/loop/long_responses.py", "model"),
        ("bench/loop/testbed.py", "policy"),  # in folders of benches
    }


def test_folder_of_all_jobs_is_joined_in_one_place() -> None:
    found = {str(path.relative_to(ROOT)) for path in _modules() if _source(path).joins_run_dir}
    assert found == {LAYOUT}


def test_address_of_this_host_is_known_in_one_place() -> None:
    """A loopback address in a record, or on a command line, is wrong as soon as there is a second host."""
    assert _modules_with(lambda text: "127.0.0.1" in text) == {
        "net/addresses.py",  # the constant
        "config/coordinator.py", "config/dcs.py",  # defaults of settings
        "coordinator/operations/external_engines.py", "net/torch_store.py", "cli/dashboard.py",  # what users have given
        "bench/dcs/limits.py", "bench/dcs/links.py", "bench/dcs/plain_transfer.py",  # sockets of one process
    }
    assert _modules_with(lambda text: re.search(r"\blocalhost\b|(?<![\w:])::1\b", text)) == {
        "coordinator/operations/external_engines.py", "net/torch_store.py", "cli/dashboard.py",  # what users have given
        "cli/common.py",  # the same
        "config/coordinator.py",  # the same, in a setting
        "coordinator/api/request_origin.py", "host/etcd_server.py",  # names that a request's Host may have
        "host/local_host.py",  # a name that its certificate is for
        "coordinator/alerts/sender_process.py",  # a URL that nothing is sent to
    }
    users = {str(path.relative_to(ROOT)) for path in _modules()
             if ("elastic_rl.net.addresses", "LOOPBACK") in _source(path).imports}
    assert users == {"host/address.py", "host/local_host.py"}
