// What is kept in the reader's browser, as text: files, when tasks passed, hints shown.

const PREFIX = "minicache/";
const memory = new Map(); // what the browser would not keep, for as long as the page is open

/** Whether all that was written outlasts the page. */
export let isKept = true;

/** Have `listener` called when another tab has written, or may have while the page lay in the browser's cache. */
export function onElsewhere(listener) {
  addEventListener("storage", () => listener());
  addEventListener("pageshow", ({ persisted }) => persisted && listener());
}

/** The text at `key`, or null. */
export function read(key) {
  if (memory.has(key)) return memory.get(key); // newer than what a full browser may still have
  try {
    return localStorage.getItem(PREFIX + key);
  } catch {
    return null;
  }
}

/** Keep a text; null removes it. */
export function write(key, text) {
  try {
    if (text === null) localStorage.removeItem(PREFIX + key);
    else localStorage.setItem(PREFIX + key, text);
    memory.delete(key);
  } catch {
    if (text === null) memory.delete(key);
    else memory.set(key, text);
  }
  isKept = memory.size === 0;
}
