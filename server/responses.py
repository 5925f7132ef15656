"""The responses of OpenAI's API as data: whole, or as the chunks of a stream.

Read down: ResponseBuilder; the events of a chat's answer, which answers.py has parsed; the log-probabilities.
"""

import itertools

from engine import Request
from server.answers import CallArguments, CallBegins, Content, Event, Reasoning
from server.api import Choice, CompletionRequest, ServedModel
from server.pipe_messages import Update
from server.request_fields import ApiError, encode_json
from tokenizer import TextStream

END_OF_STREAM = b"data: [DONE]\n\n"


class ResponseBuilder:
    """Builds the response of /v1/completions or /v1/chat/completions.

    `whole` is the response that is not streamed. A stream is what `stream_update` returns for each update, and then
    `stream_end` or `stream_error`. Any class with these four methods can build responses (EventStream sends them).
    """

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
        if self.completion.is_chat:
            answers = [{"delta": delta, "logprobs": None} for delta in stream_deltas(choice.events(update))]
            if is_first:
                first = answers.pop(0)["delta"] if answers and "content" in answers[0]["delta"] else {"content": ""}
                answers.insert(0, {"delta": {"role": "assistant"} | first, "logprobs": None})
            if not answers and (update.logprobs or update.finish_reason):
                answers = [{"delta": {}, "logprobs": None}]
            if update.logprobs:
                answers[0]["logprobs"] = chat_logprobs(self.model, update.logprobs)
        elif update.text or update.logprobs or update.finish_reason or is_first:
            answers = [self.text_and_logprobs(choice, update, is_first)]
        else:
            answers = []
        parts = [{"index": choice.index, **answer, "finish_reason": None} for answer in answers]
        if parts:
            parts[-1]["finish_reason"] = choice.finish_reason(update)
        return [self.header | {"choices": [part]} | self.usage_so_far() for part in parts]

    def usage_so_far(self) -> dict:
        if self.completion.continuous_usage:
            return {"usage": self.completion.usage()}
        return {"usage": None} if self.completion.include_usage else {}

    def stream_update(self, choice: Choice, update: Update) -> bytes:
        """The bytes of a stream for an update, which is added to its choice."""
        return b"".join(map(data_event, self.chunks(choice, update)))

    def stream_end(self) -> bytes:
        """The bytes after those of all updates."""
        if not self.completion.include_usage:
            return END_OF_STREAM
        return data_event(self.header | {"choices": [], "usage": self.completion.usage()}) + END_OF_STREAM

    def stream_error(self, error: ApiError) -> bytes:
        """The bytes that end a stream that has failed."""
        return data_event(error.body()) + END_OF_STREAM

    def whole(self) -> dict:
        """The response that is not streamed, after all updates."""
        choices = []
        for choice in self.completion.choices:
            update = choice.combined()
            if self.completion.is_chat:
                logprobs = None if choice.request.logprobs is None else update.logprobs
                message = {"role": "assistant", **message_fields(choice.events(update)), "refusal": None}
                answer = {"message": message, "logprobs": chat_logprobs(self.model, logprobs)}
            else:
                answer = self.text_and_logprobs(choice, update, True)
            choices.append({"index": choice.index, **answer, "finish_reason": choice.finish_reason(update)})
        return self.header | {"choices": choices, "usage": self.completion.usage()}

    def text_and_logprobs(self, choice: Choice, update: Update, is_first: bool) -> dict:
        """The fields of a choice of /v1/completions. is_first: they begin with an echoed prompt, if there is one."""
        text = choice.echo + update.text if is_first else update.text
        if choice.request.logprobs is None:
            return {"text": text, "logprobs": None}
        entries = prompt_entries(self.model, choice.request, update) if is_first else []
        entries += [(*scored, offset + len(choice.echo)) for *scored, offset in update.logprobs]
        return {"text": text, "logprobs": completion_logprobs(self.model, entries)}


def data_event(chunk: dict) -> bytes:
    """A server-sent event with a chunk."""
    return b"data: %b\n\n" % encode_json(chunk)


def named_event(event: dict) -> bytes:
    """A server-sent event that is named after its type, for other APIs."""
    return b"event: %b\ndata: %b\n\n" % (event["type"].encode(), encode_json(event))


# ---------------------------------------------------------------- the events of a chat's answer


def stream_deltas(events: list[Event]) -> list[dict]:
    """The deltas of a stream, in order. Neighbouring events of the same kind are one delta."""
    deltas = []
    for kind, group in itertools.groupby(events, lambda event: (type(event), getattr(event, "index", None))):
        group = list(group)
        if kind[0] is CallBegins:
            function = {"name": group[0].name, "arguments": ""}
            call = {"index": group[0].index, "id": group[0].id, "type": "function", "function": function}
            deltas.append({"tool_calls": [call]})
            continue
        text = "".join(event.text for event in group)
        if kind[0] is CallArguments:
            deltas.append({"tool_calls": [{"index": group[0].index, "function": {"arguments": text}}]})
        else:
            deltas.append({"content" if kind[0] is Content else "reasoning_content": text})
    return deltas


def message_fields(events: list[Event]) -> dict:
    """The content, the thoughts and the calls of a message that is not streamed."""
    texts = {kind: "".join(event.text for event in events if type(event) is kind) for kind in (Content, Reasoning)}
    calls = [
        {"id": event.id, "type": "function", "function": {"name": event.name, "arguments": ""}}
        for event in events
        if type(event) is CallBegins
    ]
    for event in events:
        if type(event) is CallArguments:
            calls[event.index]["function"]["arguments"] += event.text
    fields = {"content": texts[Content] or (None if calls else "")}
    if texts[Reasoning]:
        fields["reasoning_content"] = texts[Reasoning]
    return fields | ({"tool_calls": calls} if calls else {})


# ---------------------------------------------------------------- log-probabilities


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
