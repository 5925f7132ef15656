"""Conversations: turns the messages and tools of a chat request into the prompt that the model's
template writes.

Read down: Conversation, a parsed one; ChatModel, which makes it of the fields about the
conversation; variants of messages for templates that know less; the arguments of calls.
"""

import hashlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import takewhile

from cli import UserError, print_status
from server.answers import AnswerSyntax
from server.openai_requests import ConversationFields, Function, FunctionTool, Message, ToolSubset, text_of
from server.parameters import property_types
from server.request_fields import ApiError, log_once
from server.tools import (
    CONTENT_MARKS,
    Tool,
    ToolFormat,
    find_tool_format,
    json_text,
    place_tools,
    special_tokens,
)
from text.chat_template import ChatTemplate
from text.grammar import ThinkingBudget
from text.tokenizer import Tokenizer, TokenizerFiles

# The names that servers and templates have for thoughts.
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
NO_TOOLS = "the model's chat template does not support tools, or its format of calls is unknown"


@dataclass
class ToolChoice:
    """The tools of a request, and what the model may do with them."""

    tools: list[Tool] = field(default_factory=list)  # the tools that the model may call
    described: list[dict] = field(default_factory=list)  # all tools, as the template gets them
    required: bool = False  # the answer must consist of calls
    several: bool = True  # the answer may have more than one call

    @property
    def has_grammar(self) -> bool:
        """Whether a grammar has to keep the model from calls that are not allowed."""
        if not self.tools:
            return False
        is_restricted = len(self.tools) < len(self.described)
        return self.required or is_restricted or any(tool.strict for tool in self.tools)


@dataclass
class Conversation:
    """The prompt of a chat request, and what the answer may contain."""

    text: str  # the prompt
    tool_choice: ToolChoice
    continues: bool  # the answer continues the last message
    thinking_is_over: bool  # the prompt ends after thoughts, which may be empty
    syntax: AnswerSyntax
    thinking_budget: int | None = None  # the most tokens of the answer's thoughts


