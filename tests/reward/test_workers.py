"""Calls with hard deadlines, in real worker processes."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import ContractError, DeadlineExceeded
from agentrl.reward.math import averify, verify
from agentrl.reward.options import MathOptions
from agentrl.reward.workers import CallFailed, NoWorker, WorkerLost, WorkerPool

FUNCTIONS = """
import os, signal, time

def add(a, b):
    print("noise that must not reach the protocol")
    return a + b

def pid():
    return os.getpid()

def spin(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass
    return "done"

def nap(seconds):
    time.sleep(seconds)
    return "done"

def until(path):
    while not os.path.exists(path):
        time.sleep(0.01)
    return "done"

def widow():
    os.kill(os.getppid(), signal.SIGKILL)
    return stuck()

def stuck():
    return len(str(7 ** (7 ** 9)))  # one C call that never looks at signals

def die():
    os._exit(3)

def shout():
    print("on stdout", flush=True)
    os.write(2, b"on stderr\\n")
    os._exit(3)

def fail():
    raise ValueError("no such thing")

def memory():
    return len(bytearray(8 << 30))
"""


@pytest.fixture(scope="module")
def functions(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("functions") / "functions_for_workers.py"
    path.write_text(FUNCTIONS)
    return str(path)


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    with WorkerPool(2) as made:
        yield made


def test_a_call_returns_and_its_worker_stays_warm(pool: WorkerPool, functions: str) -> None:
    assert pool.call(f"{functions}:add", 2, b=3, seconds=60) == 5
    assert pool.call(f"{functions}:pid", seconds=60) == pool.call(f"{functions}:pid", seconds=60) != os.getpid()


@pytest.mark.parametrize("call", [("spin", 60), ("stuck",)])
def test_a_hanging_call_is_killed_and_the_others_go_on(pool: WorkerPool, functions: str, call: tuple[str, ...]) -> None:
    with ThreadPoolExecutor(1) as threads:
        hanging = threads.submit(pool.call, f"{functions}:{call[0]}", *call[1:], seconds=1.0)
        assert pool.call(f"{functions}:add", 1, 1, seconds=60) == 2
        with pytest.raises(DeadlineExceeded, match="longer than 1 s"):
            hanging.result()
    assert pool.call(f"{functions}:add", 1, 2, seconds=60) == 3


def test_errors_say_what_happened(pool: WorkerPool, functions: str) -> None:
    with pytest.raises(CallFailed, match="raised ValueError in its worker: no such thing"):
        pool.call(f"{functions}:fail", seconds=60)
    with pytest.raises(CallFailed, match="MemoryError"):
        pool.call(f"{functions}:memory", seconds=60)
    with pytest.raises(WorkerLost, match="exit code 3"):
        pool.call(f"{functions}:die", seconds=60)
    assert pool.call(f"{functions}:add", 1, 1, seconds=60) == 2


async def test_the_event_loop_is_not_blocked(pool: WorkerPool, functions: str, tmp_path: Path) -> None:
    async def go_on() -> None:
        await asyncio.sleep(0.01)
        (tmp_path / "here").touch()

    going = asyncio.create_task(go_on())
    assert await pool.acall(f"{functions}:until", str(tmp_path / "here"), seconds=60) == "done"
    await going


def test_what_only_computes_is_measured_by_what_it_computes(pool: WorkerPool, functions: str) -> None:
    assert pool.call(f"{functions}:nap", 0.75, seconds=0.5, by_cpu=True) == "done"
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.5 s"):
        pool.call(f"{functions}:spin", 1e6, seconds=0.5, by_cpu=True)
    with pytest.raises(DeadlineExceeded, match=r"longer than 0\.1 s"):
        pool.call(f"{functions}:nap", 1e6, seconds=0.1, by_cpu=True)  # and ten times as much by the clock


def test_that_no_worker_is_free_makes_no_answer_wrong(functions: str, tmp_path: Path) -> None:
    with WorkerPool(1, queue_seconds=0.05) as narrow, ThreadPoolExecutor(1) as threads:
        assert narrow.call(f"{functions}:add", 1, 1, seconds=60) == 2
        busy = threads.submit(narrow.call, f"{functions}:until", str(tmp_path / "here"), seconds=60)
        while not narrow._places.empty():
            time.sleep(0.01)
        with pytest.raises(NoWorker, match="no reward worker was free"):
            verify("\\boxed{\\frac{3}{8}}", "0.375", pool=narrow)
        (tmp_path / "here").touch()
        assert busy.result() == "done"


def test_a_worker_that_does_not_start_makes_no_answer_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.reward.workers.START_SECONDS", 1e-6)
    with WorkerPool(1) as pool, pytest.raises(NoWorker, match="did not start"):
        verify("\\boxed{\\frac{3}{8}}", "0.375", pool=pool)


@pytest.mark.slow
@pytest.mark.parametrize("by_cpu", [False, True])
def test_a_worker_that_lost_its_parent_ends_by_itself(functions: str, tmp_path: Path, by_cpu: bool) -> None:
    place = tmp_path / "pid"
    context = multiprocessing.get_context("spawn")
    parent = context.Process(target=_call_and_be_killed, args=(functions, str(place), by_cpu))
    parent.start()
    parent.join()  # by what it called
    worker = int(place.read_text())
    until = time.monotonic() + 300
    while Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().split()[2]:
        assert time.monotonic() < until, "the worker outlived its parent"
        time.sleep(0.1)


def _call_and_be_killed(functions: str, place: str, by_cpu: bool) -> None:
    pool = WorkerPool(1)
    Path(place).write_text(str(pool.call(f"{functions}:pid", seconds=60)))
    pool.call(f"{functions}:widow", seconds=1, by_cpu=by_cpu)


def test_a_closed_pool_leaves_no_process(functions: str) -> None:
    with WorkerPool(1) as pool:
        pid = pool.call(f"{functions}:pid", seconds=60)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(ContractError, match="at least 1"):
        WorkerPool(0)


def test_in_a_run_each_worker_has_a_log(functions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENTRL_LOGS", str(tmp_path / "logs"))
    with WorkerPool(2) as pool:
        for _ in range(2):
            with pytest.raises(WorkerLost):
                pool.call(f"{functions}:shout", seconds=60)
    (log,) = (tmp_path / "logs").iterdir()
    assert log.name.startswith("reward-")
    assert log.read_text() == "on stdout\non stderr\n" * 2, "the next worker of a place goes on in its log"


def _verdict(completion: str) -> bool | None:
    return verify(completion, "0.375").correct


async def test_verify_works_in_threads_pools_and_loops() -> None:
    completion = "\\boxed{\\frac{3}{8}}"
    assert (await averify(completion, "0.375")).correct is True
    assert await asyncio.to_thread(_verdict, completion) is True
    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(_verdict, [completion] * 24)) == [True] * 24
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("forkserver")) as processes:
        assert processes.submit(_verdict, completion).result(110) is True


SLOW = pytest.mark.slow
TOWERS = ["2^{2^{100}}", "|x-1|+|x-2|+|x^5-x-1|<4", r"\ln" * 100 + "2", "e^{" * 80 + "1" + "}" * 80]


@pytest.mark.parametrize("tower", ["9^{9^{9^9}}", *(pytest.param(tower, marks=SLOW) for tower in TOWERS)])
def test_a_comparison_ends_in_time(tower: str) -> None:
    _verdict("\\boxed{\\frac{3}{8}}")
    verdict = verify(f"\\boxed{{{tower}}}", "7", MathOptions(seconds=1))
    assert (verdict.correct, verdict.reason in {"time_limit", "worker_lost"}) == (False, True)


@pytest.mark.slow
def test_a_gold_that_cannot_be_read_in_time_is_a_fault_of_the_data() -> None:
    verdict = verify("\\boxed{x>2}", "|x-1|+|x-2|+|x^5-x-1|<4", MathOptions(seconds=0.5))
    assert (verdict.correct, verdict.reason) == (None, "gold_unparseable")
