"""Tokenizers in which blanks depend on what stands before: end tokens that swallow them, a blank before every text."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.testing.tiny import tiny_tokenizer

# Phi-3's template.
SOURCE = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
USER = {"role": "user", "content": "q  "}
ANSWER = {"role": "assistant", "content": "ans"}
MORE = {"role": "user", "content": " more "}


def _swallows(*, left: bool, right: bool) -> Tokenizer:
    tokenizer = tiny_tokenizer()
    _add(tokenizer, left=left, right=right)
    return tokenizer


def _sentences(scheme: str) -> Tokenizer:
    letters = ["<unk>", "\u2581", "\n", *map(chr, range(33, 127))]
    tokenizer = Tokenizer(models.Unigram([(letter, -1.0) for letter in letters], unk_id=0))
    if scheme == "legacy":
        blanks = [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
        tokenizer.normalizer = normalizers.Sequence(blanks)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace()
    _add(tokenizer)
    return tokenizer


def _add(tokenizer: Tokenizer, *, left: bool = False, right: bool = False) -> None:
    names = ("<|end|>", "<|user|>", "<|assistant|>")
    tokenizer.add_special_tokens([AddedToken(name, special=True, lstrip=left, rstrip=right) for name in names])


TOKENIZERS: dict[str, Callable[[], Tokenizer]] = {
    "right": partial(_swallows, left=False, right=True),
    "left": partial(_swallows, left=True, right=False),
    "both": partial(_swallows, left=True, right=True),
    **{scheme: partial(_sentences, scheme) for scheme in ("first", "always", "never", "legacy")},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_a_conversation_goes_on_as_it_is_encoded_whole(name: str) -> None:
    template = ChatTemplate(TOKENIZERS[name](), SOURCE, specials={"eos_token": "<|end|>"}, context_length=1000)
    renderer = Renderer(template)
    renderer.require_proof()
    setting, end = renderer.setting(), renderer.end_id
    whole = template.encode([USER, ANSWER, MORE], generation=True)
    begun = renderer.start([USER], setting).tokens
    assert np.array_equal(whole[: begun.size], begun)
    for ended_by, shown_end in ((end, 0), (5, 1)):
        new = renderer.extend(ANSWER, [MORE], setting, ended_by=ended_by).tokens
        assert np.array_equal(whole[whole.size - new.size :], new)
        assert whole[whole.size - new.size - 1 + shown_end] == end
    shown = renderer.demonstrate([USER, ANSWER, MORE, ANSWER], setting).tokens
    assert np.array_equal(template.encode([USER, ANSWER, MORE, ANSWER], generation=False)[: shown.size], shown)
