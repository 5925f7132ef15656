"""A conversation: what is reused from the cache, what the user sees, and the program in a terminal and in pipes."""

import fcntl
import io
import json
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import ROOT, random_prompts

import cli
import engine as engine_module
from cli import ArgumentParser, HelpFormatter, Stopwatch, UserError, has_colours, progress_bar
from drafts.retrieval import RetrievalDraft
from engine import Engine, EngineOptions, Request, SingleProcess, generate, read_with_progress
from generate import parse_arguments
from load import load_model
from sampling import SamplingParams
from speculative import Speculation
from text import chat
from text.chat import AnswerPrinter, Session
from text.tokenizer import Tokenizer

PROGRAM = [sys.executable, str(ROOT / "generate.py")]


class Letters:
    """A tokenizer and template in which token i is the character 0x4000 + i. A message is its characters between two
    marks (tokens 1 to 4)."""

    begins_with_space = False

    def __init__(self):
        self.vocabulary = self

    def token_bytes(self, i):
        return chr(0x4000 + i).encode()

    def encode(self, messages):
        ids = []
        for message in messages:
            if message["content"] == "refuse this":
                raise UserError("the template refuses this")
            start = {"system": 1, "user": 2, "assistant": 3}[message["role"]]
            ids += [start, *(ord(c) - 0x4000 for c in message["content"]), 4]
        return [*ids, 3]


def text_of(*ids):
    return "".join(chr(0x4000 + i) for i in ids)


def make_session(model, length, template, tokenizer, temperature=0.0, **options):
    params = SamplingParams(temperature=temperature, seed=5)
    return Session(Engine(model, 1, length), tokenizer, template, params, **options)


def letters_session(model, length=256, temperature=0.0, **options):
    letters = Letters()
    return make_session(model, length, letters, letters, temperature, **options)


def answer_without_cache(model, turn: Request) -> list[int]:
    """The model's answer to a turn's prompt if nothing of it is in the cache."""
    request = Request(turn.prompt, turn.params, turn.max_new_tokens, turn.stop_ids)
    generate(Engine(model, 1, 512), [request])
    return request.new_tokens


