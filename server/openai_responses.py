"""OpenAI's Responses API, translated: requests to those of chat, and answers to responses that are lists of items.

Read down: KeptResponses, which later requests continue; parse_response; add_items, which makes a chat's messages of
items; the tools; ItemBuilder, which builds responses. http_server.py has no such paths if this file is deleted.

Source: OpenAI's API reference (Responses, Streaming events), and the types of its client for Python.
"""

import json
import secrets
import time
from dataclasses import dataclass
from itertools import takewhile

from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.chat_prompts import check_content, check_name, check_string
from server.pipe_messages import Update
from server.request_fields import MAX_BODY_BYTES, ApiError, FieldReader, encode_json, log_once
from server.responses import named_event

MAX_KEPT, MAX_KEPT_BYTES = 1000, 1 << 26
MAX_KEPT_S = 24 * 3600


@dataclass
class Turn:
    response: dict
    messages: list[dict]  # the conversation, as that of a chat, without instructions
    is_kept: bool


class KeptResponses:
    """The latest turns, by the random ids of their responses. Several threads use it: each change is one operation."""

    def __init__(self):
        self.turns: dict[
            str, tuple[bytes, float]
        ] = {}  # JSON, which takes less memory than its values; when it expires

    def add(self, turn: Turn):
        data = encode_json([turn.response, turn.messages])
        self.turns[turn.response["id"]] = data, time.monotonic() + MAX_KEPT_S
        self.remove_old()

    def remove_old(self):
        size, now = 0, time.monotonic()
        for n, (name, (data, expires)) in enumerate(reversed(list(self.turns.items()))):
            size += len(data)
            if n >= MAX_KEPT or size > MAX_KEPT_BYTES or expires < now:
                self.turns.pop(name, None)

    def find(self, name: str, param: str | None = None) -> tuple[dict, list[dict]]:
        """(response, messages). ApiError if it is not kept (any more)."""
        self.remove_old()
        data, _ = self.turns.get(name, (None, 0.0))
        if data is None:
            code = "previous_response_not_found" if param else None
            raise ApiError(f"there is no response with the id {name[:64]!r} (any more)", 404, param, code)
        return tuple(json.loads(data))


# ---------------------------------------------------------------- requests

UNUSED = {"include": list, "service_tier": str, "max_tool_calls": int, "prompt_cache_retention": str}
UNUSED |= {"stream_options": dict, "prompt_cache_options": dict, "client_metadata": dict}
# Fields that are refused but for a value that changes nothing, with what to do; see also NEUTRAL_VALUES.
REFUSED = {"n": (1, ""), "logprobs": (False, ""), "top_logprobs": (0, ""), "prompt": ("", ""), "messages": ([], "")}
REFUSED |= {"context_management": ([], ""), "response_format": (None, "; text.format is")}
REFUSED |= {"reasoning_effort": (None, "; reasoning.effort is")}
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
ITEM_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
RESPONSES_NAMES = {  # of fields, by patterns of what errors of the translated request say
    r"messages(\[\d+\][\w.\[\]]*)?": "input", r"response_format(\.json_schema)?": "text.format", r"\.function\b": "",
    r'"(function|allowed_tools)": \{(.*?)\}\}': r"\2}", "^verbosity": "text.verbosity",
}  # fmt: skip


def parse_response(model: ServedModel, kept: KeptResponses, body: dict) -> CompletionRequest:
    """Parse a body of /v1/responses."""
    fields = FieldReader(body)
    max_tokens, is_kept = fields.read("max_output_tokens", int, None, 1), fields.read("store", bool, True)
    turn = Turn(read_repeated(fields) | {"max_output_tokens": max_tokens}, [], is_kept)
    chat = read_chat(fields, kept, turn)
    completion = model.parse_translated(chat, RESPONSES_NAMES, max_tokens, "resp")
    completion.turn, request = turn, completion.choices[0].request
    turn.response |= {
        "id": completion.id, "object": "response", "created_at": completion.created, "status": "in_progress",
        "background": False, "error": None, "incomplete_details": None, "model": model.name, "output": [],
        "service_tier": "default", "temperature": request.params.temperature, "top_p": request.params.top_p,
        "truncation": "disabled", "usage": None,
    }  # fmt: skip
    return completion


