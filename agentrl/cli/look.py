"""Commands that look: at a run, at this machine."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.shared import app, told
from agentrl.errors import RunError


@app.command()
def status(run: Annotated[Path, typer.Argument(metavar="RUNS/NAME", help="The run's folder.")]) -> None:
    """What a run is doing, who waits for what, and its last figures."""
    from agentrl.conductor.status import describe

    with told():
        print(describe(run))


@app.command()
def view(
    runs: Annotated[list[Path], typer.Argument(metavar="RUNS/NAME...", help="Folders of runs, or copies of them.")],
    host: Annotated[
        str, typer.Option(help="Where to listen; any but a loopback address asks for a token.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 0,
) -> None:
    """Serve the page of runs that go on, ended or crashed, side by side; prints its address."""
    from agentrl.monitor.serve import view as serve_page

    with told():
        serve_page(runs, host=host, port=port)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUNS/NAME", help="The run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; RUNS/NAME/report.html by default.")] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Episodes of each kind that are shown.")] = 3,
) -> None:
    """Write a run as one self-contained HTML file: curves, faults, chosen episodes, config."""
    from agentrl.monitor.report import write_report

    with told():
        target = out or run / "report.html"
        try:
            write_report(run, target, episodes=episodes)
        except OSError as error:
            raise RunError(
                f"{target} cannot be written: {error.strerror or error}; give another one with --out"
            ) from error
        print(target)


@app.command()
def doctor(
    config: Annotated[
        Path | None, typer.Argument(metavar="[RUN.TOML]", help="Look at what this run would use.")
    ] = None,
    model: Annotated[Path | None, typer.Option(help="A model folder: its weights and its chat template.")] = None,
    engine_python: Annotated[
        Path | None, typer.Option(help="The interpreter that has SGLang; else AGENTRL_SGLANG_PYTHON, else this one.")
    ] = None,
    docker_url: Annotated[str, typer.Option(help="A Docker engine's address; else DOCKER_HOST.")] = "",
    sandboxes: Annotated[bool, typer.Option(help="Start a box of each kind.")] = True,
    quick: Annotated[bool, typer.Option("--quick", help="Do not import torch and DeepSpeed.")] = False,
) -> None:
    """What works on this machine, what does not, and what to type; exit code 1 where no run can work."""
    from agentrl.conductor.doctor import examine, settings_of

    with told():
        settings = settings_of(config, model=model, engine_python=engine_python)
        broken = 0
        for finding in examine(settings, docker_url=docker_url, sandboxes=sandboxes, quick=quick):
            print(finding, flush=True)
            broken += finding.verdict == "broken"
        if broken:
            raise typer.Exit(1)


@app.command()
def version() -> None:
    """The versions of agentrl and of what it stands on."""
    for package in ("agentrl", "torch", "transformers", "deepspeed", "sglang", "openai"):
        try:
            print(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            print(f"{package} (not installed)")
    print(f"python {sys.version.split()[0]}")
