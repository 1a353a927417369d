"""Commands for who writes an environment, and for who judges a model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from agentrl.cli.shared import app, told

init = typer.Typer(help="Write files to begin with.", no_args_is_help=True, pretty_exceptions_enable=False)
app.add_typer(init, name="init")

EnvPath = Annotated[str, typer.Argument(metavar="ENV", help="package.module:Class or file.py:Class")]
EnvSettings = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="env.args.X=…")]


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

    with told():
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

    with told():
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

    with told():
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

    with told():
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

    with told():
        run_rescore(saved, reward, out=out, whole=whole, passing=passing)


@app.command()
def serve(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A model folder, e.g. runs/<name>/model.")],
    settings: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="engine.* and endpoint.*, as in a run's config."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = 30000,
) -> None:
    """Put a model folder behind an OpenAI-compatible URL, on an engine of its own, until SIGINT."""
    from agentrl.endpoint.serve import run_serve

    with told():
        run_serve(folder, port, settings or [])
