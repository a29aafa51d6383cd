// Calls to the server that the page came from.

const KEY = "longhelix-key";
const SILENCE_MS = 30_000; // a stream has something every ten seconds

/** What went wrong, as a sentence. */
export class Problem extends Error {
  /** @param {string} message @param {number} status 0: no answer */
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

let known = stored();

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // a browser that keeps nothing
  }
}

export function key() {
  return known;
}

/** @param {string} value */
export function setKey(value) {
  known = value;
  try {
    if (value) sessionStorage.setItem(KEY, value);
    else sessionStorage.removeItem(KEY);
  } catch {
    // the page knows it until it is left
  }
}

/**
 * @param {string} path
 * @param {{body?: object, signal?: AbortSignal}} options
 * @returns {Promise<Response>} with a status of success; otherwise a Problem is thrown
 */
export async function call(path, { body, signal } = {}) {
  /** @type {Record<string, string>} */
  const headers = {};
  if (key()) headers.Authorization = `Bearer ${key()}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const sent = body === undefined ? { method: "GET" } : { method: "POST", body: JSON.stringify(body) };
    response = await fetch(path, { ...sent, headers, signal, cache: "no-store" });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Problem("The server does not answer. See whether it still runs, then try again.");
  }
  if (response.ok) return response;
  const problem = await response.json().catch(() => null);
  const message = problem?.error?.message ?? `the server answered with status ${response.status}`;
  throw new Problem(sentence(message), response.status);
}

/** @param {string} message */
export function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

/**
 * The server-sent events of an answer, as they come. Ends where the connection does; throws a Problem where nothing
 * came for long.
 * @param {Response} response
 * @returns {AsyncGenerator<{name: string, data: string}>}
 */
export async function* events(response) {
  if (response.body === null) return;
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "", name = "message", data = "";
  try {
    for (;;) {
      const { done, value } = await within(reader.read());
      if (done) return;
      const lines = (rest + value).split("\n");
      rest = lines.pop() ?? "";
      for (const line of lines) {
        if (line === "") {
          if (data) yield { name, data };
          name = "message";
          data = "";
        } else if (line.startsWith("event: ")) name = line.slice(7);
        else if (line.startsWith("data: ")) data += line.slice(6);
      }
    }
  } finally {
    reader.cancel().catch(() => undefined);
  }
}

/** @template T @param {Promise<T>} reading @returns {Promise<T>} */
async function within(reading) {
  let timer = 0;
  const silence = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Problem("The server has been silent for long.")), SILENCE_MS);
  });
  try {
    return await /** @type {Promise<T>} */ (Promise.race([reading, silence]));
  } finally {
    clearTimeout(timer);
  }
}
