"""Which part of an answer is the program."""

from __future__ import annotations

import ast
import sys
from collections import Counter

import pytest

from agentrl.reward.code.extract import extract_code, is_program

FENCE = "```"
RIGHT = "print(1)\n"


@pytest.mark.parametrize(
    "answer",
    [
        f"{FENCE}python\nprint(1)\n{FENCE}",
        f"{FENCE}PY\nprint(1)\n{FENCE}",
        f"{FENCE} python3 title=x\nprint(1)\n{FENCE}",
        f"{FENCE}{{.python}}\nprint(1)\n{FENCE}",
        "~~~python\nprint(1)\n~~~",
        f"{FENCE}`python\nprint(1)\n{FENCE}`",
        f"{FENCE}\nprint(1)\n{FENCE}\nwhich prints\n{FENCE}\n1\n{FENCE}",
        f"draft\n{FENCE}python\nprint(0)\n{FENCE}\nfinal\n{FENCE}python\nprint(1)\n{FENCE}",
        f"{FENCE}python\nprint(1)\n{FENCE}\n{FENCE}bash\npython x.py\n{FENCE}",
        f"{FENCE}python\nprint(1)\n{FENCE}\n{FENCE}\nprint(2)\n{FENCE}",
        f"{FENCE}python\nprint(1)\n",
        f"1. so:\n   {FENCE}python\n   print(1)\n   {FENCE}",
        f"> {FENCE}python\n> print(1)\n> {FENCE}",
        f"\ufeff{FENCE}python\r\nprint(1)\r\n{FENCE}\r\n",
        f"<think>{FENCE}python\nprint(0)\n{FENCE}</think>{FENCE}python\nprint(1)\n{FENCE}",
        "print(1)",
        "<think>hm</think>\nprint(1)\n",
    ],
)
def test_the_program_is_found(answer: str) -> None:
    assert extract_code(answer) == RIGHT


@pytest.mark.parametrize(
    "answer",
    [
        "",
        "Sorry",
        "42",
        "I cannot solve this one, sorry.",
        f"{FENCE}text\nprint(1)\n{FENCE}",
        f"{FENCE}cpp\nint main() {{}}\n{FENCE}",
        f"{FENCE}python\n\n{FENCE}",
        f"<think>\n{FENCE}python\nprint(1)\n{FENCE}\n</think>\nAs above.",
        f"<think>\n{FENCE}python\nprint(1)\n{FENCE}\nand on and on",
    ],
)
def test_there_is_no_program(answer: str) -> None:
    assert extract_code(answer) is None


def test_a_fence_in_a_docstring_does_not_end_the_block() -> None:
    program = f'def f():\n    """\n{FENCE}\n1\n{FENCE}\n"""\n    return 1\n'
    assert extract_code(f"{FENCE}python\n{program}{FENCE}\nThat is it.") == program


@pytest.mark.parametrize("piece", ["```python\nx```\n", "```python\nx\n```\n", "```\n", "```python\n", "'</think>'"])
def test_no_answer_keeps_the_grader_busy(piece: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice the answer is at most about twice the work, in calls and in characters that are compiled."""
    parse, work = ast.parse, Counter[str]()

    def parsed(text: str) -> ast.Module:
        work["characters"] += len(text)
        return parse(text)

    def called(*_: object) -> None:
        work["calls"] += 1

    def worked(pieces: int) -> Counter[str]:
        work.clear()
        with monkeypatch.context() as patched:
            patched.setattr(ast, "parse", parsed)
            sys.setprofile(called)
            try:
                extract_code(piece * pieces, "f")
            finally:
                sys.setprofile(None)
        return Counter(work)

    once, twice = worked(500), worked(1000)
    assert once["characters"] > 0 < once["calls"]
    assert all(twice[kind] < 2.5 * once[kind] for kind in once), (once, twice)


def test_a_fence_in_a_comment_does_not_end_the_block() -> None:
    assert extract_code("```python\nx = 1  # not ```\nprint(x)\n```") == "x = 1  # not ```\nprint(x)\n"


def test_a_broken_block_does_not_swallow_the_next() -> None:
    answer = f"{FENCE}python\nprint(\n{FENCE}\nmended:\n{FENCE}python\nprint(1)\n{FENCE}\n"
    assert extract_code(answer) == RIGHT


def test_the_block_that_defines_the_entry_point_goes_before_its_example() -> None:
    answer = f"{FENCE}python\ndef f(x):\n    return x\n{FENCE}\n{FENCE}python\nprint(f(1))\n{FENCE}"
    assert extract_code(answer, "f") == "def f(x):\n    return x\n"
    assert extract_code(answer) == "print(f(1))\n"


def test_text_that_happens_to_compile_is_no_program() -> None:
    assert not is_program("No")
    assert not is_program("yes - maybe")
    assert is_program("x = 1")
    assert not is_program("print(1)\0")
    assert not is_program("(" * 10_000)
