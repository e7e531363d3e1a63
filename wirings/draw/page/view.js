// The picture of the wiring: three canvases on top of each other, for edges, for changes (new and dying edges), and for
// everything else (selection, nodes, labels). Methods that draw are in the draw_*.js files.

const FEW_EDGES = 3000; // below this, edges are drawn as thick lines

class View {
  constructor(replay, edges, changes, overlay) {
    Object.assign(this, { replay, changes, overlay, raster: new EdgeRaster(edges), context: overlay.getContext("2d") });
    this.zoom = { scale: 1, x: 0, y: 0 };
    this.matrix = false;
    this.filter = { from: -1, to: -1, sign: 0, strength: 0, youngest: 0, oldest: Infinity };
    this.selected = null; // { node, paths }
    this.fade = 0; // the position between this record and the next, from 0 to 1
    this.drawn = {
      count: 0,
      indices: new Uint32Array(0),
      levels: new Int8Array(0),
      targets: new Uint32Array(0),
      sources: new Uint32Array(0),
    };
    this.queue = null; // edges that are yet to be drawn or removed
    this.levelOfCode = levelTable(replay.bounds);
    this.used = new Uint8Array(replay.structure.nodes);
  }

  readColours() {
    this.colour = readColours();
    const parts = (name) => [1, 3, 5].map((i) => parseInt(this.colour[name].slice(i, i + 2), 16));
    this.raster.setColours(parts("ground"), parts("positive"), parts("negative"));
  }

  resize() {
    const box = this.overlay.getBoundingClientRect();
    if (this.layout && box.width === this.width && box.height === this.height) return;
    const maxPixels = 1.6e6,
      wanted = Math.min(window.devicePixelRatio || 1, 2);
    this.ratio = Math.min(wanted, Math.sqrt(maxPixels / Math.max(1, box.width * box.height)));
    this.width = box.width;
    this.height = box.height;
    for (const canvas of [this.overlay, this.changes]) {
      canvas.width = Math.round(box.width * this.ratio);
      canvas.height = Math.round(box.height * this.ratio);
    }
    this.raster.resize(this.overlay.width, this.overlay.height);
    this.layout = nodePositions(this.replay.structure, this.replay.about.grouped, box.width, box.height);
    const edges = this.replay.now.count || 1;
    this.few = edges < FEW_EDGES;
    this.lineWidth = this.ratio * Math.max(1, Math.min(3.5, 90 / Math.sqrt(edges)));
    this.redraw();
  }

  // Marks the picture as outdated although the record is the same.
  invalidate() {
    this.version = (this.version ?? 0) + 1;
    this.rasterChanged = true;
  }

  // Updates the canvases whose content changed. Returns whether another frame is needed.
  paint() {
    if (this.rasterChanged) this.raster.show();
    const current = `${this.replay.at} ${this.version}`;
    if (this.changesDrawn !== current && !this.rasterChanged) {
      // not in the same frame as the edges, to keep frames short
      this.changesDrawn = current;
      this.drawChanges();
    }
    this.changes.style.opacity = this.changesDrawn === current ? 1 - 0.7 * this.fade : 0;
    const overlay = `${current} ${this.selected?.node}`;
    if (this.overlayDrawn !== overlay) {
      this.overlayDrawn = overlay;
      this.drawOverlay();
    }
    const again = this.rasterChanged || this.changesDrawn !== current;
    this.rasterChanged = false;
    return again;
  }

  drawOverlay() {
    const { context, overlay } = this;
    context.clearRect(0, 0, overlay.width, overlay.height);
    if (this.matrix) {
      this.drawMatrixLabels();
      return;
    }
    this.drawGroupLabels();
    if (this.selected) this.drawSelection();
    this.drawNodes();
  }
}
