"""OpenAI's API as data: from the JSON of a request to requests to the engine, and from what comes of them to JSON.

Read down: Event, what a step brings; errors; what a request asks for: Fields, Wishes, ServedModel, which reads a body;
then how the answers of each kind look, whole and in chunks. What is HTTP is in http_server.py.

Sources: OpenAI's API reference; vLLM's extensions of it (stop_token_ids, ignore_eos, min_p, continuous_usage_stats,
/tokenize ...); Hugging Face's text-generation-inference (/generate, /generate_stream).
"""

import json
import secrets
import time
from dataclasses import dataclass, field
from typing import NamedTuple

from checkpoint import TokenizerFiles
from cli import UserError, print_status
from engine import Request, check_prompt
from model import Config
from sampling import SamplingParams
from tokenizer import ChatTemplate, TextStream, Tokenizer

MAX_BODY, MAX_PROMPTS, MAX_LOGPROBS = 1 << 20, 128, 20
MAX_STOPS, MAX_STOP_LENGTH, MAX_STOP_IDS = 4, 1000, 128


class Event(NamedTuple):
    """What a step has brought a request: the text that it completes, and how far the request is."""

    key: int
    text: str
    tokens: int  # new ones so far
    cached: int  # tokens of the prompt that were not read again
    # (id, log-probability, [(id, log-probability), ...], offset in the text) of each token of the text, and the same of
    # the prompt without offsets, with the first event; empty where not asked for
    logprobs: list[tuple]
    prompt_logprobs: list[tuple]
    reason: str | None  # "stop", "length", "cancelled" or "error"; None: it goes on
    error: str | None


# ---------------------------------------------------------------- errors


class ApiError(Exception):
    """An answer that is an OpenAI error object. retry_after: seconds, where the same may succeed later."""

    def __init__(self, message: str, status=400, param: str | None = None, code: str | None = None, retry_after=None):
        super().__init__(message[:500])
        self.status, self.param, self.code, self.retry_after = status, param, code, retry_after

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def encode(value) -> bytes:
    """JSON; a lone surrogate, which a client may have sent and an error may name, becomes a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


# ---------------------------------------------------------------- what a request asks for

KINDS = {int: "an integer", (int, float): "a number", bool: "true or false", str: "a string", list: "a list"}
KINDS |= {dict: "an object", (str, list): "a string or a list"}

# What we do not have, by the values with which it changes nothing. (null changes nothing anywhere.)
NEUTRAL = {
    "n": [1], "best_of": [1], "echo": [False], "suffix": [""], "logit_bias": [{}],
    "response_format": [{"type": "text"}], "tools": [[]], "tool_choice": ["none", "auto"],
    "functions": [[]], "function_call": ["none", "auto"],
    "modalities": [["text"]], "audio": [], "prediction": [], "web_search_options": [],
    "use_beam_search": [False], "length_penalty": [1], "typical_p": [1], "min_tokens": [0], "bad_words": [[]],
    "include_stop_str_in_output": [False], "skip_special_tokens": [True], "add_special_tokens": [True],
    "prompt_logprobs": [], "truncate_prompt_tokens": [], "structured_outputs": [], "logits_processors": [[]],
    "guided_json": [], "guided_regex": [], "guided_choice": [], "guided_grammar": [],
    "chat_template": [], "chat_template_kwargs": [{}], "documents": [[]],
    "add_generation_prompt": [True], "continue_final_message": [False],
    "watermark": [False], "truncate": [], "grammar": [], "adapter_id": [], "top_n_tokens": [0],
}  # fmt: skip


class Fields:
    """The fields of a request's JSON object, each read once."""

    unknown: set[str] = set()  # names that have been logged

    def __init__(self, body: dict):
        self.body, self.left = body, dict(body)

    def take(self, name: str, kind, default=None, low: int | None = None, high: int | None = None):
        """The value of a field, `default` where it is not there or null; ApiError where it is of another kind."""
        value = self.left.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(f"{name} must be {KINDS[kind]}", param=name)
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ApiError(f"{name} must be {bounds}", param=name)
        return value

    def done(self):
        """Refuse what is left and would change the answer; log the rest once."""
        for name, value in self.left.items():
            if name in NEUTRAL:
                if value is not None and not any(value == one and type(value) is type(one) for one in NEUTRAL[name]):
                    raise ApiError(f"{name} is not supported here, other than with its neutral value", param=name)
            elif name not in self.unknown and len(self.unknown) < 100:
                self.unknown.add(name)
                print_status(f"a request has the field {name[:60]!r}, which is ignored")


