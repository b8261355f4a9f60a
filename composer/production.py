"""How an env's tools differ from those of the product that the agent is trained for (`env.tools.<name>.production`).

An env says it, the plan shows it, and `composer behaviour` reads production's sessions in the words of the env.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from composer.binding import suggest
from composer.checks.common import generates, require
from composer.config import PLAN_FILE
from composer.errors import ConfigError
from composer.schema import Config, ProductionConfig
from composer.types import ToolCall


@dataclass(frozen=True)
class ToolPlan:
    """A tool as the model sees it, and as production has it."""

    key: str
    """In `env.tools`."""
    name: str
    arguments: tuple[str, ...]
    """Those that may be left out have a question mark."""
    strict: bool | None
    """Whether it refuses arguments that it does not know; None: it does not say."""
    production_name: str
    renamed: dict[str, str] = field(default_factory=dict)
    """Name in production -> name here, of arguments."""
    differs: tuple[str, ...] = ()
    """From production's, a phrase each; empty: it is alike, or nothing is said."""


def plan_tools(config: Config, made: Mapping[str, Any]) -> tuple[ToolPlan, ...]:
    """The tools of an env's own harness.

    Args:
        config: the resolved config.
        made: the targets as `composer.instantiate.check_targets` made them.

    Raises:
        PlanError: two tools have one name, or what is said of production cannot be.
    """
    env = config.env
    if not generates(config) or env.agent.command:  # an agent program has tools of its own
        return ()
    tools: dict[str, ToolPlan] = {}
    names: dict[str, str] = {}
    for key, target in env.tools.items():
        tool = _tool(key, made[f"env.tools.{key}"], target.production)
        for kind, name in (("here", tool.name), ("production", tool.production_name)):
            other = names.setdefault(f"{kind} {name}", key)
            where = "args.name" if kind == "here" else "production.name"
            remedy = f"env.tools.{other} has the same name{'' if kind == 'here' else ' in production'}: change one"
            require(other == key, f"env.tools.{key}.{where}", name, remedy)
        tools[key] = tool
    for name in env.missing_tools:
        there = [tool.key for tool in tools.values() if tool.production_name == name]
        remedy = f"env.tools.{''.join(there[:1])} is that tool: leave the name out, or remove the tool"
        require(not there, "env.missing_tools", name, remedy)
    return tuple(tools.values())


def _tool(key: str, tool: Any, production: ProductionConfig) -> ToolPlan:
    schema = tool.parameters if isinstance(tool.parameters, Mapping) else {}
    properties: dict[str, Any] = dict(schema.get("properties") or {})
    required = set(schema.get("required") or ())
    at = f"env.tools.{key}.production"
    for name in production.arguments:
        hint = suggest(name, list(properties))
        offered = f"did you mean {hint!r}?" if hint else f"it takes {', '.join(properties) or 'none'}"
        require(
            name in properties, f"{at}.arguments.{name}", production.arguments[name], f"no such argument; {offered}"
        )
    there = {name: production.arguments.get(name, name) for name in properties}
    if len(set(there.values())) < len(there):
        remedy = "two arguments have one name in production: change one"
        require(False, f"{at}.arguments", dict(production.arguments), remedy)
    for name in production.lacks:
        require(name not in there.values(), f"{at}.lacks", name, "the tool has this argument: leave it out")
    for name in production.adds:
        require(name in properties, f"{at}.adds", name, f"no such argument; it takes {', '.join(properties) or 'none'}")
    return ToolPlan(
        key=key,
        name=tool.name,
        arguments=tuple(name if name in required else f"{name}?" for name in properties),
        strict=getattr(tool, "strict", None),
        production_name=production.name or tool.name,
        renamed={theirs: ours for ours, theirs in there.items() if ours != theirs},
        differs=tuple(_differences(tool, production)),
    )


def _differences(tool: Any, production: ProductionConfig) -> Iterator[str]:
    if production.name and production.name != tool.name:
        yield f"called {production.name} there"
    for ours, theirs in production.arguments.items():
        if ours != theirs:
            yield f"{ours} is {theirs} there"
    if production.lacks:
        yield f"without {', '.join(production.lacks)}"
    if production.adds:
        yield f"{', '.join(production.adds)} only here"
    strict = getattr(tool, "strict", None)
    if production.strict is not None and production.strict != strict:
        yield "strict there" if production.strict else "lenient there"
    if production.description and production.description != tool.description:
        yield "described otherwise"
    if production.differs:
        yield production.differs


@dataclass(frozen=True)
class Translation:
    """Reads calls of production in the words of an env."""

    tools: Mapping[str, ToolPlan] = field(default_factory=dict)
    """By their names in production."""
    missing: frozenset[str] = frozenset()
    """Tools of production that the env does not have."""

    @classmethod
    def of_run(cls, run_dir: Path) -> Translation:
        """What a run's plan says; nothing, if it has none or says nothing.

        Raises:
            ConfigError: the plan cannot be read.
        """
        path = run_dir / PLAN_FILE
        try:
            plan = yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else {}
            tools = [ToolPlan(**tool) for tool in plan.get("tools") or ()]
            return cls({tool.production_name: tool for tool in tools}, frozenset(plan.get("missing_tools") or ()))
        except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError, TypeError) as error:
            raise ConfigError("env-run", str(run_dir), f"its {PLAN_FILE} cannot be read ({error!r:.80})") from None

    def read(self, call: ToolCall) -> ToolCall | None:
        """The call as the env's agent would have made it; None: of a tool that the env does not have."""
        if call.name in self.missing:
            return None
        tool = self.tools.get(call.name)
        if tool is None:
            return call
        return ToolCall(tool.name, {tool.renamed.get(name, name): value for name, value in call.arguments.items()})

    def differences(self) -> list[str]:
        """What the env says of itself, a line each."""
        lines = [f"{tool.name}: {difference}" for tool in self.tools.values() for difference in tool.differs]
        return [*lines, *(f"{name}: not here" for name in sorted(self.missing))]
