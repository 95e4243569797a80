// The parts of the page that a reader moves: completions of a step, and the place on the page when it
// is read anew. Texts of models and users only ever become text nodes.
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const controls = ["run", "step", "kept", "right", "cut"].map(byId).filter(Boolean);

function element(tag, className, ...children) {
  const made = document.createElement(tag);
  if (className) made.className = className;
  made.append(...children);
  return made;
}

const current = () => data[byId("run") ? Number(byId("run").value) : 0];
const number = (value) => value === null ? "–" : String(Number(value.toPrecision(3)));
const verdictOf = ({ components }) => !("accuracy" in components) ? "" : components.accuracy === 1 ? "right" : "wrong";
const goldOf = (line) => line.gold ? `gold answer ${line.gold}` : "no gold answer";

// ---- completions

function showCompletions() {
  const { every, steps } = current();
  byId("texts-note").textContent = steps.length === 0 ? "No completions were kept yet." :
    every === 1 ? "Special tokens are shown as they are." :
    `This page holds the texts of every ${every}th step; those of the others are in samples.jsonl.`;
  const slider = byId("step");
  slider.max = Math.max(0, steps.length - 1);
  slider.disabled = steps.length < 2;
  const shown = steps[Number(slider.value)];
  byId("step-shown").textContent = shown ? `${shown.step} of ${steps.at(-1).step}` : "–";
  byId("groups").replaceChildren(...(shown ? shown.groups.map(group) : []));
}

function group(line) {
  const [kept, pruned] = [true, false].map((which) =>
    line.completions.filter((completion) => completion.kept === which).map(completionRow).filter(Boolean));
  const prompt = element("details", "", element("summary", "", "prompt"), element("pre", "", line.prompt));
  const head = element("h3", "", `${line.id}, ${goldOf(line)}, mean reward ${number(line.mean_reward)}`);
  const parts = kept.length ? [completionTable(kept)] : [];
  if (pruned.length) {
    parts.push(element("details", "", element("summary", "", `${pruned.length} pruned`), completionTable(pruned)));
    parts.at(-1).open = kept.length === 0;
  }
  if (parts.length === 0) parts.push(element("p", "muted", "No completion passes the filters."));
  return element("div", "group", head, prompt, ...parts);
}

function completionTable(rows) {
  const columns = ["answer", "completion", "reward", "advantage", "kept", "tokens"];
  const table = element("table", "cards completions",
    element("thead", "", element("tr", "", ...columns.map((column) => element("th", "", column)))),
    element("tbody", "", ...rows));
  for (const row of table.tBodies[0].rows)
    columns.forEach((column, i) => { row.cells[i].dataset.label = column; });
  return table;
}

// Replies of an environment stand between the turns of the policy.
function turnsOf(completion) {
  return (completion.turns || [completion.text]).map((turn, i) => i % 2 ? element("span", "reply", turn) : turn);
}

function completionRow(completion) {
  const is = { kept: completion.kept ? "kept" : "pruned", right: verdictOf(completion), cut: completion.finished ? "finished" : "truncated" };
  for (const filter of ["kept", "right", "cut"])
    if (byId(filter).value && is[filter] && byId(filter).value !== is[filter]) return null;
  const components = Object.entries(completion.components).filter(([, value]) => value !== 0)
    .map(([name, value]) => `${name} ${number(value)}`).join(", ") || "all components 0";
  const some = completion.trained ? `, ${completion.trained} tokens` : ", no gradient";
  const upTo = completion.trained < completion.tokens ? some : "";
  const why = `${completion.size == null ? "" : `size ${number(completion.size)} of the mean, `}probability ${number(completion.prob)}`;
  const kept = completion.kept ? `kept, ${why}, weight ${number(completion.weight)}${upTo}` :
    completion.prob === null ? "group not trained on" : `pruned, ${why}`;
  return element("tr", `${is.right} ${is.kept}`,
    element("td", "", element("b", "verdict", { right: "✓ right", wrong: "✗ wrong" }[is.right] || "–")),
    element("td", "", element("span", "text", ...turnsOf(completion))),
    element("td", "", `${number(completion.reward)} (${components})`),
    element("td", "", number(completion.advantage)),
    element("td", "", kept),
    element("td", "", `${completion.tokens}, ${is.cut}`));
}

// ---- the place on the page

function showRun() {
  for (const part of document.querySelectorAll(".of-run"))
    part.hidden = byId("run") !== null && part.dataset.run !== byId("run").value;
  showCompletions();
}

// Where the reader is: the last title above the top of the screen, and how far above it stands.
const titles = () => [...document.querySelectorAll("h1, h2, h3, figcaption b")].filter((title) => title.checkVisibility());
const alike = (title) => titles().filter((one) => one.textContent === title); // "Reward" is a section and a chart

function remember() {
  const above = titles().filter((title) => title.getBoundingClientRect().top <= 1).pop() || titles()[0];
  const step = current().steps[Number(byId("step").value)];
  sessionStorage.setItem(location.pathname, JSON.stringify({
    values: Object.fromEntries(controls.map((control) => [control.id, control.value])),
    open: [...document.querySelectorAll("details")].map((one) => one.open), step: step && step.step,
    title: above.textContent, number: alike(above.textContent).indexOf(above), top: above.getBoundingClientRect().top }));
}

function restore() {
  const saved = JSON.parse(sessionStorage.getItem(location.pathname) || "null");
  const choose = () => controls.filter((control) => saved && saved.values[control.id]).forEach((control) => {
    if (control.id !== "step") control.value = saved.values[control.id]; });
  choose();
  const steps = current().steps, same = steps.findIndex((one) => saved && one.step >= saved.step);
  byId("step").max = Math.max(0, steps.length - 1);
  byId("step").value = same < 0 ? steps.length - 1 : same;
  showRun();
  if (!saved) return;
  [...document.querySelectorAll("details")].forEach((one, i) => { one.open = Boolean(saved.open[i]); });
  const title = alike(saved.title)[saved.number] || alike(saved.title)[0];
  if (title) window.scrollBy(0, title.getBoundingClientRect().top - saved.top);
}

function refresh() { // not under the hands of a reader who marks a text
  if (document.visibilityState === "visible" && String(getSelection()) === "") location.reload();
}

history.scrollRestoration = "manual";
for (const control of controls)
  control.addEventListener(control.id === "step" ? "input" : "change", showRun);
restore();
addEventListener("pagehide", remember);
if ("live" in document.body.dataset) setInterval(refresh, 10_000);