@dataclass
class Ask:
    """A prompt that is to be continued."""

    request: Request
    stop: tuple[str, ...]
    continues: bool
    text: str = ""  # of the prompt, where it is to be echoed
    # What has come of it:
    pieces: list[str] = field(default_factory=list)
    logprobs: list[tuple] = field(default_factory=list)
    prompt_logprobs: list[tuple] = field(default_factory=list)
    tokens: int = 0
    cached: int = 0
    reason: str | None = None

    def note(self, event: Event):
        self.pieces.append(event.text)
        self.logprobs += event.logprobs
        self.prompt_logprobs += event.prompt_logprobs
        self.tokens, self.cached, self.reason = event.tokens, event.cached, event.reason


@dataclass
class Wishes:
    """What an HTTP request asks for."""

    asks: list[Ask]
    stream: bool = False
    include_usage: bool = False
    continuous_usage: bool = False
    details: bool = False  # of /generate
    id: str = ""
    created: int = field(default_factory=lambda: int(time.time()))

    def usage(self) -> dict:
        read, written = sum(len(ask.request.prompt) for ask in self.asks), sum(ask.tokens for ask in self.asks)
        cached = {"cached_tokens": sum(ask.cached for ask in self.asks)}
        found = {"prompt_tokens": read, "completion_tokens": written, "total_tokens": read + written}
        return found | {"prompt_tokens_details": cached}


