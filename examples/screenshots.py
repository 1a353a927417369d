"""The pictures of docs/monitoring.md, taken of a run's page in a headless Chromium.

    python examples/screenshots.py runs/demo-…/calculator docs

Needs Chromium (`apt-get install chromium`, or $AGENTRL_CHROMIUM), playwright and Pillow.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
from PIL import Image
from playwright.async_api import Page, async_playwright

from agentrl.monitor.episodes import Episodes

COLOURS = 256


async def take(page: Page, address: str, wait: str, out: Path) -> None:
    """One picture, with few colours: a page has few, and the file is a third."""
    await page.evaluate("address => { location.hash = address; }", address)
    await page.locator(wait).first.wait_for()
    await page.wait_for_load_state("networkidle")
    await page.wait_for_timeout(500)
    with_few_colours(Image.open(BytesIO(await page.screenshot()))).save(out, optimize=True)
    print(out)


def with_few_colours(picture: Image.Image) -> Image.Image:
    """The same with its most frequent colours exactly, and the shades between them at the nearest of those.

    Pillow's own choice of a palette mixes small areas of different colours, such as the swatches of a legend.
    """
    pixels = np.asarray(picture.convert("RGB"))
    colours, at, counts = np.unique(pixels.reshape(-1, 3), axis=0, return_inverse=True, return_counts=True)
    kept = colours[np.argsort(-counts)[:COLOURS]].astype(int)
    nearest = np.array([np.square(kept - colour).sum(1).argmin() for colour in colours], np.uint8)
    found = Image.fromarray(nearest[at].reshape(pixels.shape[:2]), "P")
    found.putpalette(kept.astype(np.uint8).tobytes())
    return found


def telling_episode(run: Path) -> int:
    """A trained episode of several turns whose tokens come from several versions, where there is one."""
    page = Episodes(run / "episodes.sqlite").page({"order": "-turns", "kind": "train", "limit": "500"})
    rows = [dict(zip(page["columns"], row, strict=True)) for row in page["rows"]]
    trained = [row for row in rows if row["trained"] is not None]
    return int(
        max(trained, key=lambda row: (row["newest"] > row["oldest"], row["turns"] <= 4, row["reward"] or 0))["id"]
    )


async def pictures(url: str, run: Path, out: Path) -> None:
    chromium = os.environ.get("AGENTRL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    episode = telling_episode(run)
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1180, "height": 800}, color_scheme="light")
        await page.goto(url)
        await page.wait_for_selector("html[data-ready]")
        await take(page, "#/curves", "figure.chart canvas", out / "page_curves.png")
        await take(page, "#/timeline", "canvas.timeline", out / "page_timeline.png")
        await take(page, f"#/episode?id={episode}&view=turns", "article.message", out / "page_turns.png")
        await page.locator("body").press("d")
        await take(page, f"#/episode?id={episode}&view=tokens", ".token", out / "page_tokens.png")
        await browser.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "agentrl.monitor.serve", str(given.run)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        asyncio.run(pictures(server.stdout.readline().strip(), given.run, given.out))
    finally:
        server.terminate()
        server.wait(30)


if __name__ == "__main__":
    main()
