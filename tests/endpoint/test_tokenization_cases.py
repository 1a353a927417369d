"""The public tokenization failures, each on the path that an episode takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, processors

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.reply import before_stop
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.types import Completion, GenerateRequest, OnTokens, Span
from agentrl.errors import EngineError
from agentrl.testing.tiny import tiny_tokenizer
from agentrl.types import Context, Sampled, Segment, Trajectory, Version

Cases = dict[str, Any]
V0 = Version(1, 0)


class Says:
    """Samples the given token ids, in turn."""

    def __init__(self, *turns: list[int]) -> None:
        self.turns = list(turns)
        self.sent: list[list[int]] = []

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> Completion:
        self.sent.append(request.tokens.tolist())
        tokens = np.array(self.turns.pop(0), np.int32)
        logprobs = np.linspace(-0.9, -0.1, tokens.size, dtype=np.float32)
        return Completion(tokens, logprobs, (Span(V0, 0, tokens.size),), "stop", int(tokens[-1]))


def play(template: ChatTemplate, history: list[Any], said: list[str], then: list[list[Any]]) -> tuple[Trajectory, ...]:
    """Say each text after the history and then after each list of new messages."""

    async def run() -> tuple[Trajectory, ...]:
        engine = Says(*[template.encode_text(text).tolist() for text in said])
        session = Endpoint(engine, template).open("s", seed=0)
        messages = list(history)
        for new in [*then, []]:
            reply = await session.chat.completions.create(model="m", messages=messages)
            messages += [reply.choices[0].message.model_dump(exclude_none=True), *new]
        return await session.close()

    return asyncio.run(run())


def masked(template: ChatTemplate, trajectory: Trajectory, value: bool) -> str:
    return template.decode(trajectory.tokens[trajectory.loss_mask == value])


def sampled_texts(template: ChatTemplate, trajectory: Trajectory) -> list[str]:
    return [template.decode(s.tokens) for s in trajectory.segments if isinstance(s.source, Sampled)]


def test_case(token_case: Cases, chatml: Callable[[str], ChatTemplate]) -> None:
    check = CHECKS[token_case["id"]]
    source = token_case["input"].get("template")
    check(token_case["input"], token_case["expected"], None if source is None else chatml(source))


def reasoning_stays(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    user, assistant = given["history"]
    rerender = template.unmarked(template.text([user, assistant, *given["next"]], generation=True))
    stream = template.unmarked(template.text([user], generation=True)) + given["sampled_turn_text"]
    assert rerender.startswith(stream) is expected["rerender_is_extension_of_turn1_stream"]
    (trajectory,) = play(template, [user], [given["sampled_turn_text"], "a2<|im_end|>"], [given["next"]])
    assert expected["training_stream_must_contain"] in masked(template, trajectory, True)
    assert sampled_texts(template, trajectory) == [given["sampled_turn_text"], "a2<|im_end|>"]


def opened_by_the_prompt(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    naive = [*given["history"], {"role": "assistant", "content": given["completion_text"]}]
    assert expected["naive_rerender_contains"] in template.text(naive, generation=False)
    (trajectory,) = play(template, given["history"], [given["completion_text"] + "<|im_end|>"], [])
    assert template.decode(trajectory.tokens) == expected["correct_stream"]
    assert masked(template, trajectory, False) == expected["mask_zero_prefix"]


def ids_stay(given: Cases, expected: Cases, _: None) -> None:
    vocabulary = {text: int(i) for i, text in given["toy_vocab"].items()}
    tokenizer = Tokenizer(models.WordLevel({**vocabulary, "?": 7, "<e>": 0}, unk_token="?"))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<e>", special=True)])
    source = "{% for m in messages %}{{ m.content }}<e>{% endfor %}"
    template = ChatTemplate(tokenizer, source, specials={"eos_token": "<e>"}, context_length=100)
    engine = Says(given["sampled_ids"])
    assert template.decode(given["sampled_ids"]) == expected["decoded"]

    async def run() -> tuple[Trajectory, ...]:
        session = Endpoint(engine, template).open("s")
        await session.chat.completions.create(model="m", messages=[{"role": "user", "content": "all"}])
        return await session.close()

    (trajectory,) = asyncio.run(run())
    assert trajectory.tokens[trajectory.loss_mask].tolist() == expected["stored_ids"]


def line_break_is_context(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    (trajectory,) = play(template, given["history"], [given["sampled_turn_text"], "<|im_end|>"], [given["next"]])
    assert template.decode(trajectory.tokens[:-1]) == expected["full_stream"]
    assert sampled_texts(template, trajectory)[0] == expected["mask_one_span"]
    assert masked(template, trajectory, False).count("\n") == expected["full_stream"].count("\n")


def end_mark_is_trained(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    (trajectory,) = play(template, given["history"], [given["sampled_turn_text"]], [])
    assert masked(template, trajectory, True) == expected["mask_one_span"]
    assert expected["mask_zero"][0] in masked(template, trajectory, False)


def one_begin_mark(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[BOS]", special=True)])
    bos = tokenizer.token_to_id("[BOS]")
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A", special_tokens=[("[BOS]", bos)])
    assert tokenizer.encode("x").ids[0] == bos
    tokens = ChatTemplate(tokenizer, given["template"]).encode(given["history"], generation=True)
    assert tokens.tolist().count(bos) == expected["bos_count"]


def no_default_system_inside(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    naive = template.text(given["next"], generation=True)
    assert expected["naive_increment_contains"] in naive
    (trajectory,) = play(template, given["history"], [given["sampled_turn_text"], "a2<|im_end|>"], [given["next"]])
    assert template.decode(trajectory.segments[2].tokens) == expected["correct_increment"]
    assert expected["naive_increment_contains"] not in template.decode(trajectory.tokens)


def arguments_are_objects(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    text = template.text(given["messages"], generation=True)
    assert expected["correct_render_contains"] in text
    assert expected["naive_render_contains"] not in text


def calls_stay_as_written(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    history = [{"role": "user", "content": "w?"}]
    result = [{"role": "tool", "content": "7", "tool_call_id": "call00000"}]
    (trajectory,) = play(template, history, [given["sampled_turn_text"], "ok<|im_end|>"], [result])
    assert expected["training_stream_must_contain"] in masked(template, trajectory, True)


def last_occurrence(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    (trajectory,) = play(template, given["history"], [given["sampled_turn_text"]], [])
    assert masked(template, trajectory, True) == expected["mask_sum_tokens_of"]
    assert trajectory.loss_mask[-1]


def unequal_lengths_are_refused(given: Cases, expected: Cases, template: None) -> None:
    output = given["engine_output"]
    with pytest.raises(EngineError, match="2 tokens but 3 log-probs"):
        Completion(np.array(output["output_ids"]), np.array(output["logprobs"]), (Span(V0, 0, 2),), "stop", 9)


def missing_logprobs_are_refused(given: Cases, expected: Cases, template: None) -> None:
    with pytest.raises(ValueError, match=expected["reason"]):
        Segment(np.array(given["engine_output"]["output_ids"]), None, Sampled(V0))


def lengths_count(given: Cases, expected: Cases, template: None) -> None:
    for row, mask in zip(given["rows"], expected["loss_mask"], strict=True):
        segment = Segment(np.array(row), np.full(len(row), -0.5), Sampled(V0))
        assert Trajectory((segment,)).loss_mask.tolist() == [bool(x) for x in mask[: len(row)]]


def all_lengths_equal(given: Cases, expected: Cases, template: None) -> None:
    trajectory = Trajectory(
        tuple(
            Segment(np.ones(n), np.full(n, -0.5), Sampled(V0))
            if role == "assistant"
            else Segment(np.ones(n), None, Context())
            for n, role in zip(given["turn_lens"], given["roles"], strict=True)
        )
    )
    arrays = (trajectory.tokens, trajectory.loss_mask, trajectory.logprobs, trajectory.versions)
    assert {len(a) for a in arrays} == {given["ids_len"]}


def never_none(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    text = template.text(given["messages"], generation=True)
    assert expected["render_contains"] in text
    assert expected["never_contains"] not in text


def raw_prompts_have_one_begin_mark(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.add_special_tokens([AddedToken("[BOS]", special=True)])
    bos = tokenizer.token_to_id("[BOS]")
    ends = [("[BOS]", bos), ("<|im_end|>", tokenizer.token_to_id("<|im_end|>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="[BOS] $A <|im_end|>", special_tokens=ends)
    made = ChatTemplate(tokenizer, given["template"])
    for prompt in given["prompts"]:
        tokens = made.encode_raw(prompt, bos=True).tolist()
        assert (tokens[0], tokens.count(bos)) == (bos, expected["bos_count"])
        assert tokens[1:] == made.encode_raw(prompt.removeprefix("[BOS]"), bos=False).tolist()


def halves_are_replaced(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": "\udc00"}}]
    for arguments in given["arguments"]:
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages: list[Any] = [{"role": "user", "content": "q"}]
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        text = template.decode(template.encode(messages, tools, generation=True))
        assert text.count(expected["half"]) == 2


def nothing_after_the_stop(given: Cases, expected: Cases, _: None) -> None:
    tokens, logprobs = np.zeros(1, np.int32), np.zeros(1, np.float32)
    texts = []
    for text, matched, stops in given["answers"]:
        ended = Completion(tokens, logprobs, (Span(V0, 0, 1),), "stop", matched or 0)
        texts.append(before_stop(text, ended, stops))
    assert texts == expected["texts"]


def bytes_of_split_characters(given: Cases, expected: Cases, _: None) -> None:
    template = ChatTemplate(tiny_tokenizer(), "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    pieces = [template.piece(i) for i in template.encode_raw(given["text"], bos=False).tolist()]
    assert any("\ufffd" in text for text, _ in pieces)
    assert (b"".join(raw for _, raw in pieces).decode() == given["text"]) is expected["joined_bytes_are_the_text"]
    fallback = Tokenizer(models.WordLevel({"<0xC3>": 0, "<0xA9>": 1, "\u2581the": 2, "?": 3}, unk_token="?"))
    fallback.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    named = ChatTemplate(fallback, "{{ messages[0].content }}")
    assert [named.piece(i) for i in range(3)] == [("\ufffd", b"\xc3"), ("\ufffd", b"\xa9"), (" the", b" the")]


def reasoning_has_two_names(given: Cases, expected: Cases, template: ChatTemplate) -> None:
    assert {template.text([message], generation=False) for message in given["messages"]} == {expected["text"]}


CHECKS: dict[str, Callable[[Cases, Cases, Any], None]] = {
    "C01": reasoning_stays,
    "C03": opened_by_the_prompt,
    "C04": ids_stay,
    "C06": line_break_is_context,
    "C07": end_mark_is_trained,
    "C10": one_begin_mark,
    "C12": no_default_system_inside,
    "C14": arguments_are_objects,
    "C15": calls_stay_as_written,
    "C17": lengths_count,
    "C18": all_lengths_equal,
    "C20": last_occurrence,
    "C21": unequal_lengths_are_refused,
    "C23": missing_logprobs_are_refused,
    "C24": never_none,
    "C25": raw_prompts_have_one_begin_mark,
    "C26": halves_are_replaced,
    "C27": nothing_after_the_stop,
    "C28": bytes_of_split_characters,
    "C29": reasoning_has_two_names,
}
