"""Whatever is typed: exit code 2 and one plain sentence with the key, before anything is started."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composer.cli import main

GLOBAL = "# @package _global_\n"
FILES = {
    "list": "algorithm: [1, 2]",
    "scalar": "algorithm: 3",
    "nothing": "algorithm: null",
    "option": "model: tiny_moe",
    "tab": "algorithm:\n\tnum_steps: 3",
    "duplicate": "seed: 1\nseed: 2",
    "loop": "algorithm: &a\n  x: *a",
    "missing": "seed: ${nope}",
    "circle": "seed: ${algorithm.num_steps}\nalgorithm:\n  num_steps: ${seed}",
    "resolver": "seed: ${nope:1}",
    "half": "seed: ${",
    "defaults": "defaults: nope",
    "again": "defaults:\n  - /model: tiny_moe",
    "around": "defaults:\n  - around",
    "nogroup": "defaults:\n  - override /nope: x",
    "hydra": "hydra:\n  mode: FOO",
    "tag": "seed: !nope 3",
    "set": "seed: !!set {a}",
    "number": "3: 4",
    "documents": "seed: 1\n---\nseed: 2",
    "package": "seed: 1",
    "resume": "resume: /nowhere",
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    assert {p.name for p in tmp_path.iterdir()} <= {"conf", "taken"}, "something was started"


def answer(*argv: str) -> tuple[int, str]:
    """Exit code and what was said, of a command in this process."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        return main(argv), said.getvalue()


