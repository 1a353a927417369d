"""`agentrl report`: a run as one HTML file to send around. No script, nothing loaded, everything foreign escaped."""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentrl.errors import AgentRLError
from agentrl.monitor.runs import Run
from agentrl.monitor.series import Cursor
from agentrl.monitor.svg import Line, number, plot

Series = Mapping[str, Any]
Z95 = 1.96
LONG = 4000
CHOICES = (
    ("highest reward", {"order": "-reward", "kind": "train"}),
    ("lowest reward", {"order": "reward", "kind": "train"}),
    ("newest", {"order": "-id", "kind": "train"}),
    ("held out, newest", {"order": "-id", "kind": "eval"}),
    ("without a verdict", {"order": "-id", "failed": "1"}),
)
PLOTS: Sequence[tuple[str, Sequence[tuple[str, str]]]] = (
    ("Loss", (("loss", "loss"),)),
    ("Staleness (versions)", (("staleness/mean", "mean"), ("staleness/max", "largest"))),
    ("KL divergence", (("kl/behaviour", "sampling policy"), ("kl/proximal", "step's start"), ("kl/reference", "ref."))),
    ("Entropy", (("entropy", "entropy"),)),
    ("Clipped share", (("ratio/clip_fraction", "ratio"), ("behaviour/cap_fraction", "weight capped"))),
    ("Probability ratio", (("ratio/mean", "step's start"), ("behaviour/ratio_mean", "sampling policy"))),
    ("Tokens a second", (("rollout/tokens_per_second", "sampled"), ("tokens_per_second", "trained"))),
    ("Idle share", (("engine/idle_share", "engines"), ("trainer/idle_share", "trainer"))),
    ("Groups in the pool", (("pool/pooled", "waiting"),)),
)
STYLE = """
:root{--paper:#fff;--panel:#f6f7f9;--ink:#16191d;--muted:#59626d;--grid:#dfe3e8;--c0:#0072b2;--c1:#c44e00;--c2:#00795a;
--c3:#a8488a;--c4:#a06a00;--c5:#1f7f9e;--c6:#5b4fc0;--c7:#6b6b6b}
@media(prefers-color-scheme:dark){:root{--paper:#14171b;--panel:#1d2127;--ink:#e8ebef;--muted:#a3adb8;--grid:#343b44;
--c0:#56b4e9;--c1:#ff8f4d;--c2:#3ecfa0;--c3:#e08fc5;--c4:#f0c04a;--c5:#7fd6e8;--c6:#a79cff;--c7:#b5b5b5}}
body{background:var(--paper);color:var(--ink);font:15px/1.45 system-ui,sans-serif;margin:1.5rem auto;max-width:80rem;
padding:0 1rem}
.plots{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(24rem,100%),1fr));gap:1rem}
figure{margin:0;padding:.6rem;background:var(--panel);border-radius:6px}figcaption{font-weight:600}
svg{width:100%}svg text{font-size:11px;fill:var(--muted)}polyline{fill:none;stroke-width:2}.grid{stroke:var(--grid)}
.band{opacity:.18}.legend{list-style:none;display:flex;flex-wrap:wrap;gap:.1rem 1rem;padding:0;margin:.2rem 0;
font-size:.86rem}.swatch{display:inline-block;width:.85em;height:.85em;margin-right:.35em;border-radius:2px}
pre{white-space:pre-wrap;overflow-wrap:anywhere;unicode-bidi:isolate;
font:13px/1.45 ui-monospace,monospace;margin:.2rem 0}
article{border-left:4px solid var(--muted);background:var(--panel);margin:.5rem 0;padding:.3rem .7rem}
article.assistant{border-color:var(--c0)}article.tool{border-color:var(--c4)}.quiet{color:var(--muted)}
td,th{text-align:left;padding:.1rem 1rem .1rem 0;vertical-align:top}summary{cursor:pointer;padding:.2rem 0}
""" + "".join(f".s{i}{{stroke:var(--c{i})}}.f{i}{{fill:var(--c{i})}}.b{i}{{background:var(--c{i})}}" for i in range(8))
_CONTROL = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")


def write_report(path: Path, out: Path, *, episodes: int = 3) -> None:
    """Write the report of the run in `path` to `out`; with up to `episodes` of each kind. ConfigError for no run."""
    run = Run(path)
    try:
        text = report(run, episodes)
    finally:
        run.close()
    partial = out.with_name(out.name + ".tmp")
    partial.write_text(text, encoding="utf-8")
    partial.replace(out)


def report(run: Run, episodes: int) -> str:
    """The page's text."""
    overview, series = run.overview(), run.series(Cursor(), [])
    digest = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    sections = [
        f"<h1>{text_of(overview['name'])}</h1>",
        _overview(overview, series),
        f'<h2>Curves</h2><div class="plots">{_plots(series)}</div>',
        _events(series),
        _episodes(run, episodes),
        f"<h2>Config</h2><pre>{text_of(run.config_text())}</pre>",
        f'<p class="quiet">written by agentrl report on {time.strftime("%Y-%m-%d %H:%M:%S %Z")}</p>',
    ]
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{text_of(overview['name'])} – agentrl</title><style>{STYLE}</style></head>"
        f"<body><main>{''.join(sections)}</main></body></html>\n"
    )


def text_of(value: object) -> str:
    """Foreign text as markup that shows it: escaped, its control characters made visible, cut where very long."""
    text = str(value).encode("utf-8", "replace").decode()
    shown = _CONTROL.sub(lambda found: f"⟨{ord(found[0]):04x}⟩", text[:LONG])
    rest = f" … ({len(text)} characters)" if len(text) > LONG else ""
    return html.escape(shown + rest, quote=True)


