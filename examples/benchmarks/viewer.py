"""The page on a made-up run of 10,000 episodes, in a headless Chromium over loopback.

    python examples/benchmarks/viewer.py [--episodes 10000] [--repeat 5]

`first_paint_s` is the first paint with content after the address was opened, `curves_s` the time until all curves are
drawn; `filter_ms` is the time from a change of a filter until its rows stand on the page and are painted: the median of
all kinds of filters (`filter_worst_ms`: the slowest). What makes that so, whatever the machine: the most rows that
stand on the page, questions to the server a filter, and the largest answer. The server runs in a process of its own.
The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.async_api import Page, Response, async_playwright

from agentrl.monitor.sample import Shape, make_sample_run

SAMPLES = 8
GROUPS = 10
FILTERS = (
    ("select[name=stop]", "sandbox_lost"),
    ("select[name=stop]", ""),
    ("input[name=reward_min]", "0.5"),
    ("input[name=reward_min]", ""),
    ("input[name=version]", "20"),
    ("input[name=version]", ""),
    ("select[name=order]", "-reward"),
    ("input[name=trained]", "7"),
    ("input[name=trained]", ""),
    ("select[name=split]", "1"),
    ("input[name=text]", "row 11"),
)
CHANGE = """([selector, value]) => new Promise(resolve => {
    const node = document.querySelector(selector), section = document.querySelector("section[data-loaded]");
    const before = section.dataset.loaded, begin = performance.now();
    new MutationObserver((_, observer) => {
        if (section.dataset.loaded === before) return;
        observer.disconnect();
        requestAnimationFrame(() => setTimeout(() => resolve(performance.now() - begin)));
    }).observe(section, { attributes: true });
    node.value = value;
    node.dispatchEvent(new Event("input", { bubbles: true }));
})"""


def chromium() -> str:
    found = os.environ.get("AGENTRL_CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if found is None:
        sys.exit("no Chromium: apt-get install chromium, or name one in $AGENTRL_CHROMIUM")
    return found


async def first_paint(page: Page, url: str) -> tuple[float, float]:
    """Seconds to the first paint with content, and until all curves are drawn."""
    await page.goto("about:blank")
    await page.goto(url)
    await page.wait_for_selector("html[data-ready]")
    drawn = await page.evaluate("new Promise(r => requestAnimationFrame(() => setTimeout(() => r(performance.now()))))")
    paint = await page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    return paint / 1e3, drawn / 1e3


async def measure(url: str, repeat: int) -> dict[str, float]:
    async with async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=chromium(), args=["--no-sandbox"])
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        paints = [await first_paint(page, url) for _ in range(repeat)]
        await page.evaluate("location.hash = '#/episodes'")
        await page.wait_for_selector("section[data-loaded] tbody tr")
        answers: list[Response] = []
        # The page asks now and then what else is new, which no filter has caused.
        page.on("response", lambda answer: answers.append(answer) if "/episodes" in answer.url else None)
        times: list[float] = []
        rows: list[int] = []
        sizes: list[int] = []
        for change in FILTERS * repeat:
            times.append(await page.evaluate(CHANGE, list(change)))
            rows.append(await page.locator("table.episodes tbody tr").count())
            sizes += [len(await answer.body()) for answer in answers[len(sizes) :]]
        await browser.close()
    return {
        "first_paint_s": round(statistics.median(paint for paint, _ in paints), 3),
        "curves_s": round(statistics.median(drawn for _, drawn in paints), 3),
        "curves_first_s": round(paints[0][1], 3),
        "filter_ms": round(statistics.median(times), 1),
        "filter_worst_ms": round(max(times), 1),
        "rows_most": max(rows),
        "requests_a_filter": len(answers) / len(times),
        "kilobytes_a_filter": round(max(sizes) / 1e3, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=10_000)
    parser.add_argument("--repeat", type=int, default=5)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        run = Path(place) / "run"
        begin = time.perf_counter()
        steps = max(1, given.episodes // (GROUPS * SAMPLES))
        make_sample_run(run, Shape(steps=steps, groups=GROUPS, samples=SAMPLES))
        print(f"{steps * GROUPS * SAMPLES} episodes written in {time.perf_counter() - begin:.1f} s", flush=True)
        server = subprocess.Popen(
            [sys.executable, "-m", "agentrl.monitor.serve", str(run)], stdout=subprocess.PIPE, text=True
        )
        try:
            assert server.stdout is not None
            found = asyncio.run(measure(server.stdout.readline().strip(), given.repeat))
        finally:
            server.terminate()
            server.wait(30)
    print(json.dumps({"benchmark": "viewer", "episodes": steps * GROUPS * SAMPLES, **found}))


if __name__ == "__main__":
    main()
