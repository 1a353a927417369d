"""The direct session: what is recorded, how trajectories split, limits and refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from agentrl.endpoint.options import EndpointOptions
from agentrl.errors import ContractError, DeadlineExceeded, LimitReached
from agentrl.types import Context, Sampled, SplitReason, Trajectory, Version

Ask = Any
MakeSetup = Any
USER = {"role": "user", "content": "q1"}


def said(template: Any, trajectory: Trajectory) -> list[str]:
    return [
        template.decode(s.tokens) for s in trajectory.segments if isinstance(s.source, Sampled) and s.source.trained
    ]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


async def test_what_is_recorded_is_what_was_sent_and_received(setup: MakeSetup, ask: Ask, calculator: Any) -> None:
    call = '<tool_call>\n{"name":"calc", "arguments": {"expression": "1 + 1"}}\n</tool_call><|im_end|>'
    s = setup([call, "two<|im_end|>", "cut", "end<|endoftext|>", "bye<|im_end|>"])
    session = s.open()
    messages = [USER]
    answer = await ask(session, messages, tools=[calculator])
    assert answer["tool_calls"][0]["function"] == {"name": "calc", "arguments": '{"expression": "1 + 1"}'}
    messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "2"})
    for _ in range(4):
        await ask(session, messages, tools=[calculator])
        messages.append(user("go on"))
    (trajectory,) = await session.close()
    sent = [request.tokens.tolist() for request in s.engine.requests]
    ends = np.cumsum([len(segment) for segment in trajectory.segments]).tolist()
    assert [ends[i] for i in range(0, 10, 2)] == [len(tokens) for tokens in sent]
    assert all(trajectory.tokens[: len(tokens)].tolist() == tokens for tokens in sent)
    assert said(s.template, trajectory) == [call, "two<|im_end|>", "cut", "end<|endoftext|>", "bye<|im_end|>"]
    contexts = [s.template.decode(x.tokens) for x in trajectory.segments if isinstance(x.source, Context)]
    assert contexts[2] == "\n<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    assert contexts[3] == contexts[4] == "<|im_end|>" + contexts[2], "a turn that was cut is closed by context"
    assert session.metrics["malformed_tool_calls"] == 0
    assert session.metrics["tool_calls"] == 1


async def test_spans_become_segments_with_their_versions(setup: MakeSetup, ask: Ask) -> None:
    s = setup(["abcdef<|im_end|>"])
    session = s.open(temperature=0.7)
    drawn, make = 0, s.engine.reply

    def draw(prompt: Any) -> Any:
        nonlocal drawn
        for token in make(prompt):
            drawn += 1
            yield token

    s.engine.reply, s.engine.holds_at = draw, 3
    call = asyncio.ensure_future(ask(session, [USER]))
    async with asyncio.timeout(60):
        while drawn < 4:  # noqa: ASYNC110  # the fourth is held
            await asyncio.sleep(0.002)
    s.engine.version = Version(1, 1)
    s.engine.holds_at = None
    await call
    (trajectory,) = await session.close()
    sources = [x.source for x in trajectory.segments[1:]]
    assert sources == [Sampled(Version(1, 0), 0.7), Sampled(Version(1, 1), 0.7)]
    assert s.engine.requests[0].sampling.temperature == 0.7


async def test_marks(setup: MakeSetup, ask: Ask) -> None:
    session = setup().open()
    messages = [USER]
    assert session.marks() == ()
    await ask(session, messages)
    first = session.marks()
    assert session.marks() == ()
    messages.append(user("q2"))
    await ask(session, messages)
    await ask(session, [user("other")])
    assert [m[0] for m in session.marks()] == [0, 1]
    trajectories = await session.close()
    assert first == ((0, sum(len(s) for s in trajectories[0].segments[:2])),)
    assert trajectories == await session.close()


async def test_reasons_of_splits(setup: MakeSetup, ask: Ask, calculator: Any) -> None:
    s = setup(["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>", "a4<|im_end|>", "a5<|im_end|>", "a6<|im_end|>"])
    session = s.open()
    base = [{"role": "system", "content": "S"}, USER]
    messages = list(base)
    await ask(session, messages)
    messages.append(user("q2"))
    await ask(session, messages)
    compacted = [base[0], user("so far: a1"), user("q3")]
    await ask(session, compacted)
    edited = [base[0], user("Q1"), *messages[2:], user("q3")]
    await ask(session, edited)
    await ask(session, [*messages, user("q3")], tools=[calculator])
    await ask(session, [{"role": "system", "content": "critic"}, user("what of it?")])
    reasons = [t.reason for t in await session.close()]
    start, edit, other = SplitReason.START, SplitReason.EDITED, SplitReason.OTHER
    assert reasons == [start, edit, edit, edit, other]
    assert session.metrics["splits_edited"] == 3


async def test_a_dropped_turn_is_not_trained_and_nothing_is_trained_twice(setup: MakeSetup, ask: Ask) -> None:
    s = setup([f"a{i}<|im_end|>" for i in range(1, 9)])
    session = s.open()
    messages = [USER]
    await ask(session, messages)
    messages.append(user("q2"))
    await ask(session, list(messages))  # a2: dropped, asked again from the same point
    await ask(session, messages)  # a3
    messages.append(user("q3"))
    await ask(session, messages)  # a4
    first, second = await session.close()
    assert (first.reason, second.reason) == (SplitReason.START, SplitReason.BRANCH)
    assert said(s.template, first) == ["a1<|im_end|>"]
    assert said(s.template, second) == ["a3<|im_end|>", "a4<|im_end|>"]
    assert [first.abandoned, second.abandoned] == [False, False]
    sent = s.engine.requests[3].tokens.tolist()
    assert sent == second.tokens.tolist()[: len(sent)]


async def test_a_branch_from_the_start_is_abandoned(setup: MakeSetup, ask: Ask) -> None:
    s = setup(["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"])
    session = s.open()
    first = [USER]
    await ask(session, first)
    await ask(session, [USER])
    one, two = await session.close()
    assert (one.abandoned, two.abandoned, two.reason) == (True, False, SplitReason.BRANCH)
    await_again = s.open()
    first = [USER]
    await ask(await_again, first)  # a3
    await ask(await_again, [USER])  # a1
    await ask(await_again, [*first, user("on")])  # back to the first branch
    one, two = await await_again.close()
    assert (one.abandoned, two.abandoned) == (False, True)


async def test_choices_are_branches_and_the_one_that_goes_on_is_kept(setup: MakeSetup) -> None:
    s = setup(["a1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"])
    session = s.open()
    create = session.chat.completions.create
    reply = await create(model="m", messages=[USER], n=3)
    assert [c.message.content for c in reply.choices] == ["a1", "a2", "a3"]
    seeds = {request.sampling.seed for request in s.engine.requests}
    assert len(seeds) == 3
    chosen = reply.choices[1].message
    await create(model="m", messages=[USER, chosen, user("q2")])
    trajectories = await session.close()
    assert [t.abandoned for t in trajectories] == [True, False, True]
    assert len(said(s.template, trajectories[1])) == 2


async def test_parallel_calls_of_one_agent_and_agents_by_name(setup: MakeSetup, ask: Ask) -> None:
    s = setup(["a<|im_end|>"], delay=0.01)
    session = s.open()
    await asyncio.gather(ask(session, [USER]), ask(session, [USER]))
    await ask(session, [user("judge")], extra_body={"agent": "judge"})
    trajectories = await session.close()
    assert [(t.reason, t.agent) for t in trajectories] == [
        (SplitReason.START, ""),
        (SplitReason.BRANCH, ""),
        (SplitReason.START, "judge"),
    ]


async def test_clients_may_rewrite_a_message_without_changing_it(setup: MakeSetup) -> None:
    call = (
        '<think>\nhm\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"a": 1, "b": "é"}}\n</tool_call><|im_end|>'
    )
    tool = {"type": "function", "function": {"name": "f"}}
    s = setup([call, "ok<|im_end|>"])
    session = s.open()
    create = session.chat.completions.create
    reply = await create(model="m", messages=[USER], tools=[tool])
    message = reply.choices[0].message
    assert message.reasoning_content == "hm"
    rewritten = {
        "role": "assistant",
        "content": "",
        "refusal": None,
        "tool_calls": [
            {
                "function": {"arguments": '{"b":"\\u00e9","a":1}', "name": "f"},
                "type": "function",
                "id": message.tool_calls[0].id,
            }
        ],
    }
    result = {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": [{"type": "text", "text": "7"}]}
    await create(model="m", messages=[USER, rewritten, result], tools=[tool])
    assert len(await session.close()) == 1


async def test_history_edited_in_place_is_noticed(setup: MakeSetup, ask: Ask) -> None:
    session = setup(["a1<|im_end|>", "a2<|im_end|>"]).open()
    messages = [user("long tool output")]
    await ask(session, messages)
    messages[0]["content"] = "[cut]"
    messages.append(user("q2"))
    await ask(session, messages)
    assert [t.reason for t in await session.close()] == [SplitReason.START, SplitReason.EDITED]


THINKS = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}"
    "{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and '</think>' in m.content and loop.index0 < ns.last %}"
    "{{ m.content.split('</think>')[-1].lstrip('\n') }}{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


async def test_history_template_splits_where_the_template_rewrites(setup: MakeSetup, ask: Ask, chatml: Any) -> None:
    texts = ["<think>\nhm\n</think>\n\na1<|im_end|>", "a2<|im_end|>", "a3<|im_end|>"]
    found = {}
    for history in ("append", "template"):
        s = setup(texts, chatml(THINKS), EndpointOptions(history=history))
        session = s.open()
        messages = [USER]
        for _ in range(3):
            await ask(session, messages)
            messages.append(user("next"))
        found[history] = await session.close()
    assert [t.reason for t in found["append"]] == [SplitReason.START]
    assert [t.reason for t in found["template"]] == [SplitReason.START, SplitReason.TEMPLATE]
    second = found["template"][1]
    assert "hm" not in s.template.decode(second.tokens)
    assert said(s.template, second) == texts[1:]
    assert s.template.decode(second.segments[0].tokens).endswith(
        "a1<|im_end|>\n<|im_start|>user\nnext<|im_end|>\n<|im_start|>assistant\n"
    )


async def test_an_unproven_template_runs_one_trajectory_a_turn(setup: MakeSetup, ask: Ask, chatml: Any) -> None:
    source = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}<|assistant|>"
    session = setup(["a<|im_end|>"], chatml(source), EndpointOptions(unproven_template="turn")).open()
    messages = [USER]
    for _ in range(3):
        await ask(session, messages)
        messages.append(user("more"))
    trajectories = await session.close()
    assert [t.reason for t in trajectories] == [SplitReason.START, SplitReason.TEMPLATE, SplitReason.TEMPLATE]
    assert not any(t.abandoned for t in trajectories)


async def test_results_that_a_template_counts_start_anew_and_questions_do_not(
    setup: MakeSetup, ask: Ask, chatml: Any, calculator: Any
) -> None:
    """As DeepSeek-R1-Distill's, whose writing of a result depends on the ones before."""
    source = (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.role == 'tool' %}{% set ns.n = ns.n + 1 %}"
        "<|im_start|>result {{ ns.n }}\n{% else %}<|im_start|>{{ m.role }}\n{% endif %}{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    s = setup(['<tool_call>{"name": "calc", "arguments": {}}</tool_call><|im_end|>'], chatml(source))
    session = s.open()
    messages = [USER]
    for number in range(4):
        calls = (await ask(session, messages, tools=[calculator]))["tool_calls"]
        result = {"role": "tool", "tool_call_id": calls[0]["id"], "content": "7"}
        messages.append(result if number else user("more"))
    trajectories = await session.close()
    assert [t.reason for t in trajectories] == [SplitReason.START, SplitReason.TEMPLATE, SplitReason.TEMPLATE]
    assert int(trajectories[0].loss_mask.sum()) == 2 * int(trajectories[1].loss_mask.sum())
    assert "result 2" in s.template.decode(trajectories[2].tokens)