@pytest.mark.parametrize("name", ["llama-gqa-biased", "mistral-window", "qwen2-sliding", "qwen3-gqa"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_turns_equal_answers_without_cache(tiny, tiny_model, name, temperature):
    """The cache is reused from turn to turn. Each turn reads only what is new, and answers as without a cache."""
    session = letters_session(tiny_model(name), temperature=temperature, max_new_tokens=9)
    session.set_system(text_of(90, 17, 6))
    for n, text in enumerate([text_of(*range(20, 43)), text_of(7), text_of(*range(100, 105)), text_of(9, 9)]):
        turn = session.ask(text, quiet)
        assert len(turn.prompt) - turn.cached_tokens == (len(turn.prompt) if n == 0 else len(text) + 5)
    fresh = load_model(tiny(name)[2], dtype=torch.float32)
    for turn in session.turns:
        assert turn.new_tokens == answer_without_cache(fresh, turn)
    assert len(session.turns[-1].prompt) == 78


def test_turns_that_change_what_went_before_are_read_again(tiny, tiny_model, monkeypatch):
    """A new system message, a new conversation that begins with the same words, and an interrupted answer."""
    session = letters_session(tiny_model("llama-mha"), max_new_tokens=6)
    session.ask(text_of(50, 51, 52), quiet)
    session.ask(text_of(60), quiet)
    session.set_system(text_of(8, 8))
    assert session.ask(text_of(70), quiet).cached_tokens == 0
    session.set_system(None)
    session.reset()
    session.ask(text_of(50, 51, 52, 53), quiet)
    assert session.ask(text_of(80), quiet).cached_tokens == 12
    session.reset()
    assert session.ask(text_of(50, 51, 52, 53), quiet).cached_tokens == 6, "all but the last token"
    shown = []

    def interrupt(piece):
        shown.append(piece)
        if len(shown) == 4:
            os.kill(os.getpid(), signal.SIGINT)

    cancel = session.engine.cancel

    def interrupt_again(request):
        os.kill(os.getpid(), signal.SIGINT)  # a second Ctrl-C, which is ignored
        cancel(request)

    monkeypatch.setattr(session.engine, "cancel", interrupt_again)
    with chat.one_interrupt():
        turn = session.ask(text_of(33), interrupt)
    assert turn.finish_reason == "cancelled" and len(turn.new_tokens) == 4
    assert session.messages[-1] == {"role": "assistant", "content": "".join(shown)}
    turn = session.ask(text_of(34), quiet)
    assert len(turn.prompt) - turn.cached_tokens == 1 + 1 + 4, "the interrupted answer's last token was not read yet"
    fresh = load_model(tiny("llama-mha")[2], dtype=torch.float32)
    for turn in session.turns:
        assert turn.new_tokens == answer_without_cache(fresh, turn)[: len(turn.new_tokens)]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def quiet(piece):
    """Shows nothing of an answer."""


def test_interrupted_before_the_answer(tiny_model, monkeypatch):
    """After Ctrl-C while the prompt is read, the message is forgotten, and its part of the cache is not reused."""
    session = letters_session(tiny_model("llama-mha"), max_new_tokens=3)
    session.ask(text_of(50, 51), quiet)
    before, prefill = list(session.messages), session.engine.steps.prefill

    def interrupted(*args):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    monkeypatch.setattr(session.engine.steps, "prefill", interrupted)
    turn = session.ask(text_of(*range(60, 90)), quiet)
    assert session.summary(turn) == "[interrupted before the answer; the message is forgotten]"
    assert session.messages == before
    monkeypatch.setattr(session.engine.steps, "prefill", prefill)
    turn = session.ask(text_of(52), quiet)
    assert turn.cached_tokens == 7 - 1 + 1, "the first question and answer, up to the answer's last token"
    assert turn.new_tokens == answer_without_cache(tiny_model("llama-mha"), turn)


def run_lines(session, monkeypatch, capsys, *lines):
    text = "".join(line + "\n" for line in lines)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    chat.chat(session)
    return capsys.readouterr()


def test_commands(tiny_model, monkeypatch, capsys):
    session = letters_session(tiny_model("llama-mha"), max_new_tokens=5)
    out, err = run_lines(
        session, monkeypatch, capsys,
        text_of(50, 51), "", "   ", "/stats", "/reset", f"/system {text_of(60, 61)}", "/system", text_of(50, 51),
        "/help", "refuse this", "/system refuse this", "/stats", text_of(52), "/exit", text_of(53),
    )  # fmt: skip
    turns = session.turns
    assert len(turns) == 3 and out.count("\n") == 3, "after /exit nothing is answered"
    assert turns[1].prompt == [1, 60, 61, 4, *turns[0].prompt] and session.system == text_of(60, 61)
    assert "5 tokens, " in err and "; 5 read, 0 reused; context 9 of 256; cut at max_new_tokens]" in err
    assert "turns: 1\ncontext: 9 of 256 tokens in the cache\nread: 5 tokens, " in err
    assert chat.HELP in err and "is not a command" not in err
    assert err.count("error: the template refuses this") == 2
    assert "turns: 2\n" in err and "reused from earlier turns: 0 tokens\nwritten: 10 tokens, " in err
    assert "conversation is forgotten" in err and "system message set" in err and f"\n{text_of(60, 61)}\n" in err


def test_drafted_tokens_are_counted(tiny_model):
    """Those of each turn, and of all turns. If nothing was proposed, they are not mentioned."""
    session = letters_session(tiny_model("llama-mha"), max_new_tokens=1)
    session.engine = Engine(session.engine.model, 1, 256, None, Speculation([RetrievalDraft()], 4, automatic=False))
    turn = session.ask(text_of(50, 51), quiet)
    assert "drafted" not in session.summary(turn) + session.statistics()
    session.max_new_tokens = 20
    total = Counter()
    for text in (text_of(60, 61, 60, 61, 60), text_of(70)):
        turn = session.ask(text, quiet)
        said = f" tokens/s, {session.drafted['accepted']} of {session.drafted['proposed']} drafted tokens accepted; "
        assert said in session.summary(turn)
        assert session.drafted["proposed"] > 0
        total += session.drafted
    counts = session.engine.decoding.report.draft_numbers("prompt-lookup", 0)
    assert total == Counter(proposed=counts["proposed_tokens"], accepted=counts["accepted_tokens"])
    line = f"speculation: {total['accepted']} of {total['proposed']} drafted tokens accepted"
    assert session.statistics().splitlines()[-1] == line


def sent_lines(monkeypatch, capsys, *lines, template=None):
    """(the messages that a session without a model is asked, stderr)."""
    sent, turn = [], SimpleNamespace(messages=[])
    session = SimpleNamespace(
        engine=SimpleNamespace(ranks=SingleProcess()), template=template, summary=lambda turn: "[summary]"
    )
    session.reset, session.set_system = lambda: sent.append("RESET"), lambda text: sent.append(f"SYSTEM {text!r}")
    session.statistics, session.system = lambda: "STATISTICS", None
    session.ask = lambda text, show: sent.append(text) or turn
    return sent, run_lines(session, monkeypatch, capsys, *lines).err


def test_lines_that_begin_with_a_slash(monkeypatch, capsys):
    """A line of input ends at a newline, and nowhere else."""
    same = ["/no_think what is 2+2", "  /think", "/", "exit the room", "/exit! she said", "/etc/hosts is a file"]
    same += ["/* a comment */", "what is //?", "what is /hlep", "one\rtwo\u2028three\x85four\x0cfive\x1c"]
    changed = {"/Reset": "RESET", "/SYSTEM\tBe brief. /no_think": "SYSTEM 'Be brief. /no_think'", "//exit": "/exit"}
    changed |= {" //reset the router": " /reset the router", "///": "//", "end\r": "end"}
    sent, err = sent_lines(monkeypatch, capsys, *same, *changed)
    assert sent == [*same, *changed.values()] and "error" not in err


@pytest.mark.parametrize("line, nearest", [
    ("/hlep", "/help"), ("  /RESTE now", "/reset"), ("/no-think what is 2+2", "/no_think"),
    ("/temperature 0.2", "/set temperature"), ("/größe", "/help"),
])  # fmt: skip
def test_an_unknown_command_is_refused(monkeypatch, capsys, line, nearest):
    """Whatever follows it, with the nearest command. The conversation goes on."""
    word = line.split()[0]
    sent, err = sent_lines(monkeypatch, capsys, line, "Hello", f"/{line.strip()}")
    assert sent == ["Hello", line.strip()]
    refusal = f"error: {word} is not a command, so it is not sent; try {nearest}, or /{word} to send it"
    assert err.splitlines() == [refusal, "[summary]", "[summary]"]


def test_words_that_the_template_knows_are_sent(monkeypatch, capsys):
    """Each is a word with a slash in the template's text. The end of a tag is none, nor is a part of a word."""
    source = "{% if '/system_override' in text %}<think></think>[/INST]<|/tool|>/a_long_word{% endif %} https://x/path"
    lines = ["/system_override a", "/a_long_word", "/think", "/no_think", "/INST", "/tool", "/path", "/a", "/long_word"]
    sent, err = sent_lines(monkeypatch, capsys, *lines, template=SimpleNamespace(source=source))
    assert sent == lines[:4] and err.count("is not a command") == len(lines) - 4
    _, err = sent_lines(monkeypatch, capsys, "/system_overide", template=SimpleNamespace(source=source))
    assert "try /system_override, or" in err


def test_pasted_lines_are_a_message_whatever_the_first_word(tiny_model, monkeypatch, capsys):
    """A system message, however, may have several lines."""
    session, sent = letters_session(tiny_model("llama-mha"), max_new_tokens=5), []
    pasted = ["/hlep\nme", "/reset\nthe router", "/set the table\nfor two", "/* one\n * two */", "//a\n//b"]
    pasted += [f"/system {text_of(7)}\n{text_of(8)}", f"/SET system\n{text_of(9)}\n{text_of(10)}"]
    messages = iter(pasted)
    monkeypatch.setattr(chat, "read_message", lambda: next(messages, None))
    monkeypatch.setattr(session.template, "encode", lambda messages: [1])
    monkeypatch.setattr(session, "ask", lambda text, show: sent.append(text) or SimpleNamespace(new_tokens=[]))
    run_lines(session, monkeypatch, capsys)
    assert sent == [*pasted[:4], "/a\n//b"]
    assert session.system == f"{text_of(9)}\n{text_of(10)}"


def test_settings_are_shown_and_changed(tiny, tiny_model, monkeypatch, capsys):
    """From the next answer on, with those of the settings. The largest seed is followed by the smallest."""
    session = letters_session(tiny_model("llama-mha"), max_new_tokens=5)
    speculation = Speculation([RetrievalDraft()], 4, automatic=False)
    session.engine = Engine(session.engine.model, 1, 256, None, speculation)
    lines = [text_of(50, 51), "/set temperature 0.9", "/SET Top_K 20", "/set top_p .95", "/set min_p\t0.01"]
    lines += ["/set repetition_penalty 1.1", "/set max_new_tokens 9", f"/set seed {2**63 - 1}", text_of(50, 51, 52)]
    lines += [f"/set system {text_of(8, 8)}", "/set max_new_tokens None", "/set seed", "/set"]
    _, err = run_lines(session, monkeypatch, capsys, *lines)
    expected = SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=1.1)
    first, second = session.turns
    assert first.params == SamplingParams(temperature=0.0, seed=5)
    assert second.params == replace(expected, seed=2**63 - 1) and len(second.new_tokens) == 9
    assert second.cached_tokens == len(first.prompt) + 4, "all but the last token"
    fresh = load_model(tiny("llama-mha")[2], dtype=torch.float32)
    assert all(turn.new_tokens == answer_without_cache(fresh, turn) for turn in session.turns)

    shown = [line.split() for line in err.splitlines() if line.startswith(chat.SETTINGS)]
    values = {"temperature": "0.9", "top_k": "20", "top_p": "0.95", "min_p": "0.01", "repetition_penalty": "1.1"}
    assert dict(shown[:5]) == values, "what was set is shown"
    values |= {"frequency_penalty": "0.0", "presence_penalty": "0.0", "seed": str(-(2**63)), "max_new_tokens": "None"}
    assert dict(shown[10:]) == values | {"system": text_of(8, 8)}, "the next answer has the next seed"
    _, err = run_lines(session, monkeypatch, capsys, "/set system none", "/set system")
    assert session.system is None and err.split() == ["system", "None"] * 2


@pytest.mark.parametrize("line, why", [
    ("/set temperature hot", "temperature must be a number from 0 to 1e+30: 'hot'"),
    ("/set min_p \033[2J", r"min_p must be a number from 0 to 1: '\x1b[2J'"),
    ("/set seed 1e3", f"seed must be an integer from -{2**63} to {2**63 - 1}: '1e3'"),
    ("/set max_new_tokens 0", "max_new_tokens must be an integer of at least 1, or none: '0'"),
    (f"/set max_new_tokens {'9' * 5000}", f"max_new_tokens must be an integer of at least 1, or none: '{'9' * 5000}'"),
    ("/set system refuse this", "the template refuses this"),
    ("/set logit_bias 3", f"'logit_bias' is not a setting; the settings are {', '.join(chat.SETTINGS)}"),
])  # fmt: skip
def test_a_wrong_setting_is_one_line(tiny_model, monkeypatch, capsys, line, why):
    """It says what is allowed, and changes nothing."""
    session = letters_session(tiny_model("llama-mha"), max_new_tokens=5, system=text_of(9))
    before = dict(vars(session))
    capsys.readouterr()  # what making the model has printed
    assert run_lines(session, monkeypatch, capsys, line).err == f"error: {why}\n"
    assert vars(session) == before


def test_a_full_context(tiny_model, monkeypatch, capsys):
    """An answer that ends there is cut. What does not fit is refused."""
    session = letters_session(tiny_model("llama-mha"), 100, keeps_all=True)
    lines = [text_of(*range(20, 60)), text_of(61), "/reset", text_of(*range(5, 105)), text_of(62)]
    out, err = run_lines(session, monkeypatch, capsys, *lines)
    assert len(session.turns) == 2 and len(session.turns[0].new_tokens) == 100 - 43 + 1, "the last token is not read"
    remarks = [line for line in err.splitlines() if line.startswith(("[", "error"))]
    assert remarks[0].endswith("context 100 of 100, full: the answer is cut]")
    refusal = (
        "error: the context is full: this message and {} earlier messages have {} tokens, but the context holds 100"
    )
    assert remarks[1].startswith(refusal.format(2, 43 + 58 + 1 + 4))
    assert remarks[2].startswith(refusal.format(0, 103))
    assert session.messages[0]["content"] == text_of(62), "a message that did not fit is not in the conversation"


def test_the_oldest_turns_are_dropped_when_the_context_is_full(tiny, tiny_model, monkeypatch, capsys):
    """So many that half of it is free, and one line says how many. The rest equals a conversation without them; the
    system message stays. What is refused changes nothing."""
    session = letters_session(tiny_model("llama-mha"), 350, max_new_tokens=21, system=text_of(90, 91))
    for n in range(12):
        turn = session.ask(text_of(*range(20 + n, 31 + n)), quiet)
        assert turn.prompt[:4] == [1, 90, 91, 4] and len(turn.new_tokens) == 21
        kept = [{"role": "system", "content": text_of(90, 91)}, *session.messages[session.dropped : -1]]
        assert turn.prompt == session.template.encode(kept)
        if n in (7, 11):
            session.engine.clear()
            assert turn.new_tokens == answer_without_cache(load_model(tiny("llama-mha")[2], dtype=torch.float32), turn)
    said = re.findall(r"the context is full: dropped the oldest (\d+) turns;", capsys.readouterr().err)
    assert len(said) == 1 and 2 * int(said[0]) == session.dropped > 0, "not at every turn"
    assert len(session.messages) == 24, "the conversation itself is whole"
    before = session.dropped, list(session.messages)
    with pytest.raises(UserError, match="0 earlier messages have 407 tokens, but the context holds 350; shorten it"):
        session.ask(text_of(*([7] * 400)), quiet)
    assert (session.dropped, session.messages) == before
    session.reset()
    assert session.ask(text_of(50), quiet).prompt == [1, 90, 91, 4, 2, 50, 4, 3]


def test_a_last_message_is_answered_again(tiny, tiny_model):
    session = letters_session(tiny_model("llama-mha"), temperature=1.0, max_new_tokens=9)
    with pytest.raises(UserError, match="there is no answer yet"):
        session.regenerate(quiet)
    session.ask(text_of(50, 51), quiet)
    first = session.ask(text_of(60), quiet)
    again = [session.regenerate(quiet) for _ in range(3)]
    assert all(turn.prompt == first.prompt and turn.cached_tokens == len(first.prompt) - 1 for turn in again)
    assert len({tuple(turn.new_tokens) for turn in [first, *again]}) == 4, "each with another seed"
    assert len(session.messages) == 4 and session.messages[-1]["content"] == text_of(*again[-1].new_tokens)
    before = list(session.messages)
    session.messages[-2] = {"role": "user", "content": "refuse this"}
    with pytest.raises(UserError, match="the template refuses this"):
        session.regenerate(quiet)
    assert len(session.messages) == len(before)


def test_a_conversation_is_saved_and_goes_on(tiny_model, tmp_path, monkeypatch, capsys):
    model, file = tiny_model("llama-mha"), tmp_path / "talk.json"
    session = letters_session(model, max_new_tokens=5)
    lines = [f"/system {text_of(90)}", text_of(50, 51), text_of(52), f"/save {file}", text_of(53), f"/save {file}"]
    run_lines(session, monkeypatch, capsys, *lines)
    saved = json.loads(file.read_text(encoding="utf-8"))
    assert saved == {"system": text_of(90), "messages": session.messages} and len(saved["messages"]) == 6

    another = letters_session(model, max_new_tokens=5)
    run_lines(another, monkeypatch, capsys, f"/LOAD {file}", text_of(54))
    expected = session.ask(text_of(54), quiet)
    assert another.turns[-1].prompt == expected.prompt and another.turns[-1].new_tokens == expected.new_tokens

    contents = {"system": text_of(8), "user": "x", "assistant": ""}
    file.write_text(json.dumps([{"role": role, "content": content} for role, content in contents.items()]))  # OpenAI's
    another.dropped = 4
    another.load(file)
    assert (another.system, len(another.messages), another.dropped) == (text_of(8), 2, 0)


@pytest.mark.parametrize("content, why", [
    (None, "cannot be read"), (b"\xff\xfe[]", "cannot be read"), ("[" * 100_000, "is not a conversation"),
    ('{"messages": [3]}', "it has no list of messages"), ('[{"role": "user", "content": "a"}]', "must take turns"),
    ('[{"role": "user", "content": [3]}, {"role": "assistant", "content": "a"}]', "must take turns"),
    ('{"system": 3, "messages": []}', "must take turns"), ('{"system": false, "messages": []}', "must take turns"),
    ('""', "it has no list of messages"), ('{"messages": {}}', "it has no list of messages"),
    ('[{"role": "user", "content": "refuse this"}, {"role": "assistant", "content": ""}]', "refuses this"),
    (bytes(chat.LARGEST_CONVERSATION + 1), "is not a conversation file"),
])  # fmt: skip
def test_files_that_are_no_conversations(tiny_model, tmp_path, monkeypatch, capsys, content, why):
    """They are refused in one line, whether they are read or written, and are left as they are."""
    session, file = letters_session(tiny_model("llama-mha"), max_new_tokens=3), tmp_path / "x.json"
    capsys.readouterr()  # the library that has written the model prints its progress
    session.messages = before = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    _, err = run_lines(session, monkeypatch, capsys, f"/load {file}", "/load", "/save", f"/save {tmp_path}")
    lines = err.splitlines()
    assert len(lines) == 4 and re.search(why, lines[0]) and lines[0].startswith("error: ")
    assert lines[1:3] == ["error: /load needs the name of a file", "error: /save needs the name of a file"]
    assert session.messages == before
    awkward = [f"/{verb} {tmp_path}/{'a' * 300}" for verb in ("save", "load")] + ["/load a\0b", "/save a\0b"]
    _, err = run_lines(session, monkeypatch, capsys, *awkward)
    assert len(err.splitlines()) == 4 and all(line.startswith("error: /") for line in err.splitlines())
    if content is not None and why != "refuses this":
        _, err = run_lines(session, monkeypatch, capsys, f"/save {file}")
        assert err.startswith("error: ") and file.stat().st_size == len(content)


@pytest.mark.parametrize("hides", [False, True])
@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize("prompt, answer, thoughts", [
    ("", "<think>a\n<b</think>\n\nc <think> d", "<think>a\n<b</think>"),
    ("", " \n<think>\n\n</think>\n\nc", " \n<think>\n\n</think>"),
    ("x <think>\n", "a </thin</think>c</think>d", "a </thin</think>"), ("", "<thin", ""), ("", "", ""),
    ("x <think>", "it never ends </thi", "it never ends </thi"), ("<think></think>", "no <think>thoughts</think>", ""),
])  # fmt: skip
def test_thoughts_are_dim_or_hidden(monkeypatch, capsys, hides, colours, size, prompt, answer, thoughts):
    monkeypatch.setattr(chat, "has_colours", lambda stream: colours)
    shown = []
    printer = AnswerPrinter(shown.append, ("<think>", "</think>"), prompt, hides)
    for at in range(0, len(answer), size):
        printer.add(answer[at : at + size])
    printer.add("", last=True)
    rest = answer[len(thoughts) :]
    if hides and thoughts:
        assert "".join(shown) == rest.lstrip() and "thinking" in capsys.readouterr().err
    elif colours and thoughts:
        space = len(thoughts) - len(thoughts.lstrip())
        assert "".join(shown) == f"\033[2m{thoughts}\033[0m{rest}" and space < 3
    else:
        assert "".join(shown) == answer


@pytest.mark.parametrize("begin", ["<|im_start|>", "<|im_start|> a"])
def test_thoughts_in_a_conversation_without_a_template(default_checkpoint, tiny_model, monkeypatch, capsys, begin):
    """Marks that are, or begin with, special tokens are text of the answer. Answers continue the text, and the next
    prompt is all of it."""
    tokenizer, model = Tokenizer(default_checkpoint), tiny_model("llama-mha")
    monkeypatch.setattr(chat, "check_prompt", lambda *_: None)
    session = make_session(model, 256, None, tokenizer, thinking=(begin, "<|im_end|>"))
    answer = tokenizer.encode("<|im_start|> a cat<|im_end|> Miau", add_bos=False)

    def add(request):
        request.times |= dict.fromkeys(("added", "started", "first_token", "finished"), 0.0)
        request.new_tokens, request.finish_reason = answer, "stop"
        for token in answer:
            request.on_token(token)

    monkeypatch.setattr(session.engine, "add", add)
    out, err = run_lines(session, monkeypatch, capsys, "Hi", "/thoughts", "Ho", "/thoughts", "Hu")
    said = "<|im_start|> a cat<|im_end|> Miau"
    assert out == f"{said}\nMiau\n{said}\n" and session.messages[1]["content"] == said
    assert session.turns[1].prompt == tokenizer.encode(f"Hi{said}\nHo")
    assert "(the model's thoughts are hidden)" in err and "(the model's thoughts are shown)" in err


@pytest.mark.parametrize("lines, messages", [
    (['"""one', "two", 'three"""', "four"], ["one\ntwo\nthree", "four"]),
    (['"""', "  one", "", "/reset", '"""', "four"], ["  one\n\n/reset", "four"]),
    (['"""one line"""', "two"], ["one line", "two"]), (['"""', '"""', "x"], ["x"]),
    (['"""', "def f():", '    """A docstring."""', '"""', "x"], ['def f():\n    """A docstring."""', "x"]),
    (['"""open', "to the end"], ["open\nto the end"]), (["/reset the router", "/bye for now", "/stats?"], ["/stats?"]),
    (["a", "EXIT", "b"], ["a"]), (["a", "/Bye", "b"], ["a"]),
])  # fmt: skip
def test_messages_of_several_lines_and_ends(monkeypatch, capsys, lines, messages):
    assert sent_lines(monkeypatch, capsys, *lines)[0] == messages


def test_the_history_is_bounded_private_and_may_be_missing(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert chat.read_history() == []
    for n in range(2 * chat.HISTORY_LINES + 3):
        chat.write_history(f"line {n}\nof two")
    chat.write_history("  ")
    file = tmp_path / "state" / "fastpath" / "history.jsonl"
    assert file.stat().st_mode & 0o777 == 0o600
    found = chat.read_history()
    assert len(found) == chat.HISTORY_LINES and found[-1] == f"line {2 * chat.HISTORY_LINES + 2}\nof two"
    assert len(file.read_text().splitlines()) == chat.HISTORY_LINES
    for broken in (b"\xff\n", b"not JSON\n", b"[1]\n3\n", b'"tw'):
        file.write_bytes(b'"one"\n' + broken)
        assert chat.read_history() == ["one"], "what is not whole is left out"
    monkeypatch.setenv("XDG_STATE_HOME", str(file))
    chat.write_history("no place")
    assert chat.read_history() == []


@pytest.mark.slow
def test_closed_streams(tiny):
    """Nothing is written to a closed stream, nor to another stream instead."""
    command = [*PROGRAM, "--checkpoint_path", str(tiny("llama-mha")[2]), "--prompt_ids", "5", "--max_new_tokens", "3"]

    def started(closed: str) -> subprocess.Popen:
        shell = ["bash", "-c", f'exec "$@" {closed}', "bash", *command, "--json"]
        return subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.PIPE)

    with started("<&- 2>&-") as only_stdout, started(">&-") as no_stdout:
        out, err = only_stdout.communicate(timeout=180)
        assert only_stdout.returncode == 0 and err == b"" and set(json.loads(out)) > {"samples"}
        out, err = no_stdout.communicate(timeout=180)
        assert no_stdout.returncode == 0 and out == b"" and b"Traceback" not in err


@pytest.mark.slow
def test_ctrl_c_while_it_starts(start):
    begin = time.monotonic()
    programs = {seconds: start("--prompt", "x") for seconds in (0.3, 0.7, 1.2)}
    for seconds, program in programs.items():
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        program.type("\x03")
        assert program.exit_code() in (-signal.SIGINT, 130) and "Traceback" not in program.seen


class Stream(io.StringIO):
    def __init__(self, is_terminal: bool):
        super().__init__()
        self.is_terminal = is_terminal

    def isatty(self) -> bool:
        return self.is_terminal


def test_a_stopwatch_counts_in_one_line_that_fits_the_terminal(monkeypatch, capsys):
    """Elsewhere it says when it begins and ends, but no time of what was not finished."""
    with Stopwatch("thinking", "about a minute") as watch:
        time.sleep(0.01)
    assert capsys.readouterr().err == "thinking (about a minute) ...\nthinking: 0.0 s\n" and watch.seconds > 0.01
    with pytest.raises(KeyboardInterrupt), Stopwatch("thinking"):
        raise KeyboardInterrupt
    assert capsys.readouterr().err == "thinking ...\n"
    monkeypatch.setattr(sys, "stderr", Stream(True))
    monkeypatch.setattr(cli, "REFRESH_S", 0.02)
    monkeypatch.setenv("COLUMNS", "30")
    with Stopwatch("compiling decode", "about a minute or more"):
        wait_until(lambda: sys.stderr.getvalue().count("\r") > 2)
    *shown, end = sys.stderr.getvalue().split("\r\033[K")[1:]
    assert shown[0] == "compiling decode (abo ... 0 s" and len(shown[0]) == 29
    assert re.fullmatch(r"compiling decode: [\d.]+ s\n", end)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("total, unit, n, line, bar", [
    (117_000_000, "B", 58_000_000, "58 of 117 MB", "58.0M/117M"),
    (6007, " tokens", 2048, "2,048 of 6,007 tokens", "2.05k/6.01k"),
])  # fmt: skip
def test_progress_is_shown_while_one_step_takes_long(monkeypatch, is_terminal, total, unit, n, line, bar):
    """As a bar that is removed at the end, or as lines; nothing, if it ends before the first is due."""
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    monkeypatch.setattr(cli, "LINE_S", 0.02)
    monkeypatch.setattr(cli, "REFRESH_S", 0.02)
    with progress_bar(total, "working", unit, delay=0.02) as progress:
        progress.update(n)
        wait_until(lambda: bar in sys.stderr.getvalue() if is_terminal else sys.stderr.getvalue().count("\n") > 1)
        progress.write("a line")
    shown = sys.stderr.getvalue()
    assert "a line\n" in shown
    if is_terminal:
        assert shown.endswith("\r") and "working" in shown
    else:
        assert set(shown.splitlines()) == {f"working: {line}", "a line"} and "\r" not in shown

    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    monkeypatch.setattr(cli, "LINE_S", 60)
    with pytest.raises(KeyboardInterrupt), progress_bar(total, "working", unit, delay=60) as progress:
        progress.update(n)
        raise KeyboardInterrupt
    assert sys.stderr.getvalue() == ""


@pytest.mark.parametrize("is_terminal", [False, True])
def test_the_time_left_follows_from_the_rate(monkeypatch, is_terminal):
    """What an earlier process, or the prefix cache, has done does not count. Lines come every line_s seconds."""
    monkeypatch.setattr(sys, "stderr", Stream(is_terminal))
    monkeypatch.setattr(cli, "REFRESH_S", 0.02)
    with progress_bar(12_000, "reading", " tokens", delay=0.02, line_s=0.02) as progress:
        wait_until(lambda: "0" in sys.stderr.getvalue())
        progress.start_t = time.time() - 10
        progress.initial = 2000
        progress.n = 4000
        amount = "4.00k/12.0k" if is_terminal else "4,000 of 12,000"
        wait_until(lambda: amount in sys.stderr.getvalue())
    shown = sys.stderr.getvalue().partition(amount)[2]
    assert re.match(r" \[00:1\d<00:[45]\d" if is_terminal else r" tokens, about [45]\d s left\n", shown), shown
    assert is_terminal or sys.stderr.getvalue().startswith("reading: 0 of 12,000 tokens\n")


def wait_until(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("lengths, rows", [([300], 1), ([40, 7, 23], 2), ([5, 9], 2)])
def test_reading_prompts_shows_how_far_it_is(tiny_model, monkeypatch, lengths, rows):
    """The tokens that were read are counted over all prompts, those in a prefix cache included, also while others wait
    or are answered. Afterwards each request has its first token."""
    seen = []

    class Bar(cli.Progress):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "n" and value:
                seen.append(value)

    engine = Engine(tiny_model("llama-mha", rows=rows), rows, 512, options=EngineOptions(chunk_tokens=16))
    monkeypatch.setattr(cli, "Progress", Bar)
    monkeypatch.setattr(engine_module, "PREFILL_TOKENS", 64)
    prompts = random_prompts(lengths)
    for again in range(2):
        requests = [Request(list(prompt), SamplingParams(temperature=0.0), 4) for prompt in prompts]
        for request in requests:
            engine.add(request)
        read_with_progress(engine, requests)
        assert all(request.new_tokens for request in requests)
        assert seen == sorted(seen) and seen[-1] == sum(lengths)
        assert max(lengths) < 64 or (len(seen) > 1) == (not again)
        seen.clear()
        while engine.has_requests:
            engine.step()


def test_help_shows_each_default_that_is_a_value():
    parser = ArgumentParser(formatter_class=HelpFormatter)
    for name, default in (("a", 0), ("b", 0.0), ("c", None), ("d", []), ("e", False), ("f", "text")):
        parser.add_argument(f"--{name}", default=default, help="help")
    assert re.findall(r"--(\w) .*default: (\S+)\)", parser.format_help()) == [("a", "0"), ("b", "0.0"), ("f", "text")]


def test_colours_are_for_terminals_that_want_them(monkeypatch):
    terminal = SimpleNamespace(isatty=lambda: True)
    for term, no_color, expected in (("xterm", "", True), ("xterm", "1", False), ("dumb", "", False)):
        monkeypatch.setenv("TERM", term)
        monkeypatch.setenv("NO_COLOR", no_color)
        assert has_colours(terminal) == expected and not has_colours(io.StringIO())


# ---------------------------------------------------------------- the program


class Terminal:
    """A program in a pseudo-terminal."""

    def __init__(self, *args, **environment):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            fcntl.ioctl(0, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
            inherited = {name: value for name, value in os.environ.items() if name != "COLUMNS"}  # xdist sets it
            os.execve(PROGRAM[0], [*PROGRAM, *map(str, args)], inherited | {"TERM": "xterm"} | environment)
        self.seen = ""

    def resize(self, columns: int):
        fcntl.ioctl(self.fd, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))

    def paste(self, text: str):
        self.type(f"\x1b[200~{text}\x1b[201~")

    def type(self, text: str | bytes):
        os.write(self.fd, text.encode() if isinstance(text, str) else text)

    def until(self, pattern: str, seconds=180) -> str:
        """Wait for a match of pattern; returns what was shown up to its end."""
        end = time.monotonic() + seconds
        while not (match := re.search(pattern, self.seen)):
            assert time.monotonic() < end, f"no {pattern!r} in {self.seen!r}"
            if select.select([self.fd], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
                except OSError:  # the program has ended
                    assert re.search(pattern, self.seen), f"no {pattern!r} in {self.seen!r}"
        shown, self.seen = self.seen[: match.end()], self.seen[match.end() :]
        return shown

    def prompt(self, pattern: str = "") -> str:
        """Wait for the prompt and for readline, which ignores earlier keys; returns what was shown."""
        shown = self.until(pattern or PROMPT)
        end = time.monotonic() + 60
        while termios.tcgetattr(self.fd)[3] & termios.ICANON:  # readline reads single keys
            assert time.monotonic() < end, "readline does not read"
            time.sleep(0.01)
        time.sleep(0.1)
        return shown

    def exit_code(self, seconds=180) -> int:
        end = time.monotonic() + seconds
        while (ended := os.waitpid(self.pid, os.WNOHANG)) == (0, 0):
            assert time.monotonic() < end, f"still running after {self.seen!r}"
            with suppress(OSError):
                if select.select([self.fd], [], [], 0.2)[0]:
                    self.seen += os.read(self.fd, 1 << 16).decode(errors="replace")
        return os.waitstatus_to_exitcode(ended[1])


@pytest.fixture
def start(tmp_path):
    """Starts programs in terminals, and kills them after the test."""
    started = []

    def start_program(*args, **options):
        started.append(Terminal(*args, **{"XDG_STATE_HOME": str(tmp_path / "state")} | options))
        return started[-1]

    yield start_program
    for program in started:
        with suppress(OSError):
            os.kill(program.pid, signal.SIGKILL)
            os.waitpid(program.pid, 0)
        os.close(program.fd)


PROMPT = r"> (\x1b\[0m)?$"
INNER_PROMPT = r"\. (\x1b\[0m)?$"  # between two """


LATIN = {"PYTHONUTF8": "0", "PYTHONIOENCODING": "latin-1"}


@pytest.mark.slow
@pytest.mark.parametrize("environment", [{}, pytest.param(LATIN, marks=pytest.mark.full)])
def test_a_session_in_a_terminal(default_checkpoint, start, environment):
    talk = start("--interactive", "--temperature", 0, "--max_new_tokens", 300, **environment)
    talk.prompt()
    talk.type("Tell me a very long story about a dragon")
    talk.until("ragon")
    talk.type("\r")
    talk.until(r"\n")
    talk.until(r"(\w+\W+){12}")  # of the answer
    talk.type(b"\x03\x03")
    shown = talk.prompt()
    line = r"\[\d+ tokens, [\d.]+ tokens/s[^;]*; \d+ read, 0 reused; context \d+ of 8192; interrupted\]"
    assert re.search(line, shown)
    talk.type("Say hello in one word: \xfc\xf1 日本 👋.\r" if not environment else "Say hello in one word.\r")
    shown = talk.until(r"\d+ read, \d+ reused; ")  # readline may draw the prompt again with the first key
    talk.prompt()
    new, reused = map(int, re.search(r"; (\d+) read, (\d+) reused; ", shown).groups())
    assert new < 60 and reused > 45
    talk.type("half a line")
    talk.until("half a line")  # Python's readline misses a Ctrl-C while it handles a key
    talk.type("\x03")
    talk.until(r"Ctrl-D leaves\)")
    talk.prompt()
    talk.type("\x1b[A\x1b[A\x15/stats\r")  # the arrow keys, then the line cleared
    shown = talk.until("written: ")
    assert "^[[A" not in shown and "turns: 2" in shown and "\x1b[2m" in shown
    talk.prompt()
    talk.type("\x1b[A\x1b[A\r")  # the line before the last
    talk.until(r"\d+ reused; ")
    talk.prompt()
    talk.type("\x04")
    assert talk.exit_code() == 0


@pytest.mark.slow
def test_pasted_lines_and_tabs_in_a_terminal(default_checkpoint, start, tmp_path):
    """They are one message, also across a change of the terminal's size, and in the history of the next run."""
    options = ["--interactive", "--temperature", 0, "--max_new_tokens", 3]
    talk = start(*options)
    talk.prompt()
    talk.paste("\n".join(f"line {n} /reset" for n in range(60)) + "\n")
    talk.until("line 59")
    talk.resize(57)
    talk.type(" THE END\r")
    shown = talk.until(r"\d+ read, \d+ reused; ")
    assert int(re.search(r"(\d+) read, ", shown)[1]) > 300
    talk.prompt()
    talk.type('"""a block that\r')
    talk.prompt(INNER_PROMPT)
    talk.type("\x03")
    talk.until(r"Ctrl-D leaves\)")
    talk.prompt()
    talk.type("\x15/stats\r")
    assert "turns: 1" in talk.until("written: ")
    talk.prompt()
    talk.type("exit\r")
    assert talk.exit_code() == 0

    again = start(*options)
    again.prompt()
    again.type("\x1b[A\x1b[A\r")  # /stats
    assert "turns: 0" in again.until("written: ")
    again.prompt()
    again.type("/s\t\t")  # Tab completes a word of a command at a time, at the beginning of the line
    shown = again.until(r"/save +/set +/stats +/system\s")
    assert "temperature" not in shown
    again.type("et te\t 0.25\r")
    again.until(r"temperature +0\.25\r\n")
    again.prompt()
    again.type("/zzz\t\t\r")
    again.until("error: /zzz is not a command")
    again.prompt()
    again.type("\tGrüße\t/s\tx\r")  # elsewhere it is a tab
    again.until(r"\d+ read, \d+ reused; ")
    again.prompt()
    again.type("/by\t\r")
    assert again.exit_code() == 0
    lines = (tmp_path / "state" / "fastpath" / "history.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines][-4:] == ["/set temperature 0.25", "/zzz", "\tGrüße\t/s\tx", "/bye"]


@pytest.mark.slow
def test_a_session_in_pipes(default_checkpoint, tmp_path):
    command = [*PROGRAM, "--interactive", "--temperature", "0", "--max_new_tokens", "12", "--prompt", "Hi"]
    text = b"What is 2+2?\n\n\xff\xfe not UTF-8\r\nlast line without an end"
    (tmp_path / "out").write_bytes(bytes(1024))
    limited = ["bash", "-c", 'ulimit -f 1; exec "$@" >> out', "bash", *command]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as reads_all, subprocess.Popen(limited, cwd=tmp_path, **pipes) as full:
        out, err = reads_all.communicate(text, timeout=120)
        assert reads_all.returncode == 0 and out.count(b"\n") >= 4
        err = err.decode()
        assert len(re.findall("tokens/s[,;]", err)) == 4 and "> Hi" in err and "\x1b" not in err and "\r" not in err
        assert b"tokens/s" not in out and b"> " not in out
        _, err = full.communicate(b"", timeout=120)
        assert full.returncode == 2 and b"generate.py: error: [Errno 27]" in err


def test_one_conversation_at_a_time(monkeypatch):
    for args in (["--json"], ["--num_samples", "2"], ["--prompt_ids", "5"], ["--profile", "x"], ["--batch_size", "3"]):
        with pytest.raises(UserError, match="--interactive is one conversation"):
            parse_arguments(["--interactive", *args])
    assert parse_arguments(["--interactive"]).max_new_tokens is None
    assert parse_arguments(["--system", "x"]).chat and parse_arguments([]).max_new_tokens == 200
    assert chat.HELP.count("\n") < 14
    assert all(command in chat.HELP for command in {*chat.COMMANDS, "/think", "/no_think"} - {"/help"})
