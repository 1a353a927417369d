"""A model's tokenizer and chat template: messages to text to tokens, without torch or transformers.

Text from messages can hold what looks like a control token. Before rendering, each such piece is replaced by an
unguessable mark; after rendering the marks are encoded as the ordinary text they stand for, so only the template
itself can write control tokens.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from agentrl.endpoint.messages import canonical, encodable
from agentrl.errors import ConfigError, ContractError
from agentrl.types import Int32Array, Message

_MARKUP = re.compile(r"<[^\s<>]*>|\[[^\s\[\]]*\]")
_ASSISTANT_WRITES = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|python_tag|>")
_MARKERS = (*_ASSISTANT_WRITES, "<tool_response>", "</tool_response>", "<tools>", "</tools>")
# What a template's own code can raise over messages that it was not written for.
_RENDERING = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)
_PRINTED = (*range(33, 127), *range(161, 173), *range(174, 256))
# How byte-level tokenizers (GPT-2's and all after it) name bytes: themselves where they can be printed, else counted up
# from 256.
_BYTES = {
    **{chr(byte): byte for byte in _PRINTED},
    **{chr(256 + i): byte for i, byte in enumerate(b for b in range(256) if b not in _PRINTED)},
}
_FALLBACK = re.compile(r"<0x([0-9A-F]{2})>")
_NO_CONTENT_ROLES = frozenset({"system", "user"})


class ChatTemplate:
    """Renders chat messages as the model expects them.

    ```python
    template = ChatTemplate.load(Path("Qwen3-1.7B"))
    tokens = template.encode([{"role": "user", "content": "Hi"}], generation=True)   # [n] int32
    ```

    `end_ids` are the tokens at which a turn may stop; `context_length` is what the model's files say, None where they
    are silent.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: str,
        *,
        specials: Mapping[str, str] | None = None,
        end_ids: Iterable[int] = (),
        context_length: int | None = None,
        vocab_size: int | None = None,
    ) -> None:
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.tokenizer = tokenizer
        self.source = source
        self.specials = dict(specials or {})
        self.context_length = context_length
        self.vocab_size = max(vocab_size or 0, tokenizer.get_vocab_size(with_added_tokens=True))
        self.added = {token.content: (i, token.special) for i, token in tokenizer.get_added_tokens_decoder().items()}
        self.end_ids = frozenset(end_ids) | {
            i for i in (tokenizer.token_to_id(self.specials.get("eos_token", "")),) if i is not None
        }
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template is not valid Jinja: {error}") from error
        self._protect_with_marks()
        self._front = self._added_in_front()

    def _added_in_front(self) -> list[int]:
        """The tokens that the tokenizer itself puts before a text."""
        plain = self.tokenizer.encode("a", add_special_tokens=False).ids
        whole = self.tokenizer.encode("a", add_special_tokens=True).ids
        places = range(len(whole) - len(plain) + 1)
        return list(whole[: next((i for i in places if whole[i : i + len(plain)] == plain), 0)])

    def _protect_with_marks(self) -> None:
        tokens = [text for text in self.added if self._is_control(text)]
        self.control_ids = frozenset(self.added[text][0] for text in tokens)
        # Without its blanks too: some tokenizers have "\n</tool_call>" as a token, and the template writes the line
        # break.
        control = sorted({form for text in tokens for form in (text, text.strip())} - {""}, key=len, reverse=True)
        # Digits between private-use characters: survives strip, case filters and JSON, and cannot be written by anyone.
        self._nonce = f"\ue000{secrets.randbelow(10**18):018d}"
        self._marks = {text: f"{self._nonce}{i}\ue001" for i, text in enumerate(control)}
        self._mark_at = re.compile(f"{self._nonce}([0-9]+)\ue001")
        self._ordinary = [self._as_ordinary(text) for text in control]
        self._control_texts = control
        ours = [text for text in control if not self._is_assistants(text)]
        self._in_any = re.compile("|".join(map(re.escape, control)) or r"(?!)")
        self._in_assistant = re.compile("|".join(map(re.escape, ours)) or r"(?!)")

    @classmethod
    def load(cls, model_dir: Path | str, *, chat_template: str | None = None) -> ChatTemplate:
        """Read tokenizer.json, tokenizer_config.json, chat_template.jinja and the configs of a Hugging Face folder.

        ConfigError names the file that is missing and the remedy.
        """
        folder = Path(model_dir)
        if not (folder / "tokenizer.json").is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json; expected a Hugging Face model folder with a fast tokenizer. "
                f"Save one with AutoTokenizer.from_pretrained(…).save_pretrained({str(folder)!r})"
            )
        settings = _read_json(folder / "tokenizer_config.json")
        source = chat_template if chat_template is not None else _chat_template(folder, settings)
        try:
            tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        except Exception as error:  # tokenizers raises bare Exception for every fault of the file
            raise ConfigError(f"{folder / 'tokenizer.json'} cannot be read: {error}") from error
        model, generation = _read_json(folder / "config.json"), _read_json(folder / "generation_config.json")
        named = {key: _token_text(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        return cls(
            tokenizer,
            source,
            specials={key: text for key, text in named.items() if text is not None},
            end_ids=_ids(generation.get("eos_token_id")) | _ids(model.get("eos_token_id")),
            context_length=_context_length(model, settings),
            vocab_size=model.get("vocab_size"),
        )

    def text(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generation: bool, **extra: Any
    ) -> str:
        """The template's text for canonical or raw messages, with marks where message text looks like a control token.

        ContractError where the template refuses the messages or loses one of them.
        """
        prepared = [self._prepared(canonical(message, i)) for i, message in enumerate(messages)]
        return self.text_of_prepared(prepared, self.prepared_tools(tools), generation=generation, extra=extra)

    def text_of_prepared(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        *,
        generation: bool,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """`text` for messages that went through `prepare` and tools that went through `prepared_tools`."""
        given = {**self.specials, **self.marked(extra)} if extra else self.specials
        try:
            text = self._template.render(
                {**given, "messages": messages, "tools": tools, "add_generation_prompt": generation}
            )
        except _RENDERING as error:
            raise ContractError(f"the chat template cannot render these messages: {error}") from error
        for message in messages:
            if message["role"] in _NO_CONTENT_ROLES and message["content"].strip() not in text:
                raise ContractError(f"the chat template drops a {message['role']} message: {message['content']!r:.100}")
        return text

    def prepare(self, message: Message) -> Message:
        """A canonical message as the template may see it: control-token text replaced by marks."""
        return self._prepared(message)

    def prepared_tools(self, tools: Sequence[Mapping[str, Any]]) -> list[Any] | None:
        """The tools as the template may see them; None where there are none, as templates expect."""
        return [_Tool(self.marked(dict(tool))) for tool in tools] if tools else None

    def encode(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = (), *, generation: bool, **extra: Any
    ) -> Int32Array:
        """`[n]` tokens of a conversation, rendered from scratch."""
        return self.encode_text(self.text(messages, tools, generation=generation, **extra))

    def encode_text(self, text: str) -> Int32Array:
        """`[n]` tokens of text that this template made: no extra special tokens, marks as ordinary text."""
        if self._nonce not in text:
            return np.array(self.tokenizer.encode(text, add_special_tokens=False).ids, dtype=np.int32)
        ids: list[int] = []
        for i, piece in enumerate(self._mark_at.split(text)):
            if i % 2:
                ids += self._ordinary[int(piece)]
            elif self._nonce in piece:
                raise ContractError("the chat template cut a message inside text that looks like a control token")
            elif piece:
                ids += self.tokenizer.encode(piece, add_special_tokens=False).ids
        return np.array(ids, dtype=np.int32)

    def encode_raw(self, text: str, *, bos: bool) -> Int32Array:
        """`[n]` tokens of text that a client wrote whole, control tokens included; `bos` adds what the tokenizer puts
        in front, unless the client wrote that too."""
        ids = self.tokenizer.encode(text, add_special_tokens=False).ids
        front = self._front if bos and ids[: len(self._front)] != self._front else []
        return np.array([*front, *ids], dtype=np.int32)

    def decode(self, tokens: Int32Array | Sequence[int]) -> str:
        """The text of tokens, control tokens included."""
        ids = tokens.tolist() if isinstance(tokens, np.ndarray) else list(tokens)
        text: str = self.tokenizer.decode(ids, skip_special_tokens=False)
        return text

    def piece(self, token: int) -> tuple[str, bytes]:
        """One token's text and its bytes, which are no whole characters where a character has several tokens."""
        text = self.decode([token])
        name = self.tokenizer.id_to_token(token) or ""
        if "\ufffd" in text:
            if (byte := _FALLBACK.fullmatch(name)) is not None:
                return text, bytes([int(byte.group(1), 16)])
            if all(char in _BYTES for char in name):
                return text, bytes(_BYTES[char] for char in name)
        if name.startswith("\u2581") and not text.startswith(" "):
            text = f" {text}"  # decoders drop the blank in front of a text
        return text, text.encode()

    def unmarked(self, text: str) -> str:
        """Rendered text for a reader: marks written out."""
        return self._mark_at.sub(lambda mark: self._control_texts[int(mark.group(1))], text)

    def _is_control(self, text: str) -> bool:
        if self.added[text][1]:
            return True
        if any(marker in text for marker in _MARKERS):
            return True
        # Some tokenizers add blanks, words and HTML as tokens; they are plain text.
        markup = _MARKUP.fullmatch(text) is not None
        return markup and (text in self.source or text.startswith("<|"))

    def _is_assistants(self, text: str) -> bool:
        special = text in self.added and self.added[text][1]
        return text in _ASSISTANT_WRITES or (not special and any(marker in text for marker in _ASSISTANT_WRITES))

    def _as_ordinary(self, text: str) -> list[int]:
        for pieces in ((text[:1], text[1:]), tuple(text)):
            ids = [i for p in pieces if p for i in self.tokenizer.encode(p, add_special_tokens=False).ids]
            if not self.control_ids.intersection(ids):
                return ids
        raise ConfigError(f"control token {text!r} cannot be written as ordinary text with this tokenizer")

    def _prepared(self, message: Message) -> Message:
        trusted = message["role"] == "assistant"
        ready = dict(message)
        if trusted:
            for key in ("content", "reasoning_content"):
                if key in ready:
                    ready[key] = self._in_assistant.sub(self._mark, ready[key])
        elif self._in_any.search(ready["content"]):
            ready["content"] = self._in_any.sub(self._mark, ready["content"])
        if ready["role"] == "developer" and "developer" not in self.source:
            ready["role"] = "system"
        for key in ("name", "tool_call_id", "tool_calls"):
            if key in ready:
                ready[key] = self.marked(ready[key])
        return ready

    def _mark(self, match: re.Match[str]) -> str:
        return self._marks[match.group()]

    def marked(self, value: Any) -> Any:
        """Plain data with every text that looks like a control token replaced by marks."""
        if isinstance(value, str):
            return self._in_any.sub(self._mark, encodable(value))
        if isinstance(value, Mapping):
            return {self.marked(key): self.marked(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.marked(item) for item in value]
        return value


class _Tool(dict[str, Any]):
    """A tool's schema that is written as JSON once, not at every render."""

    json: str | None = None


class _GenerationTag(Extension):
    """`{% generation %}…{% endgeneration %}` marks the assistant's text in some templates; the text itself is
    unchanged."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own contract)

    def parse(self, parser: Any) -> Any:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    plain = isinstance(value, _Tool) and not ensure_ascii and indent is None and separators is None and not sort_keys
    if plain and value.json is not None:
        return str(value.json)
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if plain:
        value.json = text
    return text


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    source = _read_json(folder / "chat_template.json").get("chat_template") or settings.get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is the one for chats
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    if not isinstance(source, str) or not source:
        raise ConfigError(
            f"{folder} has no chat template: neither chat_template.jinja nor chat_template in tokenizer_config.json. "
            f"Use the instruct variant of the model, or write its template to {folder / 'chat_template.jinja'}"
        )
    return source


def _token_text(value: Any) -> str | None:
    if isinstance(value, Mapping):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _ids(value: Any) -> frozenset[int]:
    if isinstance(value, int):
        return frozenset({value})
    return frozenset(i for i in value if isinstance(i, int)) if isinstance(value, list) else frozenset()


def _context_length(model: Mapping[str, Any], settings: Mapping[str, Any]) -> int | None:
    known = [model.get("max_position_embeddings"), settings.get("model_max_length")]
    # Some tokenizers write 10**30 for "no limit".
    return min((n for n in known if isinstance(n, int) and 0 < n < 1 << 31), default=None)
