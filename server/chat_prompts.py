"""Conversations: turns the messages and tools of a chat request into the prompt that the model's template writes.

Read down: Conversation, a parsed one; ChatModel, which parses the fields about the conversation; the messages; the
tools. The sampling parameters and the other fields of a request are read in api.py.
"""

import hashlib
import json
import re
from contextlib import suppress
from dataclasses import dataclass, field, replace

from cli import UserError, print_status
from server.answers import AnswerSyntax
from server.constraints import Constraint, answer_source
from server.request_fields import ApiError, FieldReader, log_once, read_role
from server.tools import (
    NAME_PATTERN,
    Tool,
    ToolGrammar,
    find_tool_format,
    json_text,
    place_tools,
    special_tokens,
)
from tokenizer import ChatTemplate, Tokenizer, TokenizerFiles

MAX_TOOLS = 128
CHAT_ROLES = ("system", "developer", "user", "assistant", "tool", "function")
PART_TEXTS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}  # by a part's type
THOUGHTS = ("reasoning_content", "reasoning", "thinking")  # the names that servers and templates have for thoughts
MESSAGE_KEYS = {"role", "content", "name", "tool_calls", "tool_call_id"}
ASSISTANT_KEYS = {"refusal", "function_call", *THOUGHTS}
NO_TOOLS = "the model's chat template knows no tools, or writes calls in a way that is not supported"


@dataclass
class ToolChoice:
    """The tools of a request, and what the model may do with them."""

    tools: list[Tool] = field(default_factory=list)  # that the model may call
    described: list[dict] = field(default_factory=list)  # all of the request, as the template gets them
    required: bool = False  # the answer must be calls
    several: bool = True  # it may have more than one call

    @property
    def has_grammar(self) -> bool:
        is_restricted = len(self.tools) < len(self.described)
        return bool(self.tools) and (self.required or is_restricted or any(tool.strict for tool in self.tools))


@dataclass
class Conversation:
    """The prompt of a chat request, and what the answer may contain."""

    text: str  # the prompt
    tool_choice: ToolChoice
    continues: bool  # the answer continues the last message
    thinking_is_over: bool  # the prompt ends after thoughts, which may be empty
    syntax: AnswerSyntax


