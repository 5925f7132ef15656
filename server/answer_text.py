"""The text of an answer: decodes the tokens that the engine sends, finds stop strings, and parses a chat's answer.

Only the HTTP process does this. The engine's process knows tokens; it goes on for a few of them after a stop string,
until it is told to end the request.
"""

from bisect import bisect_left
from dataclasses import replace

from server.answers import AnswerParser
from server.pipe_messages import TextRequest, Update
from text.tokenizer import TextStream, Tokenizer


class AnswerText:
    """The text of the answer to a TextRequest.

    A chat's stop strings end the content of its answer, so its parser finds them.
    """

    def __init__(self, tokenizer: Tokenizer, text_request: TextRequest, parser: AnswerParser | None = None):
        self.stop_ids = text_request.request.stop_ids
        self.parser = parser
        context = text_request.request.prompt if text_request.continues_prompt else ()
        stop = text_request.stop if parser is None else ()
        self.stream = TextStream(tokenizer, context, stop, text_request.shown_ids)
        self.stops = self.stream.stops if parser is None else parser.stops

        self.text = ""  # the text of the current update
        self.events = []  # what the parser found in it
        self.sent_chars = 0
        self.offsets: list[int] = []  # where each token begins in the whole text
        self.scored: list[tuple] = []  # the tokens whose log-probabilities were not sent yet

    def read(self, update: Update) -> Update:
        """An update of the engine with its text. It is the last one of the answer if a stop string has come; then
        the tokens after that do not count."""
        self.text = ""
        self.events = []
        self.add_text(update.text)
        for i, token in enumerate(update.token_ids):
            self.add_token(token)
            self.scored += [(*scored, self.offsets[-1]) for scored in update.logprobs[i : i + 1]]
            if self.stops.stopped:
                break

        reason = "stop" if self.stops.stopped else update.finish_reason
        if reason is not None:
            self.add_text(self.stream.add((), last=True))
            if self.parser is not None:
                self.events += self.parser.end(is_cut=reason == "length")
            reason = "stop" if self.stops.stopped and reason == "length" else reason
        self.sent_chars += len(self.text)

        # Log-probabilities are sent with the text of their tokens, because a stop string may yet cut off what is held
        # back.
        ready = len(self.offsets)
        if reason is None or self.stops.stopped:
            decided = self.sent_chars if self.parser is None else self.parser.decided
            ready = bisect_left(self.offsets, decided)
        ready = max(0, ready - (len(self.offsets) - len(self.scored)))
        logprobs = self.scored[:ready]
        self.scored = self.scored[ready:]
        return replace(
            update,
            text=self.text,
            events=self.events if self.parser is not None else None,
            completion_tokens=len(self.offsets) if update.token_ids else update.completion_tokens,
            logprobs=logprobs if update.token_ids or logprobs else update.logprobs,
            finish_reason=reason,
            stop_string=self.stops.stop_string,
        )

    def add_token(self, token: int):
        self.offsets.append(self.sent_chars + len(self.text) + len(self.stream.stops.held))
        ids = () if token in self.stop_ids else (token,)  # a stop token has no text
        self.add_text(self.stream.add(ids))

    def add_text(self, text: str):
        if not text:  # as of a token in the middle of a character
            return
        self.text += text
        if self.parser is not None:
            self.events += self.parser.add(text)
