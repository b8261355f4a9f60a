"""A run directory's own files: what is finished, and what is damaged."""

import pytest

from composer.errors import ResumeError
from composer.layout import Layout
from composer.schema import Stage


def test_a_finished_stage_leaves_its_results(tmp_path):
    layout = Layout(tmp_path)
    assert layout.results(Stage.rl) is None
    layout.finish(Stage.rl, {"wall_s": 1.5, "summary": {"steps": 3}})
    assert layout.results(Stage.rl) == {"wall_s": 1.5, "summary": {"steps": 3}}
    assert [p.name for p in layout.stage(Stage.rl).iterdir()] == ["done.json"]


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"{}", b"\xff", b'{"wall_s": null}'])
def test_a_damaged_result_is_named(tmp_path, content):
    layout = Layout(tmp_path)
    layout.finish(Stage.rl, {"wall_s": 1.5})
    (layout.stage(Stage.rl) / "done.json").write_bytes(content)
    with pytest.raises(ResumeError, match=r"rl/done\.json is damaged .* delete it"):
        layout.results(Stage.rl)


def test_only_whole_checkpoints_count(tmp_path):
    layout = Layout(tmp_path)
    folder = layout.stage(Stage.rl)
    assert layout.checkpoints(folder) == {}
    for name in ("step-5", "step-10", "step-15", "step-x"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    for name in ("step-10", "step-5", "step-x"):
        (folder / "checkpoints" / name / ".metadata").touch()
    assert list(layout.checkpoints(folder).items()) == [(n, folder / "checkpoints" / f"step-{n}") for n in (5, 10)]
