"""The local launcher: a Ray cluster of its own on this machine, on loopback, for one run."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from composer.contract import Finding
from composer.errors import LauncherError
from launchers.base import OWNER_VARIABLE, Owner, sweep_processes, sweep_users_of

FOLDER_PREFIX, OWNER_FILE = "composer-ray-", "composer-owner"
LEAST_OBJECT_STORE_BYTES = 80 * 2**20
"""Ray takes no less."""
_LONGEST_SOCKET, _SOCKET_BYTES = "session_YYYY-MM-DD_HH-MM-SS_ffffff_PPPPPPP/sockets/plasma_store", 107
"""Ray's longest socket below its folder, and what Linux takes as a socket's path."""


class LocalLauncher:
    """Starts Ray's processes as children of the driver; they end with it."""

    def __init__(self, run_label: str, resources: Mapping[str, float], object_store_bytes: int = 256 * 2**20) -> None:
        """Nothing starts yet.

        Args:
            run_label: names the run in its processes' environment and in the folder of Ray's sockets and logs.
            resources: what the plan asks for: `CPU`, `GPU`. CPUs are seats in Ray's scheduler, not cores: a laptop
                with two cores holds all processes of the quickstart.
            object_store_bytes: shared memory for trajectories on their way to the trainer; Ray spills to disk beyond
                it.
        """
        if object_store_bytes < LEAST_OBJECT_STORE_BYTES:
            raise ValueError(
                f"`object_store_bytes` must be at least {LEAST_OBJECT_STORE_BYTES}, but is {object_store_bytes} instead"
            )
        self.owner = Owner.current(run_label)
        self.resources = dict(resources)
        self.object_store_bytes = object_store_bytes
        self._folder: Path | None = None
        self._kept: Path | None = None
        """Where the logs of a start that failed stay, until the sweep of a later run."""
        self._thread = 0

    def start(self) -> str:
        """Start the cluster and connect this process to it; returns its address.

        Raises:
            LauncherError: Ray did not start.
        """
        os.environ[OWNER_VARIABLE] = self.owner.mark
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray resolves "127.0.0.1" to an outside address on Linux unless clusters are switched off; a run on one machine
        # has nothing to say to the network.
        os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Other users of this machine reach loopback too; a token of the run's own keeps them out and leaves no file
        # behind.
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
        # Ray makes workers nice, which on a laptop means that any other program takes the run's two cores away.
        os.environ.setdefault("RAY_worker_niceness", "0")
        # The warning speaks of accelerators that are hidden from workers; the CPU path has none to hide.
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        import ray

        self._thread = threading.get_ident()
        # Ray's socket paths have a limit (`check`), so the folder cannot be in the run directory.
        self._folder = self._place()
        try:
            self._folder.mkdir()
            (self._folder / OWNER_FILE).write_text(self.owner.mark)
            context = ray.init(
                num_cpus=int(self.resources.get("CPU", 1)),
                num_gpus=int(self.resources.get("GPU", 0)),
                object_store_memory=self.object_store_bytes,
                include_dashboard=False,
                log_to_driver=False,
                configure_logging=False,
                _temp_dir=str(self._folder),
            )
        except Exception as e:
            self._kept = self._folder.with_name(f"{self._folder.name}-failed")
            raise LauncherError(f"Ray did not start on this machine ({e}); see {self._kept} for its logs") from e
        address = str(context.address_info["gcs_address"])  # pyright: ignore[reportAttributeAccessIssue]
        if not address.startswith("127."):
            self.stop()
            raise LauncherError(f"Ray listens on {address}, not on loopback: ray was imported too early")
        return address

    def stop(self) -> None:
        """Shut Ray down, end what is left of the run's processes, and remove the folder."""
        if threading.get_ident() == self._thread:  # another thread only calls while this one hangs inside Ray
            with contextlib.suppress(Exception):  # a cluster that is half dead must not keep the rest from cleaning up
                import ray

                ray.shutdown()
        sweep_processes(self.owner.label)
        if self._folder is not None:
            sweep_users_of(self._folder)
            if self._kept is not None:
                shutil.rmtree(self._kept, ignore_errors=True)
                with contextlib.suppress(OSError):
                    self._folder.rename(self._kept)
            shutil.rmtree(self._folder, ignore_errors=True)

    def check(self) -> list[Finding]:
        """Whether Ray is there and its sockets have a place."""
        try:
            from importlib.metadata import version

            found = Finding("ray", True, f"ray {version('ray')}")
        except ImportError:
            found = Finding("ray", False, "Ray is not installed", "pip install ray==2.60.0")
        excess = len(os.fsencode(self._place() / _LONGEST_SOCKET)) - _SOCKET_BYTES
        folder = tempfile.gettempdir()
        free = shutil.disk_usage(tempfile.gettempdir()).free
        return [
            found,
            Finding(
                "socket paths",
                excess <= 0,
                f"{folder}: {f'{excess} bytes too long' if excess > 0 else 'short enough'} for Ray's sockets",
                f"set TMPDIR to a shorter path, at most {len(os.fsencode(folder)) - excess} bytes, such as /tmp",
            ),
            Finding(
                "temporary folder",
                free > 2**30,
                f"{folder}: {free / 2**30:.1f} GiB free",
                "free 1 GiB, or set TMPDIR to a disk that has it",
            ),
        ]

    def _place(self) -> Path:
        return Path(tempfile.gettempdir()) / f"{FOLDER_PREFIX}{self.owner.pid}-{self.owner.start_time}"

    def sweep(self) -> int:
        """End processes of runs whose driver was killed, and remove their folders."""
        removed = sweep_processes()
        for folder in Path(tempfile.gettempdir()).glob(f"{FOLDER_PREFIX}*"):
            try:
                owner = Owner.parse((folder / OWNER_FILE).read_text())
            except OSError:  # another user's, or removed meanwhile
                continue
            if owner is not None and not owner.alive:
                removed += 1 + sweep_users_of(folder)
                shutil.rmtree(folder, ignore_errors=True)
        return removed
