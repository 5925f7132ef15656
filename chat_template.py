"""A conversation to the text that a model was trained to see, by the model's own template (Jinja2).

A template is a program from whoever made the checkpoint. The sandbox keeps it from Python's insides, but not from
looping for ever or filling the memory, so it runs in a process of its own (this file, as a program), which the system
ends when it takes too long. The process stays for the next conversation: a rendering takes a millisecond.

Read `ChatTemplate` for the way in; what is below it runs in the other process, without torch. What templates may use
is what transformers gives them: github.com/huggingface/transformers, utils/chat_template_utils.py.
"""

import datetime
import json
import resource
import signal
import subprocess
import sys
import weakref
from contextlib import suppress
from pathlib import Path

if __name__ != "__main__":  # it brings torch, for which the other process has no use
    from cli import UserError

SECONDS = 10  # a rendering's time; real templates take a few milliseconds
MEMORY = 1 << 30  # bytes of address space
CHARACTERS = 10_000_000  # of text


class ChatTemplate:
    """The template of a checkpoint directory, with the tokenizer that its text is for."""

    def __init__(self, directory: Path, tokenizer):
        self.path, self.tokenizer, self.process = Path(directory) / "chat_template.jinja", tokenizer, None
        if not self.path.is_file():  # a device or a pipe might never end
            raise UserError(f"{directory} has no chat template: the model was not made for conversation, or lost it")
        try:
            self.source = self.path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{self.path} cannot be read: {error}") from None

    def render(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """Text of messages ({"role": "user", "content": "Hello"}), up to where the assistant's next words begin.

        UserError where the template refuses them (some know no system message), is broken or takes too long.
        """
        values = {"messages": messages, "add_generation_prompt": add_generation_prompt, "tools": None}
        values |= {"documents": None} | self.tokenizer.named_tokens
        request = json.dumps({"source": self.source, "values": values}).encode() + b"\n"
        try:
            answer = self._exchange(request)
        except BaseException:  # Ctrl-C, say: an answer that is still to come must not be taken for the next one's
            if self.process is not None:
                self.process.kill()
                self.process.wait()
            raise
        if not answer:
            code = self.process.wait()
            took_long = code == -signal.SIGALRM
            why = f"took more than {SECONDS} s" if took_long else f"ended the process that ran it (exit code {code})"
            raise UserError(f"{self.path}: the chat template {why}")
        answer = json.loads(answer)
        if "error" in answer:
            raise UserError(f"{self.path}: the chat template {answer['error']}")
        return answer["text"]

    def _exchange(self, request: bytes) -> bytes:
        """A line to the other process, which is started where there is none, for a line; empty where it ended."""
        if self.process is None or self.process.poll() is not None:
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            self.process = subprocess.Popen([sys.executable, str(Path(__file__).resolve())], **pipes)
            weakref.finalize(self, self.process.stdin.close)  # at which it ends; Popen itself would keep it open
        with suppress(BrokenPipeError):  # what it says at its end tells why
            self.process.stdin.write(request)
            self.process.stdin.flush()
        return self.process.stdout.readline()

    def encode(self, messages: list[dict]) -> list[int]:
        """Token ids of `render`; a beginning token is there only if the template writes it."""
        ids = self.tokenizer.encode(self.render(messages), add_bos=False)
        if not ids:
            raise UserError(f"{self.path}: the chat template makes nothing of the conversation")
        return ids

    def end_ids(self) -> set[int]:
        """The special token with which the template ends an answer: a model ends its own with it, too.

        Not every checkpoint lists it among its end tokens. Empty where no special token follows an answer.
        """
        words = "An answer."
        try:
            talk = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": words}]
            text = self.render(talk, add_generation_prompt=False)
        except UserError:  # it knows no such conversation
            return set()
        _, answer, rest = text.rpartition(words)
        after = self.tokenizer.encode(rest, add_bos=False) if answer else []
        return set([i for i in after if i in self.tokenizer.vocabulary.special_ids][:1])


# ---------------------------------------------------------------- the other process


def serve():
    """Render line by line: {"source", "values"} in, {"text"} or {"error"} out, both as JSON."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started this one
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # which that program may have ignored or blocked
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGALRM])
    with suppress(ValueError, OSError):  # not every system has this limit
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_REAL, SECONDS)  # whatever is running then, the system ends this process
        try:
            answer = {"text": render(**json.loads(line))}
        except MemoryError:
            answer = {"error": f"used more than {MEMORY >> 30} GB of memory"}
        except Exception as error:  # templates can raise anything
            words = " ".join((str(error) or type(error).__name__).split())[:300]
            answer = {"error": "fails: " + "".join(c for c in words if c.isprintable())}  # no escapes for a terminal
        answer = json.dumps(answer).encode() + b"\n"
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.stdout.buffer.write(answer)
        sys.stdout.buffer.flush()


def render(source: str, values: dict) -> str:
    from jinja2 import ext, nodes
    from jinja2.exceptions import SecurityError, TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from jinja2.utils import Namespace

    class Generation(ext.Extension):
        """{% generation %} marks the assistant's words for training; here it is its content and nothing else."""

        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    class PlainNamespace(Namespace):
        def __init__(*args, **kwargs):  # as Jinja's: `self` may be a name of the template's own
            for name in dict(*args[1:], **kwargs):
                check_name(name)
            Namespace.__init__(*args, **kwargs)

        def __setitem__(self, name, value):
            check_name(name)
            super().__setitem__(name, value)

    def check_name(name):
        if str(name).startswith("_"):
            raise SecurityError(f"may not set {name!r} on a namespace")

    def raise_exception(message):
        raise TemplateError(message)

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):  # Jinja's own escapes HTML
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, Generation]
    )
    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": PlainNamespace,
    }
    text, length = [], 0
    for piece in environment.from_string(source).generate(values):
        text.append(piece)
        length += len(piece)
        if length > CHARACTERS:
            raise TemplateError(f"it writes more than {CHARACTERS:,} characters")
    return "".join(text)


if __name__ == "__main__":
    serve()
