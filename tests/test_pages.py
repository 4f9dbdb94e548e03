"""Both pages in a real Chromium, without a window: what people do with them, by mouse and keys."""
import json
import os
import re
import shutil
import subprocess
import tarfile
from dataclasses import replace
from itertools import pairwise
from urllib.parse import parse_qs, urlsplit

import pytest
from helpers import ROOT, cache_folder, few, needs, slow
from servers import CFG, chat_model, serving

from nanoeuler_parts.chat.sampling import ChatSampling

pytestmark = pytest.mark.cli
needs("starlette")
PAGES = ROOT / "nanoeuler_parts/serve/pages"
WIDE, NARROW = {"width": 1280, "height": 800}, {"width": 390, "height": 780}
AXE = "axe-core@4.14.1"


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright comes with "
                                     "pip install -e .[dev]")
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))),
                None)
    if path is None:
        pytest.skip("there is no Chromium here")
    root = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=path, args=root)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    records = [{"step": i, "loss": 6 - i / 40, "heads": [6 - i / 40, 6 - i / 50], "lr": 1e-3,
                "norm": 1.0, "bits_per_byte": 4 - i / 60, "ms": 100.0, "tokens_per_s": 2e4}
               for i in range(1, 81)]
    records.append({"step": 80, "val_bits_per_byte": 2.7, "windows": None})
    for name in ("first.jsonl", "second.jsonl"):
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in records),
                                   encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def address(tokenizer, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        file = chat_model(folder / "little.bin", tokenizer, replace(CFG, seq_len=400))
        with serving(file, speculate=2, tokens=1_000_000) as (address, _):
            yield address


@pytest.fixture(scope="module")
def tab(browser):
    """A page for one test after the other: a context of its own costs Chromium a second."""
    context = browser.new_context(viewport=WIDE)
    yield context.new_page()
    context.close()


def cleared(page):
    """As a new page is: without routes, and without what the document stored"""
    origin = page.evaluate("sessionStorage.clear(), location.origin")
    page.unroute_all(behavior="ignoreErrors")
    page.goto("about:blank")
    page.context.new_cdp_session(page).send(
        "Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})


@pytest.fixture
def opened(browser, tab):
    """A function that opens a page; any complaint of the browser fails the test, except for
    requests that fail where `failing` is set.  routes: {pattern: function of a Playwright route};
    clock: may the test move the page's clock?  The first page of a test is the shared one, unless
    the clock or an option belongs to a context."""
    problems, listeners, contexts, shared = [], [], [], []

    def open_page(url, failing=False, routes=(), clock=False, viewport=WIDE, **options):
        if clock or options or shared:
            contexts.append(browser.new_context(viewport=viewport, **options))
            page = contexts[-1].new_page()
        else:
            shared.append(page := tab)
            page.set_viewport_size(viewport)
        page.set_default_timeout(60_000)

        def complain(message):
            expected = failing and message.text.startswith("Failed to load resource")
            if message.type == "error" and not expected:
                problems.append(message.text)

        heard = {"pageerror": lambda error: problems.append(str(error)), "console": complain}
        for event, listener in heard.items():
            page.on(event, listener)
            listeners.append((page, event, listener))
        for pattern, answer in dict(routes).items():
            page.route(pattern, answer)
        if clock:
            page.clock.install()
        page.goto(url)
        return page
    yield open_page
    for page, event, listener in listeners:
        page.remove_listener(event, listener)
    for context in contexts:
        context.close()
    for page in shared:
        cleared(page)
    assert not problems


def ask(page, text, tokens=30):
    page.evaluate("n => localStorage.setItem('nanoeuler.settings', JSON.stringify("
                  "{max_tokens: n, seed: 1, temperature: 0.6}))", tokens)
    page.reload()
    page.fill("#box", text)
    page.press("#box", "Enter")
    page.wait_for_selector(".message.assistant .token", state="attached")
    finished(page)


def wait(page, holds):
    """Until a JavaScript expression holds.  (Playwright's own would need eval, which our policy
    forbids.)"""
    for _ in range(3000):
        if page.evaluate(holds):
            return
        page.wait_for_timeout(20)
    raise AssertionError(holds)


def wait_for(page, holds):
    """Until a condition of the test holds"""
    for _ in range(10_000):                  # 200 seconds, on a busy machine
        if holds():
            return
        page.wait_for_timeout(20)
    raise AssertionError("it did not happen")


def a_token(page):
    """The number of a token that can be seen, after the first: one may be a part of a character"""
    return page.evaluate("Number([...document.querySelectorAll('.token')].find("
                         "t => t.dataset.i > 0 && t.textContent.trim()).dataset.i)")


def finished(page):
    page.wait_for_selector("#send:not([hidden])")


def answers(page):
    return page.locator(".message.assistant .text").all_inner_texts()


def test_a_conversation(opened, address):
    """Send, stream, edit, ask again, branches, go on; and it is still there when one comes back."""
    page = opened(address)
    ask(page, "What is a cat?")
    assert page.locator(".message").count() == 2
    [first] = answers(page)
    assert page.inner_text("body").count("first token after") == 1
    assert "of 400" in page.inner_text("#context-said")
    page.click("text=Edit")
    page.fill(".editor", "What is a dog?")
    page.press(".editor", "Enter")
    finished(page)
    assert page.locator(".message.user .text").all_inner_texts() == ["What is a dog?"]
    assert "2 of 2" in page.inner_text(".message.user .tools")
    page.click("[aria-label='Previous branch']")
    assert page.locator(".message.user .text").all_inner_texts() == ["What is a cat?"]
    assert answers(page) == [first]
    page.click("text=Regenerate")
    finished(page)
    assert "2 of 2" in page.inner_text(".message.assistant .tools")
    count = page.locator(".token").count()
    page.click("text=Continue")
    finished(page)
    assert page.locator(".token").count() > count
    shown = answers(page)
    page.reload()
    page.wait_for_selector(".message.assistant .token", state="attached")
    assert answers(page) == shown
    page.click("#new")
    assert page.locator(".message").count() == 0 and page.locator("#list li").count() == 2


def test_stop(opened, address):
    page = opened(address)
    page.evaluate("localStorage.setItem('nanoeuler.settings', JSON.stringify({max_tokens: 1e6}))")
    page.reload()
    page.fill("#box", "Tell me all.")
    page.press("#box", "Enter")
    page.wait_for_selector(".message.assistant .token", state="attached")
    page.click("#stop")
    finished(page)
    assert page.locator(".token").count() > 0
    used, most = map(int, page.inner_text("#context-said").split(" of "))
    assert used >= min(most, page.locator(".token").count() + 1)         # the prompt counts, too
    assert page.locator(".problem").count() == 0
    page.fill("#box", "And more.")                       # the server takes the next one
    page.press("#box", "Enter")
    page.wait_for_selector(".message:nth-child(4) .token", state="attached")
    page.keyboard.press("Escape")
    finished(page)


def test_what_is_sent_before_the_model_is_known(opened, address):
    """Somebody is quicker than the model's card: the question waits for it, and is asked once."""
    page, held = opened(address), []
    page.wait_for_selector("#open-card:has-text('Model: ')")         # its own request is over
    page.route("**/api/model", lambda route: held.append(route))
    with page.expect_request("**/api/model"):
        page.reload()
    page.fill("#box", "Too early?")
    page.press("#box", "Enter")
    page.press("#box", "Enter")
    assert page.locator(".message").count() == 0 and page.input_value("#box") == "Too early?"
    held[0].continue_()
    page.wait_for_selector(".message.assistant .token", state="attached")
    finished(page)
    assert page.locator(".message").count() == 2 and page.input_value("#box") == ""


@pytest.mark.slow
def test_a_long_answer_does_not_hold_up_the_page(opened, address):
    """20,000 tokens that come at once; a page that looks at all of them for each takes minutes."""
    page, n = opened(address), 20_000
    mark = {"id": 65, "text": "e", "bytes": [101], "accepted": False}
    choice = {"index": 0, "delta": {"content": "e"}, "finish_reason": None, "tokens": [mark]}
    first = json.dumps({"choices": [{**choice, "prompt_tokens": [66]}]})
    rest = json.dumps({"choices": [choice]})
    body = "".join(f"data: {event}\n\n" for event in [first, *[rest] * (n - 1), "[DONE]"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(
        body=body, content_type="text/event-stream"))
    page.fill("#box", "Tell me all.")
    page.press("#box", "Enter")
    page.wait_for_selector(".message.assistant .tools >> text=Look inside")
    assert page.locator(".token").count() == n and answers(page) == ["e" * n]


def test_a_token_its_rivals_and_the_trajectory(opened, address):
    page = opened(address)
    ask(page, "So?")
    [before] = answers(page)
    i = a_token(page)
    page.click(f".token[data-i='{i}']")
    page.wait_for_selector("#rivals li")
    assert page.locator("#rivals li").count() == 10
    assert page.inner_text("#inside-title").startswith(f"Token {i + 1} of ")
    assert "rank" in page.inner_text("#chosen")
    assert page.locator("#drafts li").count() >= 2
    page.check("#trajectory")
    page.wait_for_selector("#steps svg")
    assert page.locator("#steps tbody tr").count() == 5  # the embedding, and two layers' halves
    assert page.locator(".token.accepted").count() > 0
    title = "document.querySelector('#inside-title').textContent"
    page.click("#after")
    wait(page, f"{title}.startsWith('Token {i + 2} ')")
    page.click("#before")
    wait(page, f"{title}.startsWith('Token {i + 1} ')")
    page.wait_for_selector("#steps svg")
    rival = page.locator("#rivals button:not(.is)").first
    named = rival.text_content()
    rival.click()
    page.wait_for_selector(".message.assistant [aria-label='Previous branch']")
    finished(page)
    assert "2 of 2" in page.inner_text(".message.assistant .tools")
    said = page.locator(f".token[data-i='{i}']").text_content()
    part = "\\x" in named                   # bytes of a character: with the next it is another
    assert part or said.strip() in named
    assert page.locator(".token").count() > i + 5
    page.click("[aria-label='Previous branch']")
    assert answers(page) == [before]


def test_by_keys_alone(opened, address):
    page = opened(address)
    ask(page, "So?")
    page.focus(".message.assistant .tools button >> text=Look inside")
    page.keyboard.press("Enter")
    page.wait_for_selector("#rivals li")
    assert page.evaluate("document.activeElement.id") == "inside"
    page.keyboard.press("ArrowRight")
    wait(page, "document.querySelector('#inside-title').textContent.startsWith("
                           "'Token 2')")
    page.keyboard.press("Escape")
    page.wait_for_selector("#inside", state="hidden")
    page.focus("#open-settings")
    page.keyboard.press("Enter")
    page.wait_for_selector("#settings[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#settings:not([open])", state="attached")


HOSTILE = "<img src=x onerror='document.title=1'><script>document.title=2</script><b>bold</b>"


def test_what_is_said_is_text_and_never_html(opened, address):
    page = opened(address)
    ask(page, HOSTILE)
    assert page.locator(".message.user .text").inner_text() == HOSTILE
    assert page.locator("#log img, #log script, #log b").count() == 0
    assert page.title() not in ("1", "2")


def test_export_and_import(opened, address, tmp_path):
    page = opened(address)
    ask(page, "Keep this.")
    shown = answers(page)
    with page.expect_download() as download:
        page.click("#export")
    path = tmp_path / "kept.json"
    download.value.save_as(path)
    page.click("#list .remove")
    assert page.locator(".message").count() == 0
    page.set_input_files("#file", path)
    page.wait_for_selector(".message.assistant .token", state="attached")
    assert answers(page) == shown
    (tmp_path / "bad.json").write_text('{"conversations": [{"id": 1}]}', encoding="utf-8")
    page.set_input_files("#file", tmp_path / "bad.json")
    wait(page, "document.querySelector('#notice').textContent.includes('not imported')")
    assert answers(page) == shown


def test_a_run_is_watched(opened, address, folder):
    page = opened(f"{address}/training")
    page.wait_for_selector("#charts svg")
    assert page.locator("#charts figure").count() == 5
    assert "80" in page.inner_text("#tiles")
    page.check("#runs label:not(:has(:checked)) input")
    wait(page, "document.querySelectorAll('#charts figure:first-child polyline').length === 4")
    with open(folder / "first.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 81, "loss": 1.0, "bits_per_byte": 1.0, "lr": 1e-3, "norm": 1.0, '
                '"ms": 1.0, "tokens_per_s": 1.0}\n{"step": 81, "sample": "And so <b>on</b>"}\n')
    wait(page, "document.querySelector('#charts svg').ariaLabel.includes('step 81')")
    page.wait_for_selector("#samples article")
    assert page.inner_text("#samples pre") == "And so <b>on</b>"


def steps(n, **more):
    return [{"step": i, "loss": 6 - i / 40, "bits_per_byte": 4 - i / 60, "lr": 1e-3, "norm": 1.0,
             "ms": 100.0, "tokens_per_s": 2e4, **more} for i in range(1, n + 1)]


class Logs(dict):
    """{name: (time of the last write, records)}, in place of the server's logs"""
    now = 0                                  # the server's time; a later write counts as just now

    def routes(self):
        self.asked = []                      # (name, first record) of each read
        return {"**/api/runs": self.runs, "**/api/run?*": self.records}

    def runs(self, route):
        newest = sorted(self.items(), key=lambda item: -item[1][0])
        route.fulfill(json={"runs": [
            {**latest(records), "name": name, "changed": changed, "age": max(0, self.now - changed)}
            for name, (changed, records) in newest]})

    def records(self, route):
        asked = parse_qs(urlsplit(route.request.url).query)
        name, start = asked["name"][0], int(asked["from"][0])
        self.asked.append((name, start))
        records = self[name][1]
        raw = json.dumps({"records": records[start:], "next": len(records), "anew": False,
                          "more": False})
        route.fulfill(body=raw, content_type="application/json")


def latest(records):
    step = next((r for r in reversed(records) if isinstance(r, dict) and "loss" in r), {})
    return {name: step.get(name) for name in ("step", "n_steps", "ms")}


def polled(page, holds):
    """Until a condition holds; the clock moves on, so that each poll is due at once."""
    for _ in range(1000):
        if holds():
            return
        page.clock.fast_forward(2100)
        page.wait_for_timeout(20)
    raise AssertionError("no poll brings it about")


def first_chart(page):
    return page.locator("#charts svg[role=img]").first.get_attribute("aria-label")


def named(page):
    """The runs in the order of the list"""
    return page.locator("#runs input").evaluate_all("boxes => boxes.map((box) => box.name)")


def tile(page, name):
    return page.locator(f"#tiles details:has(.name:text-is('{name}')) .value").inner_text()


@pytest.mark.parametrize(("planned", "name", "left"), [
    (200, "time left", "12 s"), (80, "ended", "0 s ago"), (None, "time left", "not known yet")])
def test_time_left_of_a_run_by_minutes(opened, address, planned, name, left):
    """Its log records the steps planned so far; it may end before it writes any checkpoint."""
    logs = Logs({"run.jsonl": (1000, steps(80, n_steps=planned))})
    page = opened(f"{address}/training", routes=logs.routes())
    page.wait_for_selector("#tiles")
    assert tile(page, name) == left
    assert tile(page, "tokens per second") == "20,000"


def test_a_page_without_curves_says_what_to_do(opened, address):
    page = opened(f"{address}/training", routes=Logs({"run.jsonl": (9, steps(9))}).routes())
    page.wait_for_selector("#charts svg")
    assert not page.is_visible("#choose")
    page.click("#runs input")
    assert page.inner_text("#choose") == "Choose a run in the list above to see its curves."
    page = opened(f"{address}/training", routes=Logs({}).routes())
    page.wait_for_selector("#none")
    assert "python nanoeuler.py train" in page.inner_text("#none")
    assert not page.is_visible("#choose")


def test_the_newest_run_is_first_and_followed_until_the_user_chooses(opened, address):
    logs = Logs({"old.jsonl": (1000, steps(20))})
    page = opened(f"{address}/training", routes=logs.routes(), clock=True)
    page.wait_for_selector("#charts svg")
    logs["new.jsonl"] = 2000, steps(30)
    polled(page, lambda: "step 30" in first_chart(page))
    assert page.inner_text("#follow") == "Now following new.jsonl."
    assert named(page) == ["new.jsonl", "old.jsonl"]
    assert page.locator("#runs :checked").count() == 1 and page.is_checked("[name='new.jsonl']")
    page.uncheck("[name='new.jsonl']")
    page.check("[name='old.jsonl']")
    logs["newer.jsonl"] = 3000, steps(40)
    polled(page, lambda: "newer.jsonl is training" in page.inner_text("#follow"))
    assert page.is_checked("[name='old.jsonl']") and "step 20" in first_chart(page)
    page.click("#follow >> text=Follow this run")
    polled(page, lambda: "step 40" in first_chart(page))
    assert named(page) == ["newer.jsonl", "new.jsonl", "old.jsonl"]
    assert page.inner_text("#follow") == "Now following newer.jsonl."


@pytest.mark.slow
def test_an_older_run_that_is_resumed_is_followed(opened, address):
    """Two runs that are written at the same time keep their places."""
    logs = Logs({"a.jsonl": (1000, steps(20)), "b.jsonl": (900, steps(30))})
    page = opened(f"{address}/training", routes=logs.routes(), clock=True)
    page.wait_for_selector("#charts svg")
    logs["b.jsonl"] = 1010, steps(31)
    before = len(logs.asked)
    polled(page, lambda: len(logs.asked) > before + 1)
    assert named(page) == ["a.jsonl", "b.jsonl"] and page.is_checked("[name='a.jsonl']")
    logs["b.jsonl"] = 2000, steps(32)
    polled(page, lambda: "step 32" in first_chart(page))
    assert named(page) == ["b.jsonl", "a.jsonl"]


@pytest.mark.slow
def test_eight_runs_can_be_told_apart(opened, address):
    """By color, and by a number at the end of the curve, even where all end together."""
    logs = Logs({f"{c}.jsonl": (1000, steps(20)) for c in "abcdefgh"})
    page = opened(f"{address}/training", routes=logs.routes())
    page.wait_for_selector("#charts svg")
    for box in page.locator("#runs input").all():
        box.check()
    wait(page, "document.querySelectorAll('#charts figure:first-child .end').length === 8")
    drawn = page.locator("#charts figure:first-child polyline").all()
    assert {line.get_attribute("class") for line in drawn} == {f"line c{i} d0" for i in range(8)}
    ends = page.locator("#charts figure:first-child .end")
    assert sorted(ends.all_text_contents()) == [*"12345678"]
    heights = sorted(float(end.get_attribute("y")) for end in ends.all())
    assert all(b - a > 9 for a, b in pairwise(heights)) and 0 < heights[0] < heights[-1] < 210
    legend = page.locator("#charts figure:first-child .legend > button").all_inner_texts()
    assert {text.strip() for text in legend} == {f"{i + 1} · {c}" for i, c in enumerate("hgfedcba")}


@pytest.mark.slow
def test_the_charts_are_explained(opened, address):
    page = opened(f"{address}/training", routes=Logs({"a.jsonl": (1, steps(9))}).routes())
    page.wait_for_selector("#charts svg")
    said = page.inner_text("#charts")
    assert "How far a step moves the weights" in said
    assert "Length of the gradient before clipping" in said


def test_the_loss_of_dpo_is_explained_and_measured_to_the_end(opened, address):
    """Its own loss, in its validations too; beside another run both are explained."""
    pairs = [r | {"margin": 0.1} if "loss" in r else r for r in steps(9)]
    logs = Logs({"a.jsonl": (9, [*pairs, {"step": 9, "val_loss": 0.5}]), "b.jsonl": (1, steps(9))})
    page = opened(f"{address}/training", routes=logs.routes())
    page.wait_for_selector("#charts svg")
    loss = page.locator("#charts figure:nth-child(2)")
    assert "Loss of dpo" in loss.inner_text() and "cross-entropy" not in loss.inner_text()
    assert loss.locator("circle").count() == 1
    page.locator("#runs input").nth(1).check()
    wait(page, "document.querySelector('#charts').innerText.includes('Runs of dpo')")
    assert "cross-entropy" in loss.inner_text()
    assert [x.strip() for x in loss.locator(".legend > *").all_inner_texts()] == ["2 · a", "1 · b"]


def test_rewards_have_a_chart_in_place_of_the_loss(opened, address):
    rewards = [{"step": 0, "val_reward": 0.25},
               *(r | {"reward": 0.5} if "loss" in r else r for r in steps(9))]
    logs = Logs({"a.jsonl": (9, rewards), "b.jsonl": (1, steps(9))})
    page = opened(f"{address}/training", routes=logs.routes())
    page.wait_for_selector("#charts svg")
    titles = page.locator("#charts figcaption")
    assert "Reward" in titles.all_inner_texts() and "Loss" not in titles.all_inner_texts()
    reward = page.locator("#charts figure", has=page.get_by_text("Reward", exact=True))
    assert reward.locator("circle").count() == 1 and "Higher is better" in reward.inner_text()
    page.locator("#runs input").nth(1).check()
    wait(page, "document.querySelector('#charts').innerText.includes('cross-entropy')")
    assert "Reward" in titles.all_inner_texts()


@pytest.mark.slow
def test_several_runs_share_the_sampled_texts(opened, address):
    """The legend names each run once, although held-out text has a curve beside the batch."""
    logs = Logs({f"{c}.jsonl": (1000 - i, [*steps(9), {"step": 9, "val_bits_per_byte": 3.0},
                                           {"step": 8, "sample": f"old {c}"},
                                           {"step": 9, "sample": f"new {c}"}])
                 for i, c in enumerate("abcd")})
    page = opened(f"{address}/training", routes=logs.routes())
    page.wait_for_selector("#charts svg")
    for box in page.locator("#runs input").all():
        box.check()
    wait(page, "document.querySelectorAll('#charts figure:first-child .end').length === 4")
    said = page.locator("#samples pre").all_inner_texts()
    assert said == [f"{age} {c}" for c in "abcd" for age in ("new", "old")]
    assert page.locator("#charts figure:first-child polyline").count() == 8
    assert page.locator("#charts figure:first-child .faint").count() == 4
    assert page.locator("#charts figure:first-child .legend > button").count() == 4


@pytest.mark.slow
def test_polls_do_not_overlap(opened, address):
    """A slow server: the page asks again after the answer, and reads no record twice."""
    logs, held = Logs({"a.jsonl": (1, steps(9))}), []
    routes = logs.routes() | {"**/api/run?*": lambda route: held.append(route)}
    page = opened(f"{address}/training", routes=routes, clock=True)
    wait(page, "document.querySelector('#runs input') !== null")
    page.uncheck("#runs input")
    page.check("#runs input")
    for _ in range(5):
        page.clock.fast_forward(2100)
        page.wait_for_timeout(20)
    assert len(held) == 1
    page.route("**/api/run?*", logs.records)
    logs.records(held[0])
    wait(page, "!document.querySelector('#tiles').hidden")
    polled(page, lambda: len(logs.asked) > 1)
    assert logs.asked[:2] == [("a.jsonl", 0), ("a.jsonl", 9)]


HOSTILE_RECORDS = [
    {"step": 1, "loss": 1e300, "heads": {"length": 1e9}, "norm": -1e300, "ms": 1e300},
    {"step": 2, "loss": 1e11, "heads": [1.0] * 65, "norm": 1e14, "ms": 1.0, "lr": 5e-324},
    {"step": 3, "loss": 1e11 + 2e-5, "heads": ["1", None], "norm": 1e14 + 0.02, "ms": 1.0},
    {"step": 4, "loss": "5", "heads": "abc", "norm": [], "ms": 1.0, "sample": {"length": 1e9}},
    {"step": 5, "heads": [2.0, 1e300], "lr": 1e-323, "ms": 1.0, "sample": "x" * 100_000},
    {"step": 1.5, "loss": 3.0}, {"step": "7"}, {"step": 1e300, "loss": 2.0}, {"loss": 2.0}, None, 3,
    [], {"step": -1, "loss": 2.0}, {"step": 6, "loss": 1e11, "n_steps": "many", "ms": 1.0}]


def test_a_hostile_log_does_not_freeze_the_page(opened, address):
    page = opened(f"{address}/training",
                  routes=Logs({"a.jsonl": (1, HOSTILE_RECORDS)}).routes())
    page.wait_for_selector("#charts svg")
    assert page.inner_text("#announce") == ""
    for svg in page.locator("#charts svg[role=img]").all():
        assert svg.locator("text").count() <= 24         # 12 ticks of each axis
        assert "NaN" not in svg.inner_html() and "Infinity" not in svg.inner_html()
    assert page.locator("#charts figcaption").first.inner_text() == "Loss"
    assert tile(page, "step") == "6"
    assert len(page.inner_text("#samples pre")) == 4000


@pytest.mark.slow
def test_a_long_log_is_kept_within_bounds(opened, address):
    """60,000 steps are thinned to 30,000; of the 15,000 that follow, all are kept: a third of the
    points, where they would be a fifth."""
    records = [{"step": i, "loss": 1.0, "ms": 1.0} for i in range(1, 60_001)]
    records += [{"step": 60_000, "sample": f"text {i}"} for i in range(50)]
    logs = Logs({"a.jsonl": (1, records)})
    page = opened(f"{address}/training", routes=logs.routes(), clock=True)
    page.wait_for_selector("#charts svg")
    assert page.locator("#samples article").count() == 8
    assert page.locator("#samples pre").first.inner_text() == "text 49"
    records += [{"step": i, "loss": 1.0, "ms": 1.0} for i in range(60_001, 75_001)]
    polled(page, lambda: "step 74" in first_chart(page))
    points = page.locator("#charts polyline").first.get_attribute("points").split()
    xs = [float(point.split(",")[0]) for point in points]
    there = xs[0] + (xs[-1] - xs[0]) * 60 / 75
    assert 90 <= sum(x > there for x in xs) <= 110 and len(xs) <= 300


@pytest.mark.slow
def test_a_run_with_gaps_has_few_parts(opened, address):
    """Each second step lacks the number, which would end a part of the curve at each of them."""
    records = [{"step": i, "ms": 1.0, **({"loss": 1.0} if i % 2 else {})} for i in range(1, 2001)]
    page = opened(f"{address}/training", routes=Logs({"a.jsonl": (1, records)}).routes())
    page.wait_for_selector("#charts svg")
    assert page.locator("#charts polyline").count() <= 50


# ---- conversations that are read back
def tree(**changes):
    """A conversation of a question and an answer, as the page writes it; changes: {id: fields}"""
    nodes = {"q": {"id": "q", "parent": None, "children": ["a"], "role": "user", "text": "Q?"},
             "a": {"id": "a", "parent": "q", "children": [], "role": "assistant", "prompt": [1],
                   "tokens": [[65, "A", 0]], "finish": "stop"}}
    for name, fields in changes.items():
        nodes[name] = {"id": name, "role": "user", "text": "", "children": [],
                       **nodes.get(name, {}), **fields}
    return {"id": "c", "title": "A sound one", "changed": 1, "nodes": nodes, "roots": ["q"],
            "shown": "a"}


UNSOUND = {
    "parents in a circle": tree(x={"parent": "y", "children": ["y"]},
                                y={"parent": "x", "children": ["x"]}) | {"shown": "x"},
    "children in a circle": tree(a={"children": ["q"]}),
    "a child of two": tree(a={"children": ["x"]}, q={"children": ["a", "x"]}, x={"parent": "a"}),
    "another parent": tree(a={"parent": "a"}),
    "a child twice": tree(q={"children": ["a", "a"]}),
    "no such child": tree(a={"children": ["constructor"]}),
    "not reached": tree(x={"parent": None}),
    "a root twice": tree() | {"roots": ["q", "q"]},
    "no roots": tree() | {"roots": []},
    "no list": tree(q={"children": {"length": 1e9}}),
    "no tokens": tree(a={"tokens": [["A", 1]], "text": None}),
    "an id of a selector": tree() | {"id": '"]'},
    "null": None,
}


@pytest.mark.parametrize("where", ["file", "storage"])
def test_unsound_conversations_are_left_out(opened, address, tmp_path, where):
    """Whatever a file or the storage holds, the page shows the sound one, and keeps no other."""
    page = opened(address)
    page.evaluate("localStorage.clear()")
    stored = {"version": 1, "current": "c", "conversations": [*UNSOUND.values(), tree()]}
    if where == "file":
        (tmp_path / "some.json").write_text(json.dumps(stored), encoding="utf-8")
        page.set_input_files("#file", tmp_path / "some.json")
    else:
        page.evaluate("s => localStorage.setItem('nanoeuler.conversations', s)",
                      json.dumps(stored))
        page.reload()
    page.wait_for_selector(".message.assistant .token")
    wait(page, "document.querySelector('#notice').textContent.includes('left out')")
    assert f"{len(UNSOUND)} conversations" in page.inner_text("#notice")
    assert answers(page) == ["A"] and page.locator("#list li").count() == 1
    page.click("#new")                       # saves
    kept = json.loads(page.evaluate("localStorage.getItem('nanoeuler.conversations')"))
    assert [c["title"] for c in kept["conversations"]] == ["", "A sound one"]


@pytest.mark.parametrize("why", few(UNSOUND, 2))
def test_an_unsound_conversation_is_not_imported(opened, address, tmp_path, why):
    page = opened(address)
    (tmp_path / "bad.json").write_text(json.dumps({"conversations": [UNSOUND[why]]}),
                                       encoding="utf-8")
    page.set_input_files("#file", tmp_path / "bad.json")
    wait(page, "document.querySelector('#notice').textContent.includes('not imported')")
    assert page.evaluate("localStorage.getItem('nanoeuler.conversations')") is None


@pytest.mark.slow
def test_a_conversation_that_cannot_be_shown_is_not_kept(opened, address, tmp_path):
    """Neither if it has too many tokens, nor if the page fails at it for another reason."""
    page = opened(address)
    fault = "void (Element.prototype.replaceChildren = () => { throw new Error('planted'); })"
    for tokens, planted in ((130_000, "null"), (1, fault)):
        nodes = tree(a={"tokens": [[1, "a", 0]] * tokens, "text": None})
        nodes |= {"roots": ["q"], "shown": "a"}
        (tmp_path / "long.json").write_text(json.dumps({"conversations": [nodes]}),
                                            encoding="utf-8")
        page.evaluate(planted)
        page.set_input_files("#file", tmp_path / "long.json")
        wait(page, "document.querySelector('#notice').textContent.includes('not imported')")
        assert page.evaluate("localStorage.getItem('nanoeuler.conversations')") is None
        page.reload()
        page.wait_for_selector("#box:not([disabled])")
        wait(page, "document.title.includes('little')")


@pytest.mark.slow
def test_the_branch_shown_last_is_a_child(opened, address, tmp_path):
    """`latest` may name an ancestor in a forged file: the walk to the last message has an end."""
    page = opened(address)
    nodes = tree(q={"latest": "q"}, x={"parent": None}) | {"roots": ["q", "x"], "shown": "x"}
    (tmp_path / "some.json").write_text(json.dumps({"conversations": [nodes]}), encoding="utf-8")
    page.set_input_files("#file", tmp_path / "some.json")
    page.click("[aria-label='Previous branch']")
    page.wait_for_selector(".message.assistant .token")
    assert answers(page) == ["A"]


# ---- waits and errors
@pytest.mark.slow
def test_wrong_settings_are_marked(opened, address):
    """They are not used.  The default temperature is the one of `chat`."""
    page = opened(address)
    wait(page, "document.querySelector('[name=temperature]').value !== ''")
    assert page.input_value("[name=temperature]") == str(ChatSampling.temperature)
    page.click("#open-settings")
    page.fill("[name=temperature]", "-5")
    page.press("[name=temperature]", "Tab")
    assert page.input_value("[name=temperature]") == "-5"
    assert page.get_attribute("[name=temperature]", "aria-invalid") == "true"
    assert page.inner_text("#temperature-problem") == (
        f"Expected a number from 0 to 2. {ChatSampling.temperature} stays in use.")
    page.fill("[name=temperature]", "0,7")   # a decimal comma
    assert page.inner_text("#temperature-problem") == ""
    page.press("[name=temperature]", "Tab")
    assert page.input_value("[name=temperature]") == "0.7"
    for name, most in ("max_tokens", 1_000_000), ("top_k", CFG.vocab_size):
        page.fill(f"[name={name}]", str(most + 1))
        assert f"from {int(name == 'max_tokens')} to {most}." in page.inner_text(f"#{name}-problem")
        page.fill(f"[name={name}]", "")
    page.fill("[name=top_k]", "2.6")
    page.press("[name=top_k]", "Tab")
    assert "a whole number" in page.inner_text("#top_k-problem")
    page.fill("[name=min_p]", "0.25")
    page.keyboard.press("Escape")            # keeps what is allowed, and says what is not
    page.wait_for_selector("#notice:has-text('the value is not allowed: Top k.')")
    page.click("#open-settings")
    assert page.input_value("[name=top_k]") == "0" and page.inner_text("#top_k-problem") == ""
    stored = json.loads(page.evaluate("localStorage.getItem('nanoeuler.settings')"))
    assert stored == {"temperature": 0.7, "min_p": 0.25}
    page.evaluate("localStorage.setItem('nanoeuler.settings', JSON.stringify("
                  "{temperature: 'hot', top_p: 7, seed: null}))")
    page.reload()
    wait(page, "document.querySelector('[name=temperature]').value !== ''")
    assert page.input_value("[name=temperature]") == str(ChatSampling.temperature)
    assert page.input_value("[name=top_p]") == "1" and page.input_value("[name=seed]") == ""


def test_the_first_trajectory_is_announced(opened, address):
    page, held = opened(address), []
    ask(page, "So?")

    def answer(route):
        if route.request.post_data_json.get("trajectory"):
            held.append(route)
        else:
            route.continue_()

    def fulfill(number):
        """Answers the request of this number, once the page has sent it."""
        wait_for(page, lambda: len(held) > number)
        held[number].fulfill(json={"steps": [step, last]})

    page.route("**/api/explain", answer)
    page.click("text=Look inside")
    page.wait_for_selector("#rivals li")
    assert "half a minute" in page.inner_text("#inside")
    page.check("#trajectory")
    wait(page, "document.querySelector('#steps').textContent.includes('half a minute')")
    step = {"name": "embedding", "p": 0.5, "top": [{"text": "e", "p": 0.5}]}
    last = {**step, "name": "1 attention", "ratio": 1, "angle": 9}
    fulfill(0)
    page.wait_for_selector("#steps svg")
    page.click("#after")
    wait(page, "document.querySelector('#steps').textContent === 'Computing the trajectory…'")
    fulfill(1)
    page.wait_for_selector("#steps svg")


def test_a_server_that_stopped(opened, address):
    page = opened(address, failing=True)
    page.wait_for_selector("[placeholder='Ask something']")
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.fill("#box", "Are you there?")
    page.press("#box", "Enter")
    page.wait_for_selector(".message.assistant .problem")
    silent = "The server does not answer. Is it still running?"
    assert page.inner_text(".message.assistant .problem") == silent
    page.route("**/api/model", lambda route: route.abort())
    page.reload()
    page.wait_for_selector("#notice button")
    assert page.inner_text("#notice").startswith(silent)
    page.unroute("**/api/model")
    page.click("#notice >> text=Try again")
    page.wait_for_selector("[placeholder='Ask something']")
    assert page.inner_text("#notice") == ""
    page = opened(f"{address}/training", failing=True,
                  routes={"**/api/runs": lambda route: route.abort()})
    wait(page, f"document.querySelector('#announce').textContent === '{silent}'")


def with_key(asked):
    """Answers of a server whose key is `right`"""
    def answer(route):
        key = route.request.headers.get("authorization")
        asked.append(key)
        if key == "Bearer right":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "the key is missing or wrong"}})
    return answer


