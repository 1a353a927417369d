// Building the page. Text only ever becomes text nodes: nothing here, or anywhere else, parses markup.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") for (const [k, v] of Object.entries(value)) node.style.setProperty(k, v);
    else if (name === "data") Object.assign(node.dataset, value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...nodes(children));
  return node;
}

function nodes(children) {
  return children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false).map(asNode);
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function fill(node, ...children) {
  node.replaceChildren(...nodes(children));
  return node;
}

// What a model, a tool or a row wrote: its direction is its own affair, and control characters are made visible.
const CONTROL = /[\u0000-\u0008\u000b\u000c\u000e-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g;

export function visible(text) {
  return String(text).replace(CONTROL, (c) => `\u27e8${c.codePointAt(0).toString(16).padStart(4, "0")}\u27e9`);
}

const LONG = 20000;

export function foreign(text, tag = "pre") {
  const whole = visible(text);
  const node = h(tag, { class: "foreign" }, whole.slice(0, LONG));
  if (whole.length > LONG) {
    const more = h("button", { type: "button", onclick: () => fill(node, whole) }, `show all ${whole.length} characters`);
    node.append("\u2026 ", more);
  }
  return node;
}

export function number(value, digits = 4) {
  if (value === null || value === undefined || Number.isNaN(value)) return "\u2013";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e6 || size < 1e-3)) return value.toExponential(2);
  return String(Number(value.toPrecision(digits)));
}

export function say(text) {
  document.getElementById("live").textContent = text;
}

export function css(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

export function color(index) {
  return css(`--c${index % 8}`);
}
