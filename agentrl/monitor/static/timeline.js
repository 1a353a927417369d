// The time line: what the trainer and the engines did when, with publishes, checkpoints, evaluations and faults.

import { h, fill, number, css, color, say, visible } from "/static/dom.js";

const LANES = ["trainer", "engines", "tokens/s", "publishes", "evaluations", "checkpoints", "faults"];
const PHASES = ["checkpoint", "take", "fetch", "pack", "proximal", "train", "weights"];
const LEFT = 96;
const LANE = 34;

export class TimeLine {
  constructor(app) {
    this.app = app;
    this.range = null; // null: everything
    this.canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img", onkeydown: (e) => this.key(e) });
    this.canvas.addEventListener("wheel", (e) => this.wheel(e), { passive: false });
    this.canvas.addEventListener("pointermove", (e) => this.hover(e));
    this.canvas.addEventListener("pointerdown", (e) => this.grab(e));
    this.told = h("p", { class: "summary", role: "status" }, "Point at something to read what it is.");
    this.legend = h("ul", { class: "legend" });
    this.events = h("div", { class: "values" });
    const button = (label, run) => h("button", { type: "button", onclick: run }, label);
    this.node = h(
      "section",
      { "aria-labelledby": "timeline-title" },
      h("h2", { id: "timeline-title" }, "Time line"),
      h(
        "p",
        { class: "controls" },
        button("all", () => this.show(null)),
        button("last 10 min", () => this.show(600)),
        button("last minute", () => this.show(60)),
        button("+", () => this.zoom(0.5)),
        button("\u2212", () => this.zoom(2)),
        h("span", { class: "note" }, " wheel or +/\u2212 zooms, dragging or \u2190 \u2192 moves"),
      ),
      this.canvas,
      this.legend,
      this.told,
      h("h3", {}, "Events"),
      this.events,
    );
    this.sized = new ResizeObserver(() => this.paint());
    this.sized.observe(this.canvas);
  }

  draw() {
    this.run = this.app.shown()[0];
    if (!this.run) return;
    this.items = itemsOf(this.run);
    this.paint();
    fill(
      this.legend,
      PHASES.map((phase, i) => h("li", {}, h("span", { class: "swatch", style: { "--swatch": color(i) } }), phase)),
      h("li", {}, h("span", { class: "swatch", style: { "--swatch": css("--busy") } }), "engines: the darker, the busier"),
    );
    fill(this.events, eventTable(this.run));
  }

  bounds() {
    const ends = this.items.flatMap((item) => [item.start, item.end]);
    const from = ends.reduce((a, b) => Math.min(a, b), Infinity);
    const to = ends.reduce((a, b) => Math.max(a, b), -Infinity);
    return Number.isFinite(from) ? [from, Math.max(to, from + 1)] : [0, 1];
  }

  shownRange() {
    return this.range || this.bounds();
  }

  show(seconds) {
    const [, to] = this.bounds();
    this.range = seconds === null ? null : [to - seconds, to];
    this.paint();
  }

  zoom(factor, share = 0.5) {
    const [a, b] = this.shownRange();
    const middle = a + share * (b - a);
    const [low, high] = this.bounds();
    const next = [middle - share * factor * (b - a), middle + (1 - share) * factor * (b - a)];
    this.range = next[1] - next[0] >= high - low ? null : next;
    this.paint();
  }

  move(share) {
    const [a, b] = this.shownRange();
    const by = share * (b - a);
    this.range = [a + by, b + by];
    this.paint();
  }

  key(event) {
    const action = { ArrowLeft: () => this.move(-0.2), ArrowRight: () => this.move(0.2), "+": () => this.zoom(0.5), "-": () => this.zoom(2), Home: () => this.show(null) }[event.key];
    if (!action) return;
    event.preventDefault();
    action();
    const [a, b] = this.shownRange();
    say(`${number(b - a)} seconds are shown, until ${clock(b)}`);
  }

