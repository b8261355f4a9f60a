"""Read the YAML files behind a config with sharper eyes than a YAML 1.1 parser, and remember where each key stands.

Hydra reads every file through a repository; `CheckedRepository` looks at the text first and refuses what YAML 1.1 reads
as something else than was written (`on`, `no`, `010`, `12:30:45`), keys given twice, anchors that hold themselves,
lists in place of mappings, and whatever Hydra does not take for a defaults list.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

import yaml
from hydra._internal.config_repository import ConfigRepository
from hydra.core.object_type import ObjectType
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf.errors import OmegaConfBaseException

from composer.binding import suggest, words_at
from composer.errors import ConfigError
from composer.schema import Config

_BOOLEAN_WORD = re.compile(r"(?:yes|no|on|off)$", re.IGNORECASE)
_LEADING_ZERO = re.compile(r"[+-]?0[0-9_]+$")
_BINARY = re.compile(r"[+-]?0b[01_]+$")
_SEXAGESIMAL = re.compile(r"[+-]?[0-9][0-9_]*(?::[0-5]?[0-9])+(?:\.[0-9_]*)?$")
_DEFAULTS_WORDS = ("optional", "override")
_WORDS = {yaml.MappingNode: "a group of keys", yaml.SequenceNode: "a list"}


class CheckedRepository(ConfigRepository):
    """Hydra's repository of config sources; every YAML file is checked before Hydra parses it."""

    newest = ""
    """The file that was read last, such as `experiment/mine`; of the class, since Hydra works on copies."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Check the file that holds `config_path`, then load it as Hydra does.

        Raises:
            ConfigError: the file cannot be read, is not YAML, or holds one of the traps above.
        """
        CheckedRepository.newest = config_path
        self.lines(config_path)
        try:
            return super().load_config(config_path)
        except (yaml.YAMLError, OmegaConfBaseException, HydraException, ValueError, TypeError) as error:
            cause = error.__cause__ or error
            key, reason = getattr(cause, "full_key", ""), " ".join(str(cause).partition("full_key:")[0].split())
            name = config_path.removesuffix(".yaml")
            raise ConfigError(
                "config file", f"{name}.yaml", f"{key or 'it'} cannot be read ({reason}): mend it"
            ) from None

    def lines(self, config_path: str) -> dict[str, str]:
        """Key inside the file of `config_path` ("model/tiny_moe") -> "in <file>, line <n>".

        Raises:
            ConfigError: as `load_config`.
        """
        source = self._find_object_source(config_path=config_path, object_type=ObjectType.CONFIG)
        path = _file_of(source, config_path) if source is not None else None
        return dict(check_file(path, _package(path, config_path))) if path is not None else {}


