"""The requests of Anthropic's Messages API: each field with its type, its bounds and its default.

Read down: the blocks of contents; the messages; the tools; the body of /v1/messages and of
/v1/messages/count_tokens. anthropic.py translates it.

Source: Anthropic's API reference (Messages, Count Message tokens).
"""

from typing import Annotated, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from server.openai_requests import Parameters, Settings, Stops
from server.request_fields import Fields, ListOf, Name, tagged

# ---------------------------------------------------------------- contents


def as_blocks(content):
    """A content as a list of blocks; a text is one block."""
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    if not isinstance(content, list):
        raise ValueError("must be a string or a list of blocks")
    return content


def refuse_citations(citations: dict) -> dict:
    if citations.get("enabled"):
        raise ValueError("is not supported")
    return citations


TextBlock = tagged("text", text=str)
Texts = Annotated[ListOf[TextBlock], BeforeValidator(as_blocks)]
Title = (str, "")
NoCitations = (Annotated[dict, AfterValidator(refuse_citations)], {})
Source = tagged("text", content=(Texts, Field(alias="data"))) | tagged("content", content=Texts)
Document = tagged(
    "document", title=Title, context=Title, source=Annotated[Source, Field(discriminator="type")], citations=NoCitations
)
SearchResult = tagged("search_result", title=Title, source=Title, content=ListOf[TextBlock], citations=NoCitations)
ToolReference = tagged("tool_reference", tool_name=str)
Readable = TextBlock | Document | SearchResult
Results = Annotated[
    ListOf[Annotated[Readable | ToolReference, Field(discriminator="type")]], BeforeValidator(as_blocks)
]
ToolResult = tagged("tool_result", tool_use_id=str, content=(Results, []))
ToolUse = tagged("tool_use", id=str, name=Name, input=dict)
Thinking = tagged("thinking", thinking=str)
RedactedThinking = tagged("redacted_thinking", data=str)

# ---------------------------------------------------------------- messages


UserBlock = Annotated[Readable | ToolResult, Field(discriminator="type")]
AssistantBlock = Annotated[TextBlock | Thinking | RedactedThinking | ToolUse, Field(discriminator="type")]
SystemMessage = tagged("system", "role", content=Texts)
UserMessage = tagged("user", "role", content=Annotated[ListOf[UserBlock], BeforeValidator(as_blocks)])
AssistantMessage = tagged("assistant", "role", content=Annotated[ListOf[AssistantBlock], BeforeValidator(as_blocks)])
Message = Annotated[SystemMessage | UserMessage | AssistantMessage, Field(discriminator="role")]

# ---------------------------------------------------------------- tools and settings


class Tool(Fields):
    type: Literal["custom"] = "custom"  # other tools are not supported
    name: Name
    description: str | None = None
    parameters: Parameters = Field(alias="input_schema")
    strict: bool | None = None


class ToolChoice(Fields):
    type: Literal["auto", "any", "none", "tool"] = "auto"
    name: str | None = None  # of the tool
    disable_parallel_tool_use: bool = False


class ThinkingSettings(Fields):
    type: Literal["enabled", "disabled", "adaptive"] | None = None
    budget_tokens: int | None = Field(None, ge=1)  # the most tokens of thoughts, if they are enabled


SchemaFormat = tagged("json_schema", schema_=(dict, Field(alias="schema")))


class OutputConfig(Fields):
    effort: str | None = None
    format: SchemaFormat | None = None


class MessageBody(Settings):
    """Settings has the fields that OpenAI's chat has, too, such as the temperature."""

    max_tokens: int | None = Field(None, ge=1)  # None: as many as fit into the context
    messages: ListOf[Message] = Field(min_length=1)
    system: Texts = []
    stop_sequences: Stops = ()
    tools: ListOf[Tool] = []
    tool_choice: ToolChoice = ToolChoice()
    thinking: ThinkingSettings = ThinkingSettings()
    output_config: OutputConfig = OutputConfig()
    output_format: SchemaFormat | None = None  # the name that output_config.format had first
    metadata: dict = {}
