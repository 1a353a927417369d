"""The commands. Each one loads its config, checks it, runs, and tells what went wrong in one readable message."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from agentrl.errors import AgentRLError, ConfigError

app = typer.Typer(
    name="agentrl",
    help="Reinforcement learning of multi-turn LLM agents: your environment, your agent, asynchronous decoupled PPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's config.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that win over the file's.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest whole checkpoint.")]


@app.command()
def train(config: ConfigPath, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train with reinforcement learning: engines, rollouts and trainer, all at once."""
    from agentrl.conductor.main import run_train  # the whole system: not for `agentrl version`

    with _told():
        raise typer.Exit(run_train(config, overrides or [], resume=resume))


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train on conversations (stage one); the result is a model folder, runs/<name>/model."""
    from agentrl.conductor.main import run_sft

    with _told():
        raise typer.Exit(run_sft(config, overrides or [], resume=resume))


@app.command()
def status(run: Annotated[Path, typer.Argument(metavar="RUNS/NAME", help="The run's folder.")]) -> None:
    """What a run is doing, who waits for what, and its last figures."""
    from agentrl.conductor.status import describe

    with _told():
        print(describe(run))


@app.command()
def version() -> None:
    """The versions of agentrl and of what it stands on."""
    for package in ("agentrl", "torch", "transformers", "deepspeed", "sglang", "openai"):
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} (not installed)")
    print(f"python {sys.version.split()[0]}")


@contextmanager
def _told() -> Iterator[None]:
    """Errors of ours are one message and no traceback: 2 for what the user can mend in the input, else 1."""
    try:
        yield
    except AgentRLError as error:
        tell(error)
        raise typer.Exit(2 if isinstance(error, ConfigError) else 1) from error
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def tell(error: BaseException) -> None:
    """The first error on top, in red where there is a terminal."""
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(f"error: {error}", style="bold red", markup=False)


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
