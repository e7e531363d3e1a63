// Rasterizes tens of thousands of edges on a 2D canvas, without a graphics card. Each pixel stores how much ink of
// positive and of negative edges is on it, as integers. A line can therefore be removed exactly, and from one record to
// the next only the changes are drawn. The colour of a pixel is looked up in a table by the two amounts.

const FULL = 16; // the ink of a line of strength 1 on a pixel that it covers completely
const LEVEL_INK = [0, 1, 2, 4, 8]; // ink by level of strength

class EdgeRaster {
  constructor(canvas) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d", { alpha: false, willReadFrequently: true });
    this.table = new Uint32Array(1 << 16);
    this.exposure = 1;
    this.resize(1, 1);
  }

  resize(width, height) {
    this.width = this.canvas.width = Math.max(1, width);
    this.height = this.canvas.height = Math.max(1, height);
    const size = this.width * this.height;
    this.amounts = [new Int32Array(size), new Int32Array(size)]; // positive, negative
    this.image = this.context.createImageData(this.width, this.height);
    this.pixels = new Uint32Array(this.image.data.buffer);
  }

  clear() {
    this.amounts[0].fill(0);
    this.amounts[1].fill(0);
  }

  // Sets the colours, given as [r, g, b]. Ink of both signs on one pixel mixes by the amounts.
  setColours(background, positive, negative) {
    for (let p = 0; p < 256; p++) {
      for (let n = 0; n < 256; n++) {
        const cover = 1 - Math.exp(-(p + n) / 48),
          share = p + n ? p / (p + n) : 0;
        let colour = 255 << 24;
        for (let i = 0; i < 3; i++) {
          colour |=
            Math.round(background[i] + cover * (share * positive[i] + (1 - share) * negative[i] - background[i])) << (8 * i);
        }
        this.table[(p << 8) | n] = colour;
      }
    }
  }

  // Adapts the exposure: a few lines are drawn in full colour, and many lines show where they are dense.
  adaptExposure() {
    let total = 0,
      covered = 0;
    const [plus, minus] = this.amounts,
      count = plus.length;
    for (let i = 0; i < count; i += 3) {
      const amount = plus[i] + minus[i];
      if (amount) {
        total += amount;
        covered++;
      }
    }
    const mean = covered ? total / covered : 1;
    this.exposure = Math.min(64 / mean, 255 / (FULL * LEVEL_INK[2]));
  }

  show() {
    const { pixels, table } = this,
      [plus, minus] = this.amounts,
      count = pixels.length;
    const gain = Math.max(1, Math.round(this.exposure * 1024));
    for (let i = 0; i < count; i++) {
      const a = plus[i],
        b = minus[i];
      if ((a | b) === 0) {
        pixels[i] = table[0];
        continue;
      }
      let p = (a * gain) >> 10,
        n = (b * gain) >> 10;
      if (p > 255) p = 255;
      if (n > 255) n = 255;
      pixels[i] = table[(p << 8) | n];
    }
    this.context.putImageData(this.image, 0, 0);
  }

  // Adds a line, clipped to the canvas; a negative amount removes it. Called often, so it allocates no objects.
  line(x0, y0, x1, y1, width, sign, amount) {
    const dx = x1 - x0,
      dy = y1 - y0,
      right = this.width - 1.05,
      bottom = this.height - 1.05;
    let from = 0,
      to = 1;
    if (dx === 0 ? x0 < 0.05 || x0 > right : false) return;
    if (dy === 0 ? y0 < 0.05 || y0 > bottom : false) return;
    if (dx !== 0) {
      const a = (0.05 - x0) / dx,
        b = (right - x0) / dx;
      from = Math.max(from, Math.min(a, b));
      to = Math.min(to, Math.max(a, b));
    }
    if (dy !== 0) {
      const a = (0.05 - y0) / dy,
        b = (bottom - y0) / dy;
      from = Math.max(from, Math.min(a, b));
      to = Math.min(to, Math.max(a, b));
    }
    if (from >= to) return;
    const flat = Math.abs(dx) >= Math.abs(dy),
      target = this.amounts[sign > 0 ? 0 : 1];
    if (flat ? dx < 0 : dy < 0) [from, to] = [to, from];
    const ax = x0 + from * dx,
      ay = y0 + from * dy,
      bx = x0 + to * dx,
      by = y0 + to * dy;
    if (width <= 1.01) addThinLine(target, this.width, ax, ay, bx, by, flat, amount);
    else this.thickLine(target, ax, ay, bx, by, flat, width, amount);
  }

  thickLine(target, x0, y0, x1, y1, flat, width, amount) {
    const stride = this.width,
      [a0, b0, a1, b1] = flat ? [x0, y0, x1, y1] : [y0, x0, y1, x1];
    const slope = a1 > a0 ? (b1 - b0) / (a1 - a0) : 0,
      half = (width / 2) * Math.hypot(1, slope);
    const last = flat ? this.height - 1 : this.width - 1;
    for (let a = Math.ceil(a0); a <= a1; a++) {
      const middle = b0 + (a - a0) * slope + 0.5,
        top = middle - half,
        low = middle + half;
      for (let b = Math.max(0, Math.floor(top)); b <= Math.min(last, Math.floor(low)); b++) {
        const cover = Math.round(FULL * (Math.min(low, b + 1) - Math.max(top, b)));
        target[flat ? b * stride + a : a * stride + b] += cover * amount;
      }
    }
  }

  rectangle(x, y, width, height, sign, amount) {
    const target = this.amounts[sign > 0 ? 0 : 1];
    const left = Math.max(0, Math.floor(x)),
      right = Math.min(this.width, Math.max(Math.floor(x) + 1, Math.floor(x + width)));
    const top = Math.max(0, Math.floor(y)),
      low = Math.min(this.height, Math.max(Math.floor(y) + 1, Math.floor(y + height)));
    for (let row = top; row < low; row++) {
      for (let i = row * this.width + left; i < row * this.width + right; i++) target[i] += FULL * amount;
    }
  }
}

// Adds a line one pixel wide, shared between two pixels at every step. Most of a frame's time is spent here, hence the
// integer arithmetic and a function of its own.
function addThinLine(target, stride, x0, y0, x1, y1, flat, amount) {
  const first = flat ? x0 : y0,
    last = flat ? x1 : y1,
    across = flat ? y0 : x0;
  const slope = last > first ? ((flat ? y1 : x1) - across) / (last - first) : 0;
  const start = Math.ceil(first) | 0,
    end = Math.floor(last) | 0,
    full = (amount * FULL) | 0;
  const turn = Math.round(slope * 65536) | 0;
  let b = Math.round((across + (start - first) * slope) * 65536) | 0;
  if (flat) {
    for (let a = start; a <= end; a = (a + 1) | 0) {
      const i = (Math.imul(b >> 16, stride) + a) | 0,
        part = Math.imul(amount, (b >> 12) & 15);
      target[i] += full - part;
      target[i + stride] += part;
      b = (b + turn) | 0;
    }
  } else {
    for (let a = start; a <= end; a = (a + 1) | 0) {
      const i = (Math.imul(a, stride) + (b >> 16)) | 0,
        part = Math.imul(amount, (b >> 12) & 15);
      target[i] += full - part;
      target[i + 1] += part;
      b = (b + turn) | 0;
    }
  }
}