@pytest.mark.parametrize("path", ["/", slow("/training")])
def test_a_key(opened, address, path):
    """A rejected key is called so, Escape leaves, and the page does not ask again by itself."""
    asked = []
    page = opened(address + path, failing=True, routes={"**/api/**": with_key(asked)},
                  clock=True)
    page.wait_for_selector("#keys[open]")
    assert page.inner_text("#keys-problem") == ""
    for wrong in ("wrong", "wr\u014dng", "wrong"):        # the second is one that no header carries
        page.fill("#key", wrong)
        page.press("#key", "Enter")
        wait(page, "document.querySelector('#key').value === ''")
        page.wait_for_selector("#keys[open]")
        assert page.inner_text("#keys-problem") == "That key was rejected."
    assert asked == [None, "Bearer wrong", "Bearer wrong"]
    page.keyboard.press("Escape")
    button = page.locator("button >> text=Enter a key")
    button.wait_for()
    for _ in range(5):                       # polls would be due
        page.clock.fast_forward(2100)
        page.wait_for_timeout(20)
    assert len(asked) == 3 and page.locator("#keys[open]").count() == 0
    button.click()
    page.wait_for_selector("#keys[open]")
    page.click("#keys-cancel")
    button.click()
    page.fill("#key", "right")
    page.click("text=Use this key")
    ready = "[placeholder='Ask something']" if path == "/" else "#charts svg"
    page.wait_for_selector(ready)
    assert button.count() == 0


