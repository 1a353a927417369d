"""Every case of tests/cases/math_answers.jsonl, both ways round where that makes sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.reward.extract import answer_text, gold_text
from agentrl.reward.math import verify
from agentrl.reward.options import Marker, MathOptions
from agentrl.reward.symbolic.check import check

FILE = Path(__file__).parent.parent / "cases" / "math_answers.jsonl"
CASES = [json.loads(line) for line in FILE.read_text().splitlines()]
KINDS = sorted({case["kind"] for case in CASES})


@pytest.mark.parametrize("kind", ["known", "gold"])
def test_every_case_through_verify(kind: str) -> None:
    wrong = [
        (case, verdict) for case in CASES if case["kind"] == kind and not _is_right(case, verdict := _verify(case))
    ]
    assert wrong == []


def _verify(case: dict[str, Any]) -> Any:
    return verify(case["completion"], case["gold"], MathOptions(marker=case.get("marker", Marker.MARKED)))


def _is_right(case: dict[str, Any], verdict: Any) -> bool:
    return bool(verdict.correct is case["verdict"] and case.get("reason", verdict.reason) == verdict.reason)


@pytest.mark.parametrize("kind", ["known", "equal", "different"])
def test_either_side_may_be_gold(kind: str) -> None:
    """Equality is symmetric: the verdict does not depend on which side is called gold."""
    for case in CASES:
        answer = answer_text(case["completion"], Marker(case.get("marker", "marked")))
        if case["kind"] != kind or answer is None or case["verdict"] is None:
            continue
        forth, back = (check(*pair, 0.0, False)[0] == "equal" for pair in _both(answer, gold_text(case["gold"])))
        assert forth == back == case["verdict"], case


def _both(a: str, b: str) -> tuple[tuple[str, str], tuple[str, str]]:
    return (a, b), (b, a)


def test_every_readable_answer_equals_itself() -> None:
    for case in CASES:
        if case["verdict"] is not None:
            gold = gold_text(case["gold"])
            reason, detail = check(gold, gold, 0.0, False)
            # Some "different" cases are about text that has no meaning at all.
            assert reason == "equal" or (case["kind"] == "different" and reason == "gold_unparseable"), (case, detail)


def test_there_are_enough_of_each_kind() -> None:
    count = {kind: sum(case["kind"] == kind for case in CASES) for kind in KINDS}
    assert count["equal"] >= 150
    assert count["different"] >= 100
