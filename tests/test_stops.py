"""Stop strings in chats: they end the content of an answer, whatever its thoughts and calls contain.

Texts go the whole way: as tokens of the engine's process, which AnswerText decodes, through both APIs, streamed and
whole.
"""

import itertools
import json
import pickle
from dataclasses import dataclass
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


@dataclass
class Shown:
    """What a client sees of an answer."""

    content: str
    thoughts: str
    calls: list[str]  # their arguments
    reason: str
    tokens: bytes = b""  # the bytes of the tokens that have log-probabilities


def openai_whole(model, text: str, stop, reason: str, steps) -> Shown:
    completion = model.parse_chat(CHAT | {"stop": stop, "logprobs": True})
    completion.choices[0].updates += answer_with(model, completion, text, reason, steps)
    choice = ResponseBuilder(model, completion).whole()["choices"][0]
    message = choice["message"]
    calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
    tokens = b"".join(bytes(entry["bytes"]) for entry in choice["logprobs"]["content"])
    thoughts = message.get("reasoning_content", "")
    return Shown(message["content"] or "", thoughts, calls, choice["finish_reason"], tokens)


def openai_streamed(model, text: str, stop, reason: str, steps) -> Shown:
    completion = model.parse_chat(CHAT | {"stop": stop, "logprobs": True, "stream": True})
    builder = ResponseBuilder(model, completion)
    updates = answer_with(model, completion, text, reason, steps)
    chunks = [chunk for update in updates for chunk in builder.chunks(completion.choices[0], update)]
    shown = Shown("", "", [], "", b"")
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
        field = {"tool_use": "input"}.get(block["type"], block["type"])
        value = block[field]
        blocks.append((block["type"], json.dumps(value, ensure_ascii=False) if field == "input" else value))
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
            piece = [value for name, value in event["delta"].items() if name != "type"]
            blocks[-1] = (blocks[-1][0], blocks[-1][1] + piece[0])
        elif event["type"] == "message_delta":
            delta = event["delta"]
    return blocks, delta["stop_reason"], delta["stop_sequence"]


def shown_everywhere(model, text: str, stop, reason="stop", steps=(1,)) -> tuple[Shown, str, str | None]:
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
NO_JSON = CALL.replace('"x. y\\nz"', "x")


@pytest.mark.parametrize(
    "text, stop, reason, expected, why",
    [
        # Thoughts are not searched, nor is text across their end. White space after them does not count as content.
        (f"{THINK}Yes. No.", ".", "stop", ("Yes", THOUGHTS, [], "stop"), ("stop_sequence", ".")),
        (f"{THINK}Yes", ["Hm", "</think>", "<think>"], "stop", ("Yes", THOUGHTS, [], "stop"), ("end_turn", None)),
        (f"{THINK}Yes\nNo", "\n", "stop", ("Yes", THOUGHTS, [], "stop"), ("stop_sequence", "\n")),
        (f"{THINK}Yes", ["So.\n", "</think>\n\nY", "\n\nY"], "length", ("Yes", THOUGHTS, [], "length"),
         ("max_tokens", None)),
        ("<think>\nHm. So", ".", "length", ("", "\nHm. So", [], "length"), ("max_tokens", None)),
        # Calls are not searched, and neither are their marks.
        (CALL, ".", "stop", ("", "", [ARGUMENTS], "tool_calls"), ("tool_use", None)),
        (CALL, ["\n", "<tool_call>", '"', "}"], "stop", ("", "", [ARGUMENTS], "tool_calls"), ("tool_use", None)),
        (BARE, [".", "{", '"name"'], "stop", ("", "", [ARGUMENTS], "tool_calls"), ("tool_use", None)),
        (f"{THINK}Sure {CALL}", ["<tool_call>", "re <"], "stop", ("Sure ", THOUGHTS, [ARGUMENTS], "tool_calls"),
         ("tool_use", None)),
        (f"{THINK}Hm. {CALL}", ".", "stop", ("Hm", THOUGHTS, [], "stop"), ("stop_sequence", ".")),
        (f"xab{CALL}", ["ab", "xabc"], "stop", ("x", "", [], "stop"), ("stop_sequence", "ab")),
        (f"xab{CALL}ab", ["bab", "b<"], "stop", ("xabab", "", [ARGUMENTS], "tool_calls"), ("tool_use", None)),
        # A stop string after whole calls does not undo them.
        (f"{CALL}\n{CALL}\nSo. Bye.", ". ", "stop", ("\nSo", "", [ARGUMENTS] * 2, "tool_calls"), ("tool_use", ". ")),
        # Calls that were cut off.
        (CUT, ".", "length", ("", "", [CUT_ARGUMENTS], "length"), ("max_tokens", None)),
        (CUT, ".", "stop", ("", "", [CUT_ARGUMENTS], "stop"), ("end_turn", None)),
        (f"{CALL}\n{CUT}", "\n", "length", ("", "", [ARGUMENTS, CUT_ARGUMENTS], "length"), ("max_tokens", None)),
        (f"{CALL.replace('}}', '')}x.", ["."], "stop", ("x", "", [f"{ARGUMENTS[:-1]}\n"], "stop"),
         ("stop_sequence", ".")),
        (CALL.partition("}}")[0] + "}", ".", "length", ("", "", [ARGUMENTS], "length"), ("max_tokens", None)),
        (CALL[:-3], "</", "stop", ("", "", [ARGUMENTS], "tool_calls"), ("tool_use", None)),
        (f"So {CALL[:15]}", ["\n", "_"], "length", ("So ", "", [], "length"), ("max_tokens", None)),
        (f"So {CALL[:11]}", ["call", "_"], "length", ("So ", "", [], "length"), ("max_tokens", None)),
        (f"So {CALL[:15]}", ["\n", "_"], "stop", ("So <tool", "", [], "stop"), ("stop_sequence", "_")),
        # What looks like a call and is none is content.
        ("<tool_call>\nno. call", ".", "stop", ("<tool_call>\nno", "", [], "stop"), ("stop_sequence", ".")),
        ("x<tool_call>no", ["<tool_call>"], "stop", ("x", "", [], "stop"), ("stop_sequence", "<tool_call>")),
        (CALL.replace('"f"', '"g"'), ". y", "stop", (CALL.replace('"f"', '"g"').partition(". y")[0], "", [], "stop"),
         ("stop_sequence", ". y")),
        (f"{BARE}, a call", ", a", "stop", (BARE, "", [], "stop"), ("stop_sequence", ", a")),
        (f"{BARE}, a call", ".", "length", (BARE.partition(".")[0], "", [], "stop"), ("stop_sequence", ".")),
        # Several stop strings, at the first token, in the middle of characters, over several tokens, in white space.
        ("STOP it", ["STOP", "S it"], "stop", ("", "", [], "stop"), ("stop_sequence", "STOP")),
        ("xabcd", ["abcd", "abc", "abcde"], "stop", ("x", "", [], "stop"), ("stop_sequence", "abc")),
        ("日本語。\U0001f469", ["本語", "\U0001f469"], "stop", ("日", "", [], "stop"), ("stop_sequence", "本語")),
        ("\n\n x", ["\n x"], "stop", ("\n", "", [], "stop"), ("stop_sequence", "\n x")),
        ("\n\n", ["\n"], "stop", ("", "", [], "stop"), ("stop_sequence", "\n")),
        ("Yes, it is n", ["is not", "no"], "length", ("Yes, it is n", "", [], "length"), ("max_tokens", None)),
    ],
)  # fmt: skip
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
        completion.choices[0].updates += answer_with(
            model, completion, text, "length" if reason == "stop" else "stop", [2]
        )
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
