"""Commands that train, or lend a hand to a run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.shared import ConfigPath, Overrides, app, told

Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest whole checkpoint.")]

Check = Annotated[
    bool,
    typer.Option("--check", help="Only validate: config, environment, agent, rows, and the model where it is there."),
]

DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Try everything: settings, ports, model, rows, an episode, a step; tell the plan; start nothing.",
    ),
]


@app.command()
def train(
    config: ConfigPath,
    overrides: Overrides = None,
    resume: Resume = False,
    check: Check = False,
    dry: DryRun = False,
) -> None:
    """Train with reinforcement learning: engines, rollouts and trainer, all at once."""
    from agentrl.conductor.main import describe_train, run_train  # the whole system: not for `agentrl version`

    with told():
        if dry:
            from agentrl.conductor.dryrun import dry_run

            dry_run(config, overrides or [], lambda text: print(text, flush=True), resume=resume)
            return
        if check:
            print(describe_train(config, overrides or []))
            return
        raise typer.Exit(run_train(config, overrides or [], resume=resume))


@app.command()
def sft(config: ConfigPath, overrides: Overrides = None, resume: Resume = False) -> None:
    """Train on conversations (stage one); the result is a model folder, runs/<name>/model."""
    from agentrl.conductor.main import run_sft

    with told():
        raise typer.Exit(run_sft(config, overrides or [], resume=resume))


@app.command()
def rollout(
    config: ConfigPath,
    groups: Annotated[int, typer.Option("--groups", min=1, help="Groups to play, in whole batches.")],
    overrides: Overrides = None,
    resume: Resume = False,
) -> None:
    """Roll out without a trainer: engines and episodes fill the run's pool, which `agentrl replay` trains from."""
    from agentrl.conductor.main import run_rollout

    with told():
        raise typer.Exit(run_rollout(config, overrides or [], groups, resume=resume))


@app.command()
def replay(
    config: ConfigPath,
    pool: Annotated[Path, typer.Option("--pool", help="A run's pool.sqlite, or its folder.")],
    overrides: Overrides = None,
    resume: Resume = False,
) -> None:
    """Train from a saved pool without engines; the result is a model folder, runs/<name>/model."""
    from agentrl.conductor.main import run_replay

    with told():
        raise typer.Exit(run_replay(config, overrides or [], pool, resume=resume))


@app.command()
def simulate(
    config: ConfigPath,
    overrides: Overrides = None,
    run: Annotated[
        Path | None, typer.Option("--from", metavar="RUNS/X", help="Costs as this run measured them.")
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the result into this PNG.")] = None,
) -> None:
    """Size a run before it is started: tokens/s, idle shares and staleness by split and η, in virtual time."""
    from agentrl.simulate.show import run_simulate

    with told():
        run_simulate(config, overrides or [], run, plot)


@app.command()
def worker(
    role: Annotated[str, typer.Option(help="engine, trainer or rollout")],
    conductor: Annotated[str, typer.Option(help="The conductor's URL, http://cluster.host:cluster.port")],
    host: Annotated[str, typer.Option(help="This host's address for others; the one that faces the conductor.")] = "",
    port: Annotated[int, typer.Option(min=0, max=65535, help="To serve others on; 0 for any free one.")] = 0,
    ranks: Annotated[int, typer.Option(min=1, help="trainer: the ranks that this worker runs, one a GPU.")] = 1,
    token_file: Annotated[Path | None, typer.Option(help="The cluster's token; else $AGENTRL_CLUSTER_TOKEN.")] = None,
    scratch: Annotated[
        Path | None, typer.Option(help="For models, weights, logs; a temporary folder if not set.")
    ] = None,
    name: Annotated[str, typer.Option(help="For messages; host name and process id if not set.")] = "",
    patience: Annotated[float, typer.Option(min=1, help="Seconds to look for a conductor before giving up.")] = 600.0,
) -> None:
    """Lend this host to a run with cluster.kind = "external": an engine, trainer ranks, or episodes."""
    from agentrl.cluster.worker import run_worker, worker_options

    with told():
        options = worker_options(
            role,
            conductor,
            token_file,
            host=host,
            port=port,
            slots=ranks,
            scratch=scratch,
            name=name,
            patience=patience,
        )
        raise typer.Exit(run_worker(options))
