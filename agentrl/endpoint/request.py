"""The OpenAI chat-completions dialect, read once at the edge: a request body becomes a `ChatRequest` or is refused by
name."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from agentrl.endpoint.messages import encodable
from agentrl.engine.types import Grammar, Sampling
from agentrl.errors import ContractError
from agentrl.types import Message

_IGNORED = frozenset(
    {
        "model",
        "user",
        "metadata",
        "store",
        "service_tier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
_FLOATS = {
    "top_p": (1.0, 0.0, 1.0),
    "min_p": (0.0, 0.0, 1.0),
    "frequency_penalty": (0.0, -2.0, 2.0),
    "presence_penalty": (0.0, -2.0, 2.0),
    "repetition_penalty": (1.0, 0.0, 2.0),
}
MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
_TEMPLATES_OWN = frozenset({"messages", "tools", "add_generation_prompt"})
ANY = ""
"""`ChatRequest.force`: some call, whichever."""


class Refused(ContractError):
    """A request that cannot be served as it is; `param` names the field."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A completion that is asked for. `sampling` lacks budget, stop ids and seed, which the session adds.

    `prompt` is the raw text or token ids of a text completion, which has no messages. `force` is the function that
    the answer must call, `ANY` for whichever, None where it need not.
    """

    messages: list[Message]
    sampling: Sampling
    prompt: str | tuple[int, ...] | None = None
    tools: list[Mapping[str, Any]] = field(default_factory=list)
    template: Mapping[str, Any] = field(default_factory=dict)
    agent: str = ""
    max_tokens: int | None = None
    temperature: float | None = None
    n: int = 1
    seed: int | None = None
    read_calls: bool = True
    force: str | None = None
    parallel: bool = True
    logprobs: bool = False
    stream: bool = False
    usage: bool = False


def read_request(body: Mapping[str, Any]) -> ChatRequest:
    """Check a body; `Refused` names the field that cannot be served."""
    given = {key: value for key, value in body.items() if value is not None and key not in _IGNORED}
    take = given.pop
    messages = take("messages", None)
    if not isinstance(messages, (list, tuple)) or not messages:
        raise Refused("messages must be a non-empty list of chat messages", "messages")
    tools = take("tools", [])
    if not isinstance(tools, (list, tuple)) or not all(_is_tool(tool) for tool in tools):
        raise Refused("tools must be a list of {'type': 'function', 'function': {'name': …, …}}", "tools")
    choice = take("tool_choice", "auto")
    stream = _flag(given, "stream")
    options = take("stream_options", {})
    if not isinstance(options, Mapping):
        raise Refused("stream_options must be an object", "stream_options")
    longest = [n for n in (_whole(given, "max_completion_tokens", 1), _whole(given, "max_tokens", 1)) if n is not None]
    temperature = take("temperature", None)
    if temperature is not None:
        temperature = _number("temperature", temperature, 0.0, 100.0)
    logprobs, force = _flag(given, "logprobs"), _forced(choice, tools)
    sampling = _sampling(given, logprobs)
    if sampling.grammar is not None and force is not None:
        raise Refused("response_format and a tool_choice that forces a call exclude each other", "response_format")
    request = ChatRequest(
        messages=[m if type(m) is dict else _as_dict(m) for m in messages],
        sampling=sampling,
        tools=list(tools),
        template=_template_arguments(take("chat_template_kwargs", {})),
        agent=_agent(take("agent", "")),
        max_tokens=min(longest, default=None),
        temperature=temperature,
        n=_whole(given, "n", 1, MAX_CHOICES) or 1,
        seed=_whole(given, "seed", -(1 << 63)),
        read_calls=bool(tools) and choice != "none",
        force=force,
        parallel=_flag(given, "parallel_tool_calls", True),
        logprobs=logprobs,
        stream=stream,
        usage=bool(options.get("include_usage")),
    )
    if given:
        name = sorted(given)[0]
        raise Refused(f"parameter {name!r} is not known here; remove it", name)
    return request


def read_text_request(body: Mapping[str, Any]) -> ChatRequest:
    """Check the body of a text completion: one prompt, and what a chat completion may have besides messages and
    tools."""
    rest = {key: value for key, value in body.items() if value is not None}
    prompt = rest.pop("prompt", None)
    if isinstance(prompt, (list, tuple)) and len(prompt) == 1 and isinstance(prompt[0], (str, list)):
        prompt = prompt[0]
    if isinstance(prompt, (list, tuple)) and prompt and all(type(i) is int and 0 <= i < 1 << 31 for i in prompt):
        prompt = tuple(prompt)
    if not isinstance(prompt, (str, tuple)) or not prompt:
        raise Refused("prompt must be one non-empty text, or a list of token ids", "prompt")
    # Here `logprobs` is a number: how many likeliest tokens are wanted beside the sampled one.
    logprobs = _whole(rest, "logprobs", 0, MAX_TOP_LOGPROBS) if type(rest.get("logprobs")) is int else None
    wanted = logprobs is not None or _flag(rest, "logprobs")
    for name, neutral in (("echo", False), ("suffix", ""), ("best_of", 1)):
        if (rest.pop(name, None) or neutral) != neutral:
            raise Refused(f"{name} is not served for text completions", name)
    for name in ("messages", "tools", "tool_choice", "chat_template_kwargs", "top_logprobs"):
        if name in rest:
            raise Refused(f"parameter {name!r} belongs to chat completions", name)
    asked = {"logprobs": wanted, "top_logprobs": logprobs or None}
    chat = read_request({**rest, **asked, "messages": [{"role": "user", "content": ""}]})
    return replace(chat, messages=[], prompt=encodable(prompt) if isinstance(prompt, str) else prompt)


def untrainable(request: ChatRequest, temperature: float) -> str | None:
    """The name of a setting that makes the sampled distribution differ from the reported log-probs; None where there
    is none."""
    if request.sampling is _PLAIN:
        return "temperature" if temperature == 0 else None
    for name in ("top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"):
        if _setting(request.sampling, name) != _setting(_PLAIN, name):
            return name
    grammar = request.sampling.grammar
    if grammar is not None:
        return "response_format" if grammar.kind == "json_schema" else grammar.kind
    return "temperature" if temperature == 0 else None


def _setting(sampling: Sampling, name: str) -> float:
    values = {
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "repetition_penalty": sampling.repetition_penalty,
    }
    return values[name]


_PLAIN = Sampling(max_tokens=1)


def _sampling(given: dict[str, Any], logprobs: bool) -> Sampling:
    if not given:
        return _PLAIN
    numbers = {
        name: _number(name, given.pop(name), low, high) if name in given else default
        for name, (default, low, high) in _FLOATS.items()
    }
    top_k = _whole(given, "top_k", -1)
    if given.pop("logit_bias", None):
        raise Refused("logit_bias is not served: it changes the distribution but not the log-probs", "logit_bias")
    stop = given.pop("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) and s for s in stops) or len(stops) > 16:
        raise Refused("stop must be a non-empty string or a list of at most 16 of them", "stop")
    return Sampling(
        max_tokens=1,
        top_p=numbers["top_p"],
        min_p=numbers["min_p"],
        frequency_penalty=numbers["frequency_penalty"],
        presence_penalty=numbers["presence_penalty"],
        repetition_penalty=numbers["repetition_penalty"],
        stop=tuple(stops),
        top_k=-1 if top_k in (None, 0, -1) else top_k,
        grammar=_grammar(given),
        top_logprobs=_top_logprobs(given, logprobs),
    )


def _top_logprobs(given: dict[str, Any], logprobs: bool) -> int:
    top = _whole(given, "top_logprobs", 0, MAX_TOP_LOGPROBS) or 0
    if top and not logprobs:
        raise Refused("top_logprobs needs logprobs = true", "top_logprobs")
    return top


def _grammar(given: dict[str, Any]) -> Grammar | None:
    """`response_format` is OpenAI's; `regex` and `ebnf` go to the engine's grammar as they are."""
    schema = _schema(given.pop("response_format", None))
    found = [] if schema is None else [Grammar("json_schema", schema)]
    kinds: tuple[Literal["regex", "ebnf"], ...] = ("regex", "ebnf")
    for kind in kinds:
        text = given.pop(kind, None)
        if text is not None and (not isinstance(text, str) or not text):
            raise Refused(f"{kind} must be a non-empty string, got {text!r:.100}", kind)
        found += [] if text is None else [Grammar(kind, text)]
    if len(found) > 1:
        raise Refused(f"{found[0].kind} and {found[1].kind} exclude each other: one grammar a request", found[1].kind)
    return found[0] if found else None


def _schema(form: Any) -> str | None:
    if form is None or (isinstance(form, Mapping) and form.get("type") == "text"):
        return None
    if isinstance(form, Mapping) and form.get("type") == "json_object":
        return '{"type": "object"}'
    if isinstance(form, Mapping) and form.get("type") == "json_schema" and isinstance(form.get("json_schema"), Mapping):
        schema = form["json_schema"].get("schema")
        if isinstance(schema, Mapping):
            return _json(schema)
    raise Refused("response_format must be of type text, json_object or json_schema with a schema", "response_format")


def _json(schema: Mapping[str, Any]) -> str:
    try:
        return json.dumps(schema, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise Refused(f"response_format has a schema that is no JSON: {error}", "response_format") from error


def _template_arguments(given: Any) -> Mapping[str, Any]:
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise Refused("chat_template_kwargs must be an object", "chat_template_kwargs")
    if taken := sorted(_TEMPLATES_OWN.intersection(given)):
        raise Refused(f"chat_template_kwargs cannot set {taken[0]!r}: the request itself does", "chat_template_kwargs")
    return given


def _forced(choice: Any, tools: Sequence[Mapping[str, Any]]) -> str | None:
    if choice in ("auto", "none"):
        return None
    known = [tool["function"]["name"] for tool in tools]
    if choice == "required" and known:
        return known[0] if len(known) == 1 else ANY
    function = choice.get("function") if isinstance(choice, Mapping) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if name is not None and name in known:
        return str(name)
    raise Refused(
        "tool_choice must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': …}}, the last two "
        f"with a tool of the request, which has {', '.join(known)[:200] or 'none'}; got {choice!r:.200}",
        "tool_choice",
    )


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, Mapping) else None
    return isinstance(function, Mapping) and isinstance(function.get("name"), str) and tool.get("type") == "function"


def _as_dict(message: Any) -> Any:
    # The client's own message objects may be put back into the history as they are.
    dump = message.model_dump(exclude_none=True) if hasattr(message, "model_dump") else message
    return dict(dump) if isinstance(dump, Mapping) else dump


def _agent(name: Any) -> str:
    if not isinstance(name, str):
        raise Refused("agent must be a string: the name of the agent that asks", "agent")
    return name


def _flag(given: dict[str, Any], name: str, default: bool = False) -> bool:
    value = given.pop(name, default)
    if not isinstance(value, bool):
        raise Refused(f"{name} must be true or false, got {value!r}", name)
    return value


def _whole(given: dict[str, Any], name: str, low: int, high: int = 1 << 63) -> int | None:
    value = given.pop(name, None)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        most = f" and at most {high}" if high < 1 << 63 else ""
        raise Refused(f"{name} must be a whole number of at least {low}{most}, got {value!r}", name)
    return value


def _number(name: str, value: Any, low: float, high: float) -> float:
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not low <= number <= high:
        raise Refused(f"{name} must be a number between {low:g} and {high:g}, got {value!r}", name)
    return number
