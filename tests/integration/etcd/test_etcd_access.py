"""Access to an etcd with TLS and users: certificates, passwords, and the errors when access is denied."""

from __future__ import annotations

import base64
import itertools
import ssl
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.certificates import Authority, Identity
from support.etcd_server import EtcdServers
from support.waiting import wait_until

from elastic_rl import config
from elastic_rl.config import Config
from elastic_rl.coordinator.election.election import Election
from elastic_rl.dcs.fetch.puller import HeadWatch
from elastic_rl.errors import ConfigError, EtcdDenied, EtcdFull, EtcdUnavailable
from elastic_rl.etcd import access
from elastic_rl.etcd.access import Access, TlsFiles
from elastic_rl.etcd.client import EtcdClient, Op
from elastic_rl.etcd.keys import ROOT, ClusterKeys, Keys
from elastic_rl.etcd.membership import Membership, members
from elastic_rl.etcd.transaction import range_end
from elastic_rl.host import preflight


@dataclass
class Guarded:
    """An etcd that requires certificates of its clients, and a user."""

    servers: EtcdServers
    good: Authority
    other: Authority
    folder: Path

    def admin(self, path: str, body: dict[str, Any]) -> Any:
        token = self._gateway("auth/authenticate", {"name": "root", "password": "r"})["token"]
        return self._gateway(path, body, token)

    def _gateway(self, path: str, body: dict[str, Any], token: str = "") -> Any:
        context = ssl.create_default_context(cafile=str(self.good.cert))
        client = self.good.issue("gateway", hosts=["127.0.0.1"])
        context.load_cert_chain(client.cert, client.key)
        return self.servers.ask(path, body, token=token, verify=context)

    def allow(self, prefix: str) -> None:
        """Permits the user to read and write under the prefix."""
        permission = {"permType": 2, "key": _b64(prefix.encode()), "range_end": _b64(range_end(prefix))}
        self.admin("auth/role/grant", {"name": "trainers", "perm": permission})

    def forbid(self, prefix: str) -> None:
        self.admin("auth/role/revoke", {"role": "trainers", "key": _b64(prefix.encode()),
                                        "range_end": _b64(range_end(prefix))})

    def password(self, text: str) -> str:
        """Path of a file with the password."""
        path = self.folder / f"password-{len(list(self.folder.iterdir()))}"
        path.write_text(text + "\n")
        return str(path)

    def start(self) -> Guarded:
        client = self.good.issue("client", hosts=["127.0.0.1"])
        self.servers.settings = {"tls_ca": str(self.good.cert), "tls_cert": str(client.cert),
                                 "tls_key": str(client.key)}
        self.servers.start()
        for name, secret in (("root", "r"), ("rl", "right")):
            self._gateway("auth/user/add", {"name": name, "password": secret})
        for role in ("root", "trainers"):
            self._gateway("auth/role/add", {"name": role})
        self._gateway("auth/user/grant", {"user": "root", "role": "root"})
        self._gateway("auth/user/grant", {"user": "rl", "role": "trainers"})
        self._gateway("auth/enable", {})
        self.allow(f"{ROOT}/")
        self.servers.settings |= {"user": "rl", "password_file": self.password("right")}
        return self


def _b64(raw: bytes) -> str:
    return base64.b64encode(raw).decode()


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Guarded]:
    folder = tmp_path_factory.mktemp("guarded")
    good, other = Authority(folder, "good"), Authority(folder, "other")
    servers = EtcdServers(folder / "etcd", 1, gateway=True, tls=good.issue("server", hosts=["127.0.0.1"]),
                          # Weak hashes of passwords: a test signs in often, and each costs 0.1 s of a core otherwise.
                          flags=["--client-cert-auth", "--trusted-ca-file", str(good.cert), "--bcrypt-cost", "4"])
    try:
        yield Guarded(servers, good, other, folder).start()
    finally:
        servers.close()


def test_client_works_over_tls_as_a_user(guarded: Guarded, keys: Keys) -> None:
    with guarded.servers.connect() as etcd, etcd.keepalive(5) as kept:
        revision = etcd.put(keys.root + "a", b"1")
        with etcd.watch(keys.root, start_revision=revision) as watch:
            event = watch.get(30)
            assert event is not None and event.kv.value == b"1"
            etcd.put(keys.root + "leased", b"", lease=kept.id)
        (status,) = etcd.statuses()
        assert status.is_leader and not status.error and not status.alarms and status.db_bytes > 0
        assert kept.alive
    with guarded.servers.connect() as etcd:
        assert etcd.get(keys.root + "leased") is None  # the lease was revoked, as the user


