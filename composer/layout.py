"""Where a run keeps its files: the one place that knows the names.

<run_dir>/
    config.yaml  plan.yaml  status.json      what runs, and how far it is
    times.json                               how long each start took, stage by stage
    metrics.jsonl  traces.jsonl  mlflow.json the record (composer/tracking)
    tokenizer/                               the tokenizer that all processes read
    sessions.jsonl                           the scripted expert's sessions, as token ids
    episodes/<stage>/                        checkpoints of episodes, and files that agents ended with
    stages/<stage>/done.json                 a finished stage and its results
    stages/pretrain/<phase>/                 checkpoints/, exported/ (Hugging Face)
    stages/rl/                               checkpoints/, ledger.jsonl, exported/
    stages/evaluate_*/groups.jsonl           every episode of an evaluation
    summary.json                             the closing table
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.errors import ResumeError
from composer.schema import Stage


@dataclass(frozen=True)
class Layout:
    """Paths of one run directory."""

    run_dir: Path

    @property
    def times(self) -> Path:
        """What each start of the run took."""
        return self.run_dir / "times.json"

    @property
    def tokenizer(self) -> Path:
        """A Hugging Face tokenizer folder."""
        return self.run_dir / "tokenizer"

    @property
    def sessions(self) -> Path:
        """The scripted expert's sessions, one JSON object a line."""
        return self.run_dir / "sessions.jsonl"

    def episodes(self, stage: Stage) -> Path:
        """What a stage's episodes leave on disk (composer/rollout/checkpoint.py)."""
        return self.run_dir / "episodes" / stage.value

    @property
    def ledger(self) -> Path:
        """The RL stage's ledger."""
        return self.stage(Stage.rl) / "ledger.jsonl"

    def stage(self, stage: Stage) -> Path:
        """A stage's folder."""
        return self.run_dir / "stages" / stage.value

    def phase(self, phase: str) -> Path:
        """A phase's folder."""
        return self.stage(Stage.pretrain) / phase

    def export(self, folder: Path) -> Path:
        """The Hugging Face folder that a phase or stage ends with."""
        return folder / "exported"

    def checkpoints(self, folder: Path) -> dict[int, Path]:
        """Step -> folder of each whole checkpoint of a phase or stage, oldest first; torch writes its `.metadata` last.

        It is read by processes that do not load torch; the trainer itself finds its newest checkpoint likewise.
        """
        whole = [p.parent for p in folder.glob("checkpoints/step-*/.metadata")]
        return dict(sorted((int(n), p) for p in whole if (n := p.name.removeprefix("step-")).isdecimal()))

    def results(self, stage: Stage) -> dict[str, Any] | None:
        """What a finished stage left; None if it is not finished.

        Raises:
            ResumeError: the file is damaged.
        """
        path = self.stage(stage) / "done.json"
        if not path.exists():
            return None
        try:
            found = json.loads(path.read_bytes())
            return {**found, "wall_s": float(found["wall_s"])}
        except (ValueError, KeyError, TypeError) as e:
            raise ResumeError(f"{path} is damaged ({e!r}); delete it to run this stage again") from e

    def finish(self, stage: Stage, results: dict[str, Any]) -> None:
        """Mark a stage finished, atomically."""
        folder = self.stage(stage)
        folder.mkdir(parents=True, exist_ok=True)
        half = folder / "done.json.tmp"
        half.write_text(json.dumps(results, indent=2), encoding="utf-8")
        half.replace(folder / "done.json")
