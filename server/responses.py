"""The responses of OpenAI's API as data: whole, or as the chunks of a stream.

Read down: ResponseBuilder; BlockBuilder, for the other APIs; the events of a chat's answer, which
answers.py has parsed; the log-probabilities.
"""

import itertools

from engine import Request
from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.pipe_messages import Update
from server.request_fields import ApiError, encode_json
from text.tokenizer import TextStream

END_OF_STREAM = b"data: [DONE]\n\n"


class ResponseBuilder:
    """Builds the response of /v1/completions or /v1/chat/completions.

    `whole` is the response that is not streamed. A stream consists of what `stream_update` returns
    for each update, and ends with `stream_end` or `stream_error`. Before the first update, it may have
    any number of `ping`. Any class with these members can build responses (http_server.event_stream sends them).
    """

    ping = b": ping\n\n"  # a comment, which clients ignore

    def __init__(self, model: ServedModel, completion: CompletionRequest):
        self.model = model
        self.completion = completion
        kind = "text_completion"
        if completion.is_chat:
            kind = "chat.completion.chunk" if completion.stream else "chat.completion"
        self.header = {
            "id": completion.id,
            "object": kind,
            "created": completion.created,
            "model": model.name,
        }

    def chunks(self, choice: Choice, update: Update) -> list[dict]:
        """Add an update to its choice, and return the stream's chunks for it, which may be none."""
        is_first = not choice.updates
        choice.updates.append(update)
        answers = []
        if self.completion.is_chat:
            answers = self.chat_answers(choice, update, is_first)
        elif update.text or update.logprobs or update.finish_reason or is_first:
            answers = [self.text_and_logprobs(choice, update, is_first)]

        parts = [{"index": choice.index, **answer, "finish_reason": None} for answer in answers]
        if parts:
            parts[-1]["finish_reason"] = choice.finish_reason(update)
        return [self.header | {"choices": [part]} | self.usage_so_far() for part in parts]

    def chat_answers(self, choice: Choice, update: Update, is_first: bool) -> list[dict]:
        """The fields of a chat's choice in each chunk for an update."""
        deltas = stream_deltas(choice.events(update))
        if is_first:
            if not deltas or "content" not in deltas[0]:
                deltas.insert(0, {"content": ""})
            deltas[0] = {"role": "assistant"} | deltas[0]
        if not deltas and (update.logprobs or update.finish_reason):
            deltas = [{}]

        answers = [{"delta": delta, "logprobs": None} for delta in deltas]
        if update.logprobs:
            answers[0]["logprobs"] = chat_logprobs(self.model, update.logprobs)
        return answers

    def usage_so_far(self) -> dict:
        """The field `usage` of a chunk that is not the last one, if it has one."""
        if self.completion.stream_options.continuous_usage_stats:
            return {"usage": self.completion.usage()}
        if self.completion.stream_options.include_usage:
            return {"usage": None}
        return {}

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        """The bytes of a stream for an update, which is added to its choice."""
        return b"".join(map(data_event, self.chunks(choice, update)))

    def stream_end(self) -> bytes:
        """The last bytes of a stream."""
        if not self.completion.stream_options.include_usage:
            return END_OF_STREAM
        chunk = self.header | {"choices": [], "usage": self.completion.usage()}
        return data_event(chunk) + END_OF_STREAM

    def stream_error(self, error: ApiError) -> bytes:
        """The bytes that end a stream that has failed."""
        return data_event(error.body()) + END_OF_STREAM

    def whole(self) -> dict:
        """The response that is not streamed, after all updates."""
        choices = []
        for choice in self.completion.choices:
            update = choice.combined()
            if self.completion.is_chat:
                fields = message_fields(choice.events(update))
                message = {"role": "assistant", **fields, "refusal": None}
                answer = {"message": message, "logprobs": None}
                if choice.request.logprobs is not None:
                    answer["logprobs"] = chat_logprobs(self.model, update.logprobs)
            else:
                answer = self.text_and_logprobs(choice, update, True)
            reason = choice.finish_reason(update)
            choices.append({"index": choice.index, **answer, "finish_reason": reason})
        return self.header | {"choices": choices, "usage": self.completion.usage()}

    def text_and_logprobs(self, choice: Choice, update: Update, is_first: bool) -> dict:
        """The fields of a choice of /v1/completions.

        is_first: they begin with the prompt, if the request asks for its echo.
        """
        text = update.text
        entries = []
        if is_first:
            text = choice.echo + update.text
            entries = prompt_entries(self.model, choice.request, update)
        if choice.request.logprobs is None:
            return {"text": text, "logprobs": None}
        entries += [(*scored, offset + len(choice.echo)) for *scored, offset in update.logprobs]
        return {"text": text, "logprobs": completion_logprobs(self.model, entries)}


def data_event(chunk: dict) -> bytes:
    """A server-sent event with a chunk."""
    return b"data: %b\n\n" % encode_json(chunk)