@pytest.mark.parametrize(("wrong", "says"), [
    ({"password_file": "wrong"}, "authentication failed.*etcd.password_file is wrong"),
    ({"user": "", "password_file": ""}, "permission denied.*etcd.user"),
    ({"tls_ca": "other"}, "CERTIFICATE_VERIFY_FAILED.*check etcd.tls_ca"),
    ({"tls_cert": "", "tls_key": ""}, "no secure connection.*etcd.tls_cert"),
    ({"tls_cert": "other", "tls_key": "other"}, "no secure connection.*etcd.tls_cert"),
    ({"tls_server_name": "elsewhere.example"}, "no secure connection.*etcd.tls_server_name"),
])
def test_denied_client_gets_the_reason_at_once(guarded: Guarded, wrong: dict[str, str], says: str) -> None:
    stranger = guarded.other.issue("stranger")
    files = {"password_file": guarded.password("wrong"), "tls_ca": str(guarded.other.cert),
             "tls_cert": str(stranger.cert), "tls_key": str(stranger.key)}
    settings = {name: files[name] if value in ("wrong", "other") else value for name, value in wrong.items()}
    with guarded.servers.connect(retry_budget_s=3600.0, **settings) as etcd:
        with pytest.raises(EtcdDenied, match=says) as refused:
            etcd.put(f"{ROOT}/x", b"")
        assert "right" not in str(refused.value)


def test_client_without_tls_gets_a_hint_at_tls(guarded: Guarded) -> None:
    with EtcdClient(guarded.servers.endpoints, retry_budget_s=0.5) as etcd, \
            pytest.raises(EtcdUnavailable, match="we speak no TLS"):
        etcd.get(f"{ROOT}/x")


def test_missing_permission_is_named_and_the_client_recovers_once_granted(guarded: Guarded) -> None:
    keys = Keys("forbidden")
    guarded.forbid(f"{ROOT}/")
    try:
        with guarded.servers.connect() as etcd, HeadWatch(etcd, keys, "policy") as heads:
            with pytest.raises(EtcdDenied, match="permission denied.*readwrite on the prefix /elastic_rl/"):
                etcd.put(keys.root + "x", b"")
            with etcd.watch(keys.root, start_revision=1) as watch, pytest.raises(EtcdDenied):
                watch.get(30)
            with pytest.raises(EtcdDenied):
                heads.get(30)
            guarded.allow(f"{ROOT}/")
            etcd.put(keys.root + "x", b"")
            assert heads.get(0.2) is None
    finally:
        guarded.allow(f"{ROOT}/")


def test_auth_token_lost_by_etcd_is_renewed_under_watch_lease_and_leader(guarded: Guarded, keys: Keys) -> None:
    """etcd keeps auth tokens in memory: a member that restarts knows none of them."""
    with guarded.servers.connect() as etcd, etcd.keepalive(20) as kept:
        election = Election(etcd, ClusterKeys(keys.job), "a", "", 10).start()
        revision = etcd.put(keys.root + "n", b"0", lease=kept.id)
        with etcd.watch(keys.root + "n", start_revision=revision + 1) as watch:
            etcd.put(keys.root + "n", b"1", lease=kept.id)
            first = watch.get(30)
            assert first is not None and first.kv.value == b"1"
            guarded.servers.kill(0)
            guarded.servers.restart(0)
            etcd.put(keys.root + "n", b"2", lease=kept.id)
            second = watch.get(30)
            assert second is not None and second.kv.value == b"2"
        assert kept.alive
        wait_until(lambda: election.is_leader, what="the leader")
        assert etcd.txn(election.guard, [Op.put(keys.root + "led", b"")]).succeeded
        election.stop()


def test_client_uses_a_changed_password_without_restart(guarded: Guarded, keys: Keys) -> None:
    file = guarded.password("right")
    with guarded.servers.connect(password_file=file) as etcd:
        etcd.put(keys.root + "x", b"1")
        try:
            guarded.admin("auth/user/changepw", {"name": "rl", "password": "newer"})  # and all tokens are void
            with pytest.raises(EtcdDenied, match="password_file is wrong"):
                etcd.put(keys.root + "x", b"2")
            Path(file).write_text("newer")
            etcd.put(keys.root + "x", b"3")
        finally:
            guarded.admin("auth/user/changepw", {"name": "rl", "password": "right"})


