"""The schema as documentation: every key says what it is, and something reads it."""

import ast
import dataclasses
import random
import threading
from pathlib import Path
from typing import Any

import numpy
import pytest

from composer import schema
from composer.binding import leaf_keys
from composer.compose import defaults_of_schema

ROOT = Path(__file__).parents[2]
PURE = ("checks/", "plan.py", "plan_table.py", "doctor.py", "schema/", "choices.py", "resume.py", "conf/")
ONLY_PLANNED = {"parallel.num_nodes", "parallel.gpu_memory_bytes", "resume"}
"""What a cluster has, for the plan to check against; and `resume`, which the command reads off the command line."""


def test_every_key_has_a_docstring() -> None:
    nodes = [n for path in (ROOT / "composer/schema").glob("*.py") for n in ast.parse(path.read_text()).body]
    assert sum(isinstance(node, ast.ClassDef) for node in nodes) > 10
    for node in nodes:
        if not isinstance(node, ast.ClassDef):
            continue
        for statement, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(statement, ast.AnnAssign):
                documented = isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant)
                assert documented, f"{node.name}.{ast.unparse(statement.target)}"


def test_every_key_is_read_by_what_runs() -> None:
    """A key that only checks and plans know would be a knob that does nothing."""
    read: set[str] = set()
    for path in [p for folder in ("composer", "envs", "launchers") for p in (ROOT / folder).rglob("*.py")]:
        if any(part in str(path.relative_to(ROOT)) for part in PURE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                read.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                read.add(node.value)  # the record reads plain dicts
    unread = {key for key in leaf_keys(schema.Config) if key.rpartition(".")[2] not in read}
    assert unread <= ONLY_PLANNED


def test_every_class_is_frozen_and_every_number_has_a_range() -> None:
    for cls in vars(schema).values():
        if not dataclasses.is_dataclass(cls):
            continue
        assert cls.__dataclass_params__.frozen, cls  # type: ignore[attr-defined]
        for field in dataclasses.fields(cls):
            if field.type in ("int", "float"):
                low, high, above = (field.metadata.get(k) for k in ("minimum", "maximum", "above"))
                assert high is not None and (low is None) != (above is None), (cls, field.name)
                assert field.type != "int" or 0 < high <= 2**53, (cls, field.name)


def test_ranges_end_where_the_libraries_do() -> None:
    """What is largest by the schema is still taken by the libraries that it goes to."""
    seed, replicas = (
        f.metadata["maximum"] for f in (_field("Config", "seed"), _field("GeneratorConfig", "num_replicas"))
    )
    numpy.random.seed(seed + replicas)
    with pytest.raises(ValueError):
        numpy.random.seed(2**32)
    random.Random(seed).random()
    assert _field("LimitsConfig", "lifetime_s").metadata["maximum"] < threading.TIMEOUT_MAX
    for cls in ("AlgorithmConfig", "EvaluationConfig"):
        metadata = _field(cls, "temperature").metadata
        assert (metadata["minimum"], metadata["maximum"]) == (0.01, 2)  # vllm/sampling_params.py


def _field(cls: str, name: str) -> dataclasses.Field[Any]:
    return next(f for f in dataclasses.fields(getattr(schema, cls)) if f.name == name)


def test_defaults_lie_in_their_ranges() -> None:
    for cls in [c for c in vars(schema).values() if dataclasses.is_dataclass(c)]:
        for field in dataclasses.fields(cls):
            value = defaults_of_schema(cls)[field.name]  # type: ignore[arg-type]
            if isinstance(value, int | float) and not isinstance(value, bool):
                low, high, above = (field.metadata.get(k) for k in ("minimum", "maximum", "above"))
                assert (low is None or value >= low) and (high is None or value <= high), field.name
                assert above is None or value > above, field.name
