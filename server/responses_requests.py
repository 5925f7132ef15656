"""The requests of OpenAI's Responses API: each field with its type, its bounds and its default.

Read down: the items of a conversation; the tools; the body of /v1/responses. openai_responses.py
translates it. The further fields of a chat, such as the sampling parameters, go to its model.

Source: OpenAI's API reference (Responses).
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from server.openai_requests import Content, Function, text_of
from server.request_fields import ApiError, Fields, ListOf, Name, at_most, tagged

# ---------------------------------------------------------------- items


class Thought(Fields):
    text: str


Thoughts = Annotated[str | ListOf[Thought], AfterValidator(text_of)]
Role = Literal["user", "assistant", "system", "developer"]
MessageItem = tagged("message", role=Role, content=Content)
ReasoningItem = tagged("reasoning", content=(Thoughts, ""), summary=(Thoughts, ""))
CallItem = tagged("function_call", call_id=str, name=Name, arguments=str)
OutputItem = tagged("function_call_output", call_id=str, output=Content)


def with_type(item):
    """An item, which is a message if it has no type."""
    if isinstance(item, dict) and item.get("type") is None:
        return item | {"type": "message"}
    return item


AnyItem = Annotated[MessageItem | ReasoningItem | CallItem | OutputItem, Field(discriminator="type")]
Item = Annotated[AnyItem, BeforeValidator(with_type)]

# ---------------------------------------------------------------- tools


class Tool(Function):
    """Only functions are supported. Another tool is left out if the client marks it as optional, or may not
    call it."""

    type: str
    name: Name = ""
    optional: Any = False


NamedTool = tagged("function", name=str)
ToolSubset = tagged("allowed_tools", mode=Literal["auto", "required"], tools=ListOf[NamedTool])
ToolChoice = Literal["none", "auto", "required"] | Annotated[NamedTool | ToolSubset, Field(discriminator="type")]

# ---------------------------------------------------------------- the body

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
MetadataName = Annotated[str, Field(max_length=64)]
MetadataText = Annotated[str, Field(max_length=512)]


class TextSettings(Fields):
    format: dict = {"type": "text"}  # as response_format in a chat, but flat
    verbosity: str | None = None


class ReasoningSettings(Fields):
    effort: Effort | None = None


class ResponseBody(Fields):
    input: str | ListOf[Item] = []
    instructions: str | None = None
    previous_response_id: str | None = None
    max_output_tokens: int | None = Field(None, ge=1)  # None: as many as fit into the context
    tools: ListOf[Tool] = []
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    text: TextSettings = TextSettings()
    reasoning: ReasoningSettings = ReasoningSettings()
    store: bool = True  # whether a later request may continue the conversation

    # Without effect; the response repeats them.
    metadata: Annotated[dict[MetadataName, MetadataText], at_most(16)] = {}
    prompt_cache_key: str | None = None
    safety_identifier: str | None = None
    user: str | None = None

    def check_further(self):
        """Refuse fields of a chat that this API does not have. The model of a chat checks the others."""
        for name in WITHOUT_EFFECT:
            self.model_extra.pop(name, None)
        for name, (neutral, hint) in REFUSED.items():
            if self.model_extra.pop(name, neutral) != neutral:
                raise ApiError(f"{name} is not supported{hint}", param=name)


# Fields that change nothing here, though a chat may have one of the name.
WITHOUT_EFFECT = (
    "include", "service_tier", "max_tool_calls", "prompt_cache_retention", "stream_options", "prompt_cache_options",
    "client_metadata",
)  # fmt: skip
# Fields that are not supported. Each has a value that changes nothing, which is accepted, and a
# hint for the error message. NEUTRAL_VALUES has more such fields.
REFUSED = {
    "n": (1, ""), "logprobs": (False, ""), "top_logprobs": (0, ""), "prompt": ("", ""),
    "messages": ([], ""), "context_management": ([], ""),
    "response_format": (None, "; text.format is"),
    "reasoning_effort": (None, "; reasoning.effort is"),
}  # fmt: skip
