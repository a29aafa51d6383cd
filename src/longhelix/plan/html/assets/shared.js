// Functions of all pages: unpacking data, formatting numbers and words, and the style of plots.

async function unpacked(packed) {
  const bytes = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate")));
}

async function inflated(id) {
  return unpacked(document.getElementById(id).textContent);
}

function digits(number, most = 3) {
  return number.toLocaleString("en", { maximumSignificantDigits: number >= 100 ? Math.max(most, 4) : most });
}

function whole(number) {
  return Math.round(number).toLocaleString("en");
}

function scaled(number, unit) {
  const prefixes = ["", "k", "M", "G", "T", "P"];
  const power = number >= 1000 ? Math.min(prefixes.length - 1, Math.floor(Math.log10(number) / 3)) : 0;
  return number === 0 ? "" : `${digits(number / 1000 ** power)} ${prefixes[power]}${unit}`;
}

function time(seconds) {
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds >= 1e-3 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} µs`;
}

function tokens(count) {
  if (count >= 1e6 && count % 1e5 === 0) return `${count / 1e6}M`;
  return count >= 1e4 && count % 1e3 === 0 ? `${whole(count / 1e3)}K` : whole(count);
}

function noun(count, word) {
  return count === 1 ? word : `${word}s`;
}

function plural(count, word) {
  return `${whole(count)} ${noun(count, word)}`;
}

function range([first, last], word) {
  if (last < first) return `no ${word}`;
  return first === last ? `${word} ${first}` : `${word}s ${first}–${last}`;
}

// Creates an element with attributes and children, which are elements or text.
function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, setting] of Object.entries(attributes)) made.setAttribute(key, setting);
  made.append(...children);
  return made;
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function plainLayout() {
  return {
    autosize: true, margin: { l: 10, r: 12, t: 8, b: 10 },
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: color("text") },
    hoverlabel: { bgcolor: color("card"), bordercolor: color("line"), font: { color: color("text") } },
  };
}
