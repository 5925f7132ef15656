"""Writes conversations as text, by the chat template of a model.

Read `ChatTemplate` first. Knows tokens only by the tokenizer, and nothing of models.
"""

import datetime
import json
import re
from contextlib import suppress
from pathlib import Path

from cli import UserError, printable
from text.tokenizer import Tokenizer, TokenizerFiles, read_tokenizer_files

CHANNEL_MARKS = ("<|channel>thought", "<channel|>")  # Gemma 4's
TOOL_RESPONSE = "<|tool_response>"  # Gemma 4 ends its calls with it
THINKING_MARKS = (("<think>", "</think>"), ("[THINK]", "[/THINK]"), CHANNEL_MARKS)
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # put after a message that is to be continued


def mark_ids(tokenizer: Tokenizer, marks: tuple[str, str] | None) -> list[int]:
    """The special tokens in the marks around thoughts. They are shown, unlike others."""
    if marks is None:
        return []
    vocabulary = tokenizer.vocabulary
    names = "\n".join(marks)
    return [i for i in vocabulary.special_ids if vocabulary.name(i) and vocabulary.name(i) in names]


class ChatTemplate:
    """The chat template of a model: a Jinja2 program that writes a conversation as one text.

    The template is a program by the checkpoint's author. Jinja2's sandbox keeps it from Python's
    internals and from changing its arguments. Nothing limits its time and its memory.
    """

    def __init__(self, source: TokenizerFiles | Path, tokenizer: Tokenizer):
        files = source if isinstance(source, TokenizerFiles) else read_tokenizer_files(source)
        self.path = files.path
        self.source = files.template
        self.tokenizer = tokenizer
        if self.source is None:
            raise UserError(f"{self.path} has no chat template; use the model without --chat and --system")
        try:
            self.template = template_environment().from_string(self.source)
        except Exception as error:
            raise self._failure(error) from None

    def render(
        self,
        messages: list[dict],
        add_generation_prompt: bool = True,
        tools: list[dict] | None = None,
        variables: dict | None = None,
        continue_last: bool = False,
    ) -> str:
        """The text of messages ({"role": "user", "content": "Hello"}), up to the next answer.

        tools: functions that the model may call, as in OpenAI's API. variables: further ones for
        the template, such as enable_thinking. continue_last: the text ends with the last message's
        content, without what the template writes after it, so that the model continues this
        message.

        UserError if the template refuses the messages (some templates refuse a system message) or
        fails.
        """
        if continue_last:
            add_generation_prompt = False
            last = messages[-1]
            messages = [*messages[:-1], last | {"content": last["content"] + CONTINUE_MARK}]
        values = {"documents": None} | (variables or {}) | self.tokenizer.named_tokens
        values |= {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": tools}
        try:
            text = self.template.render(values)
        except Exception as error:
            raise self._failure(error) from None
        if not continue_last:
            return text
        before, found, after = text.rpartition(CONTINUE_MARK.strip())
        if not found:
            raise UserError(f"{self.path}: the chat template does not write the last message, which is to be continued")
        # As in transformers. Without the space, the template strips spaces at the end of messages.
        return before if after.startswith(" ") else before.rstrip()

    def _failure(self, error: Exception) -> UserError:
        """The UserError for any exception that the template raised: one line without escape sequences."""
        return UserError(f"{self.path}: the chat template fails: {printable(str(error) or type(error).__name__)}")

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of `render`."""
        return self.encode_text(self.render(messages))

    def encode_text(self, text: str) -> list[int]:
        """Token ids of a rendered text, with a BOS token only if the template has written one."""
        ids = self.tokenizer.encode(text, add_bos=False)
        if not ids:
            raise UserError(f"{self.path}: the chat template writes no text for this conversation")
        return ids

    def thinking_marks(self) -> tuple[str, str] | None:
        """The marks before and after the thoughts of the model, if its template knows them."""
        return next((marks for marks in THINKING_MARKS if marks[1] in self.source), None)

    def thinking_end(self) -> str | None:
        """The text with which the template ends thoughts: the second mark, and the line breaks
        around it. None if the template does not know thoughts."""
        marks = self.thinking_marks()
        if marks is None:
            return None
        thoughts = "Some thoughts."
        answer = {"role": "assistant", "content": "An answer."}
        answer |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thoughts)
        try:
            text = self.render([{"role": "user", "content": "A question?"}, answer], False)
        except UserError:
            text = ""
        end = text.rpartition(thoughts)[2].partition(answer["content"])[0]
        if re.fullmatch(rf"\n{{0,2}}{re.escape(marks[1])}\n{{0,2}}", end):
            return end
        return f"\n{marks[1]}" if marks == CHANNEL_MARKS else f"\n{marks[1]}\n\n"

    def end_ids(self) -> set[int]:
        """The special tokens that the template writes after an answer, and Gemma 4's before the results of its calls.

        The model ends its own answers with them, but not every checkpoint lists them among its EOS
        tokens. There are two if the last answer of a conversation ends in another way than those
        before it, as with OLMo 3, and none if no special token follows.
        """
        answer = "An answer."
        question = {"role": "user", "content": "A question?"}
        messages = [question, {"role": "assistant", "content": answer}]
        ids = set()
        if TOOL_RESPONSE in self.source:
            ids = {i for i, name in enumerate(self.tokenizer.vocabulary.tokens()) if name == TOOL_RESPONSE}
        for conversation in (messages, [*messages, question]):
            try:
                text = self.render(conversation, add_generation_prompt=False)
            except UserError:  # the template refuses this conversation
                continue
            _, found, rest = text.rpartition(answer)
            if found:
                after = self.tokenizer.encode(rest, add_bos=False)
                special = [i for i in after if i in self.tokenizer.vocabulary.special_ids]
                ids.update(special[:1])
        return ids


def answer_end_ids(source: TokenizerFiles | Path, tokenizer: Tokenizer) -> set[int]:
    """The EOS tokens, and those that the chat template writes after an answer, if there is one."""
    ids = set(tokenizer.eos_ids)
    with suppress(UserError):  # there is no chat template, or it fails
        ids |= ChatTemplate(source, tokenizer).end_ids()
    return ids


def template_environment():
    """A Jinja2 environment with everything that transformers offers to templates.

    It is the one of chat_template_utils.py in transformers.
    """
    from jinja2 import ext, nodes
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(ext.Extension):
        """{% generation %} marks answers for training. Here its content is rendered."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def raise_exception(message):
        raise TemplateError(message)

    # Jinja2's own filter escapes HTML.
    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    extensions = [ext.loopcontrols, Generation]
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=extensions)
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return environment
