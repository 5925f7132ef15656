"""A conversation at the terminal, turn by turn (`generate.py --interactive`).

`Session` keeps the messages, and knows which tokens the KV cache holds, so that a turn reads only what is new;
`converse` is the loop around it: lines, commands, Ctrl-C. Knows nothing of the model: what answers is a function.

Answers go to stdout, all else to stderr.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from chat_template import ChatTemplate
from cli import UserError, has_colours, print_status
from report import Timing
from tokenizer import TextStream, Tokenizer

HELP = """/reset          forget the conversation
/system TEXT    set the system message (without TEXT: show it)
/stats          what was read, kept and written so far
/exit           leave (so does Ctrl-D)
Ctrl-C ends an answer; a line that is empty is not sent"""


@dataclass
class Turn:
    """What one question and its answer took."""

    reason: str  # the answer's end: "stop", "length" or "interrupted"
    prompt_tokens: int
    kept: int  # of them, those that the cache held already
    new_tokens: int
    timing: Timing = field(default_factory=Timing)


class Session:
    """A conversation with a model that has one cache row of `context` positions.

    answer(prompt, kept, limit, timing, on_token) continues the ids of prompt, of which the cache holds the first
    `kept`, by at most `limit` tokens, and returns "stop" or "length"; it is generate() with what does not change
    filled in. Without a template (a base model) the lines and answers are one text.
    """

    def __init__(
        self,
        answer: Callable,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        context: int,
        end_ids: Iterable[int] = (),
        stop: Iterable[str] = (),
        max_new_tokens: int | None = None,
    ):
        self.answer, self.tokenizer, self.template, self.context = answer, tokenizer, template, context
        self.end_ids, self.stop, self.max_new_tokens = frozenset(end_ids), tuple(stop), max_new_tokens
        self.system: str | None = None
        self.messages: list[dict] = []  # without the system message
        self.cached: list[int] = []  # the ids whose keys and values are in the cache, from position 0
        self.turns: list[Turn] = []

    def set_system(self, text: str | None):
        """Change the system message; the conversation goes on, and is read again from there."""
        before, self.system = self.system, text
        try:
            self.encode([{"role": "user", "content": "?"}])
        except BaseException:  # some templates know no such message; Ctrl-C
            self.system = before
            raise

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of the conversation with these messages, up to where the next answer begins."""
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.template is not None:
            return self.template.encode(messages)
        breaks = ["\n" if i and message["role"] == "user" else "" for i, message in enumerate(messages)]
        return self.tokenizer.encode("".join(b + message["content"] for b, message in zip(breaks, messages)))

    def ask(self, text: str, show: Callable[[str], None]) -> Turn:
        """Answer a message, giving each piece of text to show(); UserError where it does not fit into the context.

        Ctrl-C ends the answer, which stays in the conversation as far as it came.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.encode(messages)
        room = self.context + 1 - len(prompt)  # the last token of an answer needs no slot
        if room < 1:
            raise UserError(
                f"the context is full: with this message the conversation has {len(prompt)} tokens, of {self.context} "
                "that there is room for; shorten it, or /reset"
            )
        if room < (self.max_new_tokens or 0) or room <= self.low_water:
            print_status(
                f"(room for {room} more tokens in the context of {self.context}; /reset makes all of it free)", dim=True
            )
        kept = min(len(os.path.commonprefix([prompt, self.cached])), len(prompt) - 1)
        self.cached = self.cached[:kept]  # what follows is overwritten
        stream = TextStream(self.tokenizer, () if self.template else prompt, self.stop)
        ids, pieces = [], []

        def take(row: int, token: int, last: bool) -> bool:
            if ids:
                self.cached.append(ids[-1])  # a token is read when the next one is decided
            else:
                self.cached = list(prompt)
            ids.append(token)
            pieces.append(stream.add(() if token in self.end_ids else (token,), last))
            show(pieces[-1])
            return stream.stopped

        turn = Turn("interrupted", len(prompt), kept, 0)
        with suppress(KeyboardInterrupt):
            turn.reason = self.answer(prompt, kept, min(room, self.max_new_tokens or room), turn.timing, take)
        pieces.append(stream.add((), last=True))
        show(pieces[-1])
        turn.new_tokens = len(ids)
        if ids:
            self.messages = [*messages, {"role": "assistant", "content": "".join(pieces)}]
        self.turns.append(turn)
        return turn

    @property
    def low_water(self) -> int:
        """Tokens of room that are few enough to speak of."""
        return max(64, self.context // 10)

    def reset(self):
        """Forget the messages; the cache keeps what the next conversation may begin with again."""
        self.messages = []

    def summary(self, turn: Turn) -> str:
        """A turn in a line."""
        if not turn.new_tokens:
            return "[interrupted before the answer; the message is forgotten]"
        line = f"{turn.new_tokens} token" + "s" * (turn.new_tokens > 1)
        line += rate(turn.timing.decode_tokens, turn.timing.decode_s)
        line += f"; {turn.prompt_tokens - turn.kept} read, {turn.kept} kept"
        used = turn.prompt_tokens + turn.new_tokens - 1
        line += f"; context {used} of {self.context}"
        if used >= self.context:
            line += ", full: the answer is cut; /reset"
        elif turn.reason == "length":
            line += "; cut at --max_new_tokens"
        elif turn.reason == "interrupted":
            line += "; interrupted"
        if self.context - self.low_water <= used < self.context:
            line += "; nearly full: /reset makes room"
        return f"[{line}]"

    def statistics(self) -> str:
        """All turns in a few lines."""
        times = [turn.timing for turn in self.turns]
        read, written = sum(t.prefill_tokens for t in times), sum(turn.new_tokens for turn in self.turns)
        prefill_s, decode_s = sum(t.prefill_s for t in times), sum(t.decode_s for t in times)
        decoded, kept = sum(t.decode_tokens for t in times), sum(turn.kept for turn in self.turns)
        lines = [f"turns: {len(self.turns)}", f"context: {len(self.cached)} of {self.context} tokens in the cache"]
        lines.append(f"read: {read} tokens{rate(read, prefill_s)}")
        lines.append(f"kept from earlier turns: {kept} tokens")
        lines.append(f"written: {written} tokens{rate(decoded, decode_s)}")
        return "\n".join(lines)


def rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.1f} tokens/s" if seconds else ""


@contextmanager
def one_interrupt():
    """Within, the first Ctrl-C raises KeyboardInterrupt and those of an impatient user after it do nothing."""

    def interrupt(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def converse(session: Session, first: Iterable[str] = ()):
    """Talk until /exit or the end of the input; `first` are messages to begin with."""
    sys.stdin.reconfigure(errors="replace")  # whatever the terminal sends, there is something to answer
    if sys.stdin.isatty():
        kind = "" if session.template else "This model has no chat template: it continues your text. "
        print_status(f"{kind}Context: {session.context} tokens. /help lists the commands, Ctrl-D leaves.", dim=True)
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing, and history with the arrow keys
    first = list(first)
    while True:
        try:
            if first:
                line = first.pop(0)
                print_status(f"> {line}", dim=True)
            elif (line := read_line()) is None:
                return
            command, _, rest = line.strip().partition(" ")
            if command in ("/exit", "/quit"):
                return
            if not command:
                continue
            if command[0] == "/" and "/" not in command[1:]:
                obey(session, command, rest.strip())
            else:
                with one_interrupt():
                    turn = session.ask(line, lambda piece: print(piece, end="", flush=True))
                    print(flush=True)
                    print_status(session.summary(turn), dim=True)
        except UserError as error:
            print_status(f"error: {error}", dim=True)
        except KeyboardInterrupt:
            print_status("\n(/exit or Ctrl-D leaves)", dim=True)


def obey(session: Session, command: str, rest: str):
    if command == "/reset":
        session.reset()
        print_status("(the conversation is forgotten)", dim=True)
    elif command == "/system" and rest:
        session.set_system(rest)
        print_status("(system message set)", dim=True)
    elif command == "/system":
        print_status(
            "(no system message but what the template has)" if session.system is None else session.system, dim=True
        )
    elif command == "/stats":
        print_status(session.statistics(), dim=True)
    elif command == "/help":
        print_status(HELP, dim=True)
    else:
        print_status(f"{command} is no command. {HELP}", dim=True)


def read_line() -> str | None:
    """The next line without its end, None at the end of the input. From a pipe nothing is asked for."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            # Between \001 and \002 is what takes no room: with it readline counts the columns right.
            return input("\001\033[1m\002> \001\033[0m\002" if has_colours(sys.stdout) else "> ")
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if line:
            return line.rstrip("\r\n")
    except EOFError:
        pass
    if sys.stdin.isatty():
        print(file=sys.stderr)
    return None
