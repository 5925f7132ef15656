"""Anthropic's Messages API, translated: requests become those of OpenAI's chat, and answers become
Anthropic's messages.

Read down: errors; chat_body, which translates a request's body (anthropic_requests.py has its
fields), with the messages and the tools; the parsers of both paths; MessageBuilder, which builds
responses. If this file is deleted, http_server.py has no such paths.

Source: Anthropic's API reference (Streaming Messages, Errors).
"""

import json

from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.anthropic_requests import (
    Document,
    Message,
    MessageBody,
    RedactedThinking,
    SearchResult,
    TextBlock,
    Thinking,
    Tool,
    ToolReference,
    ToolResult,
    ToolUse,
)
from server.api import Choice, CompletionRequest, ServedModel
from server.openai_requests import ChatBody
from server.parameters import refuse_constant
from server.pipe_messages import Update
from server.request_fields import ApiError
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


def chat_body(body: dict) -> dict:
    """The body of /v1/chat/completions that asks for the same."""
    fields = MessageBody.read(body)
    settings = ("model", "temperature", "top_p", "top_k", "stream", "max_tokens")
    chat = {name: getattr(fields, name) for name in settings}
    chat["stop"] = list(fields.stop_sequences)
    chat["messages"] = translate_messages(fields)
    chat["tools"] = [translate_tool(tool) for tool in fields.tools]
    named = {"type": "function", "function": {"name": fields.tool_choice.name}}
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    chat["tool_choice"] = choices[fields.tool_choice.type]
    chat["parallel_tool_calls"] = not fields.tool_choice.disable_parallel_tool_use

    thinking = fields.thinking
    if thinking.type in ("enabled", "disabled"):
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.type == "enabled"}
    if thinking.type == "enabled":
        chat["thinking_budget"] = thinking.budget_tokens
    chat["reasoning_effort"] = fields.output_config.effort
    format = fields.output_config.format or fields.output_format
    if format is not None:
        described = {"name": "format", "schema": format.schema_, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": described}
    return chat


def translate_messages(fields: MessageBody) -> list[dict]:
    """The messages for OpenAI's chat. The first one joins the field `system` and the system
    messages at the beginning."""
    instructions = [block.text for block in fields.system]
    translated = []
    for message in fields.messages:
        if message.role == "system" and not translated:
            instructions += [block.text for block in message.content]
        else:
            translated += translate_message(message)

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


def block_text(block: TextBlock | ToolReference | SearchResult | Document) -> str:
    if isinstance(block, TextBlock):
        return block.text
    if isinstance(block, ToolReference):
        return block.tool_name
    if isinstance(block, SearchResult):
        lines = [block.title, block.source]
        texts = block.content
    else:
        lines = [block.title, block.context]
        texts = block.source.content
    return "\n".join([line for line in lines if line] + [one.text for one in texts])


def translate_message(message: Message) -> list[dict]:
    """The messages for OpenAI's chat: one for each result of a tool, and then one for the rest."""
    results = []
    texts = []
    calls = []
    thoughts = ""
    for block in message.content:
        if isinstance(block, ToolResult):
            text = "\n".join(map(block_text, block.content))
            results.append({"role": "tool", "tool_call_id": block.tool_use_id, "content": text})
        elif isinstance(block, ToolUse):
            function = {"name": block.name, "arguments": block.input}
            calls.append({"id": block.id, "type": "function", "function": function})
        elif isinstance(block, Thinking):
            thoughts += block.thinking
        elif not isinstance(block, RedactedThinking):
            texts.append(block_text(block))

    if results and not texts:
        return results
    separator = "" if message.role == "assistant" else "\n"
    translated = {"role": message.role, "content": separator.join(texts)}
    if message.role == "assistant":
        translated |= {"reasoning_content": thoughts, "tool_calls": calls}
    return [*results, translated]


def translate_tool(tool: Tool) -> dict:
    """A tool as OpenAI's chat has it."""
    function = {"name": tool.name, "description": tool.description, "parameters": tool.input_schema}
    return {"type": "function", "function": function | {"strict": tool.strict}}


# Patterns of names in the translated request, and the names of the same fields in Anthropic's.
ANTHROPIC_NAMES = {
    r"response_format\.json_schema\.schema": "output_config.format.schema",
    r"\.function\.parameters": ".input_schema",
    r"tool_choice\.function": "tool_choice",
    "response_format": "output_config",
}


def parse_message(model: ServedModel, body: dict) -> CompletionRequest:
    """Parse a body of /v1/messages."""
    return model.parse_translated(chat_body(body), ANTHROPIC_NAMES, "msg")


def count_tokens(model: ServedModel, body: dict) -> dict:
    """The response of /v1/messages/count_tokens."""
    fields = ChatBody.read(chat_body(body))
    model.check_model_name(fields.model)
    return {"input_tokens": len(model.chat.encode(model.chat.read_conversation(fields)))}


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
