"""Cases and tiny models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.testing.tiny import make_tiny_model
from tests.train.drawing import read_cases


@pytest.fixture(scope="session")
def numerics() -> dict[str, dict[str, Any]]:
    """The recorded failures of other systems' arithmetic, by id."""
    return read_cases("numerics")


@pytest.fixture(scope="session")
def zero3_resume() -> dict[str, dict[str, Any]]:
    """The recorded failures of partitioned training and of resuming, by id."""
    return read_cases("zero3_resume")


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with tied embeddings and grouped-query attention."""
    return make_tiny_model(tmp_path_factory.mktemp("tiny") / "llama", kv_heads=2, hidden=32, intermediate=64)


@pytest.fixture(scope="session")
def untied(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen3 with an output head of its own."""
    return make_tiny_model(
        tmp_path_factory.mktemp("untied") / "qwen3", family="qwen3", tie=False, hidden=32, intermediate=64
    )
