// The buttons, the slider and the keys that move through the records.

// keyOf returns what else a key does, or undefined; it goes first.
function setUpPlayer({ replay, seek, play, toggleTheme, isPlaying, at }, keyOf) {
  get("play").addEventListener("click", () => play(!isPlaying()));
  get("back").addEventListener("click", () => seek(at() - 1));
  get("forward").addEventListener("click", () => seek(at() + 1));
  get("slider").addEventListener("input", () => seek(Number(get("slider").value)));
  get("theme").addEventListener("click", toggleTheme);

  const keys = {
    " ": () => play(!isPlaying()),
    ArrowLeft: () => seek(at() - 1),
    ArrowRight: () => seek(at() + 1),
    Home: () => seek(0),
    End: () => seek(replay.length - 1),
    d: toggleTheme,
  };
  document.addEventListener("keydown", (event) => {
    const typing = ["INPUT", "SELECT"].includes(event.target.tagName);
    if (event.ctrlKey || event.metaKey || event.altKey || (typing && event.key !== "Escape")) return;
    if (event.target.tagName === "BUTTON" && event.key === " ") return; // it presses the button
    const act = keyOf(event) ?? keys[event.key];
    if (!act) return;
    act();
    event.preventDefault();
  });
}
