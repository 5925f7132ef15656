"""A conversation at the terminal, turn by turn (`generate.py --interactive`).

Read down: `Session` keeps the messages and sends requests to the engine; `AnswerPrinter` prints an
answer with dim thoughts; `chat` is the loop around them: messages, commands, Ctrl-C; then how a
message is read, and the files. generate.py calls `run_chat`. The engine finds earlier turns in its
cache and reads only what is new.

Answers go to stdout, everything else to stderr.
"""

import json
import os
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import partial
from pathlib import Path

from cli import UserError, counted, first_line, has_colours, print_status, printable, read_text, without_newline
from compile import warm_up
from engine import Engine, Request, check_prompt, read_with_progress
from sampling import RANGES, SamplingParams
from text.chat_template import ChatTemplate, mark_ids
from text.tokenizer import TextStream, ThoughtSearch, Tokenizer

HELP = """/reset          forget the conversation
/regenerate     answer the last message again
/set NAME VALUE change a setting, as in /set temperature 0.2 (/set shows all settings)
/system TEXT    set the system message (without TEXT: show it)
/save FILE      write the conversation to a file, as JSON
/load FILE      go on with the conversation of a file
/thoughts       hide the model's thoughts, or show them again
/stats          show what was read, reused and written so far
/bye            leave (so do exit, quit, /exit, /quit and Ctrl-D)
//TEXT          send /TEXT, which could be a command
Tab completes a command. An unknown one is refused, but /think, /no_think and words
that the model's chat template knows are sent. Ctrl-C stops an answer.
Pasted lines are one message. \"\"\" begins a message of several lines, and ends it.
What you type is kept in ~/.local/state/fastpath/history.jsonl (or $XDG_STATE_HOME)."""
ENDS = ("/bye", "/exit", "/quit")
WITH_TEXT = ("/set", "/system", "/save", "/load")  # the commands that take a text
COMMANDS = ("/reset", "/regenerate", "/thoughts", "/stats", "/help", *WITH_TEXT, *ENDS)
ALIASES = {"/?": "/help", "/clear": "/reset"}  # as other programs call them
SETTINGS = (*RANGES, "max_new_tokens", "system")  # what /set changes
QUOTES = '"""'
HISTORY_LINES = 1000
LARGEST_CONVERSATION = 1 << 24  # bytes of a file


