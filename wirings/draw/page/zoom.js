// Zoom and pan: from positions of nodes to pixels of the canvas, and from the pointer to a node.

Object.assign(View.prototype, {
  // Computes the pixel coordinates px and py of all nodes.
  placeNodes() {
    const { scale, x, y } = this.zoom,
      { width, height } = this.overlay,
      count = this.replay.structure.nodes;
    this.px = new Float32Array(count);
    this.py = new Float32Array(count);
    for (let v = 0; v < count; v++) {
      this.px[v] = (this.layout.x[v] * scale + x) * width;
      this.py[v] = (this.layout.y[v] * scale + y) * height;
    }
  },

  // The cell of an edge in the matrix: left, top and side in pixels.
  cell(source, target) {
    const { scale, x, y } = this.zoom,
      { width, height } = this.overlay,
      count = this.replay.structure.nodes;
    const side = 0.9 * Math.min(width, height),
      left = (width - side) / 2,
      top = 0.07 * height;
    return [
      left * scale + x * width + (source / count) * side * scale,
      top * scale + y * height + (target / count) * side * scale,
      (side * scale) / count,
    ];
  },

  // The node nearest to a point of the page within reach, or -1; in the matrix, the node of the row.
  nodeAt(clientX, clientY, reach) {
    const box = this.overlay.getBoundingClientRect(),
      x = (clientX - box.left) * this.ratio,
      y = (clientY - box.top) * this.ratio;
    const count = this.replay.structure.nodes;
    if (this.matrix) {
      const [, top, side] = this.cell(0, 0),
        row = Math.floor((y - top) / side);
      return row >= 0 && row < count ? row : -1;
    }
    let best = -1,
      least = (reach * this.ratio) ** 2;
    for (let v = 0; v < count; v++) {
      const distance = (this.px[v] - x) ** 2 + (this.py[v] - y) ** 2;
      if (distance < least) [best, least] = [v, distance];
    }
    return best;
  },

  // Zooms about a point of the page.
  zoomBy(factor, clientX, clientY) {
    const box = this.overlay.getBoundingClientRect(),
      { zoom } = this;
    const ax = (clientX - box.left) / box.width,
      ay = (clientY - box.top) / box.height;
    const scale = clamp(zoom.scale * factor, 1, 60),
      by = scale / zoom.scale;
    Object.assign(zoom, { scale, x: ax - (ax - zoom.x) * by, y: ay - (ay - zoom.y) * by });
    this.moveBy(0, 0);
  },

  // Moves by pixels of the page; the picture always covers the canvas.
  moveBy(dx, dy) {
    const { zoom } = this;
    zoom.x = clamp(zoom.x + dx / this.width, 1 - zoom.scale, 0);
    zoom.y = clamp(zoom.y + dy / this.height, 1 - zoom.scale, 0);
  },
});
