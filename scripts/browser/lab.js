// The lab in the page: an editor with the starters of the page's tasks, their tests, points, messages and hints.
//
// `open` is called by the button that docs/hooks.py puts on every handout page whose tasks need nothing but Python.

import { firstPlace, make, show, style } from "./account.js";
import { createEditor } from "./editor.js";
import { Grader } from "./grader.js";
import { Stopped } from "./python.js";
import { LANGUAGE, say } from "./say.js";
import * as store from "./store.js";

const SITE = new URL(LANGUAGE === "es" ? "../../es/" : "../../", import.meta.url); // of the page's language

let lab = null;
store.onElsewhere(() => lab?.refresh());

/**
 * Open the lab, or close it again.
 *
 * @param {HTMLElement} opener has `data-phase`, a folder, and `data-tasks`, ids separated by spaces
 */
export async function open(opener) {
  if (lab) return lab.focus();
  const { phase, tasks } = opener.dataset;
  const answer = await fetch(new URL(`${phase}.${LANGUAGE}.json`, import.meta.url));
  if (!answer.ok) throw new Error(`${phase}.${LANGUAGE}.json: ${answer.status}`);
  await style(new URL("browser.css", import.meta.url).href);
  lab = new Lab(await answer.json(), tasks.split(" "), () => {
    lab = null;
    opener.querySelector("button").focus();
  });
}

class Lab {
  #sheet;
  #tasks;
  #file; // the path of the one in the editor
  #editor;
  #grader = new Grader((words) => this.#isRunning && this.#setStatus(words));
  #isRunning = false;
  #onClose;
  #el = {};

  constructor(sheet, ids, onClose) {
    this.#sheet = sheet;
    this.#tasks = sheet.tasks.filter((task) => ids.includes(task.id));
    this.#onClose = onClose;
    this.#build();
    const next = this.#tasks.find((task) => !this.#isPassed(task)) ?? this.#tasks[0];
    this.#el.task.value = next.id;
    this.#editor = createEditor(this.#el.editor, { text: "", label: say("Your file"), onChange: (text) => this.#keep(text), onRun: () => this.#run() });
    this.#choose();
    this.#setStatus(say("Your file stays in this browser."));
    this.#grader.prepare();
  }

  focus() {
    this.#editor.focus();
  }

