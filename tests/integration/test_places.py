"""Places on a Ray cluster of two machines with made-up GPUs, which only count as seats: nothing computes on them."""

import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

SCRIPT = textwrap.dedent(
    """
    import asyncio
    import os

    os.environ.update(RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0", RAY_USAGE_STATS_ENABLED="0")
    import ray
    from ray.cluster_utils import Cluster
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 2, "include_dashboard": False})
    cluster.add_node(num_cpus=1, num_gpus=2)
    ray.init(address=cluster.address, log_to_driver=False, configure_logging=False)
    from composer import processes
    from composer.errors import LauncherError

    class Engine:
        '''Starts a worker in each bundle of its group, as vLLM does, and tells on which machine each is.'''

        def machines(self):
            group = ray.util.get_current_placement_group()
            where = ray.remote(num_cpus=0, num_gpus=1)(lambda: ray.get_runtime_context().get_node_id())
            strategies = [PlacementGroupSchedulingStrategy(group, i) for i in range(len(group.bundle_specs))]
            return ray.get([where.options(scheduling_strategy=s).remote() for s in strategies])

    async def main():
        options = {"num_cpus": 1, "num_gpus": 4}
        wide = processes.Places("generator", 1, options, gpus_per_node=2)
        await wide.ready()
        machines = await ray.remote(Engine).options(**wide.options(0)).remote().machines.remote()
        print(len(machines), len(set(machines)), flush=True)
        processes.PLACEMENT_DEADLINE_S = 1.0
        try:
            await processes.Places("generator", 1, options, gpus_per_node=2).ready()
        except LauncherError as error:
            print(error, flush=True)

    asyncio.run(main())
    ray.shutdown()
    cluster.shutdown()
    """
)


@pytest.mark.timeout(180)
def test_a_generator_wider_than_a_machine_has_a_worker_on_every_gpu_of_several() -> None:
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # short: Ray's sockets are in it
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT],
            env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "RAY_TMPDIR": folder},
            capture_output=True,
            text=True,
            timeout=170,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    count, refusal = done.stdout.splitlines()
    assert count == "4 2"
    assert "no room for 1 generator process(es) of {'CPU': 1, 'GPU': 4} each after 1 s" in refusal
