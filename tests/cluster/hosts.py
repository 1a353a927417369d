"""Hosts on one machine, made and removed by the tests: network namespaces on a bridge, with real TCP between them."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

TOKEN = "a-token-for-the-tests-only"


def why_not() -> str:
    """Why there can be no such hosts here; empty where there can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "network namespaces need the program ip (iproute2)"
    name = f"arl-probe-{secrets.token_hex(2)}"
    try:
        ip("netns", "add", name)
        ip("netns", "exec", name, "true")
        ip("-n", name, "link", "add", "br0", "type", "bridge")
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces cannot be made here: {error}"
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)
    return ""


def ip(*arguments: str) -> str:
    """Run `ip`; what it says."""
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


class Host:
    """A namespace with an address, and what was started in it."""

    def __init__(self, name: str, address: str, switch: str, link: str, logs: Path) -> None:
        self.name, self.address, self.switch, self.link, self.logs = name, address, switch, link, logs
        self.started: list[subprocess.Popen[bytes]] = []

    def start(
        self, title: str, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """`agentrl …` on this host; its output goes to `<logs>/<title>.log`."""
        with (self.logs / f"{title}.log").open("ab") as log:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, "-m", "agentrl.cli", *arguments],
                cwd=cwd,
                env={**os.environ, "OMP_NUM_THREADS": "1", "AGENTRL_CLUSTER_TOKEN": TOKEN, **(env or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.started.append(process)
        return process

    def worker(self, role: str, conductor: str, cwd: Path, *arguments: str) -> subprocess.Popen[bytes]:
        """A worker of this host."""
        title = f"{self.short}-{role}"
        place = ("--scratch", str(cwd / "scratch" / title))  # a killed worker cannot remove a folder of its own
        started = ("worker", "--role", role, "--conductor", conductor, "--name", title, *place, *arguments)
        return self.start(title, *started, cwd=cwd)

    def cut(self) -> None:
        """Pull its cable."""
        ip("-n", self.switch, "link", "set", self.link, "down")

    def mend(self) -> None:
        """Put it back."""
        ip("-n", self.switch, "link", "set", self.link, "up")

    def freeze(self) -> None:
        """Stop everything on it."""
        self.signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on, as if no time had passed."""
        self.signal(signal.SIGCONT)

    @property
    def short(self) -> str:
        """Its name in the test."""
        return self.name.rpartition("-")[2]

    def signal(self, number: signal.Signals) -> None:
        """Signal every process of the host at once."""
        for pid in ip("netns", "pids", self.name).split():
            try:
                os.kill(int(pid), number)
            except ProcessLookupError:
                continue

    def kill(self) -> None:
        """Pull its plug."""
        end = time.monotonic() + 60
        while ip("netns", "pids", self.name).split():
            assert time.monotonic() < end, "processes that cannot be killed"
            self.signal(signal.SIGKILL)
            time.sleep(0.05)
        for process in self.started:
            process.wait()
        self.started.clear()


@contextmanager
def make_hosts(names: Sequence[str], logs: Path) -> Iterator[list[Host]]:
    """Hosts with addresses 10.77.0.1, 10.77.0.2, … that reach each other and nothing else."""
    prefix = f"arl{secrets.token_hex(2)}"
    switch = f"{prefix}-switch"
    hosts: list[Host] = []
    try:
        ip("netns", "add", switch)
        ip("-n", switch, "link", "add", "br0", "type", "bridge")
        ip("-n", switch, "link", "set", "br0", "up")
        for number, name in enumerate(names, 1):
            host = Host(f"{prefix}-{name}", f"10.77.0.{number}", switch, f"p{number}", logs)
            ip("netns", "add", host.name)
            hosts.append(host)
            ip("-n", switch, "link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
            ip("-n", switch, "link", "set", host.link, "master", "br0", "up")
            ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", "eth0")
            ip("-n", host.name, "link", "set", "eth0", "up")
            ip("-n", host.name, "link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts:
            host.kill()
        for name in [*(host.name for host in hosts), switch]:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
