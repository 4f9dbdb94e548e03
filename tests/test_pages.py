"""Both pages in a real Chromium, without a window: what people do with them, by mouse and keys."""
import json
import os
import shutil
import subprocess
from dataclasses import replace

import pytest
from helpers import needs
from servers import CFG, chat_model, serving

pytestmark = pytest.mark.cli
needs("starlette")
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


@pytest.fixture
def opened(browser):
    """A function that opens a page; whatever it complains of fails the test."""
    problems, contexts = [], []

    def open_page(url, **options):
        context = browser.new_context(**{"viewport": WIDE, **options})
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda m: m.type == "error" and problems.append(m.text))
        page.goto(url)
        return page
    yield open_page
    for context in contexts:
        context.close()
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


def a_token(page):
    """The number of a token that can be seen, behind the first: one may be a part of a character"""
    return page.evaluate("[...document.querySelectorAll('.token')].findIndex("
                         "(t, i) => i > 0 && t.textContent.trim())")


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
    assert "tokens/s" in page.inner_text("#pace") and "of 400" in page.inner_text("#context-said")
    page.click("text=Edit")
    page.fill(".editor", "What is a dog?")
    page.press(".editor", "Enter")
    finished(page)
    assert page.locator(".message.user .text").all_inner_texts() == ["What is a dog?"]
    assert "2 of 2" in page.inner_text(".message.user .tools")
    page.click("[aria-label='Previous branch']")
    assert page.locator(".message.user .text").all_inner_texts() == ["What is a cat?"]
    assert answers(page) == [first]
    page.click("text=Again")
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
    assert page.locator(".problem").count() == 0
    page.fill("#box", "And more.")                       # the server takes the next one
    page.press("#box", "Enter")
    page.wait_for_selector(".message:nth-child(4) .token", state="attached")
    page.keyboard.press("Escape")
    finished(page)


def test_what_is_sent_before_the_model_is_known(opened, address):
    """Somebody is quicker than the model's card: the question waits for it, and is asked once."""
    page, held = opened(address), []
    page.route("**/api/model", lambda route: held.append(route))
    page.reload()
    page.fill("#box", "Too early?")
    page.press("#box", "Enter")
    page.press("#box", "Enter")
    assert page.locator(".message").count() == 0 and page.input_value("#box") == "Too early?"
    held[0].continue_()
    page.wait_for_selector(".message.assistant .token", state="attached")
    finished(page)
    assert page.locator(".message").count() == 2 and page.input_value("#box") == ""


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
    wait(page, "document.querySelector('#announce').textContent.includes("
                           "'not imported')")
    assert answers(page) == shown


def test_a_run_is_watched(opened, address, folder):
    page = opened(f"{address}/learn")
    page.wait_for_selector("#charts svg")
    assert page.locator("#charts figure").count() == 5
    assert "80" in page.inner_text("#tiles")
    page.check("#runs label:not(:has(:checked)) input")
    wait(page, "document.querySelector('#charts .legend').children.length === 4")
    with open(folder / "first.jsonl", "a", encoding="utf-8") as f:
        f.write('{"step": 81, "loss": 1.0, "bits_per_byte": 1.0, "lr": 1e-3, "norm": 1.0, '
                '"ms": 1.0, "tokens_per_s": 1.0}\n{"step": 81, "sample": "And so <b>on</b>"}\n')
    wait(page, "document.querySelector('#charts svg').ariaLabel.includes('step 81')")
    page.wait_for_selector("#samples article")
    assert page.inner_text("#samples pre") == "And so <b>on</b>"


@pytest.mark.parametrize("path", ["/", "/learn"])
def test_nothing_is_wider_than_a_phone(opened, address, path):
    page = opened(address + path, viewport=NARROW)
    if path == "/":
        ask(page, "a" * 300)
        page.click("text=Look inside")
        page.wait_for_selector("#rivals li")
    else:
        page.wait_for_selector("#charts svg")
    assert page.evaluate("document.documentElement.scrollWidth") <= NARROW["width"]


@pytest.fixture(scope="module")
def axe(tmp_path_factory):
    """The field's checker of accessibility, from npm"""
    folder = tmp_path_factory.mktemp("axe")
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here, which fetches axe-core")
    said = subprocess.run(["npm", "pack", "--silent", AXE], cwd=folder, capture_output=True,
                          timeout=120, encoding="utf-8")
    if said.returncode:
        pytest.skip("npm cannot download axe-core")
    shutil.unpack_archive(folder / said.stdout.split()[-1], folder)
    return (folder / "package/axe.min.js").read_text(encoding="utf-8")


@pytest.mark.network
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("what", ["chat", "inside", "settings", "learn"])
def test_axe_finds_nothing(opened, address, axe, what, scheme):
    page = opened(address + ("/learn" if what == "learn" else "/"), color_scheme=scheme,
                  bypass_csp=True)
    if what == "learn":
        page.wait_for_selector("#charts svg")
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
