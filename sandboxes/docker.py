"""Boxes that are containers, through the Docker SDK: no network, read-only root, few capabilities, every limit.

One container a box, kept warm with a fork server as its command; requests travel through the attached streams. The
image is made of the running Python (`agentrl.sandbox.rootfs`) unless one is named. A container ends by itself when its
owner's streams close; by its label the next start finds and removes what a dead owner left.
"""

from __future__ import annotations

import asyncio
import io
import logging
import os
import socket
import struct
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from agentrl.errors import ConfigError, SandboxLost
from agentrl.sandbox.confine import Config
from agentrl.sandbox.link import AT_START, BOOT, Loss, ServerBox, base_env, config_error
from agentrl.sandbox.options import SandboxOptions
from agentrl.sandbox.owner import is_dead, owner_label
from agentrl.sandbox.rootfs import build_rootfs

LABEL = "agentrl.owner"
REPOSITORY = "agentrl-box"
WRITABLE = ("/work", "/tmp", "/dev/shm")
CAPABILITIES = ["SETUID", "SETGID", "KILL", "CHOWN", "DAC_OVERRIDE", "FOWNER"]
"""What the fork server needs to start programs as another user, kill them and clean up; no program keeps any."""
UID = 1_000_000
API_SECONDS = 60
T = TypeVar("T")
log = logging.getLogger(__name__)


class Boxes:
    """Docker containers with a warm fork server each."""

    def __init__(self, options: SandboxOptions) -> None:
        if options.rootfs or options.cgroups == "off":
            raise ConfigError("sandbox.rootfs and cgroups = \"off\" have no effect with kind 'docker': remove them")
        if options.image and options.packages:
            raise ConfigError("sandbox.packages has no effect with an image of your own: install them in the image")
        self.options = options
        self._threads = ThreadPoolExecutor(16, thread_name_prefix="docker")
        self._docker = _connect(options)
        reap_containers(self._docker)
        self._image = _pulled(self._docker, options.image) if options.image else _built(self._docker, options)

    async def start(self, slot: int) -> ServerBox:
        """A running container with its server."""
        box = _Container(self, slot)
        try:
            return await box.start()
        except BaseException:
            await asyncio.shield(box.stop())
            raise

    async def close(self) -> None:
        """Close the connection to the engine."""
        self._docker.close()
        self._threads.shutdown(wait=False)

    async def call(self, what: str, act: Callable[[], T]) -> T:
        """Run a call of the SDK in a thread; its errors are SandboxLost."""
        import docker.errors
        import requests.exceptions

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, act)
        except (docker.errors.DockerException, requests.exceptions.RequestException, OSError) as error:
            raise SandboxLost(f"docker: {what} failed: {error}; is the engine up, and its disk not full?") from error

    def create(self, slot: int) -> Any:
        """The arguments are the containment: read them with `docker inspect`."""
        options, env = self.options, base_env(WRITABLE[0], None) | AT_START
        mount = f"rw,nosuid,nodev,exec,size={options.disk_mb << 20},nr_inodes={options.inodes},mode=700"
        memory = (options.memory_mb + options.disk_mb) << 20  # the tmpfs above are memory too
        return self._docker.containers.create(
            self._image,
            command=["python3", "-c", BOOT],
            entrypoint=[],
            user="0:0",
            working_dir="/",
            environment=env,
            network_mode="none",
            read_only=True,
            tmpfs=dict.fromkeys(WRITABLE, mount),
            cap_drop=["ALL"],
            cap_add=CAPABILITIES,
            security_opt=["no-new-privileges"],
            mem_limit=memory,
            memswap_limit=memory,
            pids_limit=options.pids + 2,
            nano_cpus=int(options.cpu * 1e9),
            ipc_mode="private",
            init=True,
            stdin_open=True,
            labels={LABEL: owner_label(), "agentrl.slot": str(slot)},
            log_config={"Type": "none"},
            hostname="box",
        )

    def attach(self, container: Any) -> socket.socket:
        """The raw stream of the container's stdin, stdout and stderr."""
        stream = self._docker.api.attach_socket(container.id, {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1})
        raw = getattr(stream, "_sock", stream)  # a SocketIO over it for plain sockets, itself for others
        if type(raw) is not socket.socket:
            raise SandboxLost(f"docker: attached over {type(raw).__name__}; expected a unix or plain TCP socket")
        copy = raw.dup()
        stream.close()
        raw.close()
        return copy

    def config(self) -> Config:
        """What the server is told."""
        options = self.options
        return Config(
            workdir=WRITABLE[0],
            writable=WRITABLE,
            uid=UID,
            namespace=True,
            mounts=False,
            cgroup=True,
            seccomp=True,
            memory=options.memory_mb << 20,
            disk=options.disk_mb << 20,
            inodes=options.inodes,
            pids=options.pids,
            output=options.output_bytes,
            env=base_env(WRITABLE[0], None),
        )


