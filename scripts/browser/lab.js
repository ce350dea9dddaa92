// The lab in the page: an editor with the starters of the page's tasks, their tests, points, messages and hints.
//
// `open` is called by the button that docs/hooks.py puts on every handout page whose tasks need nothing but Python.

import { firstPlace, make, show } from "./account.js";
import { createEditor } from "./editor.js";
import { Grader } from "./grader.js";
import { Stopped } from "./python.js";
import * as store from "./store.js";

let lab = null;

/**
 * Open the lab, or close it again.
 *
 * @param {HTMLElement} opener has `data-phase`, a folder, and `data-tasks`, ids separated by spaces
 */
export async function open(opener) {
  if (lab) return lab.focus();
  const { phase, tasks } = opener.dataset;
  const answer = await fetch(new URL(`${phase}.json`, import.meta.url));
  if (!answer.ok) throw new Error(`${phase}.json: ${answer.status}`);
  await style(new URL("browser.css", import.meta.url).href);
  lab = new Lab(await answer.json(), tasks.split(" "), () => {
    lab = null;
    opener.querySelector("button").focus();
  });
}

function style(href) {
  if (document.querySelector(`link[href="${href}"]`)) return null;
  return new Promise((resolve, reject) => {
    document.head.append(make("link", { rel: "stylesheet", href, onload: resolve, onerror: reject }));
  });
}

class Lab {
  #sheet;
  #tasks;
  #file; // the path of the one in the editor
  #editor;
  #grader = new Grader((what) => this.#isRunning && this.#say(`Loading ${what} …`));
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
    this.#editor = createEditor(this.#el.editor, { text: "", label: "Your file", onChange: (text) => this.#keep(text) });
    this.#choose();
    this.#say("Your file stays in this browser.");
    this.#grader.prepare();
  }

  focus() {
    this.#editor.focus();
  }

  #build() {
    const button = (text, onclick, more = {}) => make("button", { type: "button", onclick, ...more }, text);
    const el = this.#el;
    el.task = make(
      "select",
      { "aria-label": "Task", onchange: () => this.#choose() },
      ...this.#tasks.map((task) => make("option", { value: task.id }, `${task.id} ${task.title}`)),
    );
    el.run = button("Run tests", () => this.#run(), { class: "mc-run" });
    el.stop = button("Stop", () => this.#grader.stop(), { disabled: true });
    el.files = make("div", { class: "mc-files" });
    el.editor = make("div", { class: "mc-editor" });
    el.status = make("p", { class: "mc-status", role: "status" });
    el.results = make("div", { class: "mc-results", tabindex: "0", role: "region", "aria-label": "Results" });
    el.upload = make("input", { type: "file", accept: ".py", hidden: true, onchange: () => this.#import() });
    el.panel = make(
      "aside",
      { class: "mc-lab", "aria-label": `Phase ${this.#sheet.number} in the browser` },
      make("div", { class: "mc-bar" }, el.task, el.run, el.stop, button("Close", () => this.#close(), { class: "mc-close" })),
      el.files,
      el.editor,
      make(
        "div",
        { class: "mc-bar" },
        button("Hint", () => this.#hint()),
        button("Reset", () => this.#reset(), { title: "Restore the starter" }),
        button("Download", () => this.#export(), { title: "Save the file for your labs/ folder" }),
        button("Import", () => el.upload.click(), { title: "Load a file from your machine" }),
        el.upload,
        make("span", { class: "mc-keys" }, "Esc, then Tab leaves the editor"),
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

  #say(text) {
    this.#el.status.textContent = store.isKept
      ? text
      : `${text} This browser keeps nothing: download your file before you leave.`;
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
    if (!confirm(`Restore the starter of ${this.#file}? Your changes are lost: download the file first to keep them.`)) return;
    const path = this.#file;
    this.#replace(path, this.#sheet.starters[path]);
    this.#say(`${path} has been reset to the starter.`);
  }

  #export() {
    const url = URL.createObjectURL(new Blob([this.#editor.text], { type: "text/x-python" }));
    make("a", { href: url, download: this.#file.split("/").at(-1) }).click();
    URL.revokeObjectURL(url);
    this.#say(`Put it into your course folder as ${this.#file}.`);
  }

  async #import() {
    const [chosen] = this.#el.upload.files;
    this.#el.upload.value = "";
    if (!chosen) return;
    const path = this.#paths.find((each) => each.split("/").at(-1) === chosen.name);
    if (!path) return this.#say(`${chosen.name} is not one of this page's files: ${this.#paths.join(", ")}`);
    this.#replace(path, await chosen.text());
    this.#say(`${path} has been imported.`);
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
    this.#say("");
  }

  #hint() {
    const { id, hints } = this.#task;
    const shown = Math.min(Number(store.read(`hints/${id}`) ?? 0) + 1, hints.length);
    store.write(`hints/${id}`, String(shown));
    const list = make("ol", {}, ...hints.slice(0, shown).map((hint) => make("li", {}, hint)));
    this.#el.results.replaceChildren(list);
    this.#say(`Hint ${shown} of ${hints.length} for task ${id}.`);
  }

  async #run() {
    const task = this.#task;
    const { run, stop, results } = this.#el;
    const paths = Object.keys(this.#sheet.starters);
    const files = Object.fromEntries(paths.map((path) => [path, this.#text(path)]));
    this.#isRunning = run.disabled = true;
    stop.disabled = false;
    this.#say("Loading Python …");
    results.replaceChildren();
    this.#editor.mark([]);
    let total = 0;
    let done = 0;
    const onEvent = (event) => {
      if (event.kind === "collected") total = done + event.total;
      else if (["result", "lost"].includes(event.kind)) done += 1;
      else if (event.kind === "test") this.#say(`${done + 1} of ${total}: ${event.title}`);
    };
    try {
      this.#show(task.file);
      const asked = { phase: this.#sheet.number, task: task.number, files };
      const { account, passed } = await this.#grader.grade(asked, onEvent);
      results.replaceChildren(...show(account, (path, line) => this.#goTo(path, line)));
      results.scrollTop = 0;
      this.#markFirst(account.problems);
      store.write(`passed/${task.id}`, passed.includes(task.id) ? "1" : null);
      this.#say(passed.includes(task.id) ? `Task ${task.id} has passed.` : `Task ${task.id}: ${account.rows[0].told}.`);
    } catch (error) {
      if (error instanceof Stopped) this.#say("Stopped.");
      else {
        this.#say("Python could not be run here:");
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
    if (!this.#paths.includes(path)) return this.#say(`${path} belongs to another page of this phase.`);
    this.#show(path);
    this.#editor.goTo(line);
  }
}
