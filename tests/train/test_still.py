"""Whether a thread gets on, as the heartbeats say it."""

from __future__ import annotations

import dis
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agentrl.train.still import Stillness


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def waiting() -> Iterator[threading.Thread]:
    """A thread that waits for others, and will not move until the end of the test."""
    over = threading.Lock()
    over.acquire()

    def waits_for_others() -> None:
        over.acquire()

    (wait,) = (i.offset for i in dis.get_instructions(waits_for_others) if i.opname == "CALL")
    thread = threading.Thread(target=waits_for_others)
    thread.start()
    # In the lock itself, and not a few instructions before: those would be seen as a move.
    while (frame := sys._current_frames()[thread.ident or 0]).f_code.co_name != "waits_for_others" or (
        frame.f_lasti != wait
    ):
        time.sleep(0.001)
    del frame
    yield thread
    over.release()
    thread.join()


def test_a_thread_that_waits_stands_still(waiting: threading.Thread) -> None:
    clock = Clock()
    stillness = Stillness(waiting, clock)
    for clock.now in (5.0, 10.0, 15.0):
        seconds, where = stillness.look()
        assert seconds == clock.now
    assert where.startswith("waits_for_others (test_still.py:")


def read(place: Path) -> None:
    (place / "weights").read_bytes()


def write(place: Path) -> None:
    (place / "copy").write_bytes(b"x" * (2 << 20))


@pytest.mark.parametrize("load", [read, write])
def test_a_process_that_moves_bytes_gets_on(
    load: Callable[[Path], None], waiting: threading.Thread, tmp_path: Path
) -> None:
    (tmp_path / "weights").write_bytes(b"x" * (2 << 20))
    clock = Clock()
    stillness = Stillness(waiting, clock)
    clock.now = 20.0
    assert stillness.look()[0] == 20
    load(tmp_path)
    clock.now = 25.0
    assert stillness.look()[0] == 0
    clock.now = 30.0
    assert stillness.look()[0] == 5


def test_a_process_with_a_child_gets_on(waiting: threading.Thread) -> None:
    clock = Clock()
    stillness = Stillness(waiting, clock)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as compiler:
        clock.now = 20.0
        assert stillness.look()[0] == 0
        compiler.communicate()


def test_a_child_that_was_there_before_says_nothing(waiting: threading.Thread) -> None:
    clock = Clock()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child:
        stillness = Stillness(waiting, clock)
        clock.now = 20.0
        assert stillness.look()[0] == 20
        child.communicate()


def test_a_thread_that_computes_gets_on() -> None:
    over = threading.Event()

    def computes() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=computes)
    thread.start()
    clock = Clock()
    stillness = Stillness(thread, clock)
    spent = time.pthread_getcpuclockid(thread.ident or 0)
    began = time.clock_gettime(spent)
    while time.clock_gettime(spent) < began + 0.5:
        time.sleep(0.01)
    clock.now = 5.0
    assert stillness.look()[0] == 0
    over.set()
    thread.join()


def test_a_thread_that_goes_from_wait_to_wait_gets_on() -> None:
    first, second = threading.Barrier(2), threading.Barrier(2)

    def waits() -> None:
        first.wait()
        second.wait()

    thread = threading.Thread(target=waits)
    thread.start()
    while not first.n_waiting:
        time.sleep(0.001)
    clock = Clock()
    stillness = Stillness(thread, clock)
    first.wait()
    while not second.n_waiting:
        time.sleep(0.001)
    clock.now = 20.0
    assert stillness.look()[0] == 0
    second.wait()
    thread.join()
