// The curves: which figures stand in which plot, for one run or several over each other.

import { h, fill, number, color, visible } from "/static/dom.js";
import { get } from "/static/data.js";
import { Chart } from "/static/charts.js";

const Z95 = 1.96;

// keys: [[column, label]]; pattern: columns that begin so; env: a figure of each environment with its band.
const PLOTS = [
  { title: "Reward", env: "reward", evaluation: "eval/reward", fallback: [["reward/mean", "all episodes"]], jump: "step", note: "Mean over groups, band: 95 % of its standard error. Points: held-out evaluation." },
  { title: "Loss", keys: [["loss", "loss"]], evaluation: "eval/loss", jump: "trained" },
  { title: "Answer length", unit: "tokens an episode", env: "length", fallback: [["length/mean", "of the batch"]], jump: "step" },
  { title: "Turns", unit: "an episode", env: "turns", fallback: [["turns/mean", "of the batch"]], jump: "step" },
  { title: "Staleness", unit: "versions", keys: [["staleness/mean", "mean"], ["staleness/max", "largest"]], jump: "trained" },
  { title: "Staleness in flight", unit: "share of tokens", pattern: "staleness/flight_", stacked: true, jump: "trained", note: "Versions that passed while the episode ran." },
  { title: "Staleness in the queue", unit: "share of tokens", pattern: "staleness/queue_", stacked: true, jump: "trained", note: "Versions that passed after its last token." },
  { title: "KL divergence", unit: "nats a token", keys: [["kl/behaviour", "to the sampling policy"], ["kl/proximal", "to the step's start"], ["kl/reference", "to the reference"]], jump: "trained" },
  { title: "Entropy", unit: "nats a token", keys: [["entropy", "entropy"]], jump: "trained" },
  { title: "Clipping", unit: "share of tokens", keys: [["ratio/clip_fraction", "ratio clipped"], ["ratio/clip_low_fraction", "below"], ["ratio/clip_high_fraction", "above"], ["behaviour/cap_fraction", "weight capped"]], jump: "trained" },
  { title: "Probability ratio", keys: [["ratio/mean", "to the step's start, mean"], ["behaviour/ratio_mean", "to the sampling policy, mean"], ["ratio/max", "largest"]], jump: "trained" },
  { title: "Gradient norm", keys: [["grad_norm", "norm"]], jump: "trained" },
  { title: "Throughput", unit: "tokens a second", keys: [["rollout/tokens_per_second", "sampled"], ["tokens_per_second", "trained"]] },
  { title: "Idle time", unit: "share", keys: [["engine/idle_share", "engines"], ["trainer/idle_share", "trainer"]] },
  { title: "Pool and rollouts", unit: "groups", keys: [["pool/pooled", "wait for the trainer"], ["rollout_taken_now", "with the trainer"], ["rollout_running", "run"]] },
  { title: "How episodes ended", unit: "episodes a step", pattern: "rollout/stop_", jump: "step" },
  { title: "What became of groups", unit: "groups a step", pattern: "rollout/groups_", jump: "step" },
  { title: "Publishing", unit: "milliseconds", keys: [["publish/stall_ms", "engines paused"], ["publish/longest_gap_ms", "longest time without a token"], ["publish/load_ms", "loading"], ["publish/resume_ms", "until work again"]] },
];
const DASHES = [undefined, [6, 4], [2, 3], [10, 3, 2, 3]];

export class Curves {
  constructor(app) {
    this.app = app;
    this.own = [];
    this.charts = PLOTS.map((plot) => [plot, this.chart(plot)]);
    this.grid = h("div", { class: "grid" }, this.charts.map(([, chart]) => chart.node));
    this.versions = new Versions(app);
    this.any = h("input", { list: "columns", id: "any", placeholder: "any other figure", onchange: () => this.addOwn() });
    this.names = h("datalist", { id: "columns" });
    this.node = h(
      "div",
      {},
      this.grid,
      this.versions.node,
      h("p", { class: "controls" }, h("label", { for: "any" }, "Plot another figure: "), this.any, this.names),
    );
    this.sized = new ResizeObserver(() => this.charts.forEach(([, chart]) => chart.resize()));
    this.sized.observe(this.grid);
  }

  chart(plot) {
    const jump = plot.jump && ((step) => this.app.go("episodes", { run: this.app.shown()[0].id, [plot.jump]: step }));
    return new Chart(plot.title, { ...plot, jump });
  }

  addOwn() {
    const key = this.any.value;
    if (!this.app.shown().some((run) => run.keys.includes(key))) return;
    const plot = { title: key, keys: [[key, key]] };
    const chart = this.chart(plot);
    this.charts.push([plot, chart]);
    this.grid.append(chart.node);
    this.any.value = "";
    this.draw();
  }

