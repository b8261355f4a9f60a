"""The Ray launcher: join a Ray cluster that is already there."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping

import psutil

from composer.contract import Finding
from composer.errors import LauncherError
from launchers.base import OWNER_VARIABLE, Owner, sweep_processes

CONNECT_DEADLINE_S = 5.0


class RayLauncher:
    """Connects to a running cluster and leaves it as it was."""

    def __init__(self, run_label: str, resources: Mapping[str, float], address: str = "auto") -> None:
        """Nothing connects yet.

        Args:
            run_label: the Ray namespace of the run's actors.
            resources: what the plan asks for: `CPU`, `GPU`. A cluster with less is refused at once rather than waited
                for.
            address: `host:port` of the cluster's head, or `auto` for the one this machine belongs to.
        """
        self.owner = Owner.current(run_label)
        self.resources = dict(resources)
        self.address = address

    def start(self) -> str:
        """Connect; returns the cluster's address.

        Raises:
            LauncherError: no cluster answers, or it lacks what the plan asks for.
        """
        os.environ[OWNER_VARIABLE] = self.owner.mark
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        self._knock()
        import ray

        try:
            context = ray.init(
                address=self.address, namespace=self.owner.label, log_to_driver=False, configure_logging=False
            )
        except Exception as e:
            raise LauncherError(
                f"launcher.args.address={self.address!r}: no Ray cluster answers there ({e}); "
                "start one with `ray start --head`, or use launcher=local"
            ) from e
        there = ray.cluster_resources()
        for name, need in self.resources.items():
            if there.get(name, 0) < need:
                ray.shutdown()
                raise LauncherError(
                    f"the Ray cluster at {self.address!r} has {there.get(name, 0):g} {name}, the plan needs {need:g}; "
                    "add nodes, or make the mesh smaller (`composer plan` shows it)"
                )
        return str(context.address_info["gcs_address"])  # pyright: ignore[reportAttributeAccessIssue]

    def _knock(self) -> None:
        """See that something listens at the address; Ray itself would wait for minutes."""
        host, _, port = self.address.rpartition(":")
        if not (host and port.isdigit()):
            return
        if host in ("127.0.0.1", "localhost"):
            # Ray takes loopback for this machine's outside address unless clusters are switched off.
            os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        try:
            socket.create_connection((host, int(port)), timeout=CONNECT_DEADLINE_S).close()
        except OSError as e:
            raise LauncherError(
                f"launcher.args.address={self.address!r}: no Ray cluster answers there ({e}); "
                "start one with `ray start --head`, or use launcher=local"
            ) from None

    def stop(self) -> None:
        """Disconnect; the run's actors end with the connection, the cluster stays."""
        with contextlib.suppress(Exception):  # the cluster may be gone already, or Ray's import was interrupted
            import ray

            ray.shutdown()

    def check(self) -> list[Finding]:
        """Whether Ray is installed, and whether a cluster is there to be joined."""
        from importlib.metadata import PackageNotFoundError, version

        try:
            ray = Finding("ray", True, f"ray {version('ray')}")
        except PackageNotFoundError:
            ray = Finding("ray", False, "Ray is not installed", "pip install ray==2.60.0")
        return [ray, self._cluster()]

    def _cluster(self) -> Finding:
        """What can be told without joining; whether the cluster has room, `start` sees."""
        remedy = (
            "start one with `ray start --head`, name yours (launcher.args.address=<host>:<port>), or launcher=local"
        )
        if self.address == "auto" and "RAY_ADDRESS" not in os.environ:
            here = any(p.info["name"] == "raylet" for p in psutil.process_iter(["name"]))
            return Finding("cluster", here, f"this machine belongs to {'a' if here else 'no'} Ray cluster", remedy)
        try:
            self._knock()
        except LauncherError as error:
            return Finding("cluster", False, str(error).partition(";")[0], remedy)
        return Finding("cluster", True, f"looked for at {self.address}")

    def sweep(self) -> int:
        """End processes on this machine whose driver was killed."""
        return sweep_processes()
