"""One conformance suite over every kind of box."""

from __future__ import annotations

import asyncio
import time

import pytest

from agentrl.errors import ConfigError, ContractError
from agentrl.sandbox import E2BStyle, ExecResult, SandboxLost, SandboxOptions, check_sandbox, open_sandbox
from agentrl.sandbox.link import ServerBox
from agentrl.sandboxes.subprocess import NoBoundaryWarning
from tests.sandbox.kinds import BOUNDARIES, eventually, long_sleep, nothing_left, pool_of, running

SUBPROCESS = pytest.param(
    "subprocess", marks=pytest.mark.filterwarnings("ignore::agentrl.sandboxes.subprocess.NoBoundaryWarning")
)
KINDS = [SUBPROCESS, *BOUNDARIES]


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_keeps_the_contract(kind: str) -> None:
    with nothing_left():
        async with pool_of(kind) as pool:
            await check_sandbox(pool)


async def test_subprocess_says_that_it_is_no_boundary() -> None:
    with pytest.warns(NoBoundaryWarning, match="NO boundary"):
        async with pool_of("subprocess"):
            pass


def test_no_kind_is_ever_chosen_silently() -> None:
    with pytest.raises(ValueError, match="kind"):
        SandboxOptions.model_validate({})
    with pytest.raises(ConfigError, match="expected one of bubblewrap, docker, subprocess"):
        open_sandbox(SandboxOptions(kind="chroot"))


@pytest.mark.parametrize("kind", KINDS)
async def test_programs_behave_as_in_a_fresh_interpreter(kind: str) -> None:
    programs = {
        "import sys; sys.exit('bye')": (1, b"", b"bye\n"),
        "import sys; sys.exit(256 + 7)": (7, b"", b""),
        "import atexit; atexit.register(print, 'last'); print('first')": (0, b"first\nlast\n", b""),
        "class A:\n def __del__(self): print('gone')\na = A()": (0, b"gone\n", b""),
        "f = open('out', 'w'); f.write('kept'); g = open('out')": (0, b"", b""),
        "import threading, time\nthreading.Thread(target=lambda: (time.sleep(.1), print('thread'))).start()": (
            0,
            b"thread\n",
            b"",
        ),
        "import os; os._exit(5)": (5, b"", b""),
        "if __name__ == '__main__': print(sorted(k for k in globals() if not k.startswith('__')))": (0, b"[]\n", b""),
        "raise KeyboardInterrupt": (130, b"", None),
        "import sys\nsys.stdout = None": (0, b"", b""),
        "import sys; print([m for m in sys.modules if 'agentrl' in m])": (0, b"[]\n", b""),
    }
    async with pool_of(kind) as pool, pool.box() as box:
        for program, expected in programs.items():
            done = await box.exec(["python3", "-c", program])
            found = (done.returncode, done.stdout, done.stderr if expected[2] is not None else None)
            assert found == expected, program
        assert await box.read_file("out") == b"kept"
        await box.write_file("pack/helper.py", b"VALUE = 7")
        await box.write_file("pack/main.py", b"import helper, sys\nprint(helper.VALUE, sys.argv, __file__)\n1/0")
        warm = await box.exec(["python3", "pack/main.py", "x"])
        fresh = await box.exec(["python3", "pack/main.py", "x"], env={"PYTHONHASHSEED": "0"})
        assert (
            (warm.returncode, warm.stdout)
            == (fresh.returncode, fresh.stdout)
            == (1, f"7 ['pack/main.py', 'x'] {box.workdir}/pack/main.py\n".encode())
        )
        assert warm.stderr.splitlines()[:2] == fresh.stderr.splitlines()[:2]
        assert (await box.exec(["python3", "nope.py"])).returncode == 2


