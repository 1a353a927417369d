"""When an output or a value is the expected one."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.reward.code.compare import same_output, same_value


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ("5\n", "5", True),
        ("5\n\n\n", "5\n", True),
        ("\n5", "5", False),
        ("1 2 \n3", "1  2\r\n3\r\n", True),
        ("1\n2", "1 2", False),
        ("", "", True),
        ("", "\n", True),
        ("0", "", False),
        ("0.30000000000000004", "0.3", True),
        ("3", "3.0", True),
        ("3.0", "3", False),
        ("7", "007", False),
        ("1e3", "1000.0", True),
        ("1_000", "1000.0", False),
        ("nan", "3.5", False),
        ("nan", "nan", True),
        ("inf", "1e999", False),
        ("3.5", "nan", False),
        ("0.3001", "0.3", False),
        ("1e-12", "0.0", True),
        ("0.001", "0.0", False),
        ("yes", "YES", False),
        ("x 0.1", "x 0.10000000001", True),
        ("٣.5", "3.5", False),
    ],
)
def test_outputs(got: str, expected: str, same: bool) -> None:
    assert same_output(got, expected) is same


def test_one_of_several_outputs() -> None:
    assert same_output("2 1", ["1 2", "2 1"])
    assert not same_output("2 2", ["1 2", "2 1"])


@pytest.mark.parametrize(
    ("got", "expected", "same"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]], True),
        ([1, 2], [1, 2, 3], False),
        (0.1 + 0.2, 0.3, True),
        (10**400, 0.3, False),
        (float("nan"), 0.3, False),
        (float("nan"), float("nan"), True),
        (float("inf"), 1e308, False),
        (2.0, 2, True),
        (2.0000000001, 2, False),
        (True, 1, True),
        ("1", 1, False),
        (None, 0, False),
        (None, None, True),
        ({1: "a"}, {"1": "a"}, True),
        ({1: "a", "1": "b"}, {"1": "b"}, False),
        ({"a": 0.1 + 0.2}, {"a": 0.3}, True),
        ({1, 2}, [1, 2], False),
        ({1, 2}, {2, 1}, True),
        ("ab", ["a", "b"], False),
        (b"a", "a", False),
    ],
)
def test_values(got: Any, expected: Any, same: bool) -> None:
    assert same_value(got, expected) is same