  wheel(event) {
    if (!event.ctrlKey && !event.shiftKey && document.activeElement !== this.canvas) return; // the page scrolls
    event.preventDefault();
    const share = (event.offsetX - LEFT) / (this.canvas.clientWidth - LEFT);
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, Math.max(0, Math.min(1, share)));
  }

  grab(event) {
    const [a, b] = this.shownRange();
    const at = event.offsetX;
    const move = (e) => {
      const by = ((at - e.offsetX) / (this.canvas.clientWidth - LEFT)) * (b - a);
      this.range = [a + by, b + by];
      this.paint();
    };
    this.canvas.setPointerCapture(event.pointerId);
    this.canvas.addEventListener("pointermove", move);
    this.canvas.addEventListener("pointerup", () => this.canvas.removeEventListener("pointermove", move), { once: true });
  }

  hover(event) {
    const lane = LANES[Math.floor((event.offsetY - 4) / LANE)];
    const [a, b] = this.shownRange();
    const scale = (b - a) / (this.canvas.clientWidth - LEFT);
    const at = a + (event.offsetX - LEFT) * scale;
    const near = this.items.filter((i) => i.lane === lane && i.start - 4 * scale <= at && i.end + 4 * scale >= at);
    if (near.length) fill(this.told, `${clock(near[0].start)} ${near[0].text}`);
  }

  paint() {
    if (!this.items) return;
    const width = this.canvas.clientWidth;
    const height = LANES.length * LANE + 28;
    const ratio = window.devicePixelRatio || 1;
    this.canvas.width = width * ratio;
    this.canvas.height = height * ratio;
    this.canvas.style.height = `${height}px`;
    const g = this.canvas.getContext("2d");
    g.scale(ratio, ratio);
    g.font = "12px system-ui, sans-serif";
    const [from, to] = this.shownRange();
    const x = (time) => LEFT + ((time - from) / (to - from)) * (width - LEFT - 8);
    this.frame(g, width, height, from, to, x);
    g.save();
    g.beginPath();
    g.rect(LEFT, 0, width - LEFT, height);
    g.clip();
    for (const item of this.items) {
      if (item.end < from || item.start > to) continue;
      const y = 4 + LANES.indexOf(item.lane) * LANE;
      g.globalAlpha = item.share ?? 1;
      g.fillStyle = item.color();
      const tall = (LANE - 8) * (item.height ?? 1);
      g.fillRect(x(item.start), y + 3 + (LANE - 8 - tall), Math.max(item.mark ? 2 : 0.5, x(item.end) - x(item.start)), tall);
    }
    g.restore();
    const counts = LANES.map((lane) => `${lane} ${this.items.filter((i) => i.lane === lane).length}`).join(", ");
    this.canvas.setAttribute("aria-label", `Time line from ${clock(from)} to ${clock(to)}; entries: ${counts}. The table below lists the events.`);
  }

  frame(g, width, height, from, to, x) {
    g.clearRect(0, 0, width, height);
    g.fillStyle = css("--ink");
    g.strokeStyle = css("--grid");
    LANES.forEach((lane, i) => {
      g.fillText(lane, 4, 4 + i * LANE + LANE / 2 + 2);
      g.strokeRect(LEFT, 4 + i * LANE, width - LEFT - 8, LANE - 2);
    });
    g.fillStyle = css("--muted");
    for (let i = 0; i <= 5; i++) {
      const time = from + ((to - from) * i) / 5;
      g.textAlign = i === 5 ? "right" : "left";
      g.fillText(clock(time), x(time), height - 8);
    }
    g.textAlign = "left";
  }

  destroy() {
    this.sized.disconnect();
  }
}

function itemsOf(run) {
  const items = [];
  const add = (lane, start, end, text, paint, more) => items.push({ lane, start, end, text, color: paint, ...more });
  const rates = run.column("rollout/tokens_per_second") || [];
  const fastest = Math.max(1, ...rates.filter((rate) => rate !== null));
  run.step.forEach((step, i) => {
    const end = run.time[i];
    const spent = PHASES.map((phase) => [phase, run.column(`seconds/${phase}`)?.[i] || 0]);
    let at = end - spent.reduce((sum, [, s]) => sum + s, 0);
    spent.forEach(([phase, seconds], place) => {
      if (seconds > 0) add("trainer", at, at + seconds, `step ${step}: ${phase}, ${number(seconds)} s`, () => color(place));
      at += seconds;
    });
    const idle = run.column("engine/idle_share")?.[i];
    if (i > 0 && idle !== null && idle !== undefined) {
      const text = `engines until step ${step}: ${number(100 * (1 - idle), 3)} % busy`;
      add("engines", run.time[i - 1], end, text, () => css("--busy"), { share: Math.max(0.06, 1 - idle) });
    }
    if (i > 0 && rates[i]) {
      const text = `until step ${step}: ${number(rates[i], 4)} tokens a second sampled`;
      add("tokens/s", run.time[i - 1], end, text, () => color(6), { height: Math.max(0.05, rates[i] / fastest) });
    }
  });
  for (const event of run.events) {
    const text = told(event);
    if (event.kind === "publish") add("publishes", event.time - (event["publish/stall_ms"] || 0) / 1000, event.time, text, () => color(0), { mark: true });
    if (event.kind === "eval") add("evaluations", event.time - (event["eval/seconds"] || 0), event.time, text, () => color(2), { mark: true });
    if (event.kind === "checkpoint") add("checkpoints", event.time, event.time, text, () => color(4), { mark: true });
    if (event.kind === "fault" || event.kind === "begin") add("faults", event.time, event.time, text, () => css(event.kind === "fault" ? "--bad" : "--muted"), { mark: true });
  }
  return items;
}

export function told(event) {
  const step = `step ${event.step}`;
  if (event.kind === "publish") return `version ${event.version} published, engines paused ${number(event["publish/stall_ms"])} ms`;
  if (event.kind === "eval") return `evaluation of ${step}: ${number(event["eval/reward"] ?? event["eval/loss"])}`;
  if (event.kind === "checkpoint") return `checkpoint of ${step}`;
  if (event.kind === "begin") return `version ${event.version} begins at ${step}`;
  return visible(`${event.what}: ${String(event.error ?? "").split("\n")[0]}`);
}

function eventTable(run) {
  const rows = run.events.slice(-200).reverse();
  return h(
    "table",
    {},
    h("thead", {}, h("tr", {}, ["time", "what", ""].map((t) => h("th", { scope: "col" }, t)))),
    h("tbody", {}, rows.map((e) => h("tr", {}, h("td", {}, clock(e.time)), h("td", {}, visible(e.kind)), h("td", {}, told(e))))),
  );
}

export function clock(seconds) {
  return new Date(1000 * seconds).toLocaleTimeString([], { hour12: false });
}
