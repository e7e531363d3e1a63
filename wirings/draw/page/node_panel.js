// The panel about the selected node: its paths, its kernel, and its edges.

// The shortest path from a node to one of the goals, along the edges or, if not forward, against them. Among paths of
// equal length, strong edges are preferred. Returns the nodes in the direction of the edges, or null.
function shortestPath(replay, state, node, goals, forward) {
  const wanted = new Set(goals);
  if (wanted.has(node)) return [node];
  const near = forward ? state.sources : state.targets,
    far = forward ? state.targets : state.sources;
  const via = new Int32Array(replay.structure.nodes).fill(-1),
    strength = new Uint8Array(replay.structure.nodes);
  const seen = new Uint8Array(replay.structure.nodes);
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

class NodePanel {
  constructor(replay, box, select) {
    Object.assign(this, { replay, box, select });
  }

  // The real edges into and out of a node, the strongest first.
  edges(node, state) {
    const into = [],
      outOf = [];
    for (let i = 0; i < state.count; i++) {
      if (state.targets[i] === node) into.push(i);
      if (state.sources[i] === node) outOf.push(i);
    }
    const order = (a, b) => Math.abs(state.codes[b]) - Math.abs(state.codes[a]) || a - b;
    return [into.sort(order), outOf.sort(order)];
  }

  // Shows a node. Returns its paths from an input and to an output, as far as there are any.
  show(node, state) {
    const { replay, box } = this,
      { structure } = replay,
      group = structure.groups[replay.group[node]];
    const [into, outOf] = this.edges(node, state);
    const up = shortestPath(replay, state, node, structure.inputs, false),
      down = shortestPath(replay, state, node, structure.outputs, true);
    const roles = [
      [structure.inputs, "input"],
      [structure.outputs, "output"],
    ]
      .filter(([list]) => list.includes(node))
      .map(([, name]) => name);
    const one = replay.about.grouped ? `nodes ${replay.about.grouped[node]}` : `node ${node}`;
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
    if (replay.about.grouped) parts.push(element("p", "A path of dots need not be a path of nodes."));
    else if (!structure.sure)
      parts.push(element("p", "Paths assume that layers follow each other, which is a guess for models with branches."));
    const kernel = replay.kernel(node, state);
    if (kernel) parts.push(element("h3", `kernel, ${kernel.shape.join(" × ")}`), this.kernelTable(kernel));
    parts.push(...this.edgeTable("inputs", into, state.sources, state), ...this.edgeTable("outputs", outOf, state.targets, state));
    box.replaceChildren(...parts);
    return [up, down].filter((path) => path && path.length > 1);
  }

  kernelTable({ shape, values }) {
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

  edgeTable(what, edges, ends, state) {
    const { replay } = this,
      now = replay.steps[replay.at],
      table = element("table");
    const weight = replay.about.grouped ? "density" : "weight";
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
        value = weightOf(state.codes[i]),
        cell = element("td", formatNumber(value));
      button.type = "button";
      button.addEventListener("click", () => this.select(ends[i]));
      cell.className = value > 0 ? "plus" : "minus";
      table.append(
        element("tr", "", element("td", "", button), cell, element("td", formatCount(now - replay.steps[state.born[i]]))),
      );
    }
    const rows = element("div", "", table);
    rows.className = "rows";
    const title = element("h3", `${formatCount(edges.length)} ${edges.length === 1 ? what.slice(0, -1) : what}`);
    return edges.length ? [title, rows] : [title];
  }

  clear() {
    this.box.replaceChildren(element("p", "Select a node: click or tap it, or search for it above."));
  }
}
