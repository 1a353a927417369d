// A conversation as messages. Whatever they hold is shown as text.

import { h, foreign, number, visible } from "/static/dom.js";

export const REASONS = {
  start: "the first of its agent",
  template: "split: the chat template rewrote the history",
  edited: "split: the agent changed or compacted earlier messages",
  branch: "split: the agent went on from an earlier point",
  other: "split: for another reason",
};

export function conversation(episode) {
  const actions = episode.messages.filter((message) => message.role === "assistant").length;
  const turns = new Map(episode.turns.map((turn) => [turn.index, turn])); // the last mark of a turn has its reward
  const matched = actions === turns.size;
  const order = [...turns.keys()];
  let turn = -1;
  let trajectory = 0;
  return episode.messages.map((message) => {
    if (!matched || message.role !== "assistant") return messageOf(message, null);
    const earned = turns.get(order[(turn += 1)]);
    if (earned.trajectory === null || earned.trajectory === trajectory) return messageOf(message, earned);
    trajectory = earned.trajectory;
    const why = REASONS[episode.trajectories[trajectory]?.reason] ?? "";
    return [h("p", { class: "split" }, `trajectory ${trajectory} from here: ${why}`), messageOf(message, earned)];
  });
}

function messageOf(message, turn) {
  const role = visible(message.role ?? "?");
  return h(
    "article",
    { class: `message ${["system", "user", "assistant", "tool"].includes(message.role) ? message.role : "other"}` },
    h("header", {}, h("b", {}, role), message.name ? ` ${visible(message.name)}` : null, turn ? h("span", { class: "earned" }, earnedText(turn)) : null),
    message.reasoning_content ? h("details", { open: true }, h("summary", {}, "reasoning"), foreign(message.reasoning_content)) : null,
    contentOf(message.content),
    (message.tool_calls || []).map((call) =>
      h("div", { class: "call" }, h("span", { class: "tag" }, "call"), " ", h("code", {}, visible(call?.function?.name ?? "?")), foreign(pretty(call?.function?.arguments ?? ""))),
    ),
  );
}

export function earnedText(turn) {
  const parts = Object.entries(turn.parts || {}).map(([name, value]) => `${visible(name)} ${number(value)}`);
  const reward = turn.reward === null ? "no verdict" : `reward ${number(turn.reward)}`;
  return `turn ${turn.index}: ${reward}${parts.length ? ` (${parts.join(", ")})` : ""}`;
}

function contentOf(content) {
  if (content === null || content === undefined || content === "") return null;
  if (typeof content === "string") return foreign(content);
  if (Array.isArray(content)) return content.map((part) => foreign(typeof part?.text === "string" ? part.text : JSON.stringify(part)));
  return foreign(JSON.stringify(content));
}

function pretty(text) {
  if (typeof text !== "string") return JSON.stringify(text, null, 1);
  try {
    return JSON.stringify(JSON.parse(text), null, 1);
  } catch {
    return text;
  }
}