# ---- the tour
def asked_in_tour(page):
    """The live part has an answer, whose tokens can be chosen"""
    page.click("#live button[type=submit]")
    page.wait_for_selector("#live-result > *")


def test_the_live_parts_of_the_tour(opened, address):
    needs("markdown_it")
    page = opened(f"{address}/tour/01_talk")
    asked_in_tour(page)
    bars = page.locator(".live-bars li")
    assert bars.count() == 10
    first = bars.first.locator("progress")
    before = first.get_attribute("value")
    page.fill("#live-temperature", "0.1")
    assert float(first.get_attribute("value")) > float(before)       # a low temperature sharpens
    page.goto(f"{address}/tour/06_attention")
    asked_in_tour(page)
    rows = page.locator(".heat rect").count()
    page.select_option("#live-result select >> nth=1", index=1)
    page.wait_for_selector(".heat rect")
    n = page.locator(".heat text").count() // 2
    assert page.locator(".heat rect").count() == rows == n * (n + 1) // 2
    page.goto(f"{address}/tour/07_euler")
    asked_in_tour(page)
    page.wait_for_selector("#live-result svg .curve")
    page.fill("#live-text", "")
    page.click("#live button[type=submit]")
    wait(page, "document.querySelector('#live .warning').textContent !== '' || "
               "document.querySelector('#live-result').childElementCount > 0")


