"""The run's own environment, agent, reward and template, played with a script instead of a model: for `--dry-run`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from agentrl.conductor.check import RunPlan, try_row
from agentrl.conductor.config import RunConfig
from agentrl.conductor.sessions import sessions_of
from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.errors import AgentRLError, ConfigError
from agentrl.rollout.episode import EpisodeSpec
from agentrl.rollout.player import Player, Sampling
from agentrl.rollout.schedule import Place, episode_seed
from agentrl.rollout.session import agent_of
from agentrl.testing.scripted import ScriptedEngine
from agentrl.types import Demonstration, Episode, Group, Int32Array, Row, Stop

ANSWERS = ("The answer is \\boxed{1}.\n```python\nprint(1)\n```", "I do not know.")
"""What the episodes answer in turn: something for most rewards to read (words, TeX, a program), and nothing of use."""
ROWS_SECONDS = 20.0
_BROKEN = frozenset({Stop.AGENT_ERROR, Stop.ENV_ERROR, Stop.SANDBOX_LOST, Stop.ENGINE_LOST})


class Tried(NamedTuple):
    """Rows whose episodes were started. Tokens are those of their first messages."""

    rows: int
    of: int
    longest: int
    mean: float
    seconds: float


async def try_rows(
    plan: RunPlan, rows: Sequence[Row], which: str, template: ChatTemplate, config: RunConfig
) -> Tried | None:
    """Start and end an episode of every row, or of as many as `ROWS_SECONDS` allow, spread over all; None without rows.

    ConfigError names the first row that cannot be played.
    """
    if not rows:
        return None
    began = time.monotonic()
    lengths: list[int] = []
    for place in _spread(len(rows)):
        if lengths and time.monotonic() - began > ROWS_SECONDS:
            break
        name = f"{which} row {place + 1} of {len(rows)}"
        lengths.append(await try_row(plan.make_env, plan.make_agent, rows[place], name, template, config))
    seconds = time.monotonic() - began
    return Tried(len(lengths), len(rows), max(lengths), sum(lengths) / len(lengths), seconds)


def _spread(n: int) -> list[int]:
    """0 to n-1, coarse steps first: whatever is cut off, what was tried lies all over."""
    order: list[int] = []
    step = 1 << (n - 1).bit_length()
    while step:
        order += range(0 if not order else step, n, step if not order else 2 * step)
        step //= 2
    return order


async def rehearse(config: RunConfig, plan: RunPlan, template: ChatTemplate, row: Row, samples: int = 2) -> Group:
    """A group of a training row, played through the real endpoint by the scripted engine.

    The script answers with one of `ANSWERS`; where there are tools, it first calls the first of them. ConfigError
    where an episode breaks.
    """
    script = _Script(template)
    engine = ScriptedEngine(script.reply, decode=template.tokenizer.decode)
    script.engine = engine
    # The configured port is for the run; this one is for an agent that speaks HTTP while it is tried.
    endpoint = Endpoint(engine, template, config.endpoint.model_copy(update={"host": "127.0.0.1", "port": 0}))
    await endpoint.start()
    player = Player(
        config.rollout.model_copy(update={"retries": 0}),
        make_env=plan.make_env,
        make_agent=lambda tools: agent_of(plan.make_agent, row)(script.saw(tools)),
        open_session=sessions_of(endpoint),
    )
    seed = episode_seed(config.seed, Place(0, 0), 0)
    try:
        episodes = []
        for sample in range(samples):
            spec = EpisodeSpec(0, sample, 0, seed, row)
            outcome = await player.play(spec, Sampling("dry-run", seed, True, config.rollout.temperature))
            _refuse_broken(outcome.episode)
            episodes.append(outcome.episode)
    finally:
        await endpoint.stop()
    return Group(0, 0, 0, plan.env, tuple(episodes))


def contrasted(group: Group) -> Group:
    """The same tokens with made-up rewards 0, 1, …: a gradient needs a difference."""
    episodes = []
    for number, episode in enumerate(group.episodes):
        turns = [replace(turn, reward=0.0) for turn in episode.turns]
        turns[-1] = replace(turns[-1], reward=float(number))
        episodes.append(replace(episode, turns=tuple(turns), stop=Stop.FINISHED))
    return replace(group, episodes=tuple(episodes))


def told(episode: Episode) -> str:
    """One line about an episode."""
    turns = len({turn.index for turn in episode.turns})
    parts: dict[str, float] = {}
    for turn in episode.turns:
        for name, value in turn.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    told_parts = f" ({', '.join(f'{name} {value:g}' for name, value in parts.items())})" if parts else ""
    reward = "no verdict" if episode.reward is None else f"{episode.reward:g}"
    sampled = sum(int(t.loss_mask.sum()) for t in episode.trajectories)
    tokens = sum(len(t) for t in episode.trajectories)
    return (
        f"ended {episode.stop.value} after {turns} turn{'s' * (turns != 1)}, {tokens} tokens ({sampled} sampled) in "
        f"{len(episode.trajectories)} trajector{'y' if len(episode.trajectories) == 1 else 'ies'}, "
        f"reward {reward}{told_parts}"
    )


def _refuse_broken(episode: Episode) -> None:
    if episode.stop in _BROKEN:
        hint = "; `agentrl doctor` tells which sandboxes work here" if episode.stop is Stop.SANDBOX_LOST else ""
        raise ConfigError(f"an episode with scripted answers ended with {episode.stop.value}: {episode.error}{hint}")
    if not any(t.loss_mask.any() for t in episode.trajectories):
        raise ConfigError(
            f"an episode with scripted answers ended {episode.stop.value} without the agent asking the model: "
            f"{episode.error or 'agent.act must call client.chat.completions.create'}"
        )


class _Script:
    """What the engine says: for a session's first request a call of the first tool, then its answer."""

    def __init__(self, template: ChatTemplate) -> None:
        self._renderer = Renderer(template)
        end = [self._renderer.end_id] if self._renderer.end_id >= 0 else []
        self._answers = [[*template.encode_text(text).tolist(), *end] for text in ANSWERS]
        self._episodes = 0
        self._call: Sequence[int] | None = None
        self.engine: ScriptedEngine | None = None

    def saw(self, tools: Sequence[Any]) -> Sequence[Any]:
        """The tools of the episode that starts."""
        self._call = None
        self._episodes += 1
        if tools:
            schema = tools[0].schema
            call = {"name": schema["function"]["name"], "arguments": sample(schema["function"]["parameters"])}
            message = {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"id": "call_0", "type": "function", "function": call}],
            }
            try:
                self._call = self._said(message, [tool.schema for tool in tools])
            except AgentRLError:
                self._call = None  # a template that cannot write calls: the model could not learn them from it either
        return tools

    def reply(self, prompt: Int32Array) -> Sequence[int]:
        assert self.engine is not None
        session = self.engine.requests[-1].session
        first = sum(request.session == session for request in self.engine.requests) == 1
        if first and self._call is not None:
            return self._call
        return self._answers[(self._episodes - 1) % len(self._answers)]

    def _said(self, message: dict[str, Any], tools: Sequence[Mapping[str, Any]]) -> Sequence[int]:
        chat = [{"role": "user", "content": "go"}, message]
        trajectory = self._renderer.demonstrate(chat, self._renderer.setting(tools))
        (said,) = [s for s in trajectory.segments if isinstance(s.source, Demonstration)]
        return [int(token) for token in said.tokens]


def sample(schema: Mapping[str, Any]) -> Any:
    """A value that a JSON schema allows: its default, its first choice, or the plainest one of its type."""
    if "default" in schema:
        return schema["default"]
    if schema.get("enum"):
        return schema["enum"][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return sample(schema[key][0])
    kind = schema.get("type", "string")
    if kind == "object":
        properties = schema.get("properties", {})
        return {name: sample(properties.get(name, {})) for name in schema.get("required", [])}
    return {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "array": [], "null": None}.get(kind, "1")