  /** Show the file as it is kept: another tab may have written it. */
  refresh() {
    if (this.#editor.text === this.#text(this.#file)) return;
    const path = this.#file;
    this.#file = null;
    this.#show(path);
  }

  #build() {
    const button = (text, onclick, more = {}) => make("button", { type: "button", onclick, ...more }, text);
    const el = this.#el;
    el.task = make(
      "select",
      { "aria-label": say("Task"), onchange: () => this.#choose() },
      ...this.#tasks.map((task) => make("option", { value: task.id }, `${task.id} ${task.title}`)),
    );
    el.run = button(say("Run tests"), () => this.#run(), { class: "mc-run" });
    el.stop = button(say("Stop"), () => this.#grader.stop(), { disabled: true });
    el.files = make("div", { class: "mc-files" });
    el.editor = make("div", { class: "mc-editor" });
    el.status = make("p", { class: "mc-status", role: "status" });
    el.results = make("div", { class: "mc-results", tabindex: "0", role: "region", "aria-label": say("Results") });
    el.upload = make("input", { type: "file", accept: ".py", hidden: true, onchange: () => this.#import() });
    el.panel = make(
      "aside",
      { class: "mc-lab", "aria-label": say("Phase {number} in the browser", { number: this.#sheet.number }) },
      make("div", { class: "mc-bar" }, el.task, el.run, el.stop, button(say("Close"), () => this.#close(), { class: "mc-close" })),
      el.files,
      el.editor,
      make(
        "div",
        { class: "mc-bar" },
        button(say("Hint"), () => this.#hint()),
        button(say("Reset"), () => this.#reset(), { title: say("Restore the starter") }),
        button(say("Download"), () => this.#export(), { title: say("Save the file for your labs/ folder") }),
        button(say("Import"), () => el.upload.click(), { title: say("Load a file from your machine") }),
        el.upload,
        make("span", { class: "mc-keys" }, say("Esc, then Tab leaves the editor")),
      ),
      el.status,
      el.results,
    );
    document.body.append(el.panel);
    document.body.classList.add("mc-lab-open");
  }

  #close() {
    this.#grader.close();
    this.#el.panel.remove();
    document.body.classList.remove("mc-lab-open");
    this.#onClose();
  }

  #setStatus(text) {
    this.#el.status.textContent = store.isKept
      ? text
      : `${text} ${say("This browser keeps nothing: download your file before you leave.")}`;
  }

  // Files

  get #paths() {
    return [...new Set(this.#tasks.map((task) => task.file))];
  }

  #text(path) {
    return store.read(path) ?? this.#sheet.starters[path];
  }

  #keep(text) {
    if (this.#file && text !== this.#text(this.#file)) this.#write(this.#file, text);
  }

  #write(path, text) {
    store.write(path, text === this.#sheet.starters[path] ? null : text);
  }

  #show(path) {
    if (this.#file !== path) {
      this.#file = null; // what the editor is given is no edit
      this.#editor.text = this.#text(path);
      this.#file = path;
    }
    this.#el.files.replaceChildren(
      ...this.#paths.map((each) =>
        make("button", { type: "button", "aria-pressed": String(each === path), onclick: () => this.#show(each) }, each),
      ),
    );
  }

  #replace(path, text) {
    this.#write(path, text);
    this.#file = null;
    this.#show(path);
    this.#editor.focus();
  }

  #reset() {
    const path = this.#file;
    const question = say("Restore the starter of {path}? Your changes are lost: download the file first to keep them.", { path });
    if (!confirm(question)) return;
    this.#replace(path, this.#sheet.starters[path]);
    this.#setStatus(say("{path} has been reset to the starter.", { path }));
  }

  #export() {
    const url = URL.createObjectURL(new Blob([this.#editor.text], { type: "text/x-python" }));
    make("a", { href: url, download: this.#file.split("/").at(-1) }).click();
    URL.revokeObjectURL(url);
    this.#setStatus(say("Put it into your course folder as {path}.", { path: this.#file }));
  }

  async #import() {
    const [chosen] = this.#el.upload.files;
    this.#el.upload.value = "";
    if (!chosen) return;
    const path = this.#paths.find((each) => each.split("/").at(-1) === chosen.name);
    if (!path) {
      const names = { name: chosen.name, paths: this.#paths.join(", ") };
      return this.#setStatus(say("{name} is not one of this page's files: {paths}", names));
    }
    const text = await chosen.text();
    const isLost = ![this.#sheet.starters[path], text].includes(this.#text(path));
    if (isLost && !confirm(say("Replace {paths}, which this browser keeps?", { paths: path }))) return;
    this.#replace(path, text);
    this.#setStatus(say("{path} has been imported.", { path }));
  }

  // Tasks

  get #task() {
    return this.#tasks.find((task) => task.id === this.#el.task.value);
  }

  #isPassed(task) {
    return store.read(`passed/${task.id}`) !== null;
  }

  /** Show the task's file, where its starter has something to write. */
  #choose() {
    const { file, number } = this.#task;
    this.#show(file);
    const lines = this.#editor.text.split("\n");
    const begin = lines.findIndex((line) => line.includes(`"phase ${this.#sheet.number}, task ${number}:`));
    this.#editor.goTo(Math.max(begin, 0) + 1);
    this.#el.results.replaceChildren();
    this.#setStatus("");
  }

  #hint() {
    const { id, hints } = this.#task;
    const shown = Math.min(Number(store.read(`hints/${id}`) ?? 0) + 1, hints.length);
    store.write(`hints/${id}`, String(shown));
    this.#el.results.querySelector("ol")?.remove();
    this.#el.results.prepend(make("ol", {}, ...hints.slice(0, shown).map((hint) => make("li", {}, hint))));
    this.#el.results.scrollTop = 0;
    this.#setStatus(say("Hint {shown} of {count} for task {id}.", { shown, count: hints.length, id }));
  }

  /** The way to the task after one that has passed: in this panel, or to its page; none after the last. */
  async #wayOn({ id }) {
    const route = await (await fetch(new URL(`route.${LANGUAGE}.json`, import.meta.url))).json();
    const next = route[route.findIndex((task) => task.id === id) + 1];
    if (!next) return [];
    const words = `${say("Next: {id} {title}", next)} →`;
    if (!this.#tasks.some((task) => task.id === next.id)) return [make("a", { class: "mc-next", href: new URL(next.page, SITE) }, words)];
    const choose = () => {
      this.#el.task.value = next.id;
      this.#choose();
    };
    return [make("button", { type: "button", class: "mc-next", onclick: choose }, words)];
  }

  async #run() {
    if (this.#isRunning) return;
    const task = this.#task;
    const { run, stop, results } = this.#el;
    const paths = Object.keys(this.#sheet.starters);
    const files = Object.fromEntries(paths.map((path) => [path, this.#text(path)]));
    this.#isRunning = run.disabled = true;
    stop.disabled = false;
    this.#setStatus(say("Loading Python…"));
    results.replaceChildren();
    this.#editor.mark([]);
    let total = 0;
    let done = 0;
    const onEvent = (event) => {
      if (event.kind === "collected") total = done + event.total;
      else if (["result", "lost"].includes(event.kind)) done += 1;
      else if (event.kind === "test") this.#setStatus(say("{number} of {total}: {title}", { number: done + 1, total, title: event.title }));
    };
    try {
      this.#show(task.file);
      const asked = { phase: this.#sheet.number, task: task.number, files };
      const { account, passed } = await this.#grader.grade(asked, onEvent);
      const wayOn = passed.includes(task.id) ? await this.#wayOn(task).catch(() => []) : [];
      results.replaceChildren(...wayOn, ...show(account, (path, line) => this.#goTo(path, line)));
      results.scrollTop = 0;
      this.#markFirst(account.problems);
      store.write(`passed/${task.id}`, passed.includes(task.id) ? new Date().toISOString() : null);
      const [{ told: outcome, num_passed, num_tests }] = account.rows;
      const places = { id: task.id, outcome, passed: num_passed, total: num_tests };
      const told = passed.includes(task.id) ? say("Task {id} has passed.", places) : say("Task {id}, {outcome}: {passed} of {total} tests pass.", places);
      this.#setStatus(told);
    } catch (error) {
      if (error instanceof Stopped) this.#setStatus(say("Stopped."));
      else {
        this.#setStatus(say("Python could not be run here:"));
        results.replaceChildren(make("pre", {}, error.message));
      }
    } finally {
      this.#isRunning = run.disabled = false;
      stop.disabled = true;
    }
  }

  #markFirst(problems) {
    const place = problems.map(firstPlace).find((found) => found?.path === this.#file);
    if (place) this.#editor.mark([place]);
  }

  #goTo(path, line) {
    if (!this.#paths.includes(path)) return this.#setStatus(say("{path} belongs to another page of this phase.", { path }));
    this.#show(path);
    this.#editor.goTo(line);
  }
}
