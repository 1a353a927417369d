"""One episode's conversation with the policy. The direct session and the HTTP app are two ways into
`Session.complete`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
from openai import AsyncOpenAI, NotGiven, Omit

from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.parse import Format, Parsed, parse
from agentrl.endpoint.record import Line, Place, Recorder, Sample
from agentrl.endpoint.render import CannotContinue, Prompt, Renderer, Setting
from agentrl.endpoint.reply import Choice, Reply, before_stop, message_of, to_openai
from agentrl.endpoint.request import ChatRequest, Refused, read_request, untrainable
from agentrl.endpoint.stream import DirectStream, chunks
from agentrl.engine.types import Completion, Engine, GenerateRequest
from agentrl.errors import AgentRLError, ContractError, DeadlineExceeded, EngineError, LimitReached
from agentrl.types import Int32Array, SplitReason, Trajectory

if TYPE_CHECKING:
    from agentrl.endpoint.app import Endpoint

OnChoice = Callable[[int, Completion, bool], None]
"""Called with a choice's index, everything sampled of it so far, and whether its prompt opened `<think>`."""


@dataclass(frozen=True, slots=True)
class Terms:
    """What a session was opened with; see `Endpoint.open`."""

    id: str
    seed: int | None
    training: bool
    temperature: float
    max_tokens: int | None
    deadline: float | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """A call that is ready for the engine."""

    number: int
    place: Place
    prompt: Prompt
    tokens: Int32Array
    budget: int
    temperature: float
    trained: bool
    deadline: float
    session_ends: bool


