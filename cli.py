"""What all commands of this project share: one-line errors, options, and messages.

Read `run_command` first: it runs a command's main() and turns exceptions into exit codes. This file
knows nothing of models, and every other file may import it.
"""

import argparse
import json
import os
import re
import select
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext, suppress
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path

from tqdm import tqdm

VERSION = "0.1.0"

# ---------------------------------------------------------------- errors


# Files and folders of this project that may be deleted. A command that needs one of them says so.
OPTIONAL = ("convert_hf_checkpoint", "cpu", "drafts", "evaluate", "kernels_triton", "mixers", "serve", "server")
OPTIONAL += ("sources", "speculative", "text.chat", "text.grammar", "tp", "training")


class UserError(Exception):
    """An error that the user can fix.

    Its message is one line: what came, what was expected, what to do.
    """


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def printable(text: str) -> str:
    """A text on one line of at most 500 characters, without terminal escape sequences.

    A text from a file must not control the terminal.
    """
    line = "".join(c for c in " ".join(text.split()) if c.isprintable())
    if len(line) > 500:
        line = line[:500] + " ..."
    return line


def and_more(names: list[str]) -> str:
    """The first of some names, and how many more there are."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return names[0] + more


def check_is_file(path: Path):
    """UserError if a path exists, but is not a regular file: reading a pipe might never end."""
    if path.exists() and not path.is_file():
        raise UserError(f"{path} is not a regular file")


def read_text(path: Path, option: str = "") -> str:
    """The text of a UTF-8 file, with its line ends unchanged, and without a byte order mark.

    option: the one that names the file, if any. UserError if the file cannot be read.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{option} {path} cannot be read: {error}".lstrip()) from None


