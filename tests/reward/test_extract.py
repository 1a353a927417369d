"""Where answers stand: markers, reasoning, markdown, cut-off and empty boxes."""

from __future__ import annotations

import itertools

import pytest

from agentrl.reward.extract import answer_text, gold_text, without_thinking
from agentrl.reward.math import verify
from agentrl.reward.options import Marker, MathOptions

BEFORE = [
    "",
    "So ",
    "Earlier I thought \\boxed{99}, but no. ",
    "<think>\\boxed{98}</think>\n",
    "Check: 12 = 12.\n\n",
    "$$x = 3$$ then ",
    "I write \\boxed for the answer: ",
    "reasoning \\boxed{97}</think> ",
    "{unbalanced ",
    "Answer: ",
]
AFTER = [
    "",
    ".",
    " is it.",
    "$",
    "\n\nDone.",
    " (marked with \\boxed as asked)",
    " \\boxed{}",
    "\n**",
    ". Also 55.",
    "}",
]
BOXES = [
    "\\boxed{%s}",
    "\\boxed {%s}",
    "\\fbox{%s}",
    "\\boxed{ %s }",
    "$\\boxed{%s}$",
    "\\boxed{\\text{%s}}",
    "**\\boxed{%s}**",
]
ANSWERS = ["615", "\\frac{5}{9}", "[3,8)", "\\{1,2\\}", "x=\\sqrt{2}"]


def test_the_last_box_is_found_in_every_surrounding() -> None:
    count = 0
    for before, after, box, answer in itertools.product(BEFORE, AFTER, BOXES, ANSWERS):
        found = answer_text(before + box % answer + after, Marker.BOXED)
        expected = f"\\text{{{answer}}}" if "text" in box else answer
        assert found == expected, (before, after, box, answer)
        count += 1
    assert count > 1000


@pytest.mark.parametrize(
    "completion",
    [
        "",
        "I don't know.",
        "The answer is 12.",
        "\\boxed",
        "\\boxed{}",
        "\\boxed{ }",
        "I would use \\boxed to answer",
        "<think>\\boxed{12}",
        "<think>\\boxed{12}</think>",
        "\\boxed{4}, no, \\boxed{\\frac{1}{2",
        "boxed{12}",
        "\\boxedx{12}",
        "\\boxed{...}",
        "put it in \\boxed{answer}",
    ],
)
def test_without_a_marker_there_is_no_answer(completion: str) -> None:
    verdict = verify(completion, "12")
    assert (verdict.correct, verdict.reason) == (False, "no_answer")


@pytest.mark.parametrize(
    "line",
    [
        "Final Answer: 41",
        "Final answer: **41**",
        "**Final Answer:** 41",
        "**Final Answer**: 41.",
        "final answer is 41",
        "The final answer is: 41",
        "The final answer is $41$.",
        "FINAL ANSWER: `41`",
        "### Final Answer\n41",
        "Final Answer: \\(41\\)",
        "Final Answer: \\boxed{41}",
        "Final Answer: 41\n",
        "The final answer is 41. I hope it is correct.",
    ],
)
@pytest.mark.parametrize("before", ["", "2*187 = 374.\n\n", "Final Answer: 7? No.\n"])
def test_final_answer_lines(before: str, line: str) -> None:
    assert verify(before + line, "41", MathOptions(marker=Marker.FINAL_ANSWER)).correct is True
    assert verify(before + line, "41").correct is True
    if "boxed" not in line:
        assert verify(before + line, "41", MathOptions(marker=Marker.BOXED)).reason == "no_answer"


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("the shop sold 58 lamps, all told.", "58"),
        ("it is 1,234.50.", "1234.5"),
        ("3 then -4", "-4"),
        ("from 5-3", "3"),
        ("about 35%.", "35\\%"),
        ("costs $6,000, yes", "6000"),
        ("so 3/4!", "0.75"),
        ("x1 is 7, ok", "7"),
        ("$.50", "0.5"),
        ("12 lamps (in all).", "12"),
        ("at 3.5.", "3.5"),
        ("2, 3, 4", "4"),
    ],
)
def test_the_last_number(text: str, number: str) -> None:
    assert verify(text, number, MathOptions(marker=Marker.LAST_NUMBER)).correct is True


def test_gsm8k_solutions_and_boxed_golds() -> None:
    gold = "Crates cost 4*5=<<4*5=20>>20\n#### 1,220"
    assert gold_text(gold) == "1,220"
    assert verify("\\boxed{1220}", gold).correct is True
    assert verify("so\n#### 1220", gold, MathOptions(marker=Marker.GSM8K)).correct is True
    assert verify("so 1220", gold, MathOptions(marker=Marker.GSM8K)).reason == "no_answer"
    assert gold_text("The answer is $\\boxed{\\frac{1}{2}}$.") == "\\frac{1}{2}"
    assert verify("\\boxed{0.5}", "The answer is $\\boxed{\\frac{1}{2}}$.").correct is True
    assert verify("\\boxed{5}", "no number\n#### ").reason == "gold_unparseable"


def test_reasoning_is_not_the_answer() -> None:
    assert without_thinking("<think>a</think>b<think>c</think>d") == "d"
    assert without_thinking("<think>never ends") == ""
    assert without_thinking("template opened it</think>\nb").strip() == "b"


def test_options_loosen_what_they_say_and_nothing_else() -> None:
    close = MathOptions(relative_tolerance=0.01)
    assert verify("\\boxed{0.3333}", "1/3", close).correct is True
    assert verify("\\boxed{0.33}", "1/3", MathOptions(relative_tolerance=0.001)).correct is False
    assert verify("\\boxed{10^{-30}}", "10^{-31}", close).correct is False
    percent = MathOptions(lenient_percent=True)
    assert verify("\\boxed{35}", "35\\%", percent).correct is True
    assert verify("\\boxed{35\\%}", "35", percent).correct is True
    assert verify("\\boxed{36}", "35\\%", percent).correct is False
    assert verify("\\boxed{35}", "35\\%").correct is False
