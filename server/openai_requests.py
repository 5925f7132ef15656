"""The requests of /v1/completions, /v1/chat/completions, /tokenize and /detokenize: each field with its
type, its bounds and its default.

Read down: what the answers are like (Answers, with the sampling parameters); their form; the
messages; the tools; the bodies. Fields of other servers stand beside OpenAI's.

Sources: OpenAI's API reference; vLLM's extensions of it (stop_token_ids, ignore_eos, min_p,
structured_outputs, continuous_usage_stats, /tokenize ...); llama.cpp's n_predict, repeat_penalty,
json_schema and lists of pairs as logit_bias; SGLang's regex; Ollama's format; Qwen's enable_thinking.
"""

import json
import secrets
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, Field, model_validator

from sampling import SamplingParams
from server.request_fields import ApiError, Fields, ListOf, Name, at_most, tagged

MAX_LOGPROBS = 20
MAX_N = 8
MAX_STOPS = 128
MAX_TOOLS = 128
ANY_OBJECT = {"type": "object"}

# ---------------------------------------------------------------- the form of an answer


def parsed_schema(value):
    """A schema, which may come as JSON text. An empty text counts as missing."""
    if value == "":
        return None
    try:
        value = json.loads(value) if isinstance(value, str) else value
    except (ValueError, RecursionError):
        raise ValueError("must be a JSON schema, as an object or as JSON text") from None
    # OpenAI's json_schema has the schema in an object with a name.
    if isinstance(value, dict) and isinstance(value.get("schema"), dict):
        raise ValueError("must be a JSON schema itself, not an object that has one")
    return value


Schema = dict | bool
SchemaText = Annotated[Schema | None, BeforeValidator(parsed_schema)]
Pattern = Annotated[str, Field(min_length=1)]  # a regular expression
Choice = Annotated[ListOf[Pattern], Field(min_length=1)]


class NamedSchema(Fields):
    schema_: Schema = Field(alias="schema")
    strict: bool = False  # False: what the library does not support is left out


class ResponseFormat(Fields, extra="forbid"):
    type: Literal["text", "json_object", "json_schema"]
    schema_: Schema | None = Field(None, alias="schema")  # of the type json_object, as in llama-server
    json_schema: NamedSchema | None = None  # of the type json_schema

    @model_validator(mode="after")
    def check_type(self):
        given = self.model_fields_set - {"type", {"json_object": "schema_"}.get(self.type, self.type)}
        if given or (self.type == "json_schema" and self.json_schema is None):
            raise ValueError("must have json_schema if the type is json_schema, and schema only if it is json_object")
        return self


class StructuredOutputs(Fields):
    schema_: SchemaText = Field(None, alias="json")
    regex: Pattern | None = None
    choice: Choice | None = None
    json_object: bool = False


# ---------------------------------------------------------------- what all answers have in common


def pairs_as_object(value):
    """A list of pairs as an object."""
    if isinstance(value, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in value):
        return {str(token): bias for token, bias in value}
    return value


def as_list(value: str | list[str]) -> tuple[str, ...]:
    """The texts of a field that has one or several. Empty ones are ignored."""
    texts = [value] if isinstance(value, str) else value
    return tuple(text for text in texts if text)


Bias = Annotated[float, Field(ge=-100, le=100)]
Token = Annotated[str, Field(pattern="^[0-9]{1,9}$")]
Stop = Annotated[str, Field(max_length=1000)]
Stops = Annotated[Stop | Annotated[ListOf[Stop], Field(max_length=MAX_STOPS)], AfterValidator(as_list)]
LIMIT_NAMES = AliasChoices("n_predict", "max_completion_tokens", "max_tokens")  # the first one counts


class Settings(Fields):
    """The settings that Anthropic's API has, too. None: as the server's options say."""

    model: str = ""
    temperature: float | None = Field(None, ge=0, le=1e30)
    top_k: int | None = Field(None, ge=-1, le=2**31)  # 0 or -1: all tokens
    top_p: float | None = Field(None, ge=0, le=1)
    stream: bool = False


class StreamOptions(Fields):
    include_usage: bool = False  # the stream ends with the usage
    continuous_usage_stats: bool = False  # each chunk has the usage so far


