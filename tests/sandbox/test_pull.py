"""An image that is not here is pulled: from a registry of our own, which has one image."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from agentrl.sandbox.rootfs import build_rootfs
from agentrl.sandboxes.docker import REPOSITORY
from tests.sandbox.kinds import needs_docker, nothing_left, pool_of

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG = "application/vnd.docker.container.image.v1+json"
LAYER = "application/vnd.docker.image.rootfs.diff.tar.gzip"


def _described(kind: str, body: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "size": len(body), "digest": f"sha256:{hashlib.sha256(body).hexdigest()}"}


@contextmanager
def registry(saved: bytes) -> Iterator[str]:
    """`host:port` of a registry that has the image of a `docker save`, under every name."""
    with tarfile.open(fileobj=io.BytesIO(saved)) as tar:
        files = {member.name: found.read() for member in tar if (found := tar.extractfile(member)) is not None}
    entry = json.loads(files["manifest.json"])[0]
    config, layers = files[entry["Config"]], [gzip.compress(files[name], 1) for name in entry["Layers"]]
    manifest = json.dumps(
        {
            "schemaVersion": 2,
            "mediaType": MANIFEST,
            "config": _described(CONFIG, config),
            "layers": [_described(LAYER, layer) for layer in layers],
        }
    ).encode()
    blobs = {_described("", body)["digest"]: body for body in (config, *layers, manifest)}

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.do_GET()

        def do_GET(self) -> None:
            _, _, what = self.path.rpartition("/")
            body = manifest if "/manifests/" in self.path else blobs.get(what, b"{}")
            self.send_response(200)
            self.send_header("Docker-Distribution-Api-Version", "registry/2.0")
            self.send_header("Docker-Content-Digest", str(_described("", body)["digest"]))
            self.send_header("Content-Type", MANIFEST if body is manifest else "application/octet-stream")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: pytest's output is read by people."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@needs_docker
@pytest.mark.docker
async def test_an_image_is_pulled_where_it_is_not_here() -> None:
    import docker

    client = docker.from_env()
    try:
        async with pool_of("docker"):  # builds our own image, which the registry then has
            pass
        image = client.images.get(f"{REPOSITORY}:{build_rootfs(()).name}")
        with registry(b"".join(image.save())) as address, nothing_left():
            name = f"{address}/elsewhere:1"
            async with pool_of("docker", image=name) as pool, pool.box() as box:
                assert (await box.exec(["python3", "-c", "print(6 * 7)"])).stdout == b"42\n"
            assert client.images.get(name).attrs["RepoDigests"] == [f"{address}/elsewhere@{_digest(client, name)}"]
            client.images.remove(name)
    finally:
        client.close()


def _digest(client: Any, name: str) -> str:
    return str(client.images.get_registry_data(name).id)
