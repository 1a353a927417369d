// One plot: lines over steps, with bands, a legend of our own, a sentence and a table for those who do not see it.

import { h, fill, number, say, css, visible } from "/static/dom.js";

// lines: [{label, color, dash, xs, ys, low, high, points, fillTo}]; all of one chart share a union of xs.
export class Chart {
  constructor(title, { unit = "", jump = null, note = "", stacked = false } = {}) {
    Object.assign(this, { title, unit, jump, note, stacked });
    this.plotted = null;
    this.holder = h("div", { class: "plot", "aria-hidden": "true" });
    this.legend = h("ul", { class: "legend" });
    this.summary = h("p", { class: "summary" });
    this.values = h("div", { class: "values", hidden: true });
    this.button = h("button", { type: "button", "aria-expanded": "false", "aria-label": `${title} as a table`, onclick: () => this.toggle() }, "table");
    this.node = h(
      "figure",
      { class: "chart", tabindex: "0", role: "group", "aria-label": title, onkeydown: (e) => this.key(e) },
      h("figcaption", {}, h("h3", {}, title), unit && h("span", { class: "unit" }, unit), this.button),
      this.holder,
      this.legend,
      note && h("p", { class: "note" }, note),
      this.summary,
      this.values,
    );
  }

  toggle() {
    this.values.hidden = !this.values.hidden;
    this.button.setAttribute("aria-expanded", String(!this.values.hidden));
    this.tell();
  }

  draw(lines, empty = "no figures yet") {
    this.lines = lines.filter((line) => line.ys.some((y) => y !== null && y !== undefined));
    if (!this.lines.length) {
      this.plotted?.destroy();
      this.plotted = null;
      fill(this.holder, h("p", { class: "empty" }, empty));
      fill(this.legend);
      fill(this.summary);
      return;
    }
    const { xs, data, series, bands } = this.arrange();
    this.xs = xs;
    const shape = JSON.stringify(series.map((s) => [s.label, s.stroke]));
    if (this.plotted && this.shape === shape) this.plotted.setData(data, !this.zoomed);
    else this.build(data, series, bands);
    this.shape = shape;
    this.label(null);
    this.tell();
  }

  arrange() {
    const xs = [...new Set(this.lines.flatMap((line) => line.xs))].sort((a, b) => a - b);
    const place = new Map(xs.map((x, i) => [x, i]));
    const data = [xs];
    const series = [{}];
    const bands = [];
    const spread = (line, ys) => {
      const column = new Array(xs.length).fill(null);
      line.xs.forEach((x, i) => (column[place.get(x)] = ys[i] ?? null));
      return column;
    };
    for (const line of this.lines) {
      const stroke = line.color;
      if (line.low) {
        data.push(spread(line, line.high), spread(line, line.low));
        const quiet = { stroke: "transparent", width: 0, spanGaps: true, points: { show: false } };
        series.push({ ...quiet, label: "" }, { ...quiet, label: "" });
        bands.push({ series: [data.length - 2, data.length - 1], fill: alpha(stroke, 0.18) });
      }
      data.push(spread(line, line.ys));
      line.index = data.length - 1;
      const fillColor = this.stacked ? stroke : undefined;
      series.push({
        label: line.label,
        stroke,
        dash: line.dash,
        width: this.stacked ? 1 : 2,
        spanGaps: true,
        points: { show: line.points || xs.length < 3, size: 7 },
        fill: fillColor,
      });
    }
    return { xs, data, series, bands };
  }

  build(data, series, bands) {
    this.plotted?.destroy();
    fill(this.holder);
    const ink = css("--muted");
    const axis = { stroke: ink, grid: { stroke: css("--grid"), width: 1 }, ticks: { stroke: css("--grid") } };
    const options = {
      width: this.holder.clientWidth || 420,
      height: 190,
      series,
      bands,
      legend: { show: false },
      scales: { x: { time: false }, ...(this.stacked ? { y: { range: (_u, _low, high) => [0, high || 1] } } : {}) },
      axes: [axis, { ...axis, size: 58, values: (_, ticks) => ticks.map((t) => number(t, 3)) }],
      cursor: { sync: { key: "steps" }, points: { size: 6 }, drag: { x: true, y: false } },
      hooks: {
        setCursor: [(u) => this.label(u.cursor.idx)],
        setScale: [(u, key) => key === "x" && this.noteZoom(u)],
      },
    };
    this.plotted = new uPlot(options, data, this.holder);
    this.plotted.over.addEventListener("click", () => this.follow(this.plotted.cursor.idx));
  }

