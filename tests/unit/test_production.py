"""How tools differ from production's: said in config, shown in the plan, and read by `composer behaviour`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from composer.cli import main
from composer.compose import compose
from composer.errors import PlanError
from composer.layout import Layout
from composer.plan import make_plan, save
from composer.types import Generation, Group, Outcome, ToolCall, Trajectory, Turn

SHELL = "env.tools.shell.production"
DIFFERENT = [
    "experiment=agent",
    f"{SHELL}.name=run_terminal_cmd",
    f"{SHELL}.arguments.command=cmd",
    f"{SHELL}.lacks=[is_background]",
    f"{SHELL}.strict=false",
    f"{SHELL}.differs=its output is cut at 4 kB",
    "env.tools.grep.production.adds=[max_results]",
    "env.missing_tools=[browser]",
]


def test_the_plan_says_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    plan = make_plan(compose(DIFFERENT))
    tools = {tool.name: tool for tool in plan.tools}
    assert tools["shell"].production_name == "run_terminal_cmd" and tools["shell"].renamed == {"cmd": "command"}
    assert tools["shell"].differs == (
        "called run_terminal_cmd there",
        "command is cmd there",
        "without is_background",
        "lenient there",
        "its output is cut at 4 kB",
    )
    assert tools["grep"].differs == ("max_results only here",)
    assert tools["read_file"].differs == () and tools["read_file"].arguments == ("path", "offset?", "limit?")
    assert plan.missing_tools == ("browser",)
    assert main(["plan", *DIFFERENT]) == 0
    shown = capsys.readouterr().out
    assert "called run_terminal_cmd there" in shown and "browser " in shown and "not here" in shown


def test_strictness_and_names_are_what_the_model_sees() -> None:
    plan = make_plan(compose(["experiment=agent", "env.tools.grep.args.strict=false", "env.tools.grep.args.name=rg"]))
    [grep] = [tool for tool in plan.tools if tool.key == "grep"]
    assert (grep.name, grep.strict, grep.production_name, grep.differs) == ("rg", False, "rg", ())


def test_an_agent_program_has_tools_of_its_own() -> None:
    assert make_plan(compose(["experiment=agent", "env=openai_sdk"])).tools == ()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"{SHELL}.arguments.comand=x", f"{SHELL}.arguments.comand='x': no such argument; did you mean 'command'?"),
        (f"{SHELL}.lacks=[command]", f"{SHELL}.lacks='command': the tool has this argument"),
        (f"{SHELL}.adds=[cwd]", f"{SHELL}.adds='cwd': no such argument; it takes command"),
        (f"{SHELL}.name=grep", "env.tools.grep has the same name in production: change one"),
        ("env.tools.todo.args.name=glob", "env.tools.todo.args.name='glob': env.tools.glob has the same name: change"),
        ("env.missing_tools=[grep]", "env.missing_tools='grep': env.tools.grep is that tool"),
        (
            "env.tools.search_replace.production.arguments.old_text=path",
            "env.tools.search_replace.production.arguments={'old_text': 'path'}: two arguments have one name",
        ),
    ],
)
def test_what_cannot_be_is_refused(override: str, message: str) -> None:
    with pytest.raises(PlanError) as error:
        make_plan(compose(["experiment=agent", override]))
    assert message in str(error.value)


def test_known_differences_are_no_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Production has the same habits in other words: without the translation all of it would be drift."""
    layout = Layout(tmp_path / "run")
    layout.ledger.parent.mkdir(parents=True)
    turn = Turn([1], Generation([2], [0.0], [0], "stop"), [ToolCall("shell", {"command": "ls -l"})])
    group = Group("g", "t", [Trajectory("t", "g", "g/0", [turn], [], Outcome.FINISHED, 1.0)] * 10)
    layout.ledger.write_text(json.dumps({"event": "group", "group": "g", "data": group.to_dict()}) + "\n")
    calls = [{"name": "run_terminal_cmd", "arguments": {"cmd": "ls -a"}}, {"name": "browser", "arguments": {}}]
    sessions = tmp_path / "sessions.jsonl"
    sessions.write_text((json.dumps({"calls": calls}) + "\n") * 12)
    words = ["behaviour", f"env-run={layout.run_dir}", f"sessions={sessions}"]

    save(make_plan(compose(["experiment=agent"])), layout.run_dir)
    assert main(words) == 1 and "drift  tool shares" in capsys.readouterr().out

    save(make_plan(compose(DIFFERENT)), layout.run_dir)
    assert main(words) == 0
    shown = capsys.readouterr().out
    assert "0 of 5 measures have drifted" in shown
    assert "  shell: command is cmd there\n" in shown and "left out: 12 calls of production to browser\n" in shown
    report = json.loads((layout.run_dir / "behaviour.json").read_text())
    assert report["calls_left_out"] == {"browser": 12} and "browser: not here" in report["known_differences"]

    (layout.run_dir / "plan.yaml").write_text("tools: [{nonsense: 1}]\n")
    assert main(words) == 2 and "its plan.yaml cannot be read" in capsys.readouterr().err
