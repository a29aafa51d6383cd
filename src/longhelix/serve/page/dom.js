// Elements, always of nodes and never of markup.

/**
 * @param {string} id
 * @returns {HTMLElement & Record<string, any>}
 */
export function byId(id) {
  const found = document.getElementById(id);
  if (found === null) throw new Error(`the page has no ${id}`);
  return found;
}

/**
 * An element with attributes, and children that are nodes or text.
 * @param {string} name
 * @param {Record<string, string>} attributes
 * @param {...(Node | string)} children
 * @returns {any}
 */
export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, setting] of Object.entries(attributes)) made.setAttribute(key, setting);
  made.append(...children);
  return made;
}

/**
 * @param {string} words
 * @param {() => void} act
 * @param {Record<string, string>} attributes
 */
export function button(words, act, attributes = {}) {
  const made = element("button", { type: "button", ...attributes }, words);
  made.addEventListener("click", act);
  return made;
}

/**
 * Text, changed only where it differs: what did not change is not read out again.
 * @param {HTMLElement} node
 * @param {string} words
 */
export function write(node, words) {
  if (node.textContent !== words) node.textContent = words;
}

/**
 * Colours as the theme has them now, for canvases.
 * @param {string[]} names
 * @returns {Record<string, string>}
 */
export function colours(names) {
  const probe = element("i", { class: "unseen" });
  document.body.append(probe);
  const found = {};
  for (const name of names) {
    probe.style.color = `var(--${name})`;
    found[name] = getComputedStyle(probe).color;
  }
  probe.remove();
  return found;
}

/**
 * A canvas's context in CSS pixels, cleared; null while it is not shown.
 * @param {HTMLCanvasElement} canvas
 * @param {number} height in CSS pixels
 */
export function cleared(canvas, height) {
  const width = canvas.clientWidth, ratio = devicePixelRatio || 1;
  if (width === 0) return null;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) {
    [canvas.width, canvas.height] = pixels;
    canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  if (context === null) return null;
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width };
}

/** Copies text, also where the page has no secure address. @param {string} text */
export async function copy(text) {
  if (navigator.clipboard !== undefined && isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  const field = element("textarea", { class: "unseen", "aria-hidden": "true" });
  field.value = text;
  document.body.append(field);
  field.select();
  document.execCommand("copy");
  field.remove();
}
