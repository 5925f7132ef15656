"""OpenAI's API as data: parses the JSON of requests, and builds the JSON of responses.

Read down: errors; reading the fields of a body; Choice and CompletionRequest, a parsed request with its results;
ServedModel, which parses bodies; ResponseBuilder, which makes responses and the chunks of streams. The HTTP side is
http_server.py.

Sources: OpenAI's API reference; vLLM's extensions of it (stop_token_ids, ignore_eos, min_p, continuous_usage_stats,
/tokenize ...).
"""

import itertools
import json
import secrets
import time
from dataclasses import dataclass, field, replace

from checkpoint import TokenizerFiles
from cli import UserError, print_status
from engine import Request, check_prompt
from model import Config
from sampling import SamplingParams
from server.messages import Submit, Update
from tokenizer import ChatTemplate, TextStream, Tokenizer

MAX_BODY_BYTES = 1 << 20
MAX_PROMPTS, MAX_LOGPROBS = 128, 20
MAX_STOPS, MAX_STOP_LENGTH = 4, 1000
MAX_STOP_IDS = 128

# ---------------------------------------------------------------- errors


class ApiError(Exception):
    """A response that is an OpenAI error object. retry_after: seconds after which the same request may succeed."""

    def __init__(self, message: str, status=400, param: str | None = None, code: str | None = None, retry_after=None):
        super().__init__(message[:500])
        self.status, self.param = status, param
        self.code, self.retry_after = code, retry_after

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def encode_json(value) -> bytes:
    """JSON as UTF-8. A lone surrogate, which a client may have sent and an error may quote, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


# ---------------------------------------------------------------- the fields of a request

TYPE_NAMES = {int: "an integer", (int, float): "a number", bool: "true or false", str: "a string", list: "a list"}
TYPE_NAMES |= {dict: "an object", (str, list): "a string or a list"}

# Fields that are not supported, each with the values that change nothing. These are accepted, and so is null.
NEUTRAL_VALUES = {
    "n": [1], "best_of": [1], "echo": [False], "suffix": [""], "logit_bias": [{}],
    "response_format": [{"type": "text"}], "tools": [[]], "tool_choice": ["none", "auto"],
    "functions": [[]], "function_call": ["none", "auto"],
    "modalities": [["text"]], "audio": [], "prediction": [], "web_search_options": [],
    "use_beam_search": [False], "length_penalty": [1], "typical_p": [1], "min_tokens": [0], "bad_words": [[]],
    "include_stop_str_in_output": [False], "skip_special_tokens": [True], "add_special_tokens": [True],
    "prompt_logprobs": [], "truncate_prompt_tokens": [], "structured_outputs": [], "logits_processors": [[]],
    "guided_json": [], "guided_regex": [], "guided_choice": [], "guided_grammar": [], "grammar": [],
    "chat_template": [], "chat_template_kwargs": [{}], "documents": [[]],
    "add_generation_prompt": [True], "continue_final_message": [False],
}  # fmt: skip


def parse_object(data: bytes) -> dict:
    """The JSON object in a request's body; ApiError if there is none."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


class FieldReader:
    """Reads the fields of a request's JSON object, each once, and then checks those that are left over."""

    logged: set[str] = set()  # names of unknown fields; shared by all requests

    def __init__(self, body: dict):
        self.unread = dict(body)

    def read(self, name: str, kind, default=None, low: int | None = None, high: int | None = None):
        """The value of a field, or `default` if it is missing or null; ApiError if it has another type, or is out of
        bounds."""
        value = self.unread.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(f"{name} must be {TYPE_NAMES[kind]}", param=name)
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ApiError(f"{name} must be {bounds}", param=name)
        return value

    def check_unread(self):
        """Refuse unsupported fields that would change the answer. Unknown fields are ignored, and logged once."""
        for name, value in self.unread.items():
            if name in NEUTRAL_VALUES:
                neutral = NEUTRAL_VALUES[name]
                if value is not None and not any(value == one and type(value) is type(one) for one in neutral):
                    raise ApiError(f"{name} is not supported, except with a value that changes nothing", param=name)
            elif name not in self.logged and len(self.logged) < 100:
                self.logged.add(name)
                print_status(f"a request has the unknown field {name[:60]!r}, which is ignored")


def read_token_ids(value, param: str, rule: str = "a list of token ids (integers)") -> list[int]:
    """The value if it is a list of integers; else an ApiError that says the rule."""
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ApiError(f"{param} must be {rule}", param=param)
    return value


def read_max_tokens(fields: FieldReader, default: int | None, low: int) -> int | None:
    max_tokens = fields.read("max_tokens", int, default, low)
    return fields.read("max_completion_tokens", int, max_tokens, low)  # OpenAI's newer name for it


