// The router's live page: draws the pictures of `/live` (`minicache.serving.proxy.app.Proxy.picture`). No library, no other host.
// Text goes into the page as text, never as HTML.

const find = (id) => document.getElementById(id);
const percent = (part) => (part === null ? "–" : `${(100 * part).toFixed(1)} %`);

function say(id, text) {
  const element = find(id);
  if (element.textContent !== text) element.textContent = text;
}

function make(name, properties = {}, ...children) {
  const element = Object.assign(document.createElement(name), properties);
  element.append(...children);
  return element;
}

function row(worker, most) {
  const load = make("meter", { min: 0, max: Math.max(most, 1), value: worker.num_unfinished });
  const cells = [
    [worker.url],
    [worker.is_healthy ? "healthy" : "out"],
    [String(worker.num_unfinished), load],
    [String(worker.num_answered)],
    [String(worker.num_failed)],
    [percent(worker.hit_rate)],
  ];
  return make("tr", { className: worker.is_healthy ? "" : "out" }, ...cells.map((cell) => make("td", {}, ...cell)));
}

function draw(picture) {
  const healthy = picture.workers.filter((worker) => worker.is_healthy).length;
  say("policy", picture.policy);
  say("state", picture.num_unfinished ? `running ${picture.num_unfinished}` : "idle");
  say("healthy", `${healthy} of ${picture.workers.length}`);
  say("unfinished", String(picture.num_unfinished));
  say("hits", percent(picture.hit_rate));
  say("continued", String(picture.num_continued));
  say("lost", String(picture.num_lost));
  const most = Math.max(...picture.workers.map((worker) => worker.num_unfinished));
  find("workers").replaceChildren(...picture.workers.map((worker) => row(worker, most)));
}

const events = new EventSource("live");
events.onmessage = (event) => draw(JSON.parse(event.data));
events.onerror = () => say("state", "not connected");
