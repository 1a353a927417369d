"""One episode's conversation with the policy. The direct session and the HTTP app are two ways into
`Session.complete`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

from openai import AsyncOpenAI, NotGiven, Omit

from agentrl.endpoint.options import EndpointOptions
from agentrl.endpoint.parse import Format, Parsed, first_call, parse
from agentrl.endpoint.prompt import Prompter
from agentrl.endpoint.record import Place, Recorder, Sample
from agentrl.endpoint.render import Prompt, Renderer
from agentrl.endpoint.reply import Choice, Reply, before_stop, message_of, to_openai
from agentrl.endpoint.request import ChatRequest, Refused, read_request, untrainable
from agentrl.endpoint.stream import DirectStream
from agentrl.endpoint.tape import Strip
from agentrl.engine.types import Completion, Engine, GenerateRequest, GrammarRefused
from agentrl.errors import AgentRLError, ContractError, DeadlineExceeded, EngineError, LimitReached
from agentrl.types import Float32Array, Int32Array, SplitReason, Trajectory

if TYPE_CHECKING:
    from agentrl.endpoint.app import Endpoint


class Progress(NamedTuple):
    """Everything sampled so far of a choice of the call `number`, after `prompt`."""

    completion: Completion
    prompt: Prompt
    number: int


OnChoice = Callable[[int, Progress], None]
"""Called with a choice's index as its tokens arrive."""


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
    shown: Strip
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
        self._endpoint = endpoint
        self._engine: Engine = endpoint.engine
        self._renderer: Renderer = endpoint.renderer
        self._options: EndpointOptions = endpoint.options
        self._recorder = Recorder()
        self._prompter = Prompter(
            self._renderer, self._recorder, endpoint.options, endpoint.tool_format, endpoint.vocab_size
        )
        self._call_ids: dict[tuple[int, int], list[str]] = {}
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

    @property
    def chat(self) -> Chat:
        """`session.chat.completions.create` is the direct way in."""
        return Chat(self)  # made anew: a session that refers to itself would outlive its episode

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
        except RecursionError as error:
            raise Refused("the request holds data that is nested too deeply") from error
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
        place, prompt = self._prompter.prompt(request)
        shown = place.shown(prompt)
        number, self._calls = self._calls, self._calls + 1
        return _Plan(
            number,
            place,
            prompt,
            shown,
            self._budget(request, int(shown.tokens.size)),
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
        except GrammarRefused as error:
            raise Refused(str(error), untrainable(request, plan.temperature)) from error
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
        asked = GenerateRequest(name, self.id, plan.shown.tokens, sampling, plan.deadline)
        told = (
            None if on_choice is None else lambda so_far: on_choice(index, Progress(so_far, plan.prompt, plan.number))
        )
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
        for index, completion in enumerate(completions):
            text, said = self.text_of(completion)
            answer = before_stop(said, completion, request.sampling.stop)
            parsed = self.read(request, plan.prompt, answer, completion.finish == "length")
            message = message_of(parsed, self.call_ids(plan.number, index, len(parsed.calls)))
            said = plan.prompt.opened + said
            sample = Sample(completion, plan.temperature, plan.trained, message, text, said, plan.number)
            self._recorder.append(plan.place, plan.prompt, plan.shown, sample)
            self._call_ids.pop((plan.number, index), None)
            self._malformed += len(parsed.errors)
            self._sampled += int(completion.tokens.size)
            self._cut += completion.finish == "length"
            finish = "tool_calls" if parsed.calls and completion.finish == "stop" else completion.finish
            choices.append(Choice(message, finish, self.logprobs(completion) if request.logprobs else None))
        shown = int(plan.shown.tokens.size)
        self._prompted += shown
        sampled = sum(int(completion.tokens.size) for completion in completions)
        name = f"chatcmpl-{self.id}-{plan.number}"
        return Reply(
            name, int(time.time()), self._options.model_name, tuple(choices), int(plan.shown.tokens.size), sampled
        )

    def read(self, request: ChatRequest, prompt: Prompt, said: str, truncated: bool) -> Parsed:
        """What was sampled after a prompt, in parts."""
        if request.prompt is not None:
            return Parsed(None, said)
        form, opened, thinking = self.format_of(request), prompt.opened, prompt.thinking
        parsed = parse(opened + said, form, thinking=thinking, truncated=truncated, tools=request.tools)
        return parsed if request.parallel else first_call(parsed)

    def call_ids(self, number: int, index: int, n: int) -> list[str]:
        """The ids of the first `n` tool calls of a choice: the same ones while it streams and when it is recorded."""
        if not n:
            return []
        ids = self._call_ids.setdefault((number, index), [])
        while len(ids) < n:
            # Nine letters and digits: the strictest of the templates that check ids accepts no more and no less.
            ids.append(f"call{self._tool_calls:05d}")
            self._tool_calls += 1
        return ids[:n]

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

    def logprobs(self, completion: Completion, start: int = 0) -> list[dict[str, Any]]:
        """Of the sampled tokens from `start` on, in OpenAI's form."""
        rows = [self._row(*pair) for pair in _pairs(completion.tokens[start:], completion.logprobs[start:])]
        for row in rows:
            row["top_logprobs"] = []
        if completion.top is not None:
            tops = zip(completion.top.tokens[start:], completion.top.logprobs[start:], strict=True)
            for row, (tokens, logprobs) in zip(rows, tops, strict=True):
                row["top_logprobs"] = [self._row(*pair) for pair in _pairs(tokens, logprobs)]
        return rows

    def _row(self, token: int, logprob: float) -> dict[str, Any]:
        text, raw = self._renderer.template.piece(token)
        return {"token": text, "logprob": logprob, "bytes": list(raw)}


def _pairs(tokens: Int32Array, logprobs: Float32Array) -> Iterator[tuple[int, float]]:
    return zip(tokens.tolist(), logprobs.tolist(), strict=True)


async def _all(calls: Sequence[Coroutine[Any, Any, Completion]]) -> list[Completion]:
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # the first failure ends the others


class Chat:
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
            return DirectStream(self._session, request, timeout)
        return to_openai(await self._session.complete(request, timeout=timeout))
