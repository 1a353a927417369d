"""`agentrl doctor` on this machine and on broken set-ups: each finding names what is wrong and what to type."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from agentrl.cli import app
from agentrl.conductor.doctor import Finding, examine, examine_model, settings_of, sglang, trainer
from agentrl.conductor.interpreter import ABILITIES, packages
from agentrl.conductor.machine import gpu_count, memory, size, space
from tests.conductor.kit import make_place


def doctor(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["doctor", "--no-sandboxes", *arguments])


@pytest.fixture
def bare_python(tmp_path: Path) -> Path:
    """An interpreter without any package."""
    script = tmp_path / "bare-python"
    script.write_text(f'#!/bin/sh\nexec {os.path.realpath(sys.executable)} -S -E "$@"\n')
    script.chmod(0o755)
    return script


def only(findings: list[Finding]) -> Finding:
    (finding,) = findings
    return finding


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_this_machine_and_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(make_place(tmp_path))
    monkeypatch.delenv("AGENTRL_SGLANG_PYTHON", raising=False)
    result = doctor("run.toml")
    assert result.exit_code == 0, result.output
    verdicts = {line[8:23].strip(): line.split()[0] for line in result.output.splitlines() if line[:1] != " "}
    assert {verdicts[area] for area in ("Python", "trainer", "ports", "weights", "template")} == {"works"}
    assert verdicts["SGLang"] == "no"
    assert "LlamaForCausalLM" in result.output
    assert "turns end with '<|im_end|>'" in result.output
    assert "AGENTRL_SGLANG_PYTHON, or engine.python" in result.output


@pytest.mark.sglang
def test_a_real_sglang_can_do_all_that_a_run_needs() -> None:
    python = os.environ.get("AGENTRL_SGLANG_PYTHON")
    if not python:
        pytest.fail("AGENTRL_SGLANG_PYTHON does not name the interpreter that has SGLang")
    finding = only(list(sglang(packages(python))))
    assert finding.verdict == "works", finding
    assert all(ability in finding.what for ability in ABILITIES)


def test_no_sglang(bare_python: Path) -> None:
    finding = only(list(sglang(packages(str(bare_python)))))
    assert finding.verdict == "no"
    assert f"not in {bare_python}" in finding.what
    assert "examples/sglang_cpu/install.sh" in finding.remedy
    assert "--engine-python" in finding.remedy
    missing = only(list(sglang(packages("nowhere/python"))))
    assert "nowhere/python is no interpreter" in missing.what
    assert "AGENTRL_SGLANG_PYTHON" in missing.remedy


def test_a_python_that_breaks_is_quoted(tmp_path: Path) -> None:
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\necho 'libpython is gone' >&2\nexit 3\n")
    script.chmod(0o755)
    found = packages(str(script))
    assert found.problem == f"{script} ended with code 3: libpython is gone"


def test_an_old_sglang_is_told_what_it_lacks(tmp_path: Path, bare_python: Path) -> None:
    """A package of that name whose server has no route for pauses and knows no version of a token."""
    entry = tmp_path / "site" / "sglang" / "srt" / "entrypoints"
    entry.mkdir(parents=True)
    (tmp_path / "site" / "sglang" / "__init__.py").write_text("raise RuntimeError('importing it takes a GPU')")
    (entry / "http_server.py").write_text('"/update_weights_from_disk" "/weights_checker" "retract"')
    about = tmp_path / "site" / "sglang-0.4.1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 0.4.1\n")
    script = tmp_path / "old-python"
    path = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r})"
    script.write_text(f'#!/bin/sh\nshift\ncode="$1"; shift\nexec {bare_python} -c "{path}\n$code" "$@"\n')
    script.chmod(0o755)
    finding = only(list(sglang(packages(str(script)))))
    assert finding.verdict == "limited"
    assert "0.4.1" in finding.what
    assert "lacks: pause at a token, a version for each token" in finding.what
    assert "pip install -U 'sglang>=0.5.21'" in finding.remedy


def test_no_torch(bare_python: Path) -> None:
    finding = only(list(trainer(packages(str(bare_python)))))
    assert finding.verdict == "broken"
    assert "torch, transformers, deepspeed, accelerate not installed" in finding.what
    assert "pip install 'agentrl[train]'" in finding.remedy


def _no_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _endless_template(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}")


def _bad_jinja(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}")


def _cut_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize(
    ("harm", "area", "verdict", "text"),
    [
        (_no_template, "template", "broken", "has no chat template"),
        (_endless_template, "template", "limited", "cannot be continued exactly"),
        (_bad_jinja, "template", "broken", "not valid Jinja"),
        (_cut_weights, "weights", "broken", "is cut short"),
    ],
)
def test_a_model_that_is_not_whole(
    tmp_path: Path, harm: Callable[[Path], None], area: str, verdict: str, text: str
) -> None:
    folder = make_place(tmp_path) / "model"
    harm(folder)
    found = {finding.area: finding for finding in examine_model(folder)}
    assert found[area].verdict == verdict
    assert text in found[area].what
    assert found[area].remedy
    assert only(list(examine_model(tmp_path / "none"))).verdict == "broken"


def test_a_taken_port_and_a_read_only_folder(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (tmp_path / "file").write_text("")
        config = tmp_path / "run.toml"
        config.write_text(
            f'name = "x"\nmodel = "m"\nrun_dir = "{tmp_path}/file/runs"\n[env]\npath = "a:B"\n'
            f"[endpoint]\nport = {port}\n[engine]\nport = {port - 1}\ncount = 2\n"
        )
        settings = settings_of(config)
        found = list(examine(settings._replace(model=None), sandboxes=False, quick=True))
    disk = next(finding for finding in found if finding.area == "disk")
    assert (disk.verdict, disk.remedy) == ("broken", "set run_dir to a folder that you may write")
    told = [finding.what for finding in found if finding.area == "ports" and finding.verdict == "broken"]
    assert f"endpoint.port = {port}: Address already in use on 127.0.0.1" in told
    assert f"engine.port = {port}: Address already in use on 127.0.0.1" in told


def test_a_config_that_is_wrong_is_said_first(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('name = "x"\nmodle = "m"\n')
    result = doctor(str(tmp_path / "run.toml"))
    assert result.exit_code == 2
    assert "unknown key 'modle'; did you mean 'model'?" in " ".join(result.output.split())
    (tmp_path / "run.toml").write_text('name = "x"\nmodel = "m"\nenv.path = "a:B"\ntrain.collective_timeout = 9\n')
    result = doctor(str(tmp_path / "run.toml"))
    assert result.exit_code == 2
    assert "train.collective_timeout has no effect with train.ranks = 1" in " ".join(result.output.split())


def test_figures_of_the_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    available, total = memory()
    assert 0 < available <= total
    assert space(tmp_path / "a" / "b").problem == ""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert gpu_count() == 2
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_count() == 0
    assert [size(n) for n in (1_500, 2.5e6, 1.44e11)] == ["2 kB", "2.5 MB", "144 GB"]
