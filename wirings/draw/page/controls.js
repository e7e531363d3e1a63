// Buttons, keys, mouse and touch.

function controls({ view, film, seek, play, pick, moved, zoomTo, otherTheme, isPlaying, at }) {
  get("play").addEventListener("click", () => play(!isPlaying()));
  get("back").addEventListener("click", () => seek(at() - 1));
  get("forth").addEventListener("click", () => seek(at() + 1));
  get("slider").addEventListener("input", () => seek(Number(get("slider").value)));
  get("theme").addEventListener("click", otherTheme);
  for (const button of document.querySelectorAll("[data-zoom]"))
    button.addEventListener("click", () => zoomTo(button.dataset.zoom));

  const keys = {
    " ": () => play(!isPlaying()),
    ArrowLeft: () => seek(at() - 1),
    ArrowRight: () => seek(at() + 1),
    Home: () => seek(0),
    End: () => seek(film.length - 1),
    "+": () => zoomTo("in"),
    "=": () => zoomTo("in"),
    "-": () => zoomTo("out"),
    0: () => zoomTo("all"),
    m: () => zoomTo("view"),
    d: otherTheme,
    "/": () => get("search").focus(),
    Escape: () => pick(-1),
  };
  document.addEventListener("keydown", (event) => {
    const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
    if (event.target.tagName === "BUTTON" && event.key === " ") return; // a button is pressed by it
    if (event.shiftKey && event.key.startsWith("Arrow")) {
      const way = { ArrowLeft: [40, 0], ArrowRight: [-40, 0], ArrowUp: [0, 40], ArrowDown: [0, -40] }[event.key];
      view.moveBy(...way);
      moved();
    } else if (event.key in keys) keys[event.key]();
    else return;
    event.preventDefault();
  });

  const { over } = view,
    fingers = new Map();
  let begun = null;
  over.addEventListener(
    "wheel",
    (event) => {
      event.preventDefault();
      view.zoomBy(Math.exp(-event.deltaY * 0.0015), event.clientX, event.clientY);
      moved();
    },
    { passive: false },
  );
  over.addEventListener("pointerdown", (event) => {
    over.setPointerCapture(event.pointerId);
    fingers.set(event.pointerId, [event.clientX, event.clientY]);
    begun = fingers.size === 1 ? [event.clientX, event.clientY] : null;
  });
  over.addEventListener("pointermove", (event) => {
    const before = fingers.get(event.pointerId);
    if (!before) return;
    const now = [event.clientX, event.clientY];
    if (begun && Math.hypot(now[0] - begun[0], now[1] - begun[1]) < 5) return; // not yet a drag
    begun = null;
    if (fingers.size === 2) {
      const [, other] = [...fingers].find(([id]) => id !== event.pointerId);
      const far = (point) => Math.max(1, Math.hypot(point[0] - other[0], point[1] - other[1]));
      view.zoomBy(far(now) / far(before), (now[0] + other[0]) / 2, (now[1] + other[1]) / 2);
      view.moveBy((now[0] - before[0]) / 2, (now[1] - before[1]) / 2);
    } else if (fingers.size === 1) view.moveBy(now[0] - before[0], now[1] - before[1]);
    fingers.set(event.pointerId, now);
    moved();
  });
  const lifted = (event) => {
    if (begun && event.type === "pointerup")
      pick(view.nodeAt(event.clientX, event.clientY, event.pointerType === "mouse" ? 12 : 24));
    fingers.delete(event.pointerId);
    begun = null;
  };
  over.addEventListener("pointerup", lifted);
  over.addEventListener("pointercancel", lifted);
}
