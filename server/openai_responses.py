"""OpenAI's Responses API, translated: requests become requests of a chat, and answers become
lists of items.

Read down: KeptResponses, which later requests continue; parse_response (responses_requests.py has
the fields); add_items, which turns items into a chat's messages; the tools; ItemBuilder, which
builds responses.

Source: OpenAI's API reference (Streaming events), and the types of its client for Python.
"""

import json
import secrets
import time
from dataclasses import dataclass
from itertools import takewhile

from pydantic import TypeAdapter

from server.answers import CallArguments, CallBegins, Content, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.openai_requests import FUNCTION_KEYS, nest
from server.pipe_messages import Update
from server.request_fields import MAX_BODY_BYTES, ApiError, encode_json, log_once
from server.responses import BlockBuilder
from server.responses_requests import (
    CallItem,
    Item,
    MessageItem,
    ReasoningItem,
    ResponseBody,
    ToolChoice,
    ToolSubset,
)

MAX_KEPT = 1000  # turns
MAX_KEPT_BYTES = 1 << 26
MAX_KEPT_S = 24 * 3600


@dataclass
class Turn:
    """A response, and the conversation that ends with it."""

    response: dict
    messages: list[dict]  # as in a chat, without instructions
    is_kept: bool  # whether a later request may continue the conversation


class KeptResponses:
    """The latest turns, by the random ids of their responses.

    Several threads use it: each change is one operation of a dictionary.
    """

    def __init__(self, largest: float = 1):
        """largest: the size of the largest body of a request, in MAX_BODY_BYTES."""
        self.largest = largest
        # A turn as JSON, which takes less memory than its values, and the time when it expires.
        self.turns: dict[str, tuple[bytes, float]] = {}

    def add(self, turn: Turn):
        data = encode_json([turn.response, turn.messages])
        self.turns[turn.response["id"]] = (data, time.monotonic() + MAX_KEPT_S)
        self.remove_old()

    def remove_old(self):
        now = time.monotonic()
        size = 0
        latest_first = reversed(list(self.turns.items()))
        for n, (name, (data, expires)) in enumerate(latest_first):
            size += len(data)
            if n >= MAX_KEPT or size > MAX_KEPT_BYTES or expires < now:
                self.turns.pop(name, None)

    def find(self, name: str, param: str | None = None) -> tuple[dict, list[dict]]:
        """(response, messages) of a turn. ApiError if it is not kept, or not any more."""
        self.remove_old()
        data, _ = self.turns.get(name, (None, 0.0))
        if data is None:
            raise ApiError(
                f"there is no response with the id {name[:64]!r} (any more)",
                404,
                param,
                "previous_response_not_found" if param else None,
            )
        return tuple(json.loads(data))

    def response(self, name: str) -> dict:
        return self.find(name)[0]

    def delete(self, name: str) -> dict:
        self.find(name)
        self.turns.pop(name, None)
        return {"id": name, "object": "response", "deleted": True}


# ---------------------------------------------------------------- requests

ITEMS = TypeAdapter(list[Item])
# The fields of a request that the response repeats as they are.
REPEATED = (
    "instructions", "previous_response_id", "parallel_tool_calls", "max_output_tokens",
    "metadata", "prompt_cache_key", "safety_identifier", "user",
)  # fmt: skip
# Patterns of names in errors of the translated request, and the names in this API.
RESPONSES_NAMES = {
    r"messages(\[\d+\][\w.\[\]]*)?": "input",
    r"response_format(\.json_schema)?": "text.format",
    r"\.function\b": "",
    r'"(function|allowed_tools)": \{(.*?)\}\}': r"\2}",
    r"(?<=tool_choice)\.allowed_tools": "",
    "^verbosity": "text.verbosity",
}


def parse_response(model: ServedModel, kept: KeptResponses, body: dict) -> CompletionRequest:
    """Parse a body of /v1/responses."""
    fields = ResponseBody.read(body)
    turn = Turn({name: getattr(fields, name) for name in REPEATED}, [], fields.store)
    if fields.previous_response_id is not None:
        _, turn.messages = kept.find(fields.previous_response_id, "previous_response_id")
    read_input(fields.input, turn.messages, int(2 * MAX_BODY_BYTES * kept.largest))
    functions = read_functions(fields)
    values = {
        "tools": [{"type": "function"} | one for one in functions], "tool_choice": body.get("tool_choice") or "auto",
        "text": {"format": fields.text.format},
    }  # fmt: skip
    check_repeated(values)
    chat = chat_body(fields, functions, with_instructions(fields.instructions, turn.messages))
    completion = model.parse_translated(chat, RESPONSES_NAMES, "resp")

    completion.turn = turn
    params = completion.choices[0].request.params
    turn.response |= values | {
        "id": completion.id, "object": "response", "created_at": completion.created,
        "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
        "model": model.name, "output": [], "service_tier": "default",
        "reasoning": {"effort": fields.reasoning.effort, "summary": None},
        "temperature": params.temperature, "top_p": params.top_p,
        "truncation": "disabled", "usage": None,
    }  # fmt: skip
    return completion


