// Pyodide in node, answering the requests that worker.py describes.
//
//     node pyodide.mjs FOLDER      FOLDER holds node_modules/pyodide

import { spawn } from "node:child_process";
import { createRequire } from "node:module";
import path from "node:path";
import readline from "node:readline";

const folder = path.resolve(process.argv[2]);
const require = createRequire(path.join(folder, "package.json"));
const { loadPyodide } = require("pyodide");
const quiet = { stdout: () => {}, stderr: () => {} };
const now = () => performance.now();

// An instance from a memory snapshot starts ten times faster than `loadPyodide()` alone; the
// option is experimental, so do without it where it fails.
let snapshot;
try {
  snapshot = (await loadPyodide({ ...quiet, _makeSnapshot: true })).makeMemorySnapshot();
} catch {
  snapshot = undefined;
}

async function open() {
  const options = snapshot ? { ...quiet, _loadSnapshot: snapshot } : quiet;
  const instance = await loadPyodide(options);
  const session = { instance, lines: [] };
  instance.setStdout({ batched: (line) => session.lines.push(line + "\n") });
  return session;
}

function step(session, code) {
  session.lines.length = 0;
  let error = "";
  try {
    session.instance.runPython(code);
  } catch (raised) {
    error = String(raised).slice(-2000);
  }
  return { ok: !error, stdout: session.lines.join(""), error };
}

async function fresh(code) {
  return step(await open(), code);
}

async function timed(count, run, pause = 0) {
  const micros = [];
  let ran = { ok: true, stdout: "", error: "" };
  for (let i = 0; i < count; i++) {
    const started = now();
    ran = await run();
    micros.push((now() - started) * 1000);
    if (pause) await new Promise((resume) => setTimeout(resume, pause * 1000));
  }
  return { micros, ...ran };
}

function child() {
  const arguments_ = ["--expose-gc", process.argv[1], folder];
  const process_ = spawn(process.execPath, arguments_, { stdio: ["pipe", "pipe", "inherit"] });
  const lines = readline.createInterface({ input: process_.stdout })[Symbol.asyncIterator]();
  const ask = async (request) => {
    process_.stdin.write(JSON.stringify(request) + "\n");
    return JSON.parse((await lines.next()).value);
  };
  return { ask, end: () => process_.stdin.end() };
}

let sessions = [];
const answers = {
  async describe() {
    const session = await open();
    step(session, "import sys\nprint('.'.join(map(str, sys.version_info[:3])))");
    return {
      version: session.instance.version,
      python: session.lines.join("").trim(),
      isolation: "WebAssembly in V8, bridged to JavaScript",
      fresh: snapshot
        ? "`loadPyodide` from its own memory snapshot (experimental) in a warm node"
        : "`loadPyodide` in a warm node",
      session: "a Pyodide instance",
    };
  },
  fresh: ({ code, count, pause }) => timed(count, () => fresh(code), pause),
  async fresh_for({ code, seconds }) {
    const started = now();
    let runs = 0;
    while (now() - started < seconds * 1000) {
      await fresh(code);
      runs += 1;
    }
    return { runs, seconds: (now() - started) / 1000 };
  },
  async throughput({ code, workers, seconds }) {
    const children = Array.from({ length: workers }, child);
    const all = (request) => Promise.all(children.map((one) => one.ask(request)));
    await all({ what: "fresh", code, count: 1, pause: 0 });
    const parts = await all({ what: "fresh_for", code, seconds });
    for (const one of children) one.end();
    return {
      runs: parts.reduce((sum, part) => sum + part.runs, 0),
      seconds: Math.max(...parts.map((part) => part.seconds)),
    };
  },
  async open({ sessions: count, code }) {
    for (let i = 0; i < count; i++) {
      const session = await open();
      const ran = step(session, code);
      if (!ran.ok) return { failed: ran.error };
      sessions.push(session);
    }
    globalThis.gc?.();
    return { sessions: sessions.length };
  },
  step: ({ code, count }) => timed(count, () => step(sessions.at(-1), code)),
  fork: () => ({ unsupported: "it has no copy of a live session" }),
  close() {
    sessions = [];
    globalThis.gc?.();
    return {};
  },
};

for await (const line of readline.createInterface({ input: process.stdin })) {
  const request = JSON.parse(line);
  let answer;
  try {
    answer = await answers[request.what](request);
  } catch (error) {
    answer = { failed: String(error.stack ?? error).slice(-2000) };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
process.exit(0);
