"""TRL's side of `vs_trl.py`; run by that script, in a Python that has trl. The last line is JSON.

Five-turn episodes go through its `rollout_func`: its own single-turn generation is called once a turn on the whole
history, as its tool loop does.
"""

import argparse
import json
import re
import time

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


def early(text: str, odd: str) -> float:
    """The share of the letters a to m, what matches `odd` being one other letter; the same as in vs_trl.py."""
    text = re.sub(odd, "-", text)
    return sum(c.lower() in "abcdefghijklm" for c in text) / max(len(text), 1)


def rewarding(odd: str):
    """The reward of the first answer, or of all that was said in an episode."""

    def reward(completions: list, **_: object) -> list[float]:
        said = (c if isinstance(c, str) else "".join(m["content"] or "" for m in c) for c in completions)
        return [early(text, odd) for text in said]

    return reward


class Clock(TrainerCallback):
    """When each step ended, in Unix seconds and in CPU seconds, and its mean reward."""

    def __init__(self, enough: float) -> None:
        self.enough = enough
        self.marks: list[tuple[float, float]] = []
        self.rewards: list[float] = []

    def on_step_end(self, args: object, state: object, control: object, **_: object) -> None:
        self.marks.append((time.time(), time.process_time()))

    def on_log(self, args: object, state: object, control: object, logs: dict | None = None, **_: object) -> None:
        if logs and "reward" in logs:
            self.rewards.append(float(logs["reward"]))
            if len(self.rewards) >= 3 and sum(self.rewards[-3:]) / 3 >= self.enough:
                control.should_training_stop = True


def several_turns(turns: int, words: int, told: str):
    """A rollout of `turns` turns with a tool's words after each."""

    def rollout(prompts: list, trainer: GRPOTrainer) -> dict:
        tokenizer = trainer.processing_class
        prompt_ids, _, _ = trainer._tokenize_prompts(prompts)
        said = [[] for _ in prompts]
        mask = [[] for _ in prompts]
        texts = ["" for _ in prompts]
        between = tokenizer.encode(told, add_special_tokens=False)
        trainer.generation_config.max_new_tokens = words
        for turn in range(turns):
            history = [p + s for p, s in zip(prompt_ids, said, strict=True)]
            answers, _ = trainer._generate_single_turn(history, None, {}, trainer.num_generations)
            for i, answer in enumerate(answers):
                texts[i] += tokenizer.decode(answer, skip_special_tokens=True)
                extra = between if turn + 1 < turns else []
                said[i] = said[i] + answer + extra
                mask[i] = mask[i] + [1] * len(answer) + [0] * len(extra)
        return {"prompt_ids": prompt_ids, "completion_ids": said, "logprobs": None, "env_mask": mask, "texts": texts}

    return rollout


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--enough", type=float, default=2.0)
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--words", type=int, default=32)
    parser.add_argument("--told", default="")
    parser.add_argument("--odd", required=True)
    parser.add_argument("--out", required=True)
    options = parser.parse_args()
    parts = 64 // options.at_once
    config = GRPOConfig(
        output_dir=options.out,
        max_steps=options.steps,
        per_device_train_batch_size=options.at_once,
        gradient_accumulation_steps=parts,
        steps_per_generation=parts,
        num_generations=8,
        max_completion_length=options.words if options.turns == 1 else 1024,
        learning_rate=options.lr,
        lr_scheduler_type="constant",
        adam_beta2=0.95,
        max_grad_norm=1.0,
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_tqdm=True,
        shuffle_dataset=False,
    )
    topics = [{"prompt": [{"role": "user", "content": f"Talk about train {i}."}]} for i in range(4096)]
    clock = Clock(options.enough)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32),
        reward_funcs=rewarding(options.odd),
        args=config,
        train_dataset=Dataset.from_list(topics),
        processing_class=AutoTokenizer.from_pretrained(options.model),
        callbacks=[clock],
        rollout_func=several_turns(options.turns, options.words, options.told) if options.turns > 1 else None,
    )
    trainer.train()
    print(json.dumps({"marks": clock.marks, "rewards": clock.rewards}))


if __name__ == "__main__":
    main()
