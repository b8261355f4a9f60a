"""The files of many episodes, each searched apart; those not used for longest give way when there are too many."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping

from envs.shadow.passages import Hit, PassageIndex


class UnknownWorkspace(Exception):
    """There is no such workspace, or not any more: its files have to be given again."""


class WorkspaceTooLarge(Exception):
    """A workspace would hold more than it may; it is gone now."""


class Workspaces:
    """Indices by the name of a workspace. Not for use by several threads at a time."""

    def __init__(
        self, max_characters: int = 16 * 2**20, max_workspaces: int = 1024, max_total: int = 64 * 2**20
    ) -> None:
        """Choose the limits.

        Args:
            max_characters: of one workspace.
            max_workspaces: how many are kept.
            max_total: characters of all of them; an index takes some ten bytes for each.
        """
        self.max_characters, self.max_workspaces, self.max_total = max_characters, max_workspaces, max_total
        self._indices: OrderedDict[str, PassageIndex] = OrderedDict()

    def __len__(self) -> int:
        """How many there are."""
        return len(self._indices)

    def index(
        self, workspace: str, files: Mapping[str, str], removed: Iterable[str] = (), replace: bool = False
    ) -> PassageIndex:
        """Take in files.

        Args:
            workspace: its name.
            files: path -> text; new ones, and what has changed.
            removed: paths that are gone.
            replace: begin anew, also where there is no such workspace yet.

        Raises:
            UnknownWorkspace: there is none, and `replace` is false.
            WorkspaceTooLarge: it would hold more than `max_characters`.
        """
        if replace:
            self._indices[workspace] = PassageIndex()
        index = self._get(workspace)
        for path in removed:
            index.remove(path)
        for path, text in files.items():
            index.put(path, text)
            if index.num_characters > self.max_characters:
                del self._indices[workspace]
                raise WorkspaceTooLarge(f"workspace={workspace!r}: holds more than {self.max_characters} characters")
        self._make_room()
        return index

    def search(self, workspace: str, query: str, most: int, under: str = "") -> list[Hit]:
        """The passages that fit best; see `PassageIndex.search`.

        Raises:
            UnknownWorkspace: there is none.
        """
        return self._get(workspace).search(query, most, under)

    def _get(self, workspace: str) -> PassageIndex:
        if workspace not in self._indices:
            raise UnknownWorkspace(f"workspace={workspace!r}: is not known: index its files, with replace=true")
        self._indices.move_to_end(workspace)
        return self._indices[workspace]

    def _make_room(self) -> None:
        total = sum(index.num_characters for index in self._indices.values())
        while len(self._indices) > 1 and (total > self.max_total or len(self._indices) > self.max_workspaces):
            total -= self._indices.popitem(last=False)[1].num_characters
