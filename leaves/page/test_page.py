"""report.html in headless Chromium: what a reader sees, moves and filters, and that no text of a model runs."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from statistics import mean

import pytest
from conftest import ROOT, TOY

import report
from infra import runfolder
from infra.lines import rewrite_log
from leaves.page.test_report import write_run

webdriver = pytest.importorskip("selenium.webdriver")
from selenium.common.exceptions import StaleElementReferenceException  # noqa: E402
from selenium.webdriver.common.by import By  # noqa: E402
from selenium.webdriver.support.ui import WebDriverWait  # noqa: E402

pytestmark = pytest.mark.page
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--hide-scrollbars")
WIDTHS, SCHEMES = (1280, 400), ("light", "dark")
# The contrast of every text with what is behind it (WCAG 2.2, 1.4.3).
CONTRAST = """
const part = (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
const luminance = ([r, g, b]) => 0.2126 * part(r / 255) + 0.7152 * part(g / 255) + 0.0722 * part(b / 255);
const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
const ground = (e) => rgb(getComputedStyle(e).backgroundColor);
const behind = (e) => ground(e)[3] === 0 ? behind(e.parentElement) : ground(e);
const poor = [], hidden = ["SCRIPT", "NOSCRIPT", "OPTION", "STYLE"];
const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walk.nextNode()) {
  const text = walk.currentNode.data.trim(), e = walk.currentNode.parentElement, style = getComputedStyle(e);
  if (!text || !e.checkVisibility() || hidden.includes(e.tagName)) continue;
  const ink = rgb(e.closest("svg") ? style.fill : style.color);
  const [bright, dark] = [luminance(ink), luminance(behind(e))].sort((x, y) => y - x);
  const contrast = (bright + 0.05) / (dark + 0.05);
  if (contrast < 4.5) poor.push([text.slice(0, 40), e.className, contrast]);
}
return poor;"""
# Texts of charts that stick out of their frame, or lie over one another.
LABELS = """
const bad = [];
for (const svg of document.querySelectorAll("svg")) {
  if (!svg.checkVisibility()) continue;
  const frame = svg.getBoundingClientRect();
  const texts = [...svg.querySelectorAll("text")].map((t) => [t.textContent, t.getBoundingClientRect()]);
  texts.forEach(([a, r], i) => {
    if (r.left < frame.left - 1 || r.right > frame.right + 1) bad.push(["cut", a]);
    if (r.top < frame.top - 1 || r.bottom > frame.bottom + 1) bad.push(["cut", a]);
    for (const [b, s] of texts.slice(i + 1))
      if (r.left < s.right && s.left < r.right && r.top < s.bottom - 3 && s.top < r.bottom - 3) bad.push([a, "on", b]);
  });
}
return bad;"""


@pytest.fixture(scope="module")
def browser():
    driver = shutil.which("chromedriver")
    assert driver and shutil.which("chromium"), "no Chromium: apt-get install chromium chromium-driver"
    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium")
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def program(name: str, *words) -> list[str]:
    return [sys.executable, *map(str, (ROOT / name, *words))]


def training(out: Path, *settings: str) -> list[str]:
    few = out.parent / "few.jsonl"
    few.write_text("".join((ROOT / "toy" / "test.jsonl").read_text().splitlines(keepends=True)[:40]))
    changes = (f"out={out}", f"model.path={TOY}", f"data.train={ROOT / 'toy' / 'train.jsonl'}", f"data.eval={few}",
               "rollout.group_size=8", "rollout.prompts_per_step=6", "eval.every=2", *settings)
    return program("train.py", "--config", "cppo_toy.yaml", *(w for c in changes for w in ("--set", c)))


ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def finished(tmp_path_factory) -> tuple[list[dict], Path]:
    """The samples and the page of a run of 10 steps that learns; completions are pruned and some are cut."""
    out = tmp_path_factory.mktemp("page") / "run"
    subprocess.run(training(out, "steps=10", "rollout.max_new_tokens=24", "optim.warmup_steps=0"), check=True,
                   env=ENVIRONMENT, capture_output=True)
    return runfolder.read_log(out / "samples.jsonl"), report.write_report([out], out)


def show(browser, page: Path, width: int = 1280, scheme: str = "light") -> None:
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {
        "features": [{"name": "prefers-color-scheme", "value": scheme}]})
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
        "width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False})
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(page.as_uri())


def check_quiet(browser, page: Path) -> None:
    """Nothing was fetched but the page, and the console is empty."""
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {m["params"]["request"]["url"] for m in messages if m["method"] == "Network.requestWillBeSent"}
    assert page.as_uri() in urls and all(url == page.as_uri() or url == "data:," for url in urls), urls


def check_layout(browser) -> None:
    width = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
    assert width[0] <= width[1], width
    assert browser.execute_script(CONTRAST) == []
    assert browser.execute_script(LABELS) == []


def rows(browser) -> list[dict]:
    """The completions in sight: what the reader sees of each."""
    cells = browser.execute_script("""return [...document.querySelectorAll("#groups tbody tr")].map(
        (row) => [row.className, ...[...row.cells].map((cell) => cell.textContent.toWellFormed())])""")
    return [dict(zip(("class", "answer", "text", "reward", "advantage", "kept", "tokens"), row, strict=True))
            for row in cells]


def background(browser, element: str) -> str:
    return browser.execute_script("""for (let e = document.querySelector(arguments[0]); e; e = e.parentElement) {
        const colour = getComputedStyle(e).backgroundColor;
        if (colour !== "rgba(0, 0, 0, 0)") return colour; }""", element)


def move_slider(browser, place: int) -> None:
    browser.execute_script("""const slider = document.getElementById("step");
        slider.value = arguments[0]; slider.dispatchEvent(new Event("input"));""", place)


def choose(browser, select: str, value: str) -> None:
    browser.execute_script("""const select = document.getElementById(arguments[0]);
        select.value = arguments[1]; select.dispatchEvent(new Event("change"));""", select, value)


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_every_section_can_be_read(browser, finished, width, scheme):
    _, page = finished
    show(browser, page, width, scheme)
    browser.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    check_layout(browser)
    check_quiet(browser, page)
    assert browser.find_element(By.CSS_SELECTOR, "#now .state").text == "finished"
    assert "step 10 of 10" in browser.find_element(By.ID, "now").text
    labels = browser.execute_script("""return [...document.querySelectorAll("#groups tbody tr:first-child td")].map(
        (cell) => getComputedStyle(cell, "::before").content)""")
    tables = len(browser.find_elements(By.CSS_SELECTOR, "#groups table"))
    columns = ["answer", "completion", "reward", "advantage", "kept", "tokens"] * tables
    assert tables > 2 and labels == ([f'"{column}: "' for column in columns] if width == 400 else ["none"] * 6 * tables)
    titles = [title.text for title in browser.find_elements(By.TAG_NAME, "h2")]
    assert titles == ["Now", "Curves", "In numbers", "Completions", "Settings"]
    drawn = {one.text for one in browser.find_elements(By.CSS_SELECTOR, "figcaption b")}
    assert drawn >= {"rollout/entropy", "train/grad_norm", "completions kept of run", "eval/few/accuracy against steps"}


def test_the_slider_shows_the_completions_of_its_step_and_filters_leave_what_they_name(browser, finished):
    logged, page = finished
    show(browser, page)
    for place, step in ((0, 1), (4, 5), (9, 10)):
        move_slider(browser, place)
        groups = [line for line in logged if line["step"] == step]
        completions = [c for group in groups for c in sorted(group["completions"], key=lambda c: not c["kept"])]
        for row, c in zip(rows(browser), completions, strict=True):
            right = c["components"]["accuracy"] == 1
            parts = ", ".join(f"{key} {value:.3g}" for key, value in c["components"].items() if value)
            why = f"probability {c['prob']:.3g}"
            gradient = "" if c["advantage"] else ", no gradient"
            assert row == {
                "class": f"{'right' if right else 'wrong'} {'kept' if c['kept'] else 'pruned'}", "text": c["text"],
                "answer": "✓ right" if right else "✗ wrong", "advantage": f"{c['advantage']:.3g}",
                "reward": f"{c['reward']:.3g} ({parts or 'all components 0'})",
                "kept": f"kept, {why}, weight {c['weight']:.3g}{gradient}" if c["kept"] else f"pruned, {why}",
                "tokens": f"{c['tokens']}, {'finished' if c['finished'] else 'truncated'}"}
        heads = [head.text for head in browser.find_elements(By.CSS_SELECTOR, "#groups h3")]
        assert heads == [f"{x['id']}, gold answer {x['gold']}, mean reward "
                         f"{mean(c['reward'] for c in x['completions']):.3g}" for x in groups]
        prompt = browser.find_element(By.CSS_SELECTOR, "#groups pre").get_attribute("textContent")
        assert prompt == groups[0]["prompt"] and "<|im_start|>" in prompt
    assert any("<|im_end|>" in c["text"] for c in completions)
    check_quiet(browser, page)

    tests = {("kept", "kept"): lambda c: c["kept"], ("kept", "pruned"): lambda c: not c["kept"],
             ("right", "right"): lambda c: c["components"]["accuracy"] == 1,
             ("right", "wrong"): lambda c: c["components"]["accuracy"] != 1,
             ("cut", "finished"): lambda c: c["finished"], ("cut", "truncated"): lambda c: not c["finished"]}
    assert all(any(map(test, completions)) for test in tests.values())  # each filter has something to leave
    for (select, value), test in tests.items():
        choose(browser, select, value)
        assert [row["text"] for row in rows(browser)] == [c["text"] for c in completions if test(c)]
        choose(browser, select, "")
    choose(browser, "kept", "kept")
    choose(browser, "right", "right")
    both = [c["text"] for c in completions if c["kept"] and c["components"]["accuracy"] == 1]
    assert [row["text"] for row in rows(browser)] == both


COMPLETION = {"tokens": 9, "finished": True, "advantage": 0.5, "kept": True, "prob": 1.0, "weight": 1.0}


def test_a_run_without_gold_answers_is_shown_by_its_rewards_and_replies_are_shaded(browser, tmp_path):
    """No verdict is told that nobody made. Replies of an environment stand between the turns of the policy."""
    folder = write_run(tmp_path / "run", [0.1, 0.5], "seed=1")
    completions = [COMPLETION | {"text": text, "reward": reward, "components": {"custom": reward}}
                   for text, reward in {"first": 0.25, "one reply two": 0.75}.items()]
    completions[1]["turns"] = ["one ", "reply", " two"]
    rewrite_log(folder / "samples.jsonl", [{"step": 1, "id": "q/1", "prompt": "p", "gold": "",
                                            "completions": completions}])
    page = report.write_report([folder], tmp_path / "page")
    for scheme in SCHEMES:
        show(browser, page, 1280, scheme)
        reply, = browser.find_elements(By.CSS_SELECTOR, "#groups .reply")
        assert reply.text == "reply" and background(browser, "#groups .reply") != background(browser, "#groups tr")
        check_layout(browser)
    choose(browser, "right", "wrong")
    assert [(row["answer"], row["text"]) for row in rows(browser)] == [("–", "first"), ("–", "one reply two")]
    assert browser.find_element(By.CSS_SELECTOR, "#groups h3").text == "q/1, no gold answer, mean reward 0.5"


def test_an_open_page_follows_the_run_and_keeps_its_place(browser, tmp_path, request):
    """Opened at step 3 or soon after it, the page shows step 8 later, where the reader was and with his slider."""
    out, page = tmp_path / "run", tmp_path / "page" / "report.html"
    other = write_run(tmp_path / "other", [0.1, 0.5], "seed=7")
    wait = WebDriverWait(browser, 120, 0.1, [StaleElementReferenceException])  # the page may read itself anew
    run = subprocess.Popen(training(out, "steps=500"), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    request.addfinalizer(run.kill)
    wait.until(lambda _: len(runfolder.read_log(out / "samples.jsonl")) >= 2 * 3)
    again = f"until [ -f {tmp_path / 'end'} ]; do {shlex.join(program('report.py', out, other, '--out', page.parent))}; done"
    watch = subprocess.Popen(["sh", "-c", again], env=ENVIRONMENT, stderr=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True)
    request.addfinalizer(watch.kill)
    wait.until(lambda _: page.is_file())
    show(browser, page)
    assert browser.find_element(By.CSS_SELECTOR, "#now .state").text == "running"
    assert " left" in browser.find_element(By.ID, "now").text
    first = done(browser)
    move_slider(browser, 1)
    browser.execute_script("document.querySelector('#settings details').open = true")
    choose(browser, "right", "wrong")
    browser.execute_script("document.querySelector('#groups h3:last-of-type').scrollIntoView()")
    browser.execute_script("scrollBy(0, 57)")
    place = where(browser)
    wait.until(lambda _: done(browser) >= first + 5)
    assert where(browser) == pytest.approx(place, abs=1)
    assert browser.find_element(By.ID, "step-shown").text.startswith("2 of ")
    assert browser.execute_script("return document.querySelector('#settings details').open")
    assert browser.execute_script("return document.getElementById('right').value") == "wrong"
    run.send_signal(signal.SIGINT)
    assert run.wait(60) == 130
    wait.until(lambda _: browser.find_element(By.CSS_SELECTOR, "#now .state").text == "stopped")
    assert browser.find_element(By.TAG_NAME, "body").get_attribute("data-live") is None
    (tmp_path / "end").touch()
    assert watch.wait(60) == 0 and "report.html" in watch.stdout.read()
    check_quiet(browser, page)


def done(browser) -> int:
    return browser.execute_script("return Number(document.querySelector('#now progress').value)")


def where(browser) -> list[float]:
    """Where the reader's group and the row below it stand on the screen."""
    return browser.execute_script("""return [...document.querySelectorAll("#groups h3, #groups tbody tr")].map(
        (one) => one.getBoundingClientRect().top)""")