# ---- answers, titles, models
def drawn_answer(page, text, pieces=None):
    """Draws an answer with one token per character, or per piece; returns (HTML, milliseconds)"""
    return page.evaluate("""async ({text, pieces}) => {
        const {Markdown} = await import(new URL("markdown.js", location));
        const parent = document.createElement("div");
        let known = "";
        const put = (into, from, to) => into.append(known.slice(from, to));
        const markdown = new Markdown(parent, put), began = performance.now();
        for (const piece of pieces ?? [text]) markdown.update(known += piece);
        return [parent.innerHTML, performance.now() - began];
    }""", {"text": text, "pieces": pieces})


LINK = '<a href="https://a.example/?b=1" target="_blank" rel="noopener noreferrer">x</a>'
MARKED = {
    "One.\n\nTwo\nlines.": "<p>One.</p><p>Two\nlines.</p>",
    "**a** *b* `c*d*` ***e***": "<p><strong>a</strong> <em>b</em> <code>c*d*</code> "
                               "<strong><em>e</em></strong></p>",
    "2*3*4, a * b, **open, *this": "<p>2*3*4, a * b, **open, *this</p>",
    "*a **b* c**": "<p><em>a **b</em> c**</p>",
    "# A\n## B": "<h3>A</h3><h4>B</h4>",
    "- a\n  - b\n\n- c\n1. d": "<div><ul><li>a<ul><li>b</li></ul></li><li>c</li></ul>"
                              "<ol start=\"1\"><li>d</li></ol></div>",
    "42.\n- \n#": "<p>42.\n- \n#</p>",
    "[x](https://a.example/?b=1)": f"<p>{LINK}</p>",
    "[x](javascript:alert(1)) [y](data:text/html,z) [z](http://a b)":
        "<p>[x](javascript:alert(1)) [y](data:text/html,z) [z](http://a b)</p>",
    "\\*a\\* <b>&lt;": "<p>*a* &lt;b&gt;&amp;lt;</p>",
    "> a *b*\n>> c\n\nd": "<blockquote><div>a <em>b</em></div><div>c</div></blockquote><p>d</p>",
    "***\n": "<hr>",
}


