"""OpenAI's API as data: parses the JSON of requests.

Read down: Choice and CompletionRequest, a parsed request with its results; ServedModel, which
parses bodies. openai_requests.py has the fields of a body, chat_prompts.py makes the prompt of a
chat, and constraints.py the grammar of an answer. responses.py builds responses; http_server.py is
the HTTP side.
"""

import itertools
import secrets
import time
import traceback
from dataclasses import dataclass, field, replace
from functools import partial

from cli import UserError, first_line
from config import Config
from engine import Request, check_prompt
from sampling import NEUTRAL, SamplingParams
from server.answer_text import AnswerText
from server.answers import AnswerParser, Event
from server.chat_prompts import ChatModel, Conversation
from server.constraints import Constraint, GrammarChecker, answer_source, read_constraint
from server.openai_requests import ChatBody, CompletionBody, DetokenizeBody, StreamOptions, TokenizeBody
from server.pipe_messages import TextRequest, Update
from server.request_fields import ApiError
from server.tool_grammars import ToolGrammar
from text.tokenizer import Tokenizer, TokenizerFiles

LONG_TOKEN = 16  # characters: more than tokens have on average
MAX_PROMPTS = 128  # in one request; a prompt with n answers counts n times

# ---------------------------------------------------------------- a parsed request


@dataclass
class Choice:
    """One prompt of a request, and its answer so far."""

    index: int  # the position in the response's list of choices
    text_request: TextRequest  # the message to the engine
    echo: str = ""  # the prompt's text, if the answer repeats it at its beginning
    parsed_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    counted_tokens: int = 0  # new tokens that the metrics have counted
    updates: list[Update] = field(default_factory=list)
    parser: AnswerParser | None = None  # parses the answer of a chat; None for other requests
    answer: AnswerText | None = None  # turns the engine's tokens into text
    finished_at: float | None = None  # when its last token came

    @property
    def request(self) -> Request:
        """The engine's request."""
        return self.text_request.request

    def combined(self) -> Update:
        """All updates as one."""
        return replace(
            self.updates[-1],
            text="".join(update.text for update in self.updates),
            logprobs=[entry for update in self.updates for entry in update.logprobs],
            prompt_logprobs=[entry for update in self.updates for entry in update.prompt_logprobs],
            events=[event for update in self.updates for event in self.events(update)] if self.parser else None,
        )

    def read(self, update: Update) -> Update:
        """An update of the engine with its text: see AnswerText.read. If it cannot be read, the update is an
        error."""
        try:
            return self.answer.read(update) if self.answer else update
        except Exception as error:
            lines = "".join(traceback.format_exception(error))
            return replace(update, finish_reason="error", error=first_line(error), traceback=lines, events=[])

    def events(self, update: Update) -> list[Event]:
        """The events of an update of a chat's answer, which is read if it was not yet."""
        if update.events is None:
            update = self.answer.read(update)
        return update.events

    def finish_reason(self, update: Update) -> str | None:
        """The finish reason for the response, after the update was parsed.

        An answer whose last call was cut off does not finish with "tool_calls".
        """
        has_called = self.parser is not None and self.parser.has_whole_calls
        return "tool_calls" if has_called and update.finish_reason == "stop" else update.finish_reason


@dataclass
class CompletionRequest:
    """A parsed request to /v1/completions or /v1/chat/completions, with its answers so far."""

    id: str  # the id of the response
    choices: list[Choice]  # n for each prompt, prompt by prompt
    n: int = 1
    is_chat: bool = False
    stream: bool = False
    stream_options: StreamOptions = field(default_factory=StreamOptions)
    created: int = field(default_factory=lambda: int(time.time()))
    turn: object = None  # the openai_responses.Turn of a request to /v1/responses

    def usage(self) -> dict:
        firsts = self.choices[:: self.n]  # one choice of each prompt
        prompt_tokens = sum(len(choice.request.prompt) for choice in firsts)
        cached_tokens = sum(choice.updates[-1].cached_tokens for choice in firsts if choice.updates)
        completion_tokens = sum(choice.updates[-1].completion_tokens for choice in self.choices if choice.updates)

        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }

    def summary(self, arrived_at: float) -> str:
        """What the log says of the answers: tokens, seconds to the first one, tokens/s after it, finish reasons."""
        usage = self.usage()
        first_at = min((one.first_token_at for one in self.choices if one.first_token_at), default=0.0)
        seconds = max(one.finished_at or time.perf_counter() for one in self.choices) - first_at
        rate = (usage["completion_tokens"] - 1) / max(seconds, 1e-6)
        speed = f", first after {first_at - arrived_at:.2f} s, {rate:.1f} tokens/s" if first_at else ""
        reasons = {(one.updates and one.finish_reason(one.updates[-1])) or "unfinished" for one in self.choices}
        return (
            f": {usage['prompt_tokens']} prompt tokens ({usage['prompt_tokens_details']['cached_tokens']} reused), "
            f"{usage['completion_tokens']} new{speed}, {'/'.join(sorted(reasons))}"
        )


