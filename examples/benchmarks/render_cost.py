"""What a turn costs late in a long conversation: 200 turns through the direct session, end to end but for the engine.

    python examples/benchmarks/render_cost.py --model path/to/a/model/folder      # default: a tiny model

The last line is JSON, in CPU time: `turn10_ms` and `turn200_ms` (medians around those turns), `turn200_over_turn10`,
and for comparison `full_render_ms`, what rendering and tokenising the whole conversation anew costs at turn 200. Tool
outputs are ~1 kB each. A model folder needs only tokenizer.json and tokenizer_config.json.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from agentrl.endpoint.app import Endpoint
from agentrl.endpoint.template import ChatTemplate
from agentrl.testing.scripted import ScriptedEngine
from agentrl.testing.tiny import make_tiny_model
from agentrl.types import Message

TURNS = 204
WINDOW = 9
SAID = "The output lists the files that changed, so I look at the next one and see what it says.<|im_end|>"
OUTPUT = "drwxr-xr-x 2 user user 4096 notes.txt\n" * 26


async def measure(template: ChatTemplate) -> dict[str, float]:
    """Play the conversation and time each turn."""
    said = template.encode_text(SAID).tolist()
    session = Endpoint(ScriptedEngine(lambda prompt: said), template).open("long", max_tokens=1 << 30)
    messages: list[Message] = [{"role": "user", "content": "Look around."}]
    seconds: list[float] = []
    for turn in range(TURNS):
        began = time.process_time()
        reply = await session.chat.completions.create(model="policy", messages=messages, max_tokens=256)
        seconds.append(time.process_time() - began)
        messages.append(reply.choices[0].message.model_dump(exclude_none=True))
        messages.append({"role": "user", "content": f"{turn}: {OUTPUT}"})
    began = time.process_time()
    whole = template.encode(messages, generation=True)
    full = time.process_time() - began
    early, late = (statistics.median(seconds[at - WINDOW // 2 : at + WINDOW // 2 + 1]) for at in (10, 199))
    return {
        "conversation_tokens": float(np.size(whole)),
        "full_render_ms": 1e3 * full,
        "turn10_ms": 1e3 * early,
        "turn200_ms": 1e3 * late,
        "turn200_over_turn10": late / early,
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=None, help="a folder with tokenizer and chat template")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = options.model or make_tiny_model(Path(folder), max_length=1 << 24)
        template = ChatTemplate.load(model)
        template.context_length = None  # what is measured does not depend on how much a model can read
        print(json.dumps(asyncio.run(measure(template))))


if __name__ == "__main__":
    main()
