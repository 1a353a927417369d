// One episode, by turn and by token; and a group side by side.

import { h, fill, foreign, number, visible } from "/static/dom.js";
import { get } from "/static/data.js";
import { conversation, earnedText, REASONS } from "/static/messages.js";
import { TokenView } from "/static/tokens.js";

export class EpisodePage {
  constructor(app) {
    this.app = app;
    this.node = h("section", { class: "episode" });
  }

  async open(query) {
    this.query = { view: "turns", trajectory: 0, ...query };
    this.run = this.app.run(query.run);
    const e = (this.episode = await get(`runs/${this.run.id}/episodes/${query.id}`));
    const to = (more) => this.app.address("episode", { ...this.query, run: this.run.id, ...more });
    const tab = (view, label) => h("a", { href: to({ view }), "aria-current": this.query.view === view ? "page" : null }, label);
    const body = h("div", {});
    fill(
      this.node,
      h("h2", {}, `Episode #${e.id}`, h("span", { class: "quiet" }, ` ${visible(e.env)}, row ${e.position}, sample ${e.sample}`)),
      this.facts(e),
      h("nav", { class: "tabs", "aria-label": "Ways to look" }, tab("turns", "by turn (t)"), tab("tokens", "by token (b)"), tab("facts", "row and figures (f)")),
      this.siblings(e, to),
      body,
    );
    if (this.query.view === "tokens") await this.tokens(body, to);
    else if (this.query.view === "facts") fill(body, ...this.everything(e));
    else fill(body, turnsOf(e));
    this.node.dataset.loaded = `${e.id} ${this.query.view}`;
  }

  facts(e) {
    const reward = e.reward === null ? "no verdict" : `reward ${number(e.reward)}`;
    const versions = Object.entries(e.versions ? JSON.parse(e.versions) : {}).map(([label, n]) => `${label} (${n})`);
    return h(
      "ul",
      { class: "facts" },
      h("li", {}, h("b", {}, reward)),
      h("li", {}, `ended: ${e.stop}`),
      h("li", {}, `${new Set(e.turns.map((turn) => turn.index)).size} turns, ${e.sampled} of ${e.tokens} tokens sampled`),
      h("li", {}, versions.length ? `versions ${versions.join(", ")}` : "nothing sampled"),
      h("li", {}, e.trained === null ? `group ${e.fate}` : `trained in step ${e.trained}`),
      e.error ? h("li", { class: "bad" }, foreign(e.error, "span")) : null,
    );
  }

  siblings(e, to) {
    return h(
      "nav",
      { class: "siblings", "aria-label": "Episodes of the group" },
      "group: ",
      e.group.map(([id, sample, reward, stop]) =>
        h("a", { href: to({ id, trajectory: 0 }), "aria-current": id === e.id ? "true" : null, title: stop }, `${sample}: ${reward === null ? "\u2013" : number(reward, 3)}`),
      ),
      h("a", { href: this.app.address("group", { run: this.run.id, id: e.group_id }) }, "side by side (g)"),
    );
  }

  everything(e) {
    const marks = e.turns.map((turn) => h("li", {}, earnedText(turn), turn.trajectory === null ? "" : `, ends at token ${turn.end} of trajectory ${turn.trajectory}`, turn.agent ? `, agent ${visible(turn.agent)}` : ""));
    const figures = Object.entries(e.metrics).map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, visible(name)), h("td", { class: "num" }, number(value))));
    return [
      h("h3", {}, "Data row"),
      foreign(JSON.stringify(e.row, null, 1)),
      h("h3", {}, "Turns"),
      h("ol", {}, marks),
      h("h3", {}, "Trajectories"),
      h("ol", { start: "0" }, e.trajectories.map((t) => h("li", {}, trajectoryText(t)))),
      h("h3", {}, "Figures"),
      h("table", {}, h("tbody", {}, figures)),
      h("p", {}, `seed ${e.seed}, attempt ${e.attempt}`),
    ];
  }

  async tokens(body, to) {
    const e = this.episode;
    if (!e.trajectories.length) return fill(body, h("p", { class: "empty" }, "nothing was recorded by token"));
    const at = Math.min(Number(this.query.trajectory), e.trajectories.length - 1);
    const links = e.trajectories.map((t, i) => h("li", {}, h("a", { href: to({ trajectory: i }), "aria-current": i === at ? "true" : null }, `trajectory ${i}`), ` ${trajectoryText(t)}`));
    const view = new TokenView(this.run, e, at);
    fill(body, h("ul", { class: "trajectories" }, links), view.node);
    await view.load();
  }

  key(name) {
    const view = { t: "turns", b: "tokens", f: "facts" }[name];
    if (view) this.app.go("episode", { ...this.query, run: this.run.id, view });
    else if (name === "g") this.app.go("group", { run: this.run.id, id: this.episode.group_id });
    else if (name === "j" || name === "k") this.near(name === "j" ? 1 : -1);
    else return false;
    return true;
  }

  near(by) {
    const ids = this.episode.group.map(([id]) => id);
    const next = ids[ids.indexOf(this.episode.id) + by];
    if (next !== undefined) this.app.go("episode", { ...this.query, run: this.run.id, id: next, trajectory: 0 });
  }

  draw() {}

  destroy() {}
}

function trajectoryText(t) {
  const agent = t.agent ? `, agent ${visible(t.agent)}` : "";
  return `${REASONS[t.reason] || t.reason}${agent}: ${t.length} tokens, ${t.sampled} trained${t.abandoned ? ", abandoned: left out of training" : ""}`;
}

function turnsOf(e) {
  return h("div", { class: "conversation" }, e.messages.length ? conversation(e) : h("p", { class: "empty" }, "no messages"));
}

export class GroupPage {
  constructor(app) {
    this.app = app;
    this.node = h("section", {});
  }

  async open(query) {
    const run = this.app.run(query.run);
    const episodes = await get(`runs/${run.id}/groups/${query.id}`);
    const rewards = episodes.map((e) => e.reward).filter((r) => r !== null);
    const mean = rewards.reduce((a, b) => a + b, 0) / Math.max(rewards.length, 1);
    const first = episodes[0];
    fill(
      this.node,
      h("h2", {}, `Group of row ${first?.position ?? "?"}`, h("span", { class: "quiet" }, ` ${episodes.length} episodes, mean reward ${number(mean)}`)),
      first ? h("details", {}, h("summary", {}, "data row"), foreign(JSON.stringify(first.row, null, 1))) : h("p", {}, "no such group"),
      h("div", { class: "columns", tabindex: "0", role: "region", "aria-label": "Episodes side by side" }, episodes.map((e) => this.column(run, e))),
    );
    this.node.dataset.loaded = query.id;
  }

  column(run, e) {
    const advantage = e.reward === null ? "no verdict" : `reward ${number(e.reward)}`;
    return h(
      "section",
      { class: "column", "aria-label": `sample ${e.sample}` },
      h("h3", {}, h("a", { href: this.app.address("episode", { run: run.id, id: e.id }) }, `#${e.id}`), ` ${advantage}`),
      h("p", { class: "quiet" }, `${e.stop}, ${e.sampled} tokens, versions ${e.oldest ?? "\u2013"}\u2013${e.newest ?? "\u2013"}`),
      conversation(e),
    );
  }

  draw() {}

  destroy() {}
}
