"""OpenAI's Responses API, translated: requests become those of chat, and answers become lists of
items.

Read down: KeptResponses, which later requests continue; parse_response; add_items, which turns
items into a chat's messages; the tools; ItemBuilder, which builds responses. If this file is
deleted, http_server.py has no such paths.

Source: OpenAI's API reference (Responses, Streaming events), and the types of its client for
Python.
"""

import json
import secrets
import time
from dataclasses import dataclass
from itertools import takewhile

from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.chat_prompts import check_content, check_name, check_string, get_key
from server.pipe_messages import Update
from server.request_fields import MAX_BODY_BYTES, ApiError, FieldReader, encode_json, log_once
from server.responses import ResponseBuilder, named_event

MAX_KEPT = 1000  # turns
MAX_KEPT_BYTES = 1 << 26
MAX_KEPT_S = 24 * 3600


@dataclass
class Turn:
    """A response, and the conversation that ends with it."""

    response: dict
    messages: list[dict]  # as those of a chat, without instructions
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
            code = "previous_response_not_found" if param else None
            text = f"there is no response with the id {name[:64]!r} (any more)"
            raise ApiError(text, 404, param, code)
        return tuple(json.loads(data))


# ---------------------------------------------------------------- requests

# Fields whose values are checked, but have no effect.
UNUSED = {
    "include": list, "service_tier": str, "max_tool_calls": int, "prompt_cache_retention": str,
    "stream_options": dict, "prompt_cache_options": dict, "client_metadata": dict,
}  # fmt: skip
# Fields that are not supported. Each has a value that changes nothing, which is accepted, and a
# hint for the error message. NEUTRAL_VALUES has more such fields.
REFUSED = {
    "n": (1, ""), "logprobs": (False, ""), "top_logprobs": (0, ""), "prompt": ("", ""),
    "messages": ([], ""), "context_management": ([], ""),
    "response_format": (None, "; text.format is"),
    "reasoning_effort": (None, "; reasoning.effort is"),
}  # fmt: skip
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ITEM_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
# Patterns of names in errors of the translated request, and the names in this API.
RESPONSES_NAMES = {
    r"messages(\[\d+\][\w.\[\]]*)?": "input",
    r"response_format(\.json_schema)?": "text.format",
    r"\.function\b": "",
    r'"(function|allowed_tools)": \{(.*?)\}\}': r"\2}",
    "^verbosity": "text.verbosity",
}


def parse_response(model: ServedModel, kept: KeptResponses, body: dict) -> CompletionRequest:
    """Parse a body of /v1/responses."""
    fields = FieldReader(body)
    max_tokens = fields.read("max_output_tokens", int, None, 1)
    is_kept = fields.read("store", bool, True)
    turn = Turn(read_repeated(fields) | {"max_output_tokens": max_tokens}, [], is_kept)
    chat = read_chat(fields, kept, turn) | {"max_tokens": max_tokens}
    completion = model.parse_translated(chat, RESPONSES_NAMES, "resp")

    completion.turn = turn
    params = completion.choices[0].request.params
    turn.response |= {
        "id": completion.id, "object": "response", "created_at": completion.created,
        "status": "in_progress", "background": False, "error": None, "incomplete_details": None,
        "model": model.name, "output": [], "service_tier": "default",
        "temperature": params.temperature, "top_p": params.top_p,
        "truncation": "disabled", "usage": None,
    }  # fmt: skip
    return completion


def read_repeated(fields: FieldReader) -> dict:
    """The fields without effect that the response repeats.

    The other fields without effect, and those that are not supported, are checked.
    """
    for name, kind in UNUSED.items():
        fields.read(name, kind)
    for name, (neutral, hint) in REFUSED.items():
        if fields.unread.pop(name, None) not in (None, neutral):
            raise ApiError(f"{name} is not supported{hint}", param=name)

    metadata = fields.read("metadata", dict, {})
    has_long_names = any(len(key) > 64 for key in metadata)
    is_text = all(isinstance(text, str) and len(text) <= 512 for text in metadata.values())
    if len(metadata) > 16 or has_long_names or not is_text:
        rule = "up to 16 texts of up to 512 characters, with names of up to 64"
        raise ApiError(f"metadata must have {rule}", param="metadata")
    text_fields = ("prompt_cache_key", "safety_identifier", "user")
    texts = {name: fields.read(name, str) for name in text_fields}
    return texts | {"metadata": metadata}


