"""The server's page, server/page.html, in a real browser.

The tests with a browser need Debian's packages chromium and chromium-driver. Some of them talk to serve.py. Where a
test wants certain answers or failures, a stand-in server serves the same page and says what the test has scripted.

    python tests/server/test_page.py

talks to the default model and writes the pictures of docs/serving.md. (Theirs have the font Inter as system-ui.)
"""

import json
import re
import shutil
import sys
import tempfile
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import pytest
import torch
from conftest import ROOT, tiny_chat_llama
from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from servers import KEY, running, wait_for
from test_page_served import get
from texts import TEMPLATE

from convert_hf_checkpoint import convert
from sources.opening import open_hf

pytestmark = pytest.mark.full

# ---------------------------------------------------------------- a browser


class Page:
    """The page in a browser, with what a person can do to it and see of it."""

    def __init__(self, address: str):
        options = webdriver.ChromeOptions()
        options.binary_location, driver = shutil.which("chromium"), shutil.which("chromedriver")
        assert options.binary_location and driver, "apt-get install chromium chromium-driver"
        for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
            options.add_argument(argument)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        self.address, self.driver = address, webdriver.Chrome(options, Service(driver))
        try:
            self.resize(1100, 750)
            self.load()
        except BaseException:
            self.driver.quit()
            raise

    def load(self):
        self.driver.get(self.address)
        self.wait(lambda: self.js("return health !== 'unknown'"), "the page to ask for the server's health")

    def resize(self, width: int, height: int):
        metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)

    def scheme(self, name: str):
        """Prefer "dark" or "light"."""
        features = [{"name": "prefers-color-scheme", "value": name}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def js(self, source: str, *arguments):
        return self.driver.execute_script(source, *arguments)

    def find(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of the visible elements, to the letter."""
        found = "[...document.querySelectorAll(arguments[0])].filter((one) => one.checkVisibility())"
        return self.js(f"return {found}.map((one) => one.textContent)", selector)

    questions = property(lambda self: self.texts("article.user .text"))
    answers = property(lambda self: self.texts("article.assistant .text"))
    notes = property(lambda self: self.texts(".note"))
    notice = property(lambda self: self.find("#notice").text)
    wait = staticmethod(wait_for)

    def press(self, *keys: str):
        """Press keys wherever the focus is."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def tab_to(self, name: str, key: str = Keys.TAB) -> list[str]:
        """Press the Tab key until the control of this name has the focus; the names on the way."""
        names = []
        while name not in names:
            assert len(names) < 20, names
            self.press(key)
            names.append(self.driver.switch_to.active_element.accessible_name)
        return names

    def click(self, label: str):
        """Click on the one visible button that has this label."""
        found = [one for one in self.driver.find_elements(By.TAG_NAME, "button") if one.is_displayed()]
        (button,) = [one for one in found if label in (one.text, one.get_attribute("aria-label"))]
        button.click()

    def set(self, **settings):
        """Type into the settings."""
        self.click("Settings")
        for name, value in settings.items():
            field = self.find(f"#settings [name={name}]")
            field.clear()
            field.send_keys(value)
        self.press(Keys.ESCAPE)

    def send(self, text: str):
        self.find("#input").send_keys(text.replace("\n", Keys.SHIFT + Keys.ENTER + Keys.NULL), Keys.ENTER)

    def done(self):
        self.wait(lambda: self.find("#send").text == "Send", "the answer to end")

    def say(self, text: str) -> str:
        """Send a message and return the whole answer."""
        self.send(text)
        self.done()
        return "".join(self.answers[-1:])

    def wait_for_text(self, text: str):
        self.wait(lambda: text in self.find("body").text, f"the page to say {text!r}")

    def complaints(self) -> list[str]:
        """What the browser complained about in its console, but for answers that are errors on purpose."""
        lines = [entry["message"] for entry in self.driver.get_log("browser")]
        return [line for line in lines if "Failed to load resource" not in line]


@contextmanager
def browsing(port: int):
    page = Page(f"http://127.0.0.1:{port}/")
    try:
        yield page
        assert page.complaints() == []
    finally:
        page.driver.quit()


# ---------------------------------------------------------------- the stand-in server


class Breaks(Exception):
    """In a script: the connection breaks here."""


def refusal(status: int, message: str, **headers: str) -> tuple:
    """In a script: an OpenAI error object instead of an answer."""
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": message}}


def event(finish_reason: str | None = None, **delta) -> dict:
    """In a script: an event with any delta, such as a piece of a call."""
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": finish_reason}], "usage": None}


def call_piece(index: int, arguments: str = "", **fields) -> dict:
    """In a script: a piece of a tool call. The first one has a name and an id."""
    function = {"arguments": arguments} | {name: fields.pop(name) for name in ("name",) if name in fields}
    return event(tool_calls=[{"index": index, "function": function} | fields])


class StandIn(ThreadingHTTPServer):
    """Serves the page, and a scripted answer to each chat request.

    An answer is a refusal(), or a list of texts to be streamed; in a list, a threading.Event is waited for, a dict is
    sent as it is, and Breaks closes the connection.
    """

    daemon_threads = True

    def __init__(self, *script, port=0, health="ready"):
        self.script, self.health, self.template = list(script), health, "{{ messages }}"
        self.bodies, self.health_requests, self.events = [], 0, []
        self.page = get("/")
        super().__init__(("127.0.0.1", port), Handler)
        threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True).start()

    @property
    def port(self) -> int:
        return self.server_address[1]

    def messages(self) -> list[tuple[str, str]]:
        """(role, content) of the messages of the last request."""
        return [(one["role"], one["content"]) for one in self.bodies[-1]["messages"]]

    def stop(self):
        self.shutdown()
        self.server_close()

    def handle_error(self, request, address):
        if not isinstance(sys.exc_info()[1], ConnectionError):  # of a browser that has gone
            super().handle_error(request, address)


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments):
        pass

    def answer(self, status: int, headers: dict, body: bytes):
        self.send_response(status)
        for name, value in (headers | {"Content-Length": str(len(body))}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def answer_json(self, value, status: int = 200, headers: dict | None = None):
        self.answer(status, {"Content-Type": "application/json"} | (headers or {}), json.dumps(value).encode())

    def do_GET(self):
        server = self.server
        if self.path == "/":
            self.answer(200, server.page.headers, server.page.body)
        elif self.path == "/health":
            server.health_requests += 1
            self.answer_json({"status": server.health}, 200 if server.health == "ready" else 503)
        elif self.path == "/v1/models":
            self.answer_json({"data": [{"id": "stand-in", "max_model_len": 100, "sampling": {"temperature": 0.6}}]})
        else:
            self.answer_json({"chat_template": server.template})

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append(json.loads(body))
        answer = self.server.script.pop(0)
        if isinstance(answer, tuple):
            status, headers, value = answer
            return self.answer_json(value, status, headers)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        for n, part in enumerate(answer, 1):
            if isinstance(part, threading.Event):
                part.wait(60)
            elif part is Breaks:
                return
            else:
                choice = {"index": 0, "delta": {"content": part}, "finish_reason": None}
                event = part if isinstance(part, dict) else {"choices": [choice], "usage": {"completion_tokens": n}}
                self.wfile.write(b"data: %b\n\n" % json.dumps(event).encode())
        self.wfile.write(b"data: [DONE]\n\n")


@contextmanager
def scripted(*script, **options):
    """(page, server) with a stand-in server."""
    server = StandIn(*script, **options)
    try:
        with browsing(server.port) as page:
            yield page, server
    finally:
        server.stop()


# ---------------------------------------------------------------- talking to the stand-in

MARKUP = """<script>window.ran = 1; alert(1)</script> <img src=x onerror="window.ran = 1; alert(2)">
<b>bold</b> **strong** [link](javascript:alert(3)) <svg onload=alert(4)> &lt;i&gt; </div></body>"""


def test_markup_is_shown_and_does_not_run():
    with scripted([MARKUP[:90], MARKUP[90:]], refusal(500, MARKUP), [MARKUP]) as (page, server):
        shown = MARKUP.replace("**strong**", "strong")  # which is the only markup that answers may have
        assert page.say(MARKUP) == shown and page.questions == [MARKUP]
        page.say("again")
        assert MARKUP in page.notes[-1]
        page.set(system=MARKUP)
        page.load()  # what the browser kept is text, too
        assert page.answers == [shown] and page.questions == [MARKUP, "again"]
        page.say("```\n" + MARKUP + "\n```")
        assert page.texts("pre") == [MARKUP]
        assert page.js("return window.ran") is None
        made = "article script, article img, article b, article a"
        assert page.js("return document.querySelectorAll(arguments[0]).length", made) == 0
        assert server.messages()[0] == ("system", MARKUP)


# The last answer as nested lists: a tag and its contents
OUTLINE = """
const inside = (node) => [...node.childNodes].filter((one) => one.textContent !== "").map((one) =>
  one.nodeName === "#text" ? one.data : [one.localName, ...inside(one)]);
return inside([...document.querySelectorAll("article.assistant .text")].at(-1));
"""


def test_lists_bold_text_and_inline_code():
    answer = """Two *ways*, `x**2` and **`pow` or more**:

1. **First**
   - inner `a_b`
   - other
2) Second
   line

   ```c
   - x;
   ```

* star
10. ten
  * in ten
The end: 2 ** 3 **4 ** 5.
"""
    span = ["span", "Two *ways*, ", ["code", "x**2"], " and ", ["strong", ["code", "pow"], " or more"], ":"]
    inner = ["ul", ["li", ["span", "inner ", ["code", "a_b"]]], ["li", ["span", "other"]]]
    code = ["div", ["button", "Copy code"], ["pre", "- x;"]]
    expected = [
        span,
        ["ol", ["li", ["span", ["strong", "First"]], inner], ["li", ["span", "Second\nline"], code]],
        ["ul", ["li", ["span", "star"]]],
        ["ol", ["li", ["span", "ten"], ["ul", ["li", ["span", "in ten"]]]]],
        ["span", "The end: 2 ** 3 **4 ** 5.\n"],
    ]
    with scripted([answer], list(answer)) as (page, _):
        page.say("whole")
        assert page.js(OUTLINE) == expected
        assert page.js("return [...document.querySelectorAll('ol')].map((one) => one.start)") == [1, 10]
        page.say("letter by letter")
        assert page.js(OUTLINE) == expected
        page.say("1. My **own** `text`")
        assert page.questions[-1] == "1. My **own** `text`"


HOSTILE = {
    "unclosed": "`a **b\n** c** d ` e\n**\n`\n-\n1.\n```", "bold": "**a " * 5000, "ticks and letters": "```a" * 5000,
    "stars": "*" * 20_000, "markers": "- " * 10_000 + "x", "newlines": "\n" * 20_000 + "x",
    "deep": "".join(" " * i + "- x\n" for i in range(200)),
}  # fmt: skip


def test_hostile_markup():
    """Each of these texts is drawn, without a letter missing."""
    script = [[text[:5], text[5:-5], text[-5:]] for text in HOSTILE.values()]
    with scripted(*script) as (page, _):
        for name, text in HOSTILE.items():
            shown = page.say(name)
            letters = [re.sub("[^a-z]", "", one) for one in (text, shown.replace("Copy code", ""))]
            assert letters[0] == letters[1], name


@pytest.mark.parametrize("piece", ["A **word** or `two`.\n\n", "1. one\n   - `two`\n"])
def test_only_the_end_of_a_growing_answer_is_drawn_again(piece):
    """The nodes that the page makes for an answer of 20,000 letters are about as many as it has in the end."""
    with scripted() as (page, _):
        made, left = page.js(
            """
            const node = document.createElement("div"), text = arguments[0].repeat(20000 / arguments[0].length);
            let made = 0;
            for (const create of ["createElement", "createTextNode"]) {
              const original = document[create];
              document[create] = function (...all) { made++; return original.apply(document, all); };
            }
            for (let end = 0; end <= text.length; end += 5) drawText(node, text.slice(0, end), LIST_LEVELS + 1);
            drawText(node, text, LIST_LEVELS + 1);
            const walker = document.createTreeWalker(node);
            let left = 0;
            while (walker.nextNode()) left++;
            return [made, left];
            """,
            piece,
        )
        assert left > 1000 and made < 2 * left, (made, left)


@pytest.mark.parametrize("clipboard", [True, False])
def test_code_is_copied(clipboard):
    """Also where the browser has no clipboard for scripts, as with http from another host; with mouse and keyboard."""
    code, more = "x = 1\n\tif <b>:\n  y = 2", threading.Event()
    with scripted(["One:\n```\n1\n```\nTwo:\n```\n" + code + "\n```\n", more, "Done."]) as (page, _):
        if clipboard:
            granted = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": page.address}
            page.driver.execute_cdp_cmd("Browser.grantPermissions", granted)
        else:
            page.js("Object.defineProperty(navigator, 'clipboard', { value: undefined })")
        page.send("code?")
        page.wait(lambda: len(page.texts(".code button")) == 2, "the code")
        page.driver.find_elements(By.CSS_SELECTOR, ".code button")[1].click()  # while the answer goes on
        page.wait(lambda: page.texts(".code button") == ["Copy code", "Copied"], "the button to say so")
        page.find("#input").send_keys(Keys.CONTROL + "v" + Keys.NULL)
        assert page.find("#input").get_attribute("value") == code
        more.set()
        page.done()
        page.wait(lambda: page.texts(".code button") == ["Copy code", "Copy code"], "the buttons to be as before")
        for name in ("Retry", "Copy code", "Copy code"):
            page.tab_to(name, Keys.SHIFT + Keys.TAB + Keys.NULL)
        page.press(Keys.ENTER)
        page.wait(lambda: page.texts(".code button") == ["Copied", "Copy code"], "the button to say so")
        page.find("#input").send_keys(Keys.CONTROL + "a" + Keys.NULL, Keys.CONTROL + "v" + Keys.NULL)
        assert page.find("#input").get_attribute("value") == "1"


# ---------------------------------------------------------------- thinking, tools and JSON


def test_thinking_is_folded_when_the_answer_begins():
    first, second = threading.Event(), threading.Event()
    thoughts = [event(reasoning_content=one) for one in ("\nHm, <b>", "2", "+2\n")]
    answer = [*thoughts, first, event(reasoning_content=None, content="\n\nFo"), second, "ur."]
    with scripted(answer, [*thoughts, event("length")], ["Five."]) as (page, server):
        page.send("What is 2+2?")
        page.wait(lambda: page.texts(".folded p") == ["Hm, <b>2+2"], "the thinking")
        assert page.texts(".folded[open] summary") == ["Thinking"]
        first.set()
        page.wait(lambda: page.answers == ["Fo"], "the answer to begin")
        assert page.texts(".folded p") == []
        page.tab_to("Thinking", Keys.SHIFT + Keys.TAB + Keys.NULL)
        page.press(Keys.SPACE)
        second.set()
        page.done()
        assert page.texts(".folded p") == ["Hm, <b>2+2"] and page.answers == ["Four."]  # the reader has opened it
        page.load()
        assert page.texts(".folded summary") == ["Thinking"] and page.texts(".folded p") == []
        page.say("And 2+3?")
        assert "Cut off" in page.notes[-1] and page.answers == ["Four."]
        page.say("And now?")
        assert "Hm" not in json.dumps(server.bodies[1:])
        assert server.messages()[1:] == [("assistant", "\n\nFour."), ("user", "And 2+3?\n\nAnd now?")]


TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("sum", "now")]
SUM, NOW = '{"a": [1, "<b>"]}', "{not JSON"
PIECES = [{"index": 0, "function": {"arguments": SUM[7:]}}]
PIECES += [{"index": 1, "id": "call_2", "type": "function", "function": {"name": "now", "arguments": ""}}]
CALLS = [
    event(role="assistant", content=None),
    call_piece(0, id="call_1", type="function", name="sum"),
    *(call_piece(0, letter) for letter in SUM[:7]),
    event(tool_calls=PIECES),
    call_piece(1, NOW[:3]),
    call_piece(1, NOW[3:]),
    event("tool_calls"),
]


