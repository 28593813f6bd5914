"""Keys and certificates: our own authority, the server's certificate, devices' keys."""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from typing import TYPE_CHECKING

from fedspu.errors import DeploymentError, how_to_install

try:  # it comes with Flower
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID
except ImportError:
    raise DeploymentError(
        f"fedspu deploy needs Flower: {how_to_install('flower')}"
    ) from None

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

ALWAYS = ("localhost", "127.0.0.1", "::1")
"""Names by which the server's own machine reaches it; in every certificate."""


@dataclass(frozen=True)
class Pair:
    """A private key and what belongs to it: a certificate, or the public key."""

    private: bytes
    public: bytes


@dataclass(frozen=True)
class Period:
    """From when until when a certificate is valid."""

    start: datetime
    end: datetime

    @staticmethod
    def of_days(days: int) -> "Period":
        """The given number of days from now; an hour earlier, as clocks differ."""
        now = datetime.now(UTC).replace(microsecond=0)
        return Period(now - timedelta(hours=1), now + timedelta(days=days))


@dataclass(frozen=True)
class Certificate:
    """What a certificate says."""

    names: tuple[str, ...]
    period: Period
    issuer: str
    fingerprint: str

    def is_for(self, host: str) -> bool:
        """Whether it is for a server of this name or address."""
        return _plain(host) in {_plain(name) for name in self.names}


def _plain(host: str) -> str:
    """A name or address as it is compared: 0:0:0:0:0:0:0:1 is ::1."""
    try:
        return str(ipaddress.ip_address(host))
    except ValueError:
        return host.lower().rstrip(".")


# Making -------------------------------------------------------------------------------


def make_authority(period: Period) -> Pair:
    """A new authority: the key that signs certificates, and its own certificate."""
    key = ec.generate_private_key(ec.SECP384R1())
    # A number in its name: two authorities are never mistaken for each other.
    name = _name(f"fedspu authority {x509.random_serial_number() % 16**8:08x}")
    made = _certificate(key, name, name, key, period, is_authority=True)
    return Pair(_private(key), made.public_bytes(serialization.Encoding.PEM))


def make_server_certificate(
    authority: Pair, hosts: Sequence[str], period: Period
) -> Pair:
    """A new key for the server, and its certificate for these names and addresses."""
    signing = _load_private(authority.private, "ca/ca.key")
    issuer = x509.load_pem_x509_certificate(authority.public)
    if issuer.public_key() != signing.public_key():
        raise DeploymentError("ca/ca.key and ca/ca.crt do not belong together")
    key = ec.generate_private_key(ec.SECP384R1())
    made = _certificate(
        key, _name("fedspu server"), issuer.subject, signing, period, hosts=hosts
    )
    return Pair(_private(key), made.public_bytes(serialization.Encoding.PEM))


def make_device_key() -> Pair:
    """A new key for a device, as `ssh-keygen -t ecdsa -b 384` makes it."""
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.OpenSSH,
        serialization.NoEncryption(),
    )
    public = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return Pair(private, public + b"\n")


def _certificate(
    key: "EllipticCurvePrivateKey",
    subject: x509.Name,
    issuer: x509.Name,
    signing: "EllipticCurvePrivateKey",
    period: Period,
    hosts: Sequence[str] = (),
    is_authority: bool = False,
) -> x509.Certificate:
    usage = x509.KeyUsage(
        digital_signature=not is_authority,
        key_cert_sign=is_authority,
        crl_sign=is_authority,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
    own = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    above = x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key())
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(period.start)
        .not_valid_after(period.end)
        .add_extension(
            x509.BasicConstraints(is_authority, 0 if is_authority else None), True
        )
        .add_extension(usage, True)
        .add_extension(own, False)
        .add_extension(above, False)
    )
    if not is_authority:
        purpose = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])
        names = x509.SubjectAlternativeName(
            [_general_name(host) for host in dict.fromkeys((*hosts, *ALWAYS))]
        )
        builder = builder.add_extension(purpose, False).add_extension(names, False)
    return builder.sign(signing, hashes.SHA384())


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _private(key: "EllipticCurvePrivateKey") -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )


# Reading ------------------------------------------------------------------------------


def read_certificate(content: bytes, name: str) -> Certificate:
    """What the certificate ``name`` says, as PEM or as bytes of a connection."""
    try:
        if content.lstrip().startswith(b"-----"):
            found = x509.load_pem_x509_certificate(content)
        else:
            found = x509.load_der_x509_certificate(content)
    except ValueError:
        raise DeploymentError(f"{name} is not a certificate; restore it") from None
    try:
        held = found.extensions.get_extension_for_class(x509.SubjectAlternativeName)
        names = tuple(str(entry.value) for entry in held.value)
    except x509.ExtensionNotFound:
        names = ()
    period = Period(found.not_valid_before_utc, found.not_valid_after_utc)
    mark = found.fingerprint(hashes.SHA256()).hex()
    return Certificate(names, period, found.issuer.rfc4514_string(), mark)


def belong_together(private: bytes, certificate: bytes, name: str) -> bool:
    """Whether a certificate is for the private key ``name``."""
    found = x509.load_pem_x509_certificate(certificate)
    return found.public_key() == _load_private(private, name).public_key()


def is_signed_by(certificate: bytes, authority: bytes) -> bool:
    """Whether an authority has signed a certificate."""
    try:
        signer = x509.load_pem_x509_certificate(authority)
        x509.load_pem_x509_certificate(certificate).verify_directly_issued_by(signer)
    except Exception:  # a wrong signature, another name, another kind of key
        return False
    return True


def load_device_key(content: bytes, name: str) -> "EllipticCurvePrivateKey":
    """A device's private key; the message never shows what is in the file."""
    try:
        key = serialization.load_ssh_private_key(content, None)
    except Exception:  # also: it needs a passphrase
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeploymentError(
            f"{name} is not a device's key; make a new one on the server's machine "
            "with `fedspu deploy rotate`"
        )
    return key


def public_part(content: bytes, name: str) -> bytes:
    """The public key of a device's private key, as in its .pub file."""
    made = (
        load_device_key(content, name)
        .public_key()
        .public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
    )
    return made + b"\n"


def mark_of_key(public: bytes) -> str:
    """What tells one public key from another; comments do not count."""
    return sha256(b" ".join(public.split()[:2])).hexdigest()


def _load_private(content: bytes, name: str) -> "EllipticCurvePrivateKey":
    try:
        key = serialization.load_pem_private_key(content, None)
    except Exception:
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise DeploymentError(f"{name} is not a private key as fedspu makes it")
    return key
