// "You are here; next is …" on the home page and the course map, from what has passed in this browser.
//
// The same as minicache_course.route. Nothing is loaded where nothing has passed.

const PREFIX = "minicache/passed/";

function passed() {
  try {
    return Object.entries(localStorage).filter(([key]) => key.startsWith(PREFIX));
  } catch {
    return []; // a browser that keeps nothing
  }
}

const times = new Map(passed().map(([key, when]) => [key.slice(PREFIX.length), when]));
if (times.size) {
  const line = document.getElementById("here");
  const { lang } = document.documentElement;
  const root = new URL(lang === "es" ? "../../es/" : "../../", import.meta.url);
  const tasks = await (await fetch(new URL(`route.${lang}.json`, import.meta.url))).json();
  const when = ({ id }) => times.get(id) ?? "";
  const here = tasks.reduce((last, task, number) => (when(task) && when(task) >= when(tasks[last] ?? {}) ? number : last), -1);
  const next = [...tasks.slice(here + 1), ...tasks.slice(0, here)].find((task) => !when(task));
  const [at, to] = line.querySelectorAll("a");
  for (const [link, task] of [[at, tasks[here]], [to, next]]) {
    link.parentElement.hidden = !task;
    if (task) Object.assign(link, { href: new URL(task.page, root).href, textContent: `${task.id} ${task.title}` });
  }
  line.hidden = false;
}