def message_of_calls() -> dict:
    functions = [{"name": "sum", "arguments": SUM}, {"name": "now", "arguments": NOW}]
    calls = [{"id": f"call_{i}", "type": "function", "function": one} for i, one in enumerate(functions, 1)]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def test_calls_of_tools_and_their_results():
    with scripted(CALLS, ["Three."], ["Four."], ["Fine."]) as (page, server):
        page.set(tools=json.dumps(TOOLS))
        page.say("1 + 2?")
        assert server.bodies[0]["tools"] == TOOLS and page.answers == []
        assert page.texts(".folded summary") == ["Call of sum", "Call of now"] and page.texts(".folded pre") == []
        page.tab_to("Call of sum", Keys.SHIFT + Keys.TAB + Keys.NULL)
        page.press(Keys.ENTER)
        assert page.texts(".folded pre") == ['{\n  "a": [\n    1,\n    "<b>"\n  ]\n}']
        page.js("document.querySelectorAll('.calls .folded')[1].open = true")
        assert page.texts(".folded pre")[1] == NOW
        assert page.find("#input").accessible_name == "Result of sum (1 of 2)"
        page.send("3 **b**")
        page.load()  # a conversation is kept in the middle of the results, too
        assert page.find("#input").accessible_name == "Result of now (2 of 2)" and len(server.bodies) == 1
        assert page.say('{"time": "12:00"}') == "Three."
        results = [("call_1", "3 **b**"), ("call_2", '{"time": "12:00"}')]
        results = [{"role": "tool", "content": text, "tool_call_id": name} for name, text in results]
        question = {"role": "user", "content": "1 + 2?"}
        assert server.bodies[1]["messages"] == [question, message_of_calls(), *results]
        assert page.texts("article.tool h2") == ["Result of sum", "Result of now"]
        assert page.find("#input").accessible_name == "Your message"
        page.click("Edit")  # the last result
        assert page.find("#input").get_attribute("value") == results[1]["content"]
        page.click("Edit")
        assert page.find("#input").accessible_name == "Result of sum (1 of 2)"
        page.find("#input").clear()
        page.send("4")
        assert page.say("5") == "Four."
        page.say("Thanks")
        assert [role for role, _ in server.messages()] == ["user", "assistant", "tool", "tool", "assistant", "user"]


