"""Budgets of thoughts: the masks that end them, in the engine with drafts and grammars, and the fields of requests."""

import json
import random
from types import SimpleNamespace

import pytest
import torch
from scripted import served_model
from servers import CONTEXT
from test_tools import SOURCES, function, read_template

from drafts.retrieval import RetrievalDraft
from engine import Engine, EngineOptions
from load import load_model
from serve import EngineServer
from server.answer_text import AnswerText
from server.answers import AnswerParser, Content, Reasoning
from server.anthropic import chat_body, parse_message
from server.request_fields import ApiError, Fields
from speculative import Speculation
from text.chat_template import ChatTemplate
from text.grammar import MAX_OVERRUN, GrammarThread, ThinkingBudget, ThinkingLimit
from text.tokenizer import Tokenizer, read_tokenizer_files

MARKS = ("<think>", "</think>")
PIECES = ["<th", "ink>", "<think>", "</th", "</think>", "a", " ", "\n", "</think>\n", "k>b", "\n</th", "x<think>"]
PIECES = [piece.encode() for piece in PIECES] + [b"\xc3", b"\xa4", b"a\xc3"]  # which may be parts of "ä"
END_IDS = (7, 3, 1, 7)  # of "\n</think>\n"
VOCABULARY = SimpleNamespace(special_ids={4}, name=lambda i: PIECES[i].decode(), token_bytes=PIECES.__getitem__)


def forced_token(budget: ThinkingBudget, tokens: list[int]) -> int | None:
    """The only token that may follow these, from the texts of all their beginnings."""
    texts = [b"".join(PIECES[i] for i in tokens[:n]) for n in range(len(tokens) + 1)]
    begin, end = (mark.encode() for mark in MARKS)
    start, thoughts = 0, texts
    if not budget.begins_inside:
        begun = [n for n, text in enumerate(texts) if text.lstrip().startswith(begin)]
        if not begun:
            return None
        start = begun[0]
        thoughts = [text.lstrip().removeprefix(begin) for text in texts[start:]]
    counts = [n for n, text in enumerate(thoughts) if n >= budget.tokens and not text.endswith(b"\xc3")]
    last = min([*counts, budget.tokens + MAX_OVERRUN])  # the first count at which thoughts may be ended
    if any(end in text for text in thoughts[: last + 1]):
        return None
    written = len(tokens) - start - last
    return END_IDS[written] if 0 <= written < len(END_IDS) else None


def allowed(limit: ThinkingLimit, drafted: list[int]) -> list[set[int]]:
    masks = torch.zeros(1 + len(drafted), 2, dtype=torch.int32)
    limit.fill(masks, drafted)
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    return [set(line.flatten().nonzero()[:, 0].tolist()) for line in bits]


@pytest.mark.parametrize("begins_inside", [False, True])
def test_masks_of_random_tokens(begins_inside):
    """Also after drafted tokens. Those that are not allowed are followed, too, as if the mask did not exist."""
    chance = random.Random(3)
    forced = 0
    for _ in range(200):
        budget = ThinkingBudget(chance.randint(0, 4), MARKS, END_IDS, begins_inside)
        limit, tokens = ThinkingLimit(budget, VOCABULARY), []
        if chance.random() < 0.5:
            tokens.append(2)  # the first mark
            limit.accept(2)
        for _ in range(10):
            only = forced_token(budget, tokens)
            forced += only is not None
            drafted = [chance.randrange(len(PIECES)) for _ in range(3)]
            if only is not None and chance.random() < 0.8:
                drafted[0] = only
            for n, mask in enumerate(allowed(limit, drafted)):
                only_then = forced_token(budget, tokens + drafted[:n])
                assert mask == ({only_then} if only_then is not None else set(range(64))), (tokens, drafted[:n])
                if n < 3 and only_then not in (None, drafted[n]):
                    break
            tokens.append(drafted[0] if only is None else only)
            assert limit.accept(tokens[-1]) is False
    assert forced > 200
    limit = ThinkingLimit(ThinkingBudget(0, MARKS, (31, 32, 63), True), VOCABULARY)
    assert allowed(limit, [31, 32]) == [{31}, {32}, {63}], "the highest bit of a word"