def test_doctor_reports_healthy_members_and_denied_access(guarded: Guarded) -> None:
    def findings(**settings: str) -> dict[str, preflight.Verdict]:
        cfg = Config(etcd=guarded.servers.config(**settings))
        return {f.check: f.verdict for f in preflight.examine(cfg) if f.check.startswith("etcd")}

    member = f"etcd {guarded.servers.endpoints[0]}"
    assert findings() == {member: preflight.Verdict.OK, "etcd access": preflight.Verdict.OK,
                          "etcd history": preflight.Verdict.OK}
    wrong = findings(password_file=guarded.password("wrong"))
    assert wrong == {member: preflight.Verdict.FAILED, "etcd access": preflight.Verdict.FAILED}


def test_user_without_the_root_role_may_compact_but_not_defragment(guarded: Guarded, keys: Keys) -> None:
    with guarded.servers.connect() as etcd:
        etcd.compact(etcd.put(keys.root + "x", b""), wait_s=10)
        (member,) = etcd.statuses()
        assert member.quota_bytes == 2 << 30, "by the metrics page, over TLS"
        with pytest.raises(EtcdDenied, match="permission denied"):
            etcd.defragment(member, timeout_s=10)


# -- renewed certificates ----------------------------------------------------------------------------------------------
def _install(identity: Identity, ca: Authority, folder: Path) -> None:
    """Writes the files that the client's settings name, as a renewal does."""
    for source, name in ((ca.cert, "ca.pem"), (identity.cert, "client.pem"), (identity.key, "client.key")):
        partial = folder / f"{name}.partial"
        partial.write_bytes(source.read_bytes())
        partial.replace(folder / name)


