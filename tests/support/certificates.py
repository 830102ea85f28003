"""Certificates for TLS tests: an authority, and what it signs."""

from __future__ import annotations

import datetime
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


@dataclass(frozen=True)
class Identity:
    """PEM files."""

    cert: Path
    key: Path


class Authority:
    """A certificate authority of its own; files below ``folder``."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder, self._name = folder, name
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._cert = self._sign(name, self._key.public_key(), ca=True)
        self.cert = folder / f"{name}.pem"
        self.cert.write_bytes(self._cert.public_bytes(serialization.Encoding.PEM))

    def issue(self, name: str, *, hosts: Sequence[str] = ()) -> Identity:
        """A certificate for a node or a client. ``hosts``: IP addresses that it is for, and no other name: etcd's HTTP
        gateway takes no certificate with a common name."""
        key = ec.generate_private_key(ec.SECP256R1())
        out = Identity(self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key")
        signed = self._sign(name, key.public_key(), ca=False, hosts=hosts)
        out.cert.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        out.key.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8,
                                              serialization.NoEncryption()))
        return out

    def _sign(self, name: str, key: ec.EllipticCurvePublicKey, *, ca: bool,
              hosts: Sequence[str] = ()) -> x509.Certificate:
        now = datetime.datetime.now(datetime.UTC)
        made = (x509.CertificateBuilder()
                .subject_name(x509.Name([] if hosts else [x509.NameAttribute(NameOID.COMMON_NAME, name)]))
                .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
                .public_key(key).serial_number(x509.random_serial_number())
                .not_valid_before(now - datetime.timedelta(hours=1)).not_valid_after(now + datetime.timedelta(days=1))
                .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True))
        names = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts] or [x509.DNSName(name)]
        made = made.add_extension(x509.SubjectAlternativeName(names), critical=False)
        return made.sign(self._key, hashes.SHA256())
