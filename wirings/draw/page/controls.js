// Keys, mouse and touch that select, move and zoom.

function setUpControls({ view, replay, seek, play, select, redrawSoon, zoomTo, toggleTheme, isPlaying, at }) {
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoomTo(button.dataset.zoom));

  setUpPlayer({ replay, seek, play, toggleTheme, isPlaying, at }, (event) => {
    const move = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] }[event.key];
    const keys = {
      "+": () => zoomTo("in"),
      "=": () => zoomTo("in"),
      "-": () => zoomTo("out"),
      0: () => zoomTo("all"),
      m: () => zoomTo("view"),
      "/": () => get("search").focus(),
      Escape: () => select(-1),
    };
    if (!event.shiftKey || !move) return keys[event.key];
    return () => {
      view.moveBy(...move);
      redrawSoon();
    };
  });

  const { overlay } = view,
    pointers = new Map(); // positions of the mouse or of fingers that are down
  let start = null; // where a click or tap began, until it turns into a drag
  overlay.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      view.zoomBy(Math.exp(-event.deltaY * 0.0015), event.clientX, event.clientY);
      redrawSoon();
    },
    { passive: false },
  );
  overlay.addEventListener("pointerdown", (event) => {
    overlay.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, [event.clientX, event.clientY]);
    start = pointers.size === 1 ? [event.clientX, event.clientY] : null;
  });
  overlay.addEventListener("pointermove", (event) => {
    const before = pointers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY];
    if (start && Math.hypot(now[0] - start[0], now[1] - start[1]) < 5) return; // not yet a drag
    start = null;
    if (pointers.size === 2) {
      const [, other] = [...pointers].find(([id]) => id !== event.pointerId);
      const distance = (point) => Math.max(1, Math.hypot(point[0] - other[0], point[1] - other[1]));
      view.zoomBy(distance(now) / distance(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
      view.moveBy((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
    } else if (pointers.size === 1) view.moveBy(now[0] - before[0], now[1] - before[1]);
    pointers.set(event.pointerId, now);
    redrawSoon();
  });
  const release = (event) => {
    if (start && event.type === "pointerup")
      select(view.nodeAt(event.clientX, event.clientY, event.pointerType === "mouse" ? 12 : 24));
    pointers.delete(event.pointerId);
    start = null;
  };
  overlay.addEventListener("pointerup", release);
  overlay.addEventListener("pointercancel", release);
}