class ChatModel:
    """The model's chat template: what it supports, and the conversations that it writes."""

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.template: ChatTemplate | None = None
        self.tool_template: ChatTemplate | None = None  # writes conversations with tools
        self.template_error = ""
        try:
            tool_files = replace(files, template=files.tool_template or files.template)
            self.tool_template = ChatTemplate(tool_files, tokenizer)
            self.template = ChatTemplate(files, tokenizer)
        except UserError as error:
            self.template_error = "the model has no chat template: use /v1/completions"
            if "has no chat template" not in str(error):
                print_status(f"chat completions are not available: {error}")

        self.special_tokens: dict[str, int] = {}
        self.tool_format: ToolFormat | None = None
        self.thinking: tuple[str, str] | None = None  # the marks before and after thoughts
        if tokenizer.vocabulary is not None:
            self.special_tokens = special_tokens(tokenizer)
            if self.template is not None:
                self.tool_format = find_tool_format(self.tool_template)
                self.thinking = self.template.thinking_marks()
        self.thinking_end_ids: tuple[int, ...] = ()
        if self.thinking is not None:
            end_ids = tokenizer.encode(self.template.thinking_end(), add_bos=False)
            self.thinking_end_ids = tuple(end_ids)

        self.template_words: set[str] = set()
        for template in (self.template, self.tool_template):
            if template is not None:
                self.template_words.update(re.findall(r"\w+", template.source))
        if not self.template_words.isdisjoint(THOUGHTS):
            self.template_words.update(THOUGHTS)  # check_message writes thoughts under each name

    def read_conversation(self, fields: ConversationFields) -> Conversation:
        """The conversation that a request asks for."""
        if self.template is None:
            raise ApiError(self.template_error, param="messages")
        tools = self.read_tools(fields)
        variables = fields.chat_template_kwargs | self.thinking_variables(fields)
        checked = [self.check_message(one, f"messages[{i}]") for i, one in enumerate(fields.messages)]
        name_results(checked)

        add_prompt = fields.add_generation_prompt
        continues = fields.continue_final_message
        ends_with_answer = checked[-1]["role"] == "assistant"
        if continues and not ends_with_answer:
            raise ApiError(
                "continue_final_message: the last message is not the assistant's", param="continue_final_message"
            )
        if continues and add_prompt:
            raise ApiError(
                "add_generation_prompt and continue_final_message exclude each other", param="add_generation_prompt"
            )

        continues = continues or (ends_with_answer and add_prompt is not True)
        if add_prompt is False and not continues:
            raise ApiError("add_generation_prompt is not supported, except with true", param="add_generation_prompt")
        if fields.thinking_budget is not None and self.thinking is None:
            log_once(
                fields.logged,
                "thinking_budget",
                "a request has thinking_budget, which is ignored: the model has no thoughts",
            )
        conversation = self.render(checked, tools, variables, continues)
        return replace(conversation, thinking_budget=fields.thinking_budget)

    def thinking_variables(self, fields: ConversationFields) -> dict:
        """The template's variables for OpenAI's reasoning_effort, as llama-server translates it,
        and for Qwen's enable_thinking."""
        variables = {"enable_thinking": fields.enable_thinking, "reasoning_effort": fields.reasoning_effort}
        if fields.reasoning_effort == "none":
            variables = {"enable_thinking": False}
        variables = {name: value for name, value in variables.items() if value is not None}
        for name in variables.keys() - self.template_words:
            log_once(
                fields.logged,
                f"template: {name}",
                f"a request has {name}, which is ignored: the model's chat template does not know {name}",
            )
        return variables

    def render(self, messages: list[dict], tools: ToolChoice, variables: dict, continues: bool) -> Conversation:
        """The conversation of checked messages. continues: the answer continues the last one."""
        last = messages[-1]
        if continues and "tool_calls" in last:
            raise ApiError("the last message has tool calls: send their results", param="messages")

        template = self.template
        has_calls = any("tool_calls" in one or one["role"] == "tool" for one in messages)
        if tools.tools or has_calls:
            template = self.tool_template
        described = None
        if tools.tools:
            place = self.tool_format.tools_in
            messages, places = place_tools(messages, tools.described, place)
            described = places.pop("tools", None)
            variables = variables | places
        elif template.source != self.template.source:
            described = []  # a template that is for tools alone needs a list

        try:
            text = render_somehow(
                [self.message_for_template(message) for message in messages],
                partial(template.render, tools=described, variables=variables, continue_last=continues),
            )
        except UserError as error:
            raise ApiError(self.without_path(error), param="messages") from None
        except RecursionError:
            raise ApiError("messages: the arguments of a call are nested too deeply", param="messages") from None

        if self.tool_format is not None and self.tool_format.is_gemma:
            text = self.tool_format.content_before_calls(text)
        continued = None
        if continues and last["content"].strip():
            continued = last["content"]
        begins_inside, thinking_is_over = self.thoughts_before(continued, text)
        format = self.tool_format if tools.tools else None
        max_calls = None
        if format is not None and (format.between is None or not tools.several):
            max_calls = 1
        names = frozenset(tool.name for tool in tools.tools)
        types = {}
        if format is not None and format.parameters is not None:
            types = {tool.name: property_types(tool.schema) for tool in tools.tools}
        syntax = AnswerSyntax(self.thinking, begins_inside, format, names, max_calls, types=types)
        return Conversation(text, tools, continues, thinking_is_over, syntax)

    def thoughts_before(self, content: str | None, text: str) -> tuple[bool, bool]:
        """Whether the answer begins within thoughts, and whether its thoughts are over.

        content: the text that the answer continues, or None if the answer is a new message.
        text: the prompt.
        """
        if self.thinking is None:
            return False, False
        begin, end = self.thinking
        if content is None:  # the template may write the first mark, or both around no thoughts
            return text.rstrip().endswith(begin), text.rstrip().endswith(end)
        begins_inside = content.rfind(begin) > content.rfind(end)
        return begins_inside, not begins_inside

    def encode(self, conversation: Conversation) -> list[int]:
        """The token ids of a conversation."""
        try:
            return self.template.encode_text(conversation.text)
        except UserError as error:
            raise ApiError(self.without_path(error), param="messages") from None

    def without_path(self, error: UserError) -> str:
        """The message of the template's error. Clients do not see the paths of files."""
        return str(error).replace(f"{self.template.path}: ", "")

    def limit_of_thoughts(self, conversation: Conversation) -> ThinkingBudget | None:
        """What the engine has to know to end the thoughts of an answer; None if they have no limit,
        or if there are none."""
        budget = conversation.thinking_budget
        if budget is None or self.thinking is None or conversation.thinking_is_over:
            return None
        begins_inside = conversation.syntax.begins_inside
        return ThinkingBudget(budget, self.thinking, self.thinking_end_ids, begins_inside)

    def shown_ids(self, conversation: Conversation) -> frozenset[int]:
        """The special tokens whose text the parser of the answer has to see."""
        marks = "\n".join(self.thinking or ())
        if conversation.tool_choice.tools:
            marks += "\n" + self.tool_format.marks
        return frozenset(i for name, i in self.special_tokens.items() if name in marks)

    # ------------------------------------------------------------ messages

    def check_message(self, message: Message, name: str) -> dict:
        """A message with its role, its text and what else the template knows. A message of the
        assistant also has its thoughts, and its calls as (id, name, arguments).

        name: of the message in the request, for errors.
        """
        role = {"developer": "system", "function": "tool"}.get(message.role, message.role)
        if role == "tool" and self.tool_format is None:
            raise ApiError(f"{name}: {NO_TOOLS}", param=f"{name}.role")
        checked = {"role": role, "content": text_of(message.content)} | self.further_keys(message, name)
        if message.name is not None:
            checked["name"] = message.name

        if message.role == "assistant":
            checked["content"] += message.refusal
            if message.thoughts:
                checked |= dict.fromkeys(THOUGHTS, message.thoughts)
            calls = message.calls
            if calls and self.tool_format is None:
                raise ApiError(f"{name}: {NO_TOOLS}", param=f"{name}.tool_calls")
            if calls:
                checked["tool_calls"] = [(call_id, one.name, read_arguments(one.arguments)) for call_id, one in calls]
        elif role == "tool":
            checked["tool_call_id"] = message.tool_call_id
        return checked

    def further_keys(self, message: Message, name: str) -> dict:
        """The keys of a message that are not OpenAI's, but that the template knows, such as OLMo's
        functions. Keys that the template does not know are ignored, and logged once."""
        further = message.model_extra
        for key in ("audio", "images", "tool_calls", "function_call"):
            if further.get(key):
                raise ApiError(
                    f"{name}.{key} is not supported in a message of the role {message.role}", param=f"{name}.{key}"
                )

        optional = {key for key in ("name", *THOUGHTS) if vars(message).get(key)}
        for key in (further.keys() | optional) - self.template_words:
            log_once(
                message.logged,
                f"message: {key}",
                f"a message has the field {key[:60]!r}, which is ignored: the chat template does not know it",
            )
        return {key: value for key, value in further.items() if key in self.template_words}

    def message_for_template(self, message: dict) -> dict:
        """A checked message, as the model's template expects it."""
        format = self.tool_format
        message = dict(message)
        if "tool_call_id" in message:
            message["tool_call_id"] = self.id_for_template(message["tool_call_id"])
        calls = message.get("tool_calls")
        if calls is None:
            return message

        if format.in_content:
            written = format.write([(name, json_text(arguments)) for _, name, arguments in calls])
            if message["content"]:
                written = f"{message['content']}\n{written}"
            del message["tool_calls"]
            return message | {"content": written}

        message["tool_calls"] = []
        for call_id, name, arguments in calls:
            function = {"name": name, "arguments": format.arguments_for_template(arguments)}
            call = {"id": self.id_for_template(call_id), "type": "function", "function": function}
            message["tool_calls"].append(call)
        if format.is_gemma:
            if message["content"].strip():  # the template would write it after the results
                message["tool_calls"][0]["function"]["name"] = message["content"].join(CONTENT_MARKS) + calls[0][1]
            message["content"] = ""
            message |= {key: message[key].strip("\n") for key in THOUGHTS if key in message}  # the template adds them
        if format.null_content:  # the template would write the content instead of the calls
            message["content"] = None
        return message

    def id_for_template(self, call_id: str) -> str:
        """The id of a call. Mistral's templates only accept ids of 9 letters and digits."""
        if not self.tool_format.writes_ids or re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

    # ------------------------------------------------------------ tools

    def read_tools(self, fields: ConversationFields) -> ToolChoice:
        """The tools of a request."""
        functions = [tool.function for tool in fields.tools]
        names = [function.name for function in functions]
        for name in names:
            if names.count(name) > 1:
                raise ApiError(f"tools has {name!r} twice", param="tools")

        choice = fields.tool_choice
        allowed, required = allowed_names(choice, names)
        if not names or choice == "none":
            return ToolChoice()
        if self.tool_format is None:
            raise ApiError(f"tools: {NO_TOOLS}", param="tools")
        tools = [
            Tool(one.name, one.parameters or {}, bool(one.strict), f"tools[{i}].function.parameters")
            for i, one in enumerate(functions)
            if one.name in allowed
        ]
        several = fields.parallel_tool_calls and not isinstance(choice, FunctionTool)
        return ToolChoice(tools, list(map(describe_function, functions)), required, several)


