// The page's language: what is English in the code is Spanish on a Spanish page, by docs/es/browser.po (build.py).

/** "en" or "es". */
export const LANGUAGE = document.documentElement.lang === "es" ? "es" : "en";

const spanish = LANGUAGE === "es" ? await read().catch(() => ({})) : {};

async function read() {
  const answer = await fetch(new URL("../browser/spanish.json", import.meta.url)); // also from assets/playground/
  return answer.json();
}

/**
 * A text in the page's language, its places filled: `say("{count} tokens", { count: 3 })`.
 * A text that has no Spanish stays English.
 */
export function say(text, places = {}) {
  return (spanish[text] ?? text).replace(/\{(\w+)\}/g, (place, name) => places[name] ?? place);
}

/** A whole number: 12,288, or with a narrow space on a Spanish page, as scripts/translation.py writes it there. */
export const whole = (number) => number.toLocaleString("en").replaceAll(",", LANGUAGE === "es" ? "\u202f" : ",");