def test_calls_that_are_not_whole_are_not_sent():
    half, wait = CALLS[:6], threading.Event()
    with scripted([*half, event("length")], ["Look", *half, wait], [*half, Breaks], ["Yes."]) as (page, server):
        page.say("one")
        assert "Cut off" in page.notes[-1] and page.find("#input").accessible_name == "Your message"
        page.send("two")
        page.wait(lambda: len(page.texts(".folded summary")) == 2, "the second call")
        page.click("Stop")
        page.done()
        page.say("three")
        assert "broke" in page.notes[-1]
        wait.set()
        page.say("four")
        texts = [("user", "one\n\ntwo"), ("assistant", "Look"), ("user", "three\n\nfour")]
        assert server.bodies[-1]["messages"] == [{"role": role, "content": text} for role, text in texts]


# ---------------------------------------------------------------- conversations


def test_the_conversation_and_the_settings_outlive_a_reload():
    """Also those of an earlier version of the page."""
    said = {"role": "assistant", "content": "Hi **you**", "answering": False}
    said |= {"tokens": 2, "firstTokenMs": 80, "note": ""}
    settings = {"system": "Be kind.", "temperature": "0.5", "top_p": "0.9", "max_tokens": "", "seed": "7"}
    kept = {"messages": [{"role": "user", "content": "Hello"}, said], "settings": settings}
    kept["previous"] = [{"role": "user", "content": "before"}]
    more = threading.Event()
    with scripted(["First."], ["Half an", " answer", more, " and more"], ["Third."]) as (page, server):
        page.js("localStorage.setItem('fastpath', arguments[0])", json.dumps(kept))
        page.load()
        assert page.questions == ["Hello"] and page.answers == ["Hi you"]
        page.say("one")
        turns = [("system", "Be kind."), ("user", "Hello"), ("assistant", "Hi **you**"), ("user", "one")]
        assert server.messages() == turns and server.bodies[0]["seed"] == 7
        page.set(temperature="0.25", system="Be brief.")
        page.send("two")
        page.wait_for_text("Half an answer")
        page.load()
        assert page.answers == ["Hi you", "First.", "Half an answer"] and page.questions == ["Hello", "one", "two"]
        assert "Stopped" in page.notes[-1]
        more.set()
        page.say("three")
        turns = [("system", "Be brief."), *turns[1:], ("assistant", "First."), ("user", "two")]
        assert server.messages() == [*turns, ("assistant", "Half an answer"), ("user", "three")]
        assert (server.bodies[-1]["temperature"], server.bodies[-1]["seed"]) == (0.25, 7)
        page.click("New conversation")
        assert len(page.js("return JSON.parse(localStorage.getItem('fastpath')).previous")) == 8


