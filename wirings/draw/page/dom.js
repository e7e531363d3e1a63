// Small helpers: elements of the page, numbers as text, colours, and the page's data.

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

// The bytes of the page's data, which is compressed.
async function inflate(text) {
  if (typeof DecompressionStream === "undefined") {
    throw new Error("this browser cannot decompress data. Use a browser from 2023 or later.");
  }
  const packed = atob(text.trim()),
    bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

// Reads the colours of the current theme from the style sheet.
function readColours() {
  const style = getComputedStyle(document.documentElement),
    names = ["ground", "text", "soft", "line", "positive", "negative", "new", "dying", "node", "unused"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// A mixture of two colours of the theme, as [red, green, blue].
function mixColours(from, to, share) {
  const parts = (text) => [1, 3, 5].map((i) => parseInt(text.slice(i, i + 2), 16));
  const [one, other] = [parts(from), parts(to)];
  return one.map((part, i) => Math.round((1 - share) * part + share * other[i]));
}

// How bright a colour appears, from 0 to 1.
function luminance(rgb) {
  const [red, green, blue] = rgb.map((part) => (part / 255) ** 2.2);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function showNote(text) {
  get("note").textContent = text;
  get("note").hidden = false;
}

// Starts the page with its data. What start returns is window.wirings, for tests and benchmarks.
function startPage(start) {
  inflate(get("data").textContent)
    .then((bytes) => {
      window.wirings = start(bytes);
      // When the first drawing was on the screen, in ms since the navigation started.
      requestAnimationFrame(() => requestAnimationFrame((now) => (window.wirings.drawn = now)));
    })
    .catch((error) => {
      showNote(`This page cannot be displayed: ${error.message}`);
      console.error(error);
    });
}
