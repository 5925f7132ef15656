"""Anthropic's Messages API, translated: requests to those of OpenAI's chat, and answers to Anthropic's messages.

Read down: errors; chat_body, which translates a request's body, with the messages and the tools; the parsers of both
paths; MessageBuilder, which builds responses. http_server.py has no such paths if this file is deleted.

Source: Anthropic's API reference (Messages, Streaming Messages, Errors, Count Message tokens).
"""

import json

from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.pipe_messages import Update
from server.request_fields import KIND_NAMES, ApiError, FieldReader, read_role, read_stop_strings
from server.responses import named_event

# ---------------------------------------------------------------- errors

ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 413: "request_too_large",
    429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def anthropic_error(error: ApiError) -> dict:
    """An error as Anthropic's error object."""
    kind = ERROR_TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


# ---------------------------------------------------------------- requests


def chat_body(fields: FieldReader) -> dict:
    """The body of /v1/chat/completions that asks for the same, without a limit of new tokens."""
    body = {name: fields.unread.pop(name, None) for name in ("model", "temperature", "top_p", "top_k", "stream")}
    body["stop"] = list(read_stop_strings(fields, "stop_sequences"))
    body["messages"] = read_messages(fields)
    body["tools"] = [translate_tool(tool, f"tools[{i}]") for i, tool in enumerate(fields.read("tools", list, []))]
    body |= tool_choice_fields(fields.read("tool_choice", dict, {}))
    thinking = fields.read("thinking", dict, {}).get("type")
    if thinking not in (None, "enabled", "disabled", "adaptive"):
        raise ApiError("thinking.type must be enabled, disabled or adaptive", param="thinking")
    if thinking in ("enabled", "disabled"):
        body["chat_template_kwargs"] = {"enable_thinking": thinking == "enabled"}
    config = fields.read("output_config", dict, {})
    body["reasoning_effort"] = FieldReader(config).read("effort", str)
    older = translate_format(fields.unread.pop("output_format", None), "output_format")  # the name that it had first
    body["response_format"] = translate_format(config.get("format"), "output_config.format") or older
    for name in ("mcp_servers", "container", "thread"):
        if fields.unread.pop(name, None):
            raise ApiError(f"{name} is not supported", param=name)
    fields.read("metadata", dict)
    fields.check_unread()
    return body


def translate_format(format, name: str) -> dict | None:
    """The field response_format."""
    if format is None:
        return None
    schema = format.get("schema") if isinstance(format, dict) and format.get("type") == "json_schema" else None
    if not isinstance(schema, dict):
        raise ApiError(f"{name} must have the type json_schema and a schema", param=name.partition(".")[0])
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": schema, "strict": True}}


def read_messages(fields: FieldReader) -> list[dict]:
    """The messages for OpenAI's chat. The first one is the field `system` and the system messages at the beginning."""
    system, given = fields.read("system", (str, list)), fields.read("messages", list)
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
    """Whether a text is a header line by which an agent describes itself to Anthropic. It has another value in each
    turn, so the cached prefix of the conversation would end before it."""
    line = text.strip()
    return line.startswith("x-anthropic-") and "\n" not in line


def block_texts(content, name: str, role: str = "system") -> list[str]:
    """The texts of a content, which is a string or a list of blocks. role: a key of BLOCKS whose blocks are texts."""
    blocks = read_blocks(content, name, BLOCKS[role])
    return [block_text(block, f"{name}[{i}]") for i, block in enumerate(blocks)]


READABLE = {"document": dict, "search_result": list}
BLOCKS = {  # of each role: the types of blocks, and the type of the field that is read
    "system": {"text": str},
    "user": {"text": str, "tool_result": str} | READABLE,
    "tool": {"text": str, "tool_reference": str} | READABLE,
    "assistant": {"text": str, "thinking": str, "redacted_thinking": str, "tool_use": dict},
}
# The field that is read, where its name is not the type.
KEYS = {"tool_result": "tool_use_id", "redacted_thinking": "data", "tool_use": "input", "document": "source"}
KEYS |= {"search_result": "content", "tool_reference": "tool_name"}