def check_sentence(argv: list[str], *parts: str) -> None:
    code, said = answer(*argv)
    assert code == 2, (argv, said)
    assert said.startswith("composer: ") and said.count("\n") == 1 and "Traceback" not in said, (argv, said)
    assert len(said) < 1000
    assert "cannot be composed" not in said, "Hydra's words instead of a remedy"
    assert all(part in said for part in parts), (argv, said)


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        # values of another kind
        ("mix.phases=[]", "mix.phases='[]' `mix.phases.<name>=<value>`"),
        ("mix.phases.pretrain=[]", "mix.phases.pretrain='[]'"),
        ("mix.phases=3", "mix.phases=3"),
        ("mix.phases=null", "mix.phases=None"),
        ("env.tools.finish=[a]", "env.tools.finish='[a]'"),
        ("launcher.args=[]", "launcher.args='[]'"),
        ("stages={a:1}", "stages='{a:1}' `stages=[a,b]`"),
        ("stages=null", "stages=None"),
        ("seed={a:1}", "seed={'a'"),
        ("seed=1e400", "seed='1e400' finite"),
        ("algorithm.learning_rate=-1e400", "algorithm.learning_rate='-1e400' finite"),
        ("algorithm.learning_rate=inf", "algorithm.learning_rate=inf finite"),
        ("algorithm.learning_rate=1" + "0" * 400, "algorithm.learning_rate=1000 finite"),
        ("env.taskset.args.x=[1,1e400]", "env.taskset.args.x='[1,1e400]' 1e400 is too large: give a finite number"),
        (
            "-m algorithm.learning_rate=1e-4,1e400",
            "algorithm.learning_rate='1e-4,1e400' 1e400 is too large: give a finite number",
        ),
        ("seed=" + "9" * 5000, "seed="),
        ("model.checkpoint.x=1", "model.checkpoint.x='1' no such key"),
        # numbers that nothing can use
        ("seed=99999999999999999999", "seed=99999999999999999999 at most 2147483647"),
        ("algorithm.group_size=1000000000000", "algorithm.group_size= at most"),
        ("generator.max_model_len=1000000000", "generator.max_model_len= at most"),
        ("generator.tensor_parallel=2", "generator.tensor_parallel=2 use 1"),
        # groups
        ("model=[a,b]", "model='b' tiny_moe"),
        ("model=[]", "model=[] choose one: `model=<kimi_k2_5, qwen3_30b_a3b, tiny_moe>`"),
        ("model=", "model='' choose one: `model=<"),
        ("model=null", "model=None choose one: `model=<"),
        ("model=???", "model='???' choose one: `model=<"),
        ("algorithm=[1]", "algorithm=[1] choose one: `algorithm=<"),
        ("algorithm=3", "algorithm=3 choose one: `algorithm=<"),
        ("~model", "model='~' choose one: `model=<"),
        ("~tracking=server", "tracking='~server' leave it out"),
        ("model/sub=x", "model/sub='x' did you mean `model`?"),
        ("model@x=tiny_moe", "model@x='tiny_moe'"),
        ("seed@x=3", "seed@x= leave it out"),
        ("model=../x", "model/..='x' tiny_moe"),
        ("experiment=", "experiment='' choose one"),
        ("+experiment=[composer2,nope]", "experiment='nope' composer1"),
        ("experiment=composer1 experiment=composer2", "experiment='composer2' give one of the two"),
        ("+model=tiny_moe", "model='tiny_moe' without `+`"),
        ("~nope", "nope='~' no such key"),
        ("~algorithm.group_sise", "algorithm.group_sise='~' did you mean `algorithm.group_size`?"),
        ("~seed=5", "seed='~5' write `~seed`"),
        # grammar
        ("=3", "'=3' names no key"),
        ("+=3", "'+=3' names no key"),
        ("~", "'~' names no key"),
        ("=", "'=' names no key"),
        ("algorithm..group_size=3", "algorithm..group_size='3' names joined by dots"),
        ("algorithm[group_size]=3", "algorithm[group_size]='3' names joined by dots"),
        (".seed=3", ".seed='3' names joined by dots"),
        ("/model=x", "/model='x' names joined by dots"),
        ('seed="', "seed= close brackets and quotes"),
        ("seed='", r"seed= \'"),
        ("seed=[1,2", "seed='[1,2' close brackets"),
        ("seed=1,2", "seed='1,2' `-m`"),
        ("seed=choice(1,2)", "seed='choice(1,2)' `-m`"),
        ("seed=nope(3)", "seed='nope(3)' Unknown function"),
        ("seed=int(x)", "seed='int(x)' invalid literal"),
        ("seed", "seed: `seed=<value>`"),
        # interpolations
        ("seed=${nope}", "seed='${nope}' ${oc.env:VARIABLE,default}"),
        ("seed=${seed}", "seed='${seed}'"),
        ("seed=${algorithm.num_steps} algorithm.num_steps=${seed}", "seed='${algorithm.num_steps}'"),
        ("seed=${nope:1}", "seed='${nope:1}' ${oc.env:"),
        ("seed=???", "seed='???' give `seed="),
        ("hydra.run.dir=${nope}", "hydra.run.dir='${nope}'"),
        # Hydra's own keys
        ("hydra.mode=FOO", "hydra.mode='FOO' [RUN, MULTIRUN]; `composer --cfg hydra`"),
        ("hydra.mode=${nope}", "hydra.mode='${nope}' 'nope' not found"),
        ("hydra.run=3", "hydra.run='3' `composer --cfg hydra`"),
        ("hydra.run.dir=null", "hydra.run.dir='null' `composer --cfg hydra`"),
        ("hydra.run.dir=/", "hydra.run.dir='/' never overwritten"),
        ("hydra.nope=3", "hydra.nope='3' `composer --cfg hydra`"),
        ("hydra.searchpath=nope", "hydra.searchpath='nope' [file:///folder"),
        ("hydra.searchpath=[/nope]", "hydra.searchpath='[/nope]' [file:///folder"),
        ("hydra.searchpath=[http://x]", "hydra.searchpath='[http://x]' [file:///folder"),
        ("hydra/nope=x", "hydra/nope='x' no such config group"),
        ("-m hydra.sweeper.params.seed=1", "hydra.sweeper.params.seed='1' `hydra.sweeper.params={seed: 1}`"),
        # sweeps
        ("-m seed=range(3,1)", "-m='seed=range(3,1)' makes no job"),
        ("-m model=glob(nope*)", "-m='model=glob(nope*)' makes no job"),
        ("-m seed=interval(0,1)", "-m='seed=interval(0,1)' list the values"),
        ("-m seed=1,", "seed='1,'"),
        # flags
        ("--config-dir /nowhere", "--config-dir='/nowhere' no such folder"),
        ("--config-dir=", "--config-dir='' no such folder"),
        ("--config-name nope", "--config-name='nope' there is config"),
        ("--config-name a/b", "--config-name='a/b'"),
        ("--config-path conf", "--config-name='config' no such primary config"),
        ("--seed=3", "--seed='3' `seed=<value>`"),
        ("--cfg nope", "--cfg `composer --help`"),
        ("--package", "--package `composer --help`"),
        ("--cfg job -p nope", "--package='nope'"),
        ("--cfg job --resolve seed=${nope}", "seed='${nope}'"),
        ("--cfg hydra --resolve hydra.run.dir=${nope}", "--cfg='hydra'"),
        ("-sc nope", "--shell-completion='nope' install="),
        ("-sc install=csh", "--shell-completion='install=csh' install="),
        # paths and names
        ("run_root=", "run_root='' is empty"),
        ("run_root=taken", "taken is a file"),
        ("algorithm.name=../../x", "algorithm.name='../../x' letters"),
        ("resume=", "resume=: names no directory"),
        ("resume=taken", "resume= give the directory of a run"),
        ("tracking.uri=ftp://x", "tracking.uri='ftp://x' write `http"),
    ],
)  # fmt: skip
def test_one_sentence_for_each(typed: str, parts: str, folder: Path) -> None:
    (folder / "taken").touch()
    (folder / "conf").mkdir()
    flags = [word for word in typed.split(" ") if word]
    check_sentence(["plan", *flags], *parts.split(" ", 1))


