"""Conversations: turns the messages and tools of a chat request into the prompt that the model's template writes.

Read down: Conversation, a parsed one; ChatModel, which parses the fields about the conversation; the messages; the
tools. The sampling parameters and the other fields of a request are read in api.py.
"""

import hashlib
import json
import re
from dataclasses import dataclass, field, replace

from checkpoint import TokenizerFiles
from cli import UserError, print_status
from server.answers import AnswerSyntax
from server.constraints import AnswerRules, Constraint
from server.fields import ApiError, FieldReader
from server.tools import (
    NAME_PATTERN,
    Tool,
    ToolGrammar,
    find_thinking_marks,
    find_tool_format,
    place_tools,
    special_tokens,
)
from tokenizer import ChatTemplate, Tokenizer

MAX_TOOLS = 128
ROLES = ("system", "developer", "user", "assistant", "tool")
NO_TOOLS = "the model's chat template knows no tools, or writes calls in a way that is not supported"


@dataclass
class ToolChoice:
    """The tools of a request, and what the model may do with them."""

    tools: list[Tool] = field(default_factory=list)
    described: list[dict] = field(default_factory=list)  # the same, as the template gets them
    required: bool = False  # the answer must be calls
    several: bool = True  # it may have more than one call

    @property
    def has_grammar(self) -> bool:
        return bool(self.tools) and (self.required or any(tool.strict for tool in self.tools))


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
            self.tool_format, self.thinking = find_tool_format(self.tool_template), find_thinking_marks(self.template)
        self.special_tokens = special_tokens(tokenizer) if tokenizer.vocabulary is not None else {}

    def read_conversation(self, fields: FieldReader) -> Conversation:
        """Read the fields of a request that are about the conversation."""
        messages = fields.unread.pop("messages", None)
        tools = self.read_tools(fields)
        variables = fields.read("chat_template_kwargs", dict, {})
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
            param = "continue_final_message"
            raise ApiError(f"{param}: the last message is not the assistant's", param=param)
        if continues and add_prompt:
            param = "add_generation_prompt"
            raise ApiError(f"{param} and continue_final_message exclude each other", param=param)
        continues = continues or (ends_with_answer and add_prompt is not True)
        if add_prompt is False and not continues:
            raise ApiError("add_generation_prompt is not supported, except with true", param="add_generation_prompt")
        return self.render(checked, tools, variables, continues)

    def render(self, messages: list[dict], tools: ToolChoice, variables: dict, continues: bool) -> Conversation:
        """The conversation of checked messages. continues: the answer continues the last message."""
        last = messages[-1]
        if continues and "tool_calls" in last:
            raise ApiError("the last message has tool calls: send their results", param="messages")
        template = self.tool_template if tools.tools else self.template
        format, described = self.tool_format, None
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
        rules = AnswerRules(constraint, grammar, tools.required, thinking, syntax.begins_inside)
        return rules.source(self.special_tokens)

    def shown_ids(self, conversation: Conversation) -> frozenset[int]:
        """The special tokens whose text the parser of the answer has to see."""
        marks = "\n".join(self.thinking or ())
        if conversation.tool_choice.tools:
            marks += "\n" + self.tool_format.marks
        return frozenset(i for name, i in self.special_tokens.items() if name in marks)

    # ------------------------------------------------------------ messages

    def check_message(self, message, name: str) -> dict:
        """A message with its role and its text; for an assistant's also its thoughts and its calls, as (id, name,
        arguments as an object). ApiError if it is malformed or has more than text."""
        if not isinstance(message, dict) or message.get("role") not in ROLES:
            raise ApiError(f"{name} must be an object with a role, one of {', '.join(ROLES)}", param=f"{name}.role")
        role, content = message["role"], message.get("content")
        if role == "tool" and self.template is not None and self.tool_format is None:
            raise ApiError(f"{name}: {NO_TOOLS}", param=f"{name}.role")
        if message.get("function_call"):
            raise ApiError(f"{name}.function_call is not supported, use tool_calls", param=f"{name}.function_call")
        checked = {"role": "system" if role == "developer" else role}
        if message.get("tool_calls") not in (None, []):
            checked["tool_calls"] = self.check_calls(message, f"{name}.tool_calls")
            content = "" if content is None else content
        checked["content"] = check_content(content, f"{name}.content")
        reasoning = message.get("reasoning_content")
        if role == "assistant" and reasoning not in (None, ""):
            checked["reasoning_content"] = check_content(reasoning, f"{name}.reasoning_content")
        if role == "tool":
            call_id = message.get("tool_call_id")
            if not isinstance(call_id, str):
                raise ApiError(f"{name}.tool_call_id must be a string", param=f"{name}.tool_call_id")
            checked["tool_call_id"] = call_id
        return checked

    def check_calls(self, message: dict, name: str) -> list[tuple[str, str, dict]]:
        if self.tool_format is None:
            raise ApiError(f"{name}: {NO_TOOLS}", param=name)
        calls = message["tool_calls"]
        if message["role"] != "assistant" or not isinstance(calls, list):
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
            texts = [(name, json.dumps(arguments, ensure_ascii=False)) for _, name, arguments in calls]
            written = format.write(texts)
            del message["tool_calls"]
            return message | {"content": f"{message['content']}\n{written}" if message["content"] else written}
        functions = [
            {"name": name, "arguments": json.dumps(one, ensure_ascii=False) if format.text_arguments else one}
            for _, name, one in calls
        ]
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
        wanted = read_tool_choice(choice, names)
        if not tools or choice == "none":
            return ToolChoice()
        if self.template is not None and self.tool_format is None:
            raise ApiError(f"tools: {NO_TOOLS}", param="tools")
        described = [describe_tool(tool) for tool in given]
        if wanted is not None:
            tools = [tool for tool in tools if tool.name == wanted]
        required = choice == "required" or wanted is not None
        return ToolChoice(tools, described, required, several and wanted is None)