def read_repeated(fields: FieldReader) -> dict:
    """The fields without effect that the response repeats. Others are checked, and those that are not supported."""
    for name, kind in UNUSED.items():
        fields.read(name, kind)
    for name, (neutral, advice) in REFUSED.items():
        if fields.unread.pop(name, None) not in (None, neutral):
            raise ApiError(f"{name} is not supported{advice}", param=name)
    metadata = fields.read("metadata", dict, {})
    is_short = all(len(key) <= 64 and isinstance(text, str) and len(text) <= 512 for key, text in metadata.items())
    if len(metadata) > 16 or not is_short:
        raise ApiError(
            "metadata must have up to 16 texts of up to 512 characters, with names of up to 64", param="metadata"
        )
    texts = {name: fields.read(name, str) for name in ("prompt_cache_key", "safety_identifier", "user")}
    return texts | {"metadata": metadata}


def read_chat(fields: FieldReader, kept: KeptResponses, turn: Turn) -> dict:
    """The body of /v1/chat/completions that asks for the same. The turn gets the conversation, and what its response
    repeats."""
    instructions, previous = fields.read("instructions", str), fields.read("previous_response_id", str)
    if previous is not None:
        _, turn.messages = kept.find(previous, "previous_response_id")
    given = fields.read("input", (str, list), [])
    add_items(turn.messages, [{"role": "user", "content": given}] if isinstance(given, str) else given, "input")
    if not turn.messages or "tool_calls" in turn.messages[-1]:
        raise ApiError("input must be a string or a list of items, the last one no function_call", param="input")
    if len(encode_json(turn.messages)) > 2 * MAX_BODY_BYTES:
        raise ApiError(f"the conversation has more than {2 * MAX_BODY_BYTES} bytes", param="input")

    choice, several = fields.unread.pop("tool_choice", None), fields.read("parallel_tool_calls", bool, True)
    tools = read_functions(fields.read("tools", list, []), choice)
    text = FieldReader(fields.read("text", dict, {}))
    format, verbosity = text.read("format", dict, {"type": "text"}), text.read("verbosity", str)
    effort = FieldReader(fields.read("reasoning", dict, {})).read("effort", str)
    if effort not in (None, *EFFORTS):
        raise ApiError(f"reasoning.effort must be one of {', '.join(EFFORTS)}", param="reasoning.effort")
    turn.response |= {
        "instructions": instructions, "previous_response_id": previous, "parallel_tool_calls": several, "tools": tools,
        "tool_choice": choice or "auto", "text": {"format": format}, "reasoning": {"effort": effort, "summary": None},
    }  # fmt: skip
    if format.get("type") == "json_schema":
        check_string(format.get("name"), "text.format.name")
        format = {"type": "json_schema", "json_schema": format}
    check_repeated({name: turn.response[name] for name in ("tools", "tool_choice", "text")})
    return fields.unread | {
        "messages": with_instructions(instructions, turn.messages), "add_generation_prompt": True,
        "tools": [nest(tool) for tool in tools], "tool_choice": nest_tool_choice(choice),
        "parallel_tool_calls": several, "reasoning_effort": effort, "response_format": format, "verbosity": verbosity,
    }  # fmt: skip


def check_repeated(values: dict):
    """ApiError if values that the response repeats cannot be written as JSON, also where less of the stack is free."""
    for name, value in values.items():
        for _ in range(200):
            value = [value]
        try:
            encode_json(value)
        except (ValueError, RecursionError):
            raise ApiError(f"{name} must hold finite numbers, and not nest so deeply", param=name) from None


def with_instructions(instructions: str | None, messages: list[dict]) -> list[dict]:
    """The messages with one system message at the beginning, as some templates refuse a second one."""
    texts = [message["content"] for message in takewhile(lambda message: message["role"] == "system", messages)]
    rest = messages[len(texts) :]
    if instructions:
        texts.insert(0, instructions)
    return [{"role": "system", "content": "\n".join(texts)}, *rest] if texts else rest


