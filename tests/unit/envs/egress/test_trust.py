"""The trust store of sandboxes."""

from __future__ import annotations

from pathlib import Path

from envs.egress.trust import install


def test_the_certificate_joins_the_bundle_and_the_hashed_names(tmp_path: Path) -> None:
    certs = tmp_path / "ssl/certs"
    certs.mkdir(parents=True)
    (certs / "ca-certificates.crt").write_text("OTHERS")
    install(tmp_path, "OURS\n", "0a1b2c3d")
    assert (certs / "ca-certificates.crt").read_text() == "OTHERS\nOURS\n"
    assert (certs / "0a1b2c3d.0").read_text() == "OURS\n"


def test_a_system_without_certificates_gets_a_bundle(tmp_path: Path) -> None:
    install(tmp_path, "OURS\n", "0a1b2c3d")
    assert (tmp_path / "ssl/certs/ca-certificates.crt").read_text() == "OURS\n"


def test_a_file_behind_a_link_stays_as_it_is(tmp_path: Path) -> None:
    certs = tmp_path / "etc/ssl/certs"
    certs.mkdir(parents=True)
    outside = tmp_path / "bundle"
    outside.write_text("OTHERS\n")
    (certs / "ca-certificates.crt").symlink_to(outside)
    install(tmp_path / "etc", "OURS\n", "0a1b2c3d")
    assert outside.read_text() == "OTHERS\n"
    assert (certs / "ca-certificates.crt").read_text() == "OTHERS\nOURS\n"
