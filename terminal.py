"""What people see while they wait, on stderr: dim remarks, and a line that tells how long something has taken.

Colours and moving lines are for terminals only; in a file or a pipe the same things are plain lines.
"""

import json
import os
import shutil
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path


def say(text: str):
    """A line on stderr, now."""
    print(text, file=sys.stderr, flush=True)


def has_colours(stream) -> bool:
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"


def remark(text: str):
    """A line beside the conversation, dim where there are colours."""
    say(f"\033[2m{text}\033[0m" if has_colours(sys.stderr) else text)


def progress_bar(total: int, what: str, delay: float = 0.0):
    """A bar of bytes for terminals, as a context manager with update(n); it comes after `delay` seconds."""
    from tqdm import tqdm

    options = {"unit": "B", "unit_scale": True, "leave": False, "disable": None, "dynamic_ncols": True}
    return tqdm(total=total, desc=what, delay=delay, **options)


class Waiting:
    """`with Waiting(what, key) as w:` says what is going on and how long it took last time; then w.seconds.

    key: a name for the work among all that is ever waited for, under which the time is remembered in the user's cache
    directory. A terminal shows the seconds as they pass.
    """

    def __init__(self, what: str, key: str, first_time: str = ""):
        self.what, self.key, self.done, self.seconds = what, key, threading.Event(), 0.0
        last = read_durations().get(key)
        plausible = isinstance(last, (int, float)) and 0 <= last < 1e6
        hint = f"{last:.0f} s last time" if plausible else first_time
        self.line = f"{what} ({hint}) ..." if hint else f"{what} ..."

    def __enter__(self):
        self.start = time.perf_counter()
        self.thread = None
        if sys.stderr.isatty():
            self.thread = threading.Thread(target=self._tick, daemon=True)
            self.thread.start()
        else:
            say(self.line)
        return self

    def _tick(self):
        while True:
            line = f"{self.line} {time.perf_counter() - self.start:.0f} s"
            columns = shutil.get_terminal_size().columns
            sys.stderr.write("\r\033[K" + line[max(0, len(line) - columns + 1) :])  # the end is what moves
            sys.stderr.flush()
            if self.done.wait(0.5):
                return

    def __exit__(self, kind, error, traceback):
        self.seconds = time.perf_counter() - self.start
        if self.thread is not None:
            self.done.set()
            self.thread.join()
            sys.stderr.write("\r\033[K")
        if kind is None:
            say(f"{self.what}: {self.seconds:.1f} s")
            remember_duration(self.key, self.seconds)


def durations_file() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "fastpath" / "durations.json"


def read_durations() -> dict:
    """Seconds by key; empty where there is no such file, or none that can be read."""
    with suppress(OSError, ValueError, RuntimeError):  # RuntimeError: no home directory
        found = json.loads(durations_file().read_text())
        return found if isinstance(found, dict) else {}
    return {}


def remember_duration(key: str, seconds: float):
    with suppress(OSError, RuntimeError):  # a disk that is full or read-only only costs the hint
        path = durations_file()
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps(read_durations() | {key: round(seconds, 1)}, indent=1))
        temporary.replace(path)