def read_json(path: Path) -> dict:
    """The JSON object in a file. UserError if the file holds something else or cannot be read."""
    check_is_file(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        raise UserError(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(value, dict):
        raise UserError(f"{path} holds {type(value).__name__}, expected a JSON object")
    return value


def read_standard_input(what: str, may_be_empty: bool = False) -> str:
    """All of standard input as one text, read as `read_text` reads a file.

    The newline at its end is left out, because most programs add one. what: the option that asks
    for standard input. UserError if it is empty, unless it may be.
    """
    if sys.stdin.isatty():
        print_status(f"{what}: type the text, and end it with Ctrl-D on a line of its own")
    try:
        text = sys.stdin.buffer.read().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{what} cannot be read: {error}") from None
    text = without_newline(text)
    if not text and not may_be_empty:
        raise UserError(f"{what} is empty")
    return text


def piped_text() -> str:
    """All of standard input, if it is a file, or a pipe that holds data already or is closed at its other
    end. Otherwise an empty text: a pipe may stay open and silent forever."""
    with suppress(OSError):  # standard input is not a file of the system
        is_device = stat.S_ISCHR(os.fstat(sys.stdin.fileno()).st_mode)  # a terminal, or /dev/null
        if not is_device and select.select([sys.stdin], [], [], 0)[0]:
            return read_standard_input("standard input", may_be_empty=True)
    return ""


def has_silent_pipe() -> bool:
    """Whether standard input is a pipe or a socket that is open and holds nothing."""
    with suppress(OSError):  # it is not a file of the system
        mode = os.fstat(sys.stdin.fileno()).st_mode
        return (stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)) and not select.select([sys.stdin], [], [], 0)[0]
    return False


def without_newline(text: str) -> str:
    """A text without one newline at its end, which has two characters in files from Windows."""
    if text.endswith("\n"):
        text = text.removesuffix("\n").removesuffix("\r")
    return text


def run_command(main: Callable, print_error=lambda line: print(line, file=sys.stderr)):
    """Run a command's main() and exit the process. A UserError or Ctrl-C prints no traceback.

    The exit code is 2 after a UserError, whose message goes to print_error(line), and 130 after
    Ctrl-C.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that temporary directories are removed
    signal.signal(signal.SIGINT, signal.default_int_handler)
    open_closed_streams()

    def fail(text: str) -> int:
        readable = text.encode("utf-8", "backslashreplace").decode()  # it may be invalid UTF-8
        print_error(f"{Path(sys.argv[0]).name}: error: {printable(readable)}")
        return 2

    try:
        code = main()
        sys.stdout.flush()
    except ModuleNotFoundError as error:
        name = error.name or ""
        if not any(name == part or name.startswith(f"{part}.") for part in OPTIONAL):
            raise
        code = fail(f"{name} is missing, an optional part of fastpath that was deleted here, and this command needs it")
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:  # the program that reads our output has ended, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    except (UserError, OSError) as error:  # also a full disk, a file without read permission
        code = fail(str(error))
    except (MemoryError, RuntimeError) as error:
        # Out of memory, torch raises OutOfMemoryError on a GPU and a plain RuntimeError on a CPU.
        out_of_memory = isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
        if not out_of_memory and "can't allocate memory" not in str(error):
            raise
        code = fail(f"out of memory; take a smaller model, dtype, batch or prompt ({first_line(error)})")
    sys.exit(code)


def open_closed_streams():
    """Open the null device for each standard stream that the parent process has closed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # print(file=None) would write to stdout
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


# ---------------------------------------------------------------- options


class ArgumentParser(argparse.ArgumentParser):
    """An argparse parser that raises a UserError instead of printing its usage.

    The names of options may have hyphens: --max-new-tokens is --max_new_tokens. An unknown option is
    refused with the name of the most similar one.
    """

    def __init__(self, **options):
        super().__init__(**options)
        self.add_argument("--version", action=PrintVersion, nargs=0, help="print the version, and exit")

    def parse_args(self, args=None, namespace=None):
        given = [with_underscores(one) for one in (sys.argv[1:] if args is None else args)]
        for i, argument in enumerate(given):
            name = argument.partition("=")[0]
            is_known = " " in name or any(option.startswith(name) for option in self._option_string_actions)
            # argparse would read -ngl as -n with the value "gl".
            if re.match("--|-[a-zA-Z]{2}", name) and not is_known:
                values = takewhile(lambda one: not one.startswith("-"), given[i + 1 :])
                known = [option for option in self._option_string_actions if option.startswith("--")]
                similar = get_close_matches(name, known, 1)
                advice = "".join(f"; did you mean {option}?" for option in similar)
                self.error(f"unrecognized arguments: {' '.join([argument, *values])}{advice}")
        found = super().parse_args(given, namespace)
        named = vars(found).pop("named_model", None)  # see add_model_name
        if named is not None and found.checkpoint_path not in (None, named):
            self.error(f"{named!r} and --checkpoint_path {found.checkpoint_path!r} both name a model; name one")
        if named is not None:
            found.checkpoint_path = named
        return found

    def error(self, message):
        is_text = re.match("unrecognized arguments: [^-]", message) and "--" not in message
        if is_text and "--prompt" in self._option_string_actions:
            message += "; a prompt needs --prompt"
        raise UserError(f"{message} (--help lists the options)")

    def _get_values(self, action, arg_strings):
        if arg_strings == ["--"] and action.option_strings:
            # The value of --stop=--, which argparse drops in Python 3.12 and older.
            value = self._get_value(action, "--")
            self._check_value(action, value)
            return [value] if action.nargs == "+" else value
        return super()._get_values(action, arg_strings)


def with_underscores(argument: str) -> str:
    """An argument of the command line. In the name of an option, hyphens become underscores."""
    return re.sub(r"^--[^\s=]+(?=\Z|=)", lambda name: "--" + name[0][2:].replace("-", "_"), argument)


class PrintVersion(argparse.Action):
    """--version: print the version, and the commit if this is a clone, and exit."""

    def __call__(self, parser, *_):
        git = ["git", "--git-dir", Path(__file__).with_name(".git"), "rev-parse", "--short", "HEAD"]
        commit = ""
        with suppress(OSError):  # git is not installed
            commit = subprocess.run(git, capture_output=True, text=True).stdout.strip()
        print(f"fastpath {VERSION} {commit}".strip())
        parser.exit()


def add_model_name(parser: argparse.ArgumentParser, add: Callable, help: str):
    """Let the first argument without an option, or --checkpoint_path, name the model. add: the method
    that adds an option to the parser, or to one of its groups."""
    add("--checkpoint_path", "--model", "-m", metavar="MODEL", help=help)
    parser.add_argument("named_model", metavar="MODEL", nargs="?", help="the same as --checkpoint_path MODEL")


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows in --help the defaults that are not None, False or empty."""

    def _get_help_string(self, action):
        default = action.default
        if default is None or default is False or default == []:  # but 0 is shown
            return action.help
        return super()._get_help_string(action)


def number(kind: type, rule: str, allowed: Callable):
    """An argparse type for an int or a float that is `allowed`. rule: what is allowed, in words."""

    def parse(text):
        value = kind(text)
        if not allowed(value):
            raise argparse.ArgumentTypeError(f"must be {rule}, not {text}")
        return value

    parse.__name__ = kind.__name__
    return parse


positive = number(int, "at least 1", lambda n: n >= 1)
natural = number(int, "at least 0", lambda n: n >= 0)


def token_ids(text: str) -> list[int]:
    """An argparse type: token ids, separated by commas or spaces."""
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be token ids such as 5,17,33, not {text!r}") from None


# ---------------------------------------------------------------- messages, all on stderr

REFRESH_S = 0.5  # seconds between two updates of a line on a terminal
SILENT_S = 2.0  # seconds that a wait takes before a line says so
LINE_S = 10.0  # seconds between two lines about long work, if stderr is not a terminal


def print_status(text: str, dim: bool = False):
    """Print a line on stderr and flush it. dim: in a fainter colour, on a terminal.

    A line that cannot be written, for instance on a full disk, is lost: no work ends for a message.
    """
    if dim and has_colours(sys.stderr):
        text = f"\033[2m{text}\033[0m"
    with suppress(OSError):
        sys.stderr.write(text + "\n")  # one call, so that lines of two threads do not mix
        sys.stderr.flush()


def has_colours(stream) -> bool:
    if os.environ.get("NO_COLOR"):
        return False
    return stream.isatty() and os.environ.get("TERM", "dumb") != "dumb"


class Progress(tqdm):
    """How much of some work is done: shown on stderr, on a terminal as a bar, else as a line.

    unit: what is counted, as it is written after a number: "B" for bytes, " tokens", " steps".
    line_s: seconds between two lines that also give the time left; None: the lines do not give it.
    n is how much is done, `initial` how much of n was done before.
    """

    monitor_interval = 0  # tqdm starts no thread

    def __init__(self, total: int, description: str, unit: str, line_s: float | None = None):
        # With this delay and interval, tqdm draws nothing by itself, and clears nothing in close().
        mute = {"delay": 1e-3, "mininterval": float("inf"), "disable": False}
        super().__init__(
            total=total, desc=description, unit=unit, unit_scale=True, leave=False, dynamic_ncols=True, **mute
        )
        self.line_s = line_s

    def show(self):
        """Show how much is done."""
        if sys.stderr.isatty():
            self.last_print_t = time.time()  # so that close() clears the bar
            return self.refresh()
        line = f"{self.desc}: {self.n:,} of {self.total:,}{self.unit}"
        if self.unit == "B":
            line = f"{self.desc}: {self.n / 1e6:,.0f} of {self.total / 1e6:,.0f} MB"
        if self.line_s is not None and self.n > self.initial:
            seconds = (time.time() - self.start_t) * (self.total - self.n) / (self.n - self.initial)
            line += f", about {seconds:,.0f} s left"
        print_status(line)

    def write(self, text: str):
        """Print a line on stderr, above the bar."""
        if sys.stderr.isatty():
            return super().write(text, file=sys.stderr)
        print_status(text)


def counted(n: int, what: str) -> str:
    """A number of things for people: "1 token", "2 tokens"."""
    return f"1 {what}" if n == 1 else f"{n} {what}s"


def size_text(nbytes: int) -> str:
    """A number of bytes for people: "1.1 GB", "98 MB"."""
    if nbytes >= 1e9:
        return f"{nbytes / 1e9:.1f} GB"
    return f"{nbytes / 1e6:.0f} MB"


@contextmanager
def repeating(action: Callable, first_s: float, pause_s: float):
    """A context manager that calls action() from a thread, after first_s seconds, and then every pause_s."""
    done = threading.Event()

    def run():
        seconds = first_s
        while not done.wait(seconds):
            with suppress(Exception):  # as in print_status
                action()
            seconds = pause_s

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


@contextmanager
def progress_bar(total: int, description: str, unit: str, delay: float = 0.0, line_s: float | None = None):
    """A context manager that yields a Progress and shows it from a thread.

    So the bar also moves during a single long step. On a terminal it appears after `delay` seconds,
    or half a second if that is more, and is refreshed twice a second. Elsewhere, a line is printed
    every line_s seconds and gives the time left, or if line_s is None, a line without it is printed
    every LINE_S seconds.
    """
    pause_s = REFRESH_S if sys.stderr.isatty() else line_s or LINE_S
    progress = Progress(total, description, unit, line_s)
    with progress, repeating(progress.show, max(delay, pause_s), pause_s):
        yield progress


@contextmanager
def announced(text: str):
    """A context manager that prints a line if its block takes longer than 2 s."""
    with repeating(lambda: print_status(text), SILENT_S, threading.TIMEOUT_MAX):
        yield


@contextmanager
def locked(path: Path, what: str):
    """A context manager that holds a lock, which only one process can hold at a time.

    The lock is on a file, which stays. A process that is killed releases it at once. what: what a
    process does while it holds the lock, for the line that is printed if we have to wait long.
    """
    from filelock import FileLock, Timeout

    lock = FileLock(path)
    try:
        lock.acquire(timeout=SILENT_S)
    except Timeout:
        with Stopwatch(f"waiting for another process that {what}"):
            lock.acquire()
    try:
        yield
    finally:
        lock.release()


class Stopwatch:
    """Measures the time of a with block, and prints on stderr what is being done.

    `with Stopwatch("compiling", "about a minute") as watch: ...` prints at the start "compiling
    (about a minute) ...", on a terminal with a count of seconds, and the total at the end.
    Afterwards watch.seconds is the total. On a narrow terminal the end of the hint is cut off.
    """

    def __init__(self, what: str, hint: str = ""):
        self.what = what
        self.line = f"{what} ({hint})" if hint else what
        self.seconds = 0.0
        self.ticks = nullcontext()

    def __enter__(self):
        self.start = time.perf_counter()
        if sys.stderr.isatty():
            self.ticks = repeating(self._show_seconds, 0.0, REFRESH_S)
        else:
            print_status(f"{self.line} ...")
        self.ticks.__enter__()
        return self

    def _show_seconds(self):
        seconds = f" ... {time.perf_counter() - self.start:.0f} s"
        room = max(0, shutil.get_terminal_size().columns - 1 - len(seconds))  # do not wrap the line
        sys.stderr.write("\r\033[K" + self.line[:room] + seconds)
        sys.stderr.flush()

    def __exit__(self, kind, error, traceback):
        self.seconds = time.perf_counter() - self.start
        self.ticks.__exit__(None, None, None)
        if sys.stderr.isatty():
            sys.stderr.write("\r\033[K")
        if kind is None:
            print_status(f"{self.what}: {self.seconds:.1f} s")