def read_sampling_params(fields: FieldReader) -> SamplingParams:
    defaults = {"temperature": 1.0, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
    defaults |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
    values = {name: fields.read(name, (int, float), default) for name, default in defaults.items()}
    top_k, seed = fields.read("top_k", int, 0), fields.read("seed", int, None)
    seed = secrets.randbits(62) if seed is None else seed
    try:
        return SamplingParams(**values, top_k=0 if top_k == -1 else top_k, seed=seed)
    except ValueError as error:
        param = "min_p" if values["min_p"] == 1 else str(error).split()[0]
        raise ApiError(str(error), param=param) from None


def read_stop_strings(fields: FieldReader) -> tuple[str, ...]:
    stop = fields.read("stop", (str, list), [])
    stop = [stop] if isinstance(stop, str) else stop
    if len(stop) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stop):
        rule = f"a string or a list of up to {MAX_STOPS} strings, each of 1 to {MAX_STOP_LENGTH} characters"
        raise ApiError(f"stop must be {rule}", param="stop")
    return tuple(stop)


def read_stop_ids(fields: FieldReader, eos_ids: frozenset[int]) -> frozenset[int]:
    stop_ids = read_token_ids(fields.read("stop_token_ids", list, []), "stop_token_ids")
    if len(stop_ids) > MAX_STOP_IDS:  # each prompt of a request has its own copy of them in the engine's process
        raise ApiError(f"stop_token_ids must be up to {MAX_STOP_IDS} ids", param="stop_token_ids")
    return frozenset(stop_ids) | (frozenset() if fields.read("ignore_eos", bool, False) else eos_ids)


def read_stream_options(fields: FieldReader) -> dict[str, bool]:
    """The fields of a CompletionRequest that are about streaming."""
    stream, options = fields.read("stream", bool, False), fields.read("stream_options", dict)
    if options is not None and not stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    options = FieldReader(options or {})
    return {
        "stream": stream,
        "include_usage": options.read("include_usage", bool, False),
        "continuous_usage": options.read("continuous_usage_stats", bool, False),
    }


# ---------------------------------------------------------------- a parsed request


@dataclass
class Choice:
    """One prompt of a request, and its answer so far."""

    index: int  # in the response's choices
    submit: Submit  # the message to the engine
    echo: str = ""  # the text of the prompt, if the answer begins with it
    submitted_at: float = field(default_factory=time.perf_counter)
    first_token_at: float | None = None
    updates: list[Update] = field(default_factory=list)

    def combined(self) -> Update:
        """All updates as one."""
        logprobs = [entry for update in self.updates for entry in update.logprobs]
        prompt_logprobs = [entry for update in self.updates for entry in update.prompt_logprobs]
        text = "".join(update.text for update in self.updates)
        return replace(self.updates[-1], text=text, logprobs=logprobs, prompt_logprobs=prompt_logprobs)


@dataclass
class CompletionRequest:
    """A parsed request to /v1/completions or /v1/chat/completions, with its answers so far."""

    id: str  # of the response
    choices: list[Choice]
    is_chat: bool = False
    stream: bool = False
    include_usage: bool = False  # at the end of a stream
    continuous_usage: bool = False  # in each chunk of a stream
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict:
        prompt_tokens = sum(len(choice.submit.request.prompt) for choice in self.choices)
        latest = [choice.updates[-1] for choice in self.choices if choice.updates]
        completion_tokens = sum(update.completion_tokens for update in latest)
        return {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(update.cached_tokens for update in latest)},
        }


