"""The episodes of `sdk_overhead.py` by the training client of `verifiers`; run by that script, in a Python that has it.

Each turn does what its interception server does for a model call: resolve the history in the trace graph, have the
renderer bridge to the new turn, post to the engine, parse, commit tokens and log-probs. The harness, which is a
process of its own in `verifiers`, is left out, in its favour.
"""

import argparse
import asyncio
import gc
import json
import time

from renderers import Qwen3RendererConfig
from verifiers.v1.clients.train import TrainClient
from verifiers.v1.configs.agent import AgentConfig
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect
from verifiers.v1.graph import prepare_turn
from verifiers.v1.state import State
from verifiers.v1.task import TaskData
from verifiers.v1.trace import AgentInfo, Trace, TraceTask
from verifiers.v1.types import SamplingConfig

QUESTION = "hello, what is two and two?"
NEXT = "Please go on with the next question, if any."


async def episode(client: TrainClient, options: argparse.Namespace, number: int) -> None:
    task = TraceTask(type="Task", data=TaskData(idx=number, prompt=QUESTION))
    trace = Trace(task=task, agent=AgentInfo(config=AgentConfig()), state=State())
    dialect = ChatDialect()
    messages = [{"role": "user", "content": QUESTION}]
    for _ in range(options.turns):
        body = {"model": options.model, "messages": messages}
        request = dialect.parse_request(body)
        turn = prepare_turn(trace, request.messages, request.tools)
        response = await client.get_response(dialect, body, SamplingConfig(max_tokens=64), str(number), turn)
        turn.commit(response)
        messages.append(response.raw["choices"][0]["message"])
        messages.append({"role": "user", "content": NEXT})
    sampled = sum(len(call.message.content or "") > 0 for call in trace.nodes if call.message.role == "assistant")
    assert sampled == options.turns


async def main() -> None:
    parser = argparse.ArgumentParser()
    for name, kind in (("episodes", int), ("turns", int), ("model", str), ("url", str)):
        parser.add_argument(f"--{name}", type=kind, required=True)
    options = parser.parse_args()
    config = TrainClientConfig(
        base_url=options.url, renderer=Qwen3RendererConfig(), renderer_model_name=options.model, multiplex=4096
    )
    client = TrainClient(config)
    await episode(client, options, -1)
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)  # as `agentrl.process` does
    began, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(*(episode(client, options, i) for i in range(options.episodes)))
    turns = options.episodes * options.turns
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    print(json.dumps({"cpu_ms_per_turn": 1e3 * cpu / turns, "turns_per_s": turns / seconds}))


asyncio.run(main())
