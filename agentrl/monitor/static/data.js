// What the server knows, kept up to date: runs, their columns and their events.

export async function get(path, query = {}) {
  const given = Object.entries(query).filter(([, value]) => value !== "" && value !== null && value !== undefined);
  const text = new URLSearchParams(given).toString();
  const answer = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { headers: { Accept: "application/json" } });
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || `the server answered ${answer.status}`);
  return body;
}

export class RunData {
  constructor(overview) {
    this.id = overview.id;
    this.overview = overview;
    this.clear();
  }

  clear() {
    this.cursor = [0, 1, 0, 0];
    this.step = [];
    this.time = [];
    this.columns = new Map();
    this.keys = [];
    this.events = [];
  }

  // True where something was new.
  async refresh() {
    const found = await get(`runs/${this.id}/series`, { cursor: this.cursor.join(",") });
    if (found.from === 0 && this.step.length) this.clear();
    const before = this.step.length;
    this.cursor = found.cursor;
    this.keys = found.keys;
    this.step.push(...found.step);
    this.time.push(...found.time);
    this.events.push(...found.events);
    for (const [key, values] of Object.entries(found.columns)) {
      const column = this.columns.get(key) || new Array(before).fill(null);
      while (column.length < before) column.push(null);
      column.push(...values);
      this.columns.set(key, column);
    }
    for (const column of this.columns.values()) while (column.length < this.step.length) column.push(null);
    return found.step.length > 0 || found.events.length > 0;
  }

  column(key) {
    return this.columns.get(key);
  }

  // The last evaluation of each step, in order.
  evaluations() {
    const found = new Map();
    for (const event of this.events) if (event.kind === "eval") found.set(event.step, event);
    return [...found.values()].sort((a, b) => a.step - b.step);
  }

  environments() {
    return [...new Set(this.keys.filter((k) => k.startsWith("envs/")).map((k) => k.slice(5, k.lastIndexOf("/"))))];
  }
}