# ---------------------------------------------------------------- in the engine


class Pipe:
    """The pipe to the HTTP process: requests that wait, and the updates that are sent back."""

    def __init__(self, messages: list):
        self.updates = []
        self.recv = messages.pop
        self.poll = lambda timeout: bool(messages)
        self.send = lambda status: self.updates.extend(status.updates)


@pytest.fixture(scope="module")
def loaded(checkpoints):
    model = load_model(checkpoints[None], dtype=torch.float32)
    model.setup_caches(2, CONTEXT)
    tokenizer = Tokenizer(checkpoints[None])
    return model, tokenizer, GrammarThread(tokenizer, model.config.vocab_size, tokenizer.eos_ids)


@pytest.fixture(scope="module")
def model(checkpoints):
    return served_model(checkpoints[None], SOURCES["qwen3.5"])


def answer(model, loaded, body: dict, drafts: bool = False):
    """(new tokens, thoughts, content, the number of calls) of the answer to a chat."""
    decoder, tokenizer, grammars = loaded
    (choice,) = model.parse_chat({"messages": [{"role": "user", "content": "Hi"}]} | body).choices
    speculation = Speculation([RetrievalDraft([[*range(3, 131)] * 2])], 3, automatic=False) if drafts else None
    engine = Engine(decoder, 1, CONTEXT, None, speculation, EngineOptions(64))
    pipe = Pipe([choice.text_request])
    server = EngineServer(engine, tokenizer, pipe, grammars)
    while not pipe.updates or pipe.updates[-1].finish_reason is None:
        server._receive()
        server._add_compiled()
        server._step("ready")

    parser = AnswerParser(choice.text_request.syntax)
    answer_text = AnswerText(tokenizer, choice.text_request)
    events = parser.add("".join(answer_text.read(update).text for update in pipe.updates)) + parser.end()
    thoughts = "".join(event.text for event in events if isinstance(event, Reasoning))
    content = "".join(event.text for event in events if isinstance(event, Content))
    return choice.request.new_tokens, thoughts, content, parser.whole_calls


def place_of(new_tokens: list[int], end_ids: tuple[int, ...]) -> int:
    """Where the text that ends thoughts begins."""
    return next(at for at in range(len(new_tokens)) if tuple(new_tokens[at : at + len(end_ids)]) == end_ids)


F = function("f", {"properties": {"x": {"enum": ["a", "bc"]}}, "required": ["x"], "additionalProperties": False})
BODIES = {
    "plain": {"ignore_eos": True, "max_tokens": 30},
    "schema": {"structured_outputs": {"json": {"enum": ["a", "bc"]}}},
    "call": {"tools": [F], "tool_choice": "required", "parallel_tool_calls": False},
}


@pytest.mark.parametrize("budget", [0, 1, 9])
@pytest.mark.parametrize("name", BODIES)
def test_thoughts_end_after_their_budget(model, loaded, name, budget):
    """The answer goes on, and fits its grammar. With drafts, greedy tokens are the same."""
    body = BODIES[name] | {"thinking_budget": budget, "temperature": 0, "logit_bias": {"1": -100}}
    new_tokens, thoughts, content, calls = answer(model, loaded, body)
    end_ids = model.chat.thinking_end_ids
    at = place_of(new_tokens, end_ids)
    assert budget <= at < budget + MAX_OVERRUN and len(new_tokens) > at + len(end_ids)
    assert model.tokenizer.decode(end_ids) == "\n</think>\n\n"
    assert thoughts.rstrip() == model.tokenizer.decode(new_tokens[:at]).rstrip()
    if name == "schema":
        assert json.loads(content) in ("a", "bc")
    assert calls == (name == "call")
    assert answer(model, loaded, body, drafts=True)[0] == new_tokens
    sampled = answer(model, loaded, body | {"temperature": 1.0, "seed": 5}, drafts=True)[0]
    assert budget <= place_of(sampled, end_ids) < budget + MAX_OVERRUN


