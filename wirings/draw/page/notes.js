// Values that belong to steps of training, such as the loss.

class Notes {
  constructor() {
    this.notes = []; // [step, values] pairs
  }

  // The names of the values to draw over training: accuracy and loss first, then others.
  curves() {
    const names = new Set(this.notes.flatMap(([, values]) => Object.keys(values)));
    names.delete("test_loss");
    return ["accuracy", "loss", ...names].filter((name, i, all) => names.has(name) && all.indexOf(name) === i);
  }

  // A noted value over training, as [step, value] pairs.
  series(name) {
    return this.notes.filter(([, values]) => name in values).map(([step, values]) => [step, values[name]]);
  }
}
