"""What all models of requests have in common, and the errors that say what is wrong with a request.

Read down: ApiError; parse_object, which reads a body; Fields, the base of the models; the error for
a value that does not fit its model; the fields that are not supported. openai_requests.py,
responses_requests.py and anthropic_requests.py have the models.
"""

import json
import re
import reprlib
from typing import Annotated, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, create_model, model_validator

from cli import print_status
from server.parameters import refuse_constant
from server.tools import NAME_PATTERN

MAX_BODY_BYTES = 1 << 20
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


def parse_object(data: bytes) -> dict:
    """The JSON object in a request's body; ApiError if the body is not a JSON object."""
    try:
        body = json.loads(data, parse_constant=refuse_constant)
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    return body


# ---------------------------------------------------------------- models

Value = TypeVar("Value")
# Reading ends with the first wrong value, because a body may have a million of them.
ListOf = Annotated[list[Value], Field(fail_fast=True)]
Name = Annotated[str, Field(pattern=f"^{NAME_PATTERN}$")]  # of a function


class Fields(BaseModel):
    """The fields of a JSON object in a request.

    Types are strict: true is not 1, and "5" is not 5. null is the same as a missing field.
    """

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)
    logged: ClassVar[set[str]] = set()  # names of unknown fields; shared by all requests

    @model_validator(mode="before")
    @classmethod
    def without_nulls(cls, value):
        if isinstance(value, dict) and None in value.values():
            return {key: one for key, one in value.items() if one is not None}
        return value

    @classmethod
    def read(cls, body: dict):
        """The model of a request's body. ApiError for a value that does not fit, or that would change
        the answer and is not supported. Unknown fields are ignored, and logged once."""
        try:
            request = cls.model_validate(body)
        except ValidationError as failure:
            raise field_error(failure, body) from None
        request.check_further()
        return request

    def check_further(self):
        """Check the fields that are not in the model."""
        for name, value in self.model_extra.items():
            if name not in NEUTRAL_VALUES:
                log_once(self.logged, name, f"a request has the field {name[:60]!r}, which is ignored")
                continue
            accepted = NEUTRAL_VALUES[name]  # 1.0 is 1, but true is not
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
                values = " or ".join(json.dumps(one) for one in [None, *accepted])
                raise ApiError(f"{name} is not supported, except with {values}, which changes nothing", param=name)


def tagged(kind: str, tag: str = "type", **fields) -> type[Fields]:
    """The model of an object whose field `tag` is `kind`. fields: the type of each other one, or its type
    and default."""
    pairs = {name: one if isinstance(one, tuple) else (one, ...) for name, one in fields.items()}
    return create_model(kind, __base__=Fields, **{tag: (Literal[kind], ...)}, **pairs)


def at_most(n: int) -> BeforeValidator:
    """A bound for the entries of an object, before each of them is checked."""

    def check(value):
        if isinstance(value, dict | list) and len(value) > n:
            raise ValueError(f"must have at most {n} entries")
        return value

    return BeforeValidator(check)


def field_error(failure: ValidationError, body: dict) -> ApiError:
    """The error for the value that does not fit. If a field may have several types, each has an error of
    its own: the errors at the deepest place count, whose type fits best."""
    places: dict[tuple, list[dict]] = {}
    for error in failure.errors(include_url=False):
        places.setdefault(place_of(error, body), []).append(error)
    place = max(places, key=len)
    errors = places[place]

    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part[:64]}" for part in place).removeprefix(".")
    rules = "\n".join(dict.fromkeys(error["msg"] for error in errors))
    for pattern, text in REWORDED.items():
        rules = re.sub(pattern, text, rules)
    if errors[0]["type"] != "missing":
        came = errors[0].get("ctx", {}).get("tag", errors[0]["input"])
        rules += f": {reprlib.repr(came)}"
    return ApiError(f"{param or 'a name'} {rules}", param=param or None)


# Patterns of pydantic's texts, and this server's. A line is a type that the field may have.
REWORDED = {
    "Value error, ": "", "Input should be ": "must be ", "a valid integer": "an integer",
    "a valid boolean": "true or false", "a valid dictionary.*": "an object", "a valid ": "a ",
    ", unable to parse.*": " of valid Unicode", "greater than or equal to": "at least",
    "less than or equal to": "at most", "(String|List|Dictionary) should": "must", "Field required": "is missing",
    "Input tag .* expected tags:": "must be one of", "Unable to extract tag.*": "is missing",
    "Extra inputs are not permitted": "is not supported", "\nmust be |\n": " or ",
}  # fmt: skip


def place_of(error: dict, body) -> tuple:
    """The keys and indices that lead to the value of an error, without the names of types that pydantic
    writes between them."""
    place = ()
    value = body
    for part in error["loc"]:
        if isinstance(part, int) or (isinstance(value, dict) and value.get(part) is not None):
            place += (part,)
            value = value[part]
    if error["type"] == "missing":
        place += error["loc"][-1:]
    elif error["type"].startswith("union_tag"):
        place += (error["ctx"]["discriminator"].strip("'"),)
    return place


# ---------------------------------------------------------------- fields that are not supported

# Fields that would change the answer and are not supported, each with the values that change
# nothing. These are accepted, and so is null. The names come from several APIs, because clients
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
    "stop_regex": [[], ""], "no_stop_trim": [False], "normalize": [True], "use_activation": [True],
    "chat_template": [], "chat_template_kwargs": [{}], "documents": [[]],
    "add_generation_prompt": [True], "continue_final_message": [False],
    # llama.cpp
    "grammar": [""], "grammar_lazy": [False], "samplers": [[]], "typical_p": [1], "typ_p": [1],
    "top_n_sigma": [-1, 0], "dynatemp_range": [0], "mirostat": [0], "xtc_probability": [0],
    "dry_multiplier": [0], "adaptive_target": [-1], "n_indent": [0], "min_keep": [0],
    "n_probs": [0], "n_cmpl": [1], "lora": [[]], "t_max_predict_ms": [-1, 0],
    "embd_normalize": [2], "parse_tool_calls": [True], "reasoning_format": ["auto", "deepseek"],
    "thinking_forced_open": [False], "reasoning_budget_tokens": [-1],
    "thinking_budget_tokens": [-1], "image_data": [[]],
    # Anthropic
    "mcp_servers": [[]], "container": [], "thread": [],
    # Ollama, and others
    "options": [{}], "template": [""], "raw": [False], "images": [[]], "system": [""], "think": [],
    "thinking": [], "reasoning": [{}], "thinking_budget": [], "tfs_z": [1], "tfs": [1],
    "top_a": [0], "response_schema": [], "safe_prompt": [False],
}  # fmt: skip


def log_once(logged: set[str], name: str, text: str):
    """Print a line the first time that a name comes. There is a bound, because clients may invent
    any number of names."""
    if name not in logged and len(logged) < MAX_LOGGED:
        logged.add(name)
        print_status(text)
