// The list of episodes: filters in the address, a page at a time, links that lead inside.

import { h, fill, foreign, number, visible } from "/static/dom.js";
import { get } from "/static/data.js";

const PAGE = 100;
const SORTS = [["-id", "newest first"], ["id", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-sampled", "longest answers"], ["-turns", "most turns"], ["oldest", "oldest version"]];
const HEADS = ["episode", "reward", "environment", "ended", "turns", "tokens", "versions", "trained in", "group", "row"];

export class Episodes {
  constructor(app) {
    this.app = app;
    this.form = h("form", { class: "filters", "aria-label": "Filters", onsubmit: (e) => e.preventDefault(), oninput: () => this.changed() });
    this.count = h("p", { class: "summary", role: "status" });
    this.body = h("tbody", {});
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.load(true) }, "show more");
    this.fresh = h("button", { type: "button", hidden: true, onclick: () => this.load() }, "new episodes: show");
    const table = h(
      "table",
      { class: "episodes" },
      h("caption", { class: "hidden" }, "Episodes"),
      h("thead", {}, h("tr", {}, HEADS.map((t) => h("th", { scope: "col" }, t)))),
      this.body,
    );
    this.versions = h("p", { class: "note" });
    this.failures = h("details", { class: "failures", ontoggle: () => this.failures.open && this.loadFailures() }, h("summary", {}, "what went wrong"), h("div", {}));
    this.node = h("section", {}, h("h2", {}, "Episodes"), this.form, this.failures, this.count, this.fresh, h("div", { class: "scroll" }, table), this.more);
    this.asked = 0;
  }

  async open(query) {
    this.query = { ...query };
    this.run = this.app.run(query.run);
    this.facets = await get(`runs/${this.run.id}/facets`);
    this.build();
    if (this.failures.open) await this.loadFailures();
    await this.load();
  }

  build() {
    const f = this.facets;
    const field = (label, control) => h("label", {}, h("span", {}, label), control);
    const choice = (name, label, values) =>
      field(
        label,
        h(
          "select",
          { name },
          h("option", { value: "" }, "any"),
          values.map(([value, text]) => h("option", { value, selected: this.query[name] === String(value) }, text)),
        ),
      );
    const counted = (table) => Object.entries(table).map(([value, n]) => [value, `${visible(value)} (${n})`]);
    const box = (name, label, type = "number", more = {}) => field(label, h("input", { name, type, value: this.query[name], ...more }));
    const runs = this.app.runs.map((run) => h("option", { value: run.id, selected: run.id === this.run.id }, run.overview.name));
    fill(
      this.form,
      this.app.runs.length > 1 && field("run", h("select", { name: "run" }, runs)),
      choice("kind", "kind", counted(f.kind)),
      choice("env", "environment", counted(f.env)),
      choice("stop", "ended", counted(f.stop)),
      choice("fate", "group was", counted(f.fate)),
      box("reward_min", "reward from", "number", { step: "any" }),
      box("reward_max", "reward to", "number", { step: "any" }),
      box("version", "version", "number", { min: 0, max: f.versions[1] ?? 0 }),
      box("step", "ended in step", "number", { min: 0 }),
      box("trained", "trained in step", "number", { min: 0 }),
      box("text", "row or error has", "search"),
      choice("split", "history", [["1", "was split"]]),
      choice("failed", "verdict", [["1", "none"]]),
      choice("order", "order", SORTS),
      h("button", { type: "button", onclick: () => this.app.go("episodes", { run: this.run.id }) }, "clear"),
    );
  }

  changed() {
    const given = Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value !== ""));
    const other = given.run !== undefined && Number(given.run) !== this.run.id;
    this.query = { run: this.run.id, ...(other ? { run: given.run } : given), ...(this.query.group ? { group: this.query.group } : {}) };
    this.app.note("episodes", this.query);
    if (other) this.open(this.query);
    else this.load();
  }

  async load(further = false) {
    const mine = ++this.asked;
    const offset = further ? this.body.childElementCount : 0;
    const { run, ...filters } = this.query;
    let found;
    try {
      found = await get(`runs/${this.run.id}/episodes`, { ...filters, limit: PAGE, offset });
    } catch (error) {
      if (mine === this.asked) fill(this.count, error.message);
      return;
    }
    if (mine !== this.asked) return; // an answer to an older question
    const at = Object.fromEntries(found.columns.map((name, i) => [name, i]));
    const rows = found.rows.map((row) => this.row((name) => row[at[name]]));
    if (further) this.body.append(...rows);
    else fill(this.body, rows);
    this.more.hidden = this.body.childElementCount >= found.total;
    this.fresh.hidden = true;
    this.total = found.total;
    fill(this.count, `${number(found.total)} of ${number(this.facets.count)} episodes`);
    this.node.dataset.loaded = String(mine);
  }

  async loadFailures() {
    const found = await get(`runs/${this.run.id}/failures`);
    const line = (f) =>
      h(
        "tr",
        {},
        h("td", { class: "num" }, number(f.count)),
        h("td", {}, h("a", { href: this.app.address("episodes", { run: this.run.id, stop: f.stop }) }, f.stop)),
        h("td", {}, foreign(f.error, "span"), " ", h("a", { href: this.app.address("episode", { run: this.run.id, id: f.id }) }, `as #${f.id}`)),
      );
    fill(this.failures.lastElementChild, found.length ? h("table", {}, h("tbody", {}, found.map(line))) : h("p", { class: "empty" }, "no episode had an error"));
  }

  row(v) {
    const reward = v("reward");
    const trained = v("trained") === null ? v("fate") : `step ${v("trained")}`;
    const versions = v("oldest") === null ? "\u2013" : v("oldest") === v("newest") ? v("oldest") : `${v("oldest")}\u2013${v("newest")}`;
    return h(
      "tr",
      {},
      h("th", { scope: "row" }, h("a", { href: this.app.address("episode", { run: this.run.id, id: v("id") }) }, `#${v("id")}`)),
      h("td", { class: reward === null ? "none" : "num" }, reward === null ? "no verdict" : number(reward)),
      h("td", {}, visible(v("env")), v("kind") === "eval" ? " (held out)" : ""),
      h("td", {}, v("stop")),
      h("td", { class: "num" }, v("turns")),
      h("td", { class: "num" }, v("sampled"), h("span", { class: "quiet" }, ` of ${v("tokens")}`)),
      h("td", { class: "num" }, versions, v("splits") ? h("span", { class: "tag" }, `split: ${v("splits")}`) : null),
      h("td", {}, trained),
      h("td", {}, h("a", { href: this.app.address("group", { run: this.run.id, id: v("group_id") }) }, `row ${v("position")}`)),
      h("td", { class: "rowtext" }, visible(v("row"))),
    );
  }

  draw() {
    if (this.run?.overview.alive) this.fresh.hidden = false;
  }

  // j and k move from link to link.
  step(by) {
    const links = [...this.body.querySelectorAll("th a")];
    const now = links.indexOf(document.activeElement);
    links[Math.max(0, Math.min(links.length - 1, now + by))]?.focus();
  }

  destroy() {}
}