def read_chat(fields: FieldReader, kept: KeptResponses, turn: Turn) -> dict:
    """The body of /v1/chat/completions that asks for the same.

    Writes the conversation, and the fields that its response repeats, into the turn.
    """
    instructions = fields.read("instructions", str)
    previous = fields.read("previous_response_id", str)
    if previous is not None:
        _, turn.messages = kept.find(previous, "previous_response_id")
    read_input(fields, turn.messages, int(2 * MAX_BODY_BYTES * kept.largest))

    choice = fields.unread.pop("tool_choice", None)
    several = fields.read("parallel_tool_calls", bool, True)
    tools = read_functions(fields.read("tools", list, []), choice)
    text = FieldReader(fields.read("text", dict, {}))
    format = text.read("format", dict, {"type": "text"})
    verbosity = text.read("verbosity", str)
    effort = FieldReader(fields.read("reasoning", dict, {})).read("effort", str)
    if effort not in (None, *EFFORTS):
        rule = f"reasoning.effort must be one of {', '.join(EFFORTS)}"
        raise ApiError(rule, param="reasoning.effort")

    turn.response |= {
        "instructions": instructions, "previous_response_id": previous,
        "parallel_tool_calls": several, "tools": tools, "tool_choice": choice or "auto",
        "text": {"format": format}, "reasoning": {"effort": effort, "summary": None},
    }  # fmt: skip
    if format.get("type") == "json_schema":
        check_string(format.get("name"), "text.format.name")
        format = {"type": "json_schema", "json_schema": format}
    check_repeated({name: turn.response[name] for name in ("tools", "tool_choice", "text")})

    return fields.unread | {
        "messages": with_instructions(instructions, turn.messages), "add_generation_prompt": True,
        "tools": [nest(tool) for tool in tools], "tool_choice": nest_tool_choice(choice),
        "parallel_tool_calls": several, "reasoning_effort": effort,
        "response_format": format, "verbosity": verbosity,
    }  # fmt: skip


def read_input(fields: FieldReader, messages: list[dict], max_bytes: int):
    """Read the field `input`, and add its items to the messages of a chat, which may have max_bytes."""
    given = fields.read("input", (str, list), [])
    if isinstance(given, str):
        given = [{"role": "user", "content": given}]
    add_items(messages, given, "input")
    if not messages or "tool_calls" in messages[-1]:
        rule = "a string or a list of items whose last one is not a function_call"
        raise ApiError(f"input must be {rule}", param="input")
    if len(encode_json(messages)) > max_bytes:
        text = f"the conversation has more than {max_bytes} bytes"
        raise ApiError(text, param="input")


def check_repeated(values: dict):
    """ApiError if a value that the response repeats cannot be written as JSON.

    Each value is nested in further lists, because less of the stack may be free when the response
    is written.
    """
    for name, value in values.items():
        for _ in range(200):
            value = [value]
        try:
            encode_json(value)
        except (ValueError, RecursionError):
            text = f"{name} must hold finite numbers, and not nest so deeply"
            raise ApiError(text, param=name) from None


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


