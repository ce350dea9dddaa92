// What a run has to say besides its picture: refusals, errors, the auditor's complaint.

import { say } from "../browser/say.js";

/**
 * @param {HTMLElement} parent where it is said, in place of what was
 * @param {{refused, refusal, audit, error} | null} result how the run ended (run.py); null: it has not
 * @param {(error: {module, line}) => void} openPlace shows the line of the error
 */
export function tellProblems(parent, result, openPlace) {
  const { refused, refusal, audit, error } = result ?? {};
  const more = refused > 1 ? ` ${say("(and {count} more like it)", { count: refused - 1 })}` : "";
  parent.replaceChildren();
  if (refused) parent.append(problem(`RequestTooLargeError: ${refusal}${more}`));
  if (error) parent.append(problem(`${error.kind}: ${error.message}`));
  if (error?.line) parent.lastChild.append(" ", placeButton(error, openPlace));
  if (error?.module && !error.line) parent.lastChild.append(" ", say("{file} does not define it.", { file: fileOf(error) }));
  else if (error?.traceback) parent.append(traceback(error.traceback));
  if (audit) parent.append(problem(say("The auditor of phase 6: {complaint}", { complaint: audit })));
}

/** A paragraph that says what is wrong. */
export function problem(words) {
  const paragraph = document.createElement("p");
  paragraph.className = "problem";
  paragraph.textContent = words;
  return paragraph;
}

const fileOf = ({ module }) => `${module.split(".").at(-1)}.py`;

function placeButton(error, openPlace) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = say("{file}, line {line}", { file: fileOf(error), line: error.line });
  button.onclick = () => openPlace(error);
  return button;
}

function traceback(text) {
  const block = document.createElement("pre");
  block.textContent = text;
  block.tabIndex = 0;
  return block;
}
