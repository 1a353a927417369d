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

from agentrl.endpoint.process import collect_seldom
from agentrl.errors import AgentRLError, ConfigError, RunError

app = typer.Typer(
    name="agentrl",
    help="Reinforcement learning of multi-turn LLM agents: your environment, your agent, asynchronous decoupled PPO.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

init = typer.Typer(help="Write files to begin with.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(init, name="init")

ConfigPath = Annotated[Path, typer.Argument(metavar="RUN.TOML", help="The run's config.")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings that win over the file's.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Continue the run from its newest whole checkpoint.")]

Check = Annotated[
    bool,
    typer.Option("--check", help="Only validate: config, environment, agent, rows, and the model where it is there."),
]

EnvPath = Annotated[str, typer.Argument(metavar="ENV", help="package.module:Class or file.py:Class")]
EnvSettings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="env.args.X=…")]

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

    with _told():
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

    with _told():
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

    with _told():
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

    with _told():
        raise typer.Exit(run_replay(config, overrides or [], pool, resume=resume))


@app.command()
def status(run: Annotated[Path, typer.Argument(metavar="RUNS/NAME", help="The run's folder.")]) -> None:
    """What a run is doing, who waits for what, and its last figures."""
    from agentrl.conductor.status import describe

    with _told():
        print(describe(run))


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

    with _told():
        run_simulate(config, overrides or [], run, plot)


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

    with _told():
        serve_page(runs, host=host, port=port)


@app.command()
def report(
    run: Annotated[Path, typer.Argument(metavar="RUNS/NAME", help="The run's folder.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; RUNS/NAME/report.html by default.")] = None,
    episodes: Annotated[int, typer.Option(min=0, help="Episodes of each kind that are shown.")] = 3,
) -> None:
    """Write a run as one self-contained HTML file: curves, faults, chosen episodes, config."""
    from agentrl.monitor.report import write_report

    with _told():
        target = out or run / "report.html"
        try:
            write_report(run, target, episodes=episodes)
        except OSError as error:
            raise RunError(
                f"{target} cannot be written: {error.strerror or error}; give another one with --out"
            ) from error
        print(target)


@app.command()
def check(
    env: EnvPath,
    settings: EnvSettings = None,
    data: Annotated[str | None, typer.Option(help="Rows; the environment's own where not given.")] = None,
    model: Annotated[Path | None, typer.Option(help="A folder whose chat template the messages must survive.")] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="Deadline of each call of the environment.")] = 60.0,
    seed: Annotated[int, typer.Option(min=0)] = 7,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings fail too.")] = False,
) -> None:
    """Play an environment with scripted answers; tell what is wrong with it and how to mend it."""
    from agentrl.authoring import run_check

    with _told():
        passed = run_check(env, settings or [], data=data, model=model, seconds=seconds, seed=seed, strict=strict)
    raise typer.Exit(0 if passed else 1)


@app.command()
def play(
    env: EnvPath,
    settings: EnvSettings = None,
    data: Annotated[str | None, typer.Option(help="Rows; the environment's own where not given.")] = None,
    row: Annotated[str, typer.Option(help="Which row: its number, or the row itself as JSON.")] = "0",
    split: Annotated[str, typer.Option(help="Of the environment's own rows.")] = "train",
    seed: Annotated[int, typer.Option(min=0)] = 0,
    oracle: Annotated[bool, typer.Option("--oracle", help="The environment's oracle answers.")] = False,
    chance: Annotated[bool, typer.Option("--random", help="Chance answers.")] = False,
    max_turns: Annotated[int, typer.Option(min=1)] = 64,
) -> None:
    """Play an environment in the terminal: you, its oracle, or chance."""
    from agentrl.authoring import run_play

    with _told():
        run_play(
            env,
            settings or [],
            data=data,
            row=row,
            split=split,
            seed=seed,
            oracle=oracle,
            chance=chance,
            max_turns=max_turns,
        )


@init.command("env")
def init_env(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A module name, e.g. my_env.")],
    folder: Annotated[Path, typer.Option(help="Where the files go.")] = Path(),
) -> None:
    """A working environment and its test: NAME.py and test_NAME.py."""
    from agentrl.init import new_env

    with _told():
        for path in new_env(name, folder):
            print(path)


@app.command("eval")
def evaluate(
    env: Annotated[str, typer.Argument(metavar="ENV", help="package.module:Class or file.py:Class")],
    base_url: Annotated[str, typer.Option(help="An OpenAI-compatible endpoint, e.g. http://localhost:8000/v1")],
    model: Annotated[str, typer.Option(help="The model's name there.")],
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="[NAME=]SOURCE", help="Rows, several times for several; else the environment's own."),
    ] = None,
    n: Annotated[int, typer.Option("-n", min=1, help="Rows of each.")] = 50,
    k: Annotated[int, typer.Option("-k", min=1, help="Episodes a row.")] = 1,
    agent: Annotated[str, typer.Option(help="package.module:Class or file.py:Class")] = "agentrl.agent:Agent",
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="env.args.X=…, agent.args.X=…, columns.question=prompt"),
    ] = None,
    split: Annotated[str, typer.Option(help="Of a hub data set.")] = "test",
    save: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep all episodes there.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what --save has kept.")] = False,
    passing: Annotated[float, typer.Option(help="The least reward that counts for pass@k.")] = 1.0,
    api_key: Annotated[str, typer.Option(envvar="OPENAI_API_KEY", help="The endpoint's key.")] = "none",
    temperature: Annotated[float, typer.Option(min=0.0)] = 1.0,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Of one answer; else the endpoint's limit.")] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Episodes at once.")] = 16,
    max_turns: Annotated[int, typer.Option(min=1)] = 16,
    time_limit: Annotated[float, typer.Option(min=1.0, help="Seconds of one episode.")] = 600.0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Play an environment with any model behind an OpenAI-compatible URL: a table, and as last line JSON."""
    from agentrl.evaluate.command import Asked, run_eval
    from agentrl.evaluate.play import Model

    with _told():
        whom = Model(base_url, model, api_key, temperature, {"max_tokens": max_tokens} if max_tokens else {})
        run_eval(
            Asked(
                env=env,
                model=whom,
                agent=agent,
                settings=settings or [],
                data=data or [],
                split=split,
                rows=n,
                k=k,
                seed=seed,
                concurrency=concurrency,
                max_turns=max_turns,
                time_limit=time_limit,
                save=save,
                resume=resume,
                passing=passing,
            )
        )


@app.command()
def rescore(
    saved: Annotated[Path, typer.Argument(metavar="FOLDER", help="What `agentrl eval --save` kept.")],
    reward: Annotated[
        str, typer.Option(help="package.module:function or file.py:function, of (answer, row); or parts.toml")
    ],
    out: Annotated[Path | None, typer.Option(metavar="FOLDER", help="Keep the episodes with the new rewards.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Give the reward all messages, not the last answer.")] = False,
    passing: Annotated[float, typer.Option(help="The least reward that counts for pass@k.")] = 1.0,
) -> None:
    """Score saved episodes with another reward, without sampling: a table, and as last line JSON."""
    from agentrl.evaluate.command import run_rescore

    with _told():
        run_rescore(saved, reward, out=out, whole=whole, passing=passing)


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

    with _told():
        settings = settings_of(config, model=model, engine_python=engine_python)
        broken = 0
        for finding in examine(settings, docker_url=docker_url, sandboxes=sandboxes, quick=quick):
            print(finding, flush=True)
            broken += finding.verdict == "broken"
        if broken:
            raise typer.Exit(1)


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

    with _told():
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
    collect_seldom()
    app()


if __name__ == "__main__":
    main()