def test_markdown(opened, address):
    page = opened(address)
    assert {text: drawn_answer(page, text)[0] for text in MARKED} == MARKED
    html, _ = drawn_answer(page, "```py\n<b>**1**\n")                # half open
    assert "<code>&lt;b&gt;**1**</code>" in html and "<span>py</span>" in html
    html, _ = drawn_answer(page, "| a | b |\n|---|:-:|\n| | `1` |\nend")
    assert "<td> </td><td> <code>1</code> </td></tr></tbody></table></div><p>end</p>" in html
    assert "table" not in drawn_answer(page, "|a" * 13 + "\n|-|")[0]
    text = "\n\n".join([*MARKED, "~~~\n- x\n~~~", "|a|\n|-|\n|b|"])
    assert drawn_answer(page, text)[0] == drawn_answer(page, text, [*text])[0]


def test_markdown_takes_linear_time(opened, address):
    page = opened(address)
    hostile = ["*", "**a*b ", "[", "[a](http://", "`", "` `` ", "|", "| a\n|-\n", "```\n", " ",
               "\\", "- a\n", "# a\n", "1. ", "> ", ">", "> a\n", "~", "#", "-", "_", "- ", "\n"]
    texts = [(s * 200_000)[:200_000] + end for s in hostile for end in ("", "`x")]
    texts += [" ".join("`" * i for i in range(1, 630)), "|a|\n|-|\n|" + " " * 200_000 + "x",
              "\n".join(" " * i + "- x" for i in range(600))]
    for text in texts:
        assert drawn_answer(page, text)[1] < 15_000, text[:20]    # quadratic: minutes


PATTERN = re.compile(r"(?:(?<=[=(,:!&|?{])|(?<=[=,:!&|?] ))/(?![/*])"
                     r"((?:[^/\\[\n]|\\.|\[(?:[^]\\\n]|\\.)*])+)/([a-z]*)")
SLOWEST = """([patterns, size]) => {
    const letters = "`~ #-*_>|[](:h/a.1\\n\\\\0", texts = [], slow = [];
    const pumps = [...letters].flatMap((a) => [a, ...[...letters].map((b) => a + b)]);
    for (const pump of pumps) for (const end of ["", "`", "x", "\\n", "]"])
        texts.push(pump.repeat(size / pump.length) + end);
    for (const [source, flags] of patterns) {
        const pattern = new RegExp(source, flags);
        const run = (text) => {
            const began = performance.now();
            pattern.lastIndex = 0;
            if (pattern.global) text.replace(pattern, "");
            else pattern.exec(text);
            return performance.now() - began;
        };
        const bad = texts.find((text) => run(text) > 25 && Math.min(run(text), run(text)) > 25);
        if (bad !== undefined) slow.push([source, bad.slice(0, 2), bad.slice(-1)]);
    }
    return slow;
}"""


def test_every_regular_expression_takes_linear_time(opened, address):
    """All of them on 30,000 characters of pumped text: 0.3 ms each.  One that backtracks over its
    start takes nine times as long as on 10,000, which is 20 to 1,000 ms on different machines."""
    page = opened(address)
    scripts = [path.read_text(encoding="utf-8") for path in PAGES.glob("*.js")]
    code = re.sub(r"^\s*//.*$|(?<=\s)//.*$", "", "\n".join(scripts), flags=re.M)
    patterns = PATTERN.findall(code)
    assert len(patterns) >= 18
    assert page.evaluate(SLOWEST, [patterns, 30_000]) == []
    planted = [[r"^ *(~{3,})([^`]*)$", ""], [r".*\/", ""]]
    assert len(page.evaluate(SLOWEST, [planted, 30_000])) == 2


