"""The Ray actors of a run, one class a role. Thin: what they do stands in the packages they call.

Every actor reads the resolved config from the run directory by itself; only small things and samples travel.
"""

from __future__ import annotations

import asyncio
import dataclasses
import faulthandler
import itertools
import json
import os
import random
import socket
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from composer import config as config_files
from composer.checks.common import wants_sessions
from composer.contract import Tool
from composer.gateway.agent import AgentProgram, ExternalHarness
from composer.instantiate import instantiate
from composer.layout import Layout
from composer.monitor.watch import Monitor
from composer.process_logs import last_words, log_to
from composer.rehearsal import check_lengths
from composer.rollout import preflight
from composer.rollout.chat import TEMPLATES, Chat, install_template
from composer.rollout.checkpoint import Keeping
from composer.rollout.episode import Env, EnvSettings, Rubric
from composer.rollout.generator import GeneratorPool, Replica
from composer.rollout.parts import BlockedLoop, make_task
from composer.rollout.pool import PoolSettings, SandboxPool
from composer.rollout.sessions import Session, record_sessions, render_session, session_text
from composer.rundir import find_plugins
from composer.schema import ChatTemplate, Config, Stage, TargetConfig
from composer.types import Generation, Group, Split

if TYPE_CHECKING:
    import numpy as np
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    from composer.rl.packing import PackedRows
    from composer.rl.trainer import PolicyTrainer
    from composer.weight_sync.store import VersionStore


class GeneratorReplica(Replica):
    """A generator with its log in the run directory."""

    def __init__(self, run_dir: str, name: str, *arguments: Any) -> None:
        """As `Replica`."""
        log_to(Path(run_dir), name)
        super().__init__(name, *arguments)