class BlockBuilder:
    """Builds responses that are lists of blocks: thoughts, texts and calls. In a stream, each of them begins, grows
    and ends with events of its own.

    It has the members of ResponseBuilder. An API adds `starts`, and what makes its events: first_events, begin_events,
    delta, end_events and last_events, which also completes `response`.
    """

    ping = ResponseBuilder.ping
    starts: dict[type, dict]  # a block without its text, by the type of the events that it is built from

    def __init__(self, model: ServedModel, completion: CompletionRequest):
        self.model = model
        self.completion = completion
        self.response: dict = {}
        self.blocks: list[dict] = []  # the complete ones
        self.kind: type | None = None  # the kind of event whose block is open
        self.block: dict = {}  # the open block as it began
        self.text = ""  # the text of the open block so far

    def whole(self) -> dict:
        choice = self.completion.choices[0]
        combined = choice.combined()
        self.add(choice, combined, choice.events(combined))
        return self.response

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        is_first = not choice.updates
        choice.updates.append(update)
        events = self.first_events() if is_first else []
        events += self.add(choice, update, choice.events(update))
        return b"".join(map(self.event_bytes, events))

    def stream_end(self) -> bytes:
        return b""  # the last update had the end

    def event_bytes(self, event: dict) -> bytes:
        """A server-sent event, which these APIs name after its type."""
        return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))

    def add(self, choice: Choice, update: Update, parsed: list[Event]) -> list[dict]:
        """The stream's events for an update, given its parsed events."""
        events = []
        for event in parsed:
            if isinstance(event, CallBegins):
                events += self.begin(CallArguments, event)
                continue
            if type(event) is not self.kind:
                events += self.begin(type(event))
            self.text += event.text
            events.append(self.delta(event.text))
        if update.finish_reason is not None:
            events += self.last_events(choice, update)
        return events

    def begin(self, kind: type, call: CallBegins | None = None) -> list[dict]:
        """Begin a block. Returns the events for it, and for the end of the block before it."""
        events = self.end()
        self.kind = kind
        self.text = ""
        return events + self.begin_events(call)

    def end(self) -> list[dict]:
        """End the open block, if there is one. Returns the events for it."""
        if self.kind is None:
            return []
        events = self.end_events()
        self.kind = None
        return events


# ---------------------------------------------------------------- the events of a chat's answer


TEXT_FIELDS = {Content: "content", Reasoning: "reasoning_content"}  # of a message


def stream_deltas(events: list[Event]) -> list[dict]:
    """The deltas of a stream, in order. Neighbouring events of the same kind become one delta."""
    deltas = []
    for (kind, index), group in itertools.groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        if kind is CallBegins:
            deltas.append({"tool_calls": [{"index": index} | new_call(next(group))]})
            continue
        text = "".join(event.text for event in group)
        if kind is CallArguments:
            deltas.append({"tool_calls": [{"index": index, "function": {"arguments": text}}]})
        else:
            deltas.append({TEXT_FIELDS[kind]: text})
    return deltas


def new_call(event: CallBegins, arguments: str = "") -> dict:
    """A call with its arguments so far."""
    function = {"name": event.name, "arguments": arguments}
    return {"id": event.id, "type": "function", "function": function}


def message_fields(events: list[Event]) -> dict:
    """The content, the thoughts and the calls of a message that is not streamed."""

    def text(kind: type, index: int | None = None) -> str:
        return "".join(one.text for one in events if type(one) is kind and getattr(one, "index", None) == index)

    fields = {"content": text(Content)}
    thoughts = text(Reasoning)
    if thoughts:
        fields["reasoning_content"] = thoughts
    calls = [new_call(one, text(CallArguments, one.index)) for one in events if isinstance(one, CallBegins)]
    if calls:
        fields["content"] = fields["content"] or None
        fields["tool_calls"] = calls
    return fields


# ---------------------------------------------------------------- log-probabilities


def finite(logprob: float) -> float:
    """A log-probability for JSON, which cannot express infinity."""
    return max(logprob, -9999.0)


def prompt_entries(model: ServedModel, request: Request, update: Update) -> list[tuple]:
    """The log-probabilities of an echoed prompt's tokens, as in Update.logprobs. The first token
    has none."""
    if request.prompt_logprobs is None:
        return []
    stream = TextStream(model.tokenizer)
    entries = []
    offset = 0
    for token, scored in zip(request.prompt, [(None, None), *update.prompt_logprobs]):
        entries.append((token, *scored, offset))
        offset += len(stream.add([token]))
    return entries


def completion_logprobs(model: ServedModel, entries: list[tuple]) -> dict:
    """Log-probabilities as /v1/completions has them. If several tokens have the same text, the
    likeliest counts."""
    logprobs = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token, own, best, offset in entries:
        top = None
        if best is not None:
            top = {}
            for i, logprob in [*best, (token, own)]:
                top.setdefault(model.token_text(i), finite(logprob))
        logprobs["tokens"].append(model.token_text(token))
        logprobs["token_logprobs"].append(None if own is None else finite(own))
        logprobs["top_logprobs"].append(top)
        logprobs["text_offset"].append(offset)
    return logprobs


def chat_logprobs(model: ServedModel, entries: list[tuple]) -> dict:
    """Log-probabilities as /v1/chat/completions has them."""

    def entry(token: int, logprob: float) -> dict:
        data = list(model.token_bytes(token))
        return {"token": model.token_text(token), "logprob": finite(logprob), "bytes": data}

    content = []
    for token, own, best, _ in entries:
        top_logprobs = [entry(*one) for one in best]
        content.append(entry(token, own) | {"top_logprobs": top_logprobs})
    return {"content": content, "refusal": None}
