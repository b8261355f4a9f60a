"""Features that are gone: their bodies and their own tests, and nothing else."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from composer.errors import ConfigError
from composer.types import Split
from envs.tasks.feature_deletion import FeatureDeletionTaskset

sys.path.insert(0, str(Path(__file__).parent))
from small_repository import FILES, write_repository  # noqa: E402

ORIGINAL = {path: content.encode() for path, content in FILES.items()}


@pytest.fixture
def tasks(tmp_path):
    taskset = FeatureDeletionTaskset(str(write_repository(tmp_path)), evaluation_share=0.0)
    found = [taskset.task(Split.TRAIN, i) for i in range(len(taskset.keys(Split.TRAIN)))]
    assert all(taskset.reference(task)[task.metadata["file"]] == ORIGINAL[task.metadata["file"]] for task in found)
    return {task.id.removeprefix("feature_deletion/train/"): task for task in found}


def test_what_is_a_feature(tasks):
    # Nothing tests `unused`, `_hidden` and `__init__` are not public.
    assert {key: (t.metadata["kind"], t.metadata["tests"]) for key, t in tasks.items()} == {
        "shop/money.py::total": ("function", ["tests/test_money.py::test_total"]),
        "shop/money.py::cents": ("function", ["tests/test_money.py::test_cents"]),
        "shop/cart.py::Cart": ("class", [f"tests/test_cart.py::TestCart::test_{n}" for n in ("add", "sum", "full")]),
        "shop/cart.py::Cart.add": (
            "method",
            [f"tests/test_cart.py::TestCart::test_{n}" for n in ("add", "sum", "full")],
        ),
        "shop/cart.py::Cart.sum": ("method", ["tests/test_cart.py::TestCart::test_sum"]),
    }
    for task in tasks.values():
        assert task.hidden_tests == {p: c for p, c in ORIGINAL.items() if p.startswith("tests/")}


def test_a_function_loses_its_body_and_its_tests(tasks):
    task = tasks["shop/money.py::total"]
    assert task.request == "implement total in shop/money.py"
    changed = {path for path in ORIGINAL if task.files.get(path) != ORIGINAL[path]}
    assert changed == {"shop/money.py", "tests/test_money.py"}
    assert task.files["shop/money.py"] == ORIGINAL["shop/money.py"].replace(
        b"return sum(prices) + fee", b"raise NotImplementedError"
    )
    assert task.files["tests/test_money.py"] == ORIGINAL["tests/test_money.py"].replace(
        b"\n\ndef test_total():\n    expect([1, 2], 5)\n", b""
    )


def test_a_decorated_test_goes_with_its_decorators(tasks):
    test = tasks["shop/money.py::cents"].files["tests/test_money.py"]
    assert test == ORIGINAL["tests/test_money.py"].replace(
        b'\n\n@pytest.mark.parametrize("amount", [1, 2])\ndef test_cents(amount):\n'
        b"    assert m.cents(amount) == amount * 100\n",
        b"",
    )


def test_a_method_loses_its_body_and_its_tests(tasks):
    task = tasks["shop/cart.py::Cart.sum"]
    assert task.files["shop/cart.py"] == ORIGINAL["shop/cart.py"].replace(
        b"return total(self.prices)", b"raise NotImplementedError"
    )
    assert task.files["tests/test_cart.py"] == ORIGINAL["tests/test_cart.py"].replace(
        b"\n    def test_sum(self, cart):\n        cart.add(4)\n        assert cart.sum() == 6\n", b""
    )


def test_a_class_loses_all_bodies_and_a_file_without_tests_goes(tasks):
    task = tasks["shop/cart.py::Cart"]
    assert "tests/test_cart.py" not in task.files
    assert (
        task.files["shop/cart.py"].decode()
        == '''from shop.money import total


class Cart:
    """What somebody buys."""

    limit = 3

    def __init__(self):
        raise NotImplementedError

    def add(self, price):
        raise NotImplementedError

    def sum(self):
        raise NotImplementedError
'''
    )


def test_a_class_and_its_methods_are_in_one_split(tmp_path):
    path = str(write_repository(tmp_path))
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        taskset = FeatureDeletionTaskset(path, evaluation_share=share)
        in_evaluation = {key for key in taskset.keys(Split.EVALUATION) if "Cart" in key}
        assert len(in_evaluation) in (0, 3)


def test_a_class_of_tests_that_is_emptied_goes_and_its_file_stays(tmp_path):
    test = "from shop import Cart, money\n\n\nclass TestSum:\n    def test_a(self):\n        assert Cart().sum() == 2\n"
    rest = "\n\ndef test_cents():\n    assert money.cents(1) == 100\n"
    path = write_repository(tmp_path, {"tests/test_cart.py": test + rest})
    taskset = FeatureDeletionTaskset(str(path), evaluation_share=0.0, kinds=["method"])
    [key] = taskset.keys(Split.TRAIN)
    assert key == "shop/cart.py::Cart.sum"
    assert taskset.task(Split.TRAIN, 0).files["tests/test_cart.py"].decode() == "from shop import Cart, money\n" + rest


def test_properties_decorators_and_declarations(tmp_path):
    code = '''class Box:
    @property
    def size(self):
        @str
        def inner(): return 1
        return inner

    @size.setter
    def size(self, value):
        self._size = value

    def declared(self):
        """Says what."""
        raise NotImplementedError

    def dots(self): ...
'''
    test = "from shop.box import Box\n\n\ndef test_box():\n    Box().size, Box().declared, Box().dots\n"
    path = write_repository(tmp_path, {"shop/box.py": code, "tests/test_box.py": test})
    taskset = FeatureDeletionTaskset(str(path), evaluation_share=0.0, kinds=["method"])
    keys = [key for key in taskset.keys(Split.TRAIN) if "Box" in key]
    assert keys == ["shop/box.py::Box.size"]
    task = taskset.task(Split.TRAIN, taskset.keys(Split.TRAIN).index(keys[0]))
    assert task.files["shop/box.py"].decode() == code.replace(
        "@str\n        def inner(): return 1\n        return inner", "raise NotImplementedError"
    )


def test_what_is_refused(tmp_path):
    path = str(write_repository(tmp_path))
    for options, message in (
        ({"kinds": ["module"]}, "args.kinds='module': must be some of function, method, class"),
        ({"min_tests": 0}, "args.min_tests=0: must be at least 1"),
        ({"min_tests": 9}, "args.path=.*its tests use no public function or method or class"),
    ):
        with pytest.raises(ConfigError, match=message):
            FeatureDeletionTaskset(path, **options)
