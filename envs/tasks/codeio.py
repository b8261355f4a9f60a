"""Taskset `codeio`: small functions of reasoning-gym's CodeI/O data, to be written, or to be thought through.

A record has a question (`task_description`), what goes in and comes out (`input_output_spec`), a function that answers
it (`code_sample`) and one that makes inputs (`input_generator`); `ALIASES` are other names of these. Records that need
more than the standard library are left out, unless `modules` names it, and those whose answers are left to chance.
Three kinds of task:

- implement: write the function. The tests make inputs and compare with the reference, in their own sandbox.
- output: what does the function return for an input? The answer goes into answer.json.
- input: for which input does it return this? Any input that does is right.

The last two need `cases`, inputs and outputs as `envs.tasks.codeio_cases` adds them, and an agent that cannot run code
(no shell among its tools), or there is nothing to think through. No code of a record is run but in a sandbox.
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.errors import ConfigError
from composer.types import Split, Task
from envs.tasks.finite import FiniteTaskset
from envs.tasks.records import installed_file, read_records

KINDS = ("implement", "output", "input")
ALIASES = {
    "query": ("task_description", "query"),
    "parameters": ("input_output_spec", "parameters"),
    "code": ("code_sample", "reference_code"),
    "generator": ("input_generator",),
}
ENTRY_POINTS = ("main_solution", "main")
GENERATORS = ("generate_inputs", "generate_input", "input_generator")
"""They take a `random.Random`, or nothing."""
CASES_PER_TASK = 5
_CHANCE = frozenset({"random", "secrets", "uuid"})
_SHARED = """
def plain(value):
    return json.loads(json.dumps(value))


