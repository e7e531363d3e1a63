// The film: reads what the page carries, and gives the wiring at any record. The format of records is that of
// wirings/history/file_format.py.

const CODE_ONE = 97,
  CODE_STEPS = 6;
const strengthOf = (code) => (code === 0 ? 0 : Math.sign(code) * 2 ** ((Math.abs(code) - CODE_ONE) / CODE_STEPS));

async function inflate(text) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("This browser is too old for this page: it cannot decompress. Take one of 2023 or later.");
  }
  const packed = atob(text.trim()),
    bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

class Film {
  constructor(bytes) {
    const view = new DataView(bytes.buffer),
      words = new TextDecoder();
    this.notes = [];
    this.records = [];
    for (let at = 0; at < bytes.length;) {
      const kind = words.decode(bytes.subarray(at, at + 4)),
        length = view.getUint32(at + 4, true);
      const content = bytes.subarray(at + 8, at + 8 + length);
      if (kind === "HEAD")
        Object.assign(this, JSON.parse(words.decode(content))); // structure, about, bounds;
      else if (kind === "NOTE") this.notes.push(JSON.parse(words.decode(content)));
      else this.records.push(this._record(view, at + 8, bytes));
      at += 8 + length;
    }
    const { nodes, groups, layers, tiles } = this.structure;
    this.edges = layers[layers.length - 1][2];
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
    this.every = Math.max(8, Math.ceil(this.length / 40)); // records from one kept state to the next
    this.kept = [];
    this.now = this._empty();
    this.at = -1;
    this.births = new Uint32Array(this.length);
    for (let i = 0; i < this.length; i++) this.births[i] = this._count(this.records[i]);
  }

  _record(view, at, bytes) {
    const step = view.getUint32(at, true),
      was = view.getUint32(at + 4, true),
      born = view.getUint32(at + 8, true);
    const start = at + 12,
      low = start + was + born;
    const places = new Uint32Array(born);
    for (let i = 0, place = 0; i < born; i++) {
      place +=
        bytes[low + i] |
        (bytes[low + born + i] << 8) |
        (bytes[low + 2 * born + i] << 16) |
        (bytes[low + 3 * born + i] << 24);
      places[i] = place;
    }
    const signed = new Int8Array(bytes.buffer, start + was, born);
    return { step, delta: bytes.subarray(start, start + was), places, codes: signed };
  }

  _count(record) {
    let count = record.places.length;
    while (count && record.places[count - 1] >= this.edges) count--;
    return count;
  }

  _empty() {
    return {
      all: 0,
      count: 0,
      places: new Uint32Array(0),
      codes: new Int8Array(0),
      born: new Uint16Array(0),
      to: new Uint32Array(0),
      of: new Uint32Array(0),
    };
  }

  // The node that an edge leads to and the one it comes from, from its place.
  ends(place) {
    let low = 0,
      high = this.tiles.length - 1;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (this.tiles[middle].start <= place) low = middle;
      else high = middle - 1;
    }
    const tile = this.tiles[low],
      within = place - tile.start;
    if (tile.pairs) return [tile.pairs[0][within], tile.pairs[1][within]];
    const pair = Math.floor(within / tile.inner),
      row = Math.floor(pair / tile.cols),
      col = pair - row * tile.cols;
    return tile.flip ? [tile.targets + col, tile.sources + row] : [tile.targets + row, tile.sources + col];
  }

  // One record further: a new state, edges in the order of their places.
  _next(state, index) {
    const { delta, places: fresh, codes: freshCodes } = this.records[index];
    const most = state.all + fresh.length,
      out = {
        places: new Uint32Array(most),
        codes: new Int8Array(most),
        born: new Uint16Array(most),
        to: new Uint32Array(most),
        of: new Uint32Array(most),
      };
    let n = 0,
      j = 0,
      gone = 0;
    const died = [];
    const take = () => {
      out.places[n] = fresh[j];
      out.codes[n] = freshCodes[j];
      out.born[n] = index;
      if (fresh[j] < this.edges) [out.to[n], out.of[n]] = this.ends(fresh[j]);
      n++;
      j++;
    };
    for (let i = 0; i < state.all; i++) {
      const place = state.places[i];
      while (j < fresh.length && fresh[j] < place) take();
      const code = ((state.codes[i] + delta[i]) << 24) >> 24;
      if (code === 0) {
        if (place < this.edges) died[gone++] = i;
        continue;
      }
      out.places[n] = place;
      out.codes[n] = code;
      out.born[n] = state.born[i];
      out.to[n] = state.to[i];
      out.of[n] = state.of[i];
      n++;
    }
    while (j < fresh.length) take();
    let count = n;
    while (count && out.places[count - 1] >= this.edges) count--;
    const dead = Uint32Array.from(died);
    return {
      ...out,
      all: n,
      count,
      died: {
        to: dead.map((i) => state.to[i]),
        of: dead.map((i) => state.of[i]),
        codes: Int8Array.from(dead, (i) => state.codes[i]),
      },
    };
  }

  // The state at a record; a few are kept, so that it is never far from one of them.
  seek(index) {
    if (index === this.at) return this.now;
    const nearest = Math.floor(index / this.every);
    if (index < this.at || nearest * this.every > this.at + this.every) {
      let from = Math.min(nearest, this.kept.length - 1);
      while (from >= 0 && !this.kept[from]) from--;
      if (from >= 0) [this.now, this.at] = [this.kept[from], from * this.every];
      else [this.now, this.at] = [this._empty(), -1];
    }
    while (this.at < index) {
      this.at++;
      this.now = this._next(this.now, this.at);
      if (this.at % this.every === 0) this.kept[this.at / this.every] = this.now;
    }
    return this.now;
  }

  kernel(node, state) {
    const found = this.kernels.get(node);
    if (!found) return null;
    let low = state.count,
      high = state.all;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (state.places[middle] < found.start) low = middle + 1;
      else high = middle;
    }
    return { shape: found.shape, values: Array.from(state.codes.subarray(low, low + found.size), strengthOf) };
  }

  series(name) {
    return this.notes.filter(([, values]) => name in values).map(([step, values]) => [step, values[name]]);
  }
}
