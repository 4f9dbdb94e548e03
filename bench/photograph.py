"""Photographs the chat page and the training page for README and docs/serving.md, in Chromium.

    python bench/photograph.py [chat] [training]     default: both

chat        docs/chat_light.png, chat_dark.png and chat_narrow.png: the bundled model, two questions
            with the settings of the page, and the panel of one token
training    docs/training_light.png: four short runs on Shakespeare, and a fifth one that trains

Needs the extra dev and a Chromium.  Speeds and times in the pictures are those of this machine.
"""
import argparse
import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
QUESTIONS = "What is the capital of Norway?", "and of Spain?"
RUNS = {"adamw": ["--optimizer", "adamw"], "muon": [], "deep": ["--n-layer", "6"],
        "low-lr": ["--muon-lr", "0.01"], "wide": ["--n-embd", "160", "--n-head", "5",
                                                  "--n-kv-head", "1"]}
SHORT, LONG, SHOWN = 200, 1_674, 240         # steps of four runs, of the fifth, until the picture


def program(*words, cwd):
    return [sys.executable, str(ROOT / "nanoeuler.py"), *words], dict(cwd=cwd, stdout=sys.stderr)


@contextlib.contextmanager
def server(folder):
    """The address of a server of the bundled model that runs in a folder"""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command, options = program("serve", "bundled", "--port", str(port), cwd=folder)
    address = f"http://127.0.0.1:{port}"
    process = subprocess.Popen(command, **options)
    try:
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(address + "/health", timeout=5).close()
                break
            if process.poll() is not None:
                raise SystemExit("the server ended")
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        process.wait()


def hold(page, expression):
    """Until a JavaScript expression holds: the policy of the pages forbids Playwright's own way"""
    while not page.evaluate(expression):
        page.wait_for_timeout(50)


def chat(browser, address, name, size, token, dark=False, trajectory=True):
    """token: the number of the selected token, in the answer to the question of this number"""
    context = browser.new_context(viewport=size, color_scheme="dark" if dark else "light")
    page = context.new_page()
    page.set_default_timeout(300_000)
    page.goto(address)
    for n, question in enumerate(QUESTIONS, 1):
        page.fill("#box", question)
        page.press("#box", "Enter")
        hold(page, f"document.querySelectorAll('.message.assistant .token').length >= {n}")
        page.wait_for_selector("#send:not([hidden])")
    answer, number = token
    page.locator(".message.assistant").nth(answer).locator(".token").nth(number).click()
    page.wait_for_selector("#rivals li")
    if trajectory:
        page.check("#trajectory")
        page.wait_for_selector("#steps svg")
    page.screenshot(path=DOCS / name)
    context.close()


def last_step(log):
    steps = [json.loads(line).get("step", 0) for line in log.read_text("utf-8").splitlines()[1:]]
    return max(steps, default=0)


def training(browser, folder):
    *short, last = RUNS
    for name in short:
        command, options = program("train", "--data", str(ROOT / "data/shakespeare.txt"), "--steps",
                                   str(SHORT), "--eval-every", "40", "--out", f"{name}.bin",
                                   *RUNS[name], cwd=folder)
        subprocess.run(command, check=True, **options)
    command, options = program("train", "--data", str(ROOT / "data/shakespeare.txt"), "--steps",
                               str(LONG), "--eval-every", "40", "--out", f"{last}.bin",
                               *RUNS[last], cwd=folder)
    log = folder / f"{last}.jsonl"
    with server(folder) as address, contextlib.ExitStack() as at_end:
        run = subprocess.Popen(command, **options)
        at_end.callback(run.wait)
        at_end.callback(run.terminate)
        while run.poll() is None and (not log.exists() or last_step(log) < SHOWN):
            time.sleep(1)
        page = browser.new_page(viewport={"width": 1280, "height": 860})
        page.set_default_timeout(300_000)
        page.goto(address + "/training")
        page.wait_for_selector("#charts svg")
        unchecked = page.locator("#runs input:not(:checked)")
        while unchecked.count():
            unchecked.first.click()
        hold(page, "document.querySelectorAll('#charts figure:first-child polyline').length >= 8")
        page.wait_for_timeout(1_000)
        page.screenshot(path=DOCS / "training_light.png")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("page", nargs="*", help="chat or training; default: both")
    pages = parser.parse_args().page or ["chat", "training"]
    from playwright.sync_api import sync_playwright
    found = [*filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome")))]
    flags = ["--no-sandbox"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as work:
        path = found[0] if found else None
        browser = playwright.chromium.launch(executable_path=path, args=flags)
        folder = pathlib.Path(work)
        if "chat" in pages:
            with server(folder) as address:
                wide, narrow = {"width": 1200, "height": 860}, {"width": 390, "height": 844}
                chat(browser, address, "chat_light.png", wide, (1, 0))
                chat(browser, address, "chat_dark.png", wide, (1, 0), dark=True)
                chat(browser, address, "chat_narrow.png", narrow, (0, 9), trajectory=False)
        if "training" in pages:
            training(browser, folder)
        browser.close()


if __name__ == "__main__":
    main()