def chat_body(fields: ResponseBody, functions: list[dict], messages: list[dict]) -> dict:
    """The body of /v1/chat/completions that asks for the same."""
    format = fields.text.format
    if format.get("type") == "json_schema":
        if not isinstance(format.get("name"), str):
            raise ApiError("text.format.name must be a string", param="text.format.name")
        format = {"type": "json_schema", "json_schema": format}
    return fields.model_extra | {
        "messages": messages, "add_generation_prompt": True, "max_tokens": fields.max_output_tokens,
        "tools": list(map(nest, functions)), "tool_choice": nest_tool_choice(fields.tool_choice),
        "parallel_tool_calls": fields.parallel_tool_calls, "response_format": format,
        "reasoning_effort": fields.reasoning.effort, "verbosity": fields.text.verbosity,
    }  # fmt: skip


def read_input(given: str | list[Item], messages: list[dict], max_bytes: int):
    """Add the items of a request to the messages of a chat, which may have max_bytes."""
    if isinstance(given, str):
        messages.append({"role": "user", "content": given})
    else:
        add_items(messages, given)
    if not messages or "tool_calls" in messages[-1]:
        raise ApiError("input must be a string or a list of items whose last one is not a function_call", param="input")
    if len(encode_json(messages)) > max_bytes:
        raise ApiError(f"the conversation has more than {max_bytes} bytes", param="input")


def check_repeated(values: dict):
    """ApiError if a value that the response repeats cannot be written as JSON."""
    for name, value in values.items():
        for _ in range(200):  # less of the stack may be free when the response is written
            value = [value]
        try:
            encode_json(value)
        except (ValueError, RecursionError):
            raise ApiError(f"{name} must hold finite numbers, and not nest so deeply", param=name) from None


def with_instructions(instructions: str | None, messages: list[dict]) -> list[dict]:
    """The messages with one system message at the beginning, as some templates refuse a second
    one."""
    system = takewhile(lambda message: message["role"] == "system", messages)
    texts = [message["content"] for message in system]
    rest = messages[len(texts) :]
    if instructions:
        texts.insert(0, instructions)
    if not texts:
        return rest
    return [{"role": "system", "content": "\n".join(texts)}, *rest]


def add_items(messages: list[dict], items: list[Item]):
    """Add items to the messages of a chat."""
    call_ids = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    for i, item in enumerate(items):
        if isinstance(item, MessageItem):
            role = "system" if item.role == "developer" else item.role
            if role == "assistant":
                add_answer(messages, {"content": item.content})
            else:
                messages.append({"role": role, "content": item.content})
        elif isinstance(item, ReasoningItem):
            thoughts = item.content or item.summary
            if thoughts:
                add_answer(messages, {"reasoning_content": thoughts})
        elif isinstance(item, CallItem):
            call = nest({"name": item.name, "arguments": item.arguments})
            add_answer(messages, {"tool_calls": [call | {"id": item.call_id}]})
            call_ids.add(item.call_id)
        else:
            if item.call_id not in call_ids:
                raise ApiError(f"input[{i}]: there is no function_call with its call_id", param=f"input[{i}].call_id")
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": item.output})


def add_answer(messages: list[dict], part: dict):
    """Add thoughts, content or a call to the answer that the messages end with.

    Thoughts and content that follow content belong to a new answer, unless there are calls.
    """
    last = messages[-1] if messages else {"role": None}
    if last["role"] == "assistant" and (last["content"] is None or "tool_calls" in last | part):
        joined = {key: last[key] + value if last.get(key) else value for key, value in part.items()}
        messages[-1] = last | joined
    else:
        messages.append({"role": "assistant", "content": None} | part)


def read_functions(fields: ResponseBody) -> list[dict]:
    """The functions among the tools.

    Other tools are refused, unless the client marks them as optional, or its tool_choice leaves
    them out.
    """
    functions = []
    for i, tool in enumerate(fields.tools):
        if tool.type == "function":
            functions.append({key: getattr(tool, key) for key in FUNCTION_KEYS})
            continue
        kind = tool.type[:60]
        if fields.tool_choice in ("auto", "required") and tool.optional is not True:
            raise ApiError(
                f"tools[{i}]: a tool of type {kind!r} is not supported, only functions; with optional: true, it is "
                "left out",
                param=f"tools[{i}]",
            )
        log_once(fields.logged, f"tool: {kind}", f"a request has a tool of type {kind!r}, which is ignored")
    return functions


def nest_tool_choice(choice: ToolChoice):
    """The field tool_choice of a chat."""
    if isinstance(choice, ToolSubset):
        tools = [nest({"name": tool.name}) for tool in choice.tools]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.mode, "tools": tools}}
    return choice if isinstance(choice, str) else nest({"name": choice.name})


