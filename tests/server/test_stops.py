"""Stop strings in chats: they end the content of an answer, whatever its thoughts and calls contain.

Texts go the whole way: as tokens of the engine's process, which AnswerText decodes, through both APIs, streamed and
whole.
"""

import itertools
import json
import pickle
from types import SimpleNamespace

import pytest
from scripted import served_model
from servers import take_tokens
from test_anthropic import events_of
from test_tools import SOURCES

from serve import RunningRequest
from server.anthropic import MessageBuilder, parse_message
from server.api import CompletionRequest, ServedModel
from server.pipe_messages import Update
from server.responses import ResponseBuilder

QUESTION = {"role": "user", "content": "Hello"}
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
CHAT = {"messages": [QUESTION], "tools": [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]}
MESSAGE = {"messages": [QUESTION], "tools": [{"name": "f", "input_schema": SCHEMA}]}
EOS = 1  # "<|end|>"


@pytest.fixture(scope="module")
def model(checkpoints):
    return served_model(checkpoints[None], SOURCES["qwen3"])


def answer_with(model: ServedModel, completion: CompletionRequest, text: str, reason: str, steps: list[int]):
    """The updates of the engine's process, if the model answers with a text.

    reason: "stop" if an EOS token follows the text, "length" if the text is all that max_tokens allows. steps: how many
    tokens the engine's steps have, in turns.
    """
    (choice,) = completion.choices
    running = RunningRequest(pickle.loads(pickle.dumps(choice.text_request)))  # as the pipe does
    tokens = model.tokenizer.encode(text, add_bos=False) + ([EOS] if reason == "stop" else [])
    assert model.tokenizer.decode(tokens) == text
    updates = []
    for n in itertools.cycle(steps):
        updates.append(choice.read(take_tokens(running, tokens, n, reason)))
        if updates[-1].finish_reason is not None:
            return updates


def openai_whole(model, text: str, stop, reason: str, steps) -> SimpleNamespace:
    """What a client sees of an answer. tokens: the bytes of the tokens that have log-probabilities."""
    completion = model.parse_chat(CHAT | {"stop": stop, "logprobs": True})
    completion.choices[0].updates += answer_with(model, completion, text, reason, steps)
    choice = ResponseBuilder(model, completion).whole()["choices"][0]
    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    tokens = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    thoughts, content = message.get("reasoning_content", ""), message["content"] or ""
    return SimpleNamespace(
        content=content, thoughts=thoughts, calls=calls, reason=choice["finish_reason"], tokens=tokens
    )


def openai_streamed(model, text: str, stop, reason: str, steps) -> SimpleNamespace:
    completion = model.parse_chat(CHAT | {"stop": stop, "logprobs": True, "stream": True})
    builder = ResponseBuilder(model, completion)
    updates = answer_with(model, completion, text, reason, steps)
    chunks = [chunk for update in updates for chunk in builder.chunks(completion.choices[0], update)]
    shown = SimpleNamespace(content="", thoughts="", calls=[], reason="", tokens=b"")
    for part in (chunk["choices"][0] for chunk in chunks):
        delta = part["delta"]
        shown.content += delta.get("content", "")
        shown.thoughts += delta.get("reasoning_content", "")
        for call in delta.get("tool_calls", []):
            shown.calls += [""] * (call["index"] + 1 - len(shown.calls))
            shown.calls[call["index"]] += call["function"]["arguments"]
        for entry in (part["logprobs"] or {"content": []})["content"]:
            shown.tokens += bytes(entry["bytes"])
        shown.reason = part["finish_reason"]
    return shown


def anthropic_request(model, stop, **fields) -> tuple[CompletionRequest, MessageBuilder]:
    completion = parse_message(model, MESSAGE | {"stop_sequences": [stop] if isinstance(stop, str) else stop} | fields)
    return completion, MessageBuilder(model, completion)


def anthropic_whole(model, text: str, stop, reason: str, steps) -> tuple[list[tuple], str, str | None]:
    """(the blocks as (type, text or JSON of the input), stop_reason, stop_sequence)."""
    completion, builder = anthropic_request(model, stop)
    completion.choices[0].updates += answer_with(model, completion, text, reason, steps)
    message = builder.whole()
    blocks = []
    for block in message["content"]:
        kind = block["type"]
        blocks.append((kind, json.dumps(block["input"]) if kind == "tool_use" else block[kind]))
    return blocks, message["stop_reason"], message["stop_sequence"]


def anthropic_streamed(model, text: str, stop, reason: str, steps) -> tuple[list[tuple], str, str | None]:
    completion, builder = anthropic_request(model, stop, stream=True)
    updates = answer_with(model, completion, text, reason, steps)
    stream = b"".join(builder.stream_update(completion.choices[0], update) for update in updates)
    events = events_of(SimpleNamespace(text=stream.decode()))
    blocks, delta = [], None
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append((event["content_block"]["type"], ""))
        elif event["type"] == "content_block_delta":
            (piece,) = (value for name, value in event["delta"].items() if name != "type")
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + piece)
        elif event["type"] == "message_delta":
            delta = event["delta"]
    return blocks, delta["stop_reason"], delta["stop_sequence"]


