// The page: which view is shown, which runs, what is new, and the keys.

import { h, fill, visible, color, number, say } from "/static/dom.js";
import { get, RunData } from "/static/data.js";
import { Curves } from "/static/curves.js";
import { TimeLine } from "/static/timeline.js";
import { Episodes } from "/static/episodes.js";
import { EpisodePage, GroupPage } from "/static/episode.js";

const LIVE_MS = 3000;
const ENDED_MS = 15000;
const VIEWS = { curves: Curves, timeline: TimeLine, episodes: Episodes, episode: EpisodePage, group: GroupPage };
const TABS = [["curves", "Curves", "1"], ["timeline", "Time line", "2"], ["episodes", "Episodes", "3"], ["config", "Config", "4"]];
const KEYS = [
  ["1 2 3 4", "curves, time line, episodes, config"],
  ["\u2190 \u2192 Home End", "on a plot: read it point by point; Enter opens the episodes behind it"],
  ["j k", "next and previous episode"],
  ["t b f g", "in an episode: by turn, by token, row and figures, its group side by side"],
  ["d", "dark or light"],
  ["?", "this"],
];

class ConfigPage {
  constructor(app) {
    this.app = app;
    this.node = h("section", {});
  }
  async open(query) {
    const run = this.app.run(query.run);
    const { text } = await get(`runs/${run.id}/config`);
    fill(this.node, h("h2", {}, `Config of ${run.overview.name}`), h("p", { class: "quiet" }, visible(run.overview.path)), h("pre", { class: "foreign", tabindex: "0" }, visible(text)));
  }
  draw() {}
  destroy() {}
}
VIEWS.config = ConfigPage;

class App {
  constructor() {
    this.runs = [];
    this.hidden = new Set();
    this.main = document.getElementById("main");
    this.problem = document.getElementById("problem");
    window.addEventListener("hashchange", () => this.route());
    document.addEventListener("keydown", (event) => this.key(event));
    document.getElementById("theme").addEventListener("click", () => this.toggleTheme());
    document.getElementById("help").addEventListener("click", () => this.help());
    document.getElementById("skip").addEventListener("click", (event) => {
      event.preventDefault();
      this.main.focus();
    });
    const theme = localStorage.getItem("agentrl-theme");
    if (theme) document.documentElement.dataset.theme = theme;
  }

  async start() {
    await this.refresh();
    await this.route();
    document.documentElement.dataset.ready = "1";
    this.wait();
  }

  wait() {
    const alive = this.runs.some((run) => run.overview.alive);
    setTimeout(async () => {
      try {
        if (!document.hidden && (await this.refresh())) this.view?.draw();
        this.complain(null);
      } catch (error) {
        this.complain(`no answer from the page's server: ${error.message}`);
      }
      this.wait();
    }, alive ? LIVE_MS : ENDED_MS);
  }

  // True where a run has something new to draw.
  async refresh() {
    const overviews = await get("runs");
    for (const overview of overviews) {
      const known = this.runs.find((run) => run.id === overview.id);
      if (known) known.overview = overview;
      else this.runs.push(new RunData(overview));
    }
    const fresh = await Promise.all(this.runs.map((run) => run.refresh()));
    this.showRuns();
    return fresh.some(Boolean);
  }

  showRuns() {
    const line = (run, i) => {
      const o = run.overview;
      const box = h("input", { type: "checkbox", checked: !this.hidden.has(run.id), onchange: () => this.toggleRun(run.id), "aria-label": `show ${o.name}` });
      const waits = o.waits.length ? h("details", { class: "waits" }, h("summary", {}, "who waits for what"), h("ul", {}, o.waits.map((w) => h("li", {}, visible(w))))) : null;
      return h(
        "div",
        { class: "run" },
        this.runs.length > 1 && [box, h("span", { class: "swatch", style: { "--swatch": color(i) } })],
        h("b", {}, visible(o.name)),
        h("span", { class: `phase ${o.alive ? "alive" : o.phase === "finished" ? "" : "bad"}` }, visible(o.phase)),
        h("span", {}, `step ${number(o.step)}${o.steps ? ` of ${number(o.steps)}` : ""}`),
        o.env && h("span", { class: "quiet" }, visible(o.env)),
        waits,
        o.error && h("pre", { class: "foreign bad" }, visible(o.error)),
      );
    };
    const place = document.getElementById("runs");
    if (!place.contains(document.activeElement) || this.runs.length === 1) fill(place, this.runs.map(line));
    document.title = this.runs.length ? `${this.runs.map((run) => run.overview.name).join(", ")} \u2013 agentrl` : "agentrl";
  }

  toggleRun(id) {
    if (this.hidden.has(id)) this.hidden.delete(id);
    else this.hidden.add(id);
    this.view?.draw();
  }

  shown() {
    return this.runs.filter((run) => !this.hidden.has(run.id));
  }

  run(id) {
    return this.runs.find((run) => run.id === Number(id ?? 0)) || this.runs[0];
  }

  // --- addresses

  address(view, query = {}) {
    const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
    const text = new URLSearchParams(given).toString();
    return `#/${view}${text ? `?${text}` : ""}`;
  }

  go(view, query) {
    location.hash = this.address(view, query);
  }

  note(view, query) {
    history.replaceState(null, "", this.address(view, query));
  }

  async route() {
    const [name, text] = location.hash.replace(/^#\/?/, "").split("?");
    const view = VIEWS[name] ? name : "curves";
    this.tabs(view);
    if (!this.runs.length) return;
    if (this.name !== view) {
      this.view?.destroy();
      this.view = new VIEWS[view](this);
      this.name = view;
      fill(this.main, this.view.node);
    }
    try {
      await this.view.open?.(Object.fromEntries(new URLSearchParams(text || "")));
      this.complain(null);
    } catch (error) {
      this.complain(error.message);
    }
    this.view.draw();
  }

  tabs(view) {
    const current = { episode: "episodes", group: "episodes" }[view] || view;
    fill(
      document.getElementById("tabs"),
      TABS.map(([name, label, key]) => h("a", { href: this.address(name), "aria-current": name === current ? "page" : null, title: `key ${key}` }, label)),
    );
  }

  complain(text) {
    this.problem.hidden = !text;
    fill(this.problem, text ? visible(text) : "");
  }

  // --- keys and theme

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) return;
    const tab = TABS.find(([, , key]) => key === event.key);
    if (tab) this.go(tab[0]);
    else if (event.key === "d") this.toggleTheme();
    else if (event.key === "?") this.help();
    else if (this.view?.key instanceof Function && this.name === "episode" && this.view.key(event.key)) event.preventDefault();
    else if (this.name === "episodes" && (event.key === "j" || event.key === "k")) this.view.step(event.key === "j" ? 1 : -1);
  }

  toggleTheme() {
    const root = document.documentElement;
    const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = dark ? "light" : "dark";
    localStorage.setItem("agentrl-theme", root.dataset.theme);
    say(`${root.dataset.theme} colours`);
    this.view?.destroy();
    this.name = null; // plots keep their colours: make the view anew
    this.route();
  }

  help() {
    const dialog = document.getElementById("keys");
    fill(
      dialog,
      h("h2", { id: "keys-title" }, "Keys"),
      h("dl", {}, KEYS.map(([keys, what]) => [h("dt", {}, h("kbd", {}, keys)), h("dd", {}, what)])),
      h("button", { type: "button", onclick: () => dialog.close(), autofocus: true }, "close"),
    );
    if (!dialog.open) dialog.showModal();
  }
}

const app = new App();
app.start().catch((error) => app.complain(error.message));
