"""The messages between the HTTP process (http_server.py) and the engine's process (serve.py).

Read down: Settings, which the engine's process sends first; TextRequest and Cancel, which it sends to the engine;
Update and EngineStatus, which the engine sends back. They are pickled and go through a pipe. No web library is imported
here, so the engine's process needs none.
"""

from dataclasses import dataclass, field

from config import Config
from engine import Request
from server.answers import AnswerSyntax
from tokenizer import TokenizerFiles


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


@dataclass
class TextRequest:
    """Asks the engine to continue a prompt: the engine's own Request, which knows token ids only, and what else is
    needed to turn the new tokens into text. An HTTP request for several answers sends one message for each."""

    request_id: int
    request: Request  # without on_token and grammar, which the engine's process adds
    stop: tuple[str, ...] = ()  # stop strings, which end the text, or the content of a chat's answer
    continues_prompt: bool = True  # the text goes on where the prompt ends; in a chat, each answer is a text of its own
    grammar: str | None = None  # the source of a grammar (grammar.py) that the answer must fit
    shown_ids: frozenset[int] = frozenset()  # special tokens that count as text, such as the marks of tool calls
    # Whether it fails if it waits too long for a row. Only the first message of an HTTP request does: while that one
    # runs, the others may wait.
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
    text: str  # up to the stop string; in a chat it is not cut, because the HTTP process parses it, too
    completion_tokens: int  # all that were generated so far
    cached_tokens: int = 0  # prompt tokens that were reused from a cache row
    # (id, log-probability, [(id, log-probability), ...] of the likeliest ids, offset in the text) for each new token
    # that is not part of a stop string, as soon as this is known
    logprobs: list[tuple] = field(default_factory=list)
    prompt_logprobs: list[tuple] = field(default_factory=list)  # without offsets; in the first update only
    finish_reason: str | None = None  # "stop", "length", "cancelled" or "error"; None if more will follow
    stop_string: str | None = None  # the one that ended the text
    error: str | None = None  # a message, if finish_reason is "error"
    traceback: str | None = None  # of the exception behind the error, if there was one


@dataclass
class EngineStatus:
    """The engine's message after each step, and four times a second while it is idle."""

    state: str  # "ready"; after SIGTERM "draining", which accepts no new requests; "ended" when that time is over
    updates: list[Update]
    step_s: float  # seconds that the step took; 0 if there was nothing to do. In the first message: of the warm-up
    waiting: int = 0  # requests without a row
    active_rows: int = 0  # rows with a request
    prefill_tokens: int = 0  # prompt tokens read since the start
    drafts: dict[str, dict[str, float]] = field(default_factory=dict)  # speculative.Report.drafts, since the start