def test_thoughts_within_their_budget_are_as_without_it(model, loaded):
    body = {"temperature": 0, "max_tokens": 20}
    assert answer(model, loaded, body | {"thinking_budget": 20})[0] == answer(model, loaded, body)[0]


# ---------------------------------------------------------------- templates and requests


@pytest.mark.parametrize("source, end", [
    *((SOURCES[name], "\n</think>\n\n") for name in ("qwen3", "qwen3.5", "glm")), (SOURCES["xml"], None),
    (read_template("deepseek-r1-distill"), "\n</think>\n\n"), ("</think>{{ 1 / 0 }}", "\n</think>\n\n"),
    ("{% for m in messages %}{{ m.thinking }}</think>\n{{ m.content }}{% endfor %}", "</think>\n"),
    ("{% for m in messages %}[THINK]{{ m.reasoning }}[/THINK]{{ m.content }}{% endfor %}", "[/THINK]"),
    ("{% for m in messages %}{{ m.thinking }} </think> {{ m.content }}{% endfor %}", "\n</think>\n\n"),
])  # fmt: skip
def test_the_end_of_thoughts_is_that_of_the_template(checkpoints, source, end):
    files = read_tokenizer_files(checkpoints[None])
    files.template = source
    assert ChatTemplate(files, Tokenizer(files)).thinking_end() == end


HI = [{"role": "user", "content": "Hi"}]


def limit_of(model, **body) -> ThinkingBudget | None:
    return model.parse_chat({"messages": HI} | body).choices[0].text_request.thinking


def test_requests_with_a_budget(checkpoints, model):
    other = served_model(checkpoints[None], SOURCES["qwen3"])  # whose prompt does not begin thoughts
    assert limit_of(other, thinking_budget=0) == ThinkingBudget(0, MARKS, other.chat.thinking_end_ids, False)
    budget = ThinkingBudget(5, MARKS, model.chat.thinking_end_ids, True)
    assert limit_of(model, thinking_budget=5) == budget
    assert limit_of(model) is None and limit_of(model, thinking_budget=None) is None
    assert limit_of(model, thinking_budget=5, enable_thinking=False) is None, "there are no thoughts"
    assert limit_of(model, thinking_budget=5, messages=[*HI, {"role": "assistant", "content": "So"}]) is None
    assert model.tokenize({"messages": HI, "thinking_budget": 5})["count"] > 0
    for value in (-1, "5", 1.5, True, [5]):
        with pytest.raises(ApiError, match="thinking_budget must be") as caught:
            limit_of(model, thinking_budget=value)
        assert caught.value.param == "thinking_budget"


def test_a_model_without_thoughts_ignores_the_budget(checkpoints, capsys, monkeypatch):
    monkeypatch.setattr(Fields, "logged", set())
    model = served_model(checkpoints[None], SOURCES["xml"])
    assert limit_of(model, thinking_budget=5) is limit_of(model, thinking_budget=5) is None
    assert capsys.readouterr().err.count("thinking_budget, which is ignored") == 1


def test_anthropics_budget(model):
    def limit(thinking: dict) -> ThinkingBudget | None:
        body = {"max_tokens": CONTEXT, "messages": HI, "thinking": thinking}
        return parse_message(model, body).choices[0].text_request.thinking

    assert limit({"type": "enabled", "budget_tokens": 7}).tokens == 7
    for thinking in ({"type": "enabled"}, {"type": "disabled", "budget_tokens": 7}, {"type": "adaptive"}):
        assert limit(thinking) is None
    for value in (0, "7", 1.5):
        with pytest.raises(ApiError, match="budget_tokens must be"):
            chat_body({"messages": HI, "thinking": {"type": "enabled", "budget_tokens": value}})
