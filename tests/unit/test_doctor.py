"""What the doctor says of this machine."""

from pathlib import Path

import pytest

from composer.compose import compose
from composer.doctor import doctor, examine
from composer.plan import make_plan


def test_everything_is_named_once_and_in_one_unit() -> None:
    config = compose()
    findings = list(examine(config, make_plan(config)))
    names = [f.name for f in findings]
    assert sorted(names) == sorted(set(names))
    assert {"ray", "sandbox", "disk", "memory", "shared memory"} <= set(names)
    assert not [f for f in findings if " GB" in f.detail]
    assert [f for f in findings if f.name == "disk" and "GiB free" in f.detail]


def test_what_is_not_there_is_named_with_what_to_type(capsys: pytest.CaptureFixture[str]) -> None:
    source = "mix.phases.pretrain.sources.code"
    assert doctor(compose([f"{source}.kind=files", f"{source}.path=/nowhere/code"])) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"'/nowhere/code' is not there or cannot be read -> put it there, or name one that is: {source}.path=" in said
    )


def test_an_agent_program_that_is_not_in_the_sandbox(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def looked(command: str) -> str:
        folders = f"env.sandbox.args.folders=['{tmp_path}:/opt/agent']"
        doctor(compose(["experiment=agent", "env=mini_swe_agent", f"env.agent.command=[{command}]", folders]))
        return " ".join(capsys.readouterr().out.split())

    assert "missing agent env.agent.command=['/opt/agent/mini']: there is no program '/opt/agent/mini'" in looked(
        "/opt/agent/mini"
    )
    found = looked("python3")
    assert "ok agent python3 is there in a sandbox" in found
    assert "ok limits not tried: nobody plays these tasks" in found


def test_an_agent_that_is_not_installed_is_named_with_where_it_is_said_how(capsys: pytest.CaptureFixture[str]) -> None:
    config = compose(["experiment=agent", "env=mini_swe_agent", "env.sandbox.args.folders=[/nowhere/agent]"])
    [agent] = [f for f in examine(config, make_plan(config)) if f.name == "agent"]
    assert not agent.ok and "'/nowhere/agent': no such folder on this machine" in agent.detail
    assert "the head of an env's file in conf/env says how" in agent.remedy
