"""The server's app without a model: any chat template, and an engine that answers with given texts."""

import json
from contextlib import contextmanager
from pathlib import Path

from servers import CONTEXT, KEY

from checkpoint import read_config
from server.api import ServedModel
from server.metrics import Metrics
from server.pipe_messages import Settings, Update
from server.request_fields import ApiError
from text.tokenizer import TokenizerFiles, read_tokenizer_files

# This template writes everything that it gets, so that prompts show what was translated.
TEMPLATE = """
{%- if enable_thinking is defined %}{{ 'thinking %s\\n' % enable_thinking }}{% endif %}
{%- if tools %}{{ tools | tojson }}{{ ' in <tool_call></tool_call>\\n' }}{% endif %}
{%- for m in messages %}[{{ m.role }}] {{ '<think>' + m.reasoning_content + '</think>\\n' if m.reasoning_content }}
    {{- m.content }}
    {%- for c in m.tool_calls or [] %}<tool_call>
{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}
</tool_call>
    {%- endfor %}{{ '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}[assistant]{{ ' ' }}{% endif %}"""


def files_with(directory: Path, template: str | None) -> TokenizerFiles:
    """The files of a tokenizer, with another chat template."""
    files = read_tokenizer_files(directory)
    files.template = template
    return files


def served_model(directory: Path, template: str) -> ServedModel:
    return ServedModel(read_config(directory), files_with(directory, template), "tiny", CONTEXT)


def app_settings(directory: Path, template: str, key: str | None = KEY) -> Settings:
    return Settings(read_config(directory), files_with(directory, template), "tiny", CONTEXT, 1, 1, key)


class ScriptedEngine:
    """An engine that answers each request with `updates`: fields of an Update, or an error."""

    def __init__(self):
        self.metrics = Metrics()
        self.updates = []
        self.completion = None
        self.error = None

    def check_room(self):
        if self.error is not None:
            raise self.error

    @contextmanager
    def reserve(self):
        yield

    def generate(self, completion, receive):
        self.completion = completion
        (choice,) = completion.choices
        return Answer([(choice, update) for update in self.updates])


class Answer:
    """A stream of updates with the interface of engine_client.UpdateStream."""

    def __init__(self, updates: list):
        self.updates = iter(updates)

    def __aiter__(self):
        return self

    async def __anext__(self):
        choice, fields = next(self.updates, (None, None))
        if choice is None:
            raise StopAsyncIteration
        if isinstance(fields, ApiError):
            raise fields
        return choice, Update(0, **{"completion_tokens": 9, "cached_tokens": 4} | fields)

    def close(self):
        pass


def events_of(response) -> list[dict]:
    events = []
    for part in response.text.removesuffix("\n\n").split("\n\n"):
        name, _, data = part.partition("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events