class Session:
    """An OpenAI client that records what it samples.

    ```python
    session = endpoint.open("4.0-3", seed=7)
    reply = await session.chat.completions.create(model="policy", messages=[{"role": "user", "content": "Hi"}])
    session.marks()                       # ((0, 57),): trajectory 0 is 57 tokens long now
    trajectories = await session.close()
    ```
    `failure` is the last error that was not the client's: a black-box agent only sees its HTTP form.
    """

    def __init__(self, endpoint: Endpoint, terms: Terms, key: str) -> None:
        self.terms = terms
        self.api_key = key
        self.failure: AgentRLError | None = None
        self.chat = _Chat(self)
        self._endpoint = endpoint
        self._engine: Engine = endpoint.engine
        self._renderer: Renderer = endpoint.renderer
        self._options: EndpointOptions = endpoint.options
        self._recorder = Recorder()
        self._setting = self._renderer.setting()
        self._raw = Setting(extra={"raw": True})  # text completions never go on from a chat
        self._closed = False
        self._calls = self._sampled = self._prompted = self._tool_calls = self._malformed = self._cut = 0

    @property
    def id(self) -> str:
        """The name it was opened under."""
        return self.terms.id

    @property
    def base_url(self) -> str:
        """Where this session is served over HTTP; ContractError before `Endpoint.start`."""
        return f"{self._endpoint.url}/s/{self.api_key}/v1"

    def openai(self) -> AsyncOpenAI:
        """A real OpenAI client for this session; all sessions share its connections."""
        return self._endpoint.client(self.base_url, self.api_key)

    def marks(self) -> tuple[tuple[int, int], ...]:
        """The trajectories that sampled tokens since the last call, in order, each with its length."""
        return self._recorder.marks()

    @property
    def metrics(self) -> Mapping[str, float]:
        """Counts of the whole session, among them the reasons for which trajectories started."""
        splits = {f"splits_{reason.value}": 0.0 for reason in SplitReason if reason is not SplitReason.START}
        for line in self._recorder.lines:
            if line.reason is not SplitReason.START:
                splits[f"splits_{line.reason.value}"] += 1
        return {
            "calls": float(self._calls),
            "prompt_tokens": float(self._prompted),
            "sampled_tokens": float(self._sampled),
            "tool_calls": float(self._tool_calls),
            "malformed_tool_calls": float(self._malformed),
            "cut_turns": float(self._cut),
            **splits,
        }

    async def close(self) -> tuple[Trajectory, ...]:
        """End the session and return everything that was recorded, in the order of `marks`' indices. Safe to repeat."""
        if not self._closed:
            self._closed = True
            await self._endpoint.forget(self)
        return self._recorder.trajectories()

    async def complete(
        self, request: ChatRequest, on_choice: OnChoice | None = None, timeout: float | None = None
    ) -> Reply:
        """Answer one request.

        Raises ContractError (`Refused`) for a request that cannot be served, LimitReached where the episode's tokens,
        its time or the model's context are used up, and InfrastructureError where the engine failed.
        """
        try:
            plan = self._plan(request, timeout)
            completions = await self._generate(plan, request, on_choice)
            return self._record(plan, request, completions)
        except AgentRLError as error:
            if not isinstance(error, ContractError):
                self.failure = error
            raise

    def _overdue(self, plan: _Plan) -> AgentRLError:
        if plan.session_ends:
            return LimitReached(f"session {self.id}: the episode's time is up")
        return DeadlineExceeded(f"session {self.id}: call {plan.number} waited for the engine until its deadline")

    def _plan(self, request: ChatRequest, timeout: float | None) -> _Plan:
        if self._closed:
            raise ContractError(f"session {self.id} is closed; an agent must not call the model after its episode")
        now = asyncio.get_running_loop().time()
        deadline = now + min(timeout or self._options.call_timeout, self._options.call_timeout)
        end = self.terms.deadline
        if end is not None and end <= now:
            raise LimitReached(f"session {self.id}: the episode's time is up")
        temperature = self.terms.temperature if request.temperature is None else request.temperature
        trained = self._trained(request, temperature)
        place, prompt = self._placed(request)
        tokens = prompt.tokens
        if place.line is not None:
            before = place.line.turns[place.turn].tokens
            tokens = np.concatenate((place.line.tokens[:before], prompt.tokens))
        number, self._calls = self._calls, self._calls + 1
        return _Plan(
            number,
            place,
            prompt,
            tokens,
            self._budget(request, int(tokens.size)),
            temperature,
            trained,
            deadline if end is None else min(deadline, end),
            end is not None and end < deadline,
        )

    def _trained(self, request: ChatRequest, temperature: float) -> bool:
        name = untrainable(request, temperature)
        if name is not None and self.terms.training and self._options.untrained_sampling == "refuse":
            raise Refused(
                f"{name} changes the sampled distribution but not the log-probs, which training would get wrong: "
                'leave it out, or set endpoint.untrained_sampling = "mark" to keep such tokens out of training',
                name,
            )
        return name is None

    def _setting_of(self, request: ChatRequest) -> Setting:
        known = self._setting
        if known.tools != request.tools or known.extra != request.template:
            self._setting = self._renderer.setting(request.tools, request.template)
        return self._setting

    def _placed(self, request: ChatRequest) -> tuple[Place, Prompt]:
        if request.prompt is None:
            return self._prompt(self._recorder.locate(request.messages, self._setting_of(request), request.agent))
        template = self._renderer.template
        if isinstance(request.prompt, str):
            place, known = self._recorder.locate_text(request.prompt, self._raw, request.agent)
            text = request.prompt[known:]
            return place, Prompt(text, template.encode_raw(text, bos=not known), False)
        tokens = np.array(request.prompt, np.int32)
        if int(tokens.max()) >= self._endpoint.vocab_size:
            raise Refused(
                f"prompt has token {int(tokens.max())} of a vocabulary of {self._endpoint.vocab_size}", "prompt"
            )
        place, known = self._recorder.locate_text(tokens, self._raw, request.agent)
        return place, Prompt(template.decode(tokens[known:]), tokens[known:], False)

    def _prompt(self, place: Place) -> tuple[Place, Prompt]:
        if self._renderer.reason is not None:
            place = place.restarted(SplitReason.TEMPLATE)
        line = place.line
        if line is None:
            return place, self._renderer.start(place.new, place.setting)
        if self._options.history == "template":
            return self._rewritten(place, line)
        turn = line.turns[place.turn]
        last = line.known[turn.messages - 1]
        try:
            ended_by = int(line.tokens[turn.tokens - 1])
            return place, self._renderer.extend(last, place.new, place.setting, ended_by=ended_by)
        except CannotContinue:
            place = place.restarted(SplitReason.TEMPLATE)
            return place, self._renderer.start(place.new, place.setting)

    def _rewritten(self, place: Place, line: Line) -> tuple[Place, Prompt]:
        """Render as for a fresh chat, with what was sampled as it was written; go on only where that keeps every
        token."""
        at = line.turns[place.turn].messages
        history = [
            {"role": "assistant", "content": line.raw[i]} if i in line.raw else message
            for i, message in enumerate(line.known[:at])
        ]
        text = self._renderer.full_text([*history, *place.new], place.setting, generation=True)
        so_far = "".join(line.texts[: 2 * place.turn + 2])
        if text.startswith(so_far):
            return place, self._renderer.prompt(text[len(so_far) :])
        restarted = place.restarted(SplitReason.TEMPLATE)
        return restarted, self._renderer.prompt(text)

    def _budget(self, request: ChatRequest, prompt: int) -> int:
        limits = [n for n in (request.max_tokens,) if n is not None]
        if self.terms.max_tokens is not None:
            left = (self.terms.max_tokens - self._sampled) // request.n
            if left <= 0:
                raise LimitReached(
                    f"session {self.id}: the episode's {self.terms.max_tokens} sampled tokens are used up"
                )
            limits.append(left)
        context = self._endpoint.context_length
        if context is not None:
            if prompt >= context:
                raise LimitReached(f"session {self.id}: the prompt has {prompt} tokens, the model's context {context}")
            limits.append(context - prompt)
        if not limits:
            raise ContractError(
                "no max_tokens in the request, and the model's files name no context length: give one of them"
            )
        return min(limits)

    async def _generate(self, plan: _Plan, request: ChatRequest, on_choice: OnChoice | None) -> list[Completion]:
        waiting = asyncio.timeout_at(plan.deadline)
        try:
            async with waiting:
                if request.n == 1:
                    return [await self._one(plan, request, 0, on_choice)]
                return await _all([self._one(plan, request, i, on_choice) for i in range(request.n)])
        except TimeoutError as error:
            if not waiting.expired():
                raise
            raise self._overdue(plan) from error
        except DeadlineExceeded as error:
            raise (self._overdue(plan) if plan.session_ends else error) from error

    async def _one(self, plan: _Plan, request: ChatRequest, index: int, on_choice: OnChoice | None) -> Completion:
        sampling = replace(
            request.sampling,
            max_tokens=plan.budget,
            temperature=plan.temperature,
            stop_token_ids=self._endpoint.stop_ids,
            seed=self._seed(plan, request, index),
        )
        name = f"{self.id}-{plan.number}-{index}"
        asked = GenerateRequest(name, self.id, plan.tokens, sampling, plan.deadline)
        told = None if on_choice is None else lambda so_far: on_choice(index, so_far, plan.prompt.thinking)
        completion = await self._engine.generate(asked, told)
        if completion.tokens.size and int(completion.tokens.max()) >= self._endpoint.vocab_size:
            top, size = int(completion.tokens.max()), self._endpoint.vocab_size
            raise EngineError(f"{name}: the engine sampled token {top} of a vocabulary of {size}")
        return completion

    def _seed(self, plan: _Plan, request: ChatRequest, index: int) -> int | None:
        if self.terms.seed is None and request.seed is None:
            return None
        # A client's own seed makes its call repeatable within the episode, and still differs between the episodes of a
        # group.
        call = f"call {plan.number}" if request.seed is None else f"seed {request.seed}"
        digest = blake2b(f"{self.terms.seed} {call} {index}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 33  # engines take 31 bits

    def _record(self, plan: _Plan, request: ChatRequest, completions: Sequence[Completion]) -> Reply:
        choices = []
        for completion in completions:
            text, said = self.text_of(completion)
            parsed = self._parse(plan, request, completion, said)
            message = message_of(parsed, self._tool_calls)
            sample = Sample(completion, plan.temperature, plan.trained, message, text, said, plan.number)
            self._recorder.append(plan.place, plan.prompt, sample)
            self._tool_calls += len(parsed.calls)
            self._malformed += len(parsed.errors)
            self._sampled += int(completion.tokens.size)
            self._cut += completion.finish == "length"
            finish = "tool_calls" if parsed.calls and completion.finish == "stop" else completion.finish
            choices.append(Choice(message, finish, self._logprobs(completion) if request.logprobs else None))
        self._prompted += int(plan.tokens.size)
        sampled = sum(int(completion.tokens.size) for completion in completions)
        name = f"chatcmpl-{self.id}-{plan.number}"
        return Reply(name, int(time.time()), self._options.model_name, tuple(choices), int(plan.tokens.size), sampled)

    def _parse(self, plan: _Plan, request: ChatRequest, completion: Completion, said: str) -> Parsed:
        text = before_stop(said, completion)
        if request.prompt is not None:
            return Parsed(None, text)
        return parse(
            text,
            self.format_of(request),
            thinking=plan.prompt.thinking,
            truncated=completion.finish == "length",
            tools=request.tools,
        )

    @property
    def model_name(self) -> str:
        """What replies call the model."""
        return self._options.model_name

    def format_of(self, request: ChatRequest) -> Format:
        """How tool calls are read from this request's answer."""
        return self._endpoint.tool_format if request.read_calls else Format.NONE

    def text_of(self, completion: Completion) -> tuple[str, str]:
        """The sampled text, with and without the end token."""
        tokens = completion.tokens.tolist()
        decode = self._renderer.template.decode
        if not tokens or tokens[-1] not in self._endpoint.stop_set:
            text = decode(tokens)
            return text, text
        said = decode(tokens[:-1])
        return said + self._endpoint.stop_texts[tokens[-1]], said

    def _logprobs(self, completion: Completion) -> list[dict[str, Any]]:
        rows = []
        for token, logprob in zip(completion.tokens.tolist(), completion.logprobs.tolist(), strict=True):
            text = self._renderer.template.decode([token])
            rows.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return rows


async def _all(calls: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # the first failure ends the others


class _Chat:
    """`session.chat`."""

    def __init__(self, session: Session) -> None:
        self.completions = Completions(session)


class Completions:
    """`session.chat.completions`: the OpenAI client's `create` without HTTP."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def create(self, *, messages: Any, model: str = "", **settings: Any) -> Any:
        """A `ChatCompletion`, or with `stream=True` an asynchronous iterator of `ChatCompletionChunk`, with the
        parameters of OpenAI's API; `extra_body` is merged, `timeout` is in seconds."""
        body = {key: value for key, value in settings.items() if not isinstance(value, (NotGiven, Omit))}
        for name in ("extra_headers", "extra_query"):
            body.pop(name, None)
        body.update(body.pop("extra_body", None) or {})
        timeout = body.pop("timeout", None)
        request = read_request({"messages": messages, "model": model, **body})
        if request.stream:
            return DirectStream(chunks(self._session, request, timeout))
        return to_openai(await self._session.complete(request, timeout=timeout))
