// The picture: edges as ink, and above it nodes, labels, what is new, dying or picked. Knows zoom, filters and picking.

const FEW = 3000; // edges that are drawn as thick lines
const MARKED = 150; // new and dying edges that stand out, the strongest first

class View {
  constructor(film, ink, marks, over) {
    Object.assign(this, { film, over, ink: new Ink(ink), marksCanvas: marks, context: over.getContext("2d") });
    this.zoom = { scale: 1, x: 0, y: 0 };
    this.matrix = false;
    this.filter = { from: -1, to: -1, sign: 0, strength: 0, youngest: 0, oldest: Infinity };
    this.picked = null; // { node, edges, paths }
    this.fade = 0; // how far from this record to the next, 0 to 1
    this.drawn = {
      count: 0,
      places: new Uint32Array(0),
      levels: new Int8Array(0),
      to: new Uint32Array(0),
      of: new Uint32Array(0),
    };
    this.queue = null;
    this.levels = this._levels();
    this.used = new Uint8Array(film.structure.nodes);
  }

  // Four levels of strength; the page says where they begin.
  _levels() {
    const { bounds } = this.film,
      table = new Uint8Array(129);
    for (let m = 1; m < 129; m++) table[m] = bounds.length ? 1 + bounds.filter((bound) => m > bound).length : 3;
    return table;
  }

  colours() {
    const style = getComputedStyle(document.documentElement);
    this.colour = {};
    for (const name of ["ground", "text", "soft", "line", "positive", "negative", "new", "dying", "node", "unused"]) {
      this.colour[name] = style.getPropertyValue(`--${name}`).trim();
    }
    const parts = (name) => [1, 3, 5].map((i) => parseInt(this.colour[name].slice(i, i + 2), 16));
    this.ink.colours(parts("ground"), parts("positive"), parts("negative"));
  }

  resize() {
    const box = this.over.getBoundingClientRect();
    if (this.layout && box.width === this.width && box.height === this.height) return;
    const most = 1.6e6,
      asked = Math.min(window.devicePixelRatio || 1, 2);
    this.ratio = Math.min(asked, Math.sqrt(most / Math.max(1, box.width * box.height)));
    this.width = box.width;
    this.height = box.height;
    for (const canvas of [this.over, this.marksCanvas]) {
      canvas.width = Math.round(box.width * this.ratio);
      canvas.height = Math.round(box.height * this.ratio);
    }
    this.ink.resize(this.over.width, this.over.height);
    this.layout = layoutOf(this.film.structure, this.film.about.grouped, box.width, box.height);
    const edges = this.film.now.count || 1;
    this.few = edges < FEW;
    this.lineWidth = this.ratio * Math.max(1, Math.min(3.5, 90 / Math.sqrt(edges)));
    this.redraw();
  }

  // Signed levels of all edges of a state, 0 for those that the filters hide.
  levelsOf(state) {
    const { from, to, sign, strength, youngest, oldest } = this.filter,
      { group, steps } = this.film;
    const levels = new Int8Array(state.count),
      now = steps[this.film.at];
    let shown = 0;
    for (let i = 0; i < state.count; i++) {
      const code = state.codes[i],
        size = code < 0 ? -code : code,
        age = now - steps[state.born[i]];
      if (
        (from >= 0 && group[state.of[i]] !== from) ||
        (to >= 0 && group[state.to[i]] !== to) ||
        (sign > 0 && code < 0) ||
        (sign < 0 && code > 0) ||
        size < strength ||
        age < youngest ||
        age > oldest
      )
        continue;
      levels[i] = code < 0 ? -this.levels[size] : this.levels[size];
      shown++;
    }
    this.shown = shown;
    return levels;
  }

  stroke(of, to, level, way) {
    const size = level < 0 ? -level : level,
      amount = way * LEVEL_INK[size];
    if (this.matrix) {
      const [x, y, side] = this.cell(of, to);
      this.ink.rectangle(x, y, side, side, level, way * Math.max(4, LEVEL_INK[size]));
    } else {
      const width = this.lineWidth > 1.5 ? this.lineWidth * (0.4 + 0.2 * size) : this.lineWidth;
      this.ink.line(this.px[of], this.py[of], this.px[to], this.py[to], width, level, amount);
    }
  }

