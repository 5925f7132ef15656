"""Anthropic's Messages API, translated: requests become those of OpenAI's chat, and answers become
Anthropic's messages.

Read down: errors; chat_body, which translates a request's body, with the messages and the tools;
the parsers of both paths; MessageBuilder, which builds responses. If this file is deleted,
http_server.py has no such paths.

Source: Anthropic's API reference (Messages, Streaming Messages, Errors, Count Message tokens).
"""

import json

from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.chat_prompts import get_key
from server.parameters import refuse_constant
from server.pipe_messages import Update
from server.request_fields import KIND_NAMES, ApiError, FieldReader, read_role, read_stop_strings
from server.responses import named_event

# ---------------------------------------------------------------- errors

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: ApiError) -> dict:
    """An error as Anthropic's error object."""
    default = "invalid_request_error" if error.status < 500 else "api_error"
    kind = ERROR_TYPES.get(error.status, default)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


# ---------------------------------------------------------------- requests


def chat_body(fields: FieldReader) -> dict:
    """The body of /v1/chat/completions that asks for the same, without max_tokens."""
    same_names = ("model", "temperature", "top_p", "top_k", "stream")
    body = {name: fields.unread.pop(name, None) for name in same_names}
    body["stop"] = list(read_stop_strings(fields, "stop_sequences"))
    body["messages"] = read_messages(fields)
    tools = fields.read("tools", list, [])
    body["tools"] = [translate_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]
    body |= tool_choice_fields(fields.read("tool_choice", dict, {}))

    settings = FieldReader(fields.read("thinking", dict, {}))
    thinking = settings.unread.get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise ApiError("thinking.type must be enabled, disabled or adaptive", param="thinking")
    if thinking in ("enabled", "disabled"):
        body["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    if thinking == "enabled":
        body["thinking_budget"] = settings.read("budget_tokens", int, None, 1)

    config = fields.read("output_config", dict, {})
    body["reasoning_effort"] = FieldReader(config).read("effort", str)
    older = translate_format(fields.unread.pop("output_format", None), "output_format")
    format = translate_format(config.get("format"), "output_config.format")
    body["response_format"] = format or older  # output_format is the name that it had first

    for name in ("mcp_servers", "container", "thread"):
        if fields.unread.pop(name, None):
            raise ApiError(f"{name} is not supported", param=name)
    fields.read("metadata", dict)
    fields.check_unread()
    return body


def translate_format(format, name: str) -> dict | None:
    """The value of response_format for the format of an answer in the field `name`."""
    if format is None:
        return None
    schema = None
    if get_key(format, "type") == "json_schema":
        schema = format.get("schema")
    if not isinstance(schema, dict):
        text = f"{name} must have the type json_schema and a schema"
        raise ApiError(text, param=name.partition(".")[0])
    described = {"name": "format", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": described}


def read_messages(fields: FieldReader) -> list[dict]:
    """The messages for OpenAI's chat. The first one joins the field `system` and the system
    messages at the beginning."""
    system = fields.read("system", (str, list))
    given = fields.read("messages", list)
    if not given:
        raise ApiError("messages must be a list with at least one message", param="messages")

    instructions = block_texts(system, "system") if system else []
    translated = []
    for i, message in enumerate(given):
        name = f"messages[{i}]"
        role = read_role(message, name, ("user", "assistant", "system"))
        if role == "system" and not translated:
            instructions += block_texts(message.get("content"), f"{name}.content")
        else:
            translated += translate_message(role, message.get("content"), f"{name}.content")

    if instructions and is_header(instructions[0]):
        del instructions[0]
    if instructions:
        translated.insert(0, {"role": "system", "content": "\n".join(instructions)})
    return translated


def is_header(text: str) -> bool:
    """Whether a text is a header line by which an agent describes itself to Anthropic. Its value
    differs in each turn, so the cached prefix of the conversation would end before it."""
    line = text.strip()
    return line.startswith("x-anthropic-") and "\n" not in line


def block_texts(content, name: str, role: str = "system") -> list[str]:
    """The texts of a content, which is a string or a list of blocks.

    role: "system" or "tool". All blocks that BLOCKS allows for them have a text.
    """
    blocks = read_blocks(content, name, BLOCKS[role])
    return [block_text(block, f"{name}[{i}]") for i, block in enumerate(blocks)]


READABLE = {"document": dict, "search_result": list}
# The types of blocks that a role may have, and for each the Python type of the field that is read.
BLOCKS = {
    "system": {"text": str},
    "user": {"text": str, "tool_result": str} | READABLE,
    "tool": {"text": str, "tool_reference": str} | READABLE,
    "assistant": {"text": str, "thinking": str, "redacted_thinking": str, "tool_use": dict},
}
# The field that is read, if its name is not the type of the block.
KEYS = {
    "tool_result": "tool_use_id", "redacted_thinking": "data", "tool_use": "input",
    "document": "source", "search_result": "content", "tool_reference": "tool_name",
}  # fmt: skip


def read_blocks(content, name: str, types: dict[str, type]) -> list[dict]:
    """The blocks of a content. ApiError if a block is malformed, or its type is not in `types`."""
    blocks = content
    if isinstance(content, str):
        blocks = [{"type": "text", "text": content}]
    if not isinstance(blocks, list):
        raise ApiError(f"{name} must be a string or a list of blocks", param=name)

    for i, block in enumerate(blocks):
        kind = get_key(block, "type")
        if not isinstance(kind, str):
            raise ApiError(f"{name}[{i}] must be an object with a type", param=name)
        if kind not in types:
            text = f"{name}[{i}]: a block of type {kind[:64]!r} is not supported here"
            raise ApiError(f"{text}, only {', '.join(types)}", param=name)
        key = KEYS.get(kind, kind)
        if not isinstance(block.get(key), types[kind]):
            raise ApiError(f"{name}[{i}].{key} must be {KIND_NAMES[types[kind]]}", param=name)
    return blocks


def block_text(block: dict, name: str) -> str:
    """The text of a block of type text or tool_reference, or of a type in READABLE."""
    kind = block["type"]
    if kind in ("text", "tool_reference"):
        return block[KEYS.get(kind, kind)]
    citations = block.get("citations")
    if isinstance(citations, dict) and citations.get("enabled"):
        raise ApiError(f"{name}.citations is not supported", param=name)

    if kind == "search_result":
        before = [block.get("title"), block.get("source")]
        texts = block_texts(block["content"], f"{name}.content")
    else:
        before = [block.get("title"), block.get("context")]
        texts = block_texts(document_content(block["source"], name), f"{name}.source")
    titles = [text for text in before if isinstance(text, str) and text]
    return "\n".join(titles + texts)


def document_content(source: dict, name: str):
    """The content of a document, given its field `source`."""
    kind = source.get("type")
    if kind == "text":
        return source.get("data")
    if kind == "content":
        return source.get("content")
    text = f"{name}.source must have the type text or content"
    raise ApiError(f"{text}, {str(kind)[:64]!r} is not supported", param=name)


def translate_message(role: str, content, name: str) -> list[dict]:
    """The messages for OpenAI's chat: one for each result of a tool, and then one for the rest."""
    results: list[dict] = []
    texts: list[str] = []
    calls: list[dict] = []
    thoughts = ""
    for i, block in enumerate(read_blocks(content, name, BLOCKS[role])):
        kind = block["type"]
        if kind == "tool_result":
            parts = block_texts(block.get("content") or "", f"{name}[{i}].content", "tool")
            call_id = block["tool_use_id"]
            results.append({"role": "tool", "tool_call_id": call_id, "content": "\n".join(parts)})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block["input"]}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += block["thinking"]
        elif kind != "redacted_thinking":
            texts.append(block_text(block, f"{name}[{i}]"))

    if results and not texts:
        return results
    separator = "" if role == "assistant" else "\n"
    message = {"role": role, "content": separator.join(texts)}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def translate_tool(tool, name: str) -> dict:
    """A tool as OpenAI's chat has it."""
    rule = "is not supported, only tools with a name and an input_schema"
    if not isinstance(tool, dict):
        raise ApiError(f"{name} {rule}", param=name)
    kind = tool.get("type")
    if kind not in (None, "custom"):
        raise ApiError(f"{name} of type {str(kind)[:64]!r} {rule}", param=name)
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError(f"{name}.input_schema must be a JSON schema", param=name)
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    for key in ("description", "strict"):
        if tool.get(key) is not None:
            function[key] = tool[key]
    return {"type": "function", "function": function}


def tool_choice_fields(choice: dict) -> dict:
    """The fields tool_choice and parallel_tool_calls of a chat."""
    kind = choice.get("type", "auto")
    name = choice.get("name")
    single = FieldReader(choice).read("disable_parallel_tool_use", bool, False)
    known = {"auto": "auto", "any": "required", "none": "none"}
    if isinstance(name, str):
        known["tool"] = {"type": "function", "function": {"name": name}}
    if not isinstance(kind, str) or kind not in known:
        rule = "tool_choice.type must be auto, any, none or tool with a name"
        raise ApiError(rule, param="tool_choice")
    return {"tool_choice": known[kind], "parallel_tool_calls": not single}


# Patterns of names in the translated request, and the names of the same fields in Anthropic's.
ANTHROPIC_NAMES = {
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"\.function\.parameters": ".input_schema",
    "response_format": "output_config",
}


def parse_message(model: ServedModel, body: dict) -> CompletionRequest:
    """Parse a body of /v1/messages."""
    fields = FieldReader(body)
    max_tokens = fields.read("max_tokens", int, None, 1)
    return model.parse_translated(chat_body(fields) | {"max_tokens": max_tokens}, ANTHROPIC_NAMES, "msg")


def count_tokens(model: ServedModel, body: dict) -> dict:
    """The response of /v1/messages/count_tokens."""
    fields = FieldReader(chat_body(FieldReader(body)))
    model.check_model_name(fields)
    conversation = model.chat.read_conversation(fields)
    return {"input_tokens": len(model.chat.encode(conversation))}


# ---------------------------------------------------------------- responses

BLOCK_STARTS = {
    Content: {"type": "text", "text": ""},
    Reasoning: {"type": "thinking", "thinking": "", "signature": ""},
}


class MessageBuilder:
    """Builds the response of /v1/messages, as responses.ResponseBuilder does for OpenAI's paths."""

    ping = named_event({"type": "ping"})

    def __init__(self, model: ServedModel, completion: CompletionRequest):
        self.model = model
        self.completion = completion
        self.block: type | None = None  # the kind of event whose block is open in the stream
        self.index = -1  # the index of the stream's latest block

    def message(self) -> dict:
        """The message without an answer."""
        return {
            "id": self.completion.id,
            "type": "message",
            "role": "assistant",
            "model": self.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": self.usage(),
        }

    def usage(self) -> dict:
        usage = self.completion.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        }

    def whole(self) -> dict:
        """The message with the whole answer."""
        choice = self.completion.choices[0]
        update = choice.combined()
        content = content_blocks(choice.events(update))
        choice.parser.calls -= len(choice.parser.broken)  # they have become text
        stop = stop_fields(choice, update)
        has_call = any(block["type"] == "tool_use" for block in content)
        if stop["stop_reason"] == "tool_use" and not has_call:  # all calls have become text
            stop["stop_reason"] = end_reason(stop["stop_sequence"])
        return self.message() | {"content": content} | stop

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        is_first = not choice.updates
        choice.updates.append(update)
        events = []
        if is_first:
            events.append({"type": "message_start", "message": self.message()})
        for event in choice.events(update):
            events += self.block_events(event)
        if update.finish_reason is not None:
            events += self.end_of_block()
            delta = stop_fields(choice, update)
            events.append({"type": "message_delta", "delta": delta, "usage": self.usage()})
            events.append({"type": "message_stop"})
        return b"".join(map(named_event, events))

    def stream_end(self) -> bytes:
        return b""  # the last update had the end

    def stream_error(self, error: ApiError) -> bytes:
        return named_event(anthropic_error(error))

    def block_events(self, event: Event) -> list[dict]:
        """The stream's events for a piece of the answer."""
        if isinstance(event, CallBegins):
            block = {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            return self.begin_block(CallArguments, block)

        kind = type(event)
        events = []
        if kind is not self.block:
            events = self.begin_block(kind, BLOCK_STARTS[kind])
        deltas = {
            Content: {"type": "text_delta", "text": event.text},
            Reasoning: {"type": "thinking_delta", "thinking": event.text},
            CallArguments: {"type": "input_json_delta", "partial_json": event.text},
        }
        delta = {"type": "content_block_delta", "index": self.index, "delta": deltas[kind]}
        return [*events, delta]

    def begin_block(self, kind: type, block: dict) -> list[dict]:
        """Begin a block. Returns the events for it, and for the end of the block before it."""
        events = self.end_of_block()
        self.block = kind
        self.index += 1
        start = {"type": "content_block_start", "index": self.index, "content_block": block}
        return [*events, start]

    def end_of_block(self) -> list[dict]:
        """End the open block, if there is one. Returns the events for it."""
        if self.block is None:
            return []
        self.block = None
        return [{"type": "content_block_stop", "index": self.index}]


def content_blocks(events: list[Event]) -> list[dict]:
    """The blocks of a message.

    A call becomes text if its arguments are not a JSON object, because the answer was cut off or
    the model has made a mistake.
    """
    blocks = []
    texts = []
    for event in events:
        if isinstance(event, CallBegins):
            blocks.append({"type": "tool_use", "id": event.id, "name": event.name})
            texts.append("")
            continue
        start = BLOCK_STARTS.get(type(event))
        if start is not None and (not blocks or blocks[-1]["type"] != start["type"]):
            blocks.append(dict(start))
            texts.append("")
        texts[-1] += event.text
    return [finished_block(block, text) for block, text in zip(blocks, texts)]


def finished_block(block: dict, text: str) -> dict:
    """A block with its text."""
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    try:
        arguments = json.loads(text, parse_constant=refuse_constant)
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, dict):
        return {"type": "text", "text": text}
    return block | {"input": arguments}


def stop_fields(choice: Choice, update: Update) -> dict:
    """Why the answer ended, after its last update was parsed."""
    stop = choice.parser.stops.stop_string or update.stop_string
    reasons = {"stop": end_reason(stop), "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[choice.finish_reason(update)], "stop_sequence": stop}


def end_reason(stop_string: str | None) -> str:
    """The stop reason of an answer that came to its end."""
    return "end_turn" if stop_string is None else "stop_sequence"
