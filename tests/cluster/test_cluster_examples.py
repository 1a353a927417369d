"""The example files start workers and runs as the commands are today."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer

from agentrl.cli import app
from agentrl.conductor.config import RunConfig

FOLDER = Path(__file__).parents[2] / "examples" / "cluster"
FILES = sorted(FOLDER.iterdir())


def options_of(command: str) -> set[str]:
    found = typer.main.get_command(app)
    assert hasattr(found, "commands")
    return {option for parameter in found.commands[command].params for option in parameter.opts}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.name))
def test_commands_and_settings_exist(path: Path) -> None:
    text = path.read_text()
    used = set(re.findall(r"(?<![-\w])--(?:role|conductor|host|port|ranks|token-file|scratch|name|patience)\b", text))
    assert {"--role", "--conductor"} <= used <= options_of("worker")
    settings = re.findall(r"\b(cluster|engine|train)\.(\w+)=", text)
    assert ("cluster", "kind") in settings
    for section, key in settings:
        assert key in type(RunConfig.model_fields[section].default).model_fields, f"{section}.{key}"


@pytest.mark.parametrize("path", [p for p in FILES if p.suffix in (".sh", ".slurm")], ids=lambda path: str(path.name))
def test_scripts_are_whole(path: Path) -> None:
    subprocess.run(["bash", "-n", str(path)], check=True)


def test_kubernetes_starts_every_role() -> None:
    yaml = pytest.importorskip("yaml")
    kinds = [document["kind"] for document in yaml.safe_load_all((FOLDER / "kubernetes.yaml").read_text())]
    assert kinds == ["Service", "PersistentVolumeClaim", "Job", "Deployment", "Deployment", "Deployment"]