# ---------------------------------------------------------------- responses

# The API's names for the texts of items.
NAMES = {
    Content: "output_text",
    Reasoning: "reasoning_text",
    CallArguments: "function_call_arguments",
}


class ItemBuilder(BlockBuilder):
    """Builds the response of /v1/responses. Its blocks are called items."""

    starts = {  # `id` is the prefix of the item's id
        Content: {"id": "msg", "type": "message", "role": "assistant", "content": []},
        Reasoning: {"id": "rs", "type": "reasoning", "summary": [], "content": []},
        CallArguments: {"id": "fc", "type": "function_call", "arguments": ""},
    }

    def __init__(self, kept: KeptResponses, model: ServedModel, completion: CompletionRequest):
        super().__init__(model, completion)
        self.kept = kept
        self.response = completion.turn.response
        self.sent_events = 0
        self.where: dict = {}  # the fields that say in events which item is open
        self.item_status = "completed"  # of the item that ends next

    def event_bytes(self, event: dict) -> bytes:
        self.sent_events += 1
        return super().event_bytes(event | {"sequence_number": self.sent_events - 1})

    def stream_error(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        details = {"code": code, "message": str(error)}
        failed = {"status": "failed", "output": self.blocks, "error": details}
        first = details | {"type": "error", "code": error.code or code, "param": error.param}
        last = {"type": "response.failed", "response": self.response | failed}
        return self.event_bytes(first) + self.event_bytes(last)

    def first_events(self) -> list[dict]:
        return [{"type": f"response.{kind}", "response": self.response} for kind in ("created", "in_progress")]

    def text_event(self, what: str, **text) -> dict:
        event = {"type": f"response.{NAMES[self.kind]}.{what}", **self.where, **text}
        if self.kind is Content:
            event["logprobs"] = []
        return event

    def item_event(self, what: str, item: dict) -> dict:
        return {"type": f"response.output_item.{what}", "output_index": len(self.blocks), "item": item}

    def part_event(self, what: str) -> dict:
        """The event for the only part of the open item's content."""
        part = {"type": NAMES[self.kind], "text": self.text}
        if self.kind is Content:
            part |= {"annotations": [], "logprobs": []}
        return {"type": f"response.content_part.{what}", **self.where, "part": part}

    def begin_events(self, call: CallBegins | None) -> list[dict]:
        start = self.starts[self.kind]
        self.block = start | {"id": f"{start['id']}_{secrets.token_hex(12)}"}
        self.where = {"output_index": len(self.blocks), "item_id": self.block["id"]}
        if call is not None:
            self.block |= {"call_id": call.id, "name": call.name}
        added = self.item_event("added", self.block | {"status": "in_progress"})
        if call is not None:
            return [added]
        self.where["content_index"] = 0
        return [added, self.part_event("added")]

    def delta(self, text: str) -> dict:
        return self.text_event("delta", delta=text)

    def end_events(self) -> list[dict]:
        if self.kind is CallArguments:
            content = {"arguments": self.text}
            events = [self.text_event("done", arguments=self.text)]
        else:
            events = [self.text_event("done", text=self.text), self.part_event("done")]
            content = {"content": [events[1]["part"]]}
        item = self.block | content | {"status": self.item_status}
        events.append(self.item_event("done", item))
        self.blocks.append(item)
        return events

    def last_events(self, choice: Choice, update: Update) -> list[dict]:
        """End the response, and keep it. Returns the events for it."""
        if choice.finish_reason(update) == "length":
            status = "incomplete"
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            status = "completed"
            details = {"completed_at": time.time()}

        events = []
        is_thinking = self.kind in (None, Reasoning)
        has_only_thoughts = is_thinking and all(item["type"] == "reasoning" for item in self.blocks)
        if status == "completed" and has_only_thoughts:
            events = self.begin(Content)  # clients expect a message or a call
        self.item_status = status
        if self.kind is CallArguments:  # it may be whole, although the answer was cut after it
            self.item_status = "completed" if choice.parser.has_whole_calls else "incomplete"
        events += self.end()

        result = {"status": status, "output": self.blocks, "usage": self.usage()}
        self.response = self.response | details | result
        turn = self.completion.turn
        if turn.is_kept:
            add_items(turn.messages, ITEMS.validate_python(self.blocks))
            turn.response = self.response
            self.kept.add(turn)
        return [*events, {"type": f"response.{status}", "response": self.response}]

    def usage(self) -> dict:
        usage = self.completion.usage()
        thoughts = [item["content"][0]["text"] for item in self.blocks if item["type"] == "reasoning"]
        tokens = sum(len(self.model.tokenizer.encode(text, False)) for text in thoughts)
        return {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": min(tokens, usage["completion_tokens"])},
            "total_tokens": usage["total_tokens"],
        }
