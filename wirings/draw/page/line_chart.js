// Line charts with labelled axes.

// About `count` round numbers from 0 to most.
function roundTicks(most, count) {
  const rough = Math.max(most, 1e-9) / count,
    size = 10 ** Math.floor(Math.log10(rough)),
    step = [1, 2, 5, 10].find((times) => times * size >= rough) * size;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, i) => i * step);
}

const formatTick = (value) => (value >= 1000 ? formatCount(Math.round(value)) : String(Number(value.toPrecision(3))));

function drawLine(context, steps, values, x, y, width) {
  context.lineWidth = width;
  context.beginPath();
  values.forEach((value, i) => context[i ? "lineTo" : "moveTo"](x(steps[i]), y(value)));
  context.stroke();
}

// Draws lines over steps. The box is the whole chart with its labels. Returns where the lines are.
function drawChart(context, colour, box, { steps, lines, most, title, yLabel, xLabel, yNumbers = true }) {
  const left = box.x + (yNumbers ? 34 : 8),
    right = box.x + box.width - 8,
    top = box.y + 20,
    low = box.y + box.height - (xLabel ? 30 : 16);
  const first = steps[0],
    last = Math.max(steps[steps.length - 1], first + 1);
  const x = (step) => left + ((step - first) / (last - first)) * (right - left),
    y = (value) => low - (value / most) * (low - top);
  context.font = "11px system-ui, sans-serif";
  context.textBaseline = "middle";
  context.fillStyle = colour.text;
  context.textAlign = "left";
  context.fillText(title, left, box.y + 8);
  if (yLabel) {
    const begins = left + context.measureText(title).width + 8;
    context.fillStyle = colour.soft;
    context.fillText(yLabel, begins, box.y + 8);
  }
  context.strokeStyle = colour.line;
  context.lineWidth = 1;
  context.textAlign = "right";
  context.fillStyle = colour.soft;
  for (const tick of roundTicks(most, clamp((low - top) / 45, 2, 5))) {
    context.beginPath();
    context.moveTo(left, y(tick));
    context.lineTo(right, y(tick));
    context.stroke();
    if (yNumbers) context.fillText(formatTick(tick), left - 5, y(tick));
  }
  context.textAlign = "left";
  context.fillText(formatCount(first), left, low + 9);
  context.textAlign = "right";
  context.fillText(formatCount(last), right, low + 9);
  context.textAlign = "center";
  if (xLabel) context.fillText(xLabel, (left + right) / 2, low + 22);
  for (const { values, paint, width = 1.3 } of lines) {
    context.strokeStyle = context.fillStyle = paint;
    drawLine(context, steps, values, x, y, width);
    if (steps.length === 1) context.fillRect(x(steps[0]) - 2, y(values[0]) - 2, 4, 4);
  }
  return { x, y, top, low, left, right };
}

// Sizes a canvas to the pixels of the screen. Returns its context, scaled, and its box, or null while it is hidden.
function fitCanvas(canvas) {
  const box = canvas.getBoundingClientRect(),
    ratio = Math.min(window.devicePixelRatio || 1, 2);
  if (!box.width || !box.height) return null;
  Object.assign(canvas, { width: Math.round(box.width * ratio), height: Math.round(box.height * ratio) });
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return { context, width: box.width, height: box.height };
}
