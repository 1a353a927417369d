"""What every command shares: the application, the kinds of its arguments, how an error is told."""

from __future__ import annotations

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


@contextmanager
def told() -> Iterator[None]:
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
