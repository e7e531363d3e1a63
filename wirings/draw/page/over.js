// What lies above the ink: new and dying edges on a canvas of their own; labels, nodes and what is picked on another.

Object.assign(View.prototype, {
  overlay() {
    const { context, over } = this;
    context.clearRect(0, 0, over.width, over.height);
    if (this.matrix) this.axes();
    else this.groupNames();
    if (this.picked && !this.matrix) this.pickedEdges();
    if (!this.matrix) this.nodes();
  },

  // Lines of one look, in one path.
  paths(context, colour, width, alpha, dash, pairs) {
    context.save();
    Object.assign(context, { strokeStyle: colour, lineWidth: width * this.ratio, globalAlpha: alpha });
    context.setLineDash(dash.map((part) => part * this.ratio));
    context.beginPath();
    for (const [of, to] of pairs) {
      if (this.matrix) {
        const [x, y, side] = this.cell(of, to),
          wide = Math.max(side, 3 * this.ratio);
        context.rect(x - (wide - side) / 2, y - (wide - side) / 2, wide, wide);
      } else {
        context.moveTo(this.px[of], this.py[of]);
        context.lineTo(this.px[to], this.py[to]);
      }
    }
    context.stroke();
    context.restore();
  },

  strongest(list) {
    // of equally strong ones any, not those of the first block
    const any = ([of, to]) => Math.imul(of * 7919 + to, 0x9e3779b1) >>> 0;
    return list.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]) || any(a) - any(b)).slice(0, MARKED);
  },

  // The strongest new and dying edges of this record, as far as the filters show them. New ones have an outline; dying
  // ones are dashed, if there are not so many. The canvas fades until the next record.
  drawMarks() {
    const { film } = this,
      state = film.now,
      { from, to, sign, strength, youngest } = this.filter;
    const context = this.marksCanvas.getContext("2d"),
      fresh = [],
      gone = [];
    context.clearRect(0, 0, this.over.width, this.over.height);
    if (this.picked) return;
    for (let i = 0; film.at > 0 && i < state.count; i++) {
      if (state.born[i] === film.at && this.drawn.levels[i]) fresh.push([state.of[i], state.to[i], state.codes[i]]);
    }
    const { died } = state;
    for (let i = 0; youngest === 0 && i < died.codes.length; i++) {
      const code = died.codes[i];
      if ((from >= 0 && film.group[died.of[i]] !== from) || (to >= 0 && film.group[died.to[i]] !== to)) continue;
      if (code * sign < 0 || Math.abs(code) < strength) continue;
      gone.push([died.of[i], died.to[i], code]);
    }
    const { few } = this,
      wide = few ? this.lineWidth / this.ratio : 0.9,
      shown = this.strongest(fresh);
    this.paths(context, this.colour.dying, wide, 0.85, few ? [6, 4] : [], this.strongest(gone));
    this.paths(context, this.colour.new, wide + (few ? 3 : 1.4), 0.75, [], shown);
    for (const way of [1, -1]) {
      const pairs = shown.filter(([, , code]) => code * way > 0);
      this.paths(context, this.colour[way > 0 ? "positive" : "negative"], wide, 1, [], pairs);
    }
  },

  pickedEdges() {
    const { node, paths } = this.picked,
      state = this.film.now,
      levels = this.drawn.levels;
    for (const way of [1, -1]) {
      for (const level of [1, 2, 3, 4]) {
        const pairs = [];
        for (let i = 0; i < state.count; i++) {
          if ((state.of[i] === node || state.to[i] === node) && levels[i] === way * level)
            pairs.push([state.of[i], state.to[i]]);
        }
        this.paths(
          this.context,
          this.colour[way > 0 ? "positive" : "negative"],
          0.6 + 0.5 * level,
          0.45 + 0.13 * level,
          [],
          pairs,
        );
      }
    }
    for (const path of paths) {
      const pairs = path.slice(1).map((v, i) => [path[i], v]);
      this.paths(this.context, this.colour.text, 2.2, 0.9, [], pairs);
      pairs.forEach(([of, to]) => this.arrow(of, to));
    }
  },

  arrow(of, to) {
    const { context, px, py } = this,
      angle = Math.atan2(py[to] - py[of], px[to] - px[of]),
      size = 8 * this.ratio;
    const x = px[of] + 0.6 * (px[to] - px[of]),
      y = py[of] + 0.6 * (py[to] - py[of]);
    context.fillStyle = this.colour.text;
    context.beginPath();
    context.moveTo(x + size * Math.cos(angle), y + size * Math.sin(angle));
    for (const turn of [2.5, -2.5])
      context.lineTo(x + size * Math.cos(angle + turn), y + size * Math.sin(angle + turn));
    context.fill();
  },

  radius() {
    const count = this.film.structure.nodes;
    return this.ratio * Math.max(1.2, Math.min(7, 60 / Math.sqrt(count))) * Math.min(2.5, Math.sqrt(this.zoom.scale));
  },

  nodes() {
    const { context, px, py, used } = this,
      radius = this.radius(),
      count = this.film.structure.nodes;
    for (const alive of [0, 1]) {
      context.fillStyle = alive ? this.colour.node : this.colour.unused;
      context.beginPath();
      for (let v = 0; v < count; v++) {
        if (used[v] !== alive) continue;
        if (radius < 2.5) context.rect(px[v] - radius, py[v] - radius, 2 * radius, 2 * radius);
        else {
          context.moveTo(px[v] + radius, py[v]);
          context.arc(px[v], py[v], radius, 0, 2 * Math.PI);
        }
      }
      context.fill();
    }
    context.strokeStyle = this.colour.node;
    context.lineWidth = this.ratio;
    for (const v of this.loops ?? []) {
      // an edge from a node to itself
      context.beginPath();
      context.arc(px[v] + 1.6 * radius, py[v], 1.3 * radius, 0, 2 * Math.PI);
      context.stroke();
    }
    if (this.picked) {
      const { node } = this.picked;
      context.lineWidth = 2.5 * this.ratio;
      context.strokeStyle = this.colour.text;
      context.beginPath();
      context.arc(px[node], py[node], radius + 4 * this.ratio, 0, 2 * Math.PI);
      context.stroke();
    }
  },

  text(text, x, y, align = "center") {
    const { context } = this;
    context.font = `${12 * this.ratio}px system-ui, sans-serif`;
    Object.assign(context, {
      textAlign: align,
      textBaseline: "middle",
      lineWidth: 4 * this.ratio,
      strokeStyle: this.colour.ground,
    });
    context.strokeText(text, x, y); // readable above lines
    context.fillStyle = this.colour.soft;
    context.fillText(text, x, y);
  },

  groupNames() {
    const { context } = this,
      { scale, x, y } = this.zoom,
      { width, height } = this.over;
    context.font = `${12 * this.ratio}px system-ui, sans-serif`;
    const labels = this.layout.labels.map((label) => ({
      ...label,
      at: [(label.x * scale + x) * width, (label.y * scale + y) * height],
    }));
    const inside = (from, half, size) => Math.max(half, Math.min(size - half, from));
    if (labels.some((label) => label.round)) {
      for (const { name: text, at, round } of labels) {
        if (at[0] < 0 || at[0] > width || at[1] < 0 || at[1] > height) continue;
        const wide = context.measureText(text).width;
        const x = round === "right" ? Math.max(wide + 4, at[0]) : Math.min(width - wide - 4, at[0]);
        this.text(text, x, inside(at[1], 9 * this.ratio, height), round);
      }
      return;
    }
    // The longest kind of name that leaves room between all of them; if none does, every other one, or fewer.
    const placed = (kind, nth) =>
      labels
        .filter((_, i) => i % nth === 0)
        .map((label) => {
          const text = labelTexts(label)[kind] || label.name,
            half = context.measureText(text).width / 2 + 4 * this.ratio;
          return {
            text,
            half,
            x: scale === 1 ? inside(label.at[0], half, width) : label.at[0],
            y: Math.max(9 * this.ratio, label.at[1]),
          };
        });
    const fits = (list) =>
      list.every((label, i) => i === 0 || label.x - label.half >= list[i - 1].x + list[i - 1].half);
    let list = null;
    for (let nth = 1; !list; nth *= 2) list = [0, 1, 2].map((kind) => placed(kind, nth)).find(fits) ?? null;
    for (const label of list) this.text(label.text, label.x, label.y);
  },

  axes() {
    const { context } = this,
      { groups, nodes } = this.film.structure;
    const [left, top] = this.cell(0, 0),
      [right, low] = this.cell(nodes, nodes);
    context.strokeStyle = this.colour.line;
    context.lineWidth = this.ratio;
    context.beginPath();
    for (const at of [0, ...groups.map((group) => group[2])]) {
      const [x, y] = this.cell(at, at);
      context.moveTo(x, top);
      context.lineTo(x, low);
      context.moveTo(left, y);
      context.lineTo(right, y);
    }
    context.stroke();
    this.text("columns send, rows receive", (left + right) / 2, Math.max(9 * this.ratio, top - 10 * this.ratio));
  },
});