def add_items(messages: list[dict], items: list, place: str):
    """Add items to the messages of a chat. place: the field that has the items, for errors."""
    call_ids = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    for i, item in enumerate(items):
        name = f"{place}[{i}]"
        kind = item_type(item)
        if kind == "message":
            add_message(messages, item, name)
        elif kind == "reasoning":
            thoughts = reasoning_text(item, name)
            if thoughts:
                add_answer(messages, {"reasoning_content": thoughts})
        elif kind == "function_call":
            call_id = check_string(item.get("call_id"), f"{name}.call_id")
            arguments = check_string(item.get("arguments"), f"{name}.arguments")
            check_name(item.get("name"), f"{name}.name")
            call = nest({"name": item["name"], "arguments": arguments}) | {"id": call_id}
            add_answer(messages, {"tool_calls": [call]})
            call_ids.add(call_id)
        elif kind == "function_call_output":
            call_id = item.get("call_id")
            output = check_content(item.get("output"), f"{name}.output")
            if not isinstance(call_id, str) or call_id not in call_ids:
                text = f"{name}: there is no function_call with its call_id"
                raise ApiError(text, param=f"{name}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            rule = "only message, reasoning, function_call and function_call_output"
            text = f"{name}: an item of type {str(kind)[:64]!r} is not supported, {rule}"
            raise ApiError(text, param=name)


def item_type(item):
    """The type of an item, which is a message if it has none."""
    if not isinstance(item, dict):
        return None
    kind = item.get("type")
    return "message" if kind is None else kind


def reasoning_text(item: dict, name: str) -> str:
    """The thoughts in an item: its content, or else its summary."""
    parts = item.get("content") or item.get("summary") or ""
    if isinstance(parts, list):
        parts = [part | {"type": "text"} if isinstance(part, dict) else part for part in parts]
    return check_content(parts, f"{name}.content")


def add_message(messages: list[dict], item: dict, name: str):
    """Add an item of type message to the messages of a chat."""
    role = item.get("role")
    content = check_content(item.get("content"), f"{name}.content")
    if not isinstance(role, str) or role not in ITEM_ROLES:
        text = f"{name}.role must be one of {', '.join(ITEM_ROLES)}"
        raise ApiError(text, param=f"{name}.role")
    if role == "assistant":
        add_answer(messages, {"content": content})
    else:
        messages.append({"role": ITEM_ROLES[role], "content": content})


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


def read_functions(given: list, choice) -> list[dict]:
    """The functions among the tools.

    Other tools are refused, unless the client marks them as optional, or its tool_choice leaves
    them out.
    """
    keys = ("type", "name", "description", "parameters", "strict")
    functions = []
    for i, tool in enumerate(given):
        kind = get_key(tool, "type")
        if kind == "function":
            functions.append({key: tool.get(key) for key in keys})
            continue
        is_optional = get_key(tool, "optional") is True
        if choice in (None, "auto", "required") and not is_optional:
            text = f"tools[{i}]: a tool of type {str(kind)[:64]!r} is not supported, only functions"
            raise ApiError(f"{text}; with optional: true, it is left out", param=f"tools[{i}]")
        text = f"a request has a tool of type {str(kind)[:60]!r}, which is ignored"
        log_once(FieldReader.logged, f"tool: {kind}", text)
    return functions


def nest(function: dict) -> dict:
    """A function in the form that it has in the tools, calls and tool_choice of a chat."""
    details = {key: value for key, value in function.items() if key != "type"}
    return {"type": "function", "function": details}


def nest_tool_choice(choice):
    """The field tool_choice of a chat."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "function":
        return nest(choice)
    if kind == "allowed_tools":
        given = FieldReader(choice).read("tools", list, [])
        tools = [nest(tool) for tool in given if isinstance(tool, dict)]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return choice


# ---------------------------------------------------------------- responses

# An item without its text, by the type of the events that it is built from. `id` is the prefix of
# its id.
STARTS = {
    Content: {"id": "msg", "type": "message", "role": "assistant", "content": []},
    Reasoning: {"id": "rs", "type": "reasoning", "summary": [], "content": []},
    CallArguments: {"id": "fc", "type": "function_call", "arguments": ""},
}
# The API's names for the texts of these items.
NAMES = {
    Content: "output_text",
    Reasoning: "reasoning_text",
    CallArguments: "function_call_arguments",
}


class ItemBuilder:
    """Builds the response of /v1/responses, as responses.ResponseBuilder does for OpenAI's other
    paths."""

    ping = ResponseBuilder.ping

    def __init__(self, kept: KeptResponses, model: ServedModel, completion: CompletionRequest):
        self.kept = kept
        self.model = model
        self.completion = completion
        self.response = completion.turn.response
        self.output: list[dict] = []  # the items that are complete
        self.sent_events = 0

        self.kind: type | None = None  # the kind of event whose item is open
        self.item: dict = {}  # the open item as it began
        self.where: dict = {}  # the fields that say in events which item is open
        self.text = ""  # the text of the open item so far

    def whole(self) -> dict:
        choice = self.completion.choices[0]
        combined = choice.combined()
        self.add_update(choice, combined, choice.all_events(combined))
        return self.response

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        events = []
        if not choice.updates:
            events.append({"type": "response.created", "response": self.response})
            events.append({"type": "response.in_progress", "response": self.response})
        choice.updates.append(update)
        return self.event_bytes(events + self.add_update(choice, update, choice.events(update)))

    def stream_end(self) -> bytes:
        return b""  # the last update had the end

    def stream_error(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        message = str(error)
        first = {
            "type": "error",
            "code": error.code or code,
            "message": message,
            "param": error.param,
        }
        details = {"code": code, "message": message}
        failed = {"status": "failed", "output": self.output, "error": details}
        last = {"type": "response.failed", "response": self.response | failed}
        return self.event_bytes([first, last])

    def event_bytes(self, events: list[dict]) -> bytes:
        numbered = enumerate(events, self.sent_events)
        self.sent_events += len(events)
        return b"".join(named_event(event | {"sequence_number": n}) for n, event in numbered)

    def add_update(self, choice: Choice, update: Update, parsed: list[Event]) -> list[dict]:
        """The stream's events for an update, given its parsed events."""
        events = [made for event in parsed for made in self.item_events(event)]
        if update.finish_reason is not None:
            events += self.end_response(choice, update)
        return events

    def item_events(self, event: Event) -> list[dict]:
        """The stream's events for a piece of the answer."""
        if isinstance(event, CallBegins):
            return self.begin_item(CallArguments, {"call_id": event.id, "name": event.name})
        events = []
        if type(event) is not self.kind:
            events = self.begin_item(type(event), {})
        self.text += event.text
        return [*events, self.text_event("delta", delta=event.text)]

    def text_event(self, what: str, **text) -> dict:
        event = {"type": f"response.{NAMES[self.kind]}.{what}", **self.where, **text}
        if self.kind is Content:
            event["logprobs"] = []
        return event

    def part(self) -> dict:
        """The only part of the open item's content."""
        part = {"type": NAMES[self.kind], "text": self.text}
        if self.kind is Content:
            part |= {"annotations": [], "logprobs": []}
        return part

    def begin_item(self, kind: type, fields: dict) -> list[dict]:
        """Begin an item. Returns the events for it, and for the end of the item before it."""
        events = self.end_item("completed")
        self.kind = kind
        self.text = ""
        item_id = f"{STARTS[kind]['id']}_{secrets.token_hex(12)}"
        self.item = STARTS[kind] | {"id": item_id} | fields
        place = {"output_index": len(self.output)}
        self.where = place | {"item_id": item_id}

        item = self.item | {"status": "in_progress"}
        events.append({"type": "response.output_item.added", **place, "item": item})
        if kind is not CallArguments:
            self.where["content_index"] = 0
            part = self.part()
            events.append({"type": "response.content_part.added", **self.where, "part": part})
        return events

    def end_item(self, status: str) -> list[dict]:
        """End the open item, if there is one. Returns the events for it."""
        if self.kind is None:
            return []
        if self.kind is CallArguments:
            content = {"arguments": self.text}
            events = [self.text_event("done", arguments=self.text)]
        else:
            part = self.part()
            content = {"content": [part]}
            events = [self.text_event("done", text=self.text)]
            events.append({"type": "response.content_part.done", **self.where, "part": part})

        item = self.item | content | {"status": status}
        place = {"output_index": len(self.output)}
        events.append({"type": "response.output_item.done", **place, "item": item})
        self.output.append(item)
        self.kind = None
        return events

    def end_response(self, choice: Choice, update: Update) -> list[dict]:
        """End the response, and keep it. Returns the events for it."""
        if choice.finish_reason(update) == "length":
            status = "incomplete"
            details = {"incomplete_details": {"reason": "max_output_tokens"}}
        else:
            status = "completed"
            details = {"completed_at": time.time()}

        events = []
        is_thinking = self.kind in (None, Reasoning)
        has_only_thoughts = is_thinking and all(item["type"] == "reasoning" for item in self.output)
        if status == "completed" and has_only_thoughts:
            events = self.begin_item(Content, {})  # clients expect a message or a call
        item_status = status
        if self.kind is CallArguments:  # it may be whole, although the answer was cut after it
            item_status = "completed" if choice.parser.has_whole_calls else "incomplete"
        events += self.end_item(item_status)

        result = {"status": status, "output": self.output, "usage": self.usage()}
        self.response = self.response | details | result
        turn = self.completion.turn
        if turn.is_kept:
            add_items(turn.messages, self.output, "output")
            turn.response = self.response
            self.kept.add(turn)
        return [*events, {"type": f"response.{status}", "response": self.response}]

    def usage(self) -> dict:
        usage = self.completion.usage()
        items = [item for item in self.output if item["type"] == "reasoning"]
        thoughts = [item["content"][0]["text"] for item in items]
        tokens = sum(len(self.model.tokenizer.encode(text, False)) for text in thoughts)
        return {
            "input_tokens": usage["prompt_tokens"],
            "output_tokens": usage["completion_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": min(tokens, usage["completion_tokens"])},
            "total_tokens": usage["total_tokens"],
        }