def add_items(messages: list[dict], items: list, place: str):
    """Add items to the messages of a chat. place: of the items in the request, for errors."""
    call_ids = {call["id"] for message in messages for call in message.get("tool_calls", ())}
    for i, item in enumerate(items):
        name, kind = f"{place}[{i}]", None
        if isinstance(item, dict):
            kind = "message" if item.get("type") is None else item["type"]
        if kind == "message":
            role, content = item.get("role"), check_content(item.get("content"), f"{name}.content")
            if not isinstance(role, str) or role not in ITEM_ROLES:
                raise ApiError(f"{name}.role must be one of {', '.join(ITEM_ROLES)}", param=f"{name}.role")
            if role == "assistant":
                add_answer(messages, {"content": content})
            else:
                messages.append({"role": ITEM_ROLES[role], "content": content})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or ""
            if isinstance(parts, list):
                parts = [part | {"type": "text"} if isinstance(part, dict) else part for part in parts]
            if thoughts := check_content(parts, f"{name}.content"):
                add_answer(messages, {"reasoning_content": thoughts})
        elif kind == "function_call":
            call_id, arguments = (check_string(item.get(key), f"{name}.{key}") for key in ("call_id", "arguments"))
            check_name(item.get("name"), f"{name}.name")
            call = nest({"name": item["name"], "arguments": arguments}) | {"id": call_id}
            add_answer(messages, {"tool_calls": [call]})
            call_ids.add(call_id)
        elif kind == "function_call_output":
            call_id, output = item.get("call_id"), check_content(item.get("output"), f"{name}.output")
            if not isinstance(call_id, str) or call_id not in call_ids:
                raise ApiError(f"{name}: there is no function_call with its call_id", param=f"{name}.call_id")
            messages.append({"role": "tool", "tool_call_id": call_id, "content": output})
        else:
            rule = "only message, reasoning, function_call and function_call_output"
            raise ApiError(f"{name}: an item of type {str(kind)[:64]!r} is not supported, {rule}", param=name)


def add_answer(messages: list[dict], part: dict):
    """Add thoughts, content or a call to the answer that the messages end with. After content, thoughts and content are
    the next answer, unless there are calls, too."""
    last = messages[-1] if messages else {"role": None}
    if last["role"] == "assistant" and (last["content"] is None or "tool_calls" in last | part):
        joined = {key: last[key] + value if last.get(key) else value for key, value in part.items()}
        messages[-1] = last | joined
    else:
        messages.append({"role": "assistant", "content": None} | part)


def read_functions(given: list, choice) -> list[dict]:
    """The functions among the tools. Others are refused, unless the client marks them as optional, or its tool_choice
    leaves them out."""
    functions, names = [], ("type", "name", "description", "parameters", "strict")
    for i, tool in enumerate(given):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind == "function":
            functions.append({name: tool.get(name) for name in names})
        elif choice in (None, "auto", "required") and not (isinstance(tool, dict) and tool.get("optional") is True):
            text = f"tools[{i}]: a tool of type {str(kind)[:64]!r} is not supported, only functions"
            raise ApiError(f"{text}; with optional: true, it is left out", param=f"tools[{i}]")
        else:
            text = f"a request has a tool of type {str(kind)[:60]!r}, which is ignored"
            log_once(FieldReader.logged, f"tool: {kind}", text)
    return functions


def nest(function: dict) -> dict:
    """A function as chat has it, in tools, calls and tool_choice."""
    return {"type": "function", "function": {key: value for key, value in function.items() if key != "type"}}


def nest_tool_choice(choice):
    """The field tool_choice of a chat."""
    kind = choice.get("type") if isinstance(choice, dict) else None
    if kind == "allowed_tools":
        tools = [nest(tool) for tool in FieldReader(choice).read("tools", list, []) if isinstance(tool, dict)]
        return {"type": kind, "allowed_tools": {"mode": choice.get("mode"), "tools": tools}}
    return nest(choice) if kind == "function" else choice


# ---------------------------------------------------------------- responses

STARTS = {  # of the items, with what their ids begin with
    Content: {"id": "msg", "type": "message", "role": "assistant", "content": []},
    Reasoning: {"id": "rs", "type": "reasoning", "summary": [], "content": []},
    CallArguments: {"id": "fc", "type": "function_call", "arguments": ""},
}
NAMES = {Content: "output_text", Reasoning: "reasoning_text", CallArguments: "function_call_arguments"}  # of events