@dataclass
class Session:
    """A conversation in a cache row.

    Without a template, as for a base model, messages and answers are one continuous text.
    """

    engine: Engine
    tokenizer: Tokenizer
    template: ChatTemplate | None
    params: SamplingParams  # of the next answer; each answer has another seed, so that no two begin alike
    max_new_tokens: int | None = None  # per answer; None: as many as the context holds
    stop_ids: frozenset[int] = frozenset()
    stop: Iterable[str] = ()
    thinking: tuple[str, str] | None = None  # the marks around the model's thoughts, if it has any
    keeps_all: bool = False  # in a full context, refuse a message instead of dropping old turns
    hides_thoughts: bool = False
    system: str | None = None  # the system message
    messages: list[dict] = field(default_factory=list)  # without the system message
    dropped: int = 0  # how many of the oldest messages the model no longer sees
    turns: list[Request] = field(default_factory=list)  # the requests of all turns so far
    drafted: Counter = field(default_factory=Counter)  # what drafted_tokens counted in the latest turn

    def set_system(self, text: str | None):
        """Change the system message. The conversation goes on, but the model must read it again."""
        # This fails if the template refuses system messages.
        self.encode(text, [{"role": "user", "content": "?"}])
        self.system = text

    def change(self, name: str, text: str):
        """Change a setting for all answers that follow.

        name: one of SETTINGS. text: its value; "none" stands for None. UserError if the setting
        cannot have this value.
        """
        value = None if text.lower() == "none" else text
        if name == "system":
            self.set_system(value)
        elif name == "max_new_tokens":
            if value is not None and not re.fullmatch("0{0,99}[1-9][0-9]{0,99}", text):
                raise UserError(f"max_new_tokens must be an integer of at least 1, or none: {text!r}")
            self.max_new_tokens = value and int(value)
        else:
            with suppress(ValueError):  # SamplingParams refuses what is no number, and says what is allowed
                value = SamplingParams.__annotations__[name](text)
            try:
                self.params = replace(self.params, **{name: value})
            except ValueError as error:
                raise UserError(str(error)) from None

    def encode(self, system: str | None, messages: list[dict]) -> list[int]:
        """Token ids of a conversation with these messages, up to where the next answer begins."""
        if system is not None:
            messages = [{"role": "system", "content": system}, *messages]
        if self.template is not None:
            return self.template.encode(messages)

        text = ""
        for i, message in enumerate(messages):
            if i > 0 and message["role"] == "user":
                text += "\n"
            text += message["content"]
        return self.tokenizer.encode(text)

    def ask(self, text: str, show: Callable[[str], None], earlier: list[dict] | None = None) -> Request:
        """Answer a message, and pass each piece of the answer to show().

        earlier: the messages before it, if they are not the conversation's. UserError if the
        context has no room for the message.

        Ctrl-C stops the answer (finish_reason "cancelled"). What was generated stays in the
        conversation.
        """
        if earlier is None:
            earlier = self.messages
        messages = [*earlier, {"role": "user", "content": text}]
        prompt = self.make_room(messages)
        check_prompt(prompt, self.engine.model.config, self.engine.length)
        room = self.engine.length + 1 - len(prompt)  # + 1: the last token of an answer needs no position
        request = Request(prompt, self.params, min(room, self.max_new_tokens or room), self.stop_ids)
        drafted_before = drafted_tokens(self.engine)
        answer = self.run_request(request, show)
        self.drafted = drafted_tokens(self.engine) - drafted_before
        if request.finish_reason == "error":
            raise UserError(f"the answer failed: {request.error}")
        if request.new_tokens:
            self.messages = [*messages, {"role": "assistant", "content": answer}]
        self.turns.append(request)
        # The smallest seed, an int64, follows the largest.
        self.params = replace(self.params, seed=(self.params.seed + 1 + 2**63) % 2**64 - 2**63)
        return request

    def run_request(self, request: Request, show: Callable[[str], None]) -> str:
        """Run a request until it ends or Ctrl-C cancels it, and show the answer as it grows.

        Returns the answer.
        """
        marks = mark_ids(self.tokenizer, self.thinking)
        context = () if self.template else request.prompt
        stream = TextStream(self.tokenizer, context, self.stop, marks)
        prompt_end = TextStream(self.tokenizer, shown_ids=marks).add(request.prompt[-8:], last=True)
        printer = AnswerPrinter(show, self.thinking, prompt_end, self.hides_thoughts)
        pieces = []  # of the answer, that are not shown yet

        def on_token(token: int) -> bool:
            if token not in self.stop_ids:
                pieces.append(stream.add([token]))
            return stream.stopped

        # Not in on_token, where the error of a closed pipe would only end the request.
        def show_new(last: bool = False):
            text = "".join(pieces)
            pieces.clear()
            printer.add(text, last)

        request.on_token = on_token
        self.engine.add(request)
        try:
            read_with_progress(self.engine, [request])
            show_new()
            while request.finish_reason is None:
                self.engine.step()
                show_new()
        except KeyboardInterrupt:
            self.engine.cancel(request)
            self.engine.step()
        pieces.append(stream.add([], last=True))
        show_new(last=True)
        return printer.text

    def make_room(self, messages: list[dict]) -> list[int]:
        """The token ids of a conversation, up to where the next answer begins.

        If there is too little room for an answer, the oldest turns are dropped until half of the
        context is free. UserError if there is no room for the last message alone, or, with
        keeps_all, for all of them.
        """
        dropped = self.dropped
        prompt = self.encode(self.system, messages[dropped:])
        needed = max(64, self.engine.length // 10, min(self.max_new_tokens or 0, self.engine.length // 2))
        if self.engine.length + 1 - len(prompt) < needed and not self.keeps_all:
            while len(prompt) > self.engine.length // 2 and dropped < len(messages) - 1:
                dropped += 2
                prompt = self.encode(self.system, messages[dropped:])

        if len(prompt) > self.engine.length:
            raise UserError(
                f"the context is full: this message and {counted(len(messages) - 1 - dropped, 'earlier message')} have "
                f"{len(prompt)} tokens, but the context holds {self.engine.length}; shorten it, or /reset"
            )
        if dropped > self.dropped:
            turns = counted((dropped - self.dropped) // 2, "turn")
            line = f"(the context is full: dropped the oldest {turns}; --keep_all_turns refuses instead)"
            print_status(line, dim=True)
            self.dropped = dropped
        return prompt

    def regenerate(self, show: Callable[[str], None]) -> Request:
        """Answer the last message again, with another seed. UserError if there is none."""
        if not self.messages:
            raise UserError("there is no answer yet")
        self.dropped = min(self.dropped, len(self.messages) - 2)
        return self.ask(self.messages[-2]["content"], show, earlier=self.messages[:-2])

    def reset(self):
        """Forget the messages. The cache keeps them, as the next conversation may begin alike."""
        self.messages = []
        self.dropped = 0

    def save(self, path: Path):
        """Write the conversation to a new file, or to one that holds a conversation."""
        if path.exists():
            read_conversation(path)
        text = json.dumps({"system": self.system, "messages": self.messages}, ensure_ascii=False, indent=2)
        new = path.with_name(f".{path.name}.new")  # a full disk leaves the earlier file as it is
        try:
            new.write_text(text + "\n", encoding="utf-8")
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)

    def load(self, path: Path):
        """Go on with the conversation of a file.

        UserError if the file holds none, or if the template refuses it.
        """
        system, messages = read_conversation(path)
        self.encode(system, [*messages, {"role": "user", "content": "?"}])
        self.system = system
        self.messages = messages
        self.dropped = 0

    def summary(self, turn: Request) -> str:
        """One line about the latest turn."""
        if not turn.new_tokens:
            return "[interrupted before the answer; the message is forgotten]"
        n = len(turn.new_tokens)
        line = counted(n, "token") + rate(n - 1, decode_seconds(turn))
        if self.drafted["proposed"]:
            line += f", {drafted_text(self.drafted)}"
        read = len(turn.prompt) - turn.cached_tokens
        used = len(turn.prompt) + n - 1
        line += f"; {read} read, {turn.cached_tokens} reused; context {used} of {self.engine.length}"

        if used >= self.engine.length:
            line += ", full: the answer is cut"
        elif turn.finish_reason == "length":
            line += "; cut at max_new_tokens"
        elif turn.finish_reason == "cancelled":
            line += "; interrupted"
        return f"[{line}]"

    def statistics(self) -> str:
        """A few lines about all turns."""
        turns = [turn for turn in self.turns if turn.new_tokens]
        reused = sum(turn.cached_tokens for turn in turns)
        read = sum(len(turn.prompt) for turn in turns) - reused
        read_s = sum(turn.times["first_token"] - turn.times["started"] for turn in turns)
        written = sum(len(turn.new_tokens) for turn in turns)
        written_s = sum(map(decode_seconds, turns))
        held = max(len(row.tokens) for row in self.engine.rows)

        lines = [
            f"turns: {len(self.turns)}",
            f"context: {held} of {self.engine.length} tokens in the cache",
            f"read: {read} tokens{rate(read, read_s)}",
            f"reused from earlier turns: {reused} tokens",
            f"written: {written} tokens{rate(written - len(turns), written_s)}",
        ]
        drafted = drafted_tokens(self.engine)
        if drafted["proposed"]:
            lines.append(f"speculation: {drafted_text(drafted)}")
        return "\n".join(lines)


def drafted_tokens(engine: Engine) -> Counter:
    """How many drafted tokens were "proposed" and "accepted" so far."""
    total = Counter()
    for counts in engine.decoding.draft_counts.values():
        total.update(proposed=counts["proposed_tokens"], accepted=counts["accepted_tokens"])
    return total


def drafted_text(drafted: Counter) -> str:
    return f"{drafted['accepted']} of {drafted['proposed']} drafted tokens accepted"


def decode_seconds(turn: Request) -> float:
    return turn.times["finished"] - turn.times["first_token"]


def rate(tokens: int, seconds: float) -> str:
    if not tokens or not seconds:
        return ""
    return f", {tokens / seconds:.1f} tokens/s"


class AnswerPrinter:
    """Passes an answer on, piece by piece, and its thoughts with their marks dim on a terminal, or not at all."""

    def __init__(self, show: Callable[[str], None], marks: tuple[str, str] | None, prompt: str, hides_thoughts: bool):
        """prompt: the end of the text before the answer, which may end with the first mark."""
        self.show = show
        self.hides_thoughts = hides_thoughts
        self.search = ThoughtSearch(marks, marks is not None and prompt.rstrip().endswith(marks[0]))
        self.text = ""  # all of the answer so far
        self.is_dim = False
        self.skips_space = False  # hidden thoughts were the last

    def add(self, text: str, last: bool = False):
        """Pass on this text of the answer. last: no more text follows."""
        self.text += text
        for kind, part in self.search.add(text, last):
            is_thought = kind != "answer"
            if is_thought and self.hides_thoughts:
                if not self.skips_space:
                    print_status("(thinking; /thoughts shows it)", dim=True)
                self.skips_space = True
                continue
            self.set_dim(is_thought)
            if self.skips_space:
                part = part.lstrip()
                self.skips_space = part == ""
            if part:
                self.show(part)
        if last:
            self.set_dim(False)

    def set_dim(self, is_dim: bool):
        if is_dim != self.is_dim and has_colours(sys.stdout):
            self.show("\033[2m" if is_dim else "\033[0m")
        self.is_dim = is_dim


@contextmanager
def one_interrupt():
    """A context manager in which one Ctrl-C raises KeyboardInterrupt, and more do nothing."""

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
        warm_up(engine, [[0] * min(n, engine.length)], random=args.params.temperature > 0)
    session = Session(engine, tokenizer, template, args.params, args.max_new_tokens, stop_ids, args.stop)
    session.keeps_all = args.keep_all_turns
    if template is not None:
        session.thinking = template.thinking_marks()
    if args.system is not None:
        session.set_system(args.system)
    chat(session, args.prompt)


def chat(session: Session, first: Iterable[str] = ()):
    """Run a conversation until /bye or the end of the input.

    first: messages that are sent before the input is read.
    """
    # Bytes that are not UTF-8 become U+FFFD. Piped text may begin with a byte order mark.
    encoding = None if sys.stdin.isatty() else "utf-8-sig"
    sys.stdin.reconfigure(encoding=encoding, errors="replace", newline="\n")

    # Qwen3 knows the first two words, but its template does not have them. The template of SmolLM3 has
    # {% if "/system_override" in system_message %}. A tag such as </think> is not a word with a slash.
    sent = ["/think", "/no_think", *re.findall(r"(?<![\w<|\[/])/[a-zA-Z]\w*", getattr(session.template, "source", ""))]
    known = [*COMMANDS, *(f"/set {name}" for name in SETTINGS), *sent]
    if sys.stdin.isatty():
        if session.template is None:
            print_status("This model has no chat template: it continues your text.", dim=True)
        keys = "/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves."
        print_status(f"Context: {session.engine.length} tokens. {keys}", dim=True)
        start_readline(known)
    first = list(first)
    while True:
        try:
            if first:
                text = first.pop(0)
                print_status(f"> {text}", dim=True)
            else:
                text = read_message()
            if text is None or text.strip().lower() in (*ENDS, "exit", "quit"):
                return
            word = next(iter(text.split()), "")
            rest = text.strip()[len(word) :].strip()
            command = ALIASES.get(word.lower(), word.lower())
            if command in COMMANDS and ("\n" not in text or re.match(r"\s*/(set\s+)?system\s", text, re.IGNORECASE)):
                handle_command(session, command, rest)
            elif "\n" not in text and word not in sent and re.fullmatch(r"/[^\W\d_][\w-]*", word):
                nearest = [*get_close_matches(command, known, n=1), "/help"][0]
                raise UserError(f"{word} is not a command, so it is not sent; try {nearest}, or /{word} to send it")
            elif word:
                if text.lstrip().startswith("//"):
                    text = text.replace("//", "/", 1)
                print_answer(session, partial(session.ask, text))
        except UserError as error:
            print_status(f"error: {error}", dim=True)
        except KeyboardInterrupt:
            print_status("\n(/bye or Ctrl-D leaves)", dim=True)


def print_answer(session: Session, ask: Callable[[Callable[[str], None]], Request]):
    """Print what `ask` shows, and a line about it."""
    interrupts = one_interrupt() if session.engine.ranks.size == 1 else nullcontext()
    with interrupts:  # under torchrun, Ctrl-C ends all ranks
        turn = ask(lambda piece: print(piece, end="", flush=True))
        print(flush=True)
        print_status(session.summary(turn), dim=True)


def handle_command(session: Session, command: str, rest: str):
    """Do what a command says.

    command: one of COMMANDS that does not end the conversation. rest: what follows it in the line.
    """
    if rest and command not in WITH_TEXT:
        raise UserError(f"{command} takes no text; /{command} sends the line as a message")
    text = HELP
    if command == "/regenerate":
        return print_answer(session, session.regenerate)
    if command == "/reset":
        session.reset()
        text = "(the conversation is forgotten)"
    elif command == "/system" and rest:
        session.set_system(rest)
        text = "(system message set)"
    elif command == "/system":
        text = session.system or "(no system message is set; the template may have its own)"
    elif command == "/set":
        text = change_or_show(session, *rest.split(maxsplit=1))
    elif command in ("/save", "/load"):
        text = save_or_load(session, command, rest)
    elif command == "/thoughts":
        session.hides_thoughts = not session.hides_thoughts
        text = f"(the model's thoughts are {'hidden' if session.hides_thoughts else 'shown'})"
    elif command == "/stats":
        text = session.statistics()
    print_status(text, dim=True)


def change_or_show(session: Session, name: str = "", text: str = "") -> str:
    """Do what /set says, and return the setting with this name, or all if there is no name.

    text: the new value, if there is one.
    """
    name = name.lower()
    if name and name not in SETTINGS:
        raise UserError(f"{name!r} is not a setting; the settings are {', '.join(SETTINGS)}")
    if text:
        session.change(name, text)
    values = vars(session) | vars(session.params)
    return "\n".join(f"{key:<20}{printable(str(values[key]))}" for key in SETTINGS if name in ("", key))


def save_or_load(session: Session, command: str, name: str) -> str:
    """Do what /save or /load says, and return a line about it. name: of the file."""
    if not name:
        raise UserError(f"{command} needs the name of a file")
    path = Path(os.path.expanduser(name))
    act = session.save if command == "/save" else session.load
    try:
        act(path)
    except (OSError, ValueError) as error:  # a full disk, a name that is too long, or has a null
        raise UserError(f"{command} {printable(name)}: {first_line(error)}") from None
    return f"({path}: {len(session.messages)} messages)"


# ---------------------------------------------------------------- reading messages


def read_message() -> str | None:
    """The next message of the input: a line, lines that were pasted, or lines between two \"\"\".

    None at the end of the input.
    """
    text = read_line("> ")
    if text is None or "\n" in text or not text.lstrip().startswith(QUOTES):
        return text
    lines = [text.lstrip().removeprefix(QUOTES)]
    if lines[0].rstrip().endswith(QUOTES):
        return lines[0].rstrip().removesuffix(QUOTES)

    # If the opening """ is alone on its line, the closing one must be, too, so that code with
    # docstrings can be between them.
    stands_alone = not lines[0].strip()
    while (line := read_line(". ")) is not None:
        if line.strip() == QUOTES or (not stands_alone and line.rstrip().endswith(QUOTES)):
            lines.append(line.rstrip().removesuffix(QUOTES))
            break
        lines.append(line)
    return "\n".join(lines).strip("\n")


def read_line(prompt: str) -> str | None:
    """The next line of input, or None at its end.

    On a terminal, the prompt is shown, and several lines that were pasted at once are one line.
    """
    try:
        if sys.stdin.isatty() and sys.stdout.isatty():
            line = input(prompt)
            write_history(line)
            return without_newline(line)
        if sys.stdin.isatty():
            print(prompt, end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if line:
            return without_newline(line)
    except EOFError:
        pass
    if sys.stdin.isatty():
        print(file=sys.stderr)
    return None


def start_readline(commands: list[str]):
    """Give input() line editing, pasted lines as one input, and the history of conversations.

    Tab completes a line to one of these commands, a word at a time.
    """
    try:
        import readline
    except ImportError:  # Windows
        return
    if os.environ.get("TERM", "dumb") != "dumb":  # dumb terminals would show the escape sequences
        readline.parse_and_bind("set enable-bracketed-paste on")  # Python turns this off
        readline.parse_and_bind("set enable-active-region off")  # else pasted text is coloured

    def complete(line: str, n: int) -> str | None:  # the n-th line that it may become
        found = [text for text in commands if text.startswith(line.lower()) and text.count(" ") == line.count(" ")]
        return [*found, None][n] if line.startswith("/") else [f"{line}\t", None][n]

    readline.set_completer(complete)
    readline.set_completer_delims("")  # complete() gets the line from its beginning to the cursor
    readline.parse_and_bind("tab: complete")
    for line in read_history():
        with suppress(ValueError):  # a line that this locale cannot show
            readline.add_history(line)


# ---------------------------------------------------------------- files


def history_path() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    return state.expanduser() / "fastpath" / "history.jsonl"


def read_history() -> list[str]:
    """What was typed in earlier conversations. A file that has become long is shortened.

    Each line of the file is a JSON string.
    """
    try:
        lines = history_path().read_text(encoding="utf-8", errors="replace").splitlines()
        if len(lines) > 2 * HISTORY_LINES:
            history_path().write_text("\n".join(lines[-HISTORY_LINES:]) + "\n", encoding="utf-8")
    except (OSError, RuntimeError):  # no such file, no home directory
        return []
    found = []
    for line in lines[-HISTORY_LINES:]:
        with suppress(ValueError):  # the line is incomplete, as after a full disk
            found.append(json.loads(line))
    return [line for line in found if isinstance(line, str)]


def write_history(line: str):
    """Add a line to the history, which only the user may read, if there is a place for it."""
    if not line.strip():
        return
    with suppress(OSError, RuntimeError):
        history_path().parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(history_path(), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        with open(descriptor, "w") as file:
            file.write(json.dumps(line) + "\n")


def read_conversation(path: Path) -> tuple[str | None, list[dict]]:
    """(system message, messages) of a file.

    /save has written the file, or it is a list of messages as in OpenAI's API. UserError if it is
    something else.
    """
    if path.exists() and (not path.is_file() or path.stat().st_size > LARGEST_CONVERSATION):
        raise UserError(f"{path} is not a conversation file")
    text = read_text(path)
    try:
        found = json.loads(text)
        system = None
        if isinstance(found, dict):
            system = found.get("system")
            found = found["messages"]
        if not isinstance(found, list):
            raise TypeError(f"not {type(found).__name__}")
        roles = [message["role"] for message in found]
        texts = [message["content"] for message in found]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise UserError(f"{path} is not a conversation: it has no list of messages ({first_line(error)})") from None

    if roles[:1] == ["system"]:
        roles = roles[1:]
        system = texts.pop(0)
    take_turns = roles == ["user", "assistant"] * (len(roles) // 2)
    if system is not None:
        texts.append(system)
    if not take_turns or not all(isinstance(text, str) for text in texts):
        raise UserError(f"{path}: messages of the user and the assistant must take turns, and their contents be texts")
    return system, [{"role": role, "content": text} for role, text in zip(roles, texts)]