def render_somehow(messages: list[dict], render: Callable[[list[dict]], str]) -> str:
    """The text of messages for a template, or of other messages that say the same if the template
    refuses these, or leaves out a system message that is not the first message. UserError with the
    template's reason for refusing the messages as they are if it refuses all."""
    has_user = any(message["role"] == "user" for message in messages)
    instructions = [message["content"].strip() for message in messages if message["role"] == "system"]
    if has_user and len(instructions) == 1 and messages[0]["role"] == "system":
        instructions = []  # templates may change a system message at the beginning
    texts = []
    errors = []
    for variant in variants(messages):
        try:
            texts.append(render(variant))
        except UserError as error:
            errors.append(error)
            continue
        if all(texts[-1].count(text) >= instructions.count(text) for text in instructions):
            return texts[-1]
    if not texts:
        raise errors[0]
    return texts[0]


def variants(messages: list[dict]) -> Iterator[list[dict]]:
    """Messages that say the same, for templates that know less and less: of several system messages at
    the beginning, of later ones, of a conversation without a user's message, of two messages of the
    user in a row, of system messages at all."""
    yield messages
    leading = list(takewhile(lambda message: message["role"] == "system", messages))
    rest = messages[len(leading) :]
    if len(leading) > 1:
        text = "\n\n".join(message["content"] for message in leading)
        leading = [leading[0] | {"content": text}]
        yield leading + rest

    rest = [message | {"role": "user"} if message["role"] == "system" else message for message in rest]
    yield leading + rest
    if all(message["role"] != "user" for message in rest):
        rest = [{"role": "user", "content": ""}, *rest]
        yield leading + rest
    yield leading + with_joined_users(rest)
    yield with_joined_users([message | {"role": "user"} for message in leading] + rest)


