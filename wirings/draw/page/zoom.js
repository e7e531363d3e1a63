// Where things are on the canvas: zoom and pan, and which node is under the mouse or a finger.

Object.assign(View.prototype, {
  // From node positions to pixels of the canvas.
  place() {
    const { scale, x, y } = this.zoom,
      { width, height } = this.over,
      count = this.film.structure.nodes;
    this.px = new Float32Array(count);
    this.py = new Float32Array(count);
    for (let v = 0; v < count; v++) {
      this.px[v] = (this.layout.x[v] * scale + x) * width;
      this.py[v] = (this.layout.y[v] * scale + y) * height;
    }
  },

  cell(of, to) {
    const { scale, x, y } = this.zoom,
      { width, height } = this.over,
      count = this.film.structure.nodes;
    const side = 0.9 * Math.min(width, height),
      left = (width - side) / 2,
      top = 0.07 * height;
    return [
      left * scale + x * width + (of / count) * side * scale,
      top * scale + y * height + (to / count) * side * scale,
      (side * scale) / count,
    ];
  },

  // The node nearest to a point of the page, within reach; in the matrix, the one of the row.
  nodeAt(clientX, clientY, reach) {
    const box = this.over.getBoundingClientRect(),
      x = (clientX - box.left) * this.ratio,
      y = (clientY - box.top) * this.ratio;
    const count = this.film.structure.nodes;
    if (this.matrix) {
      const [, top, side] = this.cell(0, 0),
        row = Math.floor((y - top) / side);
      return row >= 0 && row < count ? row : -1;
    }
    let best = -1,
      least = (reach * this.ratio) ** 2;
    for (let v = 0; v < count; v++) {
      const far = (this.px[v] - x) ** 2 + (this.py[v] - y) ** 2;
      if (far < least) [best, least] = [v, far];
    }
    return best;
  },

  zoomBy(factor, clientX, clientY) {
    const box = this.over.getBoundingClientRect(),
      { zoom } = this;
    const ax = (clientX - box.left) / box.width,
      ay = (clientY - box.top) / box.height;
    const scale = Math.max(1, Math.min(60, zoom.scale * factor)),
      by = scale / zoom.scale;
    Object.assign(zoom, { scale, x: ax - (ax - zoom.x) * by, y: ay - (ay - zoom.y) * by });
    this.moveBy(0, 0);
  },

  moveBy(dx, dy) {
    const { zoom } = this,
      clamp = (value) => Math.max(1 - zoom.scale, Math.min(0, value));
    zoom.x = clamp(zoom.x + dx / this.width);
    zoom.y = clamp(zoom.y + dy / this.height);
  },
});
