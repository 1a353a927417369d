"""A real Chromium for the page's tests, and a page that fails them when anything goes wrong in it."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from playwright.async_api import Page, async_playwright

from agentrl.monitor.serve import serve

PATIENCE_MS = 90_000.0
"""A browser on a loaded machine."""


def chromium() -> str:
    """Its path; without one the test is skipped."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = os.environ.get("AGENTRL_CHROMIUM") or next((path for n in names if (path := shutil.which(n))), None)
    if found is None:
        pytest.skip("no Chromium: apt-get install chromium, or name one in $AGENTRL_CHROMIUM")
    return found


@asynccontextmanager
async def served(*runs: Path, token: str | None = None) -> AsyncIterator[str]:
    """The address of a page that shows `runs`, without the token."""
    stop, ready = asyncio.Event(), asyncio.get_running_loop().create_future()
    task = asyncio.create_task(serve(runs, host="127.0.0.1", port=0, token=token, on_ready=ready.set_result, stop=stop))
    try:
        yield (await asyncio.wait_for(ready, 60)).partition("?")[0]
    finally:
        stop.set()
        await task


@asynccontextmanager
async def opened(url: str, *, scheme: str = "light", allowed: Sequence[str] = ()) -> AsyncIterator[Page]:
    """The page at `url`, ready. On leaving: no error, no refused load, no dialog and no request elsewhere happened."""
    wrong: list[str] = []
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"], timeout=PATIENCE_MS)
        try:
            page = await browser.new_page(
                viewport={"width": 1280, "height": 900},
                color_scheme="dark" if scheme == "dark" else "light",
            )
            page.set_default_timeout(PATIENCE_MS)
            page.on("console", lambda m: wrong.append(f"console: {m.text}") if m.type in ("error", "warning") else None)
            page.on("pageerror", lambda error: wrong.append(f"error: {error}"))
            page.on("dialog", lambda dialog: wrong.append(f"dialog: {dialog.message}"))
            page.on(
                "request",
                lambda r: (
                    None if r.url.startswith((url.partition("?")[0], "data:")) else wrong.append(f"asked for {r.url}")
                ),
            )
            await page.goto(url)
            await page.wait_for_selector("html[data-ready]")
            yield page
        finally:
            await browser.close()
    assert [text for text in wrong if not any(part in text for part in allowed)] == []


async def go(page: Page, address: str) -> None:
    """Follow an address within the page."""
    await page.evaluate("address => { location.hash = address; }", address)
