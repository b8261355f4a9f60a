"""Makes sandboxes trust the proxy's root certificate, as a company's computers trust their company's.

The system's bundle and its folder of hashed names are for OpenSSL and what rests on it (Python's ssl, curl, git,
Debian's Node), GnuTLS and Go. What has certificates of its own is told by the variables that such companies set:
REQUESTS_CA_BUNDLE (requests, pip before 24.2), SSL_CERT_FILE (httpx, uv and others of rustls), NODE_EXTRA_CA_CERTS
(Node from nodejs.org). Not covered: Java's keystore, browsers, and programs that pin certificates.
"""

from __future__ import annotations

from pathlib import Path

BUNDLE = "/etc/ssl/certs/ca-certificates.crt"


def install(etc: Path, certificate: str, subject_hash: str) -> None:
    """Add a certificate (PEM) to the trust store below `etc`; `subject_hash` is OpenSSL's of its subject."""
    certs = etc / "ssl/certs"
    certs.mkdir(parents=True, exist_ok=True)
    bundle = certs / Path(BUNDLE).name
    text = bundle.read_text() if bundle.is_file() else ""
    if bundle.is_symlink():
        bundle.unlink()
    bundle.write_text(text + ("" if not text or text.endswith("\n") else "\n") + certificate)
    (certs / f"{subject_hash}.0").unlink(missing_ok=True)
    (certs / f"{subject_hash}.0").write_text(certificate)


def variables() -> dict[str, str]:
    """For programs that look into no system's store by themselves."""
    return {name: BUNDLE for name in ("NODE_EXTRA_CA_CERTS", "REQUESTS_CA_BUNDLE", "SSL_CERT_FILE")}