def read_blocks(content, name: str, types: dict[str, type]) -> list[dict]:
    """The blocks of a content. ApiError if one has another type, or is malformed."""
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(blocks, list):
        raise ApiError(f"{name} must be a string or a list of blocks", param=name)
    for i, block in enumerate(blocks):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str):
            raise ApiError(f"{name}[{i}] must be an object with a type", param=name)
        if kind not in types:
            rule = f"{name}[{i}]: a block of type {kind[:64]!r} is not supported here, only {', '.join(types)}"
            raise ApiError(rule, param=name)
        key = KEYS.get(kind, kind)
        if not isinstance(block.get(key), types[kind]):
            raise ApiError(f"{name}[{i}].{key} must be {KIND_NAMES[types[kind]]}", param=name)
    return blocks


def block_text(block: dict, name: str) -> str:
    """The text of a block of type text or tool_reference, or of one in READABLE."""
    kind = block["type"]
    if kind in ("text", "tool_reference"):
        return block[KEYS.get(kind, kind)]
    if isinstance(block.get("citations"), dict) and block["citations"].get("enabled"):
        raise ApiError(f"{name}.citations is not supported", param=name)
    if kind == "search_result":
        texts = block_texts(block["content"], f"{name}.content")
        before = [block.get("title"), block.get("source")]
    else:
        source, before = block["source"], [block.get("title"), block.get("context")]
        kind = source.get("type")
        if kind not in ("text", "content"):
            rule = f"{name}.source must have the type text or content, {str(kind)[:64]!r} is not supported"
            raise ApiError(rule, param=name)
        texts = block_texts(source.get("data" if kind == "text" else "content"), f"{name}.source")
    return "\n".join([*(text for text in before if isinstance(text, str) and text), *texts])


def translate_message(role: str, content, name: str) -> list[dict]:
    """The messages for a message: one, and before it one for each result of a tool."""
    results: list[dict] = []
    texts: list[str] = []
    calls: list[dict] = []
    thoughts = ""
    for i, block in enumerate(read_blocks(content, name, BLOCKS[role])):
        kind = block["type"]
        if kind == "tool_result":
            result = "\n".join(block_texts(block.get("content") or "", f"{name}[{i}].content", "tool"))
            results.append({"role": "tool", "tool_call_id": block["tool_use_id"], "content": result})
        elif kind == "tool_use":
            function = {"name": block.get("name"), "arguments": block["input"]}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "thinking":
            thoughts += block["thinking"]
        elif kind != "redacted_thinking":
            texts.append(block_text(block, f"{name}[{i}]"))
    if results and not texts:
        return results
    message = {"role": role, "content": "".join(texts) if role == "assistant" else "\n".join(texts)}
    if thoughts:
        message["reasoning_content"] = thoughts
    if calls:
        message["tool_calls"] = calls
    return [*results, message]


def translate_tool(tool, name: str) -> dict:
    """A tool of OpenAI's chat."""
    if not isinstance(tool, dict) or tool.get("type") not in (None, "custom"):
        kind = f" of type {str(tool.get('type'))[:64]!r}" if isinstance(tool, dict) else ""
        raise ApiError(f"{name}{kind} is not supported, only tools with a name and an input_schema", param=name)
    if not isinstance(tool.get("input_schema"), dict):
        raise ApiError(f"{name}.input_schema must be a JSON schema", param=name)
    function = {"name": tool.get("name"), "parameters": tool["input_schema"]}
    function |= {key: tool[key] for key in ("description", "strict") if tool.get(key) is not None}
    return {"type": "function", "function": function}


def tool_choice_fields(choice: dict) -> dict:
    """The fields tool_choice and parallel_tool_calls."""
    kind, single = choice.get("type", "auto"), FieldReader(choice).read("disable_parallel_tool_use", bool, False)
    known = {"auto": "auto", "any": "required", "none": "none"}
    known["tool"] = {"type": "function", "function": {"name": choice.get("name")}}
    if not isinstance(kind, str) or kind not in known or (kind == "tool" and not isinstance(choice.get("name"), str)):
        raise ApiError("tool_choice.type must be auto, any, none or tool with a name", param="tool_choice")
    return {"tool_choice": known[kind], "parallel_tool_calls": not single}


# The paths of schemas in Anthropic's requests, by their patterns in the translated ones.
ANTHROPIC_NAMES = {
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"\.function\.parameters": ".input_schema",
    "response_format": "output_config",
}


