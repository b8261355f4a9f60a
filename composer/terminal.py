"""What a terminal may be shown of text that others wrote: names of tools and files, answers, errors, a run's record."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_CONTROLS = {
    c: f"\\x{c:02x}" if c < 256 else f"\\u{c:04x}"
    for c in (*(set(range(32)) - {9, 10}), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
}
"""Control characters of C0 and C1, except tab and newline, and those that turn the direction of what is written."""


def printable(text: str) -> str:
    r"""The text as a terminal can have it: control characters, which could steer it, as their escapes.

    Example:
        >>> printable("a\x1b]0;title\x07")
        'a\\x1b]0;title\\x07'
    """
    return text.translate(_CONTROLS)


def rich_console(**options: Any) -> Console:
    """A rich console on which no text can steer the terminal, or is markup: names are of anybody's choosing.

    Args:
        options: of `rich.console.Console`.
    """
    from rich.console import Console, ConsoleRenderable, RenderHook
    from rich.segment import Segment

    class Escaped:
        def __init__(self, shown: ConsoleRenderable) -> None:
            self.shown = shown

        def __rich_console__(self, console: Any, options: Any) -> Iterator[Segment]:
            for segment in console.render(self.shown, options):
                yield segment if segment.control else Segment(printable(segment.text), segment.style)

    class Hook(RenderHook):
        def process_renderables(self, renderables: list[ConsoleRenderable]) -> list[ConsoleRenderable]:
            return [Escaped(shown) for shown in renderables]

    console = Console(**{"markup": False, "emoji": False, **options})
    console.push_render_hook(Hook())
    return console