class TrainerRank:
    """One rank of the trainer. Every method except `address` and `join` is collective."""

    def __init__(self, run_dir: str, rank: int, world_size: int) -> None:
        """Nothing heavy is imported yet, so that all ranks start at once."""
        log_to(Path(run_dir), f"trainer-{rank}")
        self.layout = Layout(Path(run_dir))
        self.config = config_files.load(self.layout.run_dir)
        self.rank = rank
        self._listener: socket.socket | None = None
        self._meeting: TCPStore | None = None
        self._policy: PolicyTrainer | None = None
        self._store: VersionStore | None = None
        # Ray shows each rank its own GPU only, which is then the first one.
        os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK="0")

    def address(self) -> tuple[str, int]:
        """An address of this process's machine and a port on it that is held for the ranks to meet at."""
        import ray

        host = ray.util.get_node_ip_address()
        self._listener = socket.create_server((host, 0))
        return host, self._listener.getsockname()[1]

    def join(self, host: str, port: int) -> None:
        """Where the ranks meet; rank 0 begins to listen there.

        torch would listen on all interfaces; given a socket of ours, it listens on that address alone. Every call makes
        a new store, so that no key of an earlier trainer is left in it.
        """
        from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

        self._meeting = None
        if self.rank == 0:
            assert self._listener is not None, "address comes first"
            self._meeting = TCPStore(
                host, port, is_master=True, wait_for_workers=False, master_listen_fd=self._listener.detach()
            )
        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True")
        if host.startswith("127."):
            os.environ["GLOO_SOCKET_IFNAME"] = "lo"

    def train_phase(
        self, phase: str, start: str | None, sessions: str | None
    ) -> Iterator[tuple[int, dict[str, float]]]:
        """Train one phase of the mix, yielding (step, metrics) after each optimizer step.

        Raises:
            CorpusError, TokenizerError, TrainingError, ResumeError: see `composer.pretrain.trainer`.
        """
        from composer.pretrain.batches import read_sessions
        from composer.pretrain.trainer import Phase, train_phase

        config = self.config
        yield from train_phase(
            Phase(
                name=phase,
                mix=config.mix,
                model=dataclasses.replace(config.model, checkpoint=start),
                parallel=config.parallel,
                tokenizer=self.layout.tokenizer,
                folder=self.layout.phase(phase),
                seed=config.seed,
                sessions=read_sessions(Path(sessions)) if sessions else (),
            )
        )

    def open_policy(self, start: str, weights: str) -> dict[str, Any]:
        """Build the policy trainer from the export `start`, at its newest checkpoint if there is one.

        Args:
            start: a Hugging Face folder.
            weights: the version store to publish to.

        Returns:
            version (optimizer steps done), data_rank, num_data_ranks, sequence_multiple.

        Raises:
            ResumeError: a checkpoint cannot be read.
        """
        from composer.rl.trainer import PolicyTrainer
        from composer.weight_sync.store import VersionStore

        config = self.config
        model = dataclasses.replace(config.model, checkpoint=start)
        self._policy = PolicyTrainer(model, config.parallel, config.algorithm, self.layout.stage(Stage.rl), config.seed)
        if self.rank == 0:
            self._store = VersionStore.open(Path(weights))
        data_rank, num_data_ranks = self._policy.data_parallel
        return {
            "version": self._policy.version,
            "data_rank": data_rank,
            "num_data_ranks": num_data_ranks,
            "sequence_multiple": self._policy.sequence_multiple,
        }

    def update(self, rows: Sequence[PackedRows]) -> dict[str, float]:
        """One optimizer step over this rank's rows.

        Raises:
            TrainingError: the loss or the gradient is not finite.
        """
        return self._opened().update(rows)

    def reference_score(self, sequences: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Log-probabilities under the weights that RL started from, from rank 0; nothing from the others."""
        scores = self._opened().reference_score(sequences)
        return scores if self.rank == 0 else []

    def publish(self, version: int, probe: Sequence[int]) -> dict[str, float]:
        """Publish the current weights as `version`, with log-probabilities of `probe` for the generators to match.

        Raises:
            WeightSyncError: the version could not be written.
        """
        from composer.rollout.engine import Probe
        from composer.weight_sync.publish import publish

        policy = self._opened()
        log_probs = policy.score(probe)
        if self._store is None:
            for _ in policy.weights():
                pass
            return {}
        dtype = self.config.generator.dtype
        report = publish(self._store, version, policy.weights(), Probe(list(probe), log_probs), dtype)
        return {"weight_sync/publish_s": report.seconds, "weight_sync/bytes": float(report.bytes)}

    def save(self) -> None:
        """Write a checkpoint of the policy."""
        self._opened().save()

    def export(self, folder: str) -> None:
        """Write the policy as a Hugging Face folder.

        Raises:
            OSError: it could not be written.
        """
        self._opened().export(Path(folder), self.layout.tokenizer)

    def _opened(self) -> PolicyTrainer:
        assert self._policy is not None, "open_policy comes first"
        return self._policy


class EnvWorker:
    """Runs episodes: many at a time in one process, each in its own sandbox."""

    def __init__(self, run_dir: str, name: str, run_label: str) -> None:
        """Make the parts of the env that need no tokenizer.

        Raises:
            ConfigError: a target refuses its arguments, or the judge's key is not in the environment.
        """
        log_to(Path(run_dir), name)
        self._last_words = last_words(Path(run_dir), name)
        self._last_words.unlink(missing_ok=True)
        self._watch: BlockedLoop | None = None
        self.layout = Layout(Path(run_dir))
        config = self.config = config_files.load(self.layout.run_dir)
        if config.plugins:
            find_plugins(self.layout.run_dir)
        env = config.env

        def make(target: TargetConfig, key: str, **given: Any) -> Any:
            return instantiate(target, config.plugins, key=key, **given)

        backend = make(env.sandbox, "env.sandbox", run_label=run_label, run_dir=run_dir)
        self.backend = SandboxPool(backend, PoolSettings.from_config(env.pool))
        accuracy = config.mix.sessions.expert_accuracy
        self.taskset = make(env.taskset, "env.taskset", expert_accuracy=accuracy, seed=config.seed)
        self.tools = [make(t, f"env.tools.{name}") for name, t in env.tools.items()]
        graders = {name: make(t, f"env.graders.{name}") for name, t in env.graders.items()}
        self.rubric = Rubric(graders, env.grader_weights)
        self.settings = EnvSettings.from_config(env, config.generator.max_model_len)
        self.program = AgentProgram.from_config(env.agent)
        self.external: ExternalHarness | None = None
        self.monitor = Monitor(env.monitor, config.seed) if env.monitor.enabled else None
        self.generators: GeneratorPool | None = None
        self._num_recorded = 0

    async def prepare(self) -> None:
        """Make the tokenizer, and the sessions that the mix asks for; what is there already stays.

        Raises:
            TaskError, ToolError, SandboxError: see `composer.rollout.sessions.record_sessions`.
            CorpusError, TokenizerError: see `composer.pretrain.prepare`.
        """
        from composer.pretrain.prepare import prepare_tokenizer

        config, env = self.config, self.config.env
        if self.layout.sessions.exists():
            return
        sessions = []
        if wants_sessions(config):
            sessions = await record_sessions(
                self.taskset,
                config.mix.sessions.num_sessions,
                tools=self.tools,
                backend=self.backend,
                limits=self.settings.limits,
                max_observation_bytes=env.max_observation_bytes,
                seed=config.seed,
                timeout_s=env.episode_timeout_s,
                progress=self._count_recorded,
            )
        texts: list[str] = []
        if env.chat_template is not ChatTemplate.own:
            template = TEMPLATES[env.chat_template]
            texts = [session_text(s, template, *self._prompt_of(s)) for s in sessions]
        prepare_tokenizer(config, self.layout.tokenizer, texts)
        if env.chat_template is not ChatTemplate.own:
            install_template(self.layout.tokenizer, env.chat_template)
        chat = Chat.load(self.layout.tokenizer)
        half = self.layout.sessions.with_suffix(".tmp")
        lengths, turns = [], []
        with half.open("w", encoding="utf-8") as file:
            for session in sessions:
                ids, mask = render_session(session, chat, *self._prompt_of(session))
                lengths.append(len(ids))
                turns.append(max(sum(run) for _, run in itertools.groupby(mask)))
                file.write(json.dumps({"token_ids": ids, "loss_mask": mask, "task": session.task_id}) + "\n")
        check_lengths(config, lengths, turns)
        half.replace(self.layout.sessions)

    def _prompt_of(self, session: Session) -> tuple[list[Tool], str]:
        """The tools and the system prompt that a session begins with."""
        if has_prompt(self.config, session.task_id):
            return self.tools, self.config.env.system_prompt
        return [], ""

    def _count_recorded(self, count: int) -> None:
        self._num_recorded = count

    async def num_recorded(self) -> int:
        """How many of the expert's sessions `prepare` has recorded so far."""
        return self._num_recorded

    async def check_tasks(self) -> None:
        """Find out now and not in RL what is wrong with the tasks, and what an agent could read that it must not.

        Raises:
            TaskError: a task's tests cannot run or do not tell right from wrong, or the taskset broke.
            MachineError: the run directory, or what tasks and graders are made of, can be read in a sandbox.
            SandboxError, GradingError: the sandbox or a grader failed.
        """
        self._watch_loop()
        private = {
            path: "move it to a folder that sandboxes do not see"
            for path in preflight.sources([self.taskset, *self.rubric.graders.values()])
        }
        private[self.layout.run_dir.resolve() / config_files.CONFIG_FILE] = (
            f"set run_root, which is {self.config.run_root!r}, to a folder that sandboxes do not see"
        )
        await preflight.check_sight(private, self.backend, self.settings.limits)
        image = make_task(self.taskset, Split.TRAIN, 0).image
        await preflight.check_tools(self.tools, self.backend, self.settings.limits, image)
        if self.program is not None:
            program = self.program
            await preflight.check_agent(program.command, program.environment, self.backend, self.settings.limits, image)
        await preflight.check_tasks(self.taskset, self.rubric, self.backend, self.settings.episode_timeout_s)

    async def connect(self, replicas: Mapping[str, Any]) -> None:
        """Where the policy answers.

        Raises:
            TokenizerError: the chat template cannot render the tools.
        """
        self._watch_loop()
        self.generators = GeneratorPool(dict(replicas), self.config.generator.request_timeout_s)
        self.chat = Chat.load(self.layout.tokenizer)
        if self.program is not None:
            self.external = ExternalHarness(self.program, self.chat, self.settings)
        self.env = Env(
            self.settings,
            chat=self.chat,
            taskset=self.taskset,
            tools=self.tools,
            rubric=self.rubric,
            backend=self.backend,
            harness=self.external,
            monitor=self.monitor,
        )

    async def run_group(
        self, split: Split, index: int, group_id: str, size: int, temperature: float, keeping: Keeping
    ) -> Group:
        """Run `size` sibling episodes of the task at `index`.

        Raises:
            TaskError: there is no such task, or the taskset broke.
        """
        generators = self.generators
        assert generators is not None, "connect comes first"
        task = make_task(self.taskset, split, index)

        async def generate(token_ids: list[int], *, max_tokens: int, episode_id: str) -> Generation:
            return await generators.generate(
                token_ids,
                episode_id=episode_id,
                max_tokens=max_tokens,
                temperature=temperature,
                stop_token_ids=[self.chat.end_token_id],
            )

        if split is Split.EVALUATION:
            with_prompt = not self.config.evaluation.no_prompt
        else:
            with_prompt = has_prompt(self.config, group_id)
        return await self.env.run_group(task, group_id, size, generate, generators.release, with_prompt, keeping)

    def _watch_loop(self) -> None:
        if self._watch is None:
            loop = asyncio.get_running_loop()
            self._watch = BlockedLoop(loop, self.settings.episode_timeout_s, self._give_up)

    def _give_up(self, reason: str) -> None:
        """End this process: nothing can end what blocks its event loop. The sandboxes' watchdog cleans up."""
        self._last_words.write_text(reason, encoding="utf-8")
        faulthandler.dump_traceback()
        os._exit(1)

    async def stop(self) -> None:
        """Stop every sandbox, and the gateway of an agent program."""
        await self.backend.close()
        if self.external is not None:
            await self.external.close()


def has_prompt(config: Config, name: str) -> bool:
    """Whether a training group or a session begins with the system message: the same for ever for a name."""
    return random.Random(f"{config.seed}/{name}").random() >= config.env.prompt_dropout