def test_settings_become_fields_of_the_request():
    """What is no JSON, or not of the kind that is needed, is marked and left out."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    with scripted(*[['{"a": 1}']] * 9) as (page, server):
        page.say("one")
        fields = {"messages", "stream", "stream_options"}
        assert page.js("return settings.elements.temperature.placeholder") == "0.6"
        assert server.bodies[0].keys() == fields  # all settings are the server's
        assert server.bodies[0]["stream_options"]["include_usage"] is True
        numbers = {"temperature": 0, "top_p": 0.5, "max_tokens": 7, "seed": 0}
        page.set(**{name: str(value) for name, value in numbers.items()}, system="Be\nkind.")
        for one in (schema, {}):
            page.set(schema=json.dumps(one))
            assert page.say("two") == '{"a": 1}'
            wanted = {"type": "json_schema", "json_schema": {"name": "answer", "schema": one}}
            body = server.bodies[-1]
            assert {name: body[name] for name in body.keys() - fields} == numbers | {"response_format": wanted}
        assert server.messages()[0] == ("system", "Be\nkind.")
        for text in ("{", '"text"', "null", "[]"):
            page.set(schema=text)
            assert page.find("[name=schema]").get_attribute("aria-invalid") == "true"
            page.say(text)
            assert "response_format" not in server.bodies[-1] and "not valid JSON" in page.notice
        page.load()
        assert page.find("[name=schema]").get_attribute("aria-invalid") == "true"
        page.set(tools='{"type": "function"}')
        page.say("a list is needed")
        assert page.find("[name=tools]").get_attribute("aria-invalid") == "true" and "tools" not in server.bodies[-1]
        page.click("Settings")
        page.click("Back to the defaults")
        page.wait(lambda: page.texts("[aria-invalid=true]") == [], "the marks to go")
        page.press(Keys.ESCAPE)
        page.say("off")
        assert server.bodies[-1].keys() == fields and page.notice == ""
        assert [role for role, _ in server.messages()] == ["user", "assistant"] * 8 + ["user"]


def test_retry_and_edit_and_a_new_conversation():
    """Two tabs have one conversation."""
    with scripted(["One."], ["Two."], ["Two again."], ["Three."], ["Four."], ["Five."]) as (page, server):
        page.say("first")
        page.say("second")
        page.click("Retry")
        page.done()
        assert page.answers == ["One.", "Two again."]
        assert server.bodies[2]["messages"] == server.bodies[1]["messages"]
        page.click("Edit")
        assert page.questions == ["first"] and page.find("#input").get_attribute("value") == "second"
        page.say(" and third")
        assert page.questions == ["first", "second and third"] and page.answers == ["One.", "Three."]
        page.click("New conversation")
        assert page.questions == page.answers == []
        page.click("Bring back the previous conversation")
        assert page.questions == ["first", "second and third"] and page.answers == ["One.", "Three."]
        page.click("New conversation")
        first = page.driver.current_window_handle
        page.driver.switch_to.new_window("tab")
        page.load()
        page.say("fourth")
        assert server.messages() == [("user", "fourth")]
        page.driver.switch_to.window(first)
        page.wait(lambda: page.answers == ["Four."], "the other tab's answer")
        page.say("fifth")
        assert [text for _, text in server.messages()] == ["fourth", "Four.", "fifth"]


def test_errors_are_shown_in_words():
    """A stream that breaks keeps its text."""
    told = {"error": {"message": "the engine has stopped"}}
    too_long = refusal(400, "the context has 100 tokens")
    too_long[2]["error"]["code"] = "context_length_exceeded"
    failures = refusal(400, "temperature is below 0"), (502, {}, "no object"), too_long
    with scripted(["Some", " text", Breaks], ["More", told], *failures, ["Yes."]) as (page, server):
        assert page.say("one") == "Some text"
        assert "broke" in page.notes[-1]
        said = ("the engine has stopped", "temperature is below 0", "the status 502", "Begin a new one")
        for text in said:
            page.click("Retry")
            page.wait_for_text(text)
            page.done()
            assert page.answers == (["More"] if text == said[0] else []) and server.messages() == [("user", "one")]
        assert "the context has 100 tokens" in page.notes[-1]
        page.say("two")
        assert server.messages() == [("user", "one\n\ntwo")]  # nothing of what failed, and the roles alternate


def test_a_busy_server_is_asked_again():
    busy = refusal(503, "too many requests", Retry_After="1")
    stopped = refusal(503, "too many", Retry_After="1000")
    with scripted(busy, refusal(429, "too many", Retry_After="2"), ["Now."], stopped, *[busy] * 6) as (page, server):
        page.send("hello")
        page.wait_for_text("too many requests). Trying again in 1 s.")
        page.done()
        assert page.answers == ["Now."] and page.notes == [] and len(server.bodies) == 3
        assert server.bodies[0] == server.bodies[1] == server.bodies[2]
        page.send("again")
        page.wait_for_text("Trying again in 1000 s.")
        page.press(Keys.ESCAPE)
        page.done()
        assert page.notes == ["Stopped."] and len(server.bodies) == 4
        page.click("Retry")
        page.done()
        assert page.notes == ["too many requests"] and server.script == [], "after some tries it ends"


def test_the_state_of_the_server_is_shown():
    """Also that it is gone, and is back."""
    with scripted(["One."], health="starting") as (page, server):
        asked = server.health_requests
        for state in ("starting", "broken"):
            server.health, words = state, page.js("return HEALTH[arguments[0]]", state)
            page.wait(lambda words=words: page.notice == words, "the state")
            assert len(words) > 20
        assert server.health_requests > asked
        server.health = "ready"
        page.wait_for_text("The server is ready again.")
        page.say("first")
        server.stop()
        page.say("second")
        assert page.notes == ["The server cannot be reached."]
        page.wait_for_text("This page keeps looking for it.")
        back = StandIn(["Two."], port=server.port)
        try:
            page.wait_for_text("The server is ready again.")
            page.click("Retry")
            page.done()
            assert page.answers == ["One.", "Two."] and page.notice == ""
            back.template = None
            page.load()
            page.wait_for_text("This model has no chat template")
        finally:
            back.stop()


def test_an_answer_is_followed_until_its_reader_scrolls_up():
    lines = [f"line {i}\n" for i in range(200)]
    more, end = threading.Event(), threading.Event()
    with scripted([*lines, more, *lines, end, *lines]) as (page, _):
        page.send("a long story")
        below = "return page.scrollHeight - page.scrollTop - innerHeight"
        page.wait(lambda: "line 199\n" in page.answers[-1], "the first part")
        assert page.js(below) < 2 and page.js("return page.scrollTop") > 1000
        page.js("scrollBy(0, -30)")  # by a little, as one turn of a wheel does
        page.wait(lambda: not page.js("return following"), "the page to notice")
        top = page.js("return page.scrollTop")
        more.set()
        page.wait(lambda: page.answers[-1].count("line 199\n") == 2, "the second part")
        assert page.js("return page.scrollTop") == top and page.js(below) > 1000
        page.click("↓ Latest")
        end.set()
        page.done()
        assert page.answers[-1] == "".join(lines * 3) and page.js(below) < 2
        assert not page.find("#latest").is_displayed()


# ---------------------------------------------------------------- for everybody


def test_the_keyboard_is_enough():
    more = threading.Event()
    with scripted(["One."], ["Two"], ["Half", more]) as (page, server):
        page.press("a", Keys.SHIFT + Keys.ENTER + Keys.NULL, "b", Keys.ENTER)  # the focus is where one writes
        page.done()
        assert page.questions == ["a\nb"] and page.answers == ["One."]
        page.press(Keys.ENTER)  # an empty message is none
        order = page.tab_to("New conversation", Keys.SHIFT + Keys.TAB + Keys.NULL)
        assert order == ["Retry", "Edit", "Settings", "New conversation"]
        page.press(Keys.TAB)
        assert page.js("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
        page.press(Keys.ENTER)
        assert page.find("#settings").is_displayed()
        page.press(Keys.TAB, "Rhyme.")
        page.press(Keys.TAB)
        page.press(Keys.CONTROL + "a" + Keys.NULL, "0.5")
        page.press(Keys.ESCAPE)
        assert not page.find("#settings").is_displayed()
        page.tab_to("Retry")
        page.press(Keys.ENTER)
        page.done()
        assert page.answers == ["Two"] and server.messages() == [("system", "Rhyme."), ("user", "a\nb")]
        assert server.bodies[1]["temperature"] == 0.5
        page.tab_to("Your message")
        page.press("c", Keys.ENTER)
        page.wait_for_text("Half")
        page.press(Keys.ESCAPE)
        page.done()
        assert page.notes == ["Stopped."] and page.answers == ["Two", "Half"]
        more.set()


def test_screen_readers():
    """Every control has a name, answers are announced when they are whole, and so is the state of the server."""
    more = threading.Event()
    with scripted(["Half", more, " whole"]) as (page, _):
        page.js("askForKey()")
        selector = "header button, footer button, input, textarea, [role=log]"
        for control in page.driver.find_elements(By.CSS_SELECTOR, selector):
            assert control.accessible_name or not control.is_displayed(), control.get_attribute("outerHTML")
        assert page.find("#input").accessible_name == "Your message"
        page.click("Settings")
        names = [one.accessible_name for one in page.driver.find_elements(By.CSS_SELECTOR, "#settings [name]")]
        assert names == ["System message", "Temperature", "Top-p", "Max tokens", "Seed", "Tools (JSON)", "JSON schema"]
        page.press(Keys.ESCAPE)
        assert page.find("#log").get_attribute("aria-live") == "polite"
        assert page.find("#notice").aria_role == "status"
        page.send("hello")
        page.wait_for_text("Half")
        assert page.find("#log").get_attribute("aria-busy") == "true"
        more.set()
        page.done()
        assert page.find("#log").get_attribute("aria-busy") == "false"
        assert page.texts("article h2") == ["You", "The model"]


def test_a_narrow_screen():
    word, code = "w" * 300, "```\n" + "code " * 100 + "\n```"
    marked = [event(reasoning_content=word), f"- **{word}** `{word}`\n  - {word}\n\n  ", code]
    calls = [call_piece(0, f'{{"{word}": 1}}', name=word, id="a"), call_piece(1, word, name="b", id="b")]
    with scripted([word, "\n", code], refusal(400, word), [*marked, *calls]) as (page, _):
        page.resize(360, 640)
        fits = "return page.scrollWidth <= innerWidth && innerWidth === 360"
        assert page.js(fits)
        page.js("document.getElementById('model').textContent = arguments[0]", word)
        page.say(word)
        assert page.js(fits)
        page.say(code)
        assert page.notes == [word] and page.js(fits)
        page.say("markup, thinking and calls")
        page.js("for (const one of document.querySelectorAll('details')) one.open = true")
        assert len(page.texts(".folded p, .folded pre")) == 3 and page.js(fits)
        page.set(schema=word)
        page.js("askForKey()")
        page.click("Settings")
        assert page.js(fits)
        box = page.js("return document.getElementById('settings').getBoundingClientRect().toJSON()")
        assert box["left"] >= 0 and box["right"] <= 360 and box["top"] >= 0 and box["bottom"] <= 640


# ---------------------------------------------------------------- talking to serve.py


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory, byte_level):
    """A tiny model whose answers can be so long that none ends while a test looks at it."""
    folder = tmp_path_factory.mktemp("page")
    tiny_chat_llama(folder / "hf", byte_level, 30000, TEMPLATE, seed=1)
    return convert(open_hf(folder / "hf"), folder / "tiny", torch.float32)


def options(checkpoint: Path) -> list:
    return ["--checkpoint_path", checkpoint, "--dtype", "float32", "--max_batch_size", 2, "--max_seq_length", 30000]


@pytest.fixture(scope="module")
def server(checkpoint, tmp_path_factory):
    with running(tmp_path_factory.mktemp("log") / "server.txt", *options(checkpoint)) as server:
        yield server


@pytest.fixture(scope="module")
def endless(server) -> str:
    """A question to which the model has an answer without end, at temperature 0."""
    for i in range(50):
        message = {"role": "user", "content": f"question {i}"}
        body = {"messages": [message], "max_tokens": 2000, "temperature": 0}
        if server.post("/v1/chat/completions", body)["choices"][0]["finish_reason"] == "length":
            return message["content"]
    raise AssertionError("the model ends all answers")


def test_answers_are_those_of_the_api(server):
    settings = {"temperature": 0.8, "top_p": 0.9, "max_tokens": 40, "seed": 5}
    with browsing(server.port) as page:
        assert page.find("#model").text == "tiny"
        page.set(**{name: str(value) for name, value in settings.items()})
        messages = []
        for question in ("Why?", "the \u20ac sea\nand <more>"):
            messages.append({"role": "user", "content": question})
            choice = server.post("/v1/chat/completions", settings | {"messages": messages})["choices"][0]
            assert page.say(question) == choice["message"]["content"]
            messages.append(choice["message"])
        line = page.texts(".numbers")[-1]
        assert re.fullmatch(r"40 tokens · [\d.]+ tokens/s · first after \d+\.\d\d s", line), line
        assert "Cut off" in page.notes[-1]


def test_stopping_frees_the_row(server, endless):
    outcome = 'requests_total{outcome="cancelled"}'
    with browsing(server.port) as page:
        page.set(temperature="0")
        page.send(endless)
        page.wait(lambda: page.answers and page.answers[-1], "an answer to begin")
        assert server.metric("rows_active") == 1
        page.click("Stop")
        page.done()
        text = page.answers[-1]
        assert page.notes == ["Stopped."] and text
        wait_for(server.idle, "the row to be free")
        assert server.metric(outcome) == 1
        page.click("Retry")
        page.wait(lambda: page.answers and page.answers[-1], "an answer to begin")
        page.load()  # ends the request, too
        wait_for(server.idle, "the row to be free")
        assert server.metric(outcome) == 2 and "Stopped" in page.notes[-1]


def test_a_server_with_a_key(checkpoint, tmp_path):
    with running(tmp_path / "log.txt", *options(checkpoint), "--api_key", KEY) as server, browsing(server.port) as page:
        page.set(max_tokens="10", seed="1")
        page.wait(lambda: page.find("#key").is_displayed(), "the page to ask for a key")
        page.say("hello")
        assert page.answers == [] and "key" in page.notes[0]
        page.find("#key").send_keys("wrong", Keys.ENTER)
        page.wait_for_text("does not accept this key")
        page.find("#key").send_keys(KEY, Keys.ENTER)
        page.wait(lambda: page.answers, "the answer")  # to the question from before
        page.done()
        assert not page.find("#key-form").is_displayed() and page.find("#model").text == "tiny"
        assert KEY not in page.js("return JSON.stringify(localStorage)")
        page.load()
        page.say("and now?")
        assert len(page.answers) == 2 and not page.find("#key-form").is_displayed()


# ---------------------------------------------------------------- the pictures in docs/


def draw_pictures():
    with tempfile.TemporaryDirectory() as folder, running(Path(folder) / "log.txt") as server:
        with browsing(server.port) as page:
            page.set(temperature="0")
            page.say("What is a cache? Answer in one sentence.")
            page.say("Write a short Python function that reverses a string.")
            page.find("#input").click()  # which also takes the mouse there
            page.find("#input").send_keys("And how do I count its vowels?")
            page.driver.save_screenshot(str(ROOT / "docs" / "serve-light.png"))
        with browsing(server.port) as page:
            page.scheme("dark")
            page.resize(390, 800)
            page.set(seed="2")
            page.say("Write a Python function that counts the vowels of a text.")
            page.find("#input").click()
            page.find("#input").send_keys("Thank you!")
            page.driver.save_screenshot(str(ROOT / "docs" / "serve-dark-phone.png"))


if __name__ == "__main__":
    draw_pictures()