def test_an_event_of_many_pieces_is_searched_once(opened, address):
    """Two megabytes in 40,000 pieces; a search of all that has come, for each piece, takes minutes.
    Ends of events may fall on any place of a piece."""
    page = opened(address)
    found = page.evaluate("""async () => {
        const {events} = await import(new URL("common.js", location));
        const read = async (pieces) => {
            const encoder = new TextEncoder(), found = [];
            const body = new ReadableStream({ start(stream) {
                for (const piece of pieces) stream.enqueue(encoder.encode(piece));
                stream.close();
            } });
            for await (const event of events(new Response(body))) found.push(event);
            return found;
        };
        const text = 'data: {"a": 1}\\n\\ndata: [2]\\n\\ndata: 3\\n\\ndata: [DONE]\\n\\n';
        const cuts = [1, 2, 3, 15, 16, 17].map((n) => text.match(new RegExp(`[^]{1,${n}}`, "g")));
        const long = ['data: "', ...Array(40_000).fill("x".repeat(50)), '"\\n', "\\n"];
        const began = performance.now(), [one] = await read(long), took = performance.now() - began;
        return [await Promise.all(cuts.map(read)), one.length, took];
    }""")
    assert found[0] == [[{"a": 1}, [2], 3]] * 6 and found[1] == 2_000_000 and found[2] < 5000


def test_a_full_storage_is_written_a_few_times(opened, address):
    """600 conversations lose their tokens, in batches that double: not one write for each."""
    page = opened(address)
    conversations = [{**tree(a={"tokens": [[65, "e", 0]] * 40, "prompt": [66]}), "id": f"c{i}"}
                     for i in range(600)]
    page.evaluate("s => localStorage.setItem('nanoeuler.conversations', s)",
                  json.dumps({"version": 1, "current": "c0", "conversations": conversations}))
    page.reload()
    page.wait_for_selector("[placeholder='Ask something']")
    page.evaluate("""() => {
        const kept = Storage.prototype.setItem;
        window.writes = 0;
        Storage.prototype.setItem = function (name, text) {
            window.writes += 1;
            if (text.length > 280_000) throw new Error("full");
            kept.call(this, name, text);
        };
    }""")
    page.click("#new")
    wait(page, "window.writes > 0")
    assert 3 < page.evaluate("window.writes") <= 11
    kept = json.loads(page.evaluate("localStorage.getItem('nanoeuler.conversations')"))
    assert len(kept["conversations"]) == 601 and not page.is_visible("#notice")
    assert any("light" not in c for c in kept["conversations"][1:])


@pytest.fixture
def canned(opened, address):
    """A function that opens the chat, and sends a question to which the server answers `text`, in
    tokens of three characters"""
    def open_page(text, **options):
        page = opened(address, **options)
        tokens = [{"id": 65, "text": text[i:i + 3], "bytes": [*text[i:i + 3].encode()],
                   "accepted": False} for i in range(0, len(text), 3)]
        choice = {"index": 0, "delta": {}, "finish_reason": "stop", "tokens": tokens,
                  "prompt_tokens": [66]}
        page.route("**/v1/chat/completions", lambda route: route.fulfill(
            body=f"data: {json.dumps({'choices': [choice]})}\n\ndata: [DONE]\n\n",
            content_type="text/event-stream"))
        page.wait_for_selector("[placeholder='Ask something']")
        page.fill("#box", "Go **on**.")
        page.press("#box", "Enter")
        page.wait_for_selector(".message.assistant .tools >> text=Regenerate")
        finished(page)
        return page
    return open_page


def test_an_answer_is_formatted_and_its_tokens_can_be_chosen(canned):
    text = "A **bold one**:\n\n```\n<i>\n```\n"
    page = canned(text)
    assert page.inner_text(".message.user .text") == "Go **on**."
    assert page.inner_text(".message.assistant strong") == "bold one"
    assert page.inner_text(".message.assistant pre") == "<i>"
    assert page.locator(".message.assistant i").count() == 0
    page.click(".message.assistant strong .token >> nth=1")
    page.wait_for_selector("#inside-title:has-text('Token 3 of')")
    page.click("text=Raw text")
    assert page.text_content(".message.assistant .text") == text
    assert page.get_attribute("text=Raw text", "aria-pressed") == "true"
    page.click("text=Raw text")
    page.evaluate("navigator.clipboard.writeText = async t => { window.copied = t; }")
    page.click("text=Copy the code")
    wait(page, "window.copied === '<i>'")
    page.click(".tools >> text=Copy")
    wait(page, f"window.copied === {json.dumps(text)}")


@pytest.mark.slow
def test_a_long_conversation_is_shown_without_delay(canned, tmp_path):
    """Formatting ends after a million characters: the earlier answers are raw text."""
    page = canned("A")
    nodes = tree(a={"tokens": None, "text": "*a* " * 2**18})["nodes"] | {
        "r": {"id": "r", "parent": "a", "children": ["b"], "role": "user", "text": "R?"},
        "b": {"id": "b", "parent": "r", "children": [], "role": "assistant", "text": "*b*"}}
    nodes["a"]["children"] = ["r"]
    (tmp_path / "long.json").write_text(json.dumps({"conversations": [
        tree() | {"nodes": nodes, "shown": "b"}]}), encoding="utf-8")
    page.set_input_files("#file", tmp_path / "long.json")
    page.wait_for_selector(".message >> nth=3")
    assert page.locator(".message.assistant em").all_inner_texts() == ["b"]


def test_the_opening_page(opened, address):
    page = opened(address)
    page.wait_for_selector(".starters button")
    said = page.inner_text(".welcome")
    assert "runs on this device" in said and "reads up to 400 tokens (words or" in said
    assert page.inner_text("#open-card") == "Model: little"
    starter = page.locator(".starters button").first
    text = starter.inner_text()
    starter.click()
    page.wait_for_selector(".message.assistant .token", state="attached")
    finished(page)
    assert page.locator(".message.user .text").all_inner_texts() == [text]
    assert page.locator(".welcome").count() == 0
    assert page.inner_text("#list .title") == text


def test_the_text_of_a_base_model_is_plain(opened, address):
    """Such a model knows no Markdown.  A chat model's same text has a title and a list."""
    from playwright.sync_api import expect

    def as_base(route):
        route.fulfill(json={**route.fetch().json(), "answers": False, "template": ""})

    text = "# ACT I\n\n* Enter *two* lords."
    tokens = [[65, c, 0] for c in text]
    kept = {"version": 1, "current": "c", "conversations": [tree(a={"tokens": tokens})]}
    stored = json.dumps(kept)
    for routes, formatted in (({}, 3), ({"**/api/model": as_base}, 0)):
        page = opened(address, routes=routes)
        page.evaluate("s => localStorage.setItem('nanoeuler.conversations', s)", stored)
        page.reload()
        page.wait_for_selector(".message.assistant .tools >> text=Regenerate")
        expect(page).to_have_title(re.compile(" \u00b7 "), timeout=60_000)   # it knows the model
        shown = page.locator(".message.assistant .text")
        expect(shown.locator("h1, h2, h3, h4, li, em")).to_have_count(
            formatted, timeout=60_000)
        expect(page.locator("text=Raw text")).to_have_count(
            int(formatted > 0), timeout=60_000)
        if not formatted:
            assert shown.inner_text() == text


@pytest.mark.slow
def test_a_conversation_that_is_removed_comes_back(canned):
    """Undo restores it exactly, in its place."""
    page = canned("Yes.")
    page.click("#new")
    before = page.evaluate("localStorage.getItem('nanoeuler.conversations')")
    page.click("#list li:nth-child(2) .remove")
    assert page.inner_text("#notice") == "“Go **on**.” was removed. Undo"
    assert page.locator("#list li").count() == 1
    page.click("#notice button")
    assert page.evaluate("localStorage.getItem('nanoeuler.conversations')") == before
    page.click("#list li:nth-child(2) .title")
    assert answers(page) == ["Yes."] and page.inner_text("#notice") == ""
    page.click("#list li:nth-child(2) .remove")          # the one that is shown
    page.click("#notice button")
    assert answers(page) == ["Yes."]


@pytest.mark.slow
def test_a_tap_beside_the_drawer_closes_it(canned):
    page = canned("Yes.", viewport=NARROW)
    page.click("#menu")
    assert page.is_visible("#side")
    page.mouse.click(NARROW["width"] - 10, 300)
    assert not page.is_visible("#side") and not page.is_visible("#inside")


def test_a_conversation_that_is_longer_than_the_context(opened, address):
    """The page says which messages were not read, and what to do about one that is too long."""
    page = opened(address, failing=True)
    ask(page, "a " * 60, tokens=40)
    for _ in range(4):
        page.fill("#box", "b " * 60)
        page.press("#box", "Enter")
        finished(page)
    hint = page.locator(".message.assistant >> text=it did not read the first")
    assert "longer than the model's context" in hint.last.inner_text()
    page.fill("#box", "c " * 900)
    page.press("#box", "Enter")
    page.wait_for_selector(".problem")
    last = page.locator(".message.assistant").last
    assert "too long: the model reads at most 400 tokens" in last.inner_text()
    assert last.locator(".tools button").count() == 0


