"""Tools: schemas from signatures, checked arguments, and errors that the model can read."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Literal

import pytest
from pydantic import BaseModel

from agentrl.errors import ContractError, SandboxLost
from agentrl.tool import Tool, run_tools, tool
from agentrl.types import Message

MANY = 40
"""More calls at once than an event loop has threads by itself, on any machine."""


class Item(BaseModel):
    name: str
    price: float


@tool
def order(item: Item, count: int = 1, speed: Literal["slow", "fast"] = "slow") -> dict[str, object]:
    """Order something.

    It is delivered later.

    Args:
        item: what to order
        count: how many,
            at least one

    Returns:
        the bill
    """
    return {"sum": item.price * count, "speed": speed}


@tool
async def echo(text: str) -> str:
    """Say it again."""
    return text


def _action(*calls: tuple[str, object]) -> Message:
    tool_calls = [
        {
            "id": f"c{i}",
            "type": "function",
            "function": {"name": n, "arguments": a if isinstance(a, str) else json.dumps(a)},
        }
        for i, (n, a) in enumerate(calls)
    ]
    return {"role": "assistant", "content": None, "tool_calls": tool_calls}


async def _texts(tools: list[Tool], *calls: tuple[str, object]) -> list[str]:
    return [message["content"] for message in await run_tools(tools, _action(*calls))]


def test_schema_is_openais() -> None:
    function = order.schema["function"]
    assert order.schema["type"] == "function"
    assert function["name"] == "order"
    assert function["description"] == "Order something.\n\nIt is delivered later."
    parameters = function["parameters"]
    assert parameters["required"] == ["item"]
    assert parameters["additionalProperties"] is False
    assert parameters["properties"]["count"] == {
        "default": 1,
        "description": "how many, at least one",
        "type": "integer",
    }
    assert parameters["properties"]["speed"]["enum"] == ["slow", "fast"]
    assert parameters["$defs"]["Item"]["required"] == ["name", "price"]


async def test_arguments_are_parsed_and_results_are_json() -> None:
    texts = await _texts([order], ("order", {"item": {"name": "pen", "price": 2.5}, "count": "4", "speed": "fast"}))
    assert texts == ['{"sum":10.0,"speed":"fast"}']


async def test_answers_keep_order_and_ids() -> None:
    answers = await run_tools([echo, order], _action(("echo", {"text": "a"}), ("nope", {}), ("echo", {"text": "b"})))
    assert [(m["role"], m["tool_call_id"]) for m in answers] == [("tool", "c0"), ("tool", "c1"), ("tool", "c2")]
    assert [m["content"] for m in answers] == ["a", "error: there is no tool 'nope'; there are: echo, order", "b"]


@pytest.mark.parametrize(
    ("name", "arguments", "says"),
    [
        ("echo", "{'text': 1}", "error: the arguments of echo are not JSON"),
        ("echo", "[" * 100_000, "error: the arguments of echo are not JSON: maximum recursion depth"),
        ("order", '{"count": ' + "9" * 5000 + "}", "error: the arguments of order are not JSON: Exceeds the limit"),
        ("echo", '{"text": "\\ud800"}', "?"),
        ("echo", "[1]", "error: the arguments of echo must be a JSON object, got list"),
        ("echo", "", "error: the arguments of echo are not JSON"),
        ("echo", {}, "error: bad arguments for echo: text: Field required"),
        ("echo", {"text": "a", "b": 1}, "error: bad arguments for echo: b: Extra inputs are not permitted"),
        (
            "order",
            {"item": {"name": "x", "price": "dear"}},
            "error: bad arguments for order: item.price: Input should be",
        ),
    ],
)
async def test_bad_calls_are_observations(name: str, arguments: object, says: str) -> None:
    (text,) = await _texts([echo, order], (name, arguments))
    assert text.startswith(says)


async def test_no_arguments_at_all_is_an_observation() -> None:
    (answer,) = await run_tools(
        [echo], {"role": "assistant", "tool_calls": [{"id": "x", "function": {"name": "echo"}}]}
    )
    assert answer["content"] == "error: the arguments of echo must be a JSON object, got NoneType"


async def test_a_call_without_arguments_is_one_of_a_tool_that_needs_none() -> None:
    @tool
    def look() -> str:
        """Look around."""
        return "a wall"

    assert await _texts([look], ("look", ""), ("look", None), ("look", {})) == ["a wall"] * 3


async def test_errors_of_tools_are_told_as_they_are() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise ValueError("no words")

    @tool
    async def fetch() -> str:
        """Fetch."""
        raise TimeoutError("the socket's own")

    @tool
    def speak() -> str:
        """Speak."""
        raise Mute

    assert await _texts([fetch, speak], ("fetch", {}), ("speak", {})) == [
        "error: TimeoutError: the socket's own",
        "error: Mute: (no text: ValueError)",
    ]


async def test_raw_new_lines_in_arguments_are_taken() -> None:
    assert await _texts([echo], ("echo", '{"text": "a\nb"}')) == ["a\nb"]


async def test_an_exception_is_an_observation_and_a_lost_box_is_not() -> None:
    @tool
    def divide(by: int) -> float:
        """Divide one."""
        return 1 / by

    @tool
    async def box() -> str:
        """Use the box."""
        raise SandboxLost("box 3 is gone")

    @tool
    def leave(code: int) -> str:
        """Leave."""
        raise SystemExit(code)

    @tool
    async def drop() -> str:
        """Drop it."""
        raise asyncio.CancelledError("by itself")

    assert await _texts([divide], ("divide", {"by": 0})) == ["error: ZeroDivisionError: division by zero"]
    assert await _texts([leave, drop, echo], ("leave", {"code": 3}), ("drop", {}), ("echo", {"text": "on"})) == [
        "error: RuntimeError: SystemExit: 3",
        "error: CancelledError: by itself",
        "on",
    ]
    with pytest.raises(SandboxLost, match="box 3 is gone"):
        await _texts([divide, box], ("divide", {"by": 1}), ("box", {}))


async def test_calls_run_in_parallel_and_blocking_ones_leave_the_loop_free() -> None:
    together, blocked, looped = threading.Barrier(MANY), threading.Event(), threading.Event()

    @tool(timeout=100)
    def meet() -> str:
        """Block until all are here, and then until the loop has noticed."""
        together.wait(60.0)
        blocked.set()
        return "ok" if looped.wait(60.0) else "the loop stood still"

    async def notice() -> None:
        while not blocked.is_set():  # noqa: ASYNC110 - threads are waited for
            await asyncio.sleep(0.01)
        looped.set()

    noticing = asyncio.ensure_future(notice())
    assert await _texts([meet], *[("meet", {})] * MANY) == ["ok"] * MANY
    await noticing


async def test_a_slow_tool_is_given_up() -> None:
    @tool(name="wait", timeout=0.05)
    async def sleep_long() -> str:
        """Sleep for long."""
        await asyncio.sleep(60)
        return "never"

    assert await _texts([sleep_long], ("wait", {})) == ["error: wait did not finish within 0.05 s"]


async def test_methods_bind_to_their_episode() -> None:
    class Shop:
        def __init__(self) -> None:
            self.bought: list[str] = []

        @tool
        async def buy(self, item: str) -> int:
            """Buy an item."""
            self.bought.append(item)
            return len(self.bought)

    one, two = Shop(), Shop()
    assert await _texts([one.buy], ("buy", {"item": "tea"}), ("buy", {"item": "jam"})) == ["1", "2"]
    assert await _texts([two.buy], ("buy", {"item": "oil"})) == ["1"]
    assert (one.bought, two.bought) == (["tea", "jam"], ["oil"])
    assert "self" not in Shop.buy.schema["function"]["parameters"]["properties"]


def test_what_cannot_be_described_is_refused() -> None:
    def untyped(x) -> str:  # type: ignore[no-untyped-def]
        """Say."""
        return str(x)

    def silent(x: int) -> int:
        return x

    def variadic(*x: int) -> int:
        """Add."""
        return sum(x)

    cases: list[tuple[Any, str]] = [
        (untyped, "argument 'x' has no type"),
        (silent, "has no docstring"),
        (variadic, "cannot be described in a schema"),
    ]
    for function, says in cases:
        with pytest.raises(ContractError, match=says):
            tool(function)


async def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(ContractError, match="share a name"):
        await run_tools([echo, echo], _action())


async def test_names_that_pydantic_keeps_for_itself() -> None:
    @tool
    def odd(schema: str, model_dump: int, copy: int = 1, _x: int = 2) -> str:
        """Have odd names."""
        return f"{schema}{model_dump}{copy}{_x}"

    properties = odd.schema["function"]["parameters"]["properties"]
    assert list(properties) == ["schema", "model_dump", "copy", "_x"]
    assert await _texts([odd], ("odd", {"schema": "a", "model_dump": 5, "_x": 7}), ("odd", {"schema": "a"})) == [
        "a517",
        "error: bad arguments for odd: model_dump: Field required",
    ]


async def test_any_result_becomes_text() -> None:
    @tool
    def give(what: str) -> Any:
        """Give something."""
        given = {
            "bytes": b"a\xff",
            "none": None,
            "nan": {"x": float("nan")},
            "half": "\ud800",
            "set": {1},
            "odd": {"b": b"\xff"},
        }
        return given.get(what, object)

    asked = [("give", {"what": what}) for what in ("bytes", "none", "nan", "half", "set", "odd", "class")]
    assert await _texts([give], *asked) == [
        "a\ufffd",
        "null",
        '{"x":"NaN"}',
        "?",
        "[1]",
        '{"b":"_w=="}',
        "\"<class 'object'>\"",
    ]


class Handle:
    pass


def test_types_without_a_schema_are_refused_by_name() -> None:
    class Local:
        pass

    with pytest.raises(ContractError, match="tool 'near': name 'Local' is not defined"):

        @tool
        def near(thing: Local) -> str:
            """Use it."""
            return ""

    with pytest.raises(ContractError, match="tool 'use': its arguments cannot be described"):

        @tool
        def use(handle: Handle) -> str:
            """Use it."""
            return ""


@pytest.mark.parametrize("call", [{}, {"id": "1"}, {"function": "echo"}, {"function": None}, "echo", None])
async def test_a_call_that_is_none_is_an_observation(call: Any) -> None:
    (answer,) = await run_tools([echo], {"role": "assistant", "tool_calls": [call]})
    assert answer["content"] == "error: there is no tool 'None'; there are: echo"
