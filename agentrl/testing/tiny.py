"""A tiny random language model as a Hugging Face folder, made in milliseconds and without torch.

`transformers` loads the folder, SGLang and the embedded engine serve it, the trainer trains it. Its tokenizer is one
token a byte, so any text survives encode and decode exactly and nothing is unknown; the fixed strings of the chat and
tool format are single tokens, so sequences are short and a model of 100k parameters learns multi-turn tasks in seconds.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from agentrl.types import Float32Array

Family = Literal["llama", "qwen2", "qwen3"]

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, START, END)
FORMAT = (
    "system",
    "user",
    "assistant",
    "<tool_call>\n",
    "\n</tool_call>",
    '{"name": "',
    '", "arguments": {',
    "<tool_response>\n",
    "\n</tool_response>",
    "<think>\n",
    "\n</think>",
)
CALCULATOR = (
    '<tool_call>\n{"name": "calc", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "wrong, try again",
    "State the final answer to the following arithmetic problem: ",
    " =",
    " + ",
    " - ",
)
"""What the calculator environment says over and over; other environments pass their own `fixed`."""

DEVIATION = 0.05
"""Of the random weights. With Hugging Face's 0.02 a model this narrow takes twice as long to learn to copy."""

_ARCHITECTURES: dict[Family, str] = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# ChatML with calls and results in the Hermes form that Qwen uses. `$TOOLS` is where tools may be described.
_TEMPLATE = """\
$TOOLS{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content %}{{- message.content }}{%- endif %}
{%- for call in message.tool_calls or [] %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{%- set function = call.function or call %}
{{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
{%- if function.arguments is string %}{{- function.arguments }}{%- else %}{{- function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

_TOOLS = """\
{%- if tools %}
{{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
"""


@dataclass(frozen=True, slots=True)
class _Shape:
    family: Family
    vocab: int
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    intermediate: int
    tie: bool

    @property
    def head(self) -> int:
        return self.hidden // self.heads


def make_tiny_model(
    folder: str | Path,
    *,
    fixed: Sequence[str] = CALCULATOR,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 4,
    intermediate: int = 128,
    max_length: int = 1024,
    seed: int = 0,
    family: Family = "llama",
    tie: bool = True,
    describe_tools: bool = False,
) -> Path:
    """Write a random model with tokenizer and chat template to `folder` and return the folder.

    `fixed` are strings that become one token each, besides those of the chat format; `describe_tools` makes the
    template write the tools' schemas into a system message (long: off, a tiny model learns its one tool by training).
    The weights are float32 and depend on `seed` alone.
    """
    if hidden % heads or heads % kv_heads:
        raise ValueError(f"heads={heads} must divide hidden={hidden}, and kv_heads={kv_heads} must divide heads")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tiny_tokenizer(fixed)
    tokenizer.save(str(folder / "tokenizer.json"))
    shape = _Shape(family, tokenizer.get_vocab_size(), layers, hidden, heads, kv_heads, intermediate, tie)
    vocabulary = tokenizer.get_vocab()
    ids = {"bos_token_id": None, "eos_token_id": vocabulary[END], "pad_token_id": vocabulary[END_OF_TEXT]}
    _write(folder / "config.json", {**_config(shape, max_length), **ids})
    _write(folder / "tokenizer_config.json", _tokenizer_config(max_length))
    _write(folder / "generation_config.json", {**ids, "do_sample": True, "temperature": 1.0})
    (folder / "chat_template.jinja").write_text(_TEMPLATE.replace("$TOOLS", _TOOLS if describe_tools else ""))
    save_file(dict(_weights(shape, seed)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny_tokenizer(fixed: Sequence[str] = CALCULATOR) -> Tokenizer:
    """One token a byte, and one for each special, format and `fixed` string; reserved ones make it a multiple of 16."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    known = dict.fromkeys((*FORMAT, *fixed))
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in known])
    reserved = [f"<|reserved_{i}|>" for i in range(-tokenizer.get_vocab_size() % 16)]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in reserved])
    return tokenizer


def _config(shape: _Shape, max_length: int) -> dict[str, Any]:
    return {
        "architectures": [_ARCHITECTURES[shape.family]],
        "model_type": shape.family,
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head,
        "hidden_act": "silu",
        "max_position_embeddings": max_length,
        "initializer_range": DEVIATION,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": shape.tie,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "use_cache": True,
        # Under both names: transformers 4 reads the first, transformers 5 the second.
        "torch_dtype": "float32",
        "dtype": "float32",
    }


def _tokenizer_config(max_length: int) -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_length,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
    }


def _weights(shape: _Shape, seed: int) -> Iterator[tuple[str, Float32Array]]:
    rng = np.random.default_rng(seed)
    hidden, head = shape.hidden, shape.head

    def normal(*size: int) -> Float32Array:
        return (DEVIATION * rng.standard_normal(size)).astype(np.float32)

    def ones(size: int) -> Float32Array:
        return np.ones(size, np.float32)

    yield "model.embed_tokens.weight", normal(shape.vocab, hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for name, heads in (("q", shape.heads), ("k", shape.kv_heads), ("v", shape.kv_heads)):
            yield f"{at}.self_attn.{name}_proj.weight", normal(heads * head, hidden)
            if shape.family == "qwen2":
                yield f"{at}.self_attn.{name}_proj.bias", np.zeros(heads * head, np.float32)
        if shape.family == "qwen3":
            yield f"{at}.self_attn.q_norm.weight", ones(head)
            yield f"{at}.self_attn.k_norm.weight", ones(head)
        yield f"{at}.self_attn.o_proj.weight", normal(hidden, shape.heads * head)
        yield f"{at}.mlp.gate_proj.weight", normal(shape.intermediate, hidden)
        yield f"{at}.mlp.up_proj.weight", normal(shape.intermediate, hidden)
        yield f"{at}.mlp.down_proj.weight", normal(hidden, shape.intermediate)
        yield f"{at}.input_layernorm.weight", ones(hidden)
        yield f"{at}.post_attention_layernorm.weight", ones(hidden)
    yield "model.norm.weight", ones(hidden)
    if not shape.tie:
        yield "lm_head.weight", normal(shape.vocab, hidden)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def main() -> None:
    """`python -m agentrl.testing.tiny FOLDER [--seed N]`."""
    parser = argparse.ArgumentParser(description="Write a tiny random model to a folder.")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(make_tiny_model(options.folder, seed=options.seed))


if __name__ == "__main__":
    main()