@pytest.mark.parametrize("kind", KINDS)
async def test_facade_in_e2b_style(kind: str) -> None:
    async with pool_of(kind) as pool, pool.box() as box:
        hosted = E2BStyle(box)
        await hosted.files.write("a.txt", "naïve")
        done = await hosted.commands.run("cat a.txt | wc -c; exit 4")
        assert (done.stdout.strip(), done.exit_code, done.error) == ("6", 4, None)
        assert (await hosted.commands.run(" ".join(long_sleep()), timeout=0.3)).error == "timeout"
        assert await hosted.files.read("a.txt") == "naïve"


@pytest.mark.parametrize("kind", KINDS)
async def test_a_cancelled_program_leaves_nothing(kind: str) -> None:
    with nothing_left():
        async with pool_of(kind) as pool:
            program, boxes = long_sleep(), []

            async def use() -> None:
                async with pool.box() as box:
                    boxes.append(box)
                    await box.exec(program, timeout=600)

            user = asyncio.create_task(use())
            await eventually(lambda: bool(running(*program)))
            user.cancel()
            await asyncio.wait([user])
            assert user.cancelled()
            with pytest.raises(SandboxLost, match="is gone"):
                await boxes[0].exec(["true"])
            async with pool.box() as another:
                assert (await another.exec(["echo", "ok"])).ok
    await eventually(lambda: not running(*program))


@pytest.mark.parametrize("kind", KINDS)
async def test_bad_calls_are_errors_of_the_caller(kind: str) -> None:
    async with pool_of(kind) as pool, pool.box() as box:
        with pytest.raises(ValueError, match="expected at least one word"):
            await box.exec([])
        # What a model may write: no fault of the box, which goes on.
        for unfit in ("a\0b", "half \ud83d"):
            for call in (
                box.exec(["echo", unfit]),
                box.exec(["true"], cwd=unfit),
                box.exec(["true"], env={"A": unfit}),
                box.write_file(unfit, b""),
                box.read_file(unfit),
            ):
                with pytest.raises(ValueError, match="whole characters"):
                    await call
        for name in ("", "A=B"):
            with pytest.raises(ValueError, match="env has the name"):
                await box.exec(["true"], env={name: "x"})
        with pytest.raises(ValueError, match="expected seconds"):
            await box.exec(["true"], timeout=0)
        with pytest.raises(FileNotFoundError):
            await box.exec(["true"], cwd="missing")
        assert (await box.exec(["true"])).ok


async def test_check_sandbox_finds_a_liar() -> None:
    class Liar:
        """Kind whose boxes swallow exit codes."""

        def __init__(self, options: SandboxOptions) -> None:
            from agentrl.sandboxes.subprocess import Boxes

            with pytest.warns(NoBoundaryWarning):
                self._boxes = Boxes(options)

        async def start(self, slot: int) -> ServerBox:
            box = await self._boxes.start(slot)
            honest = box.exec

            async def lying(*args: object, **kwargs: object) -> ExecResult:
                return (await honest(*args, **kwargs))._replace(returncode=0)  # type: ignore[arg-type]

            box.exec = lying  # type: ignore[method-assign]
            return box

        async def close(self) -> None:
            await self._boxes.close()

    from agentrl.sandbox.pool import Pool

    options = SandboxOptions(kind="mine:Liar", slots=1)
    async with Pool(options, Liar(options)) as pool:
        with pytest.raises(ContractError, match="streams and exit code: found"):
            await check_sandbox(pool)


@pytest.mark.parametrize("kind", BOUNDARIES)
@pytest.mark.slow
async def test_many_at_once_wait_in_line_and_clocks_start_with_the_program(kind: str) -> None:
    async with pool_of(kind) as pool:
        await pool.warm()

        async def one(number: int) -> ExecResult:
            async with pool.box() as box:
                return await box.exec(["sh", "-c", f"sleep 0.12; echo {number}"], timeout=10.0)

        started = time.monotonic()
        done = await asyncio.gather(*(one(number) for number in range(200)))
        assert [result.stdout for result in done] == [f"{number}\n".encode() for number in range(200)]
        assert not any(result.timed_out for result in done)
        assert time.monotonic() - started > 10.0  # so that a clock that starts in the line would have run out
