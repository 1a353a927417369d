"""An agent of openai-agents, unmodified: it calls a tool, is handed the result, answers."""

import asyncio
import sys

from openai import AsyncOpenAI

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled  # noqa: TID251


@function_tool
def calc(expression: str) -> str:
    """Work out a sum.

    Args:
        expression: The sum.
    """
    return str(sum(int(part) for part in expression.split("+")))


async def main() -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
    model = OpenAIChatCompletionsModel(model="policy", openai_client=client)
    agent = Agent(name="Adder", instructions="Use the tool.", tools=[calc], model=model)
    result = await Runner.run(agent, "What is 2 + 3, and then 5 + 1?", max_turns=6)
    streamed = Runner.run_streamed(agent, [*result.to_input_list(), {"role": "user", "content": "Once more: 1 + 1"}])
    async for _ in streamed.stream_events():
        pass
    print(result.final_output, "/", streamed.final_output)


asyncio.run(main())
