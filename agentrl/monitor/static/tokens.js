// A trajectory token by token, coloured by what one wants to know of each.

import { h, fill, number, color, css, visible, say } from "/static/dom.js";
import { get } from "/static/data.js";
import { alpha } from "/static/charts.js";

const CHUNK = 2000;
const MODES = [
  ["version", "version"],
  ["mask", "mask"],
  ["logprob", "log-prob"],
  ["ratio", "probability ratio"],
  ["advantage", "advantage"],
];
const LEGENDS = {
  version: "One colour a version; a small label stands where the version changes.",
  mask: "Underlined: trained. Dotted: sampled, but left out of the loss. Plain: context.",
  logprob: "The darker, the less likely the token was when it was sampled (\u22125 and less: darkest).",
  ratio: "Trainer's probability over the sampling one. Blue: more likely by now; red: less (e times: darkest).",
  advantage: "Blue: encouraged, red: discouraged; darkest at the largest of this stretch.",
};

export class TokenView {
  constructor(run, episode, trajectory) {
    Object.assign(this, { run, episode, trajectory, mode: "version", selected: 0 });
    this.length = episode.trajectories[trajectory].length;
    this.tokens = [];
    this.flow = h("div", {
      class: "tokens",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "tokens",
      "aria-label": `${this.length} tokens; arrow keys read them one by one`,
      onkeydown: (e) => this.key(e),
      onclick: (e) => this.pick(e.target.closest("[data-at]")),
    });
    this.detail = h("p", { class: "detail", role: "status" }, "Click a token, or use the arrow keys.");
    this.legend = h("p", { class: "note" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.load() });
    const radios = MODES.map(([mode, label]) =>
      h("label", {}, h("input", { type: "radio", name: "mode", value: mode, checked: mode === this.mode, onchange: () => this.show(mode) }), ` ${label}`),
    );
    this.node = h("div", {}, h("fieldset", { class: "modes" }, h("legend", {}, "colour by"), radios), this.legend, this.detail, this.flow, this.more);
  }

  async load() {
    const query = { trajectory: this.trajectory, start: this.tokens.length, count: CHUNK };
    const found = await get(`runs/${this.run.id}/episodes/${this.episode.id}/tokens`, query);
    found.ids.forEach((id, i) =>
      this.tokens.push({
        id,
        text: found.pieces ? found.pieces[i] : `${id}`,
        kind: found.kinds[i],
        version: found.versions[i],
        temperature: found.temperatures[i],
        logprob: found.logprobs[i],
        ratio: found.ratios[i],
        advantage: found.advantages[i],
      }),
    );
    this.ids = !found.pieces;
    const left = this.length - this.tokens.length;
    this.more.hidden = left <= 0;
    fill(this.more, `show ${Math.min(CHUNK, left)} of ${left} more tokens`);
    this.show(this.mode);
  }

  show(mode) {
    this.mode = mode;
    const known = this.tokens.some((token) => token[mode === "mask" ? "kind" : mode] !== null);
    const missing = mode === "ratio" || mode === "advantage" ? " This trajectory has none: it was not trained, or its trace is no longer kept." : " Nothing was sampled here.";
    fill(this.legend, LEGENDS[mode], known ? "" : missing, this.ids ? " (The run's tokenizer is gone: token ids are shown.)" : "");
    this.largest = Math.max(1e-6, ...this.tokens.map((token) => Math.abs(token.advantage ?? 0)));
    const labels = [...new Set(this.tokens.map((token) => token.version).filter(Boolean))];
    const ends = new Map(this.episode.turns.filter((turn) => turn.trajectory === this.trajectory).map((turn) => [turn.end, turn]));
    const parts = [];
    let before = null;
    this.tokens.forEach((token, at) => {
      if (ends.has(at) && at > 0) parts.push(turnMark(ends.get(at)));
      if (mode === "version" && token.version && token.version !== before) parts.push(h("sup", { class: "version" }, visible(token.version)));
      before = token.version || before;
      parts.push(this.span(token, at, labels));
    });
    if (ends.has(this.tokens.length)) parts.push(turnMark(ends.get(this.tokens.length)));
    fill(this.flow, parts);
    this.flow.dataset.mode = mode;
    this.select(this.selected, false);
  }

  span(token, at, labels) {
    const node = h("span", { class: `token ${token.kind}`, data: { at } }, shown(token.text));
    const paint = this.paint(token, labels);
    if (paint) node.style.backgroundColor = paint;
    if (token.text.includes("\n")) return h("span", {}, node, h("br"));
    return node;
  }

  paint(token, labels) {
    const value = token[this.mode];
    if (this.mode === "mask") return token.kind === "sampled" || token.kind === "demonstration" ? alpha(css("--c0"), 0.3) : token.kind === "untrained" ? alpha(css("--c4"), 0.3) : null;
    if (value === null || value === undefined) return null;
    if (this.mode === "version") return alpha(color(labels.indexOf(value)), 0.35);
    const strongest = Number(css("--strongest")); // beyond it the text on it is hard to read
    if (this.mode === "logprob") return alpha(css("--c1"), strongest * (0.05 + 0.95 * Math.min(1, -value / 5)));
    const signed = this.mode === "ratio" ? Math.log(Math.max(value, 1e-9)) : value / this.largest;
    return alpha(css(signed >= 0 ? "--c0" : "--c1"), strongest * Math.min(1, Math.abs(signed)));
  }

  key(event) {
    const last = this.tokens.length - 1;
    const next = { ArrowLeft: this.selected - 1, ArrowRight: this.selected + 1, ArrowUp: this.selected - 20, ArrowDown: this.selected + 20, Home: 0, End: last }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    this.select(Math.max(0, Math.min(last, next)));
    say(this.detail.textContent);
  }

  pick(node) {
    if (node) this.select(Number(node.dataset.at));
  }

  select(at, scroll = true) {
    this.flow.querySelector(".selected")?.classList.remove("selected");
    this.selected = at;
    const node = this.flow.querySelector(`[data-at="${at}"]`);
    const token = this.tokens[at];
    if (!node || !token) return;
    node.classList.add("selected");
    if (scroll) node.scrollIntoView({ block: "nearest" });
    const facts = [
      `token ${at} of ${this.length}`,
      `id ${token.id}`,
      token.kind,
      token.version && `version ${visible(token.version)}, temperature ${number(token.temperature)}`,
      token.logprob !== null && `log-prob ${number(token.logprob)}`,
      token.ratio !== null && `ratio ${number(token.ratio)}`,
      token.advantage !== null && `advantage ${number(token.advantage)}`,
    ];
    fill(this.detail, h("code", {}, shown(token.text)), ` ${facts.filter(Boolean).join("; ")}`);
  }
}

function turnMark(turn) {
  return h("span", { class: "turn-end" }, `turn ${turn.index} ends${turn.reward === null ? "" : `, ${number(turn.reward)}`}`);
}

function shown(text) {
  return visible(text).replaceAll("\n", "\u21b5") || "\u2205";
}
