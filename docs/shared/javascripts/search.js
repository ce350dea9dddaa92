// The theme's search, asked for what a question is about: words that every page has are dropped, and the others lose
// their endings ("preempted" finds "preemption"). It and the pages' text are loaded at the first question.
//
// Runs as the search's worker; overrides/main.html puts the name of the theme's own worker behind the "#".
const theirs = new URL(`../../assets/javascripts/workers/${location.hash.slice(1)}`, location.href);
const [SETUP, READY, QUERY, RESULT] = [0, 1, 2, 3]; // the theme's messages
const WORDS = {
  en: `a about all am an and any are as at be been between but by can could did do does each for from get gets had has have
    how i if in into is it its me minicache mine more my need of on one or our over should so some than that the their them
    there these they this to up use used vs want was we what when where which while who why will with without would you your`,
  es: `a al algo como cómo con cual cuál cuando cuándo cuanto cuánto cuanta cuánta de del desde donde dónde e el él ella en entre
    es esa ese eso esta está estas este esto estos ha hace hacer hay la las le les lo los mas más me mi minicache mis muy nada ni
    no nos o para pero por puedo que qué quien quién se ser si sí sin sobre son su sus también tan te tengo tiene tu tus un una
    unas uno unos usa usar y ya yo`,
};
let setup;

/** As much of a word as its relatives have too. */
function beginning(word) {
  const { stemmer } = setup.data.config.lang[0] === "es" ? lunr.es : lunr;
  const stem = String(stemmer(new lunr.Token(word)));
  let length = 0;
  while (length < word.length && stem[length] === word[length]) length += 1;
  return length < 3 ? word : word.slice(0, length);
}

function asked(text) {
  if (/["+~^*]|(^|\s)-/.test(text)) return text; // by the rules of the engine
  const dropped = new Set(WORDS[setup.data.config.lang[0]].split(/\s+/));
  const words = text.toLowerCase().split(/[\s\-?!.,;:()/¿¡]+/).filter(Boolean);
  const telling = words.filter((word) => !dropped.has(word));
  // "^1": as it is, not as a beginning.
  return (telling.length ? telling : words).map((word) => (word.length < 3 ? `${word}^1` : beginning(word))).join(" ");
}

/** Load the theme's worker, which from now on hears what this one hears, and the pages' text. */
async function load() {
  const their = importScripts;
  self.importScripts = (...urls) => their(...urls.map((url) => new URL(url, theirs).href)); // relative to their worker
  importScripts(theirs.href);
  setup.data.docs = await (await fetch("../../search/documents.json")).json();
  dispatchEvent(new MessageEvent("message", { data: setup }));
  await new Promise((resolve) => setTimeout(resolve)); // what it does with that is done by then
}
let loading;

addEventListener("message", async (event) => {
  const message = event.data;
  if (event.isTrusted && message.type === SETUP) {
    setup = message;
    postMessage({ type: READY });
  } else if (event.isTrusted && message.type === QUERY) {
    event.stopImmediatePropagation();
    if (!message.data.trim()) return postMessage({ type: RESULT, data: { items: [] } });
    await (loading ??= load());
    dispatchEvent(new MessageEvent("message", { data: { ...message, data: asked(message.data) } }));
  }
});
