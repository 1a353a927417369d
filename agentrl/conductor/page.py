"""The run's own page, served by a process of its own: whatever becomes of it, the run goes on."""

from __future__ import annotations

import os
import secrets
import socket
import sys
import time
from pathlib import Path

from agentrl.child import Child
from agentrl.conductor.config import MonitorSection
from agentrl.conductor.desk import Desk
from agentrl.errors import ConfigError
from agentrl.monitor.serve import TOKEN_VARIABLE, is_loopback, page_url
from agentrl.monitor.trackers import check_trackers

REAP_SECONDS = 5.0


def page_file(run: Path) -> Path:
    """Holds the page's address while the run lives; the token in it is for the run's owner alone."""
    return run / "page.url"


class PageProcess:
    """Started with the run and ended with it; `agentrl view` shows the run afterwards."""

    def __init__(self, desk: Desk, options: MonitorSection) -> None:
        self._file = page_file(desk.folder.path)
        self._child: Child | None = None
        self._kept: socket.socket | None = None
        if options.page:
            try:
                self._start(desk, options)
            except OSError as error:
                desk.note(f"no page: {error}")

    def _start(self, desk: Desk, options: MonitorSection) -> None:
        host, port = options.page_host, options.page_port
        if not port:
            # Its address is told before it listens: nobody else may get that port until then.
            self._kept = _bound(host, 0, socket.SO_REUSEPORT)
            port = int(self._kept.getsockname()[1])
        token = None if is_loopback(host) else secrets.token_urlsafe(18)
        argv = [sys.executable, "-m", "agentrl.monitor.serve", str(desk.folder.path), "--host", host]
        argv += ["--kept"] if self._kept is not None else []
        environment = {} if token is None else {TOKEN_VARIABLE: token}
        # Last in line for the processor: rollouts and training go first.
        nice = ["nice", "-n", "10"] if os.path.exists("/usr/bin/nice") else []
        log = desk.folder.logs / "page.log"
        self._child = Child("the page", [*nice, *argv, "--port", str(port)], log=log, env=environment)
        url = page_url(host, port, token)
        with open(os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(url + "\n")
        desk.note(f"page: {url}")

    def stop(self) -> None:
        """End it at once: it has nothing to lose."""
        if self._child is not None:
            self._child.kill()
            end = time.monotonic() + REAP_SECONDS
            while self._child.poll() is None and time.monotonic() < end:
                time.sleep(0.01)
            self._file.unlink(missing_ok=True)
        if self._kept is not None:
            self._kept.close()


def check_monitor(options: MonitorSection) -> None:
    """ConfigError where the page's port is taken or a tracker's package is missing."""
    check_trackers(options.trackers)
    if options.page:
        try:
            _bound(options.page_host, options.page_port, socket.SO_REUSEADDR).close()
        except OSError as error:
            raise ConfigError(
                f"monitor.page_port = {options.page_port}: {error.strerror or error} on {options.page_host}; choose "
                "another one, 0 for any free one, or set monitor.page = false"
            ) from error


def _bound(host: str, port: int, option: int) -> socket.socket:
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        found.setsockopt(socket.SOL_SOCKET, option, 1)
        found.bind((host, port))
    except OSError:
        found.close()
        raise
    return found
