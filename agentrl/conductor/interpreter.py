"""What another Python interpreter has: asked by running a few lines in it, for SGLang lives in one of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

PACKAGES = ("torch", "transformers", "deepspeed", "accelerate", "openai", "sglang")
QUICK_SECONDS = 60.0
IMPORT_SECONDS = 300.0

# Runs in the other interpreter, so it may use nothing but the standard library. Abilities are read off the sources of
# the package: importing SGLang takes half a minute and may need a GPU.
_PROBE = r"""
import glob, importlib.metadata as metadata, importlib.util as util, json, os, sys
names, abilities = json.loads(sys.argv[1])
versions = {}
for name in names:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        pass
found = {}
spec = util.find_spec("sglang") if "sglang" in versions else None
for folder in (spec.submodule_search_locations or []) if spec else []:
    for part in ("entrypoints", "managers"):
        for path in glob.glob(os.path.join(folder, "srt", part, "**", "*.py"), recursive=True):
            with open(path, encoding="utf-8", errors="replace") as file:
                text = file.read()
            for ability, mark in abilities.items():
                found[ability] = found.get(ability, False) or mark in text
print(json.dumps({"python": sys.version.split()[0], "versions": versions, "abilities": found}))
"""
_IMPORTS = r"""
import json, os, sys
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
import torch
cuda = torch.cuda.is_available()
gpus = [[torch.cuda.get_device_name(i), *torch.cuda.mem_get_info(i)] for i in range(torch.cuda.device_count())]
told = {"cuda": torch.version.cuda or torch.version.hip or "", "available": cuda, "gpus": gpus if cuda else []}
if not cuda:
    os.environ["DS_ACCELERATOR"] = "cpu"
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    import transformers, deepspeed
    from transformers.integrations import HfDeepSpeedConfig
print("\n" + json.dumps(told))
"""

ABILITIES: Mapping[str, str] = {
    "pause at a token": "/pause_generation",
    "requests survive a pause": '"retract"',
    "weights from disk": "/update_weights_from_disk",
    "a version for each token": "weight_versions",
    "checksums of the weights": "/weights_checker",
}
"""What a run needs of SGLang, and the mark of it in SGLang's sources."""


class Packages(NamedTuple):
    """An interpreter. `problem` says why it could not be asked; "" where it answered."""

    executable: str
    python: str
    versions: Mapping[str, str]
    abilities: Mapping[str, bool]
    problem: str = ""


class Imports(NamedTuple):
    """What importing the trainer's packages showed. `gpus` are (name, free, total bytes)."""

    cuda: str
    available: bool
    gpus: tuple[tuple[str, int, int], ...]
    problem: str = ""


def sglang_python(configured: Path | None = None) -> str:
    """The interpreter that is to have SGLang: the configured one, $AGENTRL_SGLANG_PYTHON, or this one."""
    return str(configured or os.environ.get("AGENTRL_SGLANG_PYTHON") or sys.executable)


def packages(python: str) -> Packages:
    """Ask the interpreter for the versions of its packages, in about a second."""
    if shutil.which(python) is None:
        return Packages(python, "", {}, {}, f"{python} is no interpreter: there is no such program")
    answer, problem = _run(python, [_PROBE, json.dumps([PACKAGES, dict(ABILITIES)])], QUICK_SECONDS)
    if problem:
        return Packages(python, "", {}, {}, problem)
    told = json.loads(answer)
    return Packages(python, told["python"], told["versions"], told["abilities"])


def imports(python: str) -> Imports:
    """Import torch, transformers and DeepSpeed there, in 5 to 20 s; what broke, or what torch sees."""
    answer, problem = _run(python, [_IMPORTS], IMPORT_SECONDS)
    if problem:
        return Imports("", False, (), problem)
    told = json.loads(answer)
    return Imports(told["cuda"], told["available"], tuple((name, free, total) for name, free, total in told["gpus"]))


def _run(python: str, code: list[str], seconds: float) -> tuple[str, str]:
    """The last line of what the code printed; or why there is none."""
    try:
        done = subprocess.run(
            [python, "-c", *code], capture_output=True, text=True, timeout=seconds, stdin=subprocess.DEVNULL
        )
    except subprocess.TimeoutExpired:
        return "", f"{python} did not answer within {seconds:.0f} s"
    except OSError as error:
        return "", f"{python} cannot be run: {error.strerror or error}"
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    if done.returncode or not lines:
        last = done.stderr.strip().splitlines()
        return "", f"{python} ended with code {done.returncode}: {last[-1] if last else 'without a word'}"
    return lines[-1], ""