@pytest.mark.slow
def test_draft_tokens_are_marked_on_request(opened, address):
    page = opened(address)
    page.wait_for_selector("[placeholder='Ask something']")
    assert "coloured" not in (page.get_attribute("#log", "class") or "")
    page.click("#open-settings")
    page.check("#colour")
    assert "coloured" in page.get_attribute("#log", "class")


@pytest.mark.slow
def test_no_rate_of_a_few_tokens(opened, address):
    page = opened(address)
    ask(page, "So?", tokens=3)
    assert "tokens/s" not in page.inner_text(".message.assistant .tools")


@pytest.mark.slow
def test_a_conversation_is_renamed(canned):
    page = canned("Yes.")
    title = page.locator("#list button.title")
    assert title.inner_text() == "Go **on**."
    for keys, kept in (("Enter", "Cats"), ("Escape", "Cats"), ("Tab", "Cats 2")):
        page.click("#list .rename")
        page.fill("#list input", {"Enter": "Cats", "Escape": "Dogs", "Tab": " Cats 2 "}[keys])
        page.press("#list input", keys)
        assert title.inner_text() == kept
    title.dblclick()
    page.fill("#list input", "")
    page.press("#list input", "Enter")
    assert title.inner_text() == "Go **on**."
    page.click("#list .rename")
    page.fill("#list input", "Last")
    page.press("#list input", "Enter")
    page.reload()
    page.wait_for_selector("#list .title >> text=Last")


def test_each_conversation_keeps_its_model(opened, address):
    """The menu shows the models of the server.  Only the model of an answer can explain it."""
    page, bodies = opened(address), []
    page.wait_for_selector("[placeholder='Ask something']")
    card = page.evaluate("fetch('api/model').then(r => r.json())")

    def model(route):
        name = parse_qs(urlsplit(route.request.url).query).get("model", ["little"])[0]
        route.fulfill(json=card | {"name": name})

    def answer(route):
        bodies.append(route.request.post_data_json)
        route.continue_()

    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [
        {"id": "little"}, {"id": "other"}]}))
    page.route("**/api/model*", model)
    page.route("**/v1/chat/completions", answer)
    ask(page, "First?", 3)
    page.click("#new")
    page.select_option("#model", "other")
    wait(page, "document.title.startsWith('other')")
    page.fill("#box", "Second?")
    page.press("#box", "Enter")
    page.wait_for_selector(".message.assistant .tools >> text=Look inside")
    finished(page)
    assert [body["model"] for body in bodies] == ["little", "other"]
    page.click("#list >> text=First?")
    assert page.input_value("#model") == "little" and page.title().startswith("little")
    assert page.locator("text=Look inside").count() == 1
    page.select_option("#model", "other")
    assert page.title().startswith("other") and page.locator("text=Look inside").count() == 0
    page.reload()
    wait(page, "document.title.startsWith('other')")
    page.select_option("#model", "little")
    page.wait_for_selector("text=Look inside")


def test_the_menu_follows_the_models_of_the_server(opened, address):
    """A model that was trained after the page was opened, and one that was deleted"""
    page, names = opened(address), ["little"]
    card = page.evaluate("fetch('api/model').then(r => r.json())")
    page.route("**/api/model*", lambda route: route.fulfill(json=card | {"name": parse_qs(
        urlsplit(route.request.url).query).get("model", ["little"])[0]}))
    page.route("**/v1/models", lambda route: route.fulfill(json={"data": [
        {"id": name} for name in names]}))
    page.wait_for_selector("[placeholder='Ask something']")
    assert not page.is_visible("#model")
    names += ["later"]
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    wait(page, "document.querySelectorAll('#model option').length === 2")
    page.select_option("#model", "later")
    wait(page, "document.title.startsWith('later')")
    names.remove("later")
    page.evaluate("window.dispatchEvent(new Event('focus'))")
    wait(page, "document.title.startsWith('little')")
    assert not page.is_visible("#model")


def test_the_trajectory_of_an_answer(opened, address):
    page = opened(address)
    ask(page, "So?", 5)
    assert "Trajectory shows how the model's prediction" in page.inner_text("#log .hint")
    page.click(".tools >> text=Trajectory")
    page.wait_for_selector("#steps svg")
    assert page.is_checked("#trajectory")
    lines = page.locator("#drafts li").all_inner_texts()
    assert any("auxiliary head 1 guessed" in line and "for token 2, the next one" in line
               for line in lines)


def test_pictures_of_the_tour_can_be_read_on_a_phone(opened, address):
    """Their texts are scaled by 0.8 at least; a picture that is wider than the page scrolls."""
    needs("markdown_it")
    page = opened(f"{address}/tour/07_euler", viewport=NARROW)
    page.wait_for_selector("main img")
    assert page.evaluate("document.querySelector('main img').getBoundingClientRect().width") >= 600
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]
    page.goto(f"{address}/tour/06_attention")
    asked_in_tour(page)
    sizes = page.locator(".heat text").evaluate_all(
        "all => all.map((e) => e.getScreenCTM()).map((m) => Math.hypot(m.a, m.b))")
    assert min(sizes) >= 0.8


def test_the_trajectory_starts_at_once_and_stays_in_view(opened, address):
    """While the server computes, its status is what the panel shows; the lists above do not push
    it away when they come.  The close button is in view, too."""
    page, held = opened(address, viewport=NARROW), []
    ask(page, "So?", 5)

    def inside(what):
        """Is all of an element within the panel's part that is seen?"""
        return page.evaluate("""what => {
            const panel = document.querySelector("#inside").getBoundingClientRect();
            const r = document.querySelector(what).getBoundingClientRect();
            return r.height > 0 && r.top >= panel.top && r.bottom <= panel.bottom; }""", what)

    page.route("**/api/explain", lambda route: held.append(route))
    page.click(".tools >> text=Trajectory")
    page.wait_for_selector("#steps [role=status]")
    assert inside("#steps [role=status]") and inside("#close") and page.is_checked("#trajectory")
    for sent in range(2):
        wait_for(page, lambda: len(held) > sent)
        held[sent].continue_()
        page.wait_for_selector("#steps svg" if sent else "#rivals li")
        assert inside("#trajectory-title") and inside("#close")


@pytest.mark.parametrize("width", [390, 600, 800, 1000, 1280])
def test_the_panel_of_a_token_covers_nothing(opened, address, width):
    """It stands beside or below the conversation, where the token that it explains can be seen."""
    page = opened(address, viewport={"width": width, "height": 780})
    ask(page, "So? " * 40, 60)
    page.click(".tools >> text=Look inside")
    page.wait_for_selector("#rivals li")
    for _ in range(3):
        panel, main, log, token = (page.evaluate(
            "s => { const {left, top, right, bottom} = document.querySelector(s)"
            ".getBoundingClientRect(); return [left, top, right, bottom]; }", what)
            for what in ("#inside", "#main", "#log", ".token.here"))
        assert panel[0] >= main[2] or panel[1] >= main[3]
        assert log[1] <= token[1] and token[3] <= log[3]
        assert panel[0] >= main[2] or panel[3] - panel[1] <= 0.45 * 780
        page.click("#after")


SMALL = """() => [...document.querySelectorAll(
    "button, select, textarea, .bar a, #side a, label.check, input:not([type=checkbox])")]
  .filter(e => e.checkVisibility())
  .map(e => [e.outerHTML.slice(0, 80), e.getBoundingClientRect()])
  .filter(([, r]) => r.width < 44 || r.height < 44).map(([html]) => html)"""


def test_touch_targets_are_large_on_a_phone(opened, address):
    page = opened(address, viewport=NARROW)
    page.wait_for_selector(".starters button")
    assert page.evaluate(SMALL) == []
    ask(page, "So?", 5)
    page.click("text=Look inside")
    page.wait_for_selector("#rivals li")
    assert page.evaluate(SMALL) == []
    page.click("#close")
    page.click("#menu")
    assert page.evaluate(SMALL) == [] and page.is_visible("#side >> text=Training")
    page.keyboard.press("Escape")
    page.wait_for_selector("#side", state="hidden")
    assert page.get_attribute("#menu", "aria-expanded") == "false"
    page.click("#open-settings")
    assert page.evaluate(SMALL) == []


@pytest.mark.parametrize("path", ["/", "/training", "/tour", "/tour/06_attention"])
def test_nothing_is_wider_than_a_phone(opened, address, path):
    page = opened(address + path, viewport=NARROW)
    if path == "/tour/06_attention":
        asked_in_tour(page)
    elif path == "/tour":
        page.wait_for_selector("main h1")
    elif path == "/":
        ask(page, "a" * 300)
        page.click("text=Look inside")
        page.wait_for_selector("#rivals li")
    else:
        page.wait_for_selector("#charts svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.fixture(scope="module")
def axe(request, tmp_path_factory):
    """The field's checker of accessibility, from npm: downloaded once, into pytest's cache"""
    folder = cache_folder(request.config, tmp_path_factory, "axe")
    archive = folder / f"{AXE.replace('@', '-')}.tgz"
    if not archive.exists():
        if shutil.which("npm") is None:
            pytest.skip("there is no npm here, which fetches axe-core")
        said = subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True,
                              timeout=120)
        if said.returncode:
            archive.unlink(missing_ok=True)
            pytest.skip("npm cannot download axe-core")
    with tarfile.open(archive) as files:
        return files.extractfile("package/axe.min.js").read().decode()