def check_file(path: Path, package: str) -> Iterator[tuple[str, str]]:
    """Check one YAML file and yield (key inside the file, where it stands).

    Args:
        path: the file.
        package: dotted key under which Hydra will put its content, for messages.

    Raises:
        ConfigError: at the first thing that is not what it seems.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), package, f"cannot be read ({error}): make it a readable UTF-8 file") from None
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}" if mark else "the file"
        tabs = "; indent with spaces, not tabs" if "\\t" in str(error.problem) else ""
        raise ConfigError(str(path), str(error.problem), f"is not YAML: mend {where}{tabs}") from None
    except yaml.YAMLError as error:
        raise ConfigError(str(path), " ".join(str(error).split()), "is not YAML: mend the file") from None
    if root is None:
        return
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(str(path), package, "a config file holds `key: value` lines, and this one does not")
    yield from _walk(root, "", path, package, set(), ())


def _walk(
    node: yaml.Node, key: str, path: Path, package: str, seen: set[int], above: tuple[yaml.Node, ...]
) -> Iterator[tuple[str, str]]:
    where = f"in {_relative(path)}, line {node.start_mark.line + 1}"
    if any(node is n for n in above):
        raise ConfigError(_join(package, key), "*", f"an anchor cannot hold itself: write its content out ({where})")
    if id(node) in seen:
        return
    seen.add(id(node))
    above = (*above, node)
    _check_shape(node, _join(package, key), where)
    if isinstance(node, yaml.MappingNode):
        names: dict[str, int] = {}
        for name_node, value in node.value:
            name = name_node.value if isinstance(name_node, yaml.ScalarNode) else "?"
            line = name_node.start_mark.line + 1
            where = f"in {_relative(path)}, line {line}"
            full = f"{key}.{name}" if key else name
            _check_scalar(name_node, _join(package, full), where)
            if name in names and name != "<<":
                raise ConfigError(
                    _join(package, full), _text(value), f"stands twice, also on line {names[name]}: keep one ({where})"
                )
            if not name_node.tag.endswith((":str", ":merge")):
                raise ConfigError(_join(package, full), _text(value), f"a key is a text: write '{name}' ({where})")
            names[name] = line
            yield full, where
            if full == "defaults":
                _check_defaults(value, path)
            else:
                yield from _walk(value, full, path, package, seen, above)
    elif isinstance(node, yaml.SequenceNode):
        for i, item in enumerate(node.value):
            yield from _walk(item, f"{key}[{i}]", path, package, seen, above)
    else:
        _check_scalar(node, _join(package, key), where)


def _check_shape(node: yaml.Node, key: str, where: str) -> None:
    """Refuse a list where a mapping belongs and the other way round, which Hydra cannot merge."""
    wanted, found = words_at(Config, key), _WORDS.get(type(node))
    if wanted in _WORDS.values() and found is not None and found != wanted:
        raise ConfigError(key, "[...]" if found == "a list" else "{...}", f"{wanted} is expected ({where})")


def _check_scalar(node: yaml.Node, key: str, where: str) -> None:
    """Refuse a plain scalar that YAML 1.1 reads as something else than what is written."""
    if not isinstance(node, yaml.ScalarNode) or node.style is not None or not isinstance(node.value, str):
        return
    text = node.value
    if _BOOLEAN_WORD.match(text):
        truth = "true" if text.lower() in ("yes", "on") else "false"
        raise ConfigError(
            key, text, f"YAML reads this word as {truth}: write {truth}, or '{text}' if a text is meant ({where})"
        )
    if _LEADING_ZERO.match(text):
        plain = text.lstrip("+-0_").replace("_", "") or "0"
        raise ConfigError(
            key, text, f"YAML reads a leading zero as octal: write {plain}, or '{text}' if a text is meant ({where})"
        )
    if _BINARY.match(text):
        raise ConfigError(
            key, text, f"YAML reads this as binary: write {int(text.replace('_', ''), 2)} or '{text}' ({where})"
        )
    if _SEXAGESIMAL.match(text):
        raise ConfigError(
            key, text, f"YAML reads this as a number in base 60: write '{text}', or one plain number ({where})"
        )


def _check_defaults(node: yaml.Node, path: Path) -> None:
    """Refuse what is no defaults list, and words in it that Hydra would take for part of a group's name."""

    def where(node: yaml.Node) -> str:
        return f"(in {_relative(path)}, line {node.start_mark.line + 1})"

    if not isinstance(node, yaml.SequenceNode):
        raise ConfigError(
            "defaults", _text(node), f"a list is expected: write `- <group>: <option>` lines {where(node)}"
        )
    if sum(item.value == "_self_" for item in node.value) > 1:
        raise ConfigError("defaults", "_self_", f"stands twice: keep one {where(node)}")
    for item in node.value:
        one = isinstance(item, yaml.MappingNode) and len(item.value) == 1
        if not (one or (isinstance(item, yaml.ScalarNode) and item.tag.endswith(":str") and item.value)):
            remedy = f"each item is one `<group>: <option>` or the name of a file beside this one {where(item)}"
            raise ConfigError("defaults", _text(item), remedy)
        if not isinstance(item, yaml.MappingNode):
            continue
        for name_node, value in item.value:
            *words, _ = str(name_node.value).split(" ")
            for word in words:
                if word not in _DEFAULTS_WORDS:
                    hint = suggest(word, _DEFAULTS_WORDS) or "override"
                    remedy = f"`{word}` is no word of a defaults list; did you mean `{hint}`? {where(name_node)}"
                    raise ConfigError(f"defaults.{name_node.value}", _text(value), remedy)


def _file_of(source: ConfigSource, config_path: str) -> Path | None:
    name = config_path if config_path.endswith(".yaml") else f"{config_path}.yaml"
    if source.scheme() == "file":
        return Path(source.path) / name
    if source.scheme() == "pkg" and not source.path.startswith("hydra"):
        root = resources.files(source.path) if source.path else None
        # Not a plain folder (a zip): Hydra still reads it; only these checks are left out.
        candidate = root.joinpath(name) if root is not None else None
        return Path(str(candidate)) if candidate is not None and Path(str(candidate)).is_file() else None
    return None


def _package(path: Path, config_path: str) -> str:
    """Where Hydra puts a file's content: what its `# @package` line says, else its folder."""
    folder = config_path.rpartition("/")[0].strip("/").replace("/", ".")
    try:
        header = ConfigSource._get_header_dict(path.read_text(encoding="utf-8", errors="replace")[:512])["package"]
    except OSError:
        return folder
    except ValueError as error:
        remedy = f"{error}: write `# @package _global_` (in {_relative(path)})"
        raise ConfigError("# @package", path.name, remedy) from None
    if header is None:
        return folder
    return "" if header == "_global_" else header.removeprefix("_global_.").replace("_group_", folder)


def _relative(path: Path) -> str:
    """A path as short as it can be shown."""
    path = path.absolute()
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


def _join(package: str, key: str) -> str:
    return f"{package}.{key}" if package else key


def _text(node: yaml.Node) -> str:
    return node.value if isinstance(node.value, str) else "..."