def parse_object(data: bytes) -> dict:
    """The JSON object that a body is."""

    def refuse(constant: str):
        raise ValueError(f"{constant} is not JSON")

    try:
        body = json.loads(data, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


class ServedModel:
    """The served model as requests see it: its name, its texts, what fits into it."""

    def __init__(self, config: Config, files: TokenizerFiles, name: str, length: int):
        """length: positions of context."""
        self.name, self.length = name, length
        self.config, self.tokenizer = config, Tokenizer(files)
        self.template, self.no_template = None, ""
        try:
            self.template = ChatTemplate(files, self.tokenizer)
        except UserError as error:
            self.no_template = "the model has no chat template: use /v1/completions"
            if "has no chat template" not in str(error):
                print_status(f"no conversations: {error}")
        vocabulary = self.tokenizer.vocabulary
        names = dict(enumerate(vocabulary.tokens())) if vocabulary else {}
        self.special = {i: (names.get(i) or "").encode() for i in vocabulary.special_ids} if vocabulary else {}
        self.ends = frozenset(self.tokenizer.eos_ids)
        self.chat_ends = self.ends | (self.template.end_ids() if self.template else set())
        self.created = int(time.time())

    # ------------------------------------------------------------ text and tokens

    def encode(self, text: str, param: str, add_bos: bool = True) -> list[int]:
        if self.tokenizer.vocabulary is None:
            raise ApiError("the model has no tokenizer: send token ids", param=param)
        try:
            return self.tokenizer.encode(text, add_bos)
        except UserError as error:
            raise ApiError(str(error), param=param) from None

    def ids(self, value, param: str, rule: str = "a list of token ids (integers)") -> list[int]:
        if not isinstance(value, list) or not all(type(i) is int for i in value):
            raise ApiError(f"{param} must be {rule}", param=param)
        return value

    def prompts(self, value) -> list[tuple[list[int], str | None]]:
        """(ids, text) of each prompt of a completion; text is None where ids were sent."""
        several = isinstance(value, list) and bool(value) and isinstance(value[0], (str, list))
        values = value if several else [value]
        if len(values) > MAX_PROMPTS:
            raise ApiError(f"there are {len(values)} prompts; {MAX_PROMPTS} can be sent at once", param="prompt")
        texts = [one if isinstance(one, str) else None for one in values]
        rule = "text, a list of texts, token ids or a list of lists of them"
        return [
            (self.ids(one, "prompt", rule) if text is None else self.encode(text, "prompt"), text)
            for one, text in zip(values, texts)
        ]

    def conversation(self, messages) -> list[int]:
        """The token ids of a chat's messages."""
        if self.template is None:
            raise ApiError(self.no_template, param="messages")
        if not isinstance(messages, list) or not messages:
            raise ApiError("messages must be a list with at least one message", param="messages")
        turns = [self.message(message, f"messages[{i}]") for i, message in enumerate(messages)]
        try:
            return self.template.encode(turns)
        except UserError as error:
            line = str(error).replace(f"{self.template.path}: ", "")  # a path is nobody's business
            raise ApiError(line, param="messages") from None

    @staticmethod
    def message(message, name: str) -> dict:
        roles = ("system", "developer", "user", "assistant")
        if not isinstance(message, dict) or message.get("role") not in roles:
            raise ApiError(f"{name} must be an object with a role, one of {', '.join(roles)}", param=f"{name}.role")
        content, role = message.get("content"), message["role"]
        if message.get("tool_calls") or message.get("function_call"):
            raise ApiError(f"{name}: tools are not supported here", param=f"{name}.tool_calls")
        if isinstance(content, list):
            parts = [part.get("text") if isinstance(part, dict) else None for part in content]
            kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
            if not all(kind == "text" and isinstance(text, str) for kind, text in zip(kinds, parts)):
                raise ApiError(f"{name}.content: only parts of type text are supported", param=f"{name}.content")
            content = "".join(parts)
        if not isinstance(content, str):
            raise ApiError(f"{name}.content must be a string or a list of text parts", param=f"{name}.content")
        return {"role": "system" if role == "developer" else role, "content": content}

    def token_bytes(self, token: int) -> bytes:
        """A token by itself, as logprobs show it; special tokens, too."""
        if self.tokenizer.vocabulary is None:
            return b"<%d>" % token
        return self.special[token] if token in self.special else self.tokenizer.vocabulary.token_bytes(token)

    def token_text(self, token: int) -> str:
        data = self.token_bytes(token)
        try:
            return data.decode()
        except UnicodeDecodeError:  # part of a character
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    # ------------------------------------------------------------ what is asked for

    def check_name(self, fields: Fields):
        name = fields.take("model", str, self.name)
        if name != self.name:
            raise ApiError(f"the model {name!r} does not exist; here is {self.name}", 404, "model", "model_not_found")

    def params(self, fields: Fields, temperature: float = 1.0) -> SamplingParams:
        numbers = {"temperature": temperature, "top_p": 1.0, "min_p": 0.0, "repetition_penalty": 1.0}
        numbers |= {"frequency_penalty": 0.0, "presence_penalty": 0.0}
        values = {name: fields.take(name, (int, float), default) for name, default in numbers.items()}
        top_k = fields.take("top_k", int, 0)
        seed = fields.take("seed", int, None)
        seed = secrets.randbits(62) if seed is None else seed
        try:
            return SamplingParams(**values, top_k=0 if top_k == -1 else top_k, seed=seed)
        except ValueError as error:
            param = "min_p" if values["min_p"] == 1 else str(error).split()[0]
            raise ApiError(str(error), param=param) from None

    def stops(self, fields: Fields, name: str = "stop") -> tuple[str, ...]:
        stop = fields.take(name, (str, list), [])
        stop = [stop] if isinstance(stop, str) else stop
        if len(stop) > MAX_STOPS or not all(isinstance(s, str) and 0 < len(s) <= MAX_STOP_LENGTH for s in stop):
            rule = f"a text or up to {MAX_STOPS}, each of 1 to {MAX_STOP_LENGTH} characters"
            raise ApiError(f"{name} must be {rule}", param=name)
        return tuple(stop)

    def ends_of(self, fields: Fields, ends: frozenset[int]) -> frozenset[int]:
        more = self.ids(fields.take("stop_token_ids", list, []), "stop_token_ids")
        if len(more) > MAX_STOP_IDS:  # each prompt of a request has its own copy of them
            raise ApiError(f"stop_token_ids must be up to {MAX_STOP_IDS} ids", param="stop_token_ids")
        return frozenset(more) | (frozenset() if fields.take("ignore_eos", bool, False) else ends)

    def check_length(self, prompt: list[int], new: int | None, param: str, low=1, limit="max_tokens") -> int:
        """How many tokens may follow a prompt; ApiError where it does not fit into the context.

        param, limit: the parameters that the prompt and `new` come from.
        """
        try:
            check_prompt(prompt, self.config, self.length)
        except UserError as error:
            code = "context_length_exceeded" if len(prompt) > self.length else None
            raise ApiError(str(error), param=param, code=code) from None
        room = self.length - len(prompt)
        wanted = room if new is None else new
        if wanted > room or wanted < low:
            text = f"the context has {self.length} tokens; the prompt has {len(prompt)} and {wanted} more are wanted"
            raise ApiError(text, param=param if room < low else limit, code="context_length_exceeded")
        return wanted

    def stream_options(self, fields: Fields) -> dict:
        stream, given = fields.take("stream", bool, False), fields.take("stream_options", dict)
        if given is not None and not stream:
            raise ApiError("stream_options needs stream: true", param="stream_options")
        options = Fields(given or {})
        found = {"include_usage": options.take("include_usage", bool, False)}
        found["continuous_usage"] = options.take("continuous_usage_stats", bool, False)
        return found | {"stream": stream}

    def completion(self, body: dict) -> Wishes:
        """What the body of /v1/completions asks for."""
        fields = Fields(body)
        self.check_name(fields)
        prompts = self.prompts(fields.left.pop("prompt", None))
        new = fields.take("max_tokens", int, 16, 0)
        new = fields.take("max_completion_tokens", int, new, 0)
        n = fields.take("logprobs", int, None, 0, MAX_LOGPROBS)
        echo, params, stop = fields.take("echo", bool, False), self.params(fields), self.stops(fields)
        ends, options = self.ends_of(fields, self.ends), self.stream_options(fields)
        fields.done()
        asks = []
        for ids, text in prompts:
            self.check_length(ids, new, "prompt", 0)
            shown = "" if not echo else self.tokenizer.decode(ids) if text is None else text
            request = Request(ids, params, new, ends, logprobs=n, prompt_logprobs=n if echo else None)
            asks.append(Ask(request, stop, True, shown))
        return Wishes(asks, id=f"cmpl-{secrets.token_hex(12)}", **options)

    def chat(self, body: dict) -> Wishes:
        """What the body of /v1/chat/completions asks for."""
        fields = Fields(body)
        self.check_name(fields)
        ids = self.conversation(fields.left.pop("messages", None))
        new = fields.take("max_tokens", int, None, 1)
        new = fields.take("max_completion_tokens", int, new, 1)
        wanted = fields.take("logprobs", bool, False)
        n = fields.take("top_logprobs", int, None, 0, MAX_LOGPROBS)
        if n is not None and not wanted:
            raise ApiError("top_logprobs needs logprobs: true", param="top_logprobs")
        params, stop, ends = self.params(fields), self.stops(fields), self.ends_of(fields, self.chat_ends)
        options = self.stream_options(fields)
        fields.done()
        new = self.check_length(ids, new, "messages")
        request = Request(ids, params, new, ends, logprobs=(n or 0) if wanted else None)
        return Wishes([Ask(request, stop, False)], id=f"chatcmpl-{secrets.token_hex(12)}", **options)

    def tgi(self, body: dict, stream: bool) -> Wishes:
        """What the body of /generate or /generate_stream asks for, as text-generation-inference understands it."""
        outer = Fields(body)
        text, stream = outer.take("inputs", str), outer.take("stream", bool, stream)
        fields = Fields(outer.take("parameters", dict, {}))
        outer.done()
        if text is None:
            raise ApiError("inputs must be a string", param="inputs")
        new, seed = fields.take("max_new_tokens", int, 100, 1), fields.take("seed", (int, float))
        if isinstance(seed, float):  # which the load test of the BLOOM story sends
            seed = int.from_bytes(str(seed).encode()[-7:], "little")
        sampled = fields.take("do_sample", bool, False)
        sampled |= any(fields.body.get(name) is not None for name in ("temperature", "top_k", "top_p", "typical_p"))
        fields.left["seed"] = seed
        params = self.params(fields, 1.0 if sampled else 0.0)
        stop = self.stops(fields) or self.stops(fields, "stop_sequences")
        echo, details = fields.take("return_full_text", bool, False), fields.take("details", bool, False)
        fields.take("decoder_input_details", bool)
        fields.done()
        ids = self.encode(text, "inputs")
        self.check_length(ids, new, "inputs", limit="max_new_tokens")
        request = Request(ids, params, new, self.ends, logprobs=0)
        return Wishes([Ask(request, stop, True, text if echo else "")], stream, details=details)

    def tokenize(self, body: dict) -> dict:
        """The answer of /tokenize: the ids of a text, or of a conversation."""
        fields = Fields(body)
        self.check_name(fields)
        add_bos = fields.take("add_special_tokens", bool, True)
        if "messages" in fields.left:
            ids = self.conversation(fields.left.pop("messages"))
        else:
            text = fields.take("prompt", str)
            if text is None:
                raise ApiError("prompt must be a string", param="prompt")
            ids = self.encode(text, "prompt", add_bos)
        found = {"count": len(ids), "max_model_len": self.length, "tokens": ids}
        if fields.take("return_token_strs", bool, False):
            found["token_strs"] = [self.token_text(i) for i in ids]
        fields.done()
        return found

    def detokenize(self, body: dict) -> dict:
        fields = Fields(body)
        self.check_name(fields)
        ids, V = self.ids(fields.left.pop("tokens", None), "tokens"), self.config.vocab_size
        fields.done()
        if outside := [i for i in ids if not 0 <= i < V]:
            raise ApiError(f"token id {outside[0]} is outside the vocabulary of {V} (0 to {V - 1})", param="tokens")
        return {"prompt": self.tokenizer.decode(ids)}

    def tokenizer_info(self) -> dict:
        """As clients that tokenize by this server want it (lm-eval)."""
        template = self.template.source if self.template else None
        return self.tokenizer.named_tokens | {"chat_template": template, "model_max_length": self.length}

    def named_card(self, name: str) -> dict:
        self.check_name(Fields({"model": name}))
        return self.card()

    def card(self) -> dict:
        """The model in /v1/models."""
        about = {"id": self.name, "object": "model", "created": self.created, "owned_by": "fastpath"}
        return about | {"max_model_len": self.length}


# ---------------------------------------------------------------- how answers look


class OpenAIAnswer:
    """The answer of /v1/completions, or of /v1/chat/completions, whole or in chunks."""

    end = b"data: [DONE]\n\n"  # of a stream

    def __init__(self, model: ServedModel, wishes: Wishes):
        self.model, self.wishes, self.chat = model, wishes, wishes.id.startswith("chat")
        kind = "chat.completion" + ".chunk" * wishes.stream if self.chat else "text_completion"
        self.head = {"id": wishes.id, "object": kind, "created": wishes.created, "model": model.name}

    def chunks(self, i: int, event: Event) -> list[dict]:
        """What a step has brought the i-th prompt, for the stream; nothing where it ended within a character."""
        ask = self.wishes.asks[i]
        first = not ask.pieces
        ask.note(event)
        if not (event.text or event.logprobs or event.reason or first):
            return []
        if self.chat:
            delta = {"role": "assistant"} if first else {}
            delta |= {"content": event.text} if first or event.text else {}
            logprobs = chat_logprobs(self.model, event.logprobs) if event.logprobs else None
            choice = {"index": i, "delta": delta, "logprobs": logprobs, "finish_reason": event.reason}
        else:
            choice = self.completion_choice(i, event.text, event.logprobs, event.reason, first)
        return [self.head | {"choices": [choice]} | self.usage_so_far()]

    def usage_so_far(self) -> dict:
        if self.wishes.continuous_usage:
            return {"usage": self.wishes.usage()}
        return {"usage": None} if self.wishes.include_usage else {}

    def last(self) -> list[dict]:
        """The chunks after all Events."""
        return [self.head | {"choices": [], "usage": self.wishes.usage()}] if self.wishes.include_usage else []

    def whole(self) -> dict:
        """The answer at once, when all Events have been noted."""
        choices = []
        for i, ask in enumerate(self.wishes.asks):
            text = "".join(ask.pieces)
            if self.chat:
                logprobs = None if ask.request.logprobs is None else chat_logprobs(self.model, ask.logprobs)
                message = {"role": "assistant", "content": text, "refusal": None}
                choices.append({"index": i, "message": message, "logprobs": logprobs, "finish_reason": ask.reason})
            else:
                choices.append(self.completion_choice(i, text, ask.logprobs, ask.reason, True))
        return self.head | {"choices": choices, "usage": self.wishes.usage()}

    def completion_choice(self, i: int, text: str, logprobs: list[tuple], reason: str | None, first: bool) -> dict:
        """first: this is where an echoed prompt belongs."""
        ask, scores = self.wishes.asks[i], None
        if ask.request.logprobs is not None:
            entries = prompt_entries(self.model, ask) if first else []
            entries += [(*scored, offset + len(ask.text)) for *scored, offset in logprobs]
            scores = legacy_logprobs(self.model, entries)
        return {"index": i, "text": ask.text * first + text, "logprobs": scores, "finish_reason": reason}


def finite(logprob: float) -> float:
    """JSON has no infinity."""
    return max(logprob, -9999.0)


def prompt_entries(model: ServedModel, ask: Ask) -> list[tuple]:
    """Of an echoed prompt's tokens what Event.logprobs has of new ones; the first has no probability."""
    if ask.request.prompt_logprobs is None:
        return []
    stream, at, entries = TextStream(model.tokenizer), 0, []
    for token, scored in zip(ask.request.prompt, [(None, None), *ask.prompt_logprobs]):
        entries.append((token, *scored, at))
        at += len(stream.add([token]))
    return entries


def legacy_logprobs(model: ServedModel, entries: list[tuple]) -> dict:
    """As completions have them. Of tokens with the same text the likeliest counts."""
    tops = []
    for token, own, best, _ in entries:
        tops.append(None if best is None else {})
        for i, logprob in [*best, (token, own)] if best is not None else ():
            tops[-1].setdefault(model.token_text(i), finite(logprob))
    return {
        "tokens": [model.token_text(token) for token, *_ in entries],
        "token_logprobs": [None if own is None else finite(own) for _, own, *_ in entries],
        "top_logprobs": tops,
        "text_offset": [offset for *_, offset in entries],
    }


def chat_logprobs(model: ServedModel, entries: list[tuple]) -> dict:
    """As chats have them."""

    def scored(token: int, logprob: float) -> dict:
        data = list(model.token_bytes(token))
        return {"token": model.token_text(token), "logprob": finite(logprob), "bytes": data}

    found = [scored(token, own) | {"top_logprobs": [scored(*one) for one in best]} for token, own, best, _ in entries]
    return {"content": found, "refusal": None}


class TgiAnswer:
    """The answer of text-generation-inference's /generate and /generate_stream."""

    end = b""

    def __init__(self, model: ServedModel, wishes: Wishes):
        self.model, self.wishes, self.ask, self.count = model, wishes, wishes.asks[0], 0

    def tokens(self, text: str, entries: list[tuple], start: int) -> list[dict]:
        """The tokens of a text that begins at `start`, each with its part of it."""
        places = [offset - start for *_, offset in entries] + [len(text)]
        special = self.ask.request.stop_ids
        return [
            {"id": token, "text": text[max(0, a) : b], "logprob": finite(own), "special": token in special}
            for (token, own, *_), a, b in zip(entries, places, places[1:])
        ]

    def chunks(self, i: int, event: Event) -> list[dict]:
        start = sum(map(len, self.ask.pieces))
        self.ask.note(event)
        found = self.tokens(event.text, event.logprobs, start)
        if event.reason and not found:  # a stop string, whose tokens are not told
            found = [{"id": 0, "text": event.text, "logprob": 0.0, "special": True}]
        chunks = []
        for token in found:
            self.count += 1
            chunks.append({"index": self.count, "token": token, "generated_text": None, "details": None})
        if event.reason:
            chunks[-1] |= {"generated_text": self.text(), "details": self.details()}
        return chunks

    def last(self) -> list[dict]:
        return []

    def text(self) -> str:
        return self.ask.text + "".join(self.ask.pieces)

    def details(self) -> dict:
        ended = bool(self.ask.logprobs) and self.ask.logprobs[-1][0] in self.ask.request.stop_ids
        reason = "length" if self.ask.reason == "length" else "eos_token" if ended else "stop_sequence"
        seed = self.ask.request.params.seed
        return {"finish_reason": reason, "generated_tokens": self.ask.tokens, "seed": seed, "prefill": []}

    def whole(self) -> dict:
        if not self.wishes.details:
            return {"generated_text": self.text()}
        tokens = self.tokens("".join(self.ask.pieces), self.ask.logprobs, 0)
        return {"generated_text": self.text(), "details": self.details() | {"tokens": tokens}}
