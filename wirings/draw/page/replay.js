// Reads the records of a history and reconstructs the wiring at any of them. The format of records is defined in
// wirings/history/file_format.py, the scale of codes in wirings/history/quantize.py.

const CODE_ONE = 97, // the code of weight 1
  CODE_STEPS = 6; // codes per octave
const weightOf = (code) => (code === 0 ? 0 : Math.sign(code) * 2 ** ((Math.abs(code) - CODE_ONE) / CODE_STEPS));

class Replay extends Notes {
  constructor(bytes) {
    super();
    const view = new DataView(bytes.buffer),
      decoder = new TextDecoder();
    this.records = [];
    for (let at = 0; at < bytes.length;) {
      const kind = decoder.decode(bytes.subarray(at, at + 4)),
        length = view.getUint32(at + 4, true);
      const content = bytes.subarray(at + 8, at + 8 + length);
      if (kind === "HEAD")
        Object.assign(this, JSON.parse(decoder.decode(content))); // structure, about and bounds
      else if (kind === "NOTE") this.notes.push(JSON.parse(decoder.decode(content)));
      else this.records.push(this._readRecord(view, at + 8, bytes));
      at += 8 + length;
    }
    const { nodes, groups, layers, tiles } = this.structure;
    this.edges = layers[layers.length - 1][2]; // possible edges; larger indices are entries of node kernels
    this.steps = this.records.map((record) => record.step);
    this.length = this.records.length;
    this.group = new Uint16Array(nodes);
    groups.forEach(([, start, stop], i) => this.group.fill(i, start, stop));
    this.tiles = tiles;
    this.kernels = new Map();
    for (const [list, start, shape] of this.structure.kernels) {
      const size = shape.reduce((a, b) => a * b, 1);
      list.forEach((node, i) => this.kernels.set(node, { start: start + i * size, shape, size }));
    }
    this.cacheEvery = Math.max(8, Math.ceil(this.length / 40)); // records between cached states
    this.cache = [];
    this.now = this._emptyState();
    this.at = -1;
    // Lines that stand for several edges hide what happens among these, so their number comes with the page.
    this.births = this.about.births ?? this.records.map((record) => this._countBirths(record));
  }

  _readRecord(view, at, bytes) {
    const step = view.getUint32(at, true),
      was = view.getUint32(at + 4, true),
      born = view.getUint32(at + 8, true);
    const start = at + 12,
      low = start + was + born;
    const indices = new Uint32Array(born);
    for (let i = 0, index = 0; i < born; i++) {
      index +=
        bytes[low + i] |
        (bytes[low + born + i] << 8) |
        (bytes[low + 2 * born + i] << 16) |
        (bytes[low + 3 * born + i] << 24);
      indices[i] = index;
    }
    const codes = new Int8Array(bytes.buffer, start + was, born);
    return { step, delta: bytes.subarray(start, start + was), indices, codes };
  }

  _countBirths(record) {
    let count = record.indices.length;
    while (count && record.indices[count - 1] >= this.edges) count--;
    return count;
  }

  _emptyState() {
    return {
      size: 0, // edges and kernel entries
      count: 0, // edges
      indices: new Uint32Array(0),
      codes: new Int8Array(0),
      born: new Uint16Array(0),
      targets: new Uint32Array(0),
      sources: new Uint32Array(0),
    };
  }

  // The target and the source node of an edge, given its flat index.
  endpoints(index) {
    let low = 0,
      high = this.tiles.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tiles[middle].start <= index) low = middle;
      else high = middle - 1;
    }
    const tile = this.tiles[low],
      within = index - tile.start;
    if (tile.pairs) return [tile.pairs[0][within], tile.pairs[1][within]];
    const pair = Math.floor(within / tile.inner),
      row = Math.floor(pair / tile.cols),
      col = pair - row * tile.cols;
    return tile.flip ? [tile.targets + col, tile.sources + row] : [tile.targets + row, tile.sources + col];
  }

  // The state after one more record, with edges in ascending order of their indices.
  _next(state, record) {
    const { delta, indices: newIndices, codes: newCodes } = this.records[record];
    const most = state.size + newIndices.length,
      out = {
        indices: new Uint32Array(most),
        codes: new Int8Array(most),
        born: new Uint16Array(most),
        targets: new Uint32Array(most),
        sources: new Uint32Array(most),
      };
    let n = 0,
      j = 0,
      gone = 0;
    const died = [];
    const takeNew = () => {
      out.indices[n] = newIndices[j];
      out.codes[n] = newCodes[j];
      out.born[n] = record;
      if (newIndices[j] < this.edges) [out.targets[n], out.sources[n]] = this.endpoints(newIndices[j]);
      n++;
      j++;
    };
    for (let i = 0; i < state.size; i++) {
      const index = state.indices[i];
      while (j < newIndices.length && newIndices[j] < index) takeNew();
      const code = ((state.codes[i] + delta[i]) << 24) >> 24;
      if (code === 0) {
        if (index < this.edges) died[gone++] = i;
        continue;
      }
      out.indices[n] = index;
      out.codes[n] = code;
      out.born[n] = state.born[i];
      out.targets[n] = state.targets[i];
      out.sources[n] = state.sources[i];
      n++;
    }
    while (j < newIndices.length) takeNew();
    let count = n;
    while (count && out.indices[count - 1] >= this.edges) count--;
    const dead = Uint32Array.from(died);
    return {
      ...out,
      size: n,
      count,
      died: {
        targets: dead.map((i) => state.targets[i]),
        sources: dead.map((i) => state.sources[i]),
        codes: Int8Array.from(dead, (i) => state.codes[i]),
      },
    };
  }

  // The state at a record. Some states are cached, so that only a few records must be replayed.
  seek(record) {
    if (record === this.at) return this.now;
    const nearest = Math.floor(record / this.cacheEvery);
    if (record < this.at || nearest * this.cacheEvery > this.at + this.cacheEvery) {
      let from = Math.min(nearest, this.cache.length - 1);
      while (from >= 0 && !this.cache[from]) from--;
      if (from >= 0) [this.now, this.at] = [this.cache[from], from * this.cacheEvery];
      else [this.now, this.at] = [this._emptyState(), -1];
    }
    while (this.at < record) {
      this.at++;
      this.now = this._next(this.now, this.at);
      if (this.at % this.cacheEvery === 0) this.cache[this.at / this.cacheEvery] = this.now;
    }
    return this.now;
  }

  // The convolution kernel of a node, or null.
  kernel(node, state) {
    const found = this.kernels.get(node);
    if (!found) return null;
    let low = state.count,
      high = state.size;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (state.indices[middle] < found.start) low = middle + 1;
      else high = middle;
    }
    return { shape: found.shape, values: Array.from(state.codes.subarray(low, low + found.size), weightOf) };
  }
}