def same(a, b):
    if type(a) is bool or type(b) is bool or not isinstance(a, (int, float)) or not isinstance(b, (int, float)):
        if type(a) is not type(b):
            return False
        if isinstance(a, list):
            return len(a) == len(b) and all(map(same, a, b))
        if isinstance(a, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return a == b
    return a == b or math.isclose(a, b, rel_tol=1e-6, abs_tol=1e-9) or (a != a and b != b)


def load(code, name):
    namespace = {"__name__": "reference", "Random": random.Random}
    exec(code, namespace)
    return namespace[name]


def answer():
    return json.loads(call("builtins.eval", "open('answer.json', encoding='utf-8').read()"))
"""


@dataclass(frozen=True)
class Problem:
    """A record as far as it is of use here."""

    query: str
    parameters: str
    code: str
    generator: str
    function: ast.FunctionDef
    """Of `code`; it answers."""
    generator_name: str
    generator_takes_random: bool
    case: dict[str, Any] | None
    """`input` and `output`, if there is one with an output that an untouched answer.json does not give."""
    metadata: dict[str, Any]

    @property
    def digest(self) -> str:
        """Its key."""
        return hashlib.sha256(self.code.encode(errors="replace")).hexdigest()[:16]


def read_problem(record: dict[str, Any], modules: Collection[str] = ()) -> Problem | None:
    """What a record says; None if it is of no use. Its code is parsed, and not run.

    Args:
        record: of the data.
        modules: what it may import beside the standard library.
    """
    texts = {}
    for name, aliases in ALIASES.items():
        texts[name] = next((record[alias] for alias in aliases if isinstance(record.get(alias), str)), None)
        if texts[name] is None:
            return None
    try:
        trees = [ast.parse(texts[name]) for name in ("code", "generator")]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    functions, generators = ({n.name: n for n in tree.body if isinstance(n, ast.FunctionDef)} for tree in trees)
    function = next((functions[name] for name in ENTRY_POINTS if name in functions), None)
    generator = next((generators[name] for name in GENERATORS if name in generators), None)
    if function is None or generator is None:
        return None
    if _uses_chance(trees[0]) or any(_imported(tree) - sys.stdlib_module_names - set(modules) for tree in trees):
        return None
    return Problem(
        **texts,
        function=function,
        generator_name=generator.name,
        generator_takes_random=bool(generator.args.args),
        case=_case(record),
        metadata={"difficulty": record["difficulty"]} if isinstance(record.get("difficulty"), int) else {},
    )


class CodeioTaskset(FiniteTaskset):
    """Tasks `<hash of the reference>/<kind>`; all tasks of one function are in one split."""

    def __init__(
        self,
        path: str | None = "",
        name: str = "codeio",
        kinds: Sequence[str] = ("implement",),
        modules: Sequence[str] = (),
        evaluation_share: float = 0.1,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the records; those that are of no use are left out.

        Args:
            path: codeio-hq.jsonl.gz, or a file of that shape; "": that of the installed `reasoning-gym`; None:
                there are no tasks yet.
            name: begins the tasks' ids.
            kinds: of tasks, of `KINDS`.
            modules: what sandboxes have beside the standard library, for example numpy.
            evaluation_share: how much of the records is for evaluation, 0 to 1.
            seed: changes the tasks' order.
            epochs: how often training goes through its tasks.
            checked: a report of `composer tasks check`: only what it calls ok is used.

        Raises:
            ConfigError: there is no such file, it has another shape or nothing of use, or another value is refused.
        """
        if not kinds or set(kinds) - set(KINDS):
            raise ConfigError("env.taskset.args.kinds", list(kinds), f"must be some of {', '.join(KINDS)}")
        self.name = name
        self._tasks: dict[str, tuple[str, Problem]] = {}
        if path is None:
            absent = "give env.taskset.args.path a copy of codeio-hq.jsonl.gz of reasoning-gym"
            super().__init__(
                (), evaluation_share=evaluation_share, seed=seed, epochs=epochs, checked=checked, absent=absent
            )
            return
        file = Path(path) if path else installed_file("reasoning-gym", "codeio-hq.jsonl.gz", "codeio.jsonl.gz")
        families = {}
        for record in read_records(file, ()):
            problem = read_problem(record, modules)
            if problem is None:
                continue
            for kind in kinds:
                if kind == "implement" or problem.case is not None:
                    self._tasks[f"{problem.digest}/{kind}"] = kind, problem
                    families[f"{problem.digest}/{kind}"] = problem.digest
        if not self._tasks:
            what = " with `cases`" if "implement" not in kinds else ""
            raise ConfigError(
                "env.taskset.args.path",
                str(file),
                f"no record{what} in it defines {' or '.join(ENTRY_POINTS)} and {' or '.join(GENERATORS)}, imports "
                "the standard library only, and leaves nothing to chance",
            )
        super().__init__(
            self._tasks,
            evaluation_share=evaluation_share,
            seed=seed,
            epochs=epochs,
            checked=checked,
            families=families,
        )

    def reference(self, task: Task) -> dict[str, bytes]:
        """The record's function, or an answer that is known to be right.

        Raises:
            TaskError: the task is not of this taskset.
        """
        kind, problem = self._tasks[self._key(task)]
        if kind == "implement":
            return {**task.files, "main.py": problem.code.encode()}
        return {**task.files, "answer.json": _json((problem.case or {})[kind])}

    def _make(self, key: str, split: Split) -> Task:
        kind, problem = self._tasks[key]
        make = {"implement": _implement, "output": _predict_output, "input": _predict_input}[kind]
        request, files, test = make(problem)
        test = f"import json\nimport math\nimport random\n\nfrom composer_solution import call\n\n{_SHARED}\n\n{test}"
        return Task(
            id=self._id(key, split),
            request=request,
            files=files,
            hidden_tests={"test_hidden.py": test.encode()},
            metadata={"kind": kind, "function": problem.function.name, **problem.metadata},
        )


def _implement(problem: Problem) -> tuple[str, dict[str, bytes], str]:
    name = problem.function.name
    request = f"{problem.query.strip()}\n\nWrite it as {name} in main.py.\n\n{problem.parameters.strip()}"
    main = f"def {name}({_signature(problem.function)}):\n    raise NotImplementedError\n"
    lines = [
        f"REFERENCE = {problem.code!r}",
        f"GENERATOR = {problem.generator!r}",
        "",
        "",
        "def check(number):",
        f"    random.seed(f'{problem.digest}/{{number}}')",
        # The generator may use what the reference imports.
        f'    generate = load(REFERENCE + "\\n\\n" + GENERATOR, "{problem.generator_name}")',
        f"    arguments = plain(generate({'random.Random(number)' if problem.generator_takes_random else ''}))",
        f'    expected = plain(load(REFERENCE, "{name}")(**plain(arguments)))',
        f'    assert same(call("main.{name}", **arguments), expected)',
    ]
    for number in range(CASES_PER_TASK):
        lines += ["", "", f"def test_case_{number}():", f"    check({number})"]
    return request, {"main.py": main.encode()}, "\n".join(lines) + "\n"


def _predict_output(problem: Problem) -> tuple[str, dict[str, bytes], str]:
    case = problem.case or {}
    request = (
        f"what does {problem.function.name} in program.py return for the arguments in input.json? "
        "put it into answer.json, as JSON"
    )
    test = f"def test_answer():\n    assert same(answer(), json.loads({json.dumps(case['output'])!r}))\n"
    return request, _program(problem, "input.json", case["input"]), test


def _predict_input(problem: Problem) -> tuple[str, dict[str, bytes], str]:
    case = problem.case or {}
    request = (
        f"for which arguments does {problem.function.name} in program.py return what is in output.json? "
        "put them into answer.json, as a JSON object"
    )
    lines = [
        f"REFERENCE = {problem.code!r}",
        "",
        "",
        "def test_answer():",
        f'    result = plain(load(REFERENCE, "{problem.function.name}")(**answer()))',
        f"    assert same(result, json.loads({json.dumps(case['output'])!r}))",
    ]
    return request, _program(problem, "output.json", case["output"]), "\n".join(lines) + "\n"


def _program(problem: Problem, name: str, value: Any) -> dict[str, bytes]:
    return {"program.py": problem.code.encode(), name: _json(value), "answer.json": b"null\n"}


def _case(record: dict[str, Any]) -> dict[str, Any] | None:
    """The first one that tells something; an untouched answer.json says null."""
    cases = record.get("cases")
    for case in cases if isinstance(cases, list) else []:
        if isinstance(case, dict) and isinstance(case.get("input"), dict) and case.get("output") is not None:
            return case
    return None


def _imported(tree: ast.Module) -> set[str]:
    """Top names of what a program imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add((node.module or "").partition(".")[0])
    return names


def _uses_chance(tree: ast.Module) -> bool:
    """Whether it uses what gives something else each time; many import it and do not."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in _CHANCE:
            return True
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in _CHANCE:
            return True
    return False


def _signature(function: ast.FunctionDef) -> str:
    """The parameters without annotations, whose names main.py would lack; defaults that are no constants are None."""

    def bare(arguments: list[ast.arg]) -> list[ast.arg]:
        return [ast.arg(a.arg) for a in arguments]

    def constant(default: ast.expr | None) -> ast.expr | None:
        return default if default is None or isinstance(default, ast.Constant) else ast.Constant(None)

    a = function.args
    return ast.unparse(
        ast.arguments(
            posonlyargs=bare(a.posonlyargs),
            args=bare(a.args),
            vararg=a.vararg and ast.arg(a.vararg.arg),
            kwonlyargs=bare(a.kwonlyargs),
            kw_defaults=[constant(d) for d in a.kw_defaults],
            kwarg=a.kwarg and ast.arg(a.kwarg.arg),
            defaults=[constant(d) or d for d in a.defaults],
        )
    )


def _json(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