@pytest.mark.parametrize("name", FILES)
def test_one_sentence_for_each_file(name: str, folder: Path) -> None:
    """It names the file, or the key and what it holds."""
    (folder / "conf" / "experiment").mkdir(parents=True)
    header = "# @package _global_ nope\n" if name == "package" else GLOBAL
    (folder / "conf" / "experiment" / f"{name}.yaml").write_text(f"{header}{FILES[name]}\n")
    key = {"option": "model='tiny_moe'", "again": "`override /model: <option>`"}
    told = key.get(name) or ("seed='${" if name in ("missing", "circle", "resolver") else f"experiment/{name}.yaml")
    check_sentence(["plan", "--config-dir", "conf", f"+experiment={name}"], told)


KEYS = (
    "seed", "run_root", "stages", "plugins", "model", "model.name", "model.family", "model.checkpoint", "mix.phases",
    "mix.phases.pretrain", "mix.phases.pretrain.sources.code.kind", "env.tools", "env.tools.finish._target_",
    "env.taskset.args", "algorithm", "algorithm.group_size", "algorithm.learning_rate", "algorithm.loss",
    "tracking.uri", "launcher", "parallel.activation_checkpoint", "hydra.run.dir", "hydra.mode", "experiment", "nope",
    "algorithm.nope",
)  # fmt: skip
VALUES = (
    "", "null", "???", "[]", "{}", "{a:b}", "[1,[2]]", "-1", "0", "1e999", "nan", "true", "'", '"x', "${nope}",
    "${a.b:c}", "x,y", "range(2)", "$", "a b", "/", "../..", "9" * 30, "0x1F", "\u0663", "\\", "%s",
    "-", "a=b", "!", "~", "@x",
)  # fmt: skip


@settings(
    max_examples=100, deadline=None, derandomize=True, database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(st.sampled_from(("", "+", "++", "~")), st.sampled_from(KEYS), st.sampled_from(VALUES) | st.text(max_size=4))
def test_no_input_is_answered_by_a_traceback(sign: str, key: str, value: str) -> None:
    code, said = answer("plan", f"{sign}{key}={value}")
    assert code in (0, 2), said
    if code:
        assert said.startswith("composer: ") and said.count("\n") == 1, said
        assert key.split(".")[0] in said or "names no key" in said, said


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("mix.phases.sft.tokns=1", "mix.phases.sft.tokens"),
        ("mix.phases.sft.source.sessions.kind=x", "mix.phases.sft.sources.sessions.kind"),
        ("env.tools.read_file.arg.numbered=true", "env.tools.read_file.args.numbered"),
        ("env.tools.read_file.prodction.name=x", "env.tools.read_file.production.name"),
        ("env.tools.read_file.production.argument.path=x", "env.tools.read_file.production.arguments.path"),
        ("env.agent.files.agent.txt=x", "env.agent.files.agent.text"),
        ("env.limts.memory_bytes=3", "env.limits.memory_bytes"),
    ],
)
def test_the_part_of_a_key_that_is_wrong_is_the_one_that_is_mended(typed: str, meant: str) -> None:
    """Also where names are free above it."""
    key, _, value = typed.partition("=")
    check_sentence([typed], f"{key}={value!r}: no such key; did you mean `{meant}`?")


def test_commands_that_are_mistyped() -> None:
    check_sentence(
        ["audt"], "audt: is neither a command (plan, doctor, audit, tasks,", "did you mean `composer audit`?"
    )
    check_sentence(["env.monitor.effects.histry=zero"], "'histry': no such rule or kind; did you mean 'history'?")
