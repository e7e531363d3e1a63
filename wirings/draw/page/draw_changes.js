// Draws new and dying edges on a canvas of their own, which fades until the next record.

const MAX_CHANGES = 150; // new and dying edges that are highlighted, the strongest first

Object.assign(View.prototype, {
  // Strokes edges that look alike, as one path. Pairs are [source, target].
  strokeEdges(context, colour, width, alpha, dash, pairs) {
    context.save();
    Object.assign(context, { strokeStyle: colour, lineWidth: width * this.ratio, globalAlpha: alpha });
    context.setLineDash(dash.map((part) => part * this.ratio));
    context.beginPath();
    for (const [source, target] of pairs) {
      if (this.matrix) {
        const [x, y, side] = this.cell(source, target),
          wide = Math.max(side, 3 * this.ratio);
        context.rect(x - (wide - side) / 2, y - (wide - side) / 2, wide, wide);
      } else {
        context.moveTo(this.px[source], this.py[source]);
        context.lineTo(this.px[target], this.py[target]);
      }
    }
    context.stroke();
    context.restore();
  },

  // The strongest of a list of [source, target, code].
  strongest(list) {
    // ties in pseudorandom order, so that they do not all come from the first block
    const hash = ([source, target]) => Math.imul(source * 7919 + target, 0x9e3779b1) >>> 0;
    return list.sort((a, b) => Math.abs(b[2]) - Math.abs(a[2]) || hash(a) - hash(b)).slice(0, MAX_CHANGES);
  },

  // Highlights the strongest new and dying edges that the filters show. New edges have an outline; dying edges are
  // dashed, unless there are many edges.
  drawChanges() {
    const { replay, colour } = this,
      state = replay.now,
      { from, to, sign, strength, youngest } = this.filter;
    const context = this.changes.getContext("2d"),
      born = [],
      dying = [];
    context.clearRect(0, 0, this.changes.width, this.changes.height);
    if (this.selected) return;
    for (let i = 0; replay.at > 0 && i < state.count; i++) {
      if (state.born[i] === replay.at && this.drawn.levels[i])
        born.push([state.sources[i], state.targets[i], state.codes[i]]);
    }
    const { died } = state;
    for (let i = 0; youngest === 0 && i < died.codes.length; i++) {
      const code = died.codes[i],
        { group } = replay;
      if ((from >= 0 && group[died.sources[i]] !== from) || (to >= 0 && group[died.targets[i]] !== to)) continue;
      if (code * sign < 0 || Math.abs(code) < strength) continue;
      dying.push([died.sources[i], died.targets[i], code]);
    }
    const { few } = this,
      width = few ? this.lineWidth / this.ratio : 0.9,
      shown = this.strongest(born);
    this.strokeEdges(context, colour.dying, width, 0.85, few ? [6, 4] : [], this.strongest(dying));
    this.strokeEdges(context, colour.new, width + (few ? 3 : 1.4), 0.75, [], shown);
    for (const way of [1, -1]) {
      const pairs = shown.filter(([, , code]) => code * way > 0);
      this.strokeEdges(context, colour[way > 0 ? "positive" : "negative"], width, 1, [], pairs);
    }
  },
});
