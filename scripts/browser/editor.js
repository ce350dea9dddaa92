// The editor of the labs and the playground: CodeMirror 6 with no more than Python needs. build.py bundles it.

import { defaultKeymap, history, historyKeymap, indentWithTab, isolateHistory } from "@codemirror/commands";
import { python } from "@codemirror/lang-python";
import { bracketMatching, indentOnInput, indentUnit, syntaxHighlighting } from "@codemirror/language";
import { lintGutter, setDiagnostics } from "@codemirror/lint";
import { EditorState } from "@codemirror/state";
import { EditorView, drawSelection, highlightActiveLine, keymap, lineNumbers } from "@codemirror/view";
import { classHighlighter } from "@lezer/highlight";

import { say } from "./say.js";

/**
 * An editor of Python in the element `parent`. Tab indents; Escape and then Tab leaves, as CodeMirror has it.
 *
 * @param {HTMLElement} parent
 * @param {{text: string, label: string, onChange?: (text: string) => void, onRun?: () => void}} options `label`: what a
 *   screen reader says; `onRun`: Ctrl+Enter
 * @returns {{text: string, replace: (text: string) => void, focus: () => void,
 *   mark: (problems: {line: number, message: string}[]) => void, goTo: (line: number) => void}} `text` can be set;
 *   `replace` sets it as an edit, which can be undone; `mark` shows problems at lines that count from 1, and the first
 */
export function createEditor(parent, { text, label, onChange = () => {}, onRun = () => {} }) {
  const extensions = [
    lineNumbers(),
    history(),
    drawSelection(),
    highlightActiveLine(),
    bracketMatching(),
    indentOnInput(),
    indentUnit.of("    "),
    lintGutter(),
    python(),
    EditorView.lineWrapping,
    syntaxHighlighting(classHighlighter),
    keymap.of([{ key: "Mod-Enter", run: () => (onRun(), true) }, ...defaultKeymap, ...historyKeymap, indentWithTab]),
    EditorState.phrases.of({ "Selection deleted": say("Selection deleted") }),
    EditorView.contentAttributes.of({ "aria-label": label, tabindex: "0" }),
    EditorView.updateListener.of((update) => update.docChanged && onChange(update.state.doc.toString())),
  ];
  const stateOf = (doc) => EditorState.create({ doc, extensions });
  const view = new EditorView({ parent, state: stateOf(text) });
  const lineAt = (line) => view.state.doc.line(Math.min(Math.max(line, 1), view.state.doc.lines));
  return {
    get text() {
      return view.state.doc.toString();
    },
    set text(text) {
      view.setState(stateOf(text)); // with a history of its own: undo does not bring another file's text
    },
    replace(text) {
      const changes = { from: 0, to: view.state.doc.length, insert: text };
      view.dispatch({ changes, annotations: isolateHistory.of("full") });
    },
    focus: () => view.focus(),
    mark(problems) {
      const found = problems.map(({ line, message }) => {
        const { from, to } = lineAt(line);
        return { from, to, severity: "error", message };
      });
      view.dispatch(setDiagnostics(view.state, found));
      if (found.length) view.dispatch({ effects: EditorView.scrollIntoView(found[0].from, { y: "center" }) });
    },
    goTo(line) {
      const { from } = lineAt(line);
      view.dispatch({ selection: { anchor: from }, effects: EditorView.scrollIntoView(from, { y: "center" }) });
      view.focus();
    },
  };
}
