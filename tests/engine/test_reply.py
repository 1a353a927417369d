"""Replies are checked on arrival: what does not agree is refused, never trimmed to fit."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.reply import Progress, parse_part, start
from agentrl.engine.types import GenerateRequest, Span
from agentrl.errors import EngineError, RequestRefused
from agentrl.types import Version
from tests.engine.kit import request

V7, V8 = Version(0, 7), Version(0, 8)
CASES = Path(__file__).resolve().parents[1] / "cases" / "engine_interrupt.jsonl"


def _case(name: str) -> dict[str, Any]:
    cases: list[dict[str, Any]] = [json.loads(line) for line in CASES.read_text().splitlines()]
    return next(c for c in cases if c["id"] == name)


def _reply(
    ids: list[int], logprobs: list[Any] | None, *, finish: dict[str, Any] | None = None, **meta: Any
) -> dict[str, Any]:
    base = {"finish_reason": finish or {"type": "length"}, "output_token_logprobs": logprobs, "weight_version": "0.7"}
    return {"output_ids": ids, "meta_info": {**base, **meta}}


def test_spans_come_from_the_engine() -> None:
    case = _case("D02")
    spans = [{**s, "version": f"0.{s['version']}"} for s in case["input"]["meta"]["weight_versions"]]
    ids = case["input"]["output_ids"]
    part = parse_part(_reply(ids, [-0.5] * len(ids), weight_versions=spans), 100, None)
    versions = [s.version.number for s in part.spans for _ in range(s.start, s.end)]
    assert versions == case["expected"]["token_versions"]
    for bad in case["expected"]["bad_spans_refused"]:
        named = [{"version": "0.7", **span} for span in bad]
        with pytest.raises(EngineError, match="spans"):
            parse_part(_reply(ids, [-0.5] * len(ids), weight_versions=named), 100, V7)


@pytest.mark.parametrize(
    "spans",
    [
        [(1, 3)],
        [(0, 2)],
        [(0, 2), (1, 3)],
        [(0, 4)],
    ],
)
def test_spans_must_tile(spans: list[tuple[int, int]]) -> None:
    named = [{"version": "0.7", "start": a, "end": b} for a, b in spans]
    with pytest.raises(EngineError, match="spans"):
        parse_part(_reply([1, 2, 3], [-0.5] * 3, weight_versions=named), 100, V7)


def test_a_version_that_is_not_ours_is_refused() -> None:
    named = [{"version": "default", "start": 0, "end": 1}]
    with pytest.raises(EngineError, match="default"):
        parse_part(_reply([1], [-0.5], weight_versions=named), 100, V7)


def test_without_spans_the_version_pinned_before_sending_counts() -> None:
    assert parse_part(_reply([1, 2], [-0.5, -0.5]), 100, V7).spans == (Span(V7, 0, 2),)
    case = _case("D01")["expected"]["token_versions"]
    late = parse_part(_reply([1] * 6, [-0.5] * 6, weight_version="0.4"), 100, Version(0, case[0]))
    assert [s.version.number for s in late.spans for _ in range(s.start, s.end)] == case
    with pytest.raises(EngineError, match="while the weights changed"):
        parse_part(_reply([1, 2], [-0.5, -0.5]), 100, None)
    with pytest.raises(EngineError, match="while the weights changed"):
        parse_part(_reply([1, 2], [-0.5, -0.5]), 100, V8)


def test_a_dropped_stop_id_is_restored() -> None:
    part = parse_part(_reply([11, 12], [-0.1, -0.2, -0.05], finish={"type": "stop", "matched": 9}), 100, V7)
    assert (part.tokens, part.logprobs) == ([11, 12, 9], [-0.1, -0.2, -0.05])
    entries = [[-0.1, 11, None], [-0.2, 12, None], [-0.05, 9, None]]
    assert parse_part(_reply([11, 12], entries, finish={"type": "stop", "matched": 9}), 100, V7).tokens == [11, 12, 9]


@pytest.mark.parametrize(
    ("logprobs", "finish"),
    [
        ([-0.1, -0.2, -0.05], {"type": "length"}),
        ([-0.1, -0.2, -0.05], {"type": "stop", "matched": "word"}),
        ([[-0.1, 11, None], [-0.2, 12, None], [-0.05, 8, None]], {"type": "stop", "matched": 9}),
        ([-0.1, -0.2, -0.3, -0.4], {"type": "stop", "matched": 9}),
        ([-0.1], {"type": "length"}),
        ([[-0.1, 11, None], [-0.2, 13, None]], {"type": "length"}),
    ],
)
def test_ids_and_logprobs_that_disagree_are_refused(logprobs: list[Any], finish: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="log-prob"):
        parse_part(_reply([11, 12], logprobs, finish=finish), 100, V7)


@pytest.mark.parametrize(
    "logprobs", [None, [], [-0.1, None], [[-0.1, 11, None], [None, 12, None]], [-0.1, float("nan")]]
)
def test_missing_logprobs_are_refused(logprobs: list[Any] | None) -> None:
    with pytest.raises(EngineError, match=r"missing_logprobs|log-probs"):
        parse_part(_reply([11, 12], logprobs), 100, V7)


@pytest.mark.parametrize("logprobs", [[-0.1, [-0.2, 12, None]], [[-0.1, 11, None], -0.2], [[], []], ["x", "y"]])
def test_logprobs_in_an_unknown_form_are_refused(logprobs: list[Any]) -> None:
    with pytest.raises(EngineError, match="log-prob"):
        parse_part(_reply([11, 12], logprobs), 100, V7)


def test_ids_that_are_no_whole_numbers_are_refused() -> None:
    with pytest.raises(EngineError, match="whole numbers"):
        parse_part(_reply([1, 2.5], [-0.5, -0.5]), 100, V7)  # type: ignore[list-item]


TOPS = [[[-0.1, 1, None], [-0.9, 2, None]], [[-0.2, 3, None], [-0.8, 1, None]]]


def test_likeliest_tokens_come_with_every_token_or_the_reply_is_refused() -> None:
    part = parse_part(_reply([1, 2], [-0.5, -0.5], output_top_logprobs=TOPS), 100, V7, 2)
    assert part.top == [[(-0.1, 1), (-0.9, 2)], [(-0.2, 3), (-0.8, 1)]]
    assert parse_part(_reply([1, 2], [-0.5, -0.5], output_top_logprobs=TOPS), 100, V7).top == []
    for bad in (TOPS[:1], None, [TOPS[0], TOPS[1][:1]], [None, TOPS[1]]):
        with pytest.raises(EngineError, match="likeliest"):
            parse_part(_reply([1, 2], [-0.5, -0.5], output_top_logprobs=bad), 100, V7, 2)


@pytest.mark.parametrize("ids", [[100], [5, -1]])
def test_ids_outside_the_vocabulary_are_refused(ids: list[int]) -> None:
    with pytest.raises(EngineError, match="vocabulary"):
        parse_part(_reply(ids, [-0.5] * len(ids)), 100, V7)


def test_an_unknown_finish_reason_is_refused() -> None:
    with pytest.raises(EngineError, match="finish reason"):
        parse_part(_reply([1], [-0.5], finish={"type": "tired"}), 100, V7)


JUNK: list[Any] = [None, 0, -1, 1.5, "x", "", [], {}, [1], {"a": 1}, True, math.nan, 1 << 70, [[]], [None], "1.0"]


def _places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in pairs:
        yield (*at, key)
        yield from _places(item, (*at, key))


def test_a_reply_with_junk_anywhere_is_a_whole_part_or_an_engine_fault() -> None:
    spans = [{"version": "0.7", "start": 0, "end": 2}, {"version": "0.8", "start": 2, "end": 3}]
    rows = [[-0.5, i, None] for i in (1, 2, 3)]
    finish = {"type": "stop", "matched": 3, "status_code": None, "message": "m"}
    good = _reply([1, 2, 3], rows, finish=finish, weight_versions=spans, output_top_logprobs=[[row] for row in rows])
    refused = 0
    for *way, last in list(_places(good)):
        for junk in JUNK:
            reply = copy.deepcopy(good)
            holder: Any = reply
            for key in way:
                holder = holder[key]
            holder[last] = junk
            try:
                part = parse_part(reply, 100, V7, 1)
            except EngineError:
                refused += 1
                continue
            assert len(part.tokens) == len(part.logprobs) == len(part.top)
            assert [s.start for s in part.spans] == [0, *(s.end for s in part.spans)][: len(part.spans)]
            assert all(type(token) is int and 0 <= token < 100 for token in part.tokens)
            assert type(part.status) in (int, type(None))
            assert type(part.matched) in (int, str, type(None))
    assert refused > 300


async def test_a_resume_asks_for_what_is_left() -> None:
    case = _case("D06")
    given = case["input"]
    progress = start(
        request("r", [1] * given["prompt_len"], max_tokens=given["max_new_tokens"]), 100, given["context_len"], None
    )
    n = given["already_generated"]
    progress.keep(parse_part(_reply([3] * n, [-0.5] * n, finish={"type": "abort"}), 100, V7))
    assert progress.left == case["expected"]["resume_max_new_tokens"]
    assert progress.prompt.size == case["expected"]["resume_prompt_len"]


async def test_an_abort_beyond_the_budget_asks_for_nothing_more() -> None:
    progress = start(request("r", max_tokens=2), 100, None, None)
    progress.keep(parse_part(_reply([3] * 3, [-0.5] * 3, finish={"type": "abort"}), 100, V7))
    done = progress.ended()
    assert done is not None
    assert (done.finish, done.tokens.tolist()) == ("length", [3, 3, 3])


def _progress(made: GenerateRequest) -> Progress:
    return start(made, 256, None, lambda ids: bytes(ids).decode())


def _text(text: str, version: str = "0.7", finish: str = "abort") -> dict[str, Any]:
    spans = [{"version": version, "start": 0, "end": len(text)}]
    return _reply(list(text.encode()), [-0.5] * len(text), finish={"type": finish}, weight_versions=spans)


async def test_a_stop_string_across_the_seam_still_stops() -> None:
    progress = _progress(request("r", stop=("STOP",), max_tokens=50))
    progress.keep(parse_part(_text("one ST"), 256, None))
    stop = progress.add(parse_part(_text("OP two", "0.8", "length"), 256, None))
    done = progress.completion("stop", stop)
    assert stop == "STOP"
    assert bytes(done.tokens.tolist()).decode() == "one STOP"
    assert done.spans == (Span(V7, 0, 6), Span(V8, 6, 8))


async def test_a_stop_string_that_an_abort_completes_still_stops() -> None:
    progress = _progress(request("r", stop=("STOP", "."), max_tokens=50))
    progress.keep(parse_part(_text("one ST"), 256, None))
    assert progress.ended() is None
    progress.keep(parse_part(_text("OP", "0.8"), 256, None))
    done = progress.ended()
    assert done is not None
    assert (bytes(done.tokens.tolist()).decode(), done.finish, done.matched) == ("one STOP", "stop", "STOP")
    assert done.spans == (Span(V7, 0, 6), Span(V8, 6, 8))


@pytest.mark.parametrize("seam", [1, 2, 3, 4])
async def test_a_stop_string_of_one_character_in_four_tokens_is_seen_across_a_seam(seam: int) -> None:
    said = list("a🏴".encode())
    for more, finish in ((b"bc", "length"), (b"", "abort")):
        progress = start(
            request("r", stop=("🏴",), max_tokens=50), 256, None, lambda i: bytes(i).decode(errors="ignore")
        )
        rows = [_reply(ids, [-0.5] * len(ids), finish={"type": "abort"}) for ids in (said[:seam], said[seam:])]
        progress.keep(parse_part(rows[0], 256, V7))
        if finish == "length":
            rest = said[seam:] + list(more)
            assert progress.add(parse_part(_reply(rest, [-0.5] * len(rest)), 256, V7)) == "🏴"
        else:
            progress.keep(parse_part(rows[1], 256, V7))
            ended = progress.ended()
            assert ended is not None
            assert ended.matched == "🏴"
        assert progress.tokens == said


async def test_what_cannot_be_continued_starts_again() -> None:
    part = parse_part(_text("one"), 256, None)
    plain = start(request("r", stop=("x",)), 256, None, None)
    plain.keep(part)
    assert plain.tokens == []  # without a decoder a stop string across the seam would be missed
    counted = _progress(request("r", frequency_penalty=0.5))
    counted.keep(part)
    assert counted.tokens == []
    free = _progress(request("r"))
    free.keep(part)
    assert free.tokens == list(b"one")


async def test_requests_are_checked_before_they_are_sent() -> None:
    with pytest.raises(RequestRefused, match="vocabulary"):
        start(request("r", [5, 100]), 100, None, None)
    with pytest.raises(RequestRefused, match="10 tokens and the context holds 10"):
        start(request("r", [5] * 10), 100, 10, None)
    with pytest.raises(RequestRefused, match="max_tokens"):
        start(request("r", max_tokens=0), 100, None, None)
