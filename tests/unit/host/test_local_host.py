"""This host as a member of its cluster: its name and address, the settings that follow, its certificate."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_rl.config import Config, parse
from elastic_rl.errors import ConfigError
from elastic_rl.host.local_host import LocalHost, host_name
from elastic_rl.host.paths import ClusterPaths
from elastic_rl.net.authority import VALID_DAYS, Authority
from elastic_rl.net.cluster_secret import ClusterSecret
from elastic_rl.net.tls import TlsFolder

LOCAL = LocalHost(name="a")
FAR = LocalHost(name="a", address="10.0.0.7")
TLS = TlsFolder(Path("/c/tls"))


@pytest.fixture
def paths(tmp_path: Path) -> ClusterPaths:
    return ClusterPaths(tmp_path)


def test_host_of_a_folder_without_a_file_is_on_loopback_under_its_own_name(paths: ClusterPaths) -> None:
    host = LocalHost.of(paths)
    assert (host.name, host.address, host.is_local, host.tls(paths)) == (host_name(), "127.0.0.1", True, None)
    host.named("gpu-7", "10.0.0.7").save(paths)
    again = LocalHost.of(paths)
    assert (again.name, again.address) == ("gpu-7", "10.0.0.7") and again.tls(paths) == TlsFolder(paths.folder / "tls")
    assert again.named("", "") == again
    for damaged in ("{", '{"name": "a", "address": "nowhere"}', '{"name": "a/b"}'):
        paths.local_host.write_text(damaged)
        with pytest.raises(ConfigError, match=r"host\.json cannot be read"):
            LocalHost.of(paths)


@pytest.mark.parametrize("name", ["a/b", "-a", "a b", "ä", "a" * 101, ".", "10.0.0.9"])
def test_name_that_no_key_or_url_can_have_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot name a host"):
        LOCAL.named(name, "")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "224.0.0.1", "gpu-7", "10.0.0", "10.0.0.7:80", "255.255.255.255",
                                     "fe80::1%lo", "fe80::1", "::ffff:10.0.0.7"])
def test_address_that_others_cannot_use_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match=r"--address=.* is no"):
        LOCAL.named("", address)


def test_settings_follow_the_address_and_the_folder() -> None:
    stored = parse({"cluster": "lab"})
    here = FAR.settings_here(stored, TLS)
    assert (here.coordinator.host, here.coordinator.tls_ca) == ("10.0.0.7", "/c/tls/ca.pem")
    assert here.coordinator.allowed_hosts == ["a"]
    assert (here.etcd.tls_cert, here.etcd.tls_key) == ("/c/tls/host.pem", "/c/tls/host.key")
    assert FAR.settings_here(here, TLS) == here
    moved = FAR.replace(address="10.0.0.8").settings_here(stored, TlsFolder(Path("/d/tls")))
    assert (moved.coordinator.host, moved.etcd.tls_ca) == ("10.0.0.8", "/d/tls/ca.pem")
    assert LOCAL.settings_here(stored, TLS) == stored


def test_what_an_operator_chose_stays() -> None:
    chosen = parse({"cluster": "lab", "coordinator": {"host": "0.0.0.0", "tls_cert": "/x.pem", "tls_key": "/x.key"},
                    "etcd": {"endpoints": ["e:2379"], "tls_ca": "/e.pem"}})
    allowed = chosen.coordinator.model_copy(update={"allowed_hosts": ["a"]})
    assert FAR.settings_here(chosen, TLS) == chosen.model_copy(update={"coordinator": allowed})
    everywhere = FAR.settings_here(parse({"cluster": "lab", "coordinator": {"host": "0.0.0.0"}}), TLS)
    assert everywhere.coordinator.host == "0.0.0.0" and everywhere.coordinator.tls_cert == "/c/tls/host.pem"
    own: Config = parse({"etcd": {"tls_ca": "/e.pem"}})
    for host in (LOCAL, FAR):
        with pytest.raises(ConfigError, match=r"etcd\.tls_ca is for an etcd that someone else runs"):
            host.settings_here(own, TLS)


def test_servers_that_run_keep_the_secret_that_they_were_started_with(paths: ClusterPaths) -> None:
    secret, now = ClusterSecret.generate(), 1.8e9
    assert FAR.certify(paths, "lab", secret, now=now, renew_only=True), "there is none yet"
    files = [path.read_bytes() for path in (paths.tls.ca, paths.tls.cert, paths.tls.key)]
    with pytest.raises(ConfigError, match="is not the secret that"):
        FAR.certify(paths, "lab", ClusterSecret.generate(), now=now, renew_only=True)
    assert [path.read_bytes() for path in (paths.tls.ca, paths.tls.cert, paths.tls.key)] == files
    for damaged in (paths.tls.cert, paths.tls.key, paths.tls.ca):
        damaged.unlink()
        assert FAR.certify(paths, "lab", secret, now=now, renew_only=True)
        assert not FAR.certify(paths, "lab", secret, now=now, renew_only=True)


def test_certificate_is_made_once_and_renewed_with_the_same_key(paths: ClusterPaths) -> None:
    secret, tls, now = ClusterSecret.generate(), paths.tls, 1.8e9
    assert FAR.certify(paths, "lab", secret, now=now) and not FAR.certify(paths, "lab", secret, now=now)
    key, cert = tls.key.read_bytes(), tls.cert.read_bytes()
    assert all(path.stat().st_mode & 0o077 == 0 for path in (tls.key, tls.cert, tls.folder))
    assert FAR.certify(paths, "lab", secret, now=now + (VALID_DAYS - 10) * 86400)
    assert tls.key.read_bytes() == key and tls.cert.read_bytes() != cert
    assert FAR.replace(address="10.0.0.8").certify(paths, "lab", secret, now=now)
    assert FAR.certify(paths, "lab", ClusterSecret.generate(), now=now)
    assert tls.key.read_bytes() != key, "another secret withdraws the key"
    tls.key.write_bytes(b"damaged")
    assert FAR.certify(paths, "lab", secret, now=now) and not FAR.certify(paths, "lab", secret, now=now)
    good = tls.ca.read_bytes()
    for damaged in (b"", good[:-60], Authority.derived("00" * 32, "lab").certificate):  # as a killed start leaves it
        tls.ca.write_bytes(damaged)
        assert FAR.certify(paths, "lab", secret, now=now) and not FAR.certify(paths, "lab", secret, now=now)
        assert Authority.derived(secret.authority(), "lab").is_own(tls.ca.read_bytes())
    also = ("0.0.0.0", "", "10.1.1.1", "lab.example.com")
    assert FAR.certify(paths, "lab", secret, also=also, now=now)
    assert not FAR.certify(paths, "lab", secret, also=also, now=now)