  noteZoom(u) {
    const xs = u.data[0];
    this.zoomed = xs.length > 1 && (u.scales.x.min > xs[0] || u.scales.x.max < xs[xs.length - 1]);
  }

  resize() {
    if (this.plotted && this.holder.clientWidth) this.plotted.setSize({ width: this.holder.clientWidth, height: 190 });
  }

  label(index) {
    const at = index === null || index === undefined ? null : index;
    fill(
      this.legend,
      this.lines.map((line) => {
        const value = at === null ? lastOf(line.ys) : (line.shown || line.ys)[line.xs.indexOf(this.xs[at])];
        const swatch = h("span", { class: line.dash ? "swatch dashed" : "swatch", style: { "--swatch": line.color } });
        return h("li", {}, swatch, visible(line.label), " ", h("b", {}, number(line.shown && at === null ? lastOf(line.shown) : value)));
      }),
      at === null ? null : h("li", { class: "at" }, `step ${number(this.xs[at])}`),
    );
  }

  tell() {
    const line = this.lines?.[this.stacked ? this.lines.length - 1 : 0];
    if (!line) return;
    const ys = line.shown || line.ys;
    const known = ys.map((y, i) => [y, line.xs[i]]).filter(([y]) => y !== null && y !== undefined);
    const low = known.reduce((a, b) => (b[0] < a[0] ? b : a));
    const high = known.reduce((a, b) => (b[0] > a[0] ? b : a));
    const last = known[known.length - 1];
    fill(
      this.summary,
      `${visible(line.label)}: last ${number(last[0])} at step ${last[1]}, lowest ${number(low[0])} at ${low[1]}, highest ${number(high[0])} at ${high[1]}`,
    );
    if (!this.values.hidden) fill(this.values, this.table());
  }

  table() {
    const rows = this.xs.slice(-50).reverse();
    const cell = (line, x) => number((line.shown || line.ys)[line.xs.indexOf(x)]);
    return h(
      "table",
      {},
      h("caption", {}, `${this.title}, the last ${rows.length} points`),
      h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "step"), this.lines.map((l) => h("th", { scope: "col" }, visible(l.label))))),
      h("tbody", {}, rows.map((x) => h("tr", {}, h("th", { scope: "row" }, x), this.lines.map((l) => h("td", {}, cell(l, x)))))),
    );
  }

  key(event) {
    if (!this.plotted || event.target !== this.node) return;
    const n = this.xs.length;
    const now = this.plotted.cursor.idx ?? n - 1;
    const next = { ArrowLeft: now - 1, ArrowRight: now + 1, Home: 0, End: n - 1, Enter: now }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const index = Math.max(0, Math.min(n - 1, next));
    if (event.key === "Enter") return this.follow(index);
    const left = this.plotted.valToPos(this.xs[index], "x");
    this.plotted.setCursor({ left, top: 20 });
    const read = this.lines.map((l) => `${l.label} ${number((l.shown || l.ys)[l.xs.indexOf(this.xs[index])])}`);
    say(`step ${this.xs[index]}: ${read.join(", ")}`);
  }

  follow(index) {
    if (this.jump && index !== null && index !== undefined) this.jump(this.xs[index]);
  }

  destroy() {
    this.plotted?.destroy();
  }
}

function lastOf(values) {
  for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null && values[i] !== undefined) return values[i];
  return null;
}

export function alpha(hex, share) {
  const value = parseInt(hex.slice(1), 16);
  return `rgba(${value >> 16}, ${(value >> 8) & 255}, ${value & 255}, ${share})`;
}
