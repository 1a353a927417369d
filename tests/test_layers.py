"""Who may import whom: the layers of docs/architecture.md, read from the syntax trees."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
L0 = {"types", "errors", "config", "wire", "child", "process", "calling", "contract"}
L1 = {"env", "wrappers", "agent", "tool", "mcp", "reward", "sandbox", "data"}
SHELVES = {"envs", "agents", "sandboxes"}
L2 = {"engine", "endpoint"}
L3 = {"rollout", "check", "play", "gym", "spaces", "init", "testing"}
TOP = {"conductor", "cli", "evaluate", "monitor", "cluster", "simulate", "__init__", "__main__"}
ALLOWED: dict[str, set[str]] = {
    **dict.fromkeys(L0, L0),
    **dict.fromkeys(L1, L0 | L1),
    **dict.fromkeys(L2, L0 | L1 | L2),
    **dict.fromkeys(SHELVES, L0 | L1 | SHELVES),
    **dict.fromkeys(L3, L0 | L1 | L2 | L3),
    "train": L0,
}
TORCH_HOMES = ("agentrl/train/", "agentrl/engine/embedded/")


def _modules() -> list[tuple[str, Path]]:
    found = []
    for path in sorted(ROOT.glob("agentrl/**/*.py")) + [
        p for s in sorted(SHELVES) for p in sorted((ROOT / s).glob("**/*.py"))
    ]:
        relative = path.relative_to(ROOT)
        if len(relative.parts) > 2 and relative.parts[0] == "agentrl" and relative.parts[1] in SHELVES:
            continue  # the symlinks; the real folders are read by themselves
        room = relative.parts[0] if relative.parts[0] in SHELVES else relative.parts[1].removesuffix(".py")
        found.append((room, path))
    return found


def _imports(path: Path) -> list[str]:
    names = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import; write the whole path"
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize(("room", "path"), _modules(), ids=lambda value: str(value))
def test_imports_stay_in_their_layer(room: str, path: Path) -> None:
    for name in _imports(path):
        parts = name.split(".")
        if parts[0] == "agentrl" and len(parts) > 1 and room in ALLOWED and parts[1] != "__version__":
            assert parts[1] in ALLOWED[room] | {room}, f"{path.relative_to(ROOT)}: {room} must not import {name}"
        if parts[0] in {"torch", "deepspeed", "peft", "transformers"}:
            home = str(path.relative_to(ROOT))
            light = parts[:2] == ["transformers", "PreTrainedTokenizerFast"]
            assert home.startswith(TORCH_HOMES) or light, f"{home}: {parts[0]} lives in {TORCH_HOMES} only"


def test_only_one_file_imports_deepspeed() -> None:
    found = {
        str(p.relative_to(ROOT)) for _, p in _modules() if any(n.split(".")[0] == "deepspeed" for n in _imports(p))
    }
    assert found <= {"agentrl/train/deepspeed.py"}


def test_shelves_resolve() -> None:
    for shelf in SHELVES:
        link = ROOT / "agentrl" / shelf
        assert link.is_symlink(), f"{link} is not a symlink: git config core.symlinks true, then git checkout -- {link}"
        assert link.resolve() == ROOT / shelf
        assert not (ROOT / shelf / "__init__.py").exists(), f"{shelf}/ must not have an __init__.py"
