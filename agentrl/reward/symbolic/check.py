"""What the worker runs: an answer against a gold answer."""

from __future__ import annotations

from agentrl.reward.symbolic.answer import readings
from agentrl.reward.symbolic.compare import Rules, same
from agentrl.reward.symbolic.tokens import Unreadable
from agentrl.reward.symbolic.values import Value


def check(answer: str | None, gold: str, relative: float, lenient_percent: bool) -> list[str]:
    """[reason, detail]; reason is "equal", "different", "answer_unparseable" or "gold_unparseable".

    With `answer` None only the gold is read: "equal" where it can be.
    """
    wanted = _read(gold)
    if isinstance(wanted, str):
        return ["gold_unparseable", wanted]
    if answer is None:
        return ["equal", ""]
    found = _read(answer)
    if isinstance(found, str):
        return ["answer_unparseable", found]
    rules = Rules(relative, lenient_percent)
    try:
        equal = any(same(left, right, rules) for left in found for right in wanted)
    except Exception as error:
        # A process boundary: sympy raises all kinds where it cannot order, evaluate or convert.
        return ["different", f"not comparable: {type(error).__name__}: {error}"[:300]]
    return ["equal" if equal else "different", ""]


def _read(text: str) -> list[Value] | str:
    try:
        return readings(text)
    except Unreadable as error:
        return str(error)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:300]
