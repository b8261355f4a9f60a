"""Adds cases to CodeI/O records: inputs from their generators and what their references return, made in a sandbox.

Done once, before training; `CodeioTaskset` reads the file that `write_records` leaves.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from composer.contract import SandboxBackend, SandboxLimits
from envs.tasks.codeio import read_problem

_SCRIPT = """import json
import os
import random
import sys

out = os.dup(1)
os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
with open("problem.json", encoding="utf-8") as file:
    problem = json.load(file)
namespace = {"__name__": "reference", "Random": random.Random}
exec(problem["code"], namespace)
function = namespace[problem["function"]]
exec(problem["generator"], namespace)
cases = []
for number in range(problem["num_cases"]):
    random.seed(f"case/{number}")
    given = [random.Random(f"case/{number}")] if problem["takes_random"] else []
    arguments = json.loads(json.dumps(namespace[problem["generator_name"]](*given)))
    cases.append({"input": arguments, "output": function(**json.loads(json.dumps(arguments)))})
data = json.dumps(cases, allow_nan=False).encode()
while data:
    data = data[os.write(out, data) :]
os._exit(0)
"""


async def add_cases(
    records: Sequence[dict[str, Any]],
    backend: SandboxBackend,
    limits: SandboxLimits | None = None,
    num_cases: int = 2,
    concurrency: int = 4,
    modules: Collection[str] = (),
) -> list[dict[str, Any]]:
    """The records for which cases could be made, with `cases`: the same each time for functions that use no chance.

    Args:
        records: as of `CodeioTaskset`.
        backend: starts a sandbox for each record.
        limits: of these sandboxes.
        num_cases: for each record.
        concurrency: sandboxes at a time.
        modules: what these have beside the standard library.

    Raises:
        SandboxError: a sandbox failed.
    """
    slots = asyncio.Semaphore(concurrency)

    async def one(record: dict[str, Any]) -> dict[str, Any] | None:
        async with slots:
            cases = await _cases(record, backend, limits or SandboxLimits(), num_cases, modules)
        return None if cases is None else {**record, "cases": cases}

    async with asyncio.TaskGroup() as group:
        running = [group.create_task(one(record)) for record in records]
    return [record for task in running if (record := task.result()) is not None]


async def _cases(
    record: dict[str, Any], backend: SandboxBackend, limits: SandboxLimits, num_cases: int, modules: Collection[str]
) -> list[dict[str, Any]] | None:
    problem = read_problem(record, modules)
    if problem is None:
        return None
    given = {
        "code": problem.code,
        "function": problem.function.name,
        "generator": problem.generator,
        "generator_name": problem.generator_name,
        "takes_random": problem.generator_takes_random,
        "num_cases": num_cases,
    }
    files = {"make_cases.py": _SCRIPT.encode(), "problem.json": json.dumps(given).encode()}
    sandbox = await backend.start(files, limits)
    try:
        done = await sandbox.exec(["python3", "make_cases.py"], env={"PYTHONHASHSEED": "0"})
    finally:
        await asyncio.shield(asyncio.ensure_future(sandbox.stop()))
    if done.exit_code or done.timed_out or done.truncated:
        return None
    try:
        cases = json.loads(done.output)
    except (ValueError, RecursionError):
        return None
    is_right = isinstance(cases, list) and all(
        isinstance(case, dict) and case.keys() == {"input", "output"} and isinstance(case["input"], dict)
        for case in cases
    )
    return cases if is_right else None


def write_records(records: Sequence[dict[str, Any]], path: Path) -> None:
    """Write records as compressed JSON lines, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with gzip.open(unfinished, "wt", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
