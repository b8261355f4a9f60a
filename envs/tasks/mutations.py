"""Mutations of Python functions: small faults as people make them, each a single edit of the source.

Positions come from the syntax tree and the tokens, so comments, line breaks and quotes beside the fault stay.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass

from envs.tasks.python_source import Edit, FunctionNode, PythonSource

_OPERATORS: dict[type[ast.operator], str] = {
    ast.Add: "+",
    ast.Sub: "-",
    ast.Mult: "*",
    ast.Div: "/",
    ast.FloorDiv: "//",
    ast.Mod: "%",
    ast.Pow: "**",
    ast.LShift: "<<",
    ast.RShift: ">>",
    ast.BitAnd: "&",
    ast.BitOr: "|",
}
_OTHER_OPERATOR = {
    "+": "-",
    "-": "+",
    "*": "//",
    "/": "*",
    "//": "%",
    "%": "//",
    "**": "*",
    "<<": ">>",
    ">>": "<<",
    "&": "|",
    "|": "&",
}
_OFF_BY_ONE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
_OTHER_WORD = {"in": "not in", "not in": "in", "is": "is not", "is not": "is"}
KINDS = ("operator", "comparison", "condition", "arguments", "return", "constant", "statement")
"""Operators swapped; comparisons off by one or turned around; conditions negated; neighbouring arguments swapped;
`return` dropped; a number one too large, a truth value turned around; a statement removed."""


@dataclass(frozen=True)
class Mutation:
    """One fault."""

    kind: str
    number: int
    """Among the edits of its kind in its function, in the order of the source; not all of them leave valid Python."""
    line: int
    edit: Edit


def mutations(
    source: PythonSource,
    function: FunctionNode,
    kinds: Collection[str] = KINDS,
    rank: Callable[[Mutation], str] | None = None,
    most: int | None = None,
) -> list[Mutation]:
    """Mutations of a function that leave valid Python, each of another meaning.

    Args:
        source: the file.
        function: in it.
        kinds: of `KINDS`.
        rank: which ones come first; None: the order of the source.
        most: how many; None: all. Looking at each takes about a millisecond.
    """
    edits = sorted(
        ((kind, edit) for statement in function.body for kind, edit in _of(source, statement)),
        key=lambda c: (c[1].start, c[1].end, c[0]),
    )
    numbers: Counter[str] = Counter()
    candidates = []
    for kind, edit in edits:
        line = source.content.count(b"\n", 0, edit.start) + 1
        candidates.append(Mutation(kind, numbers[kind], line, edit))
        numbers[kind] += 1
    if rank is not None:
        candidates.sort(key=rank)
    seen = {ast.dump(source.alone(function))}
    found: list[Mutation] = []
    for candidate in candidates:
        if candidate.kind not in kinds:
            continue
        if most is not None and len(found) == most:
            break
        try:
            meaning = ast.dump(source.alone(function, candidate.edit))
        except (SyntaxError, ValueError):
            continue
        if meaning not in seen:
            seen.add(meaning)
            found.append(candidate)
    return found


def _of(source: PythonSource, root: ast.AST) -> Iterator[tuple[str, Edit]]:
    for node in _walk(root):
        if isinstance(node, ast.BinOp):
            yield from _operator(source, node)
        elif isinstance(node, ast.AugAssign):
            yield from _augmented(source, node)
        elif isinstance(node, ast.BoolOp):
            yield from _boolean(source, node)
        elif isinstance(node, ast.Compare):
            yield from _comparison(source, node)
        elif isinstance(node, ast.Call):
            yield from _arguments(source, node)
        elif isinstance(node, ast.Constant):
            yield from _constant(source, node)
        elif isinstance(node, ast.Return):
            yield from _return(source, node)
        if isinstance(node, ast.If | ast.While | ast.IfExp):
            yield from _condition(source, node.test)
        if isinstance(node, ast.stmt) and _can_go(node):
            yield "statement", Edit(*source.span(node), b"pass")


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """What is run: no annotations, and no f-strings, whose parts have no true positions."""
    if isinstance(node, ast.JoinedStr):
        return
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _walk(child)


def _operator(source: PythonSource, node: ast.BinOp) -> Iterator[tuple[str, Edit]]:
    symbol = _OPERATORS.get(type(node.op), "")
    # What texts can do with `+`, `*` and `%` would only raise a TypeError.
    if not symbol or _is_text(node.left) or _is_text(node.right):
        return
    for start, end, text in source.tokens_between(source.span(node.left)[1], source.span(node.right)[0]):
        if text == symbol:
            yield "operator", Edit(start, end, _OTHER_OPERATOR[symbol].encode())
            return


def _augmented(source: PythonSource, node: ast.AugAssign) -> Iterator[tuple[str, Edit]]:
    symbol = _OPERATORS.get(type(node.op), "")
    if not symbol or _is_text(node.value):
        return
    for start, end, text in source.tokens_between(source.span(node.target)[1], source.span(node.value)[0]):
        if text == f"{symbol}=":
            yield "operator", Edit(start, end, f"{_OTHER_OPERATOR[symbol]}=".encode())
            return


def _boolean(source: PythonSource, node: ast.BoolOp) -> Iterator[tuple[str, Edit]]:
    """The first of its words only: `a and b and c` has one fault of this kind that people make."""
    word, other = ("and", b"or") if isinstance(node.op, ast.And) else ("or", b"and")
    for start, end, text in source.tokens_between(source.span(node.values[0])[1], source.span(node.values[1])[0]):
        if text == word:
            yield "operator", Edit(start, end, other)
            return


def _comparison(source: PythonSource, node: ast.Compare) -> Iterator[tuple[str, Edit]]:
    for left, right in zip([node.left, *node.comparators], node.comparators, strict=False):
        tokens = source.tokens_between(source.span(left)[1], source.span(right)[0])
        words = [token for token in tokens if token[2] not in ("(", ")")]
        symbol = " ".join(text for _, _, text in words)
        other = _OFF_BY_ONE.get(symbol) or _OTHER_WORD.get(symbol)
        if other:
            yield "comparison", Edit(words[0][0], words[-1][1], other.encode())


def _condition(source: PythonSource, test: ast.expr) -> Iterator[tuple[str, Edit]]:
    start, end = source.span(test)
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        yield "condition", Edit(start, _after(source, start, b"not"), b"")
    elif not isinstance(test, ast.Constant):
        yield "condition", Edit(start, end, b"not (" + source.text(test) + b")")


def _arguments(source: PythonSource, node: ast.Call) -> Iterator[tuple[str, Edit]]:
    for left, right in zip(node.args, node.args[1:], strict=False):
        if isinstance(left, ast.Starred) or isinstance(right, ast.Starred):
            continue
        (start, middle), (again, end) = source.span(left), source.span(right)
        text = source.text(right) + source.content[middle:again] + source.text(left)
        yield "arguments", Edit(start, end, text)


def _constant(source: PythonSource, node: ast.Constant) -> Iterator[tuple[str, Edit]]:
    if isinstance(node.value, bool):
        yield "constant", Edit(*source.span(node), str(not node.value).encode())
    elif isinstance(node.value, int):
        yield "constant", Edit(*source.span(node), str(node.value + 1).encode())
    elif isinstance(node.value, float):
        yield "constant", Edit(*source.span(node), repr(node.value + 1.0).encode())


def _return(source: PythonSource, node: ast.Return) -> Iterator[tuple[str, Edit]]:
    if node.value is None or (isinstance(node.value, ast.Constant) and node.value.value is None):
        return
    start, _ = source.span(node)
    yield "return", Edit(start, _after(source, start, b"return"), b"")


def _after(source: PythonSource, start: int, word: bytes) -> int:
    """Where the code after a word begins."""
    end = start + len(word)
    while source.content[end : end + 1] in (b" ", b"\t"):
        end += 1
    return end


def _can_go(node: ast.stmt) -> bool:
    """Whether a statement can be missing without its names being missed."""
    if isinstance(node, ast.Assign):
        return all(isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets)
    if isinstance(node, ast.Expr):
        return isinstance(node.value, ast.Call | ast.Await | ast.Yield | ast.YieldFrom)
    return isinstance(node, ast.AugAssign | ast.Raise | ast.Continue | ast.Break | ast.Delete)


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str | bytes))