def shown_everywhere(model, text: str, stop, reason="stop", steps=(1,)) -> tuple:
    """What OpenAI's clients see, and why the answer ended for Anthropic's. Streams show the same as whole answers."""
    whole = openai_whole(model, text, stop, reason, steps)
    assert openai_streamed(model, text, stop, reason, steps) == whole
    blocks, *why = anthropic_whole(model, text, stop, reason, steps)
    streamed, *why_streamed = anthropic_streamed(model, text, stop, reason, steps)
    assert why == why_streamed
    # A whole message has a cut call as text.
    assert [one[1].strip() for one in blocks] == [one[1].strip() for one in streamed]
    assert [one for kind, one in streamed if kind == "tool_use"] == whole.calls
    assert "".join(one for kind, one in streamed if kind == "text") == whole.content
    assert "".join(one for kind, one in streamed if kind == "thinking") == whole.thoughts
    if whole.reason == "tool_calls":
        assert [kind for kind, _ in blocks] == [kind for kind, _ in streamed] and why[0] == "tool_use"
    return whole, *why


ARGUMENTS = '{"a": "x. y\\nz"}'
CALL = '<tool_call>\n{"name": "f", "arguments": %s}\n</tool_call>' % ARGUMENTS  # noqa: UP031
BARE = '{"name": "f", "arguments": %s}' % ARGUMENTS  # noqa: UP031
THINK, THOUGHTS = "<think>\nHm. So.\n</think>\n\n", "\nHm. So.\n"
CUT, CUT_ARGUMENTS = CALL.partition(" y")[0], '{"a": "x.'
NO_JSON, UNKNOWN = CALL.replace('"x. y\\nz"', "x"), CALL.replace('"f"', '"g"')


END, MAX = ("end_turn", None), ("max_tokens", None)  # why an answer ended, for Anthropic's clients
USE = ("tool_use", None)


def at(stop: str) -> tuple[str, str]:
    return "stop_sequence", stop


@pytest.mark.parametrize("text, stop, reason, expected, why", [
    # Thoughts are not searched, nor is text across their end. White space after them does not count as content.
    (f"{THINK}Yes. No.", ".", "stop", ("Yes", THOUGHTS, [], "stop"), at(".")),
    (f"{THINK}Yes", ["Hm", "</think>", "<think>"], "stop", ("Yes", THOUGHTS, [], "stop"), END),
    (f"{THINK}Yes\nNo", "\n", "stop", ("Yes", THOUGHTS, [], "stop"), at("\n")),
    (f"{THINK}Yes", ["So.\n", "</think>\n\nY", "\n\nY"], "length", ("Yes", THOUGHTS, [], "length"), MAX),
    ("<think>\nHm. So", ".", "length", ("", "\nHm. So", [], "length"), MAX),
    # Calls are not searched, and neither are their marks.
    (CALL, [".", "\n", "<tool_call>", '"', "}"], "stop", ("", "", [ARGUMENTS], "tool_calls"), USE),
    (BARE, [".", "{", '"name"'], "stop", ("", "", [ARGUMENTS], "tool_calls"), USE),
    (f"{THINK}Sure {CALL}", ["<tool_call>", "re <"], "stop", ("Sure ", THOUGHTS, [ARGUMENTS], "tool_calls"), USE),
    (f"{THINK}Hm. {CALL}", ".", "stop", ("Hm", THOUGHTS, [], "stop"), at(".")),
    (f"xab{CALL}", ["ab", "xabc"], "stop", ("x", "", [], "stop"), at("ab")),
    (f"xab{CALL}ab", ["bab", "b<"], "stop", ("xabab", "", [ARGUMENTS], "tool_calls"), USE),
    # A stop string after whole calls does not undo them.
    (f"{CALL}\n{CALL}\nSo. Bye.", ". ", "stop", ("\nSo", "", [ARGUMENTS] * 2, "tool_calls"), ("tool_use", ". ")),
    # Calls that were cut off.
    (CUT, ".", "length", ("", "", [CUT_ARGUMENTS], "length"), MAX),
    (CUT, ".", "stop", ("", "", [CUT_ARGUMENTS], "stop"), END),
    (f"{CALL}\n{CUT}", "\n", "length", ("", "", [ARGUMENTS, CUT_ARGUMENTS], "length"), MAX),
    (f"{CALL.replace('}}', '')}x.", ["."], "stop", ("x", "", [f"{ARGUMENTS[:-1]}\n"], "stop"), at(".")),
    (CALL.partition("}}")[0] + "}", ".", "length", ("", "", [ARGUMENTS], "length"), MAX),
    (CALL[:-3], "</", "stop", ("", "", [ARGUMENTS], "tool_calls"), USE),
    (f"So {CALL[:15]}", ["\n", "_"], "length", ("So ", "", [], "length"), MAX),
    (f"So {CALL[:15]}", ["\n", "_"], "stop", ("So <tool", "", [], "stop"), at("_")),
    # What looks like a call and is none is content.
    ("<tool_call>\nno. call", ".", "stop", ("<tool_call>\nno", "", [], "stop"), at(".")),
    ("x<tool_call>no", ["<tool_call>"], "stop", ("x", "", [], "stop"), at("<tool_call>")),
    (UNKNOWN, ". y", "stop", (UNKNOWN.partition(". y")[0], "", [], "stop"), at(". y")),
    (f"{BARE}, a call", ", a", "stop", (BARE, "", [], "stop"), at(", a")),
    (f"{BARE}, a call", ".", "length", (BARE.partition(".")[0], "", [], "stop"), at(".")),
    # Several stop strings, at the first token, in the middle of characters, over several tokens, in white space.
    ("STOP it", ["STOP", "S it"], "stop", ("", "", [], "stop"), at("STOP")),
    ("xabcd", ["abcd", "abc", "abcde"], "stop", ("x", "", [], "stop"), at("abc")),
    ("日本語。\U0001f469", ["本語", "\U0001f469"], "stop", ("日", "", [], "stop"), at("本語")),
    ("\n\n x", ["\n x"], "stop", ("\n", "", [], "stop"), at("\n x")),
    ("\n\n", ["\n"], "stop", ("", "", [], "stop"), at("\n")),
    ("Yes, it is n", ["is not", "no"], "length", ("Yes, it is n", "", [], "length"), MAX),
])  # fmt: skip
def test_stop_strings_end_the_content(model, text, stop, reason, expected, why):
    for steps in ((1,), (4, 1, 1000)):
        shown, *found = shown_everywhere(model, text, stop, reason, steps)
        assert ((shown.content, shown.thoughts, shown.calls, shown.reason), tuple(found)) == (expected, why)


