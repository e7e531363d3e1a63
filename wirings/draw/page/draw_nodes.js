// Draws the nodes, and finds out which of them are in use.

Object.assign(View.prototype, {
  // Finds the nodes on a path from an input to an output; if paths are unknown, the nodes with an edge.
  findUsedNodes(state) {
    const { structure } = this.replay,
      { sources, targets, count } = state;
    this.used = new Uint8Array(structure.nodes);
    this.selfLoops = [];
    for (let i = 0; i < count; i++) if (sources[i] === targets[i]) this.selfLoops.push(sources[i]);
    if (!structure.sure) {
      for (let i = 0; i < count; i++) this.used[sources[i]] = this.used[targets[i]] = 1;
      return;
    }
    const fed = new Uint8Array(structure.nodes), // reached from an input
      leads = new Uint8Array(structure.nodes); // leads to an output
    for (const v of structure.inputs) fed[v] = 1;
    for (const v of structure.outputs) leads[v] = 1;
    for (let more = true; more;) {
      more = false;
      for (let i = 0; i < count; i++) {
        if (fed[sources[i]] && !fed[targets[i]]) more = Boolean((fed[targets[i]] = 1));
      }
    }
    for (let more = true; more;) {
      more = false;
      for (let i = count - 1; i >= 0; i--) {
        if (leads[targets[i]] && !leads[sources[i]]) more = Boolean((leads[sources[i]] = 1));
      }
    }
    for (let v = 0; v < structure.nodes; v++) this.used[v] = fed[v] & leads[v];
  },

  nodeRadius() {
    const count = this.replay.structure.nodes;
    return this.ratio * Math.max(1.2, Math.min(7, 60 / Math.sqrt(count))) * Math.min(2.5, Math.sqrt(this.zoom.scale));
  },

  drawNodes() {
    const { context, px, py, used } = this,
      radius = this.nodeRadius(),
      count = this.replay.structure.nodes;
    for (const inUse of [0, 1]) {
      context.fillStyle = inUse ? this.colour.node : this.colour.unused;
      context.beginPath();
      for (let v = 0; v < count; v++) {
        if (used[v] !== inUse) continue;
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
    for (const v of this.selfLoops ?? []) {
      context.beginPath();
      context.arc(px[v] + 1.6 * radius, py[v], 1.3 * radius, 0, 2 * Math.PI);
      context.stroke();
    }
    if (this.selected) {
      const { node } = this.selected;
      context.lineWidth = 2.5 * this.ratio;
      context.strokeStyle = this.colour.text;
      context.beginPath();
      context.arc(px[node], py[node], radius + 4 * this.ratio, 0, 2 * Math.PI);
      context.stroke();
    }
  },
});
