"""Whole runs on real parts: the embedded engine, the trainer's processes, a tiny model."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path
from statistics import fmean

import pytest

from agentrl.monitor.episodes import Episodes
from agentrl.train.checkpoint import newest
from tests.conductor.kit import finished, kill_child, lines, make_place, start, wait_for, wait_for_none


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return make_place(tmp_path)


@pytest.mark.timeout(400)
def test_a_run_trains_publishes_evaluates_and_leaves_its_folder(place: Path) -> None:
    run = place / "runs" / "r"
    process = start(place, "train", "run.toml", "env.args.gate=2")
    wait_for(lambda: bool(lines(run, "eval")), process)
    (place / "go").touch()  # else the first evaluation might still run when the next one falls due
    code, output = finished(process)
    assert code == 0, output
    steps = lines(run, "step")
    assert [s["step"] for s in steps] == [1, 2, 3]
    assert [s["version"] for s in steps] == ["1.1", "1.2", "1.3"]
    assert all(s["staleness/max"] <= 4 for s in steps)
    assert any(1 < s["rollout/turns_mean"] <= 2 for s in steps if "rollout/turns_mean" in s)
    first = steps[0]
    assert first["behaviour/abs_log_weight_max"] < 1e-3, "trainer and engine agree on the log-probs of version 0"
    published = lines(run, "publish")
    assert published[-1]["version"] == "1.3"
    assert len(published) + sum(p["publish/skipped"] for p in published) == 3
    evaluations = lines(run, "eval")
    assert [e["step"] for e in evaluations] == [0, 2, 3]
    assert evaluations[-1]["eval/versions"] == ["1.3"]
    assert all(e["eval/scored"] == 3 for e in evaluations)

    episodes = Episodes(run / "episodes.sqlite")
    trained = episodes.page({"trained": "2"})
    assert trained["total"] == 4
    seen = episodes.tokens(trained["rows"][0][0], 0, 0, 1000)
    kinds = [kind for kind, advantage in zip(seen.kinds, seen.advantages, strict=True) if advantage is not None]
    assert set(kinds) == {"sampled"}, seen
    assert all(0.5 < ratio < 2 for ratio in seen.ratios if ratio is not None)
    assert episodes.page({"kind": "eval"})["total"] == 9
    assert {"reward", "reward_error"} <= steps[0]["envs"]["Bright"].keys()
    episodes.close()

    assert (run / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert "steps = 3" in (run / "config.toml").read_text()
    assert {p.name for p in (run / "logs").iterdir()} == {"conductor.log", "engine-0.log", "trainer.log"}
    assert (run / "model" / "model.safetensors").stat().st_size > 0
    assert not (run / "weights").exists()
    wait_for_none(place)
    assert re.search(r"^step 3/3  reward 0\.\d+", output, re.MULTILINE), output
    assert json.loads((run / "state.json").read_text())["phase"] == "finished"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_engine_set_aside_judges_exactly_the_weights_of_its_step(place: Path) -> None:
    settings = ["eval.engine=own", "eval.every=1", "train.steps=4", "rollout.staleness=2"]
    process = start(place, "train", "run.toml", *settings)
    run = place / "runs" / "r"
    wait_for(lambda: (run / "logs" / "eval-engine-0.log").exists(), process)
    code, output = finished(process)
    assert code == 0, output
    evaluations = lines(run, "eval")
    # A step that falls due while another is judged may be passed over; the first and the last are not.
    assert (evaluations[0]["step"], evaluations[-1]["step"]) == (0, 4)
    assert all(e["eval/versions"] == [f"1.{e['step']}"] for e in evaluations), evaluations
    assert all(e["eval/scored"] == 3 for e in evaluations)
    wait_for_none(place)


@pytest.mark.parametrize(
    ("fault", "text"),
    [("step", "RuntimeError: the simulator broke"), ("nan", "must be a finite number"), ("text", "got 'good'")],
)
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_environment_that_fails_ends_the_run_with_its_own_words(place: Path, fault: str, text: str) -> None:
    code, output = finished(start(place, "train", "run.toml", f"env.args.fault='{fault}'", "eval.every=1000"))
    assert code == 1
    assert "2 groups in a row failed" in output
    assert text in output
    assert "Traceback" not in output
    wait_for_none(place)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_interrupt_kill_and_resume(place: Path) -> None:
    run = place / "runs" / "r"
    process = start(place, "train", "run.toml", "train.steps=500", "train.checkpoint_every=5")
    wait_for(lambda: len(lines(run, "step")) >= 7, process)
    process.send_signal(signal.SIGINT)
    code, output = finished(process)
    assert code == 130, output
    assert "SIGINT: stopping" in output
    wait_for_none(place)

    saved, _ = newest(run / "checkpoints")
    assert saved is not None
    process = start(place, "train", "run.toml", "--resume", "train.steps=500", "train.checkpoint_every=5")
    wait_for(lambda: lines(run, "step")[-1]["version"].startswith("2."), process)
    again = next(s for s in lines(run, "step") if s["version"].startswith("2."))
    assert again["step"] == saved.step + 1
    process.kill()
    process.communicate()
    wait_for_none(place)

    saved, _ = newest(run / "checkpoints")  # it may have got on meanwhile
    assert saved is not None
    process = start(place, "train", "run.toml", "--resume", f"train.steps={saved.step + 6}")
    code, output = finished(process)
    assert code == 0, output
    assert lines(run, "step")[-1]["version"] == f"3.{saved.step + 6}"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_trainer_and_a_killed_engine_are_started_again(place: Path) -> None:
    run = place / "runs" / "r"
    settings = ("train.steps=60", "train.checkpoint_every=3", "eval.every=1000", "env.args.gate=160")
    process = start(place, "train", "run.toml", *settings)
    for command, kind in (("agentrl.engine.embedded", "engine 0"), ("agentrl.train", "trainer")):
        wait_for(lambda: len(lines(run, "step")) >= 4, process)
        kill_child(process.pid, command)
        wait_for(lambda kind=kind: kind in [f["what"] for f in lines(run, "fault")], process)  # type: ignore[misc]
    (place / "go").touch()
    code, output = finished(process)
    assert code == 0, output
    steps = lines(run, "step")
    assert steps[-1]["step"] == 60
    assert steps[-1]["version"].startswith("2.")
    assert "it is started again" in output
    assert all(s["staleness/max"] <= 4 for s in steps)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_full_disk_is_named_and_nothing_half_written_counts(place: Path) -> None:
    limited = ["bash", "-c", 'ulimit -f 40; exec "$@"', "limited"]
    code, output = finished(start(place, "train", "run.toml", "eval.every=1000", before=limited))
    assert code == 1, output
    assert re.search(r"File too large|cannot be (read or )?written|could not be written", output), output
    assert "Traceback" not in output
    assert newest(place / "runs" / "r" / "checkpoints") == (None, [])
    wait_for_none(place)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_it_learns_at_staleness_four(place: Path) -> None:
    settings = ["train.steps=16", "train.lr=1e-2", "rollout.groups_per_step=8", "rollout.samples=8"]
    code, output = finished(
        start(place, "train", "run.toml", *settings, "eval.every=16", "eval.temperature=1.0", "env.args.linger=true")
    )
    assert code == 0, output
    steps = lines(place / "runs" / "r", "step")
    rewards = [s["reward/mean"] for s in steps]
    assert fmean(rewards[-4:]) > fmean(rewards[:4]) + 0.2, output
    assert max(s["staleness/max"] for s in steps) <= 4
    assert max(s["staleness/several_versions_share"] for s in steps) > 0, "some sequences span several versions"
