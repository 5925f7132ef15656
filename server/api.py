"""OpenAI's API as data: parses the JSON of requests. responses.py builds responses, http_server.py is the HTTP side.

Read down: Choice and CompletionRequest, a parsed request with its results; ServedModel, which parses bodies. The fields
that are read are in request_fields.py, those of conversations in chat_prompts.py, those of grammars in constraints.py.

Sources: OpenAI's API reference; vLLM's extensions of it (stop_token_ids, ignore_eos, min_p, continuous_usage_stats,
/tokenize ...).
"""

import itertools
import secrets
import time
from dataclasses import dataclass, field, replace
from functools import partial

from cli import UserError
from config import Config
from engine import Request, check_prompt
from sampling import SamplingParams
from server.answers import AnswerParser, Event
from server.chat_prompts import ChatModel, Conversation
from server.constraints import Constraint, GrammarChecker, answer_source, read_constraint
from server.pipe_messages import TextRequest, Update
from server.request_fields import (
    MAX_LOGPROBS,
    ApiError,
    FieldReader,
    read_max_tokens,
    read_n,
    read_sampling_params,
    read_stop_ids,
    read_stop_strings,
    read_stream_options,
    read_token_ids,
)
from tokenizer import Tokenizer, TokenizerFiles

MAX_PROMPTS = 128  # of a request, each counted n times

# ---------------------------------------------------------------- a parsed request


@dataclass
class Choice:
    """One prompt of a request, and its answer so far."""

    index: int  # in the response's choices
    text_request: TextRequest  # the message to the engine
    echo: str = ""  # the text of the prompt, if the answer begins with it
    parsed_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    counted_tokens: int = 0  # new tokens that the metrics have counted
    updates: list[Update] = field(default_factory=list)
    parser: AnswerParser | None = None  # of a chat's answer

    @property
    def request(self) -> Request:
        """The engine's request."""
        return self.text_request.request

    def combined(self) -> Update:
        """All updates as one."""
        logprobs = [entry for update in self.updates for entry in update.logprobs]
        prompt_logprobs = [entry for update in self.updates for entry in update.prompt_logprobs]
        text = "".join(update.text for update in self.updates)
        return replace(self.updates[-1], text=text, logprobs=logprobs, prompt_logprobs=prompt_logprobs)

    def events(self, update: Update) -> list[Event]:
        """What an update adds to a chat's answer. Each update, or all of them combined, may be parsed once."""
        events = self.parser.add(update.text)
        if update.finish_reason is not None:
            events += self.parser.end(is_cut=update.finish_reason == "length")
        return events

    def finish_reason(self, update: Update) -> str | None:
        """As the API shows it, after the update was parsed. A call that was cut off is not "tool_calls"."""
        reason, parser = update.finish_reason, self.parser
        if reason is None or parser is None:
            return reason
        if parser.stops.stopped:  # the engine's process may not know: for it, a call without marks always fits
            reason = "stop"
        return "tool_calls" if reason == "stop" and parser.has_whole_calls else reason


@dataclass
class CompletionRequest:
    """A parsed request to /v1/completions or /v1/chat/completions, with its answers so far."""

    id: str  # of the response
    choices: list[Choice]  # with n answers, n for each prompt
    n: int = 1
    is_chat: bool = False
    stream: bool = False
    include_usage: bool = False  # at the end of a stream
    continuous_usage: bool = False  # in each chunk of a stream
    created: int = field(default_factory=lambda: int(time.time()))
    turn: object = None  # openai_responses.Turn, of a request to /v1/responses

    def usage(self) -> dict:
        firsts = self.choices[:: self.n]  # one of each prompt
        prompt_tokens = sum(len(choice.request.prompt) for choice in firsts)
        cached_tokens = sum(choice.updates[-1].cached_tokens for choice in firsts if choice.updates)
        completion_tokens = sum(choice.updates[-1].completion_tokens for choice in self.choices if choice.updates)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        }