class ServedModel:
    """The model as the API shows it: parses requests, and converts between text and tokens."""

    def __init__(self, config: Config, files: TokenizerFiles, name: str, context_length: int):
        self.name, self.context_length = name, context_length
        self.config, self.tokenizer = config, Tokenizer(files)
        self.template, self.template_error = None, ""
        try:
            self.template = ChatTemplate(files, self.tokenizer)
        except UserError as error:
            self.template_error = "the model has no chat template: use /v1/completions"
            if "has no chat template" not in str(error):
                print_status(f"chat completions are not available: {error}")
        vocabulary = self.tokenizer.vocabulary
        names = dict(enumerate(vocabulary.tokens())) if vocabulary else {}
        self.special_tokens = {i: (names.get(i) or "").encode() for i in vocabulary.special_ids} if vocabulary else {}
        self.eos_ids = frozenset(self.tokenizer.eos_ids)
        self.chat_eos_ids = self.eos_ids | (self.template.end_ids() if self.template else set())
        self.created, self.request_ids = int(time.time()), itertools.count()

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

    def encode_messages(self, messages) -> list[int]:
        """The token ids of a conversation."""
        if self.template is None:
            raise ApiError(self.template_error, param="messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a list with at least one message", param="messages")
        checked = [self.check_message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self.template.encode(checked)
        except UserError as error:
            line = str(error).replace(f"{self.template.path}: ", "")  # do not show file paths to clients
            raise ApiError(line, param="messages") from None

    @staticmethod
    def check_message(message, name: str) -> dict:
        """The role and the text of a message; ApiError if it is malformed or has more than text."""
        roles = ("system", "developer", "user", "assistant")
        if not isinstance(message, dict) or message.get("role") not in roles:
            raise ApiError(f"{name} must be an object with a role, one of {', '.join(roles)}", param=f"{name}.role")
        content, role = message.get("content"), message["role"]
        if message.get("tool_calls") or message.get("function_call"):
            raise ApiError(f"{name}: tools are not supported", param=f"{name}.tool_calls")
        if isinstance(content, list):
            texts = [part.get("text") if isinstance(part, dict) else None for part in content]
            types = [part.get("type") if isinstance(part, dict) else None for part in content]
            if not all(kind == "text" and isinstance(text, str) for kind, text in zip(types, texts)):
                raise ApiError(f"{name}.content: only parts of type text are supported", param=f"{name}.content")
            content = "".join(texts)
        if not isinstance(content, str):
            raise ApiError(f"{name}.content must be a string or a list of text parts", param=f"{name}.content")
        return {"role": "system" if role == "developer" else role, "content": content}

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a single token, as logprobs show it, including special tokens."""
        if self.tokenizer.vocabulary is None:
            return b"<%d>" % token
        if token in self.special_tokens:
            return self.special_tokens[token]
        return self.tokenizer.vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # a part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # ------------------------------------------------------------ requests for completions

    def check_model_name(self, fields: FieldReader):
        name = fields.read("model", str, self.name)
        if name != self.name:
            raise ApiError(f"the model {name!r} does not exist, only {self.name!r}", 404, "model", "model_not_found")

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
        max_tokens = read_max_tokens(fields, 16, 0)
        logprobs, echo = fields.read("logprobs", int, None, 0, MAX_LOGPROBS), fields.read("echo", bool, False)
        params, stop = read_sampling_params(fields), read_stop_strings(fields)
        stop_ids, options = read_stop_ids(fields, self.eos_ids), read_stream_options(fields)
        fields.check_unread()
        choices = []
        for i, (ids, text) in enumerate(prompts):
            self.check_length(ids, max_tokens, "prompt", 0)
            text = self.tokenizer.decode(ids) if echo and text is None else text
            request = Request(ids, params, max_tokens, stop_ids, logprobs=logprobs)
            request.prompt_logprobs = logprobs if echo else None
            submit = Submit(next(self.request_ids), request, stop, can_time_out=i == 0)
            choices.append(Choice(i, submit, text if echo else ""))
        return CompletionRequest(f"cmpl-{secrets.token_hex(12)}", choices, **options)

    def parse_chat(self, body: dict) -> CompletionRequest:
        """Parse a body of /v1/chat/completions."""
        fields = FieldReader(body)
        self.check_model_name(fields)
        ids = self.encode_messages(fields.unread.pop("messages", None))
        max_tokens = read_max_tokens(fields, None, 1)
        wants_logprobs = fields.read("logprobs", bool, False)
        top_logprobs = fields.read("top_logprobs", int, None, 0, MAX_LOGPROBS)
        if top_logprobs is not None and not wants_logprobs:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        params, stop = read_sampling_params(fields), read_stop_strings(fields)
        stop_ids, options = read_stop_ids(fields, self.chat_eos_ids), read_stream_options(fields)
        fields.check_unread()
        max_tokens = self.check_length(ids, max_tokens, "messages", 1)
        request = Request(ids, params, max_tokens, stop_ids, logprobs=(top_logprobs or 0) if wants_logprobs else None)
        submit = Submit(next(self.request_ids), request, stop, continues_prompt=False)
        return CompletionRequest(f"chatcmpl-{secrets.token_hex(12)}", [Choice(0, submit)], is_chat=True, **options)

    # ------------------------------------------------------------ responses without the engine

    def tokenize(self, body: dict) -> dict:
        """The response of /tokenize: the ids of a text or of a conversation."""
        fields = FieldReader(body)
        self.check_model_name(fields)
        add_bos = fields.read("add_special_tokens", bool, True)
        if "messages" in fields.unread:
            ids = self.encode_messages(fields.unread.pop("messages"))
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
        self.check_model_name(FieldReader({"model": name}))
        return self.model_card()


# ---------------------------------------------------------------- responses


class ResponseBuilder:
    """Builds the response of /v1/completions or /v1/chat/completions, as a whole or in chunks."""

    def __init__(self, model: ServedModel, completion: CompletionRequest):
        self.model, self.completion = model, completion
        kind = "text_completion"
        if completion.is_chat:
            kind = "chat.completion.chunk" if completion.stream else "chat.completion"
        self.header = {"id": completion.id, "object": kind, "created": completion.created, "model": model.name}

    def chunks(self, choice: Choice, update: Update) -> list[dict]:
        """Add an update to its choice, and return the stream's chunks for it: none without a complete character."""
        is_first = not choice.updates
        choice.updates.append(update)
        if not (update.text or update.logprobs or update.finish_reason or is_first):
            return []
        if self.completion.is_chat:
            delta = {"role": "assistant"} if is_first else {}
            delta |= {"content": update.text} if is_first or update.text else {}
            answer = {"delta": delta, "logprobs": chat_logprobs(self.model, update.logprobs or None)}
        else:
            answer = self.text_and_logprobs(choice, update, is_first)
        part = {"index": choice.index, **answer, "finish_reason": update.finish_reason}
        return [self.header | {"choices": [part]} | self.usage_so_far()]

    def usage_so_far(self) -> dict:
        if self.completion.continuous_usage:
            return {"usage": self.completion.usage()}
        return {"usage": None} if self.completion.include_usage else {}

    def last_chunks(self) -> list[dict]:
        """The chunks after those of all updates."""
        if not self.completion.include_usage:
            return []
        return [self.header | {"choices": [], "usage": self.completion.usage()}]

    def whole(self) -> dict:
        """The response that is not streamed, after all updates."""
        choices = []
        for choice in self.completion.choices:
            update = choice.combined()
            if self.completion.is_chat:
                logprobs = None if choice.submit.request.logprobs is None else update.logprobs
                message = {"role": "assistant", "content": update.text, "refusal": None}
                answer = {"message": message, "logprobs": chat_logprobs(self.model, logprobs)}
            else:
                answer = self.text_and_logprobs(choice, update, True)
            choices.append({"index": choice.index, **answer, "finish_reason": update.finish_reason})
        return self.header | {"choices": choices, "usage": self.completion.usage()}

    def text_and_logprobs(self, choice: Choice, update: Update, is_first: bool) -> dict:
        """Of a choice of /v1/completions. is_first: they begin with those of the prompt, if it is echoed."""
        text = choice.echo + update.text if is_first else update.text
        if choice.submit.request.logprobs is None:
            return {"text": text, "logprobs": None}
        entries = prompt_entries(self.model, choice.submit.request, update) if is_first else []
        entries += [(*scored, offset + len(choice.echo)) for *scored, offset in update.logprobs]
        return {"text": text, "logprobs": completion_logprobs(self.model, entries)}


def finite(logprob: float) -> float:
    """A log-probability for JSON, which has no infinity."""
    return max(logprob, -9999.0)


def prompt_entries(model: ServedModel, request: Request, update: Update) -> list[tuple]:
    """The log-probabilities of an echoed prompt's tokens, as in Update.logprobs. The first token has none."""
    if request.prompt_logprobs is None:
        return []
    stream, entries = TextStream(model.tokenizer), []
    offset = 0
    for token, scored in zip(request.prompt, [(None, None), *update.prompt_logprobs]):
        entries.append((token, *scored, offset))
        offset += len(stream.add([token]))
    return entries


def completion_logprobs(model: ServedModel, entries: list[tuple]) -> dict:
    """Log-probabilities as /v1/completions has them. Of several tokens with the same text, the likeliest counts."""
    top_logprobs = []
    for token, own, best, _ in entries:
        top_logprobs.append(None if best is None else {})
        for i, logprob in [*best, (token, own)] if best is not None else ():
            top_logprobs[-1].setdefault(model.token_text(i), finite(logprob))
    return {
        "tokens": [model.token_text(token) for token, *_ in entries],
        "token_logprobs": [None if own is None else finite(own) for _, own, *_ in entries],
        "top_logprobs": top_logprobs,
        "text_offset": [offset for *_, offset in entries],
    }


def chat_logprobs(model: ServedModel, entries: list[tuple] | None) -> dict | None:
    """Log-probabilities as /v1/chat/completions has them."""
    if entries is None:
        return None

    def entry(token: int, logprob: float) -> dict:
        data = list(model.token_bytes(token))
        return {"token": model.token_text(token), "logprob": finite(logprob), "bytes": data}

    content = [entry(token, own) | {"top_logprobs": [entry(*one) for one in best]} for token, own, best, _ in entries]
    return {"content": content, "refusal": None}