EVIL = ("<script>window.ran = 1</script>", "</script><img src=x onerror=\"window.ran = 2\">", "<!-- <script>",
        "a | b || c", "{{ 7 * 7 }}", "]]> & &amp; \" ' ` ${window.ran = 3}", "\u2028\u202e\ud800",
        "<svg onload='window.ran=4'>")


def test_no_text_of_a_model_or_user_runs_or_breaks_the_page(browser, tmp_path):
    everything = " ".join(EVIL)
    folder = write_run(tmp_path / "a <img src=x onerror=window.ran=5> | b", [0.1, 0.5], "seed=1",
                       f"data.system_prompt={everything.encode('ascii', 'ignore').decode()}", state=None)
    other = write_run(tmp_path / "<script>window.ran=6<script>", [0.1, 0.5], "seed=1")
    (folder / "state.json").write_text(json.dumps({"state": "failed", "error": everything}) + "\n")
    completion = COMPLETION | {"text": everything, "reward": 1.0, "components": {"accuracy": 1.0, EVIL[1]: 0.5}}
    rewrite_log(folder / "samples.jsonl", [{"step": 1, "id": EVIL[0], "prompt": everything, "gold": EVIL[1],
                                            "completions": [completion] * 2}])
    rewrite_log(folder / "metrics.jsonl", [*runfolder.read_log(folder / "metrics.jsonl"), {"step": 2, EVIL[0]: 1.0}])
    page = report.write_report([folder, other], tmp_path / EVIL[3])
    show(browser, page)
    assert browser.execute_script("return window.ran") is None
    assert browser.find_elements(By.CSS_SELECTOR, "img, iframe, #groups script, svg script, [onerror], [onload]") == []
    assert len(browser.find_elements(By.TAG_NAME, "script")) == 2
    seen = browser.execute_script("return document.body.textContent.toWellFormed()")
    for text in (*EVIL[:6], EVIL[7]):
        assert text in seen
    assert [row["text"] for row in rows(browser)] == [everything.replace("\ud800", "�")] * 2
    for width in WIDTHS:
        show(browser, page, width)
        check_layout(browser)
        check_quiet(browser, page)
    browser.execute_script("""const script = document.createElement("script"); script.text = "window.ran = 7";
        document.body.append(script)""")
    assert browser.execute_script("return window.ran") is None  # the page lets no script run but its own