def test_a_call_that_is_no_json_has_not_called(model):
    """It is text, if the answer is not streamed."""
    for after, stop_reason in (("", "end_turn"), ("\nSo. x", "stop_sequence")):
        assert openai_whole(model, NO_JSON + after, ".", "stop", [1]).reason == "stop"
        assert anthropic_whole(model, NO_JSON + after, ".", "stop", [1])[1] == stop_reason


def test_the_row_ends_with_the_stop_string(model):
    """And not with what only looks like one."""
    completion = model.parse_chat(CHAT | {"stop": "."})
    tokens = len(model.tokenizer.encode(f"{THINK}Yes.", add_bos=False))
    updates = answer_with(model, completion, f"{THINK}Yes. And {'so on' * 50}", "length", [1])
    assert (updates[-1].finish_reason, updates[-1].stop_string) == ("stop", ".")
    completion.choices[0].updates += updates
    assert completion.usage()["completion_tokens"] == len(updates) == tokens


def test_stop_tokens_within_a_call(model):
    """The engine ends the answer. Only a call that is whole is a call for clients to run."""
    for text, expected in ((CALL.partition("y")[0], "stop"), (CALL.partition("\n</")[0], "tool_calls")):
        completion = model.parse_chat(CHAT | {"stop_token_ids": [5]})
        completion.choices[0].updates.append(Update(0, text, 9, finish_reason="stop"))
        assert ResponseBuilder(model, completion).whole()["choices"][0]["finish_reason"] == expected


def test_calls_that_do_not_fit_a_grammar_are_searched(model):
    """The engine's process does not know, so the text goes on after the stop string."""
    pytest.importorskip("llguidance")
    function = {"name": "f", "parameters": SCHEMA | {"additionalProperties": False}, "strict": True}
    body = CHAT | {"tools": [{"type": "function", "function": function}], "stop": ". y"}
    for text, reason in ((BARE, "tool_calls"), (BARE.replace('"a"', '"b"'), "stop")):
        completion = model.parse_chat(body)
        ends = "length" if reason == "stop" else "stop"
        completion.choices[0].updates += answer_with(model, completion, text, ends, [2])
        choice = ResponseBuilder(model, completion).whole()["choices"][0]
        assert choice["finish_reason"] == reason
        assert choice["message"]["content"] == (text.partition(". y")[0] if reason == "stop" else None)


def test_an_answer_that_begins_inside_thoughts_or_is_continued(model):
    thinking = {"role": "assistant", "content": "<think>\nHm"}
    over = {"role": "assistant", "content": "<think>\nHm.</think>\n\nSo"}
    for last, text, expected in ((thinking, ". So.</think>\n\nYes.", "Yes"), (over, " what. Yes", " what")):
        for several in (1, 3):
            body = {"messages": [QUESTION, last], "stop": ".", "continue_final_message": True, "n": several}
            completion = model.parse_chat(body)
            for choice in completion.choices:
                alone = CompletionRequest("a", [choice])
                choice.updates += answer_with(model, alone, text, "stop", [2])
            for choice in ResponseBuilder(model, completion).whole()["choices"]:
                assert (choice["message"]["content"], choice["finish_reason"]) == (expected, "stop")