async def test_a_malformed_call_is_seen_and_stays_trained(setup: MakeSetup, ask: Ask, calculator: Any) -> None:
    bad = "<tool_call>\n{'name': 'calc'}\n</tool_call><|im_end|>"
    s = setup([bad])
    session = s.open()
    answer = await ask(session, [USER], tools=[calculator])
    assert "tool_calls" not in answer
    assert answer["content"] == bad.removesuffix("<|im_end|>")
    assert answer["tool_call_errors"][0]["error"].startswith("not valid JSON")
    assert session.metrics["malformed_tool_calls"] == 1
    assert said(s.template, (await session.close())[0]) == [bad]


async def test_without_tools_or_with_choice_none_calls_are_text(setup: MakeSetup, ask: Ask, calculator: Any) -> None:
    call = '<tool_call>\n{"name": "calc", "arguments": {}}\n</tool_call>'
    session = setup([call + "<|im_end|>"]).open()
    for settings in ({}, {"tools": [calculator], "tool_choice": "none"}):
        assert (await ask(session, [USER], **settings))["content"] == call


async def test_budgets(setup: MakeSetup, ask: Ask) -> None:
    s = setup(["abcdef"])
    session = s.open(max_tokens=8)
    messages = [USER]
    reply = await session.chat.completions.create(model="m", messages=messages, max_tokens=5)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 5
    messages += [reply.choices[0].message, user("more")]
    await ask(session, messages)
    assert [r.sampling.max_tokens for r in s.engine.requests] == [5, 3]
    with pytest.raises(LimitReached, match="8 sampled tokens are used up"):
        await ask(session, [*messages, user("more")])
    assert isinstance(session.failure, LimitReached)
    small = setup(["abcdef"], None, EndpointOptions(context_length=30)).open()
    with pytest.raises(LimitReached, match="the model's context 30"):
        await ask(small, [user("x" * 40)])


async def test_deadlines(setup: MakeSetup, ask: Ask) -> None:
    now = asyncio.get_running_loop().time()
    s = setup(delay=600.0)
    with pytest.raises(LimitReached, match="time is up"):
        await ask(s.open(deadline=now + 0.05), [USER])
    with pytest.raises(LimitReached, match="time is up"):
        await ask(s.open(deadline=now), [USER])
    with pytest.raises(DeadlineExceeded):
        await ask(s.open(), [USER], timeout=0.05)
    assert s.engine.running == 0


async def test_a_closed_session_refuses(setup: MakeSetup, ask: Ask) -> None:
    session = setup().open()
    await session.close()
    with pytest.raises(ContractError, match="is closed"):
        await ask(session, [USER])
