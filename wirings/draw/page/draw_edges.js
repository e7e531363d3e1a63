// Draws the edges: their levels of strength and filters, and which lines to add or remove when the record changes.

// The level of strength, 1 to 4, of every absolute code. The bounds between levels are computed in html.py.
function levelTable(bounds) {
  const table = new Uint8Array(129);
  for (let m = 1; m < 129; m++) table[m] = bounds.length ? 1 + bounds.filter((bound) => m > bound).length : 3;
  return table;
}

Object.assign(View.prototype, {
  // The level of each edge of a state, with the sign of its weight; 0 for edges that the filters hide.
  edgeLevels(state) {
    const { from, to, sign, strength, youngest, oldest } = this.filter,
      { group, steps } = this.replay;
    const levels = new Int8Array(state.count),
      now = steps[this.replay.at];
    let shown = 0;
    for (let i = 0; i < state.count; i++) {
      const code = state.codes[i],
        size = code < 0 ? -code : code,
        age = now - steps[state.born[i]];
      if (
        (from >= 0 && group[state.sources[i]] !== from) ||
        (to >= 0 && group[state.targets[i]] !== to) ||
        (sign > 0 && code < 0) ||
        (sign < 0 && code > 0) ||
        size < strength ||
        age < youngest ||
        age > oldest
      )
        continue;
      levels[i] = code < 0 ? -this.levelOfCode[size] : this.levelOfCode[size];
      shown++;
    }
    this.shown = shown;
    return levels;
  },

  // Draws one edge, as a line or as a cell of the matrix; with direction -1, removes it.
  drawEdge(source, target, level, direction) {
    const size = level < 0 ? -level : level;
    if (this.matrix) {
      const [x, y, side] = this.cell(source, target);
      this.raster.rectangle(x, y, side, side, level, direction * Math.max(4, LEVEL_INK[size]));
    } else {
      const width = this.lineWidth > 1.5 ? this.lineWidth * (0.4 + 0.2 * size) : this.lineWidth,
        { px, py } = this;
      this.raster.line(px[source], py[source], px[target], py[target], width, level, direction * LEVEL_INK[size]);
    }
  },

  // Draws all edges from scratch: after zooming, resizing, or changing the theme.
  redraw() {
    if (!this.layout) return;
    this.placeNodes();
    this.raster.clear();
    const state = this.replay.now,
      levels = this.edgeLevels(state);
    for (let i = 0; i < state.count; i++)
      if (levels[i]) this.drawEdge(state.sources[i], state.targets[i], levels[i], 1);
    this.drawn = { ...state, levels };
    this.queue = null;
    this.raster.adaptExposure();
    this.findUsedNodes(state);
    this.invalidate();
  },

  // Moves on to another state: queues the edges that differ from what is drawn.
  showState(state) {
    if (this.queue) this.drawQueued(Infinity);
    const before = this.drawn,
      levels = this.edgeLevels(state),
      removed = [],
      added = [];
    let i = 0,
      j = 0;
    while (i < before.count || j < state.count) {
      const a = i < before.count ? before.indices[i] : Infinity,
        b = j < state.count ? state.indices[j] : Infinity;
      if (a === b && before.levels[i] === levels[j]) {
        i++;
        j++;
        continue;
      }
      if (a <= b) {
        if (before.levels[i]) removed.push(i);
        i++;
      }
      if (b <= a) {
        if (levels[j]) added.push(j);
        j++;
      }
    }
    this.drawn = { ...state, levels };
    if (removed.length + added.length) this.queue = { before, removed, added, at: 0 };
    this.findUsedNodes(state);
  },

  // Works on the queue for about so many milliseconds.
  drawQueued(milliseconds) {
    if (!this.queue) return;
    const { before, removed, added } = this.queue,
      until = performance.now() + milliseconds,
      total = removed.length + added.length;
    const { drawn } = this;
    while (this.queue.at < total) {
      const stop = Math.min(total, this.queue.at + 128);
      for (let n = this.queue.at; n < stop; n++) {
        if (n < removed.length) {
          const i = removed[n];
          this.drawEdge(before.sources[i], before.targets[i], before.levels[i], -1);
        } else {
          const i = added[n - removed.length];
          this.drawEdge(drawn.sources[i], drawn.targets[i], drawn.levels[i], 1);
        }
      }
      this.queue.at = stop;
      if (performance.now() > until) break;
    }
    if (this.queue.at >= total) this.queue = null;
    this.rasterChanged = true;
  },
});
