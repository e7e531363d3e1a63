// The timeline: accuracy, loss, other noted values and swapped edges over training, and the current record.

class Timeline {
  constructor(replay, canvas, seek) {
    Object.assign(this, { replay, canvas, context: canvas.getContext("2d") });
    const swaps = replay.steps.map((step, i) => [step, replay.births[i]]).slice(1);
    this.rows = replay.curves().map((name) => ({
      name,
      unit: name === "accuracy" ? " %" : "",
      points: replay.series(name),
    }));
    if (swaps.length) this.rows.push({ name: "swapped edges", unit: "", points: swaps, bars: true });
    this.first = replay.steps[0];
    this.last = Math.max(replay.steps[replay.length - 1], this.first + 1);
    const drag = (event) => {
      const box = canvas.getBoundingClientRect(),
        share = (event.clientX - box.left - this.left) / (box.width - this.left - 8);
      seek(this.nearest(this.first + share * (this.last - this.first)));
    };
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      drag(event);
    });
    canvas.addEventListener("pointermove", (event) => event.buttons && drag(event));
  }

  // The record nearest to a step.
  nearest(step) {
    let best = 0;
    this.replay.steps.forEach((at, i) => {
      if (Math.abs(at - step) < Math.abs(this.replay.steps[best] - step)) best = i;
    });
    return best;
  }

  draw(colour, position) {
    const box = this.canvas.getBoundingClientRect(),
      ratio = Math.min(window.devicePixelRatio || 1, 2),
      { context } = this;
    const wide = Math.round(box.width * ratio),
      high = Math.round(box.height * ratio);
    if (!wide || !high) return; // hidden, since there is nothing to play
    if (this.canvas.width !== wide || this.canvas.height !== high || this.painted !== colour)
      this.paint(colour, wide, high, ratio, box);
    context.clearRect(0, 0, wide, high);
    context.drawImage(this.picture, 0, 0);
    const low = Math.floor(position),
      next = Math.min(low + 1, this.replay.length - 1),
      { steps } = this.replay;
    const x = ratio * this.x(steps[low] + (position - low) * (steps[next] - steps[low]), box.width);
    context.strokeStyle = colour.text;
    context.lineWidth = 1.5 * ratio;
    context.beginPath();
    context.moveTo(x, 0);
    context.lineTo(x, high - 14 * ratio);
    context.stroke();
  }

  // The horizontal position of a step.
  x(step, width) {
    return this.left + ((step - this.first) / (this.last - this.first)) * (width - this.left - 8);
  }

  // The curves do not change while the history plays, so they are painted once.
  paint(colour, wide, high, ratio, box) {
    Object.assign(this.canvas, { width: wide, height: high });
    this.picture = Object.assign(document.createElement("canvas"), { width: wide, height: high });
    this.painted = colour;
    this.left = box.width < 500 ? 86 : 140;
    const context = this.picture.getContext("2d"),
      each = (box.height - 16) / Math.max(1, this.rows.length);
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    context.textBaseline = "middle";
    const paints = { accuracy: colour.positive, "swapped edges": colour.soft };
    this.rows.forEach((row, i) => {
      const top = i * each + 4,
        low = (i + 1) * each - 4,
        values = row.points.map(([, value]) => value);
      const least = row.bars ? 0 : Math.min(...values),
        most = Math.max(...values, least);
      const y = (value) => low - ((value - least) / (most - least || 1)) * (low - top);
      context.strokeStyle = colour.line;
      context.beginPath();
      context.moveTo(this.left, low + 1);
      context.lineTo(box.width - 8, low + 1);
      context.stroke();
      context.fillStyle = colour.text;
      context.textAlign = "left";
      context.fillText(row.name, 0, (top + low) / 2);
      context.fillStyle = colour.soft;
      context.textAlign = "right";
      const label = (value) => (row.bars ? formatCount(value) : Number(value.toPrecision(3)).toString()) + row.unit;
      if (box.width >= 500) {
        if (most > least) context.fillText(label(most), this.left - 6, top + 3);
        context.fillText(label(least), this.left - 6, low - 3);
      }
      context.strokeStyle = context.fillStyle = paints[row.name] ?? colour.negative;
      context.lineWidth = 1.5;
      if (row.bars) {
        const width = Math.max(1, Math.min(24, (box.width - this.left - 8) / this.replay.length - 0.5));
        for (const [step, value] of row.points)
          context.fillRect(this.x(step, box.width) - width / 2, y(value), width, low - y(value));
        return;
      }
      context.beginPath();
      row.points.forEach(([step, value], k) => context[k ? "lineTo" : "moveTo"](this.x(step, box.width), y(value)));
      context.stroke();
      if (row.points.length < 3)
        for (const [step, value] of row.points) context.fillRect(this.x(step, box.width) - 2, y(value) - 2, 4, 4);
    });
    context.fillStyle = colour.soft;
    context.textAlign = "left";
    context.fillText(formatCount(this.first), this.left, box.height - 6);
    context.textAlign = "center";
    context.fillText("optimizer step", (this.left + box.width - 8) / 2, box.height - 6);
    context.textAlign = "right";
    context.fillText(formatCount(this.last), box.width - 8, box.height - 6);
  }
}
