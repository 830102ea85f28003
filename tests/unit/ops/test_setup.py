"""ops/setup.sh and the translation of pip's configuration for uv. Installers are stand-ins: nothing is downloaded."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_rl.host.preflight import _PACKAGES

ROOT = Path(__file__).parents[3]


def _load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("pip_to_uv", ROOT / "ops" / "pip_to_uv.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


pip_to_uv = _load()


# -- the translation ---------------------------------------------------------------------------------------------------
def test_indexes_links_and_certificates_of_pip_are_given_to_uv() -> None:
    settings = pip_to_uv.parse([
        "global.index-url='https://a.example/simple'",
        r"global.extra-index-url='file:///mirror/one\nfile:///mirror/two'",
        ":env:.find-links='/wheels /more'", ":env:.cert='/ca.pem'", "global.trusted-host='a.example b.example'",
        "global.no-index='false'", "global.default-timeout='180'"])
    assert pip_to_uv.translate(settings) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match", "UV_DEFAULT_INDEX": "https://a.example/simple",
        "UV_INDEX": "file:///mirror/one file:///mirror/two", "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/ca.pem", "UV_INSECURE_HOST": "a.example b.example", "UV_HTTP_TIMEOUT": "180"}


def test_variable_overrides_the_install_section_which_overrides_the_global_one() -> None:
    lines = [":env:.index-url='env'", "install.index-url='install'", "global.index-url='global'",
             "download.index-url='another command'"]
    assert [pip_to_uv.parse(lines[i:])["index-url"] for i in range(3)] == ["env", "install", "global"]


@pytest.mark.parametrize("name", ["no-binary", "only-binary", "require-hashes", "pre", "a-setting-of-next-year"])
def test_setting_without_a_counterpart_is_refused(name: str) -> None:
    with pytest.raises(pip_to_uv.UnknownSetting, match=name):
        pip_to_uv.translate({name: "x"})


def test_settings_that_do_not_change_what_is_installed_are_skipped() -> None:
    assert set(pip_to_uv.translate({"no-input": "1", "progress_bar".replace("_", "-"): "off"})) == {"UV_INDEX_STRATEGY"}


@given(st.dictionaries(st.sampled_from(["index-url", "cert", "proxy", "constraint"]),
                       st.text(st.characters(exclude_categories=["Z", "C"]), min_size=1)))
def test_any_value_survives_pips_listing(values: dict[str, str]) -> None:
    assert pip_to_uv.parse([f"global.{k}={v!r}" for k, v in values.items()]) == values


# -- the script --------------------------------------------------------------------------------------------------------
class Checkout:
    """A copy of what ops/setup.sh reads, with an environment whose installers only write down how they were called."""

    def __init__(self, folder: Path, *, uv_works: bool) -> None:
        self.folder, self.bin, self.calls = folder, folder / "bin", folder / "calls"
        self.compiled, self.no_compiler = folder / "compiled", folder / "no_compiler"
        (folder / "ops").mkdir(parents=True)
        self.bin.mkdir()
        for name in ("pyproject.toml", "ops/setup.sh", "ops/pip_to_uv.py"):
            shutil.copy(ROOT / name, folder / name)
        self.program(self.bin / "etcd", "true")
        self.program(self.bin / "uv", f'echo "uv $*" >>{self.calls}; {"true" if uv_works else "echo no route; false"}')
        venv = folder / ".venv" / "bin"
        self.program(venv / "python", f"""case "$2" in
            import*) echo "$PYTHONDONTWRITEBYTECODE $2" >>{self.compiled}; [ ! -e {self.no_compiler} ] ;;
            *) exec {sys.executable} "$@" ;;
        esac""")
        self.program(venv / "pip", f'echo "pip $*" >>{self.calls}')
        self.program(venv / "elastic-rl", "true")

    @staticmethod
    def program(path: Path, body: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def setup(self, *args: str, **env: str) -> str:
        found = subprocess.run(["bash", "ops/setup.sh", *args], cwd=self.folder, capture_output=True, text=True,
                               env={"PATH": f"{self.bin}:/usr/bin:/bin", "HOME": str(self.folder), **env}, timeout=60)
        assert found.returncode == 0, found.stdout + found.stderr
        return found.stdout

    def take_calls(self) -> list[str]:
        calls = self.calls.read_text().splitlines() if self.calls.exists() else []
        self.calls.unlink(missing_ok=True)
        return calls


def test_setup_installs_what_running_needs_and_does_nothing_when_repeated(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "repo", uv_works=True)
    checkout.setup()
    calls = checkout.take_calls()
    assert len(calls) == 3 and all(c.startswith("uv pip install") for c in calls)
    assert calls[-1].endswith("-e .[cpu]")
    assert checkout.setup() == "" and checkout.take_calls() == []


def test_what_uv_installed_is_compiled_by_importing_it(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "repo", uv_works=True)
    checkout.setup(PYTHONDONTWRITEBYTECODE="1")
    imports = checkout.compiled.read_text().splitlines()
    assert len(imports) == 2 and all(line.startswith(" import ") for line in imports), "with the variable unset"
    modules = [m for line in imports for m in line.removeprefix(" import ").split(",")]
    assert "sglang.srt.managers.scheduler" in modules and "elastic_rl.trainer.group.preload" in modules
    for name in modules:
        if name.startswith("elastic_rl."):
            assert importlib.util.find_spec(name), name

    checkout = Checkout(tmp_path / "other", uv_works=True)
    checkout.no_compiler.touch()
    assert "cannot be compiled" in checkout.setup()

    checkout = Checkout(tmp_path / "pip", uv_works=False)
    checkout.setup()
    assert not checkout.compiled.exists(), "pip compiles what it installs"


def test_setup_for_tests_has_a_stamp_of_its_own(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "repo", uv_works=True)
    for name in ("promtool", "bwrap", "chromium"):
        checkout.program(checkout.bin / name, "true")
    checkout.setup()
    checkout.take_calls()
    checkout.setup("--dev")
    assert checkout.take_calls()[-1].endswith("-e .[cpu,dev]")
    assert checkout.setup("--dev") == checkout.setup() == "" and checkout.take_calls() == []


def test_setup_falls_back_to_pip_when_uv_fails(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "repo", uv_works=False)
    assert "uv failed; using pip" in checkout.setup()
    first, *rest = checkout.take_calls()
    assert first.startswith("uv pip install torch") and len(rest) == 3
    assert all(c.startswith("pip install") for c in rest)


def test_setup_uses_pip_where_its_configuration_cannot_be_translated(tmp_path: Path) -> None:
    checkout = Checkout(tmp_path / "repo", uv_works=True)
    assert "pip's setting only-binary has no counterpart" in checkout.setup(PIP_ONLY_BINARY=":all:")
    calls = checkout.take_calls()
    assert len(calls) == 3 and all(c.startswith("pip install") for c in calls)


# -- versions ----------------------------------------------------------------------------------------------------------
def test_setup_pyproject_and_preflight_agree_on_versions() -> None:
    pinned = dict(re.findall(r"\b(torch|sglang)==([\w.]+)", (ROOT / "ops" / "setup.sh").read_text()))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = sum(project["optional-dependencies"].values(), project["dependencies"])
    for item in listed:
        name, _, version = re.sub(r"\[.*?\]", "", item).partition("==")
        assert not version or pinned.setdefault(name, version) == version, item
    assert {name: pinned.get(name) for name in _PACKAGES} == _PACKAGES
