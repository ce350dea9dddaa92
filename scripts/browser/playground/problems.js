// What a run has to say besides its picture: refusals, errors, the auditor's complaint.

import { say } from "../browser/say.js";

/**
 * @param {HTMLElement} parent where it is said, in place of what was
 * @param {{refused, refusal, audit, error} | null} result how the run ended (run.py); null: it has not
 * @param {(line: number) => void} openLine shows a line of the changed code
 */
export function tellProblems(parent, result, openLine) {
  const { refused, refusal, audit, error } = result ?? {};
  const more = refused > 1 ? ` ${say("(and {count} more like it)", { count: refused - 1 })}` : "";
  parent.replaceChildren();
  if (refused) parent.append(problem(`RequestTooLargeError: ${refusal}${more}`));
  if (error) parent.append(problem(`${error.kind}: ${error.message}`));
  if (error?.line) {
    parent.lastChild.append(" ", lineButton(error.line, openLine));
    parent.append(traceback(error.traceback));
  }
  if (audit) parent.append(problem(say("The auditor of phase 6: {complaint}", { complaint: audit })));
}

function problem(words) {
  const paragraph = document.createElement("p");
  paragraph.className = "problem";
  paragraph.textContent = words;
  return paragraph;
}

function lineButton(line, openLine) {
  const button = document.createElement("button");
  button.type = "button";
  button.textContent = say("Line {line}", { line });
  button.onclick = () => openLine(line);
  return button;
}

function traceback(text) {
  const block = document.createElement("pre");
  block.textContent = text;
  block.tabIndex = 0;
  return block;
}
