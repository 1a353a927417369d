"""A plain member of a weights group, with the two calls of the feed that bring it into one."""

from __future__ import annotations

import datetime
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d as c10d

from agentrl.train.meeting import join

WAIT = datetime.timedelta(seconds=300)


class Receiver:
    """Joins whatever group it is asked into, and keeps what comes. `leave_after` buckets it is gone, and has `left`.

    What goes into a socket has been sent: a sender notices only if a bucket is still to come when that has happened.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self.buckets = 0
        self.leave_after: int | None = None
        self.left = threading.Event()
        self._group: Any = None
        self._names = 0
        self._work: threading.Thread | None = None
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                told = json.dumps(receiver._group_of(asked) if self.path == "/group" else receiver._expect(asked))
                self.send_response(200)
                self.send_header("Content-Length", str(len(told)))
                self.end_headers()
                self.wfile.write(told.encode())

            def log_message(self, format: str, *args: object) -> None:
                return

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def done(self) -> None:
        """Wait until all that was announced has come."""
        assert self._work is not None
        self._work.join(300)

    def _group_of(self, asked: dict[str, Any]) -> dict[str, Any]:
        if self._group is None:
            self._names += 1
            self._start(self._join, f"group-{self._names}", asked["port"])
        return {"name": f"group-{self._names}", "world": 2, "backend": "gloo"}

    def _join(self, name: str, port: int) -> None:
        self._group = join(TCPStore("127.0.0.1", port, 2, False, WAIT), name, 1, 2, "gloo")

    def _expect(self, asked: dict[str, Any]) -> dict[str, Any]:
        self.done()
        self._start(self._receive, asked["buckets"])
        return {"go": True}

    def _receive(self, buckets: list[dict[str, Any]]) -> None:
        self.buckets = len(buckets)
        for number, bucket in enumerate(buckets):
            if number == self.leave_after:
                self._group = None
                self.left.set()
                return
            dtypes = [getattr(torch, name) for name in bucket["dtypes"]]
            sizes = [t.itemsize * torch.Size(s).numel() for t, s in zip(dtypes, bucket["shapes"], strict=True)]
            flat = torch.empty(sum(sizes), dtype=torch.uint8)
            options = c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = 0, 0
            self._group.broadcast([flat], options).wait(WAIT)
            parts = zip(bucket["names"], torch.split(flat, sizes), dtypes, bucket["shapes"], strict=True)
            self.tensors |= {name: part.view(dtype).view(shape) for name, part, dtype, shape in parts}

    def _start(self, work: Any, *arguments: Any) -> None:
        self._work = threading.Thread(target=work, args=arguments, daemon=True)
        self._work.start()
