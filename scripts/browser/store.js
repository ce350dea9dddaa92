// What is kept in the reader's browser, as text: files, when tasks passed, hints shown.

const PREFIX = "minicache/";
const memory = new Map(); // where the browser keeps nothing, for as long as the page is open

/** Whether what is written outlasts the page. */
export let isKept = true;

/** The text at `key`, or null. */
export function read(key) {
  try {
    return localStorage.getItem(PREFIX + key) ?? memory.get(key) ?? null;
  } catch {
    return memory.get(key) ?? null;
  }
}

/** Keep a text; null removes it. */
export function write(key, text) {
  try {
    if (text === null) localStorage.removeItem(PREFIX + key);
    else localStorage.setItem(PREFIX + key, text);
    memory.delete(key);
    isKept = true;
  } catch {
    if (text === null) memory.delete(key);
    else memory.set(key, text);
    isKept = false;
  }
}