@pytest.mark.network
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("what", ["inside", "training", *map(slow, (
    "opening", "chat", "settings", "tour"))])
def test_axe_finds_nothing(opened, address, axe, what, scheme):
    path = {"training": "/training", "tour": "/tour/06_attention"}.get(what, "/")
    page = opened(address + path, color_scheme=scheme, bypass_csp=True)
    if what == "training":
        page.wait_for_selector("#charts svg")
    elif what == "tour":
        asked_in_tour(page)
    elif what == "opening":
        page.wait_for_selector(".starters button")
    else:
        ask(page, "So?")
    if what == "inside":
        page.click("text=Look inside")
        page.check("#trajectory")
        page.wait_for_selector("#steps svg")
    if what == "settings":
        page.click("#open-settings")
    page.evaluate(axe)
    found = page.evaluate("axe.run()")
    assert not [(v["id"], v["impact"], [n["html"][:200] for n in v["nodes"]])
                for v in found["violations"]]
    assert len(found["passes"]) > 10


# ---- many runs
def runs_shown(opened, address, logs, **options):
    """The training page with every run chosen"""
    page = opened(f"{address}/training", routes=logs.routes(), **options)
    page.wait_for_selector("#charts svg")
    for box in page.locator("#runs input").all():
        box.check()
    ends = "document.querySelectorAll('#charts figure:first-child .end').length"
    wait(page, f"{ends} === {len(logs)}")
    return page


@pytest.mark.slow
def test_twelve_runs_can_be_told_apart(opened, address):
    """Eight colors, then dashes.  A run keeps its color while others are hidden, and the runs that
    remain never share one.  Numbers at equal ends do not overlap."""
    page = runs_shown(opened, address, Logs({f"{i}.jsonl": (1, steps(9)) for i in range(12)}))
    first = page.locator("#charts figure:first-child")
    looks = first.locator("polyline").evaluate_all("all => all.map((e) => e.classList.value)")
    assert {*looks} == {f"line c{i % 8} d{i // 8}" for i in range(12)}
    heights = sorted(float(end.get_attribute("y")) for end in first.locator(".end").all())
    assert all(b - a > 9 for a, b in pairwise(heights)) and 0 < heights[0] < heights[-1] < 210
    for box in page.locator("#runs input").all()[:6]:
        box.uncheck()
    wait(page, "document.querySelectorAll('#charts figure:first-child .end').length === 6")
    kept = first.locator("polyline").evaluate_all("all => all.map((e) => e.classList.value)")
    assert len({*kept} & {*looks}) == 6
    assert page.locator("#runs .mark").count() == 6


def test_a_run_is_highlighted(opened, address):
    """By click on its name under a chart, by key, and by mouse; the highlight and the focus stay
    when a poll draws the charts again."""
    logs = Logs({f"{c}.jsonl": (1, steps(9 + i)) for i, c in enumerate("abc")})
    page = runs_shown(opened, address, logs, clock=True)
    lit = "[...document.querySelectorAll('#charts polyline.lit')].map((e) => e.dataset.run).join()"
    dim = "document.querySelectorAll('#charts polyline.dim').length"
    page.locator("#runs label").first.hover()
    assert page.evaluate(lit) == "3,3,3,3,3" and page.evaluate(dim) == 10
    page.mouse.move(1, 1)
    assert page.evaluate(lit) == "" and page.evaluate(dim) == 0
    button = page.locator("#charts figure:first-child .legend button[data-run='1']")
    button.focus()
    page.keyboard.press("Enter")
    assert page.evaluate(lit) == "1,1,1,1,1" and button.get_attribute("aria-pressed") == "true"
    assert tile(page, "run") == "1 · c" and tile(page, "step") == "11"
    logs["c.jsonl"] = 1, steps(20)
    polled(page, lambda: "step 20" in first_chart(page))
    assert page.evaluate(lit) == "1,1,1,1,1" and tile(page, "step") == "20"
    assert page.evaluate("document.activeElement.dataset.run") == "1"
    page.keyboard.press("Enter")
    assert page.evaluate(lit) == "" and tile(page, "run") == "3 · a"


@pytest.mark.slow
def test_a_click_outlives_a_poll(opened, address):
    """Between press and release, no poll replaces the button."""
    logs = Logs({f"{c}.jsonl": (1, steps(9)) for c in "ab"})
    page = runs_shown(opened, address, logs, clock=True)
    page.locator("#charts .legend button").first.hover()
    page.mouse.down()
    logs["b.jsonl"] = logs["a.jsonl"] = 1, steps(20)
    before = len(logs.asked)
    for _ in range(5):
        page.clock.fast_forward(2100)
        page.wait_for_timeout(20)
    assert len(logs.asked) <= before + 2 and "step 9" in first_chart(page)
    page.mouse.up()
    polled(page, lambda: "step 20" in first_chart(page))
    assert page.locator("#charts .legend [aria-pressed=true]").count() == 5


def test_a_run_that_trains_is_followed_and_others_say_how_they_ended(opened, address):
    """The newest run has ended, an older one still trains, and one has no news.  A run whose steps
    are slow is not called quiet between them."""
    logs = Logs({"ended.jsonl": (1000, steps(80, n_steps=80)),
                 "trains.jsonl": (990, steps(20, n_steps=80)),
                 "slow.jsonl": (910, steps(20, n_steps=80) + [
                     {"step": 21, "loss": 3.0, "ms": 50_000.0, "n_steps": 80}]),
                 "stopped.jsonl": (820, steps(30, n_steps=80))})
    logs.now = 1000
    page = opened(f"{address}/training", routes=logs.routes(), clock=True)
    page.wait_for_selector("#charts svg")
    assert page.is_checked("[name='trains.jsonl']") and tile(page, "time left") == "6 s"
    states = dict(zip(named(page), page.locator("#runs .hint").all_inner_texts(), strict=True))
    assert states == {"ended.jsonl": "ended 0 s ago", "trains.jsonl": "training",
                      "slow.jsonl": "training", "stopped.jsonl": "no news for 3 min"}
    page.uncheck("[name='trains.jsonl']")
    page.check("[name='stopped.jsonl']")
    polled(page, lambda: page.inner_text("#time") == "no news for")
    assert tile(page, "no news for") == "3 min"
    logs.now += 7200                         # nothing is written, and the texts still change
    polled(page, lambda: tile(page, "no news for") == "2 h 3 min")


@pytest.mark.slow
def test_every_number_is_explained_by_tap_and_key(opened, address):
    page = opened(f"{address}/training", routes=Logs({"a.jsonl": (1, steps(9))}).routes(),
                  viewport=NARROW, has_touch=True)
    page.wait_for_selector("#charts svg")
    tiles = page.locator("#tiles details")
    assert tiles.count() == 9
    for tile_ in tiles.all():
        explained = tile_.locator("p")
        assert explained.is_hidden() and len(explained.text_content().split()) > 8
        tile_.locator("summary").tap()
        assert explained.is_visible()
        tile_.locator("summary").press("Enter")
        assert explained.is_hidden()


@pytest.mark.slow
def test_touch_targets_of_a_phone(opened, address):
    logs = Logs({f"{'long-name-' * 9}{c}.jsonl": (1, steps(9)) for c in "ab"})
    page = runs_shown(opened, address, logs, viewport=NARROW)
    heights = page.locator("a, button:visible, summary, #runs label").evaluate_all(
        "all => all.map((e) => e.getBoundingClientRect().height)")
    assert len(heights) > 20 and min(heights) >= 44
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.mark.parametrize("found", few([
    {"age": 1e308, "n_steps": 1e300}, {"age": -5, "step": "9"},
    {"age": None, "step": -1, "ms": {}}, {"age": [], "n_steps": 0},
    {"n_steps": 2**40, "ms": 1e12, "step": 1}], 2))
def test_a_hostile_list_does_not_freeze_the_page(opened, address, found):
    logs = Logs({"a.jsonl": (1, steps(9))})
    routes = logs.routes() | {"**/api/runs": lambda route: route.fulfill(
        json={"runs": [{"name": "a.jsonl", "changed": 1, **found}]})}
    page = opened(f"{address}/training", routes=routes)
    page.wait_for_selector("#charts svg")
    assert page.inner_text("#announce") == ""
    shown = page.inner_text("#runs") + page.inner_text("#tiles")
    assert not {"NaN", "undefined", "null", "Infinity"} & {*shown.split()} and len(shown) < 400
