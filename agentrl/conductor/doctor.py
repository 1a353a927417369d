"""`agentrl doctor`: what of agentrl works on this machine, what does not, and what to type."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from agentrl.conductor.config import RunConfig
from agentrl.conductor.folder import SHARED_MEMORY
from agentrl.conductor.interpreter import ABILITIES, Packages, imports, packages, sglang_python
from agentrl.conductor.knobs import refuse_dead_knobs
from agentrl.conductor.machine import gpu_count, memory, open_files, size, space
from agentrl.config import load
from agentrl.endpoint.parse import detect_format
from agentrl.endpoint.render import Renderer
from agentrl.endpoint.template import ChatTemplate
from agentrl.engine.weights import model_config, weight_shapes
from agentrl.errors import AgentRLError
from agentrl.sandbox.doctor import survey

Verdict = Literal["works", "limited", "no", "broken"]
"""`no`: it is not here, and only what asks for it needs it. `broken`: no run can do without it."""
_LEAST_PYTHON = (3, 11)
_LITTLE_MEMORY = 4e9
_LITTLE_DISK = 10e9
_LITTLE_SHARED = 1e9
_FEW_FILES = 4096


class Finding(NamedTuple):
    """One thing that was looked at. `remedy` is what to type or change; "" where all is well."""

    area: str
    verdict: Verdict
    what: str
    remedy: str = ""

    def __str__(self) -> str:
        first = f"{self.verdict:8}{self.area:15}{self.what}"
        return f"{first}\n{'':23}{self.remedy}" if self.remedy else first


class Settings(NamedTuple):
    """What to look at besides the machine. Ports are those that a config names."""

    model: Path | None = None
    engine_python: Path | None = None
    run_dir: Path = Path("runs")
    ports: tuple[tuple[str, str, int], ...] = ()
    """(setting, host, port)."""


def settings_of(
    config: Path | None = None, *, model: Path | None = None, engine_python: Path | None = None
) -> Settings:
    """What the run of `config` would use, where one is given; `model` and `engine_python` win over it.

    ConfigError where the config is wrong, also where a setting has no effect.
    """
    if config is None:
        return Settings(model, engine_python)
    run = load(RunConfig, config)
    refuse_dead_knobs(run, gpus=gpu_count() if run.cluster.kind == "local" else None)
    ports = [("endpoint.port", run.endpoint.host, run.endpoint.port)] if run.endpoint.port else []
    if run.engine.port is not None:
        ports += [("engine.port", run.engine.host, run.engine.port + i) for i in range(run.engine.count)]
    if run.monitor.page and run.monitor.page_port:
        ports.append(("monitor.page_port", run.monitor.page_host, run.monitor.page_port))
    return Settings(model or run.model, engine_python or run.engine.python, run.run_dir, tuple(ports))


def examine(
    settings: Settings, *, docker_url: str = "", sandboxes: bool = True, quick: bool = False
) -> Iterator[Finding]:
    """Look at everything, one finding at a time; sandboxes take the longest, up to half a minute.

    `quick` looks which of the trainer's packages are there and does not import them.
    """
    yield from _this_python(quick)
    yield from sglang(packages(sglang_python(settings.engine_python)))
    yield _memory()
    yield _disk(settings.run_dir)
    yield _shared_memory()
    yield from _ports(settings.ports)
    yield _files()
    if settings.model is not None:
        yield from examine_model(settings.model)
    if sandboxes:
        yield from _sandboxes(docker_url)


def _this_python(quick: bool) -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if sys.version_info < _LEAST_PYTHON:
        yield Finding("Python", "broken", f"{version}, at least 3.11 is needed", "make a venv with a newer Python")
    else:
        yield Finding("Python", "works", f"{version} ({sys.executable})")
    yield from trainer(packages(sys.executable), quick=quick)


def trainer(found: Packages, *, quick: bool = False) -> Iterator[Finding]:
    """torch, transformers and DeepSpeed; where they are installed and unless `quick`, by importing them."""
    needed = ("torch", "transformers", "deepspeed", "accelerate")
    have = " ".join(f"{name} {found.versions[name]}" for name in needed if name in found.versions)
    missing = [name for name in needed if name not in found.versions]
    install = "pip install 'agentrl[train]' (torch first, from its CPU index where there is no GPU)"
    if found.problem:
        yield Finding("trainer", "broken", found.problem, "use this environment's own python")
        return
    if missing:
        yield Finding("trainer", "broken", f"{', '.join(missing)} not installed; there is {have or 'none'}", install)
        return
    if quick:
        yield Finding("trainer", "works", f"{have}; not imported")
        return
    seen = imports(found.executable)
    if seen.problem:
        yield Finding("trainer", "broken", f"{have}; importing them failed: {seen.problem}", install)
        return
    yield Finding("trainer", "works", have)
    if seen.gpus:
        cards = "; ".join(f"{name}, {size(free)} of {size(total)} free" for name, free, total in seen.gpus)
        yield Finding("GPU", "works", f"CUDA {seen.cuda}: {cards}")
    elif gpu_count():
        built = f"this torch is built for CUDA {seen.cuda}" if seen.cuda else "this torch is built for the CPU alone"
        yield Finding(
            "GPU",
            "limited",
            f"{gpu_count()} here and torch sees none: {built}",
            "install the torch of this driver's CUDA (nvidia-smi names it): pytorch.org/get-started/locally",
        )
    else:
        yield Finding(
            "GPU",
            "no",
            "there is none, or CUDA_VISIBLE_DEVICES hides it: the trainer and the engine compute on the CPU",
        )


def sglang(found: Packages) -> Iterator[Finding]:
    """SGLang in `found`, and what its version can do that a run needs."""
    where = "name the interpreter that has it: --engine-python, $AGENTRL_SGLANG_PYTHON, or engine.python in the config"
    if found.problem:
        yield Finding("SGLang", "no", found.problem, where)
        return
    version = found.versions.get("sglang")
    if version is None:
        install = "examples/sglang_cpu/install.sh FOLDER on a CPU, pip install 'sglang>=0.5.21' beside a GPU"
        yield Finding(
            "SGLang", "no", f"not in {found.executable}", f"{where}; {install}; engine.kind = 'embedded' works"
        )
        return
    lacks = [name for name in ABILITIES if not found.abilities.get(name)]
    told = f"{version} in {found.executable} (Python {found.python})"
    if lacks:
        yield Finding("SGLang", "limited", f"{told} lacks: {', '.join(lacks)}", "pip install -U 'sglang>=0.5.21' there")
        return
    yield Finding("SGLang", "works", f"{told}: {', '.join(ABILITIES)}")


def _memory() -> Finding:
    available, total = memory()
    cores = len(os.sched_getaffinity(0))
    told = f"{size(available)} of {size(total)} available, {cores} cores"
    if available < _LITTLE_MEMORY:
        return Finding("memory", "limited", told, "enough for tiny models only: end other programs, or raise the limit")
    return Finding("memory", "works", told)


def _disk(run_dir: Path) -> Finding:
    found = space(run_dir)
    if found.problem:
        return Finding("disk", "broken", found.problem, "set run_dir to a folder that you may write")
    told = f"{size(found.free)} of {size(found.total)} free for {run_dir.absolute()}"
    if found.free < _LITTLE_DISK:
        return Finding(
            "disk", "limited", told, "a checkpoint takes 16 bytes a parameter: free some space, or set run_dir"
        )
    return Finding("disk", "works", told)


def _shared_memory() -> Finding:
    if not SHARED_MEMORY.is_dir():
        return Finding("shared memory", "limited", f"no {SHARED_MEMORY}: weights are handed over on the disk")
    found = space(SHARED_MEMORY)
    if found.problem:
        return Finding("shared memory", "limited", f"{found.problem}: weights are handed over on the disk")
    told = f"{size(found.free)} of {size(found.total)} free in {SHARED_MEMORY}, for three versions of the weights"
    if found.free < _LITTLE_SHARED:
        return Finding("shared memory", "limited", told, "in Docker: --shm-size=8g; else weights go over the disk")
    return Finding("shared memory", "works", told)


def _ports(wanted: Sequence[tuple[str, str, int]]) -> Iterator[Finding]:
    for key, host, port in wanted or (("", "127.0.0.1", 0),):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError as error:
                told = f"{key} = {port}: {error.strerror} on {host}" if key else f"{host}: {error.strerror}"
                yield Finding("ports", "broken", told, "choose another one, or leave it out for any free one")
                continue
            yield Finding("ports", "works", f"{host}:{probe.getsockname()[1]} can be listened on")


def _files() -> Finding:
    most = open_files()
    told = f"{most} open files a process"
    if most < _FEW_FILES:
        return Finding("open files", "limited", told, "each HTTP agent holds a connection: ulimit -n 65536")
    return Finding("open files", "works", told)


def examine_model(folder: Path) -> Iterator[Finding]:
    """Config, weights, tokenizer and chat template of a model folder."""
    if not folder.is_dir():
        yield Finding("model", "broken", f"there is no folder {folder}", f"hf download NAME --local-dir {folder}")
        return
    yield _tried("weights", "get the model again", lambda: _weights(folder))
    yield _tried("template", "take the model's -Instruct form, or write chat_template.jinja", lambda: _template(folder))


def _weights(folder: Path) -> Finding:
    config, shapes = model_config(folder), weight_shapes(folder)
    kind = ", ".join(config.get("architectures") or ["unknown architecture"])
    total = sum(p.stat().st_size for p in folder.glob("*.safetensors"))
    context = config.get("max_position_embeddings", "?")
    return Finding("weights", "works", f"{kind}, {len(shapes)} tensors, {size(total)}, {context} tokens of context")


def _template(folder: Path) -> Finding:
    template = ChatTemplate.load(folder)
    renderer = Renderer(template)
    form = detect_format(template.source)
    if renderer.reason is not None:
        return Finding(
            "template",
            "limited",
            f"cannot be continued exactly: {renderer.reason}",
            'endpoint.unproven_template = "turn" makes every turn its own trajectory; or use another template',
        )
    tools = "tools" in template.source
    told = f"continued exactly; turns end with {renderer.end_text!r}; "
    told += f"tools are described, calls read as {form}" if tools else f"tools are not described, calls read as {form}"
    return Finding("template", "works", told)


def _tried(area: str, remedy: str, look: Callable[[], Finding]) -> Finding:
    try:
        return look()
    except AgentRLError as error:
        return Finding(area, "broken", str(error), remedy)


def _sandboxes(docker_url: str) -> Iterator[Finding]:
    for offer in survey(docker_url):
        if offer.works:
            weak = offer.reason or offer.kind == "subprocess"
            yield Finding(offer.kind, "limited" if weak else "works", f"contains {offer.contains}", offer.reason)
        else:
            yield Finding(offer.kind, "no", f"does not start here; it would contain {offer.contains}", offer.reason)
