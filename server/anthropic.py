"""Anthropic's Messages API, translated: requests become requests of OpenAI's chat, and answers
become Anthropic's messages.

Read down: errors; chat_body, which translates a request's body (anthropic_requests.py has its
fields), with the messages and the tools; the parsers of both paths; MessageBuilder, which builds
responses.

Source: Anthropic's API reference (Streaming Messages, Errors).
"""

from server.answers import CallArguments, CallBegins, Content, Reasoning
from server.anthropic_requests import (
    Document,
    Message,
    MessageBody,
    RedactedThinking,
    SearchResult,
    TextBlock,
    Thinking,
    ToolReference,
    ToolResult,
    ToolUse,
)
from server.api import Choice, CompletionRequest, ServedModel
from server.openai_requests import FUNCTION_KEYS, ChatBody, nest
from server.pipe_messages import Update
from server.request_fields import ApiError, parse_object
from server.responses import BlockBuilder

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
    named = nest({"name": fields.tool_choice.name})
    choices = {"auto": "auto", "any": "required", "none": "none", "tool": named}
    settings = ("model", "temperature", "top_p", "top_k", "stream", "max_tokens")
    chat = {name: getattr(fields, name) for name in settings} | {
        "stop": list(fields.stop_sequences),
        "messages": translate_messages(fields),
        "tools": [nest({key: getattr(tool, key) for key in FUNCTION_KEYS}) for tool in fields.tools],
        "tool_choice": choices[fields.tool_choice.type],
        "parallel_tool_calls": not fields.tool_choice.disable_parallel_tool_use,
        "reasoning_effort": fields.output_config.effort,
    }
    thinking = fields.thinking
    if thinking.type in ("enabled", "disabled"):
        chat["chat_template_kwargs"] = {"enable_thinking": thinking.type == "enabled"}
    if thinking.type == "enabled":
        chat["thinking_budget"] = thinking.budget_tokens
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
            calls.append(nest({"name": block.name, "arguments": block.input}) | {"id": block.id})
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

# The types of the deltas of a block, and the fields with their texts.
DELTAS = {
    Content: ("text_delta", "text"),
    Reasoning: ("thinking_delta", "thinking"),
    CallArguments: ("input_json_delta", "partial_json"),
}


class MessageBuilder(BlockBuilder):
    """Builds the response of /v1/messages."""

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'
    starts = {
        Content: {"type": "text", "text": ""},
        Reasoning: {"type": "thinking", "thinking": "", "signature": ""},
        CallArguments: {"type": "tool_use", "input": {}},
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

    def first_events(self) -> list[dict]:
        return [{"type": "message_start", "message": self.message()}]

    def begin_events(self, call: CallBegins | None) -> list[dict]:
        self.block = dict(self.starts[self.kind])
        if call is not None:
            self.block |= {"id": call.id, "name": call.name}
        return [{"type": "content_block_start", "index": len(self.blocks), "content_block": self.block}]

    def delta(self, text: str) -> dict:
        kind, name = DELTAS[self.kind]
        delta = {"type": kind, name: text}
        return {"type": "content_block_delta", "index": len(self.blocks), "delta": delta}

    def end_events(self) -> list[dict]:
        event = {"type": "content_block_stop", "index": len(self.blocks)}
        self.blocks.append(finished_block(self.block, self.text))
        return [event]

    def last_events(self, choice: Choice, update: Update) -> list[dict]:
        events = self.end()
        stop = choice.parser.stops.stop_string or update.stop_string
        ended = "end_turn" if stop is None else "stop_sequence"
        reasons = {"stop": ended, "length": "max_tokens", "tool_calls": "tool_use"}
        delta = {"stop_reason": reasons[choice.finish_reason(update)], "stop_sequence": stop}
        self.response = self.message() | delta | {"content": self.blocks}
        return [
            *events,
            {"type": "message_delta", "delta": delta, "usage": self.usage()},
            {"type": "message_stop"},
        ]

    def stream_error(self, error: ApiError) -> bytes:
        return self.event_bytes(anthropic_error(error))


def finished_block(block: dict, text: str) -> dict:
    """A block with its text. A call that was cut off becomes text, because its input must be an object."""
    if block["type"] != "tool_use":
        return block | {block["type"]: text}
    try:
        return block | {"input": parse_object(text)}
    except ApiError:
        return {"type": "text", "text": text}
