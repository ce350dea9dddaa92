// Run Python in Pyodide: node pyodide.mjs FOLDER_OF_PYODIDE ARCHIVE PROGRAM; what the program prints goes to stdout.
import { readFileSync } from "node:fs";

const [folder, archive, program] = process.argv.slice(2);
const { loadPyodide } = await import(`${folder}/pyodide.mjs`);
const python = await loadPyodide({ indexURL: folder });
python.unpackArchive(new Uint8Array(readFileSync(archive)), "zip", { extractDir: "/src" });
python.runPython(`import sys; sys.path.insert(0, "/src/src")`);
python.runPython(readFileSync(program, "utf-8"));
