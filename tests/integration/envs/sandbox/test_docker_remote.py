"""Engines behind TLS and SSH: a dockerd of the test's own with its own certificates, an sshd before an engine."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import os
import shutil
import socket
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from composer.contract import SandboxLimits
from composer.errors import SandboxError, SandboxStartError
from envs.sandbox.docker import DockerBackend
from envs.sandbox.docker.tunnel import TLS_VARIABLES
from tests.conftest import REPO, start_engine

pytestmark = pytest.mark.docker
MACHINE = "127.0.0.1"


def free_port() -> int:
    with socket.create_server((MACHINE, 0)) as server:
        return server.getsockname()[1]


def make_certificates(folder: Path) -> None:
    """An authority, and what it vouches for: the engine at `MACHINE`, and a client."""
    now = datetime.datetime.now(datetime.UTC)

    def make(name: str, issuer: x509.Name, signer: ec.EllipticCurvePrivateKey | None, is_authority: bool = False):
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        address = x509.IPAddress(ipaddress.IPv4Address(MACHINE))
        certificate = (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(days=1))
            .not_valid_after(now + datetime.timedelta(days=2))
            .add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([address]), critical=False)
            .sign(signer or key, hashes.SHA256())
        )
        return key, certificate

    folder.mkdir(parents=True)
    root = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "tests")])
    authority, certificate = make("tests", root, None, is_authority=True)
    (folder / "ca.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    for name, stem in ((MACHINE, "server-"), ("client", "")):
        key, certificate = make(name, root, authority)
        (folder / f"{stem}cert.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        (folder / f"{stem}key.pem").write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )


@pytest.fixture(scope="module")
def tls_engine(docker_engine: str, request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """Address of an engine that speaks TLS, and a folder as DOCKER_CERT_PATH names one."""
    script = REPO / ".ci" / "docker.sh"
    folder = Path(tempfile.gettempdir()) / f"composer-tlsengine.{os.getpid()}"
    certificates = folder / "certificates"
    make_certificates(certificates)
    port = free_port()
    try:
        start_engine(script, folder, request.config, str(port), str(certificates))
        yield f"tcp://{MACHINE}:{port}", certificates
    finally:
        subprocess.run([script, "stop", folder], check=True, timeout=120)


@pytest.fixture
def tls(tls_engine: tuple[str, Path], monkeypatch: pytest.MonkeyPatch) -> str:
    address, certificates = tls_engine
    monkeypatch.setenv("DOCKER_HOST", address)
    monkeypatch.setenv("DOCKER_TLS_VERIFY", "1")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(certificates))
    return address


@pytest.fixture
def sshd(docker_engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An sshd of the test's own; the address of the engine behind it."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None or shutil.which("ssh") is None:
        pytest.skip("no sshd(8) and ssh(1) here: apt-get install openssh-server openssh-client")
    port, user = free_port(), os.environ.get("USER") or subprocess.check_output(["id", "-un"], text=True).strip()
    for name in ("host", "mine"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    public = (tmp_path / "host.pub").read_text().split()
    (tmp_path / "known").write_text(f"[{MACHINE}]:{port} {public[0]} {public[1]}\n")
    (tmp_path / "sshd_config").write_text(
        f"ListenAddress {MACHINE}:{port}\nHostKey {tmp_path}/host\nAuthorizedKeysFile {tmp_path}/mine.pub\n"
        "StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin prohibit-password\nAllowStreamLocalForwarding yes\n"
    )
    (tmp_path / "config").write_text(
        f"Host *\n  IdentityFile {tmp_path}/mine\n  IdentitiesOnly yes\n  UserKnownHostsFile {tmp_path}/known\n"
    )
    # The user's own configuration stays as it is.
    wrapper = tmp_path / "bin/ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    wrapper.chmod(wrapper.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{wrapper.parent}:{os.environ['PATH']}")
    separated = Path("/run/sshd")
    made = os.geteuid() == 0 and not separated.exists()
    if made:
        separated.mkdir(mode=0o755)
    server = subprocess.Popen([program, "-D", "-e", "-f", tmp_path / "sshd_config"], stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection((MACHINE, port), 1).close()
                break
            except OSError:
                time.sleep(0.05)
        yield f"ssh://{user}@{MACHINE}:{port}{docker_engine.removeprefix('unix://')}"
    finally:
        server.terminate()
        server.wait()
        if made:
            separated.rmdir()


async def use(backend: DockerBackend) -> None:
    """What a sandbox does, over all kinds of streams."""
    sandbox = await backend.start({"a.txt": b"hello\n"}, SandboxLimits())
    assert (await sandbox.shell("cd /tmp; x=1; cat ~/project/a.txt")).output == b"hello\n"
    assert (await sandbox.shell("echo $x $PWD")).output == b"1 /tmp\n"
    # The end of what a program reads arrives, and what it writes after that comes back.
    data = bytes(range(256)) * 1200
    assert (await sandbox.exec(["sh", "-c", "wc -c; sleep 0.3; echo end"], stdin=data)).output == b"307200\nend\n"
    big = await sandbox.exec(["sh", "-c", "head -c 5000000 /dev/zero | tr '\\0' a; exit 3"], timeout_s=30)
    assert (big.exit_code, big.truncated) == (3, True)
    ours, theirs = socket.socketpair()
    running = asyncio.ensure_future(sandbox.exec(["cat"], channel=theirs))
    ours.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(ours, b"back and forth")
    assert await loop.sock_recv(ours, 100) == b"back and forth"
    ours.shutdown(socket.SHUT_WR)
    assert (await running).exit_code == 0
    ours.close()
    await sandbox.write("b.bin", data)
    assert await sandbox.read("b.bin") == data
    assert (await sandbox.exec(["sleep", "60"], timeout_s=0.5)).timed_out
    fork = await sandbox.fork()
    assert set(await fork.files()) == {"a.txt", "b.bin"}
    await asyncio.gather(sandbox.stop(), fork.stop())


def test_an_engine_on_tls(tls: str, run: Callable, docker_image: str) -> None:
    backend = DockerBackend("tls", docker_image)
    try:
        run(use(backend))
        assert all(finding.ok for finding in backend.check())
    finally:
        run(backend.close())


def test_an_engine_of_another_authority_is_refused(
    tls: str, run: Callable, docker_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_certificates(tmp_path / "others")
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path / "others"))
    backend = DockerBackend("tls", docker_image)
    with pytest.raises(SandboxStartError, match="certificate verify failed"):
        run(backend.start({}, SandboxLimits()))
    run(backend.close())
    monkeypatch.setenv("DOCKER_CERT_PATH", str(tmp_path / "none"))
    with pytest.raises(SandboxStartError, match="there is no .*ca.pem .*DOCKER_CERT_PATH"):
        run(backend.start({}, SandboxLimits()))
    run(backend.close())


def test_a_client_without_tls_is_told_that_it_is_needed(
    tls: str, run: Callable, docker_image: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in TLS_VARIABLES:
        monkeypatch.delenv(name)
    backend = DockerBackend("plain", docker_image)
    with pytest.raises(SandboxError, match="HTTP request to an HTTPS server|malformed|400"):
        run(backend.start({}, SandboxLimits()))
    run(backend.close())


def test_an_engine_behind_ssh(sshd: str, run: Callable, docker_image: str) -> None:
    backend = DockerBackend("ssh", docker_image, host=sshd)
    try:
        run(use(backend))
        # The connection breaks: what is asked next goes over a new one.
        tunnel = backend._engine._tunnel
        assert tunnel is not None
        tunnel._process.kill()  # pyright: ignore[reportAttributeAccessIssue]
        tunnel._process.wait()  # pyright: ignore[reportAttributeAccessIssue]
        run(use(backend))
    finally:
        run(backend.close())


def test_a_machine_that_lets_nobody_in_says_so(sshd: str, run: Callable, docker_image: str, tmp_path: Path) -> None:
    (tmp_path / "mine.pub").write_text("")
    backend = DockerBackend("ssh", docker_image, host=sshd)
    with pytest.raises(SandboxStartError, match="ssh could not forward the engine's socket of .*Permission denied"):
        run(backend.start({}, SandboxLimits()))
    run(backend.close())
