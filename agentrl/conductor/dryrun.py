"""`agentrl train --dry-run`: everything that can go wrong before the first step is tried, and nothing is started.

Each check tells its outcome as it ends, and one that fails does not hide the others; only the step, which takes
longest, waits until all before it are mended.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import TypeVar

from agentrl.conductor import estimate
from agentrl.conductor.check import RunPlan, check_common, check_ports, plan_run
from agentrl.conductor.config import RunConfig
from agentrl.conductor.doctor import sglang
from agentrl.conductor.firststep import first_step
from agentrl.conductor.folder import RunFolder
from agentrl.conductor.forecast import forecast
from agentrl.conductor.interpreter import packages
from agentrl.conductor.knobs import refuse_dead_knobs
from agentrl.conductor.machine import gpu_count, memory, size, space
from agentrl.conductor.page import check_monitor
from agentrl.conductor.rehearsal import Tried, contrasted, rehearse, told, try_rows
from agentrl.config import load
from agentrl.data import env_of
from agentrl.endpoint.parse import detect_format
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.errors import AgentRLError, ConfigError
from agentrl.types import Group

Say = Callable[[str], None]
T = TypeVar("T")


def dry_run(path: Path, overrides: Sequence[str], say: Say, *, resume: bool = False) -> None:
    """Check the run and print its plan; ConfigError names the checks that failed, after all of them were made."""
    config = load(RunConfig, path, overrides)
    asyncio.run(_DryRun(config, say, resume).run())


class _DryRun:
    def __init__(self, config: RunConfig, say: Say, resume: bool) -> None:
        self._config, self._say, self._resume = config, say, resume
        self._failed: list[str] = []
        self._rows: Tried | None = None

    async def run(self) -> None:
        """Check by check, then the plan."""
        config = self._config
        await self._check("settings", self._settings)
        await self._check("run folder", self._folder)
        await self._check("ports", self._ports)
        await self._check("engine", self._engine)
        template = await self._check("model", self._model)
        plan = await self._check("data", self._data)
        if plan is not None and template is not None:
            rows = await self._check("rows", lambda: self._try_rows(plan, template))
            group = await self._check("episode", lambda: self._episode(plan, template)) if rows else None
            if group is not None and not self._failed:
                await self._check("first step", lambda: self._step(group))
        if template is not None:
            await self._check("plan", self._forecast)
        if self._failed:
            raise ConfigError(
                f"{len(self._failed)} of the checks of {config.name} failed: {', '.join(self._failed)}; see above. "
                "Nothing was started"
            )
        self._say("everything needed is there; nothing was started")

    async def _check(self, name: str, check: Callable[[], Awaitable[T]]) -> T | None:
        try:
            return await check()
        except AgentRLError as error:
            self._failed.append(name)
            self._tell("FAILED", name, str(error))
            return None

    def _tell(self, verdict: str, name: str, text: str) -> None:
        first, *more = text.splitlines() or [""]
        self._say("\n".join([f"{verdict:8}{name:12}{first}", *(f"{'':20}{line}" for line in more)]))

    async def _settings(self) -> None:
        here = self._config.cluster.kind == "local"
        refuse_dead_knobs(self._config, gpus=gpu_count() if here else None)
        self._tell("ok", "settings", "read, and each one given has an effect")

    async def _folder(self) -> None:
        folder = RunFolder(self._config.run_dir / self._config.name)
        if folder.is_run and not self._resume:
            raise ConfigError(
                f"{folder.path} already holds a run: continue it with --resume, give another name, or remove the folder"
            )
        if self._resume and not folder.is_run:
            raise ConfigError(f"--resume: {folder.path} holds no run (no config.toml): start it without --resume")
        if folder.locked:
            raise ConfigError(f"another agentrl process runs in {folder.path}: wait for it, or stop it")
        found = space(folder.path)
        if found.problem:
            raise ConfigError(
                f"the run folder {folder.path} cannot be written: {found.problem}; set run_dir to a folder that you "
                "may write"
            )
        self._tell("ok", "run folder", f"{folder.path}, {size(found.free)} free")

    async def _ports(self) -> None:
        check_ports(self._config)
        check_monitor(self._config.monitor)
        endpoint, engine = self._config.endpoint, self._config.engine
        named = [f"endpoint {endpoint.host}:{endpoint.port or '(any free one)'}"]
        named.append(f"engines from {engine.host}:{engine.port or '(any free ones)'}")
        if (monitor := self._config.monitor).page:
            named.append(f"page {monitor.page_host}:{monitor.page_port or '(any free one)'}")
        self._tell("ok", "ports", ", ".join(named))

    async def _engine(self) -> None:
        engine = self._config.engine
        if (kind := self._config.cluster.kind) != "local":
            self._tell("ok", "engine", f"on hosts of the cluster ({kind}): each has to be asked itself")
            return
        if engine.kind == "embedded":
            self._tell("ok", "engine", "embedded: torch in this environment")
            return
        (found,) = list(sglang(packages(str(engine.python or sys.executable))))
        if found.verdict != "works":
            raise ConfigError(f"engine.kind = 'sglang': {found.what}; {found.remedy}")
        self._tell("ok", "engine", found.what)

    async def _model(self) -> ChatTemplate:
        template, n_bytes = check_common(self._config)
        renderer = Renderer(template)
        if self._config.endpoint.unproven_template == "refuse":
            renderer.require_proof()
        model = estimate.model_size(self._config.model)
        way = "every turn its own trajectory" if renderer.reason else "template continued exactly"
        chosen = self._config.endpoint.tool_format
        form = detect_format(template.source).value if chosen == "auto" else chosen
        count = f"{model.parameters / 1e9:.2f}B" if model.parameters >= 1e8 else f"{model.parameters / 1e6:.2f}M"
        self._tell("ok", "model", f"{count} parameters, {size(n_bytes)}; {way}, tool calls read as {form}")
        return template

    async def _data(self) -> RunPlan:
        # Without the model, which may be what failed: rows and classes are checked all the same.
        plan = await asyncio.to_thread(plan_run, self._config, 0)
        held_out = f"{len(plan.eval_rows)} held-out" if plan.eval_rows else "none held out"
        self._tell("ok", "data", f"{self._config.env.path}: {len(plan.train_rows)} training rows, {held_out}")
        return plan

    async def _try_rows(self, plan: RunPlan, template: ChatTemplate) -> bool:
        for rows, which in ((plan.train_rows, "training"), (plan.eval_rows, "held-out")):
            tried = await try_rows(plan, rows, which, template, self._config)
            if tried is not None:
                self._rows = self._rows or tried
                some = "all" if tried.rows == tried.of else f"{tried.rows} of {tried.of}, spread over all,"
                self._tell(
                    "ok",
                    "rows",
                    f"{some} {which} rows start an episode ({1e3 * tried.seconds / tried.rows:.1f} ms each); "
                    f"first messages {tried.mean:.0f} tokens on average, {tried.longest} at most",
                )
        return True

    async def _episode(self, plan: RunPlan, template: ChatTemplate) -> Group:
        # One of each environment of a mixture.
        rows = {env_of(row, plan.env): row for row in reversed(plan.train_rows)}
        for name, row in rows.items():
            group = await rehearse(self._config, plan, template, row)
            episode = group.episodes[0]
            verdict = "ok" if episode.reward is not None else "look"
            of = f" of {name}" if len(rows) > 1 else ""
            self._tell(verdict, "episode", f"with scripted answers one{of} {told(episode)}")
            if episode.reward is None:
                why = episode.error or "the environment gave None as the reward"
                self._tell("", "", f"such an episode is trained on by no step: {why}")
        return group

    async def _step(self, group: Group) -> None:
        train = self._config.train
        model = estimate.model_size(self._config.model)
        has_reference = self._config.algorithm.kl_coef > 0
        needed = estimate.trainer_bytes(model, 3, 1, train.dtype, reference=has_reference)
        tokens = sum(len(t) for e in group.episodes for t in e.trajectories)
        needed += estimate.activation_bytes(model, tokens, train.dtype, checkpointing=train.checkpointing)
        available, _ = memory()
        if train.dtype == "fp16":
            self._tell("skipped", "first step", "fp16 needs a GPU, and a dry run leaves those alone")
            return
        if needed + (1 << 30) > available:
            self._tell(
                "skipped", "first step", f"on the CPU it needs {size(needed)}, and {size(available)} are available"
            )
            return
        with tempfile.TemporaryDirectory(prefix="agentrl-dry-run-") as folder:
            report = await first_step(self._config, contrasted(group), Path(folder))
        figures = report.metrics
        self._tell(
            "ok",
            "first step",
            f"the trainer, on the CPU, one rank: {tokens} packed tokens with made-up rewards 0 and 1, "
            f"loss {figures.get('loss'):.4g}, gradient norm {figures.get('grad_norm'):.4g}, "
            f"{figures.get('seconds/step'):.1f} s",
        )

    async def _forecast(self) -> None:
        for line in forecast(self._config, self._rows):
            self._say(line)
