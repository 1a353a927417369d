"""The fetched pretrained model works in all three places that read a model folder, and they agree."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.options import EngineOptions
from agentrl.engine.server import start_engine
from agentrl.engine.types import Completion, GenerateRequest, Sampling
from agentrl.envs.fewshot_sums import FewshotSums
from agentrl.train.model import check_exact, load_policy
from agentrl.types import Int32Array, Version
from examples.fetch_smollm2 import fetch


async def _generate(folder: Path, prompt: Int32Array, log: Path) -> Completion:
    server = start_engine(EngineOptions(context_length=128), folder, Version(1, 0), log)
    try:
        await server.wait_ready()
        client = server.client()
        deadline = asyncio.get_running_loop().time() + 600
        sampling = Sampling(16, temperature=0.0, stop_token_ids=(2,))
        try:
            return await client.generate(GenerateRequest("a", "a", prompt, sampling, deadline))
        finally:
            await client.close()
    finally:
        await server.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_template_engine_and_trainer_agree_on_the_fetched_model(tmp_path: Path) -> None:
    folder = await asyncio.to_thread(fetch)
    assert "quant" not in (folder / "config.json").read_text()
    template = ChatTemplate.load(folder)
    messages, _ = await FewshotSums({"a": 58, "b": 61, "shots": [[41, 7]]}).reset(seed=0)
    prompt = np.asarray(template.encode(messages, [], generation=True), np.int32)
    said = await _generate(folder, prompt, tmp_path / "engine.log")
    assert template.decode(said.tokens).startswith("58 + 61 = ")

    policy = load_policy(folder, torch.float32)
    check_exact(policy, 49152, torch.device("cpu"))
    tokens = torch.from_numpy(np.concatenate([prompt, said.tokens])).long()
    n = len(said.tokens)
    with torch.no_grad():
        read = torch.arange(len(prompt) - 1, len(tokens) - 1)
        hidden = policy.hidden(tokens, torch.arange(len(tokens)), [len(tokens)], read)
        logprobs, _ = policy.head(hidden, tokens[-n:], torch.ones(n))
    assert np.abs(logprobs.numpy() - said.logprobs).max() < 1e-4
