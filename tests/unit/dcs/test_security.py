"""The token and the TLS settings of the checkpoint service."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from support.certificates import Authority

from elastic_rl.config import DcsConfig
from elastic_rl.dcs.node import service
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError


def test_no_files_mean_no_token_and_no_tls() -> None:
    security = Security.from_config(DcsConfig())
    assert security == Security() and security.admits("") and security.admits("anything")


def test_node_does_not_serve_without_the_clusters_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--etcd", "127.0.0.1:1", "--id", "a", "--secret", str(tmp_path / "secret")]
    assert service.main(options) == 2 and f"the secret of the cluster, {tmp_path}/secret" in capsys.readouterr().err


def test_only_the_token_is_admitted(tmp_path: Path) -> None:
    (tmp_path / "named").write_text(f" {'0' * 64}\n")
    security = Security.from_config(DcsConfig(), "by default")
    assert security.token == "by default" and security.admits("by default")
    for wrong in ("", "by defaul", "by default\n", None, 5, "é", "\ud800"):
        assert not security.admits(wrong)
    named = Security.from_config(DcsConfig(token_file=str(tmp_path / "named")), "by default")
    assert len(named.token) == 64 and not named.admits("by default")


def test_unusable_token_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, why in (("none", "No such file"), ("empty", "is empty"), ("binary", "decode")):
        with pytest.raises(ConfigError, match=why) as raised:
            Security.from_config(DcsConfig(token_file=str(tmp_path / name)))
        assert "dcs.token_file" in str(raised.value)


def test_both_sides_of_tls_require_a_certificate_of_the_authority(tmp_path: Path) -> None:
    ours, node = Authority(tmp_path, "ours"), Authority(tmp_path, "ours2").issue("node")
    good = ours.issue("node")
    cfg = DcsConfig(tls_cert=str(good.cert), tls_key=str(good.key), tls_ca=str(ours.cert))
    security = Security.from_config(cfg)
    for context in (security.server_context, security.client_context):
        assert context is not None and context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    for broken in (cfg.model_copy(update={"tls_key": str(node.key)}),
                   cfg.model_copy(update={"tls_ca": str(good.key)}),
                   cfg.model_copy(update={"tls_cert": "/nonexistent"})):
        with pytest.raises(ConfigError, match=r"dcs\.tls_cert"):
            Security.from_config(broken)


@pytest.mark.parametrize("address", ["10.0.0.5", "0.0.0.0", "192.168.1.1", "::"])
def test_public_address_requires_a_token_or_tls(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"everybody.*dcs\.token_file"):
        Security().require_for(address)
    Security("secret").require_for(address)
    ours = Authority(tmp_path, "ours")
    good = ours.issue("node")
    Security.from_config(DcsConfig(tls_cert=str(good.cert), tls_key=str(good.key), tls_ca=str(ours.cert))
                         ).require_for(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_address_requires_nothing(address: str) -> None:
    Security().require_for(address)
