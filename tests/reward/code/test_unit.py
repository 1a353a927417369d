"""Test files: what of pytest and unittest works, state, classes, errors, arguments that change, several rounds."""

from __future__ import annotations

import pytest

from agentrl.reward.code.grade import CodeReward
from agentrl.reward.code.task import parse_task
from agentrl.reward.code.verdict import Verdict

pytestmark = pytest.mark.asyncio(loop_scope="module")
STACK = """
class Empty(LookupError):
    pass

class Stack:
    def __init__(self, items=()):
        self.items = list(items)
    def push(self, item):
        self.items.append(item)
        return self
    def pop(self):
        if not self.items:
            raise Empty('nothing left')
        return self.items.pop()
    def __len__(self):
        return len(self.items)
    def __eq__(self, other):
        return self.items == other.items

def sort_in_place(items):
    items.sort()

count = 0
def ticket():
    global count
    count += 1
    return count

def squares(n):
    for i in range(n):
        yield i * i

LIMIT = 10
"""
TESTS = """
import pytest
from solution import LIMIT, Empty, Stack, sort_in_place, squares, ticket

@pytest.fixture
def stack():
    return Stack([1, 2])

def test_state(stack):
    stack.push(3)
    assert len(stack) == 3
    assert stack.pop() == 3
    assert stack.items == [1, 2]

def test_error():
    with pytest.raises(Empty, match='nothing'):
        Stack().pop()
    with pytest.raises(LookupError):
        Stack().pop()

def test_equality():
    assert Stack([1]) == Stack().push(1)
    assert not Stack([1]) == Stack()

def test_arguments_change():
    items = [3, 1, 2]
    assert sort_in_place(items) is None
    assert items == [1, 2, 3]

def test_globals():
    first = ticket()
    assert ticket() == first + 1
    assert LIMIT == 10

@pytest.mark.parametrize('n,expected', [(0, []), (3, [0, 1, 4])])
def test_cases(n, expected):
    assert list(squares(n)) == expected

class TestMore:
    def setup_method(self):
        self.stack = Stack()
    def test_chain(self):
        assert self.stack.push(1).push(2).pop() == 2

def test_close():
    assert [x / 3 for x in squares(3)] == pytest.approx([0, 1 / 3, 4 / 3])
"""


async def graded(reward: CodeReward, program: str) -> Verdict:
    return await reward.grade_program(program, parse_task({"mode": "unit", "test": TESTS}))


async def test_all_of_it_passes(reward: CodeReward) -> None:
    verdict = await graded(reward, STACK)
    assert verdict.reward == 1.0, verdict
    assert verdict.total == 9


@pytest.mark.parametrize(
    ("right", "wrong", "test", "status"),
    [
        ("return self.items.pop()", "return self.items.pop(0)", "test_state", "wrong_answer"),
        ("raise Empty", "raise OSError", "test_error", "runtime_error"),
        ("items.sort()", "sorted(items)", "test_arguments_change", "wrong_answer"),
        ("count += 1", "count += 2", "test_globals", "wrong_answer"),
        ("yield i * i", "yield i", "test_cases[1]", "wrong_answer"),
    ],
)
async def test_one_fault_fails_its_test(right: str, wrong: str, test: str, status: str, reward: CodeReward) -> None:
    verdict = await graded(reward, STACK.replace(right, wrong))
    assert verdict.reward == 0.0
    assert test in [one.name for one in verdict.tests if one.status == status], verdict


ACCOUNT = """
from solution import Account

def test_balance():
    account = Account(5)
    assert abs(account.balance() - 5.0) < 1e-9
    assert account.balance() > 4

def test_total():
    assert (Account(1) + Account(2)).value == 3
"""


async def test_an_object_of_the_class_under_test_does_not_stand_for_data(reward: CodeReward) -> None:
    task = parse_task({"mode": "unit", "test": ACCOUNT})
    honest = (
        "class Account:\n    def __init__(self, v): self.value = v\n    def balance(self): return self.value\n"
        "    def __add__(self, o): return Account(self.value + o.value)\n"
    )
    assert (await reward.grade_program(honest, task)).reward == 1.0
    names = "__sub__ __add__ __abs__ __lt__ __gt__ __eq__ __call__ __getattr__ balance"
    faked = f"class Account:\n    __init__ = lambda s, *a: None\n    {' = '.join(names.split())} = lambda s, *a: s\n"
    verdict = await reward.grade_program(faked, task)
    assert verdict.passed == 0, verdict


async def test_a_helper_of_the_question_is_not_the_candidates(reward: CodeReward) -> None:
    row = {
        "prompt": "def twice(x):\n    return 2 * x\n\ndef half(x):\n    ...\n",
        "entry_point": "half",
        "test": "def check(candidate):\n    assert twice(candidate(8)) == 8\n",
    }
    honest = "def half(x):\n    return x / 2\n"
    assert (await reward.grade_program(honest, parse_task(row))).reward == 1.0
    faked = "def twice(x):\n    return 8\n\ndef half(x):\n    return 0\n"
    assert (await reward.grade_program(faked, parse_task(row))).reward == 0.0
