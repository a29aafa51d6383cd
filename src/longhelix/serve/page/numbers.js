// Numbers as people read them.

/** @param {number} number */
export function whole(number) {
  return Math.round(number).toLocaleString("en");
}

/** @param {number} number @param {string} word */
export function plural(number, word) {
  return `${whole(number)} ${number === 1 ? word : `${word}s`}`;
}

/** Three digits. @param {number} number */
export function digits(number) {
  return number >= 1000 ? whole(number) : number.toLocaleString("en", { maximumSignificantDigits: 3 });
}

/** @param {number} seconds */
export function time(seconds) {
  if (seconds >= 90) return `${whole(seconds / 60)} min`;
  if (seconds >= 1) return `${digits(seconds)} s`;
  return seconds >= 1e-3 ? `${digits(seconds * 1e3)} ms` : `${digits(seconds * 1e6)} µs`;
}

/** @param {number} count */
export function bytes(count) {
  const units = ["bytes", "kB", "MB", "GB"];
  const power = count < 1000 ? 0 : Math.min(units.length - 1, Math.floor(Math.log10(count) / 3));
  return `${digits(count / 1000 ** power)} ${units[power]}`;
}

/** @param {[number, number]} range first and past the last @param {string} word */
export function range([first, end], word) {
  if (end <= first) return `no ${word}`;
  return end - first === 1 ? `${word} ${first}` : `${word}s ${first}–${end - 1}`;
}
