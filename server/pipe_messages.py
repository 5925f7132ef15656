"""The messages between the HTTP process (http_server.py) and the engine's process (serve.py).

Read down: Settings, the first message to the HTTP process; TextRequest and Cancel, its messages to
the engine; Update and EngineStatus, the engine's answers. They are pickled and go through a pipe.
This file imports no web library, so the engine's process needs none.
"""

from dataclasses import dataclass, field

from config import Config
from engine import Request
from sampling import NEUTRAL, SamplingParams
from server.answers import AnswerSyntax, Event
from text.grammar import ThinkingBudget
from text.tokenizer import TokenizerFiles


@dataclass
class Settings:
    """What the HTTP process has to know about the model and the server's options."""

    config: Config
    tokenizer_files: TokenizerFiles
    model_name: str
    context_length: int  # tokens of prompt and answer together
    max_batch_size: int  # requests that run at the same time
    max_queue: int  # requests that may wait for a row
    api_key: str | None
    strict_model: bool = False  # whether requests that name another model are refused
    sampling: SamplingParams = NEUTRAL  # the settings of requests that name none
    quiet: bool = True  # whether no line is printed when a request ends


@dataclass
class TextRequest:
    """Asks the engine to continue a prompt. An HTTP request for several answers sends one message
    for each of them.

    The HTTP process uses stop, continues_prompt, shown_ids and syntax itself: see AnswerText.
    """

    request_id: int
    # The engine's own request, which has token ids only. The engine's process sets its on_token and
    # its grammar.
    request: Request
    stop: tuple[str, ...] = ()  # stop strings end the text, or the content of a chat's answer
    continues_prompt: bool = True  # False in a chat, where an answer is a text of its own
    grammar: str | None = None  # the source of a grammar (text/grammar.py) that the answer must fit
    thinking: ThinkingBudget | None = None  # None: thoughts may have any length
    # Special tokens that count as text, such as the marks of tool calls.
    shown_ids: frozenset[int] = frozenset()
    # Whether the request fails if it waits too long for a row. Only the first message of an HTTP
    # request does: while that one runs, the others may wait.
    can_time_out: bool = True
    syntax: AnswerSyntax | None = None  # of a chat's answer; None: all text is content


@dataclass
class Cancel:
    """Asks the engine to end a request whose answer is no longer needed."""

    request_id: int


@dataclass
class Update:
    """What a step of the engine has added to a request."""

    request_id: int
    # The text of the new tokens, up to a stop string, but the whole text in a chat. Only the HTTP
    # process knows it, as it knows the fields `events` and `stop_string`: see AnswerText.read.
    text: str
    completion_tokens: int  # all tokens that were generated so far
    cached_tokens: int = 0  # prompt tokens that were reused from a cache row
    # For each new token, if the request wants it: (id, log-probability, [(id, log-probability), ...]
    # of the likeliest ids). AnswerText adds the offset in the text, and holds back the tokens that may
    # be part of a stop string.
    logprobs: list[tuple] = field(default_factory=list)
    # The same without offsets for the tokens of the prompt, in the first update only.
    prompt_logprobs: list[tuple] = field(default_factory=list)
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"; None: more follows
    stop_string: str | None = None  # the one that ended the text
    error: str | None = None  # a message, if finish_reason is "error"
    traceback: str | None = None  # of the exception behind the error, if there was one
    token_ids: list[int] = field(default_factory=list)  # the new tokens
    embedding: bytes | None = None  # a vector of float32 numbers, if the request embeds
    events: list[Event] | None = None  # what the parser has found in a chat's text; None: it has not read it


@dataclass
class EngineStatus:
    """The engine's message after each step, and four times a second while it is idle."""

    state: str  # "ready"; "draining" after a signal: no new requests; "ended" after the drain time
    updates: list[Update]
    # The seconds that the step took, 0 if it had no requests. In the first message: of the warm-up.
    step_s: float
    waiting: int = 0  # requests without a row
    active_rows: int = 0  # rows with a request
    prefill_tokens: int = 0  # prompt tokens read since the start
    drafts: dict[str, dict[str, float]] = field(default_factory=dict)  # as in speculative.Report
