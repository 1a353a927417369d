"""`import agentrl` is light, and its names mean the same whatever was imported before."""

from __future__ import annotations

import subprocess
import sys

import agentrl


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=110, check=True)
    return done.stdout.strip()


def test_import_loads_nothing_heavy() -> None:
    heavy = "numpy pydantic openai aiohttp tokenizers torch transformers"
    loaded = _python(f"import sys, agentrl; print([m for m in {heavy.split()} if m in sys.modules])")
    assert loaded == "[]"


def test_contracts_load_no_torch() -> None:
    code = (
        "import sys; from agentrl import *; print([m for m in ('torch', 'transformers', 'openai') if m in sys.modules])"
    )
    assert _python(code) == "[]"


def test_tool_is_the_decorator_even_after_the_module_was_imported() -> None:
    assert _python("import agentrl.tool; from agentrl import tool; print(type(tool).__name__)") == "function"


def test_every_exported_name_is_there() -> None:
    assert [name for name in agentrl.__all__ if not hasattr(agentrl, name)] == []
    assert set(agentrl.__all__) <= set(dir(agentrl))
