// What is said about the picked node. Text goes in as text, never as markup.

function element(tag, text = "", ...children) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  made.append(...children);
  return made;
}

const short = (value) =>
  (value === 0 ? "0" : Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(2)).replace("-", "−");
const count = (value) => value.toLocaleString("en");

// The shortest path from a node against the edges to a start, or along them to a goal; of equally short ones, one along
// the strongest edges.
function shortest(film, state, node, goals, forward) {
  const wanted = new Set(goals);
  if (wanted.has(node)) return [node];
  const near = forward ? state.of : state.to,
    far = forward ? state.to : state.of;
  const via = new Int32Array(film.structure.nodes).fill(-1),
    strength = new Uint8Array(film.structure.nodes);
  const seen = new Uint8Array(film.structure.nodes);
  seen[node] = 1;
  for (let front = new Set([node]); front.size;) {
    const next = new Set();
    for (let i = 0; i < state.count; i++) {
      const v = far[i],
        size = Math.abs(state.codes[i]);
      if (!front.has(near[i]) || seen[v] || size <= strength[v]) continue;
      via[v] = near[i];
      strength[v] = size;
      next.add(v);
    }
    let best = -1;
    for (const v of next) {
      seen[v] = 1;
      if (wanted.has(v) && (best < 0 || strength[v] > strength[best])) best = v;
    }
    if (best >= 0) {
      const path = [best];
      while (path[path.length - 1] !== node) path.push(via[path[path.length - 1]]);
      return forward ? path.reverse() : path;
    }
    front = next;
  }
  return null;
}

class Panel {
  constructor(film, box, pick) {
    Object.assign(this, { film, box, pick });
  }

  // All real edges of a node at this record; the strongest first.
  edges(node, state) {
    const into = [],
      outOf = [];
    for (let i = 0; i < state.count; i++) {
      if (state.to[i] === node) into.push(i);
      if (state.of[i] === node) outOf.push(i);
    }
    const order = (a, b) => Math.abs(state.codes[b]) - Math.abs(state.codes[a]) || a - b;
    return [into.sort(order), outOf.sort(order)];
  }

  show(node, state) {
    const { film, box } = this,
      { structure } = film,
      group = structure.groups[film.group[node]];
    const [into, outOf] = this.edges(node, state);
    const up = shortest(film, state, node, structure.inputs, false),
      down = shortest(film, state, node, structure.outputs, true);
    const roles = [
      [structure.inputs, "input"],
      [structure.outputs, "output"],
    ]
      .filter(([list]) => list.includes(node))
      .map(([, name]) => name);
    const one = film.about.grouped ? `nodes ${film.about.grouped[node]}` : `node ${node}`;
    const parts = [element("h2", [one, group[0], ...roles].join(" · "))];
    for (const [path, what] of [
      [up, "from an input"],
      [down, "to an output"],
    ]) {
      const along =
        path && path.length > 1
          ? `${what}: ${path.join(" → ")} (${path.length - 1} edge${path.length > 2 ? "s" : ""})`
          : "";
      if (along) parts.push(element("p", along));
      else if (!path) parts.push(element("p", `no path ${what}`));
    }
    if (film.about.grouped) parts.push(element("p", "A path along dots need not be one along nodes."));
    else if (!structure.sure)
      parts.push(element("p", "Paths follow the order of the layers, which for models with branches is a guess."));
    const kernel = film.kernel(node, state);
    if (kernel) parts.push(element("h3", `kernel, ${kernel.shape.join(" × ")}`), this.kernel(kernel));
    parts.push(...this.list("inputs", into, state.of, state), ...this.list("outputs", outOf, state.to, state));
    box.replaceChildren(...parts);
    return [up, down].filter((path) => path && path.length > 1);
  }

  kernel({ shape, values }) {
    const most = Math.max(...values.map(Math.abs)),
      wide = shape[shape.length - 1],
      table = element("table");
    table.className = "kernel";
    for (let i = 0; i < values.length; i += wide) {
      const row = element("tr");
      for (const value of values.slice(i, i + wide)) {
        const cell = element("td", value.toFixed(2).replace("-", "−")),
          colour = value > 0 ? "--positive" : "--negative";
        const share = Math.round((55 * Math.abs(value)) / most);
        cell.style.background = `color-mix(in srgb, var(${colour}) ${share}%, transparent)`;
        row.append(cell);
      }
      table.append(row);
    }
    return table;
  }

  list(what, edges, ends, state) {
    const { film } = this,
      now = film.steps[film.at],
      table = element("table");
    const weight = film.about.grouped ? "density" : "weight";
    table.append(
      element(
        "tr",
        "",
        element("th", what === "inputs" ? "from" : "to"),
        element("th", weight),
        element("th", "age, steps"),
      ),
    );
    table.dataset.list = what;
    for (const i of edges) {
      const button = element("button", String(ends[i])),
        value = strengthOf(state.codes[i]),
        cell = element("td", short(value));
      button.type = "button";
      button.addEventListener("click", () => this.pick(ends[i]));
      cell.className = value > 0 ? "plus" : "minus";
      table.append(
        element("tr", "", element("td", "", button), cell, element("td", count(now - film.steps[state.born[i]]))),
      );
    }
    const rows = element("div", "", table);
    rows.className = "rows";
    return [element("h3", `${count(edges.length)} ${edges.length === 1 ? what.slice(0, -1) : what}`), rows];
  }

  clear() {
    this.box.replaceChildren(element("p", "Pick a node: click or tap it, or find it above."));
  }
}
