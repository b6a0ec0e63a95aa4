"""Clicks through the dashboard in headless Chromium: pages, keyboard, a hostile rollout, dark and light.

    python tests/interop/dashboard.py BINARY RUNS SCREENSHOTS

RUNS is a folder with at least one run. Needs `playwright` from PyPI, and Debian's `chromium`.
"""

import json
import pathlib
import shutil
import sys
import tempfile

from playwright.sync_api import sync_playwright
from served import served

ATTACK = "<script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"


def plant(runs):
    """Copies the first run and lets its first episode say the attack everywhere that text can be."""
    source = next(run for run in sorted(runs.iterdir()) if (run / "run.toml").is_file())
    run = runs / "hostile"
    shutil.copytree(source, run, ignore=shutil.ignore_patterns("checkpoints"))
    rows = (run / "rollouts/step-1.jsonl").read_text().splitlines()
    row = json.loads(rows[0])
    row["task_id"] = ATTACK
    for message in row["messages"]:
        message["content"] = ATTACK
    for call in row["messages"][1].get("tool_calls", []):
        call["function"] = {"name": ATTACK, "arguments": {ATTACK: ATTACK}}
    rows[0] = json.dumps(row)
    (run / "rollouts/step-1.jsonl").write_text("\n".join(rows) + "\n")
    return source.name


def check(page, url, name, shots, scheme):
    outside, problems = [], []
    page.on("request", lambda request: None if request.url.startswith((url, "blob:", "data:")) else outside.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
    shot = lambda what: page.screenshot(path=shots / f"{what}-{scheme}.png", full_page=True)

    page.goto(url)
    page.get_by_role("heading", name="Runs").wait_for()
    page.get_by_role("link", name=name, exact=True).wait_for()
    shot("runs")
    page.get_by_label("Name contains").fill("no such run")
    page.get_by_text("No run is like that.").wait_for()
    page.get_by_label("Name contains").fill("")

    # By the keyboard alone.
    link = page.get_by_role("link", name=name, exact=True)
    link.focus()
    page.keyboard.press("Enter")
    chart = page.get_by_role("img", name="Reward, steps").first
    chart.wait_for()
    chart.focus()
    page.keyboard.press("Home")
    page.get_by_text("at step 1").first.wait_for()
    page.get_by_role("heading", name="Machine").wait_for()
    page.get_by_role("img", name="Memory,").first.wait_for()
    assert page.locator("polygon").count() > 0, "a step's time is drawn in parts"
    shot("run")
    page.get_by_text("Numbers").first.click()
    page.get_by_role("region", name="Numbers of Reward", exact=True).locator("tbody tr").nth(1).wait_for()

    page.get_by_role("link", name="Rollouts").click()
    page.get_by_role("button", name="Filter").wait_for()
    rows = page.locator("tbody tr").count()
    page.get_by_label("Reward from").fill("0.5")
    page.get_by_role("button", name="Filter").click()
    page.wait_for_timeout(1000)
    assert 0 < page.locator("tbody tr").count() <= rows
    shot("rollouts")
    page.locator("tbody a").first.click()
    page.get_by_role("heading", name="Conversation").wait_for()
    assert page.get_by_text("[object").count() == 0
    assert "def f" in page.locator(".call pre").first.inner_text()
    ran = page.locator("details.ran").first
    assert "fuel" in ran.locator("summary").inner_text() and not ran.locator("pre, p").first.is_visible()
    page.get_by_role("button", name="Unfold what was run").press("Enter")
    ran.locator("pre, p").first.wait_for()
    tokens = page.get_by_role("group", name="Tokens")
    assert tokens.locator("span.on").count() > 0 and tokens.locator("span.off").count() > 0
    tokens.locator("span.on").first.click()
    page.get_by_text("sampled, in the loss").last.wait_for()
    page.keyboard.press("Tab")
    tokens.focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Advantage").click()
    shot("episode")
    with page.expect_download() as download:
        page.get_by_role("button", name="Download as JSON").click()
    assert "trace" in json.loads(pathlib.Path(download.value.path()).read_text())
    page.get_by_label("Beside it").select_option(index=1)
    page.locator("article").nth(1).wait_for()
    shot("beside")

    page.goto(f"{url}/#/run/hostile/rollouts/1/0")
    page.get_by_role("heading", name="<script>").wait_for()
    assert page.get_by_text("<script>").count() > 1, "the attack is shown as text"
    page.goto(f"{url}/#/run/hostile/rollouts/1")
    page.get_by_role("table").wait_for()
    page.wait_for_timeout(500)
    assert "owned" not in page.title() and page.locator("main img, main script").count() == 0
    assert not outside, outside
    assert not problems, problems


def check_going_on(page, url, name):
    """A look that fails ends nothing, and a name that is no code of anything breaks nothing."""
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.goto(f"{url}/#/run/%E0%A4%A")
    page.get_by_role("alert").wait_for()
    page.goto(f"{url}/#/run/{name}")
    page.get_by_role("heading", name="Learning").wait_for()
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_text("No news").wait_for()
    page.unroute("**/api/**")
    page.get_by_text("No news").wait_for(state="detached", timeout=60_000)
    assert not problems, problems


def main(binary, runs, shots):
    shots = pathlib.Path(shots)
    shots.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        copy = pathlib.Path(scratch) / "runs"
        shutil.copytree(runs, copy)
        name = plant(copy)
        with served(binary, "--dashboard", str(copy)) as (url, _), sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            for scheme in ("light", "dark"):
                context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 800})
                check(context.new_page(), url, name, shots, scheme)
                check_going_on(context.new_page(), url, name)
                context.close()
            browser.close()
    print("the dashboard was clicked through, light and dark")


main(*sys.argv[1:])
