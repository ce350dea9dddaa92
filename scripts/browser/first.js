// The first minute: the home page's line is written, the labs' grader checks it, and the picture moves once it is right.
//
// `open` is called by the home page's button. All words but the verdicts are in the page.

import { make, shownProblem, style } from "./account.js";
import { Grader } from "./grader.js";
import { say } from "./say.js";
import * as store from "./store.js";

/** Show the task, and load its Python meanwhile. */
export async function open() {
  const first = document.getElementById("first");
  const [form, input, run, status, results, next] = ["form", "input", "form .md-button", ".mc-status", ".mc-results", ".next"].map(
    (each) => first.querySelector(each),
  );
  const tell = (text) => (status.textContent = text);
  const grader = new Grader((words) => run.disabled && tell(words));
  grader.prepare();
  first.classList.add("open");
  input.focus();
  const [answer] = await Promise.all([
    fetch(new URL("first.json", import.meta.url)),
    style(new URL("browser.css", import.meta.url).href),
  ]);
  const { phase, task, file, before, after } = await answer.json();

  async function check() {
    run.disabled = true;
    results.replaceChildren();
    tell(say("Loading Python…"));
    try {
      const files = { [file]: before + input.value.trim().replace(/^return\b\s*/, "") + after };
      const { account, passed } = await grader.grade({ phase, task, files }, ({ kind }) => kind === "test" && tell(say("Testing…")));
      const [{ num_passed, num_tests }] = account.rows;
      tell(say("{passed} of {total} tests pass.", { passed: num_passed, total: num_tests }));
      if (passed.length) succeed();
      else results.append(shownProblem(ofTheLine(account.problems[0]), () => input.focus()));
    } catch (error) {
      tell(say("Python could not be run here:"));
      results.append(make("pre", {}, error.message));
    } finally {
      run.disabled = input.readOnly; // it is solved
    }
  }

  function succeed() {
    grader.close();
    first.classList.add("passed");
    input.readOnly = true;
    next.hidden = false;
    next.scrollIntoView({ block: "nearest" });
    store.write("first", new Date().toISOString());
  }

  /** What was expected of the line: where to read on and what else fails is for the one who writes the whole file. */
  function ofTheLine({ outcome, lines }) {
    const end = lines.findIndex(({ text }) => text.startsWith("docs/"));
    return { title: say("The first that fails"), outcome, lines: lines.slice(0, end) };
  }

  form.addEventListener("click", (event) => event.stopPropagation()); // of Enter too: the theme takes the focus then
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    check();
  });
  run.disabled = false;
}