def _overview(overview: Mapping[str, Any], series: Series) -> str:
    rewards = [e["eval/reward"] for e in series["events"] if e["kind"] == "eval" and e.get("eval/reward") is not None]
    rows = [
        ("state", overview["phase"]),
        ("steps", f"{overview['step']:g} of {overview['steps']}"),
        ("environment", overview["env"] or "–"),
        ("model", overview["model"] or "–"),
        ("held-out reward", f"{number(rewards[0])} → {number(rewards[-1])}" if rewards else "–"),
        ("wall time", _duration(series["time"])),
    ]
    body = "".join(f'<tr><th scope="row">{name}</th><td>{text_of(value)}</td></tr>' for name, value in rows)
    error = f"<pre>{text_of(overview['error'])}</pre>" if overview["error"] else ""
    return f"<table>{body}</table>{error}"


def _duration(times: Sequence[float]) -> str:
    seconds = times[-1] - times[0] if times else 0.0
    return f"{seconds / 60:.1f} min between first and last step"


def _plots(series: Series) -> str:
    columns, steps = series["columns"], series["step"]
    found = [plot(title, lines) for title, lines in _by_environment(series)]
    for title, keys in PLOTS:
        found.append(plot(title, [Line(label, steps, columns[key]) for key, label in keys if key in columns]))
    for title, prefix in (("How episodes ended", "rollout/stop_"), ("What became of groups", "rollout/groups_")):
        found.append(plot(title, [Line(k.removeprefix(prefix), steps, columns[k]) for k in columns if prefix in k]))
    return "".join(found)


def _by_environment(series: Series) -> list[tuple[str, list[Line]]]:
    columns, steps = series["columns"], series["step"]
    envs = sorted({key.removeprefix("envs/").rpartition("/")[0] for key in columns if key.startswith("envs/")})
    charts = []
    for title, figure, fallback in (("Reward", "reward", "reward/mean"), ("Answer length", "length", "length/mean")):
        lines = []
        for env in envs:
            errors = [None if e is None else Z95 * e for e in columns.get(f"envs/{env}/{figure}_error", ())]
            if (mean := columns.get(f"envs/{env}/{figure}")) is not None:
                lines.append(Line(text_plain(env), steps, mean, errors))
        if not lines and fallback in columns:
            lines.append(Line("all", steps, columns[fallback]))
        if figure == "reward":
            lines += _held_out(series["events"])
        charts.append((title, lines))
    return charts


def _held_out(events: Sequence[Mapping[str, Any]]) -> list[Line]:
    last = {e["step"]: e for e in events if e["kind"] == "eval" and e.get("eval/reward") is not None}
    steps = sorted(last)
    errors = [Z95 * (last[step].get("eval/reward_error") or 0.0) for step in steps]
    return [Line("held out", steps, [last[step]["eval/reward"] for step in steps], errors, True)] if steps else []


def text_plain(value: str) -> str:
    """Control characters made visible; to be escaped by whoever makes markup of it."""
    return _CONTROL.sub(lambda found: f"⟨{ord(found[0]):04x}⟩", value)


def _events(series: Series) -> str:
    faults = [e for e in series["events"] if e["kind"] in ("fault", "begin")]
    rows = "".join(
        f"<tr><td>{time.strftime('%Y-%m-%d %H:%M:%S', time.localtime(e['time']))}</td><td>{text_of(e['kind'])}</td>"
        f"<td><pre>{text_of(e.get('error') or e.get('version') or '')}</pre></td></tr>"
        for e in faults
    )
    return f"<h2>Starts and faults</h2><table>{rows}</table>" if rows else ""


def _episodes(run: Run, count: int) -> str:
    parts = []
    for title, query in CHOICES if count else ():
        page = run.episodes.page({**query, "limit": str(count)})
        keys = [row[page["columns"].index("id")] for row in page["rows"]]
        shown = "".join(_episode(run.episodes.episode, key) for key in keys)
        if shown:
            parts.append(f"<h3>{title}</h3>{shown}")
    return f"<h2>Episodes</h2>{''.join(parts)}" if parts else ""


def _episode(read: Callable[[int], dict[str, Any]], key: int) -> str:
    try:
        e = read(key)
    except AgentRLError as error:
        return f'<p class="quiet">#{key}: {text_of(error)}</p>'
    reward = "no verdict" if e["reward"] is None else f"reward {number(e['reward'])}"
    head = f"#{key} {text_of(e['env'])}: {reward}, {text_of(e['stop'])}, {e['sampled']} tokens sampled, {e['fate']}"
    why = f"<pre>{text_of(e['error'])}</pre>" if e["error"] else ""
    return f"<details><summary>{head}</summary>{why}{''.join(_message(m) for m in e['messages'])}</details>"


def _message(message: Mapping[str, Any]) -> str:
    role = str(message.get("role", "?"))
    known = role if role in ("system", "user", "assistant", "tool") else "other"
    parts = []
    for name in ("reasoning_content", "content"):
        value = message.get(name)
        if value:
            parts.append(value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
    parts += [json.dumps(call, ensure_ascii=False) for call in message.get("tool_calls") or ()]
    body = "".join(f"<pre>{text_of(part)}</pre>" for part in parts)
    return f'<article class="{known}"><b>{text_of(role)}</b>{body}</article>'