class ServedModel:
    """The model as the API shows it: parses requests, and converts between text and tokens."""

    def __init__(self, config: Config, files: TokenizerFiles, name: str, context_length: int, strict: bool = False):
        self.name, self.context_length = name, context_length
        self.strict = strict  # whether a request that names another model is refused
        self.config, self.tokenizer = config, Tokenizer(files)
        self.chat = ChatModel(files, self.tokenizer)
        self.template = self.chat.template
        self.eos_ids = frozenset(self.tokenizer.eos_ids)
        self.chat_eos_ids = self.eos_ids | (self.template.end_ids() if self.template else set())
        self.created, self.request_ids = int(time.time()), itertools.count()
        self.grammars = GrammarChecker(self.tokenizer, config.vocab_size, self.chat_eos_ids)

    # ------------------------------------------------------------ text and tokens

    def encode(self, text: str, param: str, add_bos: bool = True) -> list[int]:
        if self.tokenizer.vocabulary is None:
            raise ApiError("the model has no tokenizer: send token ids", param=param)
        try:
            return self.tokenizer.encode(text, add_bos)
        except UserError as error:
            raise ApiError(str(error), param=param) from None

    def encode_prompts(self, prompt) -> list[tuple[list[int], str | None]]:
        """(ids, text) of each prompt in the field `prompt`; text is None if token ids were sent."""
        several = isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], (str, list))
        prompts = prompt if several else [prompt]
        if len(prompts) > MAX_PROMPTS:
            raise ApiError(f"the request has {len(prompts)} prompts, at most {MAX_PROMPTS} are allowed", param="prompt")
        rule = "text, a list of texts, token ids or a list of lists of them"
        return [
            (self.encode(one, "prompt"), one) if isinstance(one, str) else (read_token_ids(one, "prompt", rule), None)
            for one in prompts
        ]

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a single token, as logprobs show it, including special tokens."""
        vocabulary = self.tokenizer.vocabulary
        if vocabulary is None:
            return b"<%d>" % token
        return vocabulary.name(token).encode() if token in vocabulary.special_ids else vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # ------------------------------------------------------------ requests for completions

    def check_model_name(self, fields: FieldReader):
        """Read the name of the model in a request. Unless the server is strict, any name is served: many clients send a
        fixed one, and the response names the model that answered."""
        name = fields.read("model", str)
        if self.strict and name and name != self.name:  # no name, or an empty one, is that of the model
            raise self.unknown_model(name)

    def unknown_model(self, name: str) -> ApiError:
        return ApiError(f"the model {name!r} does not exist, only {self.name!r}", 404, "model", "model_not_found")

    def check_length(self, prompt: list[int], max_tokens: int | None, param: str, low: int) -> int:
        """How many tokens may follow a prompt: max_tokens, or if that is None as many as fit into the context.

        ApiError if the prompt and max_tokens do not fit. param: the field of the prompt; low: the fewest new tokens.
        """
        try:
            check_prompt(prompt, self.config, self.context_length)
        except UserError as error:
            code = "context_length_exceeded" if len(prompt) > self.context_length else None
            raise ApiError(str(error), param=param, code=code) from None
        room = self.context_length - len(prompt)
        new = room if max_tokens is None else max_tokens
        if new > room or new < low:
            counts = f"{self.context_length} tokens; the prompt has {len(prompt)} and {new} more were requested"
            param = param if room < low else "max_tokens"
            raise ApiError(f"the context has {counts}", param=param, code="context_length_exceeded")
        return new

    def parse_completion(self, body: dict) -> CompletionRequest:
        """Parse a body of /v1/completions."""
        fields = FieldReader(body)
        self.check_model_name(fields)
        prompts = self.encode_prompts(fields.unread.pop("prompt", None))
        max_tokens, n = read_max_tokens(fields, 16, 0), read_n(fields)
        logprobs, echo = fields.read("logprobs", int, None, 0, MAX_LOGPROBS), fields.read("echo", bool, False)
        params, stop = read_sampling_params(fields, self.config.vocab_size), read_stop_strings(fields)
        stop_ids, options = read_stop_ids(fields, self.eos_ids), read_stream_options(fields)
        constraint = read_constraint(fields)
        fields.check_unread()
        if len(prompts) * n > MAX_PROMPTS:
            counts = f"{len(prompts)} prompts with n={n}"
            raise ApiError(f"{counts} are not supported, at most {MAX_PROMPTS} answers in all", param="n")
        constraint = self.grammars.fit_constraint(constraint)
        grammar = None if constraint is None else answer_source(constraint, {})
        if constraint is not None:
            self.grammars.check(grammar, constraint.param, constraint.kind, is_tried=constraint.given is not None)
        choices = []
        for ids, text in prompts:
            new = self.check_length(ids, max_tokens, "prompt", 0)
            text = self.tokenizer.decode(ids) if echo and text is None else text
            for own_params in with_next_seeds(params, n):
                prompt_logprobs = logprobs if echo else None
                request = Request(ids, own_params, new, stop_ids, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
                text_request = TextRequest(
                    next(self.request_ids), request, stop, grammar=grammar, can_time_out=not choices
                )
                choices.append(Choice(len(choices), text_request, text if echo else ""))
        return CompletionRequest(f"cmpl-{secrets.token_hex(12)}", choices, n, **options)

    def parse_chat(self, body: dict) -> CompletionRequest:
        """Parse a body of /v1/chat/completions."""
        fields = FieldReader(body)
        self.check_model_name(fields)
        conversation = self.chat.read_conversation(fields)
        ids = self.chat.encode(conversation)
        max_tokens, n = read_max_tokens(fields, None, 1), read_n(fields)
        wants_logprobs = fields.read("logprobs", bool, False)
        top_logprobs = fields.read("top_logprobs", int, None, 0, MAX_LOGPROBS)
        if top_logprobs and not wants_logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        params, stop = read_sampling_params(fields, self.config.vocab_size), read_stop_strings(fields)
        stop_ids, options = read_stop_ids(fields, self.chat_eos_ids), read_stream_options(fields)
        constraint = read_constraint(fields)
        fields.check_unread()
        max_tokens = self.check_length(ids, max_tokens, "messages", 1)
        grammar = self.checked_grammar(conversation, constraint)

        syntax, fits = conversation.syntax, None
        if grammar is not None:  # it allows any text without the model's marks of calls, so a call there is checked
            bare_calls = constraint is None and not conversation.tool_choice.required
            fits = partial(self.call_fits, conversation, grammar)
            syntax = replace(syntax, bare_calls=bare_calls)
        shown_ids, logprobs = self.chat.shown_ids(conversation), (top_logprobs or 0) if wants_logprobs else None
        choices = []
        for own_params in with_next_seeds(params, n):
            request = Request(ids, own_params, max_tokens, stop_ids, logprobs=logprobs)
            text_request = TextRequest(
                next(self.request_ids), request, stop, conversation.continues, grammar, shown_ids, not choices, syntax
            )
            choices.append(Choice(len(choices), text_request, parser=AnswerParser(syntax, stop, fits)))
        return CompletionRequest(f"chatcmpl-{secrets.token_hex(12)}", choices, n, is_chat=True, **options)

    def parse_translated(self, body: dict, names: dict[str, str], max_tokens: int | None, kind: str):
        """Parse a body of /v1/chat/completions that a request of another API was translated to.

        names: of fields, for ApiError.renamed. max_tokens may be more than fits into the context, as clients of these
        APIs have fixed values for it: the answer ends where the context does. kind: begins the response's id.
        """
        try:
            completion = self.parse_chat(body)
        except ApiError as error:
            raise error.renamed(names) from None
        request = completion.choices[0].request
        if max_tokens is not None:
            request.max_new_tokens = min(request.max_new_tokens, max_tokens)
        completion.id = f"{kind}_{completion.id.partition('-')[2]}"
        return completion

    def checked_grammar(self, conversation: Conversation, constraint: Constraint | None) -> str | None:
        """The source of the grammar that the answer of a chat must fit; None if there is none. ApiError if it cannot be
        compiled. Schemas that are not strict are loosened where the library does not support them."""
        choice = conversation.tool_choice
        constraint = self.grammars.fit_constraint(constraint)
        if choice.tools and (choice.has_grammar or constraint is not None):
            choice.tools = self.grammars.fit_tools(choice.tools)

        grammar = self.chat.answer_grammar(conversation, constraint)
        if grammar is None:
            return None
        if choice.tools and (constraint is None or choice.required):
            self.grammars.check(grammar, "tools", "a schema")
        else:
            is_tried = not choice.tools and constraint.given is not None
            self.grammars.check(grammar, constraint.param, constraint.kind, is_tried)
        return grammar

    def call_fits(self, conversation: Conversation, grammar: str, name: str, arguments: str) -> bool:
        """Whether a call, if it is written as the model's template writes calls, fits the grammar of an answer."""
        thoughts = self.chat.thinking[1] if conversation.syntax.begins_inside else ""
        return self.grammars.accepts(grammar, thoughts + self.chat.tool_format.write([(name, arguments)]))

    # ------------------------------------------------------------ responses without the engine

    def tokenize(self, body: dict) -> dict:
        """The response of /tokenize: the ids of a text or of a conversation."""
        fields = FieldReader(body)
        self.check_model_name(fields)
        add_bos = fields.read("add_special_tokens", bool, True)
        if "messages" in fields.unread:
            ids = self.chat.encode(self.chat.read_conversation(fields))
        else:
            text = fields.read("prompt", str)
            if text is None:
                raise ApiError("prompt must be a string", param="prompt")
            ids = self.encode(text, "prompt", add_bos)
        response = {"count": len(ids), "max_model_len": self.context_length, "tokens": ids}
        if fields.read("return_token_strs", bool, False):
            response["token_strs"] = [self.token_text(i) for i in ids]
        fields.check_unread()
        return response

    def detokenize(self, body: dict) -> dict:
        fields = FieldReader(body)
        self.check_model_name(fields)
        ids, V = read_token_ids(fields.unread.pop("tokens", None), "tokens"), self.config.vocab_size
        fields.check_unread()
        if outside := [i for i in ids if not 0 <= i < V]:
            raise ApiError(f"token id {outside[0]} is outside the vocabulary of {V} (0 to {V - 1})", param="tokens")
        return {"prompt": self.tokenizer.decode(ids)}

    def tokenizer_info(self) -> dict:
        """The response of /tokenizer_info, for clients that tokenize with the server's tokenizer (lm-eval)."""
        template = self.template.source if self.template else None
        return self.tokenizer.named_tokens | {"chat_template": template, "model_max_length": self.context_length}

    def model_card(self) -> dict:
        """The model in /v1/models."""
        card = {"id": self.name, "object": "model", "created": self.created, "owned_by": "fastpath"}
        return card | {"max_model_len": self.context_length}

    def find_model(self, name: str) -> dict:
        """The response of /v1/models/NAME."""
        if name and name != self.name:
            raise self.unknown_model(name)
        return self.model_card()


def with_next_seeds(params: SamplingParams, n: int) -> list[SamplingParams]:
    """The parameters of n answers: the first has the request's seed, and the others the next ones."""
    return [replace(params, seed=(params.seed + i + 2**63) % 2**64 - 2**63) for i in range(n)]  # in 64 bits
