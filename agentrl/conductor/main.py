"""`agentrl train` and `agentrl sft` as processes: config in, exit code out, signals and the last word in between."""

from __future__ import annotations

import asyncio
import os
import signal
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from agentrl.child import LOGS_VARIABLE
from agentrl.conductor.config import Common, RunConfig, SftConfig
from agentrl.conductor.desk import Desk, close_log, open_log
from agentrl.conductor.folder import RunFolder, write_atomically
from agentrl.conductor.page import PageProcess, check_monitor
from agentrl.config import load, to_toml
from agentrl.errors import AgentRLError, RunError
from agentrl.monitor.curve import draw_curve
from agentrl.monitor.live import make_view
from agentrl.monitor.metrics import MetricsFile, read_metrics
from agentrl.monitor.trackers import Trackers

INTERRUPTED = 130


def run_train(path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run `agentrl train`; the exit code."""
    from agentrl.conductor.check import check_run
    from agentrl.conductor.reinforce import reinforce

    config = load(RunConfig, path, overrides)
    plan = check_run(config)
    return _run(config, resume, lambda desk: reinforce(config, plan, desk, resume=resume))


def describe_train(path: Path, overrides: Sequence[str]) -> str:
    """Check an `agentrl train` config and start nothing; what would run. Its model may still have to be fetched."""
    from agentrl.conductor.check import check_run

    config = load(RunConfig, path, overrides)
    there = config.model.is_dir()
    plan = check_run(config, model_needed=False)
    kept = f"{len(plan.eval_rows)} held-out" if plan.eval_rows else "none held out"
    model = f"{plan.model_bytes / 1e6:.0f} MB" if there else "not there yet: its folder and template are not checked"
    return (
        f"{path} is valid\n"
        f"  environment  {config.env.path}, {len(plan.train_rows)} training rows, {kept}\n"
        f"  model        {config.model} ({model})\n"
        f"  engine       {config.engine.count} × {config.engine.kind}; trainer ranks: {config.train.ranks}"
    )


def run_sft(path: Path, overrides: Sequence[str], *, resume: bool) -> int:
    """Run `agentrl sft`; the exit code."""
    from agentrl.conductor.check import check_sft
    from agentrl.conductor.imitate import imitate

    config = load(SftConfig, path, overrides)
    check_monitor(config.monitor)
    plan = check_sft(config)
    return _run(config, resume, lambda desk: imitate(config, plan, desk, resume=resume))


def run_rollout(path: Path, overrides: Sequence[str], groups: int, *, resume: bool) -> int:
    """Run `agentrl rollout`; the exit code."""
    from agentrl.conductor.check import check_run
    from agentrl.conductor.collect import check_collect, collect

    config = load(RunConfig, path, overrides)
    check_collect(config)
    plan = check_run(config)
    return _run(config, resume, lambda desk: collect(config, plan, desk, groups))


def run_replay(path: Path, overrides: Sequence[str], pool: Path, *, resume: bool) -> int:
    """Run `agentrl replay`; the exit code."""
    from agentrl.conductor.check import check_common
    from agentrl.conductor.imitate import train_from
    from agentrl.conductor.saved import SavedGroups

    config = load(RunConfig, path, overrides)
    _, model_bytes = check_common(config)
    source = SavedGroups(pool, config.train.batch_groups, epochs=config.rollout.epochs)
    return _run(config, resume, lambda desk: train_from(source, config, desk, model_bytes))


def _run(config: Common, resume: bool, body: Callable[[Desk], Awaitable[None]]) -> int:
    folder = RunFolder(config.run_dir / config.name)
    folder.open(resume=resume)
    # Of processes that are started somewhere deep below, such as workers for rewards.
    os.environ[LOGS_VARIABLE] = str(folder.logs)
    try:
        write_atomically(folder.config, to_toml(config))
        log = open_log(folder)
        trackers = Trackers(config.monitor.trackers, folder.path, config.model_dump(mode="json"), log.error)
        metrics = MetricsFile(folder.metrics, trackers.put)
        desk = Desk(folder, metrics, make_view(config.name, config.train.steps), log)
        page = PageProcess(desk, config.monitor)
        try:
            return _to_the_end(desk, body)
        finally:
            page.stop()
            trackers.close()
            _draw(desk, config.name)
            desk.metrics.close()
            close_log(desk.log)
    except OSError as error:
        raise RunError(
            f"the run folder {folder.path} cannot be written: {error}; free some space or set run_dir, then --resume"
        ) from error
    finally:
        del os.environ[LOGS_VARIABLE]
        folder.close()


def _to_the_end(desk: Desk, body: Callable[[Desk], Awaitable[None]]) -> int:
    desk.view.start()
    try:
        asyncio.run(_until_signal(desk, body))
    except asyncio.CancelledError:
        _last_words(desk, "stopped", None)
        return INTERRUPTED
    except AgentRLError as error:
        desk.log.error("%s\n%s", error, traceback.format_exc())
        _last_words(desk, "failed", str(error))
        raise
    except BaseExceptionGroup as group:
        first = _first(group)
        desk.log.error("%s\n%s", first, "".join(traceback.format_exception(group)))
        _last_words(desk, "failed", f"{type(first).__name__}: {first}")
        # A lost connection is an OSError too, and not the disk's: whoever let it through is to be seen.
        if isinstance(first, AgentRLError | OSError) and not isinstance(first, ConnectionError):
            raise first from None
        raise RunError(_unexpected(desk, first)) from group
    except OSError:
        desk.log.exception("the run ends")
        raise
    except Exception as error:
        desk.log.exception("the run ends")
        _last_words(desk, "failed", f"{type(error).__name__}: {error}")
        raise RunError(_unexpected(desk, error)) from error
    finally:
        desk.view.stop()
    _last_words(desk, "finished", None)
    return 0


async def _until_signal(desk: Desk, body: Callable[[Desk], Awaitable[None]]) -> None:
    task = asyncio.current_task()
    assert task is not None
    asked = 0

    def stop(number: signal.Signals) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os._exit(INTERRUPTED)  # the children's pipes close with it, and they end by themselves
        desk.note(f"{number.name}: stopping; once more to leave at once")
        task.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop, number)
    await body(desk)


def _first(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _unexpected(desk: Desk, error: BaseException) -> str:
    return f"{type(error).__name__}: {error} (the traceback is in {desk.folder.logs / 'conductor.log'})"


def _last_words(desk: Desk, phase: str, error: str | None) -> None:
    try:
        desk.folder.write_state({"phase": phase, "time": time.time(), "error": error})
    except OSError as full:
        desk.log.error("state.json cannot be written: %s", full)


def _draw(desk: Desk, title: str) -> None:
    lines = [line for line in read_metrics(desk.folder.metrics) if line["kind"] in ("step", "eval")]
    if lines:
        draw_curve(lines, desk.folder.curve, title)