class ChatModel:
    """What the model's chat template knows, and the conversations that are written with it."""

    def __init__(self, files: TokenizerFiles, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.template, self.template_error = None, ""
        self.tool_template = self.tool_format = self.thinking = None  # the first is for conversations with tools
        try:
            self.tool_template = ChatTemplate(replace(files, template=files.tool_template or files.template), tokenizer)
            self.template = ChatTemplate(files, tokenizer)
        except UserError as error:
            self.template_error = "the model has no chat template: use /v1/completions"
            if "has no chat template" not in str(error):
                print_status(f"chat completions are not available: {error}")
        if self.template is not None and tokenizer.vocabulary is not None:
            self.tool_format, self.thinking = find_tool_format(self.tool_template), self.template.thinking_marks()
        sources = [template.source for template in (self.template, self.tool_template) if template is not None]
        self.template_words = set(re.findall(r"\w+", "\n".join(sources)))
        if not self.template_words.isdisjoint(THOUGHTS):
            self.template_words |= set(THOUGHTS)  # messages for the template have them under each name
        self.special_tokens = special_tokens(tokenizer) if tokenizer.vocabulary is not None else {}

    def read_conversation(self, fields: FieldReader) -> Conversation:
        """Read the fields of a request that are about the conversation."""
        messages = fields.unread.pop("messages", None)
        tools = self.read_tools(fields)
        variables = fields.read("chat_template_kwargs", dict, {}) | self.read_thinking(fields)
        add_prompt = fields.read("add_generation_prompt", bool)
        continues = fields.read("continue_final_message", bool, False)
        if self.template is None:
            raise ApiError(self.template_error, param="messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a list with at least one message", param="messages")
        checked = [self.check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        checked = name_results(checked)
        ends_with_answer = checked[-1]["role"] == "assistant"
        if continues and not ends_with_answer:
            text = "continue_final_message: the last message is not the assistant's"
            raise ApiError(text, param="continue_final_message")
        if continues and add_prompt:
            text = "add_generation_prompt and continue_final_message exclude each other"
            raise ApiError(text, param="add_generation_prompt")
        continues = continues or (ends_with_answer and add_prompt is not True)
        if add_prompt is False and not continues:
            raise ApiError("add_generation_prompt is not supported, except with true", param="add_generation_prompt")
        return self.render(checked, tools, variables, continues)

    def read_thinking(self, fields: FieldReader) -> dict:
        """The template's variables for OpenAI's reasoning_effort, as llama-server translates it, and for Qwen's
        enable_thinking."""
        effort, enabled = fields.read("reasoning_effort", str), fields.read("enable_thinking", bool)
        variables = {} if enabled is None else {"enable_thinking": enabled}
        if effort == "none":
            variables["enable_thinking"] = False
        elif effort is not None:
            variables["reasoning_effort"] = effort
        for name in variables:
            if name not in self.template_words:
                asked = 'reasoning_effort "none"' if name == "enable_thinking" and enabled is None else name
                text = f"a request has {asked}, which is ignored: the model's chat template does not know {name}"
                log_once(fields.logged, f"template: {name}", text)
        return variables

    def render(self, messages: list[dict], tools: ToolChoice, variables: dict, continues: bool) -> Conversation:
        """The conversation of checked messages. continues: the answer continues the last message."""
        last = messages[-1]
        if continues and "tool_calls" in last:
            raise ApiError("the last message has tool calls: send their results", param="messages")
        format, template = self.tool_format, self.template
        if tools.tools or any(message["role"] == "tool" or "tool_calls" in message for message in messages):
            template = self.tool_template
        described = None if template.source == self.template.source else []  # a template for tools alone needs a list
        if tools.tools:
            messages, places = place_tools(messages, tools.described, format.tools_in)
            described = places.pop("tools", None)
            variables = variables | places
        try:
            text = template.render(
                [self.message_for_template(message) for message in messages],
                tools=described,
                variables=variables,
                continue_last=continues,
            )
        except UserError as error:
            raise ApiError(self.without_path(error), param="messages") from None
        except RecursionError:
            raise ApiError("messages: the arguments of a call are nested too deeply", param="messages") from None
        is_continued = continues and last["content"].strip() != ""
        begins_inside, thinking_is_over = self.thoughts_before(last["content"] if is_continued else None, text)
        syntax = AnswerSyntax(
            self.thinking,
            begins_inside,
            format if tools.tools else None,
            frozenset(tool.name for tool in tools.tools),
            None if tools.several and (format is None or format.between is not None) else 1,
        )
        return Conversation(text, tools, continues, thinking_is_over, syntax)

    def thoughts_before(self, content: str | None, text: str) -> tuple[bool, bool]:
        """Whether the answer begins within thoughts, and whether its thoughts are over. content: what the answer
        continues, or None if it is a new message; text: the prompt."""
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

    def answer_grammar(self, conversation: Conversation, constraint: Constraint | None) -> str | None:
        """The source of the grammar that an answer must fit; None if it needs none."""
        tools, syntax = conversation.tool_choice, conversation.syntax
        if not tools.has_grammar and constraint is None:
            return None
        grammar = None
        if tools.tools:
            try:
                grammar = ToolGrammar(self.tool_format, tools.tools, self.special_tokens, syntax.max_calls is None)
            except RecursionError:
                raise ApiError("tools: a schema is nested too deeply", param="tools") from None
        thinking = None if conversation.thinking_is_over else self.thinking
        special = self.special_tokens
        return answer_source(constraint, special, grammar, tools.required, thinking, syntax.begins_inside)

    def shown_ids(self, conversation: Conversation) -> frozenset[int]:
        """The special tokens whose text the parser of the answer has to see."""
        marks = "\n".join(self.thinking or ())
        if conversation.tool_choice.tools:
            marks += "\n" + self.tool_format.marks
        return frozenset(i for name, i in self.special_tokens.items() if name in marks)

    # ------------------------------------------------------------ messages

    def check_message(self, message, name: str) -> dict:
        """A message with its role, its text and what else the template knows; for an assistant's also its thoughts and
        its calls, as (id, name, arguments). ApiError if it is malformed, or has more than text."""
        role = read_role(message, name, CHAT_ROLES)
        if role == "function":  # the result of a function_call, as OpenAI's API had them before tools
            check_string(message.get("name"), f"{name}.name")
            message, role = message | {"tool_call_id": old_call_id(message)}, "tool"
        if role == "tool" and self.template is not None and self.tool_format is None:
            raise ApiError(f"{name}: {NO_TOOLS}", param=f"{name}.role")
        checked = {"role": "system" if role == "developer" else role} | self.further_keys(message, name)
        if message.get("function_call"):
            call = {"id": old_call_id(message["function_call"]), "function": message["function_call"]}
            checked["tool_calls"] = self.check_calls([call], role, f"{name}.function_call")
        elif message.get("tool_calls") not in (None, []):
            checked["tool_calls"] = self.check_calls(message["tool_calls"], role, f"{name}.tool_calls")
        content = message.get("content")
        if role == "assistant":
            content, thoughts = read_answer(message, name)
            checked |= dict.fromkeys(THOUGHTS, thoughts) if thoughts else {}
        elif role == "tool":
            content = "" if content is None else content
            checked["tool_call_id"] = check_string(message.get("tool_call_id"), f"{name}.tool_call_id")
        checked["content"] = check_content(content, f"{name}.content")
        if message.get("name") is not None:
            checked["name"] = check_string(message["name"], f"{name}.name")
        return checked

    def further_keys(self, message: dict, name: str) -> dict:
        """The keys of a message that are not OpenAI's, but that the template knows, such as OLMo's functions. What it
        does not know is ignored, and logged once."""
        known = MESSAGE_KEYS | ASSISTANT_KEYS if message["role"] == "assistant" else MESSAGE_KEYS
        further = {key: value for key, value in message.items() if key not in known and value is not None}
        for key in ("audio", "images"):
            if further.get(key):
                raise ApiError(f"{name}.{key} is not supported", param=f"{name}.{key}")
        optional = {key for key in ("name", *THOUGHTS) if message.get(key)}
        for key in (further.keys() | optional) - self.template_words:
            text = f"a message has the field {key[:60]!r}, which is ignored: the chat template does not know it"
            log_once(FieldReader.logged, f"message: {key}", text)
        return {key: value for key, value in further.items() if key in self.template_words}

    def check_calls(self, calls, role: str, name: str) -> list[tuple]:
        if self.tool_format is None:
            raise ApiError(f"{name}: {NO_TOOLS}", param=name)
        if role != "assistant" or not isinstance(calls, list):
            raise ApiError(f"{name} must be a list, in a message of the assistant", param=name)
        return [check_call(call, f"{name}[{i}]") for i, call in enumerate(calls)]

    def message_for_template(self, message: dict) -> dict:
        """A checked message, as the model's template expects it."""
        format, message = self.tool_format, dict(message)
        if "tool_call_id" in message:
            message["tool_call_id"] = self.id_for_template(message["tool_call_id"])
        calls = message.get("tool_calls")
        if calls is None:
            return message
        if format.in_content:
            written = format.write([(name, json_text(arguments)) for _, name, arguments in calls])
            del message["tool_calls"]
            return message | {"content": f"{message['content']}\n{written}" if message["content"] else written}
        functions = [{"name": name, "arguments": format.arguments_for_template(one)} for _, name, one in calls]
        message["tool_calls"] = [
            {"id": self.id_for_template(call[0]), "type": "function", "function": function}
            for call, function in zip(calls, functions)
        ]
        if format.null_content:  # such a template writes either content or calls, and results follow the calls
            message["content"] = None
        return message

    def id_for_template(self, call_id: str) -> str:
        """The id of a call. Mistral's templates refuse ids that do not have 9 letters and digits."""
        if not self.tool_format.writes_ids or re.fullmatch("[a-zA-Z0-9]{9}", call_id):
            return call_id
        return hashlib.sha256(call_id.encode("utf-8", "replace")).hexdigest()[:9]

    # ------------------------------------------------------------ tools

    def read_tools(self, fields: FieldReader) -> ToolChoice:
        """Read the fields about tools."""
        given, choice = fields.read("tools", list, []), fields.unread.pop("tool_choice", None)
        several = fields.read("parallel_tool_calls", bool, True)
        if len(given) > MAX_TOOLS:
            raise ApiError(f"the request has {len(given)} tools, at most {MAX_TOOLS} are allowed", param="tools")
        tools = [check_tool(tool, f"tools[{i}]") for i, tool in enumerate(given)]
        names = [tool.name for tool in tools]
        if repeated := [name for name in names if names.count(name) > 1]:
            raise ApiError(f"tools has {repeated[0]!r} twice", param="tools")
        allowed, required = read_tool_choice(choice, names)
        if not tools or choice == "none":
            return ToolChoice()
        if self.template is not None and self.tool_format is None:
            raise ApiError(f"tools: {NO_TOOLS}", param="tools")
        described = [describe_tool(tool) for tool in given]
        tools = [tool for tool in tools if tool.name in allowed]
        asks_for_one = isinstance(choice, dict) and choice["type"] == "function"
        return ToolChoice(tools, described, required, several and not asks_for_one)


def read_answer(message: dict, name: str) -> tuple:
    """The content and the thoughts of an assistant's message. Thoughts may be parts of the content, too."""
    content = "" if message.get("content") is None else message["content"]
    parts = content if isinstance(content, list) else []
    thoughts = [part for part in parts if is_thought(part)]
    if thoughts:
        content = [part for part in parts if not is_thought(part)]
    if isinstance(message.get("refusal"), str):
        content = check_content(content, f"{name}.content") + message["refusal"]
    for key in THOUGHTS:
        if message.get(key) not in (None, ""):
            return content, check_content(message[key], f"{name}.{key}")
    return content, "".join(check_content(part.get("thinking"), f"{name}.content") for part in thoughts)


def is_thought(part) -> bool:
    return isinstance(part, dict) and part.get("type") == "thinking"


def check_content(content, name: str) -> str:
    """The text of a message; ApiError if it has more than text."""
    if isinstance(content, list):
        content = "".join(part_text(part, i, name) for i, part in enumerate(content))
    return check_string(content, name, "a string or a list of text parts")


def part_text(part, i: int, name: str) -> str:
    """The text of part i of the content `name`."""
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(kind, str) or kind not in PART_TEXTS:
        came = "this has no type" if kind is None else f"this has the type {str(kind)[:64]!r}"
        raise ApiError(f"{name}[{i}]: only parts of text are supported, {came}", param=name)
    text = part.get(PART_TEXTS[kind])
    if not isinstance(text, str):
        raise ApiError(f"{name}[{i}].{PART_TEXTS[kind]} must be a string", param=name)
    return text


def check_string(value, name: str, rule: str = "a string") -> str:
    if not isinstance(value, str):
        raise ApiError(f"{name} must be {rule}", param=name)
    return value


def old_call_id(call) -> str:
    """The id of a function_call and of its result. They have none in the API, but the same name."""
    return f"call_{call.get('name')}" if isinstance(call, dict) else ""


def check_call(call, name: str) -> tuple:
    """(id, function's name, arguments) of a call in a message."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise ApiError(f"{name} must be an object with an id and a function", param=name)
    check_name(function.get("name"), f"{name}.function.name")
    return call["id"], function["name"], read_arguments(function.get("arguments"))


def read_arguments(arguments):
    """The arguments of a call: an object; or what the message has instead, such as the text of a call that was cut."""
    parsed = arguments
    if isinstance(arguments, str) and arguments:
        with suppress(ValueError, RecursionError):
            parsed = json.loads(arguments)
    if parsed is None or parsed == "":
        return {}
    return parsed if isinstance(parsed, dict) else arguments


def check_name(value, name: str):
    if not isinstance(value, str) or not re.fullmatch(NAME_PATTERN, value):
        raise ApiError(f"{name} must have 1 to 128 letters, digits, _ and -", param=name)


def name_results(messages: list[dict]) -> list[dict]:
    """Messages with the function's name in each result, for templates that write it."""
    names = {call_id: name for message in messages for call_id, name, _ in message.get("tool_calls", ())}
    return [
        {"name": names[message["tool_call_id"]]} | message if message.get("tool_call_id") in names else message
        for message in messages
    ]


def check_tool(tool, name: str) -> Tool:
    """A tool of a request; ApiError if it is malformed."""
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        raise ApiError(f"{name} must be an object of type function, other tools are not supported", param=name)
    check_name(function.get("name"), f"{name}.function.name")
    strict, schema = function.get("strict"), function.get("parameters")
    schema = {} if schema is None else schema
    if not isinstance(schema, dict) or schema.get("type", "object") != "object":
        raise ApiError(f"{name}.function.parameters must be the JSON schema of an object", param=f"{name}.parameters")
    if not isinstance(function.get("description"), str | None) or not isinstance(strict, bool | None):
        raise ApiError(f"{name}.function: description must be a string, and strict true or false", param=name)
    return Tool(function["name"], schema, bool(strict), f"{name}.function.parameters")


def describe_tool(tool: dict) -> dict:
    """A checked tool as templates get it: with a description and parameters, and without strict."""
    function = {key: value for key, value in tool["function"].items() if key != "strict" and value is not None}
    defaults = {"name": function["name"], "description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": defaults | function}


def read_tool_choice(choice, names: list[str]) -> tuple[list[str], bool]:
    """The names of the tools that the model may call, and whether it has to call one."""
    if choice is None or choice in ("none", "auto"):
        return names, False
    if not names:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return names, True
    kind = choice.get("type") if isinstance(choice, dict) else None
    tools, mode = None, None
    if kind == "function":
        tools, mode = [choice], "required"
    elif kind == "allowed_tools" and isinstance(choice.get("allowed_tools"), dict):
        tools, mode = choice["allowed_tools"].get("tools"), choice["allowed_tools"].get("mode")
    if not isinstance(tools, list) or not tools or mode not in ("auto", "required"):
        rule = 'none, auto, required, {"type": "function", "function": {"name": ...}}'
        rule += ' or {"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": [...]}}'
        raise ApiError(f"tool_choice must be {rule}", param="tool_choice")
    allowed = [tool_name(tool) for tool in tools]
    if unknown := [name for name in allowed if name not in names]:
        raise ApiError(f"tool_choice: there is no tool {str(unknown[0])[:64]!r}", param="tool_choice")
    return allowed, mode == "required"


def tool_name(tool):
    """What a tool of tool_choice has as its name."""
    function = tool.get("function") if isinstance(tool, dict) else None
    return function.get("name") if isinstance(function, dict) else None
