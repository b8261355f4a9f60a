"""The Ray launcher against a real cluster that is already there: it joins, asks for room first, and leaves it alone."""

import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from composer.contract import Finding
from launchers.local import LocalLauncher
from launchers.ray import RayLauncher

CLUSTER = textwrap.dedent(
    """
    import sys
    from launchers.local import LocalLauncher

    launcher = LocalLauncher("ray-test-cluster", {"CPU": 3}, object_store_bytes=100 * 2**20)
    print(launcher.start(), flush=True)
    import ray

    for line in sys.stdin:
        print(ray.cluster_resources()["CPU"], flush=True)
    launcher.stop()
    """
)
JOIN = textwrap.dedent(
    """
    import sys
    from composer.errors import LauncherError
    from launchers.ray import RayLauncher

    launcher = RayLauncher("ray-test-run", {"CPU": int(sys.argv[2])}, address=sys.argv[1])
    try:
        launcher.start()
    except LauncherError as error:
        print(error)
        raise SystemExit(1)
    import ray

    print(ray.get(ray.remote(lambda: 6 * 7).remote()))
    launcher.stop()
    launcher.stop()
    """
)
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3]), "RAY_AUTH_MODE": "disabled"}


def join(address: str, cpus: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", JOIN, address, str(cpus)],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


@pytest.mark.timeout(240)
def test_it_joins_a_cluster_and_leaves_it_as_it_was() -> None:
    cluster = subprocess.Popen(
        [sys.executable, "-c", CLUSTER], env=ENVIRONMENT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert cluster.stdin is not None and cluster.stdout is not None
    try:
        address = cluster.stdout.readline().strip()
        assert address.startswith("127.0.0.1:")

        joined = join(address, 2)
        assert (joined.returncode, joined.stdout.split()[-1]) == (0, "42"), joined.stderr

        refused = join(address, 5)
        assert refused.returncode == 1
        assert "has 3 CPU, the plan needs 5" in refused.stdout
        assert "`composer plan` shows it" in refused.stdout

        cluster.stdin.write("still there?\n")
        cluster.stdin.flush()
        assert cluster.stdout.readline().strip() == "3.0"
        cluster.stdin.close()
        assert cluster.wait(30) == 0
    finally:
        cluster.kill()
        cluster.wait()
        LocalLauncher("ray-test-sweeper", {}).sweep()


@pytest.mark.timeout(120)
def test_an_address_without_a_cluster_is_named() -> None:
    refused = join("127.0.0.1:1", 1)
    assert refused.returncode == 1
    assert "launcher.args.address='127.0.0.1:1': no Ray cluster answers there" in refused.stdout
    assert "ray start --head" in refused.stdout


def test_its_checks_name_ray_and_a_cluster_that_is_not_there() -> None:
    ray, cluster = RayLauncher("x", {}, address="127.0.0.1:1").check()
    assert (ray.name, ray.ok) == ("ray", True)
    assert isinstance(cluster, Finding) and not cluster.ok and cluster.required
    assert "launcher.args.address='127.0.0.1:1'" in cluster.detail
    assert "ray start --head" in cluster.remedy and "launcher=local" in cluster.remedy


def test_a_cluster_that_answers_is_found() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert RayLauncher("x", {}, address=f"127.0.0.1:{server.getsockname()[1]}").check()[1].ok
