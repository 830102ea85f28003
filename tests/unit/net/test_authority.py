"""The certificates of a cluster's hosts: made from the secret alone, good for the TLS of every part."""

from __future__ import annotations

import datetime
import ssl
import time
from pathlib import Path

import pytest
from cryptography import x509
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic_rl.net.authority import RENEWED_DAYS, VALID_DAYS, Authority, new_key
from elastic_rl.net.cluster_secret import ClusterSecret

NOW = 1.8e9
DAY_S = 86400.0
NAMES = ("10.0.0.7", "fd00::7", "localhost", "gpu-7")
SECRET = ClusterSecret("5e" * 32)


def authority(secret: ClusterSecret = SECRET, cluster: str = "lab") -> Authority:
    return Authority.derived(secret.authority(), cluster)


def test_hosts_with_the_secret_trust_one_another_and_no_other_cluster() -> None:
    key = new_key()
    made = authority().issue(key, NAMES, NOW)
    assert authority().objection(made, key, NAMES, NOW) == "", "another host with the secret"
    assert "none of this cluster" in authority(ClusterSecret.generate()).objection(made, key, NAMES, NOW)
    assert "none of this cluster" in authority(cluster="other").objection(made, key, NAMES, NOW)


def test_certificate_is_replaced_before_it_expires_for_another_address_and_for_another_key() -> None:
    key = new_key()
    made = authority().issue(key, NAMES, NOW)
    last_day = NOW + (VALID_DAYS - RENEWED_DAYS) * DAY_S
    assert authority().objection(made, key, NAMES, last_day - 1) == ""
    assert authority().objection(made, key, NAMES, last_day + 1) == f"it is valid for {RENEWED_DAYS - 1} more days"
    assert authority().objection(made, key, ["10.0.0.8", "gpu-7"], NOW) == "it is not for 10.0.0.8"
    assert authority().objection(made, new_key(), NAMES, NOW) == "it is another key's"
    assert "not valid yet" in authority().objection(made, key, NAMES, NOW - 2 * DAY_S), "by a clock that was ahead"
    for damaged in (b"", b"garbage", made[:-40], authority().certificate):
        assert authority().objection(damaged, key, NAMES, NOW), damaged
    assert authority().objection(made, b"", NAMES, NOW)
    with pytest.raises(ValueError, match=r".+"):
        authority().issue(b"garbage", NAMES, NOW)


@settings(max_examples=25)
@given(st.binary(min_size=32, max_size=32))
def test_every_secret_has_an_authority_and_always_the_same(secret: bytes) -> None:
    one, other = (authority(ClusterSecret(secret.hex())) for _ in range(2))
    keys = [x509.load_pem_x509_certificate(each.certificate).public_key() for each in (one, other)]
    assert keys[0] == keys[1]


def test_authority_does_not_expire_and_signs_no_other_authority() -> None:
    found = x509.load_pem_x509_certificate(authority(cluster="x" * 200).certificate)
    assert found.not_valid_after_utc.year == 9999 and found.not_valid_before_utc < datetime.datetime.now(datetime.UTC)
    assert found.extensions.get_extension_for_class(x509.BasicConstraints).value.path_length == 0
    made = x509.load_pem_x509_certificate(authority().issue(new_key(), NAMES, NOW))
    assert (made.not_valid_after_utc - made.not_valid_before_utc).days <= 825, "clients of Apple refuse it else"


def _context(folder: Path, purpose: int) -> ssl.SSLContext:
    context = ssl.SSLContext(purpose)
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_cert_chain(folder / "host.pem", folder / "host.key")
    context.load_verify_locations(folder / "ca.pem")
    return context


@pytest.mark.parametrize("name", ["10.0.0.7", "fd00::7", "gpu-7"])
def test_two_hosts_verify_each_other_by_openssl(tmp_path: Path, name: str) -> None:

    for host in ("server", "client"):
        key, own = new_key(), authority()  # each with its own copy of the authority
        (tmp_path / host).mkdir()
        for file, content in (("ca.pem", own.certificate), ("host.key", key),
                              ("host.pem", own.issue(key, NAMES, time.time()))):
            (tmp_path / host / file).write_bytes(content)
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = _context(tmp_path / "server", ssl.PROTOCOL_TLS_SERVER).wrap_bio(to_server, to_client, server_side=True)
    client = _context(tmp_path / "client", ssl.PROTOCOL_TLS_CLIENT).wrap_bio(to_client, to_server, server_hostname=name)
    done: set[object] = set()
    for _ in range(10):
        for side in (client, server):
            try:
                side.do_handshake()
                done.add(side)
            except ssl.SSLWantReadError:
                continue
    assert done == {client, server}
