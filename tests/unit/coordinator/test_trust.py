"""What clients of the admin API trust: a certificate is checked wherever there is TLS."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
from support.certificates import Authority

from elastic_rl.coordinator.api.tls import ReloadingTrust


@pytest.mark.parametrize("own_authority", [True, False])
def test_certificates_are_checked_for_every_url_with_tls(tmp_path: Path, own_authority: bool) -> None:
    """Without a check, tokens would go to whoever answers."""
    trust = ReloadingTrust(str(Authority(tmp_path, "ca").cert) if own_authority else "")
    for url in ("https://10.0.0.1:8443", "HTTPS://host", "other://host"):
        context = trust.for_url(url)
        assert isinstance(context, ssl.SSLContext)
        assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname
    assert trust.for_url("http://10.0.0.1:8080") is False
