"""The choke point: which names, which arguments, and what is said of the others."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from composer.compose import compose
from composer.errors import ConfigError
from composer.instantiate import check_target, check_targets, instantiate
from composer.schema import TargetConfig


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that a user might bring."""
    package = tmp_path / "acme_envs"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "things.py").write_text(
        "from enum import Enum\n"
        "class Mode(Enum):\n    fast = 'fast'\n    slow = 'slow'\n"
        "class Thing:\n"
        "    def __init__(self, size: int, name: str = 'x', mode: Mode = Mode.fast, run_label: str = ''):\n"
        "        if size > 9:\n            raise ValueError('size is at most 9')\n"
        "        self.size, self.name, self.run_label = size, name, run_label\n"
        "class Any:\n    def __init__(self, **kwargs):\n        self.kwargs = kwargs\n"
        "value = 3\n"
    )
    (package / "needy.py").write_text("import a_package_that_is_not_there\n")
    (package / "broken.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "acme_envs"
    for name in [n for n in sys.modules if n.startswith("acme_envs")]:
        del sys.modules[name]


def target(name: str, **args: Any) -> TargetConfig:
    return TargetConfig(_target_=name, args=args)


def test_a_target_becomes_an_object(plugin: str) -> None:
    thing = instantiate(target("acme_envs.things.Thing", size=3), [plugin], key="env.sandbox", run_label="r", seed=1)
    assert (thing.size, thing.name, thing.run_label) == (3, "x", "r")  # `seed` is unknown to it and left out
    assert instantiate(target("acme_envs.things.Any", a=1), [plugin], seed=1).kwargs == {"seed": 1, "a": 1}


@pytest.mark.parametrize(
    ("described", "key", "remedy"),
    [
        (target("os.system", command="true"), "k._target_", "must begin with one of envs., launchers., acme_envs."),
        (target("envsx.things.Thing"), "k._target_", "`plugins=[envsx]`"),
        (target("envs.nowhere.Thing"), "k._target_", "no module `envs.nowhere`"),
        (target("acme_envs.things.Thingy"), "k._target_", "did you mean `acme_envs.things.Thing`?"),
        (target("acme_envs.things.value"), "k._target_", "has no class `value`"),
        (target("acme_envs.needy.Thing"), "k._target_", "needs `a_package_that_is_not_there`, which is not installed"),
        (target("acme_envs.broken.Thing"), "k._target_", "cannot be imported (ZeroDivisionError"),
        (target("acme_envs.things.Thing", sise=1), "k.args.sise", "did you mean `k.args.size`?"),
        (target("acme_envs.things.Thing", size="1"), "k.args.size", "write 1, without quotes"),
        (target("acme_envs.things.Thing", size=True), "k.args.size", "write 1"),
        (target("acme_envs.things.Thing", size=1, mode="fsat"), "k.args.mode", "did you mean `fast`?"),
        (target("acme_envs.things.Thing"), "k.args.size", "needs this argument"),
        (target("acme_envs.things.Any", api_key="hunter2"), "k.args.api_key", "`api_key_env`"),
    ],
)
def test_what_is_refused(plugin: str, described: TargetConfig, key: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_target(described, [plugin], key="k")
    assert caught.value.key == key
    assert remedy in str(caught.value)
    assert "hunter2" not in str(caught.value)


def test_a_constructor_that_refuses(plugin: str) -> None:
    with pytest.raises(ConfigError, match=r"env\.x\.args=.*size is at most 9"):
        instantiate(target("acme_envs.things.Thing", size=10), [plugin], key="env.x")


def test_arguments_that_the_run_gives_are_no_knobs() -> None:
    with pytest.raises(ConfigError, match=r"give `mix\.sessions\.expert_accuracy` instead"):
        check_targets(compose(["env.taskset.args.expert_accuracy=0.9"]))
    with pytest.raises(ConfigError, match="the run itself gives it"):
        check_targets(compose(["launcher.args.run_label=x"]))


def test_a_class_that_does_not_keep_the_contract() -> None:
    with pytest.raises(ConfigError, match="has no start, close, check, sweep"):
        check_targets(compose(["env.sandbox._target_=envs.tools.finish.Finish"]))


def test_what_a_constructor_refuses_is_known_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match=r"env\.taskset\.args\.verbs_per_operator=9: must be 1, 2 or 3"):
        check_targets(compose(["env.taskset.args.verbs_per_operator=9"]))
    with pytest.raises(ConfigError, match="refuses this: workdir='x': must be an absolute path"):
        check_targets(compose(["env.sandbox.args.workdir=x"]))
