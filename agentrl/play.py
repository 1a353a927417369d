"""`agentrl play`: a person, the oracle or chance plays an environment in the terminal, by the loop that trains it."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from agentrl.agent import Agent, ChatClient
from agentrl.calling import call
from agentrl.check.actions import called, random_action, said
from agentrl.env import Env
from agentrl.errors import AgentRLError, ConfigError, ContractError
from agentrl.rollout.episode import EpisodeSpec, Limits, run_episode
from agentrl.tool import Tool
from agentrl.types import Episode, Message, Row, Trajectory

Player = Literal["person", "random", "oracle"]
HELP = "a line is an answer (end it with \\ to go on); /call NAME {JSON} calls a tool; /tools lists them; /quit ends"


class Quit(AgentRLError):
    """The person has had enough."""


class NoModel:
    """A session without a model: the agent answers by itself."""

    metrics: Mapping[str, float] = {}
    failure: AgentRLError | None = None

    @property
    def chat(self) -> Any:
        """Not there."""
        raise ContractError("there is no model in `agentrl play`")

    def marks(self) -> tuple[tuple[int, int], ...]:
        """None: there are no tokens."""
        return ()

    async def close(self) -> tuple[Trajectory, ...]:
        """Nothing to end."""
        return ()


class _Seat(Agent):
    """Shows what is new, and asks `answer` what to say."""

    def __init__(self, tools: Sequence[Tool], say: Callable[[str], None], answer: Callable[[_Seat], Any]) -> None:
        super().__init__(tools)
        self.say, self.answer = say, answer

    async def act(self, observation: list[Message], client: ChatClient) -> Message:
        """One answer."""
        self.messages += observation
        for message in observation:
            self.say(shown(message))
        action: Message = await call(self.answer, self)
        self.messages.append(action)
        return action


async def play(
    make_env: Callable[[Row], Env],
    row: Row,
    player: Player,
    *,
    seed: int,
    max_turns: int,
    say: Callable[[str], None],
    ask: Callable[[str], str],
) -> Episode:
    """Play one episode of `row`; `ask` gives a person's lines. Raises ConfigError where there is no oracle."""
    env = make_env(row)
    dice = random.Random(seed)

    def oracle(seat: _Seat) -> Message:
        answer = env.oracle(seat.messages)
        if answer is None:
            raise ConfigError(f"{type(env).__name__} knows no answer here: define `oracle` (docs/environments.md)")
        return _told(said(answer) if isinstance(answer, str) else answer, say)

    answers: dict[Player, Callable[[_Seat], Message]] = {
        "person": lambda seat: _person(seat, ask),
        "random": lambda seat: _told(random_action(dice, seat.tools), say),
        "oracle": oracle,
    }
    # A person thinks as long as a person likes.
    limits = Limits(max_turns, asyncio.get_running_loop().time() + 30 * 86400.0, 30.0)
    outcome = await run_episode(
        env, lambda tools: _Seat(tools, say, answers[player]), NoModel(), EpisodeSpec(0, 0, 0, seed, row), limits
    )
    if isinstance(outcome.error, ConfigError):
        raise outcome.error
    episode = outcome.episode
    last = [message for message in episode.messages if message.get("role") != "assistant"][-1:]
    if last and episode.messages[-1:] == tuple(last) and len(episode.turns) > 0:
        say(shown(last[0]))
    return episode


def summary(episode: Episode) -> str:
    """How it ended."""
    turns = len({turn.index for turn in episode.turns})
    parts = {name: value for turn in episode.turns for name, value in turn.parts.items()}
    told = "".join(f", {name} {value:g}" for name, value in parts.items())
    error = f"; {episode.error}" if episode.error else ""
    return f"{episode.stop.value} after {turns} turns, reward {episode.reward}{told}{error}"


def shown(message: Message) -> str:
    """A message for the terminal."""
    content = message.get("content") or ""
    lines = [content if isinstance(content, str) else json.dumps(content)]
    for tool_call in message.get("tool_calls") or []:
        function = tool_call["function"]
        lines.append(f"→ {function['name']}({function['arguments']})")
    return f"[{message['role']}] " + "\n".join(line for line in lines if line)


def _told(action: Message, say: Callable[[str], None]) -> Message:
    say(shown(action))
    return action


def _person(seat: _Seat, ask: Callable[[str], str]) -> Message:
    while True:
        line = _line(ask)
        word, _, rest = line.partition(" ")
        if word == "/quit":
            raise Quit("stopped by the player")
        if word == "/help":
            seat.say(HELP)
        elif word == "/tools":
            seat.say("\n".join(json.dumps(tool.schema["function"]) for tool in seat.tools) or "there are no tools")
        elif word == "/call":
            name, _, arguments = rest.strip().partition(" ")
            return called(name, arguments or "{}", f"call_{len(seat.messages)}")
        else:
            return said(line)


def _line(ask: Callable[[str], str]) -> str:
    try:
        text = ask("> ")
        while text.endswith("\\"):
            text = f"{text[:-1]}\n{ask('… ')}"
    except EOFError:
        return "/quit"
    return text