def with_joined_users(messages: list[dict]) -> list[dict]:
    """Messages in which a message of the user joins the one before it, if that is the user's, too, or the
    result of a tool."""
    joined = []
    for message in messages:
        if joined and message["role"] == "user" and joined[-1]["role"] in ("user", "tool"):
            texts = [joined[-1]["content"], message["content"]]
            joined[-1] = joined[-1] | {"content": "\n\n".join(filter(None, texts))}
        else:
            joined.append(message)
    return joined


def read_arguments(arguments):
    """The arguments of a call as an object, or else as they are, such as the text of a call that
    was cut off."""
    parsed = arguments
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
    if parsed is None or parsed == "":
        return {}
    return parsed if isinstance(parsed, dict) else arguments


def name_results(messages: list[dict]):
    """Write the function's name into each result, for templates that write it."""
    calls = [call for message in messages for call in message.get("tool_calls", ())]
    names = {call_id: name for call_id, name, _ in calls}
    for message in messages:
        if message.get("tool_call_id") in names:
            message.setdefault("name", names[message["tool_call_id"]])


def describe_function(function: Function) -> dict:
    """A tool as templates get it: with a description and parameters, and without strict."""
    given = {key: value for key, value in function if value is not None and key != "strict"}
    no_parameters = {"type": "object", "properties": {}}
    defaults = {"name": function.name, "description": "", "parameters": no_parameters}
    return {"type": "function", "function": defaults | given}


def allowed_names(choice, names: list[str]) -> tuple[list[str], bool]:
    """The names of the tools that the model may call, and whether it has to call one."""
    if choice in ("none", "auto"):
        return names, False
    if not names:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return names, True

    is_subset = isinstance(choice, ToolSubset)
    chosen = choice.allowed_tools.tools if is_subset else [choice]
    allowed = [tool.function.name for tool in chosen]
    for name in allowed:
        if name not in names:
            raise ApiError(f"tool_choice: there is no tool {name[:64]!r}", param="tool_choice")
    return allowed, not is_subset or choice.allowed_tools.mode == "required"