  draw() {
    const runs = this.app.shown();
    for (const [plot, chart] of this.charts) {
      // Parts of a whole are shown of one run: several stacks over each other say nothing.
      const several = runs.length > 1 && !plot.pattern;
      const lines = (plot.pattern ? runs.slice(0, 1) : runs).flatMap((run, i) => linesOf(plot, run, i, several));
      chart.node.hidden = !lines.length && plot !== PLOTS[0];
      if (!chart.node.hidden) chart.draw(lines);
    }
    fill(this.names, [...new Set(runs.flatMap((run) => run.keys))].map((key) => h("option", { value: key })));
    this.versions.draw();
  }

  destroy() {
    this.sized.disconnect();
    this.charts.forEach(([, chart]) => chart.destroy());
  }
}

function linesOf(plot, run, index, several) {
  const found = [];
  const name = (label) => (several ? `${run.overview.name}: ${label}` : label);
  const look = (place) => (several ? { color: color(index), dash: DASHES[place % 4] } : { color: color(place) });
  const add = (ys, label, more = {}) => {
    if (ys && ys.some((y) => y !== null)) found.push({ label: name(label), xs: run.step, ys, ...look(found.length), ...more });
  };
  for (const env of plot.env ? run.environments() : []) {
    const mean = run.column(`envs/${env}/${plot.env}`);
    const error = run.column(`envs/${env}/${plot.env}_error`) || [];
    const at = (sign) => mean.map((m, i) => (m === null || error[i] === null || error[i] === undefined ? null : m + sign * Z95 * error[i]));
    if (mean) add(mean, env, { low: at(-1), high: at(1) });
  }
  const keys = plot.pattern
    ? run.keys.filter((key) => key.startsWith(plot.pattern)).map((key) => [key, key.slice(plot.pattern.length)])
    : plot.keys || (found.length ? [] : plot.fallback || []);
  for (const [key, label] of keys) add(run.column(key), label);
  if (plot.stacked) stack(found);
  if (plot.evaluation) addEvaluations(found, plot.evaluation, run, name, look);
  return found;
}

function addEvaluations(found, key, run, name, look) {
  const events = run.evaluations();
  const add = (label, value, error) => {
    const known = events.filter((event) => typeof value(event) === "number");
    if (!known.length) return;
    const ys = known.map(value);
    const half = known.map((event) => Z95 * (error(event) || 0));
    const band = half.some((e) => e > 0) ? { low: ys.map((y, i) => y - half[i]), high: ys.map((y, i) => y + half[i]) } : {};
    found.push({ label: name(label), xs: known.map((event) => event.step), ys, points: true, ...look(found.length), ...band });
  };
  add("held out", (event) => event[key], (event) => event[`${key}_error`]);
  const inner = key.replace("/", "_"); // of a mixture: the figures of each environment
  for (const env of new Set(events.flatMap((event) => Object.keys(event.envs || {})))) {
    add(`${env}, held out`, (event) => event.envs?.[env]?.[inner], (event) => event.envs?.[env]?.[`${inner}_error`]);
  }
}

function stack(lines) {
  let below = null;
  for (const line of lines) {
    line.shown = line.ys;
    const sum = line.ys.map((y, i) => (y ?? 0) + (below ? below[i] : 0));
    line.ys = below = sum;
  }
  lines.reverse(); // the tallest first, so that the smaller ones stand before it
}

// Which versions sampled the tokens of one step: bars, which are their own text alternative.
class Versions {
  constructor(app) {
    this.app = app;
    this.step = h("input", { id: "version-step", type: "number", min: "1", onchange: () => this.load() });
    this.bars = h("div", { class: "bars" });
    this.node = h(
      "section",
      { class: "chart wide", "aria-labelledby": "versions-title" },
      h("h3", { id: "versions-title" }, "Sampled tokens by version"),
      h("p", { class: "controls" }, h("label", { for: "version-step" }, "of what was trained in step "), this.step),
      this.bars,
    );
  }

  draw() {
    const run = this.app.shown()[0];
    this.node.hidden = !run || !run.overview.episodes;
    if (this.node.hidden || !run.step.length) return;
    const last = run.step[run.step.length - 1];
    this.step.max = last;
    if (document.activeElement !== this.step && (!this.step.value || this.follows)) {
      this.follows = true;
      if (this.step.value !== String(last)) {
        this.step.value = last;
        this.load();
      }
    }
  }

  async load() {
    const run = this.app.shown()[0];
    const step = this.step.value;
    const told = await get(`runs/${run.id}/versions`, { trained: step, kind: "train" });
    if (step !== this.step.value) return; // an answer to an older question
    const found = Object.entries(told);
    const most = Math.max(1, ...found.map(([, n]) => n));
    const rows = found.map(([label, n], i) =>
      h(
        "a",
        { class: "bar", href: this.app.address("episodes", { run: run.id, trained: step, version: label.split(".")[1] }) },
        h("span", { class: "bar-label" }, visible(label)),
        h("span", { class: "bar-body", style: { width: `${(70 * n) / most}%`, background: color(i) } }),
        h("span", {}, `${number(n)} tokens`),
      ),
    );
    fill(this.bars, rows.length ? rows : h("p", { class: "empty" }, "no episodes are kept of that step"));
    this.bars.dataset.loaded = step;
  }
}
