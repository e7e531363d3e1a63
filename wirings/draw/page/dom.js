// Small helpers: elements of the page, numbers as text, numbers within bounds.

const get = (id) => document.getElementById(id);

// Text is set as text, never as markup.
function element(tag, text = "", ...children) {
  const made = document.createElement(tag);
  if (text !== "") made.textContent = text;
  made.append(...children);
  return made;
}

const formatNumber = (value) =>
  (value === 0 ? "0" : Math.abs(value) >= 100 ? value.toFixed(0) : value.toPrecision(2)).replace("-", "−");
const formatCount = (value) => value.toLocaleString("en");
const clamp = (value, low, high) => Math.max(low, Math.min(high, value));
