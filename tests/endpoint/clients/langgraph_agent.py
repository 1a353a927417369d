"""A ReAct agent of LangGraph, unmodified: it calls a tool, is handed the result, answers."""

import asyncio
import sys
import warnings

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from langgraph.prebuilt import create_react_agent


@tool
def calc(expression: str) -> str:
    """Work out a sum."""
    return str(sum(int(part) for part in expression.split("+")))


async def main() -> None:
    model = ChatOpenAI(model="policy", base_url=sys.argv[1], api_key=sys.argv[2])
    agent = create_react_agent(model, [calc])
    state = await agent.ainvoke({"messages": [("user", "What is 2 + 3, and then 5 + 1?")]})
    first = state["messages"][-1].content
    messages = [*state["messages"], ("user", "Once more: 1 + 1")]
    last = ""
    async for step in agent.astream({"messages": messages}, stream_mode="values"):
        last = step["messages"][-1].content
    print(first, "/", last)


asyncio.run(main())
