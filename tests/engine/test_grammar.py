"""Grammars and likeliest tokens: on SGLang the first are its own, the embedded engine refuses them by name."""

from __future__ import annotations

import asyncio
import json
import re

import numpy as np
import pytest

from agentrl.engine.client import EngineClient
from agentrl.engine.types import Completion, Grammar, GrammarRefused
from agentrl.testing.tiny import tiny_tokenizer
from agentrl.types import Int32Array
from tests.engine import oracle
from tests.engine.conftest import Models
from tests.engine.kit import request

PROMPT = [5, 60, 7, 33, 21]
SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"n": {"type": "integer"}, "kind": {"enum": ["x", "y"]}},
        "required": ["n", "kind"],
        "additionalProperties": False,
    }
)
ENDS = (256, 257, 258)  # with what a grammar ends a text; the model's files name no end token
embedded_only = pytest.mark.parametrize("server", ["embedded"], indirect=True)
sglang_only = pytest.mark.parametrize("server", [pytest.param("sglang", marks=pytest.mark.sglang)], indirect=True)


def _text(tokens: Int32Array) -> str:
    return str(tiny_tokenizer().decode(tokens.tolist(), skip_special_tokens=True))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_the_likeliest_tokens_are_those_of_a_fresh_forward_pass(
    client: EngineClient, models: Models, temperature: float
) -> None:
    seen: list[Completion] = []
    done = await client.generate(
        request("top", PROMPT, max_tokens=12, temperature=temperature, top_logprobs=5), seen.append
    )
    table = oracle.logprobs(models.folders[0], [*PROMPT, *done.tokens.tolist()], temperature)
    expected = -np.sort(-table[len(PROMPT) - 1 : -1], axis=1)[:, :5]
    assert done.top is not None
    assert done.top.tokens.shape == (12, 5)
    assert np.abs(done.top.logprobs - expected).max() < 1e-4
    named = np.take_along_axis(table[len(PROMPT) - 1 : -1], done.top.tokens.astype(np.int64), 1)
    assert np.abs(named - expected).max() < 1e-4
    assert all(part.top is not None and len(part.top.tokens) == len(part.tokens) for part in seen)


async def test_the_likeliest_tokens_of_an_interrupted_request(client: EngineClient, models: Models) -> None:
    task = asyncio.create_task(client.generate(request("cut", PROMPT, max_tokens=200, top_logprobs=2)))
    await client.generate(request("probe", PROMPT, max_tokens=12))
    await client.abort("cut")
    await client.generate(request("probe2", PROMPT, max_tokens=12))
    await client.pause()
    await client.update_from_disk(models.folders[1], models.next_version())
    await client.resume()
    done = await task
    assert done.top is not None
    assert done.top.tokens.shape == (200, 2)
    best = np.argmax(done.top.logprobs == done.logprobs[:, None], axis=1)
    taken = np.take_along_axis(done.top.tokens, best[:, None], 1)[:, 0] == done.tokens
    assert taken.mean() > 0.2  # a sharp model often takes one of the two likeliest


@embedded_only
async def test_the_embedded_engine_refuses_grammars_by_name(client: EngineClient) -> None:
    for kind, text in (("json_schema", SCHEMA), ("regex", "[0-9]+"), ("ebnf", 'root ::= "yes"')):
        with pytest.raises(GrammarRefused, match=f"{kind}.*no grammars.*engine.kind = 'sglang'"):
            await client.generate(request(kind, PROMPT, grammar=Grammar(kind, text)))  # type: ignore[arg-type]
    assert len((await client.generate(request("still", PROMPT))).tokens) == 8


@sglang_only
async def test_grammars_hold(client: EngineClient) -> None:
    schema = await client.generate(
        request("j", PROMPT, max_tokens=400, grammar=Grammar("json_schema", SCHEMA), stop_token_ids=ENDS)
    )
    value = json.loads(_text(schema.tokens))
    assert isinstance(value["n"], int)
    assert value["kind"] in ("x", "y")
    found = await client.generate(
        request("r", PROMPT, max_tokens=30, grammar=Grammar("regex", "[0-9]{3}-[a-c]{2}"), stop_token_ids=ENDS)
    )
    assert re.fullmatch("[0-9]{3}-[a-c]{2}", _text(found.tokens))
    found = await client.generate(
        request("e", PROMPT, grammar=Grammar("ebnf", 'root ::= "yes" | "no"'), stop_token_ids=ENDS)
    )
    assert _text(found.tokens) in ("yes", "no")


@sglang_only
async def test_a_grammar_holds_across_updates_and_aborts(client: EngineClient, models: Models) -> None:
    digits = Grammar("regex", "[0-9]+")
    tasks = [
        asyncio.create_task(
            client.generate(request(f"d{i}", PROMPT, max_tokens=200, grammar=digits, stop_token_ids=ENDS))
        )
        for i in range(4)
    ]
    for i in (1, 2):
        await client.generate(request(f"probe{i}", PROMPT, max_tokens=12))
        await client.pause()
        await client.update_from_disk(models.folders[i], models.next_version())
        await client.resume()
    await client.abort("d0")
    for done in await asyncio.gather(*tasks):
        assert len(done.tokens) == 200 or done.finish == "stop"
        assert re.fullmatch("[0-9]+", _text(done.tokens))


@sglang_only
async def test_a_grammar_that_cannot_be_compiled_is_refused(client: EngineClient) -> None:
    with pytest.raises(GrammarRefused, match="nonsense"):
        await client.generate(request("bad", PROMPT, grammar=Grammar("json_schema", '{"type": "nonsense"}')))
    assert len((await client.generate(request("good", PROMPT))).tokens) == 8
