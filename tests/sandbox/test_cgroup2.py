"""Boxes under cgroups of version 2. Where this machine has version 1, a kernel in a process has the other."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from agentrl.sandbox import SandboxOptions
from agentrl.sandbox.cgroup import LEAF, ROOT, make_cgroup
from agentrl.sandbox.rootfs import build_rootfs
from tests.sandbox.kinds import needs_bwrap, nothing_left, pool_of

TOP = Path(__file__).resolve().parents[2]
OPTIONS = SandboxOptions(kind="bubblewrap", memory_mb=64, disk_mb=4, pids=20, cpu=0.5)
needs_version_2 = pytest.mark.skipif(
    os.getuid() != 0 or not (ROOT / "cgroup.subtree_control").exists(),
    reason="needs root and cgroups of version 2 alone: .ci/cgroup2.sh",
)


@needs_version_2
@needs_bwrap
async def test_the_limits_are_of_the_whole_box() -> None:
    cgroup = make_cgroup("limits", OPTIONS)
    assert cgroup is not None
    found = {name: (cgroup.memory / name).read_text() for name in ("memory.max", "pids.max", "cpu.max")}
    assert found == {"memory.max": f"{68 << 20}\n", "pids.max": "21\n", "cpu.max": "50000 100000\n"}
    assert (cgroup.inside, cgroup.oom_kills()) == ("/sys/fs/cgroup", 0)
    assert cgroup.remove()
    with nothing_left():
        async with pool_of("bubblewrap", cgroups="require", memory_mb=64, disk_mb=4) as pool, pool.box() as box:
            assert (await box.exec(["python3", "-c", "print(1)"])).stdout == b"1\n"
            done = await box.exec(["python3", "-c", "bytearray(200 << 20)"])
            assert (done.returncode, done.oom) == (137, True)


@needs_version_2
def test_a_delegated_cgroup_is_divided_by_its_only_member() -> None:
    home = ROOT / "delegated"
    home.mkdir()
    for path in (home, home / "cgroup.procs", home / "cgroup.subtree_control"):
        os.chown(path, 1000, 1000)
    told, telling = os.pipe()
    pid = os.fork()
    if pid == 0:
        (home / "cgroup.procs").write_text(str(os.getpid()))
        os.setgid(1000)
        os.setuid(1000)
        mine = make_cgroup("mine", OPTIONS)
        text = "none" if mine is None else f"{mine.memory} {(mine.memory / 'memory.max').read_text().strip()}"
        os.write(telling, text.encode())
        os._exit(0 if mine is not None and mine.remove() else 1)
    assert os.waitpid(pid, 0)[1] == 0
    place, limit = os.read(told, 1000).decode().split()
    os.close(told)
    os.close(telling)
    assert (Path(place).parent, int(limit)) == (home, 68 << 20)
    (home / LEAF).rmdir()
    home.rmdir()


@pytest.mark.slow
@pytest.mark.timeout(2000)
@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("linux.uml") is None or (ROOT / "cgroup.subtree_control").exists(),
    reason="needs root and User Mode Linux (.ci/cgroup2.sh --install), and is of no use where version 2 is here",
)
@needs_bwrap
def test_all_of_it_in_a_kernel_with_version_2() -> None:
    build_rootfs()  # the other kernel cannot write it
    tests = ["test_cgroup2.py", "test_attacks.py::test_nothing_gets_out[bubblewrap]"]
    tests += ["test_faults.py::test_only_cgroups_of_the_dead_are_reaped"]
    tests += ["test_faults.py::test_a_killed_owner_leaves_nothing[bubblewrap]"]
    options = ["-q", "--color=no", "-p", "no:cacheprovider", "--timeout", "900", "-m", "not docker"]
    command = [".venv/bin/python", "-m", "pytest", *options, *(f"tests/sandbox/{name}" for name in tests)]
    done = subprocess.run(
        ["bash", ".ci/cgroup2.sh", *command],
        cwd=TOP,
        env={**os.environ, "CGROUP2_SECONDS": "1700"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1800,
        check=False,
    )
    if done.returncode == 125:
        pytest.skip(f"no User Mode Linux starts here: {done.stdout[-500:]}")
    assert done.returncode == 0, done.stdout[-6000:]
    assert "5 passed, 1 skipped" in done.stdout, done.stdout[-3000:]