class Answers(Settings):
    """What the answers to a request are like."""

    n: int = Field(1, ge=1, le=MAX_N)
    best_of: int | None = None  # only n

    min_p: float | None = Field(None, ge=0, le=1)
    repetition_penalty: float | None = Field(
        None, ge=1e-3, le=1e3, validation_alias=AliasChoices("repeat_penalty", "repetition_penalty")
    )
    frequency_penalty: float | None = Field(None, ge=-1e3, le=1e3)
    presence_penalty: float | None = Field(None, ge=-1e3, le=1e3)
    repeat_last_n: int = -1  # only -1 beside a penalty
    seed: int = Field(-1, ge=-(2**63), le=2**63 - 1)  # -1: a random one
    logit_bias: Annotated[dict[Token, Bias], BeforeValidator(pairs_as_object), at_most(300)] = {}

    stop: Stops = ()
    # There is a bound, because each prompt of a request has its own copy in the engine's process.
    stop_token_ids: ListOf[int] = Field([], max_length=128)
    ignore_eos: bool = False
    stream_options: StreamOptions = StreamOptions()

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs = StructuredOutputs()
    guided_json: SchemaText = None
    guided_regex: Pattern | None = None
    guided_choice: Choice | None = None
    json_schema: SchemaText = None
    regex: str | None = None
    format: Literal["json"] | SchemaText = None

    @model_validator(mode="after")
    def check_together(self):
        if self.best_of not in (None, self.n):
            raise ApiError(f"best_of is not supported, except {self.n}, as n is", param="best_of")
        if "stream_options" in self.model_fields_set and not self.stream:
            raise ApiError("stream_options needs stream: true", param="stream_options")
        return self

    def sampling_params(self, defaults: SamplingParams, vocab_size: int) -> list[SamplingParams]:
        """The settings of each answer to a prompt: the first has the seed of the request, the others the
        next ones. `defaults` has the settings that the request does not name."""
        given = {name: getattr(self, name) for name in vars(defaults) if getattr(self, name) is not None}
        biases = {int(token): bias for token, bias in self.logit_bias.items()}
        if max(biases, default=0) >= vocab_size:
            raise ApiError(f"logit_bias: {max(biases)} is not one of the {vocab_size} token ids", param="logit_bias")
        given["logit_bias"] = tuple(sorted(biases.items()))
        if self.top_k == -1:
            given["top_k"] = 0

        params = replace(defaults, **given)
        if self.repeat_last_n != -1 and params.penalizes:  # llama.cpp's
            raise ApiError(
                "repeat_last_n is not supported, except with -1: penalties apply to all tokens", param="repeat_last_n"
            )
        seed = secrets.randbits(62) if self.seed == -1 else self.seed
        seeds = [(seed + i + 2**63) % 2**64 - 2**63 for i in range(self.n)]  # in 64 bits
        return [replace(params, seed=one) for one in seeds]

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """The ids of the tokens that end an answer."""
        return frozenset(self.stop_token_ids) | (frozenset() if self.ignore_eos else eos_ids)


# ---------------------------------------------------------------- messages


class Part(BaseModel, strict=True):  # not Fields, because a body may have thousands
    type: Literal["text", "input_text", "output_text", "refusal"]
    text: str = Field(validation_alias=AliasChoices("text", "refusal"))
    thinking: ClassVar[str] = ""


def text_of(content: str | list) -> str:
    """The text of a content, which is a text or a list of parts."""
    return content if isinstance(content, str) else "".join(part.text for part in content)


Content = Annotated[str | ListOf[Part], AfterValidator(text_of)]


ThinkingPart = tagged("thinking", thinking=Content, text=(ClassVar[str], ""))


class CalledFunction(Fields):
    name: Name
    arguments: Any = None


class Call(Fields):
    id: str
    function: CalledFunction


class PlainMessage(Fields):
    """The further fields of a message go to the chat template, if that knows them."""

    role: Literal["system", "developer", "user"]
    content: Content
    name: str | None = None


