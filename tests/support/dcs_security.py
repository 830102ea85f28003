"""The security of DCS nodes and their callers, from files that a test has made."""

from __future__ import annotations

from pathlib import Path

from elastic_rl.config import Config, DcsConfig
from elastic_rl.dcs.security import Security


def security_with(**files: Path) -> Security:
    """``files``: settings of ``dcs``. Without ``token_file`` there is no token."""
    dcs = DcsConfig.model_validate({setting: str(path) for setting, path in files.items()})
    return Security.from_config(Config(dcs=dcs), None, required=False)
