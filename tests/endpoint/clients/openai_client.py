"""The openai client of any version: an episode with a tool, a stream, text completions, errors, a retry."""

import asyncio
import json
import sys

import openai

TOOL = {"type": "function", "function": {"name": "calc", "parameters": {"type": "object", "properties": {}}}}


async def main() -> None:
    client = openai.AsyncOpenAI(base_url=sys.argv[1], api_key=sys.argv[2])
    create = client.chat.completions.create
    messages = [{"role": "user", "content": "What is 2 + 3, and then 5 + 1?"}]
    while True:
        message = (await create(model="policy", messages=messages, tools=[TOOL])).choices[0].message
        messages.append(message)
        for call in message.tool_calls or []:
            total = sum(int(part) for part in json.loads(call.function.arguments)["expression"].split("+"))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": str(total)})
        if not message.tool_calls:
            break
    first = message.content
    messages.append({"role": "user", "content": "Once more: 1 + 1"})
    last = ""
    for _ in range(2):
        stream = await create(model="policy", messages=messages, tools=[TOOL], stream=True)
        calls, last = [], ""
        async for chunk in stream:
            for choice in chunk.choices:
                calls += choice.delta.tool_calls or []
                last += choice.delta.content or ""
        for call in calls:
            function = {"name": call.function.name, "arguments": call.function.arguments}
            made = {"id": call.id, "type": "function", "function": function}
            messages.append({"role": "assistant", "content": last or None, "tool_calls": [made]})
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "2"})
    try:
        await create(model="policy", messages=messages, top_p=0.5)
        raise SystemExit("top_p was not refused")
    except openai.BadRequestError as error:
        if error.param != "top_p":
            raise
    assert [model.id for model in (await client.models.list()).data] == ["policy"]
    print(openai.__version__)
    print(first, "/", last)


asyncio.run(main())
