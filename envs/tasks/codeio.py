"""Taskset `codeio`: small functions of reasoning-gym's CodeI/O data, to be written, or to be thought through.

A record has a question (`query`), what goes in and comes out (`parameters`), a function that answers it
(`reference_code`) and one that makes inputs (`input_generator`). Three kinds of task:

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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from composer.errors import ConfigError
from composer.types import Split, Task
from envs.tasks.finite import FiniteTaskset
from envs.tasks.records import installed_file, read_records

KINDS = ("implement", "output", "input")
FIELDS = ("query", "parameters", "reference_code", "input_generator")
ENTRY_POINTS = ("main_solution", "main")
CASES_PER_TASK = 5
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
    namespace = {"__name__": "reference"}
    exec(code, namespace)
    return namespace[name]


def answer():
    return json.loads(call("builtins.eval", "open('answer.json', encoding='utf-8').read()"))
"""


class CodeioTaskset(FiniteTaskset):
    """Tasks `<hash of the reference>/<kind>`; all tasks of one function are in one split."""

    def __init__(
        self,
        path: str = "",
        name: str = "codeio",
        kinds: Sequence[str] = ("implement",),
        evaluation_share: float = 0.1,
        seed: int = 0,
        epochs: int = 1,
        checked: str = "",
    ) -> None:
        """Read the records; those whose reference is no function that `ENTRY_POINTS` names are left out.

        Args:
            path: codeio-hq.jsonl.gz, or a file of that shape; "": that of the installed `reasoning-gym`.
            name: begins the tasks' ids.
            kinds: of tasks, of `KINDS`.
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
        file = Path(path) if path else installed_file("reasoning-gym", "codeio-hq.jsonl.gz", "codeio.jsonl.gz")
        self._tasks: dict[str, tuple[str, dict[str, Any], ast.FunctionDef]] = {}
        families = {}
        for record in read_records(file, FIELDS):
            function = _entry_point(record["reference_code"])
            if function is None:
                continue
            digest = hashlib.sha256(record["reference_code"].encode(errors="replace")).hexdigest()[:16]
            for kind in kinds:
                if kind == "implement" or _case(record) is not None:
                    self._tasks[f"{digest}/{kind}"] = kind, record, function
                    families[f"{digest}/{kind}"] = digest
        if not self._tasks:
            what = " with `cases`" if "implement" not in kinds else ""
            raise ConfigError(
                "env.taskset.args.path", str(file), f"no record{what} in it defines {' or '.join(ENTRY_POINTS)}"
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
        kind, record, _ = self._tasks[self._key(task)]
        if kind == "implement":
            return {**task.files, "main.py": record["reference_code"].encode()}
        case = _case(record) or {}
        return {**task.files, "answer.json": _json(case[kind])}

    def _make(self, key: str, split: Split) -> Task:
        kind, record, function = self._tasks[key]
        make = {"implement": _implement, "output": _predict_output, "input": _predict_input}[kind]
        request, files, test = make(record, function, key)
        test = f"import json\nimport math\nimport random\n\nfrom composer_solution import call\n\n{_SHARED}\n\n{test}"
        return Task(
            id=self._id(key, split),
            request=request,
            files=files,
            hidden_tests={"test_hidden.py": test.encode()},
            metadata={"kind": kind, "function": function.name},
        )


def _implement(record: dict[str, Any], function: ast.FunctionDef, key: str) -> tuple[str, dict[str, bytes], str]:
    request = f"{record['query'].strip()}\n\nWrite it as {function.name} in main.py.\n\n{record['parameters'].strip()}"
    main = f"def {function.name}({_signature(function)}):\n    raise NotImplementedError\n"
    lines = [
        f"REFERENCE = {record['reference_code']!r}",
        f"GENERATOR = {record['input_generator']!r}",
        "",
        "",
        "def check(number):",
        f"    random.seed(f{key + '/{number}'!r})",
        # The generator may use what the reference imports.
        '    arguments = plain(load(REFERENCE + "\\n" + GENERATOR, "input_generator")())',
        f'    expected = plain(load(REFERENCE, "{function.name}")(**plain(arguments)))',
        f'    assert same(call("main.{function.name}", **arguments), expected)',
    ]
    for number in range(CASES_PER_TASK):
        lines += ["", "", f"def test_case_{number}():", f"    check({number})"]
    return request, {"main.py": main.encode()}, "\n".join(lines) + "\n"


def _predict_output(record: dict[str, Any], function: ast.FunctionDef, key: str) -> tuple[str, dict[str, bytes], str]:
    case = _case(record) or {}
    request = (
        f"what does {function.name} in program.py return for the arguments in input.json? "
        "put it into answer.json, as JSON"
    )
    test = f"def test_answer():\n    assert same(answer(), json.loads({json.dumps(case['output'])!r}))\n"
    return request, _program(record, "input.json", case["input"]), test


def _predict_input(record: dict[str, Any], function: ast.FunctionDef, key: str) -> tuple[str, dict[str, bytes], str]:
    case = _case(record) or {}
    request = (
        f"for which arguments does {function.name} in program.py return what is in output.json? "
        "put them into answer.json, as a JSON object"
    )
    lines = [
        f"REFERENCE = {record['reference_code']!r}",
        "",
        "",
        "def test_answer():",
        f'    result = plain(load(REFERENCE, "{function.name}")(**answer()))',
        f"    assert same(result, json.loads({json.dumps(case['output'])!r}))",
    ]
    return request, _program(record, "output.json", case["output"]), "\n".join(lines) + "\n"


def _program(record: dict[str, Any], name: str, value: Any) -> dict[str, bytes]:
    return {"program.py": record["reference_code"].encode(), name: _json(value), "answer.json": b"null\n"}


def _case(record: dict[str, Any]) -> dict[str, Any] | None:
    """The record's first case with an output that an untouched answer.json does not give."""
    cases = record.get("cases")
    for case in cases if isinstance(cases, list) else []:
        if isinstance(case, dict) and isinstance(case.get("input"), dict) and case.get("output") is not None:
            return case
    return None


def _entry_point(code: str) -> ast.FunctionDef | None:
    try:
        functions = {node.name: node for node in ast.parse(code).body if isinstance(node, ast.FunctionDef)}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return next((functions[name] for name in ENTRY_POINTS if name in functions), None)


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