class AssistantMessage(PlainMessage):
    role: Literal["assistant"]
    content: str | ListOf[Annotated[Part | ThinkingPart, Field(discriminator="type")]] = ""
    refusal: str = ""
    tool_calls: ListOf[Call] = ()
    function_call: CalledFunction | None = None  # OpenAI's older name for a call
    # The names that servers and templates have for thoughts.
    reasoning_content: Content = ""
    reasoning: Content = ""
    thinking: Content = ""

    @property
    def thoughts(self) -> str:
        parts = [] if isinstance(self.content, str) else self.content
        named = self.reasoning_content or self.reasoning or self.thinking
        return named or "".join(part.thinking for part in parts)

    @property
    def calls(self) -> list[tuple[str, CalledFunction]]:
        """The id and the function of each call. A function_call and its result have the same name, but no
        id."""
        if self.function_call is not None:
            return [(f"call_{self.function_call.name}", self.function_call)]
        return [(call.id, call.function) for call in self.tool_calls]


class ToolMessage(PlainMessage):
    role: Literal["tool"]
    content: Content = ""
    tool_call_id: str


class FunctionMessage(PlainMessage):
    """OpenAI's older message for the result of a function_call."""

    role: Literal["function"]
    content: Content = ""
    name: str

    @property
    def tool_call_id(self) -> str:
        return f"call_{self.name}"


Message = Annotated[PlainMessage | AssistantMessage | ToolMessage | FunctionMessage, Field(discriminator="role")]


# ---------------------------------------------------------------- tools


def check_parameters(schema: dict) -> dict:
    if schema.get("type", "object") != "object":
        raise ValueError("must be the JSON schema of an object")
    return schema


Parameters = Annotated[dict, AfterValidator(check_parameters)]


class Function(Fields):
    name: Name
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None  # True: a grammar enforces the schema, even if no call is required


FunctionTool = tagged("function", function=Function)
FUNCTION_KEYS = tuple(Function.model_fields)


def nest(function: dict) -> dict:
    """A function of another API in the form that it has in the tools, calls and tool_choice of a chat."""
    return {"type": "function", "function": function}


class AllowedTools(Fields):
    mode: Literal["auto", "required"]
    tools: ListOf[FunctionTool] = Field(min_length=1)


ToolSubset = tagged("allowed_tools", allowed_tools=AllowedTools)
ToolChoice = Literal["none", "auto", "required"] | Annotated[FunctionTool | ToolSubset, Field(discriminator="type")]

# ---------------------------------------------------------------- bodies


def as_prompts(value: str | list) -> list[str | list[int]]:
    """The texts, or lists of token ids, of a field that has one or several."""
    is_list = isinstance(value, list) and isinstance(next(iter(value), 0), str | list)
    return value if is_list else [value]


Prompts = Annotated[str | ListOf[int] | ListOf[str | ListOf[int]], AfterValidator(as_prompts)]


class CompletionBody(Answers):
    prompts: Prompts = Field(alias="prompt")
    max_tokens: int = Field(16, ge=-1, validation_alias=LIMIT_NAMES)  # -1: as many as fit into the context
    logprobs: int | None = Field(None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False


class ConversationFields(Fields):
    """The fields of a chat that its prompt depends on."""

    messages: ListOf[Message] = Field(min_length=1)
    tools: ListOf[FunctionTool] = Field([], max_length=MAX_TOOLS)
    tool_choice: ToolChoice = "auto"
    parallel_tool_calls: bool = True
    chat_template_kwargs: dict = {}
    reasoning_effort: str | None = None  # "none" is enable_thinking: false
    enable_thinking: bool | None = None
    thinking_budget: int | None = Field(None, ge=0)  # the most tokens of the answer's thoughts
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


class ChatBody(ConversationFields, Answers):
    max_tokens: Literal[-1] | Annotated[int, Field(ge=1)] = Field(-1, validation_alias=LIMIT_NAMES)
    logprobs: bool = False
    top_logprobs: int = Field(0, ge=0, le=MAX_LOGPROBS)  # needs logprobs: true

    @model_validator(mode="after")
    def check_logprobs(self):
        if self.top_logprobs and not self.logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        return self


class TokenizeBody(ConversationFields):
    model: str = ""
    prompt: str | None = None
    messages: ListOf[Message] | None = Field(None, min_length=1)  # instead of a prompt
    add_special_tokens: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Fields):
    model: str = ""
    tokens: ListOf[int]
