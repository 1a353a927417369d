"""How many of the recorded answers our comparison and `math-verify` judge rightly.

    python examples/benchmarks/math_answers.py        # needs pip install "math-verify[antlr4_13_2]"

The cases are those of tests/cases/math_answers.jsonl that have a verdict; ours were mended until all of them are right,
so the figure of `math-verify` says why it is not what compares, and nothing of other cases. The last line is JSON.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from math_verify import parse
from math_verify import verify as math_verify

from agentrl.reward.math import verify
from agentrl.reward.options import Marker, MathOptions

CASES = Path(__file__).resolve().parents[2] / "tests" / "cases" / "math_answers.jsonl"


def ours(case: dict[str, Any]) -> bool | None:
    """Our verdict."""
    return verify(case["completion"], case["gold"], MathOptions(marker=case.get("marker", Marker.MARKED))).correct


def theirs(case: dict[str, Any]) -> bool | None:
    """The verdict of `math-verify`, used as its documentation does."""
    return bool(math_verify(parse(f"${case['gold']}$"), parse(case["completion"])))


def main() -> None:
    """Judge all and print."""
    logging.disable(logging.CRITICAL)
    cases = [case for case in map(json.loads, CASES.read_text().splitlines()) if case["verdict"] is not None]
    found: dict[str, Any] = {"cases": len(cases)}
    judges: dict[str, Callable[[dict[str, Any]], bool | None]] = {"ours": ours, "math_verify": theirs}
    for name, judge in judges.items():
        wrong = [case for case in cases if judge(case) is not case["verdict"]]
        kinds = Counter("said equal" if not case["verdict"] else "said different" for case in wrong)
        print(f"{name}: {len(wrong)} of {len(cases)} wrong ({dict(kinds)})")
        for case in wrong[:5]:
            print(f"  {case['completion']!r} against {case['gold']!r}")
        found[name] = len(cases) - len(wrong)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