class ItemBuilder:
    """Builds the response of /v1/responses, as responses.ResponseBuilder does for OpenAI's other paths."""

    def __init__(self, kept: KeptResponses, model: ServedModel, completion: CompletionRequest):
        self.kept, self.model = kept, model
        self.completion = completion
        self.response, self.output = completion.turn.response, []  # the latter has the items that are complete
        self.kind: type | None = None  # the kind of event whose item is open
        self.item, self.where = {}, {}  # the open item as it began, and its place for events
        self.text, self.sent_events = "", 0  # the former of the open item

    def whole(self) -> dict:
        choice = self.completion.choices[0]
        self.add_update(choice, choice.combined())
        return self.response

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        names = () if choice.updates else ("created", "in_progress")
        events = [{"type": f"response.{name}", "response": self.response} for name in names]
        choice.updates.append(update)
        return self.event_bytes(events + self.add_update(choice, update))

    def stream_end(self) -> bytes:
        return b""  # the last update had the end

    def stream_error(self, error: ApiError) -> bytes:
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = {"status": "failed", "output": self.output, "error": {"code": code, "message": str(error)}}
        event = {"type": "error", "code": error.code or code, "message": str(error), "param": error.param}
        return self.event_bytes([event, {"type": "response.failed", "response": self.response | failed}])

    def event_bytes(self, events: list[dict]) -> bytes:
        first = self.sent_events
        self.sent_events += len(events)
        return b"".join(named_event(event | {"sequence_number": n}) for n, event in enumerate(events, first))

    def add_update(self, choice: Choice, update: Update) -> list[dict]:
        """The stream's events for an update."""
        events = [made for event in choice.events(update) for made in self.item_events(event)]
        return events if update.finish_reason is None else events + self.end_response(choice, update)

    def item_events(self, event: Event) -> list[dict]:
        if isinstance(event, CallBegins):
            return self.begin_item(CallArguments, {"call_id": event.id, "name": event.name})
        begins = [] if type(event) is self.kind else self.begin_item(type(event), {})
        self.text += event.text
        return [*begins, self.text_event("delta", delta=event.text)]

    def text_event(self, what: str, **text) -> dict:
        event = {"type": f"response.{NAMES[self.kind]}.{what}", **self.where, **text}
        return event | {"logprobs": []} if self.kind is Content else event

    def part(self) -> dict:
        """The only part of the open item's content."""
        part = {"type": NAMES[self.kind], "text": self.text}
        return part | {"annotations": [], "logprobs": []} if self.kind is Content else part

    def begin_item(self, kind: type, fields: dict) -> list[dict]:
        """Begin an item. Returns the events for it, and for the end of the one before."""
        events, place = self.end_item("completed"), {"output_index": len(self.output)}
        self.kind, self.text = kind, ""
        self.item = STARTS[kind] | {"id": f"{STARTS[kind]['id']}_{secrets.token_hex(12)}"} | fields
        self.where = place | {"item_id": self.item["id"]}
        events.append({"type": "response.output_item.added", **place, "item": self.item | {"status": "in_progress"}})
        if kind is not CallArguments:
            self.where["content_index"] = 0
            events.append({"type": "response.content_part.added", **self.where, "part": self.part()})
        return events

    def end_item(self, status: str) -> list[dict]:
        """End the open item, if there is one. Returns the events for it."""
        if self.kind is None:
            return []
        content = {"arguments" if self.kind is CallArguments else "text": self.text}
        events = [self.text_event("done", **content)]
        if self.kind is not CallArguments:
            content = {"content": [self.part()]}
            events.append({"type": "response.content_part.done", **self.where, "part": self.part()})
        item = self.item | content | {"status": status}
        events.append({"type": "response.output_item.done", "output_index": len(self.output), "item": item})
        self.output.append(item)
        self.kind = None
        return events

    def end_response(self, choice: Choice, update: Update) -> list[dict]:
        """End the response, and keep it. Returns the events for it."""
        is_cut, events = choice.finish_reason(update) == "length", []
        if not is_cut and self.kind in (None, Reasoning) and all(item["type"] == "reasoning" for item in self.output):
            events = self.begin_item(Content, {})  # clients expect a message or a call
        is_whole = not is_cut
        if self.kind is CallArguments:  # which may be whole although the answer was cut in the next one
            is_whole = choice.parser.has_whole_calls
        events += self.end_item("completed" if is_whole else "incomplete")
        status = "incomplete" if is_cut else "completed"
        details = {"incomplete_details": {"reason": "max_output_tokens"}} if is_cut else {"completed_at": time.time()}
        self.response = self.response | details | {"status": status, "output": self.output, "usage": self.usage()}
        if self.completion.turn.is_kept:
            add_items(self.completion.turn.messages, self.output, "output")
            self.completion.turn.response = self.response
            self.kept.add(self.completion.turn)
        return [*events, {"type": f"response.{status}", "response": self.response}]

    def usage(self) -> dict:
        usage = self.completion.usage()
        thoughts = [item["content"][0]["text"] for item in self.output if item["type"] == "reasoning"]
        tokens = sum(len(self.model.tokenizer.encode(text, False)) for text in thoughts)
        return {
            "input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"],
            "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens_details": {"reasoning_tokens": min(tokens, usage["completion_tokens"])},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip
