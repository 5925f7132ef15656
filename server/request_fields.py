"""The fields of a request's JSON object, and the errors that say what is wrong with them.

Read down: ApiError; FieldReader; functions that read the fields that several kinds of requests
have in common.
"""

import json
import re
import secrets

from cli import print_status
from sampling import NEUTRAL, SamplingParams
from server.parameters import refuse_constant

MAX_BODY_BYTES = 1 << 20
MAX_LOGPROBS = 20
MAX_N = 8
MAX_BIASES = 300
MAX_STOPS = 128
MAX_STOP_LENGTH = 1000  # characters
MAX_STOP_IDS = 128
MAX_LOGGED = 100  # unknown fields that are logged; the same for the places of schemas

# ---------------------------------------------------------------- errors


class ApiError(Exception):
    """A response that is an OpenAI error object.

    retry_after: seconds after which the same request may succeed."""

    def __init__(self, message: str, status=400, param: str | None = None, code: str | None = None, retry_after=None):
        super().__init__(message[:500])
        self.status = status
        self.param = param
        self.code = code
        self.retry_after = retry_after

    def body(self) -> dict:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def renamed(self, names: dict[str, str]) -> "ApiError":
        """The same error with other names in the message and the parameter.

        names: regular expression -> what replaces it."""
        message = str(self)
        param = self.param or ""
        for pattern, name in names.items():
            message = re.sub(pattern, name, message)
            param = re.sub(pattern, name, param)
        return ApiError(message, self.status, param or None, self.code, self.retry_after)


def encode_json(value) -> bytes:
    """JSON as UTF-8. A lone surrogate, which a client may have sent and an error may quote, becomes
    a question mark."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")


# ---------------------------------------------------------------- the fields of a request

KIND_NAMES = {
    int: "an integer",
    (int, float): "a number",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
    (str, list): "a string or a list",
    (dict, list): "an object or a list",
}

# Fields that would change the answer and are not supported, each with the values that change
# nothing. These are accepted, and so is null. The names are those of several APIs, because clients
# send to one server what another one knows.
NEUTRAL_VALUES = {
    # OpenAI
    "echo": [False], "suffix": [""], "tools": [[]], "tool_choice": ["none", "auto"],
    "parallel_tool_calls": [True, False], "functions": [[]], "function_call": ["none", "auto"],
    "modalities": [["text"]], "audio": [], "moderation": [], "web_search_options": [],
    "verbosity": ["medium"], "background": [False], "conversation": [], "truncation": ["disabled"],
    # vLLM and SGLang
    "use_beam_search": [False], "length_penalty": [1], "min_tokens": [0], "bad_words": [[]],
    "allowed_token_ids": [], "include_stop_str_in_output": [False], "skip_special_tokens": [True],
    "add_special_tokens": [True], "prompt_logprobs": [], "truncate_prompt_tokens": [],
    "logits_processors": [[]], "prompt_embeds": [], "include_reasoning": [True],
    "separate_reasoning": [True], "thinking_token_budget": [], "guided_grammar": [""],
    "guided_whitespace_pattern": [], "structural_tag": [], "ebnf": [""],
    "stop_regex": [[], ""], "no_stop_trim": [False],
    "chat_template": [], "chat_template_kwargs": [{}], "documents": [[]],
    "add_generation_prompt": [True], "continue_final_message": [False],
    # llama.cpp
    "grammar": [""], "grammar_lazy": [False], "samplers": [[]], "typical_p": [1], "typ_p": [1],
    "top_n_sigma": [-1, 0], "dynatemp_range": [0], "mirostat": [0], "xtc_probability": [0],
    "dry_multiplier": [0], "adaptive_target": [-1], "n_indent": [0], "min_keep": [0],
    "n_probs": [0], "n_cmpl": [1], "lora": [[]], "t_max_predict_ms": [-1, 0],
    "parse_tool_calls": [True], "reasoning_format": ["auto", "deepseek"],
    "thinking_forced_open": [False], "reasoning_budget_tokens": [-1],
    "thinking_budget_tokens": [-1], "image_data": [[]],
    # Ollama, and others
    "options": [{}], "template": [""], "raw": [False], "images": [[]], "system": [""], "think": [],
    "thinking": [], "reasoning": [{}], "thinking_budget": [], "tfs_z": [1], "tfs": [1],
    "top_a": [0], "response_schema": [], "safe_prompt": [False],
}  # fmt: skip


def parse_object(data: bytes) -> dict:
    """The JSON object in a request's body; ApiError if the body is not a JSON object."""
    try:
        body = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


class FieldReader:
    """Reads the fields of a request's JSON object, each once, and then checks those that are left.

    unread: the fields that nothing has read yet."""

    logged: set[str] = set()  # names of unknown fields; shared by all requests

    def __init__(self, body: dict):
        self.unread = dict(body)

    def read(self, name: str, kind, default=None, low: int | None = None, high: int | None = None):
        """The value of a field, or `default` if it is missing or null; ApiError if it has another
        type, or is out of bounds."""
        value = self.unread.pop(name, None)
        if value is None:
            return default
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise ApiError(f"{name} must be {KIND_NAMES[kind]}", param=name)
        if (low is not None and value < low) or (high is not None and value > high):
            bounds = f"at least {low}" if high is None else f"from {low} to {high}"
            raise ApiError(f"{name} must be {bounds}", param=name)
        return value

    def check_unread(self):
        """Refuse unsupported fields that would change the answer. Unknown fields are ignored, and
        logged once."""
        for name, value in self.unread.items():
            if name not in NEUTRAL_VALUES:
                log_once(self.logged, name, f"a request has the unknown field {name[:60]!r}, which is ignored")
            elif value is not None and not is_neutral(name, value):
                accepted = " or ".join(json.dumps(one) for one in [None, *NEUTRAL_VALUES[name]])
                text = f"{name} is not supported, except with {accepted}, which changes nothing"
                raise ApiError(text, param=name)


def log_once(logged: set[str], name: str, text: str):
    """Print a line the first time that a name comes. There is a bound, because clients may invent
    any number of names."""
    if name not in logged and len(logged) < MAX_LOGGED:
        logged.add(name)
        print_status(text)


def is_neutral(name: str, value) -> bool:
    """Whether the value of an unsupported field changes nothing. 1.0 is 1, but true is not."""
    return any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in NEUTRAL_VALUES[name])


def read_role(message, place: str, roles: tuple[str, ...]) -> str:
    """The role of a message. place: of the message in the request, for errors."""
    role = message.get("role") if isinstance(message, dict) else None
    if role not in roles:
        text = f"{place} must be an object with a role, one of {', '.join(roles)}"
        raise ApiError(text, param=f"{place}.role")
    return role


def read_token_ids(value, param: str, rule: str = "a list of token ids (integers)") -> list[int]:
    """The value if it is a list of integers; otherwise an ApiError, which says the rule."""
    if not isinstance(value, list) or not all(type(i) is int for i in value):
        raise ApiError(f"{param} must be {rule}", param=param)
    return value


def read_max_tokens(fields: FieldReader, default: int | None, low: int) -> int | None:
    """The most new tokens. None, or -1 in the request, means as many as fit into the context."""
    max_tokens = default
    for name in ("max_tokens", "max_completion_tokens", "n_predict"):  # OpenAI's two, llama.cpp's
        value = fields.read(name, int)
        if value == -1:
            max_tokens = None
        elif value is not None:
            if value < low:
                raise ApiError(f"{name} must be at least {low}, or -1 for as many as fit", param=name)
            max_tokens = value
    return max_tokens


def read_n(fields: FieldReader) -> int:
    """The number of answers to each prompt."""
    n = fields.read("n", int, 1)
    if n < 1:
        raise ApiError(f"n={n} is not supported, at least 1", param="n")
    if n > MAX_N:
        raise ApiError(f"n={n} is not supported, at most {MAX_N}", param="n")

    best_of = fields.read("best_of", int)
    if best_of not in (None, n):
        raise ApiError(f"best_of={best_of} is not supported, except if n is {best_of}, too", param="best_of")
    return n


def read_logit_bias(fields: FieldReader, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """(token id, what is added to its logit) for each token in the field, by ascending ids. The
    field is an object, or llama.cpp's list of pairs."""
    param = "logit_bias"
    given = fields.read(param, (dict, list), {})
    if isinstance(given, list):
        if not all(isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int for pair in given):
            raise ApiError(f"{param} must be an object, or a list of pairs [token id, bias]", param=param)
        given = {str(token): bias for token, bias in given}
    if len(given) > MAX_BIASES:
        raise ApiError(f"{param} has {len(given)} tokens, at most {MAX_BIASES} are allowed", param=param)

    biases = {}
    for token, bias in given.items():
        if not re.fullmatch("[0-9]{1,9}", token) or int(token) >= vocab_size:
            raise ApiError(f"{param}: {token[:20]!r} is not one of the {vocab_size} token ids", param=param)
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise ApiError(f"{param} of token {token} must be a number from -100 to 100", param=param)
        biases[int(token)] = bias
    return tuple(sorted(biases.items()))


def read_sampling_params(fields: FieldReader, vocab_size: int, defaults: SamplingParams = NEUTRAL) -> SamplingParams:
    """The settings in a request; `defaults` has those that it does not name."""
    names = defaults.numbers().keys() - {"top_k", "seed"}
    values = {name: fields.read(name, (int, float), getattr(defaults, name)) for name in sorted(names)}
    repeat_penalty = fields.read("repeat_penalty", (int, float))  # llama.cpp's name for it
    if repeat_penalty is not None:
        values["repetition_penalty"] = repeat_penalty
    top_k = fields.read("top_k", int, defaults.top_k)
    if top_k == -1:  # other servers' value for all tokens, here 0
        top_k = 0
    seed = fields.read("seed", int, -1)
    if seed == -1:  # other servers' value for a random seed
        seed = secrets.randbits(62)
    values["logit_bias"] = read_logit_bias(fields, vocab_size)

    try:
        params = SamplingParams(**values, top_k=top_k, seed=seed)
    except ValueError as error:
        raise ApiError(str(error), param=str(error).split()[0]) from None
    if fields.read("repeat_last_n", int, -1) != -1 and params.penalizes:  # llama.cpp's
        text = "repeat_last_n is not supported, except with -1: penalties apply to all tokens"
        raise ApiError(text, param="repeat_last_n")
    return params


def read_stop_strings(fields: FieldReader, name: str = "stop") -> tuple[str, ...]:
    """The stop strings in a field. Empty ones are ignored."""
    stop = fields.read(name, (str, list), [])
    if isinstance(stop, str):
        stop = [stop]
    if len(stop) > MAX_STOPS or not all(isinstance(s, str) and len(s) <= MAX_STOP_LENGTH for s in stop):
        rule = f"a string or a list of up to {MAX_STOPS} strings, each of up to {MAX_STOP_LENGTH} characters"
        raise ApiError(f"{name} must be {rule}", param=name)
    return tuple(s for s in stop if s)


def read_stop_ids(fields: FieldReader, eos_ids: frozenset[int]) -> frozenset[int]:
    """The ids of the tokens that end an answer: those in the request, and `eos_ids` unless it
    ignores them."""
    stop_ids = read_token_ids(fields.read("stop_token_ids", list, []), "stop_token_ids")
    # There is a bound, because each prompt of a request has its own copy in the engine's process.
    if len(stop_ids) > MAX_STOP_IDS:
        raise ApiError(f"stop_token_ids must be up to {MAX_STOP_IDS} ids", param="stop_token_ids")
    if fields.read("ignore_eos", bool, False):
        return frozenset(stop_ids)
    return eos_ids.union(stop_ids)


def read_stream_options(fields: FieldReader) -> dict[str, bool]:
    """The fields of a CompletionRequest that are about streaming."""
    stream = fields.read("stream", bool, False)
    options = fields.read("stream_options", dict)
    if options is not None and not stream:
        raise ApiError("stream_options needs stream: true", param="stream_options")
    options = FieldReader(options or {})
    return {
        "stream": stream,
        "include_usage": options.read("include_usage", bool, False),
        "continuous_usage": options.read("continuous_usage_stats", bool, False),
    }