def parse_message(model: ServedModel, body: dict) -> CompletionRequest:
    """Parse a body of /v1/messages."""
    fields = FieldReader(body)
    max_tokens = fields.read("max_tokens", int, None, 1)
    return model.parse_translated(chat_body(fields), ANTHROPIC_NAMES, max_tokens, "msg")


def count_tokens(model: ServedModel, body: dict) -> dict:
    """The response of /v1/messages/count_tokens."""
    fields = FieldReader(chat_body(FieldReader(body)))
    model.check_model_name(fields)
    return {"input_tokens": len(model.chat.encode(model.chat.read_conversation(fields)))}


# ---------------------------------------------------------------- responses

BLOCK_STARTS = {Content: {"type": "text", "text": ""}, Reasoning: {"type": "thinking", "thinking": "", "signature": ""}}


class MessageBuilder:
    """Builds the response of /v1/messages, as responses.ResponseBuilder does for OpenAI's paths."""

    def __init__(self, model: ServedModel, completion: CompletionRequest):
        self.model, self.completion = model, completion
        self.block: type | None = None  # the kind of event whose block is open in the stream
        self.index = -1  # of the stream's latest block

    def message(self) -> dict:
        """The message without an answer."""
        message = {"id": self.completion.id, "type": "message", "role": "assistant", "model": self.model.name}
        return message | {"content": [], "stop_reason": None, "stop_sequence": None, "usage": self.usage()}

    def usage(self) -> dict:
        usage = self.completion.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        read = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": cached}
        return {"input_tokens": usage["prompt_tokens"] - cached, **read, "output_tokens": usage["completion_tokens"]}

    def whole(self) -> dict:
        choice = self.completion.choices[0]
        update = choice.combined()
        content = content_blocks(choice.events(update))
        stop = stop_fields(choice, update)
        if stop["stop_reason"] == "tool_use" and not any(block["type"] == "tool_use" for block in content):
            stop["stop_reason"] = "end_turn" if stop["stop_sequence"] is None else "stop_sequence"
        return self.message() | {"content": content} | stop

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        is_first = not choice.updates
        choice.updates.append(update)
        events = [{"type": "message_start", "message": self.message()}] if is_first else []
        for event in choice.events(update):
            events += self.block_events(event)
        if update.finish_reason is not None:
            events += self.end_of_block()
            events.append({"type": "message_delta", "delta": stop_fields(choice, update), "usage": self.usage()})
            events.append({"type": "message_stop"})
        return b"".join(map(named_event, events))

    def stream_end(self) -> bytes:
        return b""  # the last update had the end

    def stream_error(self, error: ApiError) -> bytes:
        return named_event(anthropic_error(error))

    def block_events(self, event: Event) -> list[dict]:
        """The stream's events for a piece of the answer."""
        if isinstance(event, CallBegins):
            return self.begin_block(
                CallArguments, {"type": "tool_use", "id": event.id, "name": event.name, "input": {}}
            )
        kind, events = type(event), []
        if kind is not self.block:
            events = self.begin_block(kind, BLOCK_STARTS[kind])
        deltas = {
            Content: {"type": "text_delta", "text": event.text},
            Reasoning: {"type": "thinking_delta", "thinking": event.text},
            CallArguments: {"type": "input_json_delta", "partial_json": event.text},
        }
        return [*events, {"type": "content_block_delta", "index": self.index, "delta": deltas[kind]}]

    def begin_block(self, kind: type, block: dict) -> list[dict]:
        events = self.end_of_block()
        self.block, self.index = kind, self.index + 1
        return [*events, {"type": "content_block_start", "index": self.index, "content_block": block}]

    def end_of_block(self) -> list[dict]:
        was_open, self.block = self.block is not None, None
        return [{"type": "content_block_stop", "index": self.index}] if was_open else []


def content_blocks(events: list[Event]) -> list[dict]:
    """The blocks of a message. A call whose arguments are no JSON object, because the answer was cut off or because the
    model has made a mistake, is text."""
    blocks, texts = [], []
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
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        arguments = None
    return block | {"input": arguments} if isinstance(arguments, dict) else {"type": "text", "text": text}


def stop_fields(choice: Choice, update: Update) -> dict:
    """Why the answer ended, after its last update was parsed."""
    stop = choice.parser.stops.stop_string or update.stop_string
    ended = "end_turn" if stop is None else "stop_sequence"
    reasons = {"stop": ended, "length": "max_tokens", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[choice.finish_reason(update)], "stop_sequence": stop}
