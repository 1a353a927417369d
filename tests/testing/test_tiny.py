"""The tiny model: a folder that real libraries load, with a tokenizer that loses nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from agentrl.testing.tiny import Family, make_tiny_model, tiny_tokenizer
from agentrl.types import Message

CALL = {"function": {"name": "calc", "arguments": '{"expression": "12 + 30"}'}}
CHAT: list[Message] = [
    {"role": "user", "content": "12 + 30"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "42", "tool_call_id": "a"},
    {"role": "assistant", "content": "42"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def _render(folder: Path, chat: Sequence[Message], **extra: object) -> str:
    text: str = jinja2.Template((folder / "chat_template.jinja").read_text()).render(messages=chat, **extra)
    return text


@given(st.text())
def test_any_text_survives_encode_and_decode(text: str) -> None:
    tokenizer = tiny_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_chat_in_hermes_form_is_short(folder: Path) -> None:
    text = _render(folder, CHAT)
    assert text == (
        "<|im_start|>user\n12 + 30<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "calc", "arguments": {"expression": "12 + 30"}}\n</tool_call>'
        "<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n42<|im_end|>\n"
    )
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    # Digits, blanks and new lines are tokens of their own; the format is not spelled out.
    assert len(ids) == 38
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_results_of_parallel_calls_share_one_user_block(folder: Path) -> None:
    results = [{"role": "tool", "content": c, "tool_call_id": c} for c in "ab"]
    assert _render(folder, results, add_generation_prompt=True) == (
        "<|im_start|>user\n<tool_response>\na\n</tool_response>\n<tool_response>\nb\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


def test_tools_are_described_on_request(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "calc"}}]
    folder = make_tiny_model(tmp_path, describe_tools=True)
    assert '<tools>\n{"function": {"name": "calc"}' in _render(folder, CHAT, tools=tools)
    assert "<tools>" not in _render(folder, CHAT)


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    same = [load_file(make_tiny_model(tmp_path / str(i), seed=7) / "model.safetensors") for i in range(2)]
    other = load_file(make_tiny_model(tmp_path / "other", seed=8) / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (same[0][name] == same[1][name]).all()
    assert not (same[0][name] == other[name]).any()


def test_impossible_heads_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="heads=5 must divide hidden=64"):
        make_tiny_model(tmp_path, heads=5)


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("tie", [True, False])
def test_transformers_takes_every_tensor(tmp_path: Path, family: Family, tie: bool) -> None:
    transformers = pytest.importorskip("transformers")
    folder = make_tiny_model(tmp_path, family=family, tie=tie, kv_heads=2)
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert model.config.architectures == [type(model).__name__]
    fast = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    assert len(fast) == model.config.vocab_size == model.get_input_embeddings().weight.shape[0]
    assert fast.apply_chat_template(CHAT, tokenize=False) == _render(folder, CHAT)
