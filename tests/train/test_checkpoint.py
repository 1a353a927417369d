"""Checkpoint folders: which one is the newest whole, which are kept, and whose state another number of ranks reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from agentrl.errors import RunError
from agentrl.train import checkpoint, shards

Case = dict[str, dict[str, Any]]


def save(folder: Path, step: int, *, keep: int = 2, world: int = 1, parts: tuple[int, ...] = (0,)) -> Path:
    source = checkpoint.aside(folder, step)
    (source / "model").mkdir(parents=True)
    (source / "model" / "model.safetensors").write_bytes(b"weights")
    for rank in parts:
        (source / checkpoint.state_file(rank, world)).write_bytes(b"moments")
    content = {"version": f"1.{step}", "take": step, "cursor": {"row": 0.1}, "world": world, "state": {}}
    return checkpoint.commit(folder, step, content, keep=keep).path


@pytest.mark.parametrize("id", ["R01", "R02"])
def test_what_is_saved_last_outlives_a_damaged_later_one(zero3_resume: Case, tmp_path: Path, id: str) -> None:
    case = zero3_resume[id]["input"]
    for step in case["saved"]:
        save(tmp_path, step)
    for step in case["damaged"]:
        (checkpoint.folder(tmp_path, step) / checkpoint.state_file(0, 1)).unlink()
    for step in case["then"]:
        save(tmp_path, step, keep=case["keep"])
    found, refused = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == zero3_resume[id]["expected"]["newest"]
    assert not refused
    assert sorted(int(p.name[5:]) for p in tmp_path.iterdir()) == zero3_resume[id]["expected"]["folders"]


def test_a_checkpoint_without_a_ranks_part_is_not_made_whole(zero3_resume: Case, tmp_path: Path) -> None:
    case = zero3_resume["R03"]
    with pytest.raises(RunError, match=case["expected"]["names"]):
        save(tmp_path, 4, world=case["input"]["world"], parts=tuple(case["input"]["parts"]))
    assert checkpoint.newest(tmp_path) == (None, [])


def test_a_damaged_manifest_is_passed_over(zero3_resume: Case, tmp_path: Path) -> None:
    save(tmp_path, 3)
    manifest = save(tmp_path, 4) / checkpoint.MANIFEST
    good = manifest.read_bytes()
    body = orjson.loads(good)
    fields = zero3_resume["R04"]["input"]["fields"]
    damaged = [orjson.dumps({**body, name: value}) for name, values in fields.items() for value in values]
    damaged += [orjson.dumps({k: v for k, v in body.items() if k != name}) for name in body if name != "crc"]
    damaged += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    damaged += [good[:at] for at in range(0, len(good), 7)]
    for data in damaged:
        manifest.write_bytes(data)
        found, refused = checkpoint.newest(tmp_path)
        same_words = b"".join(data.split()) == b"".join(good.split())
        assert same_words or (found is not None and found.step == 3 and len(refused) == 1), data
    manifest.write_bytes(orjson.dumps({k: v for k, v in body.items() if k != "crc"}))
    found, _ = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.step == 4, "older versions wrote no checksum of the manifest itself"


def test_the_oldest_that_can_be_gone_back_to(tmp_path: Path) -> None:
    assert checkpoint.oldest(tmp_path) is None
    for step in (2, 3, 4):
        save(tmp_path, step, keep=3)
    (checkpoint.folder(tmp_path, 2) / "model" / "model.safetensors").write_bytes(b"")
    found = checkpoint.oldest(tmp_path)
    assert found is not None
    assert found.step == 3


@settings(max_examples=40)
@given(size=st.integers(1, 40), saved=st.integers(1, 9), now=st.integers(1, 9))
def test_any_number_of_ranks_reads_what_any_other_saved(
    tmp_path_factory: pytest.TempPathFactory, size: int, saved: int, now: int
) -> None:
    """Of parameters smaller than the group, too: some ranks then hold nothing but padding."""
    folder = tmp_path_factory.mktemp("state")
    values = torch.arange(1.0, size + 1)
    part = -(-size // saved)
    padded = torch.cat([values, torch.full((part * saved - size,), torch.nan)])
    for rank in range(saved):
        save_file({"w": padded[rank * part : (rank + 1) * part].clone()}, folder / checkpoint.state_file(rank, saved))
    mine = -(-size // now)
    with shards.Reader(folder, saved) as reader:
        found = torch.cat([reader.span("w", rank * mine, mine, size) for rank in range(now)])
    assert torch.equal(found[:size], values)
    assert not found[size:].any()
