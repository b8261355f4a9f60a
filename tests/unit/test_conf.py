"""Every YAML in conf/ composes strictly, each option beside the defaults of the other groups."""

from pathlib import Path

import pytest

from composer.compose import HydraSession
from composer.config_files import check_file
from composer.errors import ConfigError
from composer.instantiate import check_targets
from composer.plan import make_plan

CONF = Path(__file__).parents[2] / "conf"
OPTIONS = sorted(f"{p.parent.name}={p.stem}" for p in CONF.glob("*/*.yaml"))
NESTED = sorted(f"{p.parent.relative_to(CONF)}={p.stem}" for p in CONF.glob("env/*/*.yaml"))
GROUPS = {
    "model", "mix", "env", "algorithm", "parallel", "generator", "weight_sync", "launcher", "tracking", "evaluation",
    "experiment",
}  # fmt: skip


def test_the_groups() -> None:
    assert {o.partition("=")[0] for o in OPTIONS} == GROUPS
    assert {"experiment=quickstart", "experiment=composer1", "experiment=composer2"} <= set(OPTIONS)
    assert all(
        p.suffix == ".yaml" or p.name == "__init__.py"
        for p in CONF.rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    )
    with HydraSession() as session:
        assert set(session.groups()) == GROUPS | {option.partition("=")[0] for option in NESTED}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_composes(option: str) -> None:
    with HydraSession() as session:
        check_targets(session.compose([option]).config)


@pytest.mark.parametrize("option", NESTED)
@pytest.mark.parametrize("env", [o for o in OPTIONS if o.startswith("env=")])
def test_every_part_of_an_env_composes_with_every_env(env: str, option: str) -> None:
    """Or says which argument of the env's own sandbox it does not take."""
    with HydraSession() as session:
        own = set(session.compose([env]).config.env.sandbox.args)
        config = session.compose([env, f"+{option}"]).config
    if bound := own & {"folders", "backend"}:
        with pytest.raises(ConfigError, match=f"env.sandbox.args.{bound.pop()}=.* has no such argument"):
            check_targets(config)
    else:
        check_targets(config)


@pytest.mark.parametrize("experiment", [o for o in OPTIONS if o.startswith("experiment=")])
def test_every_experiment_can_be_planned(experiment: str) -> None:
    with HydraSession() as session:
        plan = make_plan(session.compose([f"+{experiment}"]).config)
    assert plan.stages


@pytest.mark.parametrize("path", sorted(CONF.rglob("*.yaml")), ids=lambda p: str(p.relative_to(CONF)))
def test_every_file_says_what_it_is(path: Path) -> None:
    """A comment on top, no YAML 1.1 trap, no key twice."""
    first = [line for line in path.read_text().splitlines() if not line.startswith("# @package")][0]
    assert first.startswith("# ")
    assert dict(check_file(path, ""))