class _Container:
    """One container, from its creation to its removal."""

    def __init__(self, home: Boxes, slot: int) -> None:
        self._home, self._slot = home, slot
        self._container: Any = None
        self._attaching: asyncio.Future[socket.socket] | None = None
        self._stderr = bytearray()
        self._pump: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def start(self) -> ServerBox:
        home = self._home
        # Shielded: a container that is being created when its user gives up must still be known, to be removed.
        creating = asyncio.ensure_future(home.call("creating a container", lambda: home.create(self._slot)))
        try:
            self._container = await asyncio.shield(creating)
        except asyncio.CancelledError:
            self._container = await creating
            raise
        container = self._container
        self._attaching = asyncio.ensure_future(home.call("attaching", lambda: home.attach(container)))
        raw = await asyncio.shield(self._attaching)
        raw.setblocking(False)
        raw_reader, self._writer = await asyncio.open_connection(sock=raw)
        reader = asyncio.StreamReader()
        self._pump = asyncio.create_task(self._demultiplex(raw_reader, reader))
        await home.call("starting a container", container.start)
        name = f"docker box {self._slot} ({container.short_id})"
        box = ServerBox(name, home.config(), reader, self._writer, self.stop, self.why)
        await box.boot(home.options.start_seconds)
        return box

    async def _demultiplex(self, raw: asyncio.StreamReader, out: asyncio.StreamReader) -> None:
        """Docker's stream of frames to the server's stdout; its stderr is kept for error texts."""
        frames = Frames()
        try:
            while data := await raw.read(1 << 18):
                for stream, payload in frames.feed(data):
                    if stream == 1:
                        out.feed_data(payload)
                    else:
                        self._stderr += payload[: max(0, 8000 - len(self._stderr))]
        except OSError as error:
            self._stderr += f" ({error})".encode()
        finally:
            out.feed_eof()

    async def why(self) -> Loss:
        """What Docker says about a container that ended."""
        text = self._stderr.decode("utf-8", "replace").strip()
        try:
            async with asyncio.timeout(10.0):
                await self._home.call("inspecting", self._container.reload)
                # Its streams close before the engine has noted how it ended.
                while self._container.attrs["State"]["Running"] and self._pump is not None and self._pump.done():
                    await asyncio.sleep(0.1)
                    await self._home.call("inspecting", self._container.reload)
                state = self._container.attrs["State"]
                told = f"container {state['Status']}, exit code {state['ExitCode']} {state['Error']} {text}"
                return Loss(told.strip(), bool(state["OOMKilled"]))
        except (SandboxLost, TimeoutError) as error:
            return Loss(f"{error} {text}".strip())

    async def stop(self) -> None:
        """Kill and remove it."""
        import docker.errors

        if self._writer is not None:
            self._writer.close()
        elif self._attaching is not None:
            await asyncio.wait([self._attaching])  # the thread that makes the socket cannot be stopped
            if self._attaching.exception() is None:
                self._attaching.result().close()
        if self._pump is not None:
            self._pump.cancel()
            await asyncio.wait([self._pump], timeout=5.0)
        container = self._container
        if container is None:
            return

        def remove() -> None:
            try:
                container.remove(force=True, v=True)
            except docker.errors.NotFound:
                pass
            except docker.errors.APIError as error:
                if error.status_code != 409:  # its removal goes on already
                    raise

        try:
            await self._home.call("removing a container", remove)
        except SandboxLost as error:
            log.warning("%s; it is labelled and will be removed at the next start", str(error))


class Frames:
    """Docker's attach format, cut into (stream, payload) as it arrives: 8 bytes of header, 1 stdout or 2 stderr."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are whole by now."""
        self._rest += data
        found = []
        while len(self._rest) >= 8:
            stream, size = struct.unpack(">BxxxI", self._rest[:8])
            if len(self._rest) < 8 + size:
                break
            found.append((stream, bytes(self._rest[8 : 8 + size])))
            del self._rest[: 8 + size]
        return found


def reap_containers(client: Any) -> list[str]:
    """Remove the containers whose owner is dead; their ids."""
    import docker.errors

    reaped = []
    for container in client.containers.list(all=True, filters={"label": LABEL}, ignore_removed=True):
        if is_dead(container.labels[LABEL]):
            try:
                container.remove(force=True, v=True)
            except docker.errors.APIError:
                continue  # somebody else removes it
            reaped.append(container.short_id)
    return reaped


def _connect(options: SandboxOptions) -> Any:
    try:
        import docker
        import docker.errors
    except ImportError:
        raise config_error("docker", "the docker package is missing", "pip install 'agentrl[docker]'") from None
    url = options.docker_url or os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    if url.startswith("unix://") and not Path(url.removeprefix("unix://")).exists():
        raise config_error(
            "docker", f"no engine answers at {url}: there is no such socket", "start it, or set docker_url"
        )
    try:
        kwargs: dict[str, Any] = {"timeout": API_SECONDS, "max_pool_size": 32}
        client = (
            docker.DockerClient(base_url=options.docker_url, **kwargs)
            if options.docker_url
            else docker.from_env(**kwargs)
        )
        client.ping()
    except docker.errors.DockerException as error:
        raise config_error("docker", f"no engine answers at {url}: {error}", "start it, or set docker_url") from error
    return client


def _pulled(client: Any, image: str) -> str:
    import docker.errors

    try:
        client.images.get(image)
    except docker.errors.ImageNotFound:
        try:
            client.images.pull(image)
        except docker.errors.DockerException as error:
            raise ConfigError(f"sandbox.image {image!r} is not here and cannot be pulled: {error}") from error
    return image


def _built(client: Any, options: SandboxOptions) -> str:
    import docker.errors

    root = build_rootfs(options.packages)
    name = f"{REPOSITORY}:{root.name}"
    try:
        client.images.get(name)
    except docker.errors.ImageNotFound:
        try:
            client.api.import_image_from_data(_tar(root), repository=REPOSITORY, tag=root.name)
        except docker.errors.DockerException as error:
            raise SandboxLost(f"docker: importing the image failed: {error}; is the engine's disk full?") from error
    return name


def _tar(root: Path) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        archive.add(root, arcname=".", filter=_as_root)
    return buffer.getvalue()


def _as_root(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    entry.uid = entry.gid = 0
    return entry