  // Everything anew: after zooming, resizing or a change of the filters.
  redraw() {
    if (!this.layout) return;
    this.place();
    this.ink.clear();
    const state = this.film.now,
      levels = this.levelsOf(state);
    for (let i = 0; i < state.count; i++) if (levels[i]) this.stroke(state.of[i], state.to[i], levels[i], 1);
    this.drawn = { ...state, levels };
    this.queue = null;
    this.ink.expose();
    this.nodesOf(state);
    this.changed();
  }

  // The picture is another one although the record is the same.
  changed() {
    this.stamp = (this.stamp ?? 0) + 1;
    this.wet = true;
  }

  // Brings the canvases up to date, and no more than that: a frame in which little changed costs little.
  paint() {
    if (this.wet) this.ink.show();
    const marks = `${this.film.at} ${this.stamp}`;
    if (this.marked !== marks && !this.wet) {
      // not in the same frame as the ink
      this.marked = marks;
      this.drawMarks();
    }
    this.marksCanvas.style.opacity = this.marked === marks ? 1 - 0.7 * this.fade : 0;
    const over = `${marks} ${this.picked?.node}`;
    if (this.overlaid !== over) {
      this.overlaid = over;
      this.overlay();
    }
    const again = this.wet || this.marked !== marks;
    this.wet = false;
    return again;
  }

  // To another state: only what is different is taken off and drawn.
  show(state) {
    if (this.queue) this.work(Infinity);
    const before = this.drawn,
      levels = this.levelsOf(state),
      off = [],
      on = [];
    let i = 0,
      j = 0;
    while (i < before.count || j < state.count) {
      const a = i < before.count ? before.places[i] : Infinity,
        b = j < state.count ? state.places[j] : Infinity;
      if (a === b && before.levels[i] === levels[j]) {
        i++;
        j++;
        continue;
      }
      if (a <= b) {
        if (before.levels[i]) off.push(i);
        i++;
      }
      if (b <= a) {
        if (levels[j]) on.push(j);
        j++;
      }
    }
    this.drawn = { ...state, levels };
    if (off.length + on.length) this.queue = { before, off, on, at: 0 };
    this.nodesOf(state);
  }

  // Draws for so many milliseconds; false if there is nothing left to draw.
  work(budget) {
    if (!this.queue) return false;
    const { before, off, on } = this.queue,
      until = performance.now() + budget,
      all = off.length + on.length;
    const { drawn } = this;
    while (this.queue.at < all) {
      const stop = Math.min(all, this.queue.at + 128);
      for (let n = this.queue.at; n < stop; n++) {
        if (n < off.length) this.stroke(before.of[off[n]], before.to[off[n]], before.levels[off[n]], -1);
        else {
          const i = on[n - off.length];
          this.stroke(drawn.of[i], drawn.to[i], drawn.levels[i], 1);
        }
      }
      this.queue.at = stop;
      if (performance.now() > until) break;
    }
    if (this.queue.at >= all) this.queue = null;
    this.wet = true;
    return true;
  }

  // Which nodes lie on a path from an input to an output; where paths are a guess, which have an edge.
  nodesOf(state) {
    const { structure } = this.film,
      { of, to, count } = state;
    this.used = new Uint8Array(structure.nodes);
    this.loops = [];
    for (let i = 0; i < count; i++) if (of[i] === to[i]) this.loops.push(of[i]);
    if (!structure.sure) {
      for (let i = 0; i < count; i++) this.used[of[i]] = this.used[to[i]] = 1;
      return;
    }
    const fed = new Uint8Array(structure.nodes),
      leads = new Uint8Array(structure.nodes);
    for (const v of structure.inputs) fed[v] = 1;
    for (const v of structure.outputs) leads[v] = 1;
    for (let more = true; more;) {
      more = false;
      for (let i = 0; i < count; i++) if (fed[of[i]] && !fed[to[i]]) more = Boolean((fed[to[i]] = 1));
    }
    for (let more = true; more;) {
      more = false;
      for (let i = count - 1; i >= 0; i--) if (leads[to[i]] && !leads[of[i]]) more = Boolean((leads[of[i]] = 1));
    }
    for (let v = 0; v < structure.nodes; v++) this.used[v] = fed[v] & leads[v];
  }
}
