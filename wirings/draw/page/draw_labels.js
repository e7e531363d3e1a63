// Draws the names of groups of nodes, and the grid of the matrix.

// Texts for the label of a column, the longest first: name and count, name, and the last part of the name (for a name
// that ends in a number, all its numbers).
function labelTexts({ name, count }) {
  const parts = name.split(/[. ]/),
    numbers = parts.filter((part) => /^\d+$/.test(part)),
    last = /\d$/.test(name) && numbers.length ? numbers.join(".") : parts.pop();
  return [count ? `${name} · ${count}` : name, name, last.length < name.length ? last : ""];
}

Object.assign(View.prototype, {
  drawText(text, x, y, align = "center") {
    const { context } = this;
    context.font = `${12 * this.ratio}px system-ui, sans-serif`;
    Object.assign(context, {
      textAlign: align,
      textBaseline: "middle",
      lineWidth: 4 * this.ratio,
      strokeStyle: this.colour.ground,
    });
    context.strokeText(text, x, y); // an outline in the background colour keeps it readable on top of edges
    context.fillStyle = this.colour.soft;
    context.fillText(text, x, y);
  },

  drawGroupLabels() {
    const { context } = this,
      { scale, x, y } = this.zoom,
      { width, height } = this.overlay;
    context.font = `${12 * this.ratio}px system-ui, sans-serif`;
    const labels = this.layout.labels.map((label) => ({
      ...label,
      at: [(label.x * scale + x) * width, (label.y * scale + y) * height],
    }));
    if (labels.some((label) => label.align)) this.drawLabelsAround(labels);
    else this.drawLabelsAbove(labels);
  },

  // Labels around a circle.
  drawLabelsAround(labels) {
    const { width, height } = this.overlay;
    for (const { name, at, align } of labels) {
      if (at[0] < 0 || at[0] > width || at[1] < 0 || at[1] > height) continue;
      const wide = this.context.measureText(name).width;
      const x = align === "right" ? Math.max(wide + 4, at[0]) : Math.min(width - wide - 4, at[0]);
      this.drawText(name, x, clamp(at[1], 9 * this.ratio, height - 9 * this.ratio), align);
    }
  },

  // Labels above columns: the longest texts that fit side by side; if none fit, only every second label, and so on.
  drawLabelsAbove(labels) {
    const { scale } = this.zoom,
      { width } = this.overlay;
    const placed = (kind, nth) =>
      labels
        .filter((_, i) => i % nth === 0)
        .map((label) => {
          const text = labelTexts(label)[kind] || label.name,
            half = this.context.measureText(text).width / 2 + 4 * this.ratio;
          return {
            text,
            half,
            x: scale === 1 ? clamp(label.at[0], half, width - half) : label.at[0],
            y: Math.max(9 * this.ratio, label.at[1]),
          };
        });
    const fits = (list) =>
      list.every((label, i) => i === 0 || label.x - label.half >= list[i - 1].x + list[i - 1].half);
    let list = null;
    for (let nth = 1; !list; nth *= 2) list = [0, 1, 2].map((kind) => placed(kind, nth)).find(fits) ?? null;
    for (const label of list) this.drawText(label.text, label.x, label.y);
  },

  drawMatrixLabels() {
    const { context } = this,
      { groups, nodes } = this.replay.structure;
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
    this.drawText("columns send, rows receive", (left + right) / 2, Math.max(9 * this.ratio, top - 10 * this.ratio));
  },
});
