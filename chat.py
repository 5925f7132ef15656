"""A conversation at the terminal, turn by turn (`generate.py --interactive`).

`Session` keeps the messages and sends requests to the engine. `chat` is the loop around it: lines, commands, Ctrl-C.
`run_chat` is called by generate.py.
The engine finds earlier turns in its cache and reads only what is new.

Answers go to stdout, everything else to stderr.
"""

import signal
import sys
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field

from cli import UserError, has_colours, print_status, without_newline
from engine import Engine, Plan, Request, check_prompt
from sampling import SamplingParams
from start import read_with_progress, warm_up
from tokenizer import ChatTemplate, TextStream, Tokenizer

HELP = """/reset          forget the conversation
/system TEXT    set the system message (without TEXT: show it)
/stats          show what was read, reused and written so far
/exit           leave (so does Ctrl-D)
//TEXT          send /TEXT, which could be a command
Ctrl-C stops an answer; an empty line is not sent; all other lines are sent"""
COMMANDS = ("/reset", "/system", "/stats", "/help", "/exit", "/quit")


@dataclass
class Session:
    """A conversation in a cache row. Without a template, as for a base model, messages and answers are one continuous
    text."""

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    params: SamplingParams
    max_new_tokens: int | None = None  # per answer; None: as many as the context holds
    stop_ids: frozenset[int] = frozenset()
    stop: Iterable[str] = ()
    system: str | None = None  # the system message
    messages: list[dict] = field(default_factory=list)  # without the system message
    turns: list[Request] = field(default_factory=list)

    @property
    def context(self) -> int:
        """Positions of the cache row."""
        return self.engine.length

    def set_system(self, text: str | None):
        """Change the system message. The conversation goes on, but the model must read it again."""
        before, self.system = self.system, text
        try:
            self.encode([{"role": "user", "content": "?"}])
        except BaseException:  # a template that refuses system messages, or Ctrl-C
            self.system = before
            raise

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of a conversation with these messages, up to where the next answer begins."""
        if self.system is not None:
            messages = [{"role": "system", "content": self.system}, *messages]
        if self.template is not None:
            return self.template.encode(messages)
        breaks = ["\n" if i and message["role"] == "user" else "" for i, message in enumerate(messages)]
        return self.tokenizer.encode("".join(b + message["content"] for b, message in zip(breaks, messages)))

    def ask(self, text: str, show: Callable[[str], None]) -> Request:
        """Answer a message and pass each piece of text to show(). UserError if the context has no room for it.

        Ctrl-C stops the answer (finish_reason "cancelled"). What was generated stays in the conversation.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        prompt = self.encode(messages)
        room = self.context + 1 - len(prompt)  # + 1: the last token of an answer needs no position in the cache
        if room < 1:
            raise UserError(
                f"the context is full: with this message the conversation has {len(prompt)} tokens, but the context "
                f"holds {self.context}; shorten it, or /reset"
            )
        check_prompt(prompt, self.engine.model.config, self.context)
        if room < (self.max_new_tokens or 0) or room <= self.low_water:
            more = f"room for {room} more tokens in the context of {self.context}"
            print_status(f"({more}; /reset frees all of it)", dim=True)
        stream = TextStream(self.tokenizer, () if self.template else prompt, self.stop)
        answer, pieces = "", []

        def on_token(token: int) -> bool:
            pieces.append(stream.add(() if token in self.stop_ids else (token,)))
            return stream.stopped

        def show_pieces():  # not called in on_token, where the error of a closed pipe would only end the request
            nonlocal answer
            while pieces:
                answer += pieces[0]
                show(pieces.pop(0))

        request = Request(prompt, self.params, min(room, self.max_new_tokens or room), self.stop_ids, on_token)
        self.engine.add(request)
        try:
            read_with_progress(self.engine, [request])
            show_pieces()
            while request.finish_reason is None:
                self.engine.step()
                show_pieces()
        except KeyboardInterrupt:
            self.engine.cancel(request)
            self.engine.step()
        if request.finish_reason == "error":
            raise UserError(f"the answer failed: {request.error}")
        pieces.append(stream.add((), last=True))
        show_pieces()
        if request.new_tokens:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.turns.append(request)
        return request

    @property
    def low_water(self) -> int:
        """With fewer free positions than this, a warning is printed."""
        return max(64, self.context // 10)

    def reset(self):
        """Forget the messages. The cache keeps them, since the next conversation may begin in the same way."""
        self.messages = []

    def summary(self, turn: Request) -> str:
        """One line about a turn."""
        if not turn.new_tokens:
            return "[interrupted before the answer; the message is forgotten]"
        n, read = len(turn.new_tokens), len(turn.prompt) - turn.cached_tokens
        line = f"{n} token{'s' if n > 1 else ''}" + rate(n - 1, decode_seconds(turn))
        used = len(turn.prompt) + n - 1
        line += f"; {read} read, {turn.cached_tokens} reused; context {used} of {self.context}"
        if used >= self.context:
            line += ", full: the answer is cut; /reset"
        elif turn.finish_reason == "length":
            line += "; cut at --max_new_tokens"
        elif turn.finish_reason == "cancelled":
            line += "; interrupted"
        if self.context - self.low_water <= used < self.context:
            line += "; nearly full: /reset makes room"
        return f"[{line}]"

    def statistics(self) -> str:
        """A few lines about all turns."""
        turns = [turn for turn in self.turns if turn.new_tokens]
        reused = sum(turn.cached_tokens for turn in turns)
        read, written = sum(len(turn.prompt) for turn in turns) - reused, sum(len(turn.new_tokens) for turn in turns)
        read_s = sum(turn.times["first_token"] - turn.times["started"] for turn in turns)
        written_s = sum(map(decode_seconds, turns))
        held = max(len(row.tokens) for row in self.engine.rows)
        lines = [f"turns: {len(self.turns)}", f"context: {held} of {self.context} tokens in the cache"]
        lines.append(f"read: {read} tokens{rate(read, read_s)}")
        lines.append(f"reused from earlier turns: {reused} tokens")
        lines.append(f"written: {written} tokens{rate(written - len(turns), written_s)}")
        return "\n".join(lines)


def decode_seconds(turn: Request) -> float:
    return turn.times["finished"] - turn.times["first_token"]


def rate(tokens: int, seconds: float) -> str:
    return f", {tokens / seconds:.1f} tokens/s" if tokens and seconds else ""


@contextmanager
def one_interrupt():
    """A context manager: the first Ctrl-C in it raises KeyboardInterrupt, and further ones do nothing."""

    def interrupt(*_):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run_chat(args, engine: Engine, tokenizer: Tokenizer, template: ChatTemplate | None, stop_ids: frozenset[int]):
    """Run the conversation that the arguments of generate.py ask for."""
    for n in (40, 8):  # compiled prefill has one graph for long inputs and one for short ones
        warm_up(engine, [[0] * min(n, engine.length)], random=args.temperature > 0)
    session = Session(engine, tokenizer, template, args.params, args.max_new_tokens, stop_ids, args.stop)
    if args.system is not None:
        session.set_system(args.system)
    chat(session, args.prompt)


def chat(session: Session, first: Iterable[str] = ()):
    """Run a conversation until /exit or the end of the input. first: messages that are asked before the input."""
    sys.stdin.reconfigure(errors="replace", newline="\n")  # bytes that are not UTF-8 become U+FFFD
    if sys.stdin.isatty():
        kind = "" if session.template else "This model has no chat template: it continues your text. "
        print_status(f"{kind}Context: {session.context} tokens. /help lists the commands, Ctrl-D leaves.", dim=True)
        with suppress(ImportError):
            import readline  # noqa: F401 - gives input() line editing, and history with the arrow keys
    first = list(first)
    has_hinted = False
    while True:
        try:
            if first:
                line = first.pop(0)
                print_status(f"> {line}", dim=True)
            else:
                with idle(session.engine):
                    line = read_line()
                if line is None:
                    return
            command = next(iter(line.split()), "")
            if command in ("/exit", "/quit"):
                return
            if command in COMMANDS:
                handle_command(session, command, line.strip().removeprefix(command).strip())
            elif command:
                if command[0] == "/" and "/" not in command[1:] and not has_hinted:
                    print_status(f"({command} is not a command, so it is sent; /help lists the commands)", dim=True)
                    has_hinted = True
                send(session, line)
        except UserError as error:
            print_status(f"error: {error}", dim=True)
        except KeyboardInterrupt:
            print_status("\n(/exit or Ctrl-D leaves)", dim=True)


def send(session: Session, line: str):
    """Ask a line, with one slash in the place of two at its beginning, and print the answer."""
    if line.lstrip().startswith("//"):
        line = line.replace("//", "/", 1)
    with one_interrupt() if session.engine.ranks is None else nullcontext():  # Ctrl-C ends torchrun
        turn = session.ask(line, lambda piece: print(piece, end="", flush=True))
        print(flush=True)
        print_status(session.summary(turn), dim=True)


def idle(engine: Engine):
    """A context manager for waiting: the other ranks get an empty plan every second, so that they do not time out."""
    return nullcontext() if engine.ranks is None else engine.ranks.repeat(Plan)


def handle_command(session: Session, command: str, rest: str):
    """command: one of COMMANDS that does not end the conversation. rest: what follows it in the line."""
    if command == "/reset":
        session.reset()
        text = "(the conversation is forgotten)"
    elif command == "/system" and rest:
        session.set_system(rest)
        text = "(system message set)"
    elif command == "/system":
        text = "(no system message is set; the template may have its own)" if session.system is None else session.system
    elif command == "/stats":
        text = session.statistics()
    else:
        text = HELP
    print_status(text, dim=True)


def read_line() -> str | None:
    """The next line of input, or None at its end. A prompt is shown only on a terminal."""
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            # \001 and \002 enclose characters without width on the screen, so that readline counts columns correctly.
            return input("\001\033[1m\002> \001\033[0m\002" if has_colours(sys.stdout) else "> ")
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if line:
            return without_newline(line)
    except EOFError:
        pass
    if sys.stdin.isatty():
        print(file=sys.stderr)
    return None
