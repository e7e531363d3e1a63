// Draws the edges of the selected node, and its paths from an input and to an output.

Object.assign(View.prototype, {
  drawSelection() {
    const { node, paths } = this.selected,
      { context, colour } = this,
      state = this.replay.now,
      levels = this.drawn.levels;
    for (const way of [1, -1]) {
      for (const level of [1, 2, 3, 4]) {
        const pairs = [];
        for (let i = 0; i < state.count; i++) {
          if ((state.sources[i] === node || state.targets[i] === node) && levels[i] === way * level)
            pairs.push([state.sources[i], state.targets[i]]);
        }
        const name = way > 0 ? "positive" : "negative";
        this.strokeEdges(context, colour[name], 0.6 + 0.5 * level, 0.45 + 0.13 * level, [], pairs);
      }
    }
    for (const path of paths) {
      const pairs = path.slice(1).map((v, i) => [path[i], v]);
      this.strokeEdges(context, colour.text, 2.2, 0.9, [], pairs);
      pairs.forEach(([source, target]) => this.drawArrow(source, target));
    }
  },

  drawArrow(source, target) {
    const { context, px, py } = this,
      angle = Math.atan2(py[target] - py[source], px[target] - px[source]),
      size = 8 * this.ratio;
    const x = px[source] + 0.6 * (px[target] - px[source]),
      y = py[source] + 0.6 * (py[target] - py[source]);
    context.fillStyle = this.colour.text;
    context.beginPath();
    context.moveTo(x + size * Math.cos(angle), y + size * Math.sin(angle));
    for (const turn of [2.5, -2.5])
      context.lineTo(x + size * Math.cos(angle + turn), y + size * Math.sin(angle + turn));
    context.fill();
  },
});