def test_client_uses_renewed_certificates_without_restart(tmp_path: Path, keys: Keys,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority is replaced: etcd accepts nothing of the old one, and the client nothing of the old etcd."""
    monkeypatch.setattr(access, "_RECHECK_S", 0.1)
    old, new = Authority(tmp_path, "old"), Authority(tmp_path, "new")
    servers = EtcdServers(tmp_path / "etcd", 1, tls=old.issue("server", hosts=["127.0.0.1"]),
                          flags=["--client-cert-auth", "--trusted-ca-file", str(old.cert)])
    _install(old.issue("client", hosts=["127.0.0.1"]), old, tmp_path)
    servers.settings = {"tls_ca": str(tmp_path / "ca.pem"), "tls_cert": str(tmp_path / "client.pem"),
                        "tls_key": str(tmp_path / "client.key")}
    try:
        with servers.start().connect() as etcd, etcd.keepalive(60) as kept:
            revision = etcd.put(keys.root + "n", b"0")
            with etcd.watch(keys.root + "n", start_revision=revision + 1) as watch:
                servers.kill(0)
                _install(new.issue("client", hosts=["127.0.0.1"]), new, tmp_path)
                servers.renew(new.issue("server", hosts=["127.0.0.1"]), ["--client-cert-auth", "--trusted-ca-file",
                                                                         str(new.cert)])
                servers.restart(0)
                etcd.put(keys.root + "n", b"1")
                event = watch.get(20)
                assert event is not None and event.kv.value == b"1"
            assert kept.alive
    finally:
        servers.close()


def test_watch_survives_a_renewal_and_half_renewed_files_are_not_used(
        guarded: Guarded, tmp_path: Path, keys: Keys, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(access, "_RECHECK_S", 0.0)
    first, second = (guarded.good.issue(name, hosts=["127.0.0.1"]) for name in ("first", "second"))
    _install(first, guarded.good, tmp_path)
    with guarded.servers.connect(tls_ca=str(tmp_path / "ca.pem"), tls_cert=str(tmp_path / "client.pem"),
                                 tls_key=str(tmp_path / "client.key")) as etcd:
        revision = etcd.put(keys.root + "n", b"0")
        with etcd.watch(keys.root + "n", start_revision=revision) as watch:
            assert watch.get(30) is not None  # the stream is open
            channels = etcd._channels._members._channels
            (tmp_path / "client.pem").write_bytes(second.cert.read_bytes())  # its key is not there yet
            etcd.put(keys.root + "n", b"1")
            assert etcd._channels._members._channels is channels
            _install(second, guarded.good, tmp_path)
            etcd.put(keys.root + "n", b"2")
            assert etcd._channels._members._channels is not channels, "the renewed files are not used"
            seen = [event.kv.value for _ in range(2) if (event := watch.get(30)) is not None]
            assert seen == [b"1", b"2"]
            monkeypatch.setattr(access, "_RETIRE_S", 0.0)
            etcd.put(keys.root + "n", b"3")  # now the old channels are closed, and the watch resumes on the new ones
            with pytest.raises(ValueError, match="closed"):
                next(iter(channels.values())).unary_unary("/x")(b"")
            event = watch.get(30)
            assert event is not None and event.kv.value == b"3"


# -- settings ----------------------------------------------------------------------------------------------------------
def test_access_rejects_bad_certificates_and_secrets_before_the_first_call(tmp_path: Path) -> None:
    ca, junk, empty = Authority(tmp_path, "ca"), tmp_path / "junk", tmp_path / "empty"
    junk.write_text("no PEM")
    empty.write_text("\n")
    one, two = ca.issue("one"), ca.issue("two")
    for settings, says in (
            ({"tls_ca": str(junk)}, "etcd.tls_ca"), ({"tls_ca": str(tmp_path / "none")}, "etcd.tls_ca"),
            ({"tls_ca": str(ca.cert), "tls_cert": str(one.cert), "tls_key": str(two.key)}, "etcd.tls_key"),
            ({"user": "u", "password_file": str(tmp_path / "none")}, "etcd.password_file"),
            ({"user": "u", "password_file": str(empty)}, "etcd.password_file")):
        with pytest.raises(ConfigError, match=says):
            Access.from_config(EtcdServers(tmp_path, 1).config(**settings))


@pytest.mark.parametrize("settings", [
    {"tls_cert": "c"}, {"tls_key": "k", "tls_ca": "a"}, {"tls_server_name": "n"}, {"user": "u"},
    {"password_file": "p"}, {"user": "u", "password_file": "p", "endpoints": []}])
def test_config_rejects_settings_that_do_not_fit_together(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"belong together|need|set etcd\.endpoints"):
        config.parse({"etcd": {"endpoints": ["a:1"], **settings}})


def test_client_rejects_endpoints_that_contradict_the_tls_settings(tmp_path: Path) -> None:
    ca = Authority(tmp_path, "ca")
    with pytest.raises(ConfigError, match="requires TLS.*etcd.tls_ca"):
        EtcdClient(["https://127.0.0.1:1"])
    with pytest.raises(ConfigError, match="is without TLS"):
        EtcdClient(["http://127.0.0.1:1"], access=Access(TlsFiles(str(ca.cert))))


# -- a full database ---------------------------------------------------------------------------------------------------
def _fill(etcd: EtcdClient, prefix: str) -> tuple[str, EtcdFull]:
    """Puts keys until one is refused; that key and the refusal."""
    for i in itertools.count():
        try:
            etcd.put(f"{prefix}{i}", b"x" * 20_000)
        except EtcdFull as e:
            return f"{prefix}{i}", e
    raise AssertionError("unreachable")


def test_full_database_is_reported_at_once_and_members_and_leaders_survive_it(tmp_path: Path, keys: Keys) -> None:
    servers = EtcdServers(tmp_path, 1, flags=["--quota-backend-bytes", str(4 << 20)], gateway=True)
    try:
        with servers.start().connect() as etcd, Membership(etcd, keys, "worker", "w", ttl_s=3).start() as member:
            election = Election(etcd, ClusterKeys(keys.job), "a", "", 3).start()
            wait_until(lambda: election.is_leader, what="the leader")
            with ThreadPoolExecutor(8) as threads:  # several on their way at once: some are applied *and* refused
                refused = dict(threads.map(lambda n: _fill(etcd, f"{keys.root}fill/{n}/"), range(8)))
            assert len(refused) == 8 and all("compact and defragment" in str(e) for e in refused.values())
            assert not [key for key in refused if etcd.get(key)], "a put was reported as refused, and applied"
            assert any("NOSPACE" in alarm for alarm in etcd.statuses()[0].alarms)
            assert not etcd.get(keys.root + "none")  # reads go on
            for step in range(20):
                member.progress(step, "full")
                time.sleep(0.02)
            assert election.is_leader and members(etcd, keys)[0].phase != "full"

            etcd.delete_prefix(keys.root + "fill/")  # deleting is allowed
            etcd.compact(etcd.range(keys.root)[1])
            servers.ask("maintenance/defragment", {})
            for alarm in servers.ask("maintenance/alarm", {"action": "GET"})["alarms"]:
                servers.ask("maintenance/alarm", {"action": "DEACTIVATE", **alarm})
            member.progress(99, "again")
            wait_until(lambda: members(etcd, keys)[0].phase == "again", what="the member's next beat")
            assert etcd.txn(election.guard, [Op.put(keys.root + "led", b"")]).succeeded
            election.stop()
    finally:
        servers.close()
