"""The page's server: what it answers, to whom, and under which policy."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestClient, TestServer

from agentrl.errors import ConfigError
from agentrl.monitor.app import STATIC, make_app
from agentrl.monitor.runs import Run
from agentrl.monitor.sample import Shape, make_sample_run
from agentrl.monitor.serve import is_loopback, page_url

Client = TestClient[web.Request, web.Application]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "sums"
    make_sample_run(folder, Shape(steps=10, groups=3, samples=2, texts=("<img src=x onerror=alert(1)>",)))
    return folder


@pytest.fixture
async def client(run: Path) -> AsyncIterator[Client]:
    opened = Run(run)
    async with TestClient(TestServer(make_app([opened]))) as client:
        yield client
    opened.close()


async def test_every_answer_forbids_foreign_code(client: Client) -> None:
    for path in ("/", "/static/app.js", "/api/runs", "/api/runs/9/series", "/metrics", "/none"):
        answer = await client.get(path)
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
    assert (await client.get("/api/runs/9/series")).status == 404


async def test_the_page_and_its_parts_are_served_and_nothing_else(client: Client) -> None:
    page = await (await client.get("/")).text()
    for part in ("app.js", "style.css", "vendor/uPlot.iife.min.js"):
        assert f"/static/{part}" in page
    for name in [str(p.relative_to(STATIC)) for p in STATIC.rglob("*.js")]:
        assert f"/static/{name}" in page, "asked for ahead, or the browser finds out module by module"
        assert (await client.get(f"/static/{name}")).content_type == "text/javascript"
    for bad in ("/static/../app.py", "/static/%2e%2e/app.py", "/static/vendor/README.md", "/static/"):
        assert (await client.get(bad)).status == 404
    assert (await client.post("/api/runs")).status == 405


async def test_the_api_tells_curves_episodes_and_tokens(client: Client) -> None:
    (overview,) = await (await client.get("/api/runs")).json()
    assert (overview["name"], overview["alive"], overview["step"], overview["steps"]) == ("sums", False, 10, 10)
    series = await (await client.get("/api/runs/0/series?keys=loss")).json()
    assert series["step"] == list(range(1, 11))
    assert list(series["columns"]) == ["loss"]
    page = await (await client.get("/api/runs/0/episodes?trained=4&limit=1")).json()
    row = dict(zip(page["columns"], page["rows"][0], strict=True))
    episode = await (await client.get(f"/api/runs/0/episodes/{row['id']}")).json()
    assert episode["messages"][0]["content"] == "<img src=x onerror=alert(1)>"
    tokens = await (await client.get(f"/api/runs/0/episodes/{row['id']}/tokens?count=4")).json()
    assert len(tokens["ids"]) == len(tokens["pieces"]) == 4
    assert "".join(tokens["pieces"]) == "<img"
    group = await (await client.get(f"/api/runs/0/groups/{row['group_id']}")).json()
    assert [e["sample"] for e in group] == [0, 1]
    assert sum((await (await client.get("/api/runs/0/versions?trained=4")).json()).values()) > 0
    assert "[env]" in (await (await client.get("/api/runs/0/config")).json())["text"]


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("series?cursor=1,2", 400, "four whole numbers"),
        ("episodes?order=x", 400, "expected one of"),
        ("episodes/999", 404, "no episode 999"),
        ("episodes/1/tokens?trajectory=7", 404, "trajectories"),
        ("episodes/1/tokens?count=-1", 400, "whole number"),
    ],
)
async def test_what_cannot_be_answered_is_said_in_words(client: Client, path: str, status: int, text: str) -> None:
    answer = await client.get(f"/api/runs/0/{path}")
    assert answer.status == status
    assert text in (await answer.json())["error"]


async def test_a_name_that_was_made_to_point_here_gets_nothing(client: Client) -> None:
    for host in ("evil.example", "evil.example:8000", "127.0.0.1.evil.example"):
        assert (await client.get("/api/runs", headers={"Host": host})).status == 403
    for host in ("localhost:1", "127.0.0.1", "[::1]:80"):
        assert (await client.get("/api/runs", headers={"Host": host})).status == 200


async def test_beyond_loopback_a_token_opens_the_page(run: Path) -> None:
    opened = Run(run)
    async with TestClient(TestServer(make_app([opened], token="secret"))) as client:
        for path in ("/", "/api/runs", "/metrics", "/static/app.js", "/?token=wrong", "/api/runs?token=secret"):
            assert (await client.get(path)).status == 401
        bearer = {"Authorization": "Bearer secret"}
        assert (await client.get("/metrics", headers={**bearer, "Host": "gpu7:9000"})).status == 200
        first = await client.get("/?token=secret", allow_redirects=False)
        assert (first.status, first.headers["Location"]) == (303, "/")
        cookie = first.headers["Set-Cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=Strict" in cookie
        given = {"Cookie": cookie.partition(";")[0]}
        assert (await client.get("/api/runs", headers=given)).status == 200
    opened.close()


def test_addresses() -> None:
    assert all(is_loopback(host) for host in ("127.0.0.1", "127.1.2.3", "::1", "localhost"))
    assert not any(is_loopback(host) for host in ("0.0.0.0", "::", "10.0.0.1", "gpu7"))
    assert page_url("0.0.0.0", 80, "t") == "http://127.0.0.1:80/?token=t"
    assert page_url("::1", 80, None) == "http://[::1]:80/"


def test_the_environment_of_a_mixture_is_all_of_its_parts(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text('[[env]]\npath = "a:A"\n[[env]]\npath = "b:B"\n')
    run = Run(tmp_path)
    assert run.overview()["env"] == "a:A + b:B"
    (tmp_path / "config.toml").write_text("env = 3\ntrain = 'x'\n[model")
    assert run.overview()["env"] is None
    run.close()


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run's folder"):
        Run(tmp_path)


def test_the_vendored_files_are_those_that_were_published() -> None:
    vendor = STATIC / "vendor"
    sums = [line.split() for line in (vendor / "README.md").read_text().splitlines() if line.startswith("    ")]
    assert len(sums) == 3
    for digest, name in sums:
        assert hashlib.sha256((vendor / name).read_bytes()).hexdigest() == digest


def test_our_front_end_never_parses_markup() -> None:
    for path in STATIC.glob("*.js"):
        text = path.read_text()
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "DOMParser", "http:"):
            assert word not in text, f"{path.name} has {word}"