def check_content(content, name: str) -> str:
    """The text of a message; ApiError if it has more than text."""
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else None for part in content]
        types = [part.get("type") if isinstance(part, dict) else None for part in content]
        if not all(kind == "text" and isinstance(text, str) for kind, text in zip(types, texts)):
            raise ApiError(f"{name}: only parts of type text are supported", param=name)
        content = "".join(texts)
    if not isinstance(content, str):
        raise ApiError(f"{name} must be a string or a list of text parts", param=name)
    return content


def check_call(call, name: str) -> tuple[str, str, dict]:
    """(id, function's name, arguments) of a call in a message."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(call.get("id"), str):
        raise ApiError(f"{name} must be an object with an id and a function", param=name)
    check_name(function.get("name"), f"{name}.function.name")
    arguments = function.get("arguments")
    try:
        parsed = json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        param = f"{name}.function.arguments"
        raise ApiError(f"{param} must be the JSON text of an object", param=param)
    return call["id"], function["name"], parsed


def check_name(value, name: str):
    if not isinstance(value, str) or not re.fullmatch(NAME_PATTERN, value):
        raise ApiError(f"{name} must have 1 to 64 letters, digits, _ and -", param=name)


def name_results(messages: list[dict]) -> list[dict]:
    """Messages with the function's name in each result, for templates that write it."""
    names = {call_id: name for message in messages for call_id, name, _ in message.get("tool_calls", ())}
    return [
        message | {"name": names[message["tool_call_id"]]} if message.get("tool_call_id") in names else message
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
    return Tool(function["name"], schema, bool(strict))


def describe_tool(tool: dict) -> dict:
    """A checked tool as templates get it: with a description and parameters, and without strict."""
    function = {key: value for key, value in tool["function"].items() if key != "strict" and value is not None}
    defaults = {"name": function["name"], "description": "", "parameters": {"type": "object", "properties": {}}}
    return {"type": "function", "function": defaults | function}


def read_tool_choice(choice, names: list[str]) -> str | None:
    """The name of the tool that the model has to call; None if the choice is none, auto or required."""
    if choice is None or choice in ("none", "auto"):
        return None
    if not names:
        raise ApiError("tool_choice needs tools", param="tool_choice")
    if choice == "required":
        return None
    function = choice.get("function") if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if name is None:
        rule = 'none, auto, required or {"type": "function", "function": {"name": ...}}'
        raise ApiError(f"tool_choice must be {rule}", param="tool_choice")
    if name not in names:
        raise ApiError(f"tool_choice: there is no tool {str(name)[:64]!r}", param="tool_choice")
    return name
