"""The token and the TLS settings of the checkpoint service."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from support.certificates import Authority

from elastic_rl.config import Config, DcsConfig
from elastic_rl.dcs.node import service
from elastic_rl.dcs.security import Security
from elastic_rl.errors import ConfigError
from elastic_rl.net.cluster_secret import ClusterSecret


def _security(cfg: DcsConfig, secret: Path | None = None, *, required: bool = False) -> Security:
    return Security.from_config(Config(job="j", dcs=cfg), secret, required=required)


def test_no_files_mean_no_token_and_no_tls(tmp_path: Path) -> None:
    for secret in (None, tmp_path / "secret"):
        security = _security(DcsConfig(), secret)
        assert security == Security() and security.admits("") and security.admits("anything")
        with pytest.raises(ConfigError, match="token|secret"):
            _security(DcsConfig(), secret, required=True)


def test_node_is_not_open_to_everybody_unless_told_so(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--etcd", "127.0.0.1:1", "--id", "a"]
    assert service.main(options) == 2 and "no token for the DCS nodes" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        service.main([*options, "--secret", "a", "--no-token"])
    assert "not allowed with" in capsys.readouterr().err


def test_node_does_not_serve_without_the_clusters_secret(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--etcd", "127.0.0.1:1", "--id", "a", "--secret", str(tmp_path / "secret")]
    assert service.main(options) == 2 and f"the secret of the cluster, {tmp_path}/secret" in capsys.readouterr().err


def test_only_the_token_is_admitted(tmp_path: Path) -> None:
    (tmp_path / "named").write_text(f" {'0' * 64}\n")
    made = ClusterSecret.generate()
    made.save(tmp_path / "secret")
    for required in (False, True):
        security = _security(DcsConfig(), tmp_path / "secret", required=required)
        assert security.token == made.dcs("j") and security.admits(security.token)
        for wrong in ("", security.token[:-1], f"{security.token}\n", None, 5, "é", "\ud800"):
            assert not security.admits(wrong)
        for secret in (tmp_path / "secret", tmp_path / "none", None):
            named = _security(DcsConfig(token_file=str(tmp_path / "named")), secret, required=required)
            assert named.token == "0" * 64, "the token that the settings name needs no secret"


def test_unusable_token_file_is_reported(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, why in (("none", "No such file"), ("empty", "is empty"), ("binary", "decode")):
        with pytest.raises(ConfigError, match=why) as raised:
            _security(DcsConfig(token_file=str(tmp_path / name)))
        assert "dcs.token_file" in str(raised.value)


def test_both_sides_of_tls_require_a_certificate_of_the_authority(tmp_path: Path) -> None:
    ours, node = Authority(tmp_path, "ours"), Authority(tmp_path, "ours2").issue("node")
    good = ours.issue("node")
    cfg = DcsConfig(tls_cert=str(good.cert), tls_key=str(good.key), tls_ca=str(ours.cert))
    security = _security(cfg)
    for context in (security.server_context, security.client_context):
        assert context is not None and context.verify_mode is ssl.CERT_REQUIRED
        assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    for broken in (cfg.model_copy(update={"tls_key": str(node.key)}),
                   cfg.model_copy(update={"tls_ca": str(good.key)}),
                   cfg.model_copy(update={"tls_cert": "/nonexistent"})):
        with pytest.raises(ConfigError, match=r"dcs\.tls_cert"):
            _security(broken)


@pytest.mark.parametrize("address", ["10.0.0.5", "0.0.0.0", "192.168.1.1", "::"])
def test_public_address_requires_a_token_or_tls(tmp_path: Path, address: str) -> None:
    with pytest.raises(ConfigError, match=r"everybody.*dcs\.token_file"):
        Security().require_for(address)
    Security("secret").require_for(address)
    ours = Authority(tmp_path, "ours")
    good = ours.issue("node")
    _security(DcsConfig(tls_cert=str(good.cert), tls_key=str(good.key), tls_ca=str(ours.cert))).require_for(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "127.1.2.3", "::1"])
def test_loopback_address_requires_nothing(address: str) -> None:
    Security().require_for(address)