class ServedModel:
    """The model as the API shows it: parses requests, and converts between text and tokens."""

    def __init__(
        self,
        config: Config,
        files: TokenizerFiles,
        name: str,
        context_length: int,
        strict: bool = False,
        sampling: SamplingParams = NEUTRAL,
    ):
        self.sampling = sampling  # the settings that a request does not name
        self.name = name
        self.context_length = context_length
        self.strict = strict  # whether a request that names another model is refused
        self.config = config
        self.created = int(time.time())
        self.request_ids = itertools.count()

        self.tokenizer = Tokenizer(files)
        self.chat = ChatModel(files, self.tokenizer)
        self.template = self.chat.template
        self.eos_ids = frozenset(self.tokenizer.eos_ids)
        self.chat_eos_ids = self.eos_ids
        if self.template:
            self.chat_eos_ids |= self.template.end_ids()
        self.grammars = GrammarChecker(self.tokenizer, config.vocab_size, self.chat_eos_ids)

    # ------------------------------------------------------------ text and tokens

    def encode(self, text: str, param: str, add_bos: bool = True) -> list[int]:
        if self.tokenizer.vocabulary is None:
            raise ApiError("the model has no tokenizer: send token ids", param=param)
        try:
            self.check_text(text, param)
            return self.tokenizer.encode(text, add_bos)
        except UserError as error:
            raise ApiError(str(error), param=param) from None

    def check_text(self, text: str, param: str):
        """Refuse a text whose beginning is longer than the context: tokenizing all of it would take more
        than 100 bytes of memory for each byte."""
        beginning = text[: LONG_TOKEN * self.context_length]
        if beginning == text:
            return
        try:
            n = len(self.tokenizer.encode(beginning))
        except UserError as error:
            raise ApiError(str(error), param=param) from None
        if n > self.context_length + LONG_TOKEN:
            raise ApiError(
                f"the prompt has more than the {self.context_length} tokens of the context",
                param=param,
                code="context_length_exceeded",
            )

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a single token, as logprobs show it, including special tokens."""
        vocabulary = self.tokenizer.vocabulary
        if vocabulary is None:
            return b"<%d>" % token
        if token in vocabulary.special_ids:
            return vocabulary.name(token).encode()
        return vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # ------------------------------------------------------------ requests for completions

    def check_model_name(self, name: str):
        """Check the name of the model in a request. Only a strict server refuses other names.

        Many clients send a fixed name. The response names the model that has answered.
        """
        if self.strict and name and name != self.name:  # without a name, any model will do
            raise self.unknown_model(name)

    def unknown_model(self, name: str) -> ApiError:
        return ApiError(f"the model {name!r} does not exist, only {self.name!r}", 404, "model", "model_not_found")

    def check_length(self, prompt: list[int], max_tokens: int, param: str, low: int) -> int:
        """Return the number of tokens that may follow a prompt: max_tokens, but no more than fit into
        the context, because many clients send a fixed number. -1: as many as fit. ApiError if the
        prompt does not fit, or fills the context, so that no token can follow.

        param: the field of the prompt. low: the fewest new tokens if max_tokens is -1.
        """
        too_long = "context_length_exceeded"
        try:
            check_prompt(prompt, self.config, self.context_length)
        except UserError as error:
            code = too_long if len(prompt) > self.context_length else None
            raise ApiError(str(error), param=param, code=code) from None

        room = self.context_length - len(prompt)
        if room < (low if max_tokens == -1 else min(max_tokens, 1)):
            raise ApiError(
                f"the prompt has {len(prompt)} tokens, as many as the context, so no token can follow",
                param=param,
                code=too_long,
            )
        return room if max_tokens == -1 else min(max_tokens, room)

    def check_head(self):
        """ApiError if the model cannot generate text."""
        embedding = self.tokenizer.embedding
        if embedding is not None and not embedding.has_head:
            raise ApiError(f"the model {self.name!r} has no output head: it makes embeddings only", param="model")

    def parse_completion(self, body: dict) -> CompletionRequest:
        """Parse a body of /v1/completions."""
        fields = CompletionBody.read(body)
        self.check_model_name(fields.model)
        self.check_head()
        if len(fields.prompts) * fields.n > MAX_PROMPTS:
            raise ApiError(
                f"{len(fields.prompts)} prompts with n={fields.n} are not supported, at most {MAX_PROMPTS} answers "
                "in all",
                param="prompt" if fields.n == 1 else "n",
            )

        constraint = self.grammars.fit_constraint(read_constraint(fields))
        grammar = None
        if constraint is not None:
            grammar = answer_source(constraint, {})
            self.grammars.check(grammar, constraint.param, is_tried=constraint.kind == "json")

        stop_ids = fields.stop_ids(self.eos_ids)
        all_params = fields.sampling_params(self.sampling, self.config.vocab_size)
        choices = []
        for prompt in fields.prompts:
            is_text = isinstance(prompt, str)
            ids = self.encode(prompt, "prompt") if is_text else prompt
            new = self.check_length(ids, fields.max_tokens, "prompt", 0)
            text = ""
            if fields.echo:
                text = prompt if is_text else self.tokenizer.decode(ids)
            for params in all_params:
                request = Request(ids, params, new, stop_ids, logprobs=fields.logprobs)
                if fields.echo:
                    request.prompt_logprobs = fields.logprobs
                text_request = TextRequest(
                    next(self.request_ids), request, fields.stop, grammar=grammar, can_time_out=not choices
                )
                answer = AnswerText(self.tokenizer, text_request)
                choices.append(Choice(len(choices), text_request, text, answer=answer))
        return CompletionRequest(
            f"cmpl-{secrets.token_hex(12)}", choices, fields.n, False, fields.stream, fields.stream_options
        )

    def parse_chat(self, body: dict) -> CompletionRequest:
        """Parse a body of /v1/chat/completions."""
        fields = ChatBody.read(body)
        self.check_model_name(fields.model)
        self.check_head()
        conversation = self.chat.read_conversation(fields)
        self.check_text(conversation.text, "messages")
        ids = self.chat.encode(conversation)
        constraint = read_constraint(fields)
        max_tokens = self.check_length(ids, fields.max_tokens, "messages", 1)
        grammar = self.checked_grammar(conversation, constraint)

        syntax = conversation.syntax
        fits = None
        if grammar is not None:
            # The grammar allows any text without marks of calls, so the parser checks bare calls.
            bare_calls = constraint is None and not conversation.tool_choice.required
            # Where arguments are written one by one, bare calls cannot be checked: they are content.
            if syntax.tools is not None and syntax.tools.parameters is not None:
                bare_calls = False
            syntax = replace(syntax, bare_calls=bare_calls)
            fits = partial(self.call_fits, conversation, grammar)

        logprobs = fields.top_logprobs if fields.logprobs else None
        stop_ids = fields.stop_ids(self.chat_eos_ids)
        choices = []
        for params in fields.sampling_params(self.sampling, self.config.vocab_size):
            request = Request(ids, params, max_tokens, stop_ids, logprobs=logprobs)
            text_request = TextRequest(
                next(self.request_ids),
                request,
                fields.stop,
                conversation.continues,
                grammar,
                self.chat.limit_of_thoughts(conversation),
                self.chat.shown_ids(conversation),
                can_time_out=not choices,
                syntax=syntax,
            )
            parser = AnswerParser(syntax, fields.stop, fits, fields.stream)
            answer = AnswerText(self.tokenizer, text_request, parser)
            choices.append(Choice(len(choices), text_request, parser=parser, answer=answer))
        response_id = f"chatcmpl-{secrets.token_hex(12)}"
        return CompletionRequest(response_id, choices, fields.n, True, fields.stream, fields.stream_options)

    def parse_translated(self, body: dict, names: dict[str, str], kind: str) -> CompletionRequest:
        """Parse a body of /v1/chat/completions that a request of another API was translated to.

        names: the other API's names of fields, for ApiError.renamed. kind: the beginning of the
        response's id.
        """
        try:
            completion = self.parse_chat(body)
        except ApiError as error:
            raise error.renamed(names) from None

        completion.id = f"{kind}_{completion.id.partition('-')[2]}"
        return completion

    def checked_grammar(self, conversation: Conversation, constraint: Constraint | None) -> str | None:
        """The source of the grammar that the answer of a chat must fit; None if there is none.

        ApiError if the grammar cannot be compiled. A schema that is not strict is loosened where
        the library does not support it.
        """
        choice = conversation.tool_choice
        constraint = self.grammars.fit_constraint(constraint)
        if not choice.has_grammar and constraint is None:
            return None

        chat = self.chat
        syntax = conversation.syntax
        calls = None
        if choice.tools:
            choice.tools = self.grammars.fit_tools(choice.tools)
            try:
                calls = ToolGrammar(chat.tool_format, choice.tools, chat.special_tokens, syntax.max_calls is None)
            except UserError as error:
                raise ApiError(f"tools: a schema is not supported: {error}", param="tools") from None
        thinking = None if conversation.thinking_is_over else chat.thinking
        grammar = answer_source(constraint, chat.special_tokens, calls, choice.required, thinking, syntax.begins_inside)
        if choice.tools and (constraint is None or choice.required):
            self.grammars.check(grammar, "tools")
        else:
            self.grammars.check(grammar, constraint.param, is_tried=constraint.kind == "json" and not choice.tools)
        return grammar

    def call_fits(self, conversation: Conversation, grammar: str, name: str, arguments: str) -> bool:
        """Whether a call, written in the model's own format, fits the grammar of an answer."""
        thoughts = self.chat.thinking[1] if conversation.syntax.begins_inside else ""
        call = self.chat.tool_format.write([(name, arguments)])
        return self.grammars.accepts(grammar, thoughts + call)

    # ------------------------------------------------------------ responses without the engine

    def tokenize(self, body: dict) -> dict:
        """The response of /tokenize: the ids of a text or of a conversation."""
        fields = TokenizeBody.read(body)
        self.check_model_name(fields.model)
        if fields.messages is not None:
            ids = self.chat.encode(self.chat.read_conversation(fields))
        elif fields.prompt is not None:
            ids = self.encode(fields.prompt, "prompt", fields.add_special_tokens)
        else:
            raise ApiError("prompt must be a string", param="prompt")

        response = {"count": len(ids), "max_model_len": self.context_length, "tokens": ids}
        if fields.return_token_strs:
            response["token_strs"] = [self.token_text(i) for i in ids]
        return response

    def detokenize(self, body: dict) -> dict:
        """The response of /detokenize: the text of token ids."""
        fields = DetokenizeBody.read(body)
        self.check_model_name(fields.model)
        V = self.config.vocab_size
        for i in fields.tokens:
            if not 0 <= i < V:
                raise ApiError(f"token id {i} is outside the vocabulary of {V} (0 to {V - 1})", param="tokens")
        return {"prompt": self.tokenizer.decode(fields.tokens)}

    def tokenizer_info(self) -> dict:
        """The response of /tokenizer_info, for clients that tokenize like the server (lm-eval)."""
        template = self.template.source if self.template else None
        limits = {"chat_template": template, "model_max_length": self.context_length}
        return self.tokenizer.named_tokens | limits

    def model_card(self) -> dict:
        """The model in /v1/models."""
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "fastpath"}
        return card | {"max_model_len": self.context_length, "sampling": self.sampling.recommended()}

    def find_model(self, name: str) -> dict:
        """The response of /v1/models/NAME."""
        if name and name != self.name:
            raise self.unknown_model(name)
        return self.model_card()
