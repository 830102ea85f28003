"""The certificate authority of a cluster, and the certificates that it issues.

The authority's key is derived from the cluster's secret (``ClusterSecret.authority``). So each host that has the secret
makes the certificate of its own servers: nothing but the secret has to be carried to a host, and no host has to be up
for another one to get its certificate. Each also makes its own copy of the authority's certificate; the copies differ
in their signatures only, and any of them verifies what any host has issued.

Nothing here does I/O; the time is given.
"""

from __future__ import annotations

import datetime
import hashlib
import ipaddress
from collections.abc import Iterable
from typing import Self

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

VALID_DAYS = 730
"""Days for which a certificate is valid. Clients of Apple refuse those that are valid for more than 825."""
RENEWED_DAYS = 180
"""A certificate is replaced when it is valid for fewer days than this."""
_SKEW = datetime.timedelta(days=1)
"""A certificate is valid for so long before it was made, since the clocks of hosts differ."""
_CURVE = ec.SECP256R1()  # gRPC takes no certificate with an Ed25519 key
_ORDER = 0xffffffff00000000ffffffffffffffffbce6faada7179e84f3b9cac2fc632551
"""Order of the curve's base point (FIPS 186-4, D.1.2.3): private keys are the numbers from 1 to one less."""
_BEGIN = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_NEVER = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)
"""The end of a certificate that does not expire (RFC 5280, 4.1.2.5)."""


class Authority:
    """Issues certificates that are good for servers and for clients."""

    def __init__(self, key: ec.EllipticCurvePrivateKey, cluster: str) -> None:
        self._key = key
        self._name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"elastic-rl cluster {cluster}"[:64])])
        self._certificate = self._build(x509.CertificateBuilder(), self._name, key.public_key(), _BEGIN, _NEVER, [
            (x509.BasicConstraints(ca=True, path_length=0), True),
            (_key_usage(signs_certificates=True), True)])

    @classmethod
    def derived(cls, token: str, cluster: str) -> Self:
        """The authority of a cluster. ``token``: 64 hexadecimal characters that only the cluster's hosts know."""
        digest = hashlib.sha512(bytes.fromhex(token)).digest()  # twice the length of a key, so that none is likelier
        return cls(ec.derive_private_key(int.from_bytes(digest) % (_ORDER - 1) + 1, _CURVE), cluster)

    @property
    def certificate(self) -> bytes:
        """The authority's own certificate, in PEM."""
        return self._certificate.public_bytes(serialization.Encoding.PEM)

    def issue(self, key: bytes, names: Iterable[str], now: float) -> bytes:
        """A certificate, in PEM, for the owner of a private key (``new_key``). ``names``: IP addresses and host names
        under which it serves. It names no subject: etcd refuses its clients a certificate with a common name where they
        use HTTP. Raises ValueError for what is no key."""
        made = datetime.datetime.fromtimestamp(now, datetime.UTC)
        certificate = self._build(
            x509.CertificateBuilder(), x509.Name([]), _loaded(key).public_key(), made - _SKEW,
            made + datetime.timedelta(days=VALID_DAYS), [
                (x509.BasicConstraints(ca=False, path_length=None), True), (_key_usage(signs_certificates=False), True),
                (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]), False),
                # Critical where there is no subject (RFC 5280, 4.2.1.6).
                (x509.SubjectAlternativeName([_general_name(name) for name in names]), True)])
        return certificate.public_bytes(serialization.Encoding.PEM)

    def objection(self, certificate: bytes, key: bytes, names: Iterable[str], now: float) -> str:
        """Why a certificate is to be replaced; empty if it is good for the owner of the key, under all these names,
        and not about to expire."""
        try:
            found, owner = x509.load_pem_x509_certificate(certificate), _loaded(key)
            found.verify_directly_issued_by(self._certificate)
            have = set(found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
        except (ValueError, TypeError, InvalidSignature, x509.ExtensionNotFound) as e:
            return f"it is none of this cluster: {e or type(e).__name__}"
        if found.public_key() != owner.public_key():
            return "it is another key's"
        if missing := [name for name in names if _general_name(name) not in have]:
            return f"it is not for {', '.join(missing)}"
        at = datetime.datetime.fromtimestamp(now, datetime.UTC)
        if found.not_valid_before_utc > at:
            return "it was made with a clock that was ahead, and is not valid yet"
        left = found.not_valid_after_utc - at
        return f"it is valid for {left.days} more days" if left < datetime.timedelta(days=RENEWED_DAYS) else ""

    def is_own(self, certificate: bytes) -> bool:
        """Whether this is a copy of the authority's certificate, by whichever host of the cluster."""
        try:
            found = x509.load_pem_x509_certificate(certificate)
            return found.public_key() == self._key.public_key() and found.subject == self._name
        except ValueError:
            return False

    def _build(self, builder: x509.CertificateBuilder, subject: x509.Name, key: ec.EllipticCurvePublicKey,
               begin: datetime.datetime, end: datetime.datetime,
               extensions: Iterable[tuple[x509.ExtensionType, bool]]) -> x509.Certificate:
        """Builds a certificate that this authority signs. ``extensions``: each with whether it is critical."""
        own = x509.SubjectKeyIdentifier.from_public_key(self._key.public_key())
        builder = (builder.subject_name(subject).issuer_name(self._name).public_key(key)
                   .serial_number(x509.random_serial_number()).not_valid_before(begin).not_valid_after(end)
                   .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
                   .add_extension(x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(own), critical=False))
        for extension, critical in extensions:
            builder = builder.add_extension(extension, critical)
        return builder.sign(self._key, hashes.SHA256())


def is_certificate(pem: bytes) -> bool:
    """Whether this is a certificate in PEM, whoever has issued it."""
    try:
        x509.load_pem_x509_certificate(pem)
    except ValueError:
        return False
    return True


def new_key() -> bytes:
    """A new private key, in PEM."""
    return ec.generate_private_key(_CURVE).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())


def _loaded(key: bytes) -> ec.EllipticCurvePrivateKey:
    found = serialization.load_pem_private_key(key, None)
    if not isinstance(found, ec.EllipticCurvePrivateKey):
        raise ValueError("no key of an elliptic curve")
    return found


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates, key_cert_sign=signs_certificates, crl_sign=signs_certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False)
