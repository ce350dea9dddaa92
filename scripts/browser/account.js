// Shows what came of a grading: minicache_course.account, as elements.

import { say } from "./say.js";

/** An element: `make("p", {class: "x"}, "text", child)`. */
export function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

/** Load a style sheet, once. */
export function style(href) {
  if (document.querySelector(`link[href="${href}"]`)) return null;
  return new Promise((resolve, reject) => {
    document.head.append(make("link", { rel: "stylesheet", href, onload: resolve, onerror: reject }));
  });
}

/** The account as elements. `goTo(path, line)` is called when a place in a file is clicked. */
export function show(account, goTo) {
  const heads = [say("task"), "", say("tests"), say("points"), ""].map((text) => make(text ? "th" : "td", {}, text));
  const rows = account.rows.map((row) =>
    make(
      "tr",
      { "data-outcome": row.outcome },
      make("td", {}, row.id),
      make("td", {}, row.title),
      make("td", {}, `${row.num_passed}/${row.num_tests}`),
      make("td", {}, `${row.earned}/${row.points}`),
      make("td", { class: "mc-outcome" }, row.told),
    ),
  );
  return [
    make("table", {}, make("thead", {}, make("tr", {}, ...heads)), make("tbody", {}, ...rows)),
    ...account.problems.map((problem) => shownProblem(problem, goTo)),
    ...account.end.map((line) => shownLine(line, goTo)),
  ];
}

/** One of the account's problems. */
export function shownProblem(problem, goTo) {
  return make(
    "section",
    { class: "mc-problem", "data-outcome": problem.outcome },
    make("h3", {}, problem.title),
    ...problem.lines.map((line) => shownLine(line, goTo)),
  );
}

/** The place in one of the learner's files that a problem names first, as {path, line, message}; or null. */
export function firstPlace(problem) {
  const places = problem.lines.map(({ label, text }) => PLACE.exec(label + text));
  const index = places.findIndex((place) => place);
  if (index < 0) return null;
  const [, path, line] = places[index];
  const error = problem.lines.slice(Math.max(0, index - 1), index + 1).find(({ label, text }) => label && ERROR.test(text));
  return { path, line: Number(line), message: error ? error.text : problem.title };
}

const PAGE = /docs\/((?:en|es)\/[\w/-]+)\.md/;
const PLACE = /(labs\/[\w./-]+\.py):(\d+)/;
const ERROR = /^\w+(Error|Exception|Exit|Interrupt|Iteration)\b/; // what was raised stands at its place, or in the line before

function shownLine({ text, label, strong, faint }, goTo) {
  const line = make("div", { class: faint ? "mc-line mc-faint" : "mc-line" });
  if (label) line.append(make("span", { class: "mc-label" }, label));
  const inside = make("span", { class: "mc-text" });
  line.append(inside);
  const place = PLACE.exec(text);
  if (place) {
    const [all, path, number] = place;
    const link = make("button", { type: "button", onclick: () => goTo(path, Number(number)) }, all);
    inside.append(text.slice(0, place.index), link, text.slice(place.index + all.length));
  } else if (PAGE.test(text)) {
    const { 0: all, 1: page, index } = PAGE.exec(text);
    const href = new URL(page.replace(/^en\//, "").replace(/(^|\/)index$/, "$1") + "/", new URL("../../", import.meta.url)).href;
    inside.append(text.slice(0, index), make("a", { href }, all), text.slice(index + all.length));
  } else if (strong) {
    const begin = text.indexOf(strong);
    inside.append(text.slice(0, begin), make("strong", {}, strong), text.slice(begin + strong.length));
  } else {
    inside.append(text || "\u00a0");
  }
  return line;
}
