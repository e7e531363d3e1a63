// Filters of edges by source, target, sign, strength and age. Returns the function that applies them.

function setUpFilters({ view, replay, showStatus, requestFrame }) {
  const { groups } = replay.structure,
    defaults = { from: -1, to: -1, sign: 0, strength: 0, youngest: 0, oldest: 1000 };
  const longest = Math.max(1, replay.steps[replay.length - 1] - replay.steps[0]);
  const ageOf = (value) => Math.round((value / 1000) ** 2 * longest); // a finer scale for young edges
  for (const id of ["from", "to"]) {
    get(id).append(new Option("all", -1), ...groups.map(([name], i) => new Option(name, i)));
  }

  function apply() {
    const number = (id) => Number(get(id).value),
      strength = number("strength");
    const youngest = ageOf(number("youngest")),
      oldest = number("oldest") === 1000 ? Infinity : ageOf(number("oldest"));
    view.filter = { from: number("from"), to: number("to"), sign: number("sign"), strength, youngest, oldest };
    get("strength-value").textContent = strength ? formatNumber(weightOf(strength)) : "any";
    get("youngest-value").textContent = youngest ? formatCount(youngest) : "any";
    get("oldest-value").textContent = oldest < Infinity ? formatCount(oldest) : "any";
    view.showState(replay.now);
    view.invalidate();
    showStatus(replay.at);
    requestFrame();
  }

  get("filters").addEventListener("input", apply);
  get("clear").addEventListener("click", () => {
    for (const [id, value] of Object.entries(defaults)) get(id).value = value;
    apply();
  });
  return apply;
}
