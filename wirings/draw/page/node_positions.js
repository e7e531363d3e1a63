// Positions of nodes and of group labels: x and y from 0 to 1, which the view scales to the canvas.

function nodePositions(structure, grouped, width, height) {
  const x = new Float32Array(structure.nodes),
    y = new Float32Array(structure.nodes),
    labels = [];
  if (structure.layout === "circle") {
    const count = structure.nodes,
      [wide, high] = width > height ? [height / width, 1] : [1, width / height];
    const onCircle = (share, radius) => {
      // clockwise from the left
      const angle = Math.PI + 2 * Math.PI * share;
      return [0.5 + radius * wide * Math.cos(angle), 0.5 + radius * high * Math.sin(angle)];
    };
    for (let v = 0; v < count; v++) [x[v], y[v]] = onCircle((v + 0.5) / count, 0.44);
    for (const [name, start, stop] of structure.groups) {
      const [atX, atY] = onCircle((start + stop) / 2 / count, 0.47);
      labels.push({
        name: grouped ? name : `${name} · ${stop - start}`,
        x: atX,
        y: atY,
        align: atX < 0.5 ? "right" : "left",
      });
    }
    return { x, y, labels };
  }
  const columns = structure.groups.length,
    gap = columns > 1 ? 0.92 / (columns - 1) : 0;
  const rows = Math.max(24, Math.floor(height / 4)); // at most one node every 4 pixels; longer columns become wider
  structure.groups.forEach(([name, start, stop], i) => {
    const count = stop - start,
      wide = Math.min(8, Math.ceil(count / rows)),
      middle = columns > 1 ? 0.04 + i * gap : 0.5;
    for (let k = 0; k < count; k++) {
      x[start + k] = middle + (wide > 1 ? ((k % wide) / (wide - 1) - 0.5) * Math.min(0.3 * gap, 0.006 * wide) : 0);
      y[start + k] = count > 1 ? 0.08 + (0.89 * k) / (count - 1) : 0.5;
    }
    labels.push({ name, count: grouped ? 0 : count, x: middle, y: 0.035, align: null });
  });
  return { x, y, labels };
}
