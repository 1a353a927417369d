"""The root file system that is made of this Python: what is in it, and what is not."""

from __future__ import annotations

import pytest

from agentrl.errors import ConfigError
from agentrl.sandbox.rootfs import build_rootfs
from tests.sandbox.kinds import BOUNDARIES, needs_bwrap, pool_of


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", BOUNDARIES)
async def test_installed_distributions_can_be_added(kind: str) -> None:
    async with pool_of(kind, packages=["pytest", "numpy"]) as pool, pool.box() as box:
        await box.write_file(
            "test_it.py", b"import numpy\ndef test_sum(): assert numpy.ones(3).sum() == 3\ndef test_no(): assert 0"
        )
        done = await box.exec(["python3", "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"], timeout=300)
        assert b"1 failed, 1 passed" in done.stdout, done
        assert done.returncode == 1


@needs_bwrap
async def test_a_plain_root_has_the_standard_library_and_nothing_else() -> None:
    program = """
import bz2, ctypes, decimal, hashlib, lzma, sqlite3, ssl, zlib, multiprocessing.shared_memory
import importlib.util, os
names = ('numpy', 'torch', 'agentrl', 'pip')
print([name for name in names if importlib.util.find_spec(name)], os.path.exists('/usr/lib/python3'))
"""
    async with pool_of("bubblewrap") as pool, pool.box() as box:
        done = await box.exec(["python3", "-c", program])
        assert (done.stdout, done.stderr) == (b"[] False\n", b"")
        assert (await box.exec(["sh", "-c", "seq 3 | awk '{s+=$1} END {print s}'"])).stdout == b"6\n"


@needs_bwrap
def test_it_is_built_once_per_content() -> None:
    root = build_rootfs()
    before = root.stat().st_mtime_ns
    assert build_rootfs() == root
    assert root.stat().st_mtime_ns == before


def test_a_package_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"busybox|pip install no-such-package"):
        build_rootfs(["no-such-package"])
