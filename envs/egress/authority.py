"""The certificate authorities of a proxy: its own, which sandboxes trust, and those by which it trusts servers.

Runs in the proxy's environment, whose mitmproxy brings `cryptography` and `OpenSSL`.
"""

from __future__ import annotations

import datetime
import os
from pathlib import Path

import certifi
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from OpenSSL import crypto  # pyright: ignore[reportMissingImports]

_KEY_BITS = 2048
_AGE, _LIFETIME = datetime.timedelta(days=417), datetime.timedelta(days=3650)
_SYSTEM_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem")


def make_authority(folder: Path, organisation: str) -> tuple[str, str]:
    """The root certificate of this proxy, made unless it is there; its key stays in the folder, for its owner alone.

    Args:
        folder: where mitmproxy looks for it.
        organisation: whom it names.

    Returns:
        The certificate (PEM), and OpenSSL's hash of its subject.
    """
    file = folder / "mitmproxy-ca.pem"
    if not file.exists():
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "wb") as target:  # noqa: PTH123 - never readable for others, not for a moment
            target.write(_make(organisation))
    certificate = x509.load_pem_x509_certificate(file.read_bytes())
    subject = crypto.X509.from_cryptography(certificate).subject_name_hash()
    return certificate.public_bytes(serialization.Encoding.PEM).decode(), f"{subject:08x}"


def _make(organisation: str) -> bytes:
    """A key and its certificate, which is as old as a company's root would be."""
    key = rsa.generate_private_key(public_exponent=65537, key_size=_KEY_BITS)
    name = x509.Name(
        [
            x509.NameAttribute(x509.NameOID.ORGANIZATION_NAME, organisation),
            x509.NameAttribute(x509.NameOID.COMMON_NAME, f"{organisation[:56]} Root CA"),
        ]
    )
    begin = datetime.datetime.now(datetime.UTC) - _AGE
    usage = dict.fromkeys(
        (
            "digital_signature",
            "content_commitment",
            "key_encipherment",
            "data_encipherment",
            "key_agreement",
            "encipher_only",
            "decipher_only",
        ),
        False,
    )
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin)
        .not_valid_after(begin + _LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(x509.KeyUsage(key_cert_sign=True, crl_sign=True, **usage), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return private + certificate.public_bytes(serialization.Encoding.PEM)


def trusted(folder: Path, further: str) -> str:
    """A file of the certificates by which servers are trusted: this machine's, and the policy's own."""
    system = next((path for path in _SYSTEM_BUNDLES if Path(path).is_file()), certifi.where())
    text = Path(system).read_text(encoding="utf-8", errors="replace")
    if further:
        text += "\n" + Path(further).expanduser().read_text()
    target = folder / "trusted.pem"
    target.write_text(text)
    return str(target)
