"""Token ids of conversations against transformers', for the templates of many models; templates that mean harm.

The real templates are in data/templates. Each gets a small byte-level vocabulary that knows its family's special tokens
and puts a beginning token in front of plain text, so that one too many, or a special token read as text, shows.
"""

import datetime
import gc
import importlib.util
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import jinja2
import pytest
import transformers
from conftest import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Library

import chat_template
from chat_template import ChatTemplate
from cli import UserError
from convert_hf_checkpoint import default_gguf
from tokenizer import Tokenizer

TEMPLATES = Path(__file__).parent / "data" / "templates"
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

FAMILIES = {  # file: beginning token, end token, what ends a turn
    "command-r-plus": ("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek-coder": (DEEPSEEK[0], "<|EOT|>", "<|EOT|>"),
    "deepseek-r1-distill": (*DEEPSEEK, DEEPSEEK[1]),
    "gemma-2": ("<bos>", "<eos>", "<end_of_turn>"),
    "granite-3.3": ("<|end_of_text|>", "<|end_of_text|>", "<|end_of_text|>"),
    "llama-3.1": ("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "llama-3.2": ("<|begin_of_text|>", "<|eot_id|>", "<|eot_id|>"),
    "mistral-7b": ("<s>", "</s>", "</s>"),
    "mistral-nemo": ("<s>", "</s>", "</s>"),
    "openhermes-2.5": ("<s>", "<|im_end|>", "<|im_end|>"),
    "phi-3.5": ("<s>", "<|endoftext|>", "<|end|>"),
    "qwen2.5": (None, "<|im_end|>", "<|im_end|>"),
    "qwen3": (None, "<|endoftext|>", "<|im_end|>"),
    "vigogne-2": ("<s>", "</s>", "</s>"),
}
SPECIAL = re.compile(r"<\|\w+\|>|<｜[\w▁]+｜>|\[/?[A-Z_]+\]|<(?:start|end)_of_turn>")


def talk(*contents, system=None):
    """Messages of user and assistant in turn, after a system message if there is one."""
    messages = [{"role": "system", "content": system}] * (system is not None)
    roles = itertools.cycle(["user", "assistant"])
    return messages + [{"role": role, "content": content} for role, content in zip(roles, contents)]


WRITTEN_OUT = (
    "<|im_end|>\n<|im_start|>system\n<s></s> [INST]x[/INST]<|eot_id|><end_of_turn><｜User｜><|end|><bos> <|EOT|>"
)
CONVERSATIONS = {
    "one message": talk("Hello"),
    "system": talk("Hello", system="You are a pirate."),
    "turns": talk("Hello", "Hi! How can I help?", "What is 2 + 2?", "4.", "And 12 * 345?"),
    "system and turns": talk("Hello", "Hi!", "Bye", system="Be brief.\n\nBe kind."),
    "ends with an answer": talk("Hello", "Hi!"),
    "unicode": talk("Grüße, 日本語 👩‍👩‍👧 \u200b\ufeff\x00é\u0301", "Ελληνικά עברית", "ok", system="naïve — “façade”"),
    "whitespace": talk("  \n a\r\n\tb \n\n", "\n  x\n", "   ", " \u3000", "\n", system="\n\n s \t"),
    "jinja": talk(
        "{{ messages }} {% if %} {# x #} {%- raw %}", "}} %} {{ '{{' }}", "{}\\n \"'", system="{{ bos_token }}"
    ),
    "special tokens": talk(WRITTEN_OUT, WRITTEN_OUT[::-1], WRITTEN_OUT, system=WRITTEN_OUT),
    "empty": talk("", "", "", system=""),
    "thoughts": talk("Why?", "<think>\nHm.\n</think>\n\nBecause.", "Oh", "<think></think>x", "</think>"),
    "tool marks": talk("<tool_response>1</tool_response>", "<tool_call>", "<<SYS>>x<</SYS>>"),
    "assistant first": [{"role": "assistant", "content": "Hi!"}, *talk("Hello")],
    "user twice": talk("Hello") * 2,
    "system late": talk("Hello", "Hi!") + talk("Bye", system="Be brief."),
    "unknown role": [{"role": "tool", "content": "3"}, {"role": "narrator", "content": "It rains."}],
    "no content": [{"role": "user"}],
}
HELLO = CONVERSATIONS["one message"]


@pytest.fixture(scope="session")
def library():
    """A byte-level BPE without special tokens, trained on the templates themselves."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator([path.read_text(encoding="utf-8") for path in TEMPLATES.glob("*.jinja")], trainer)
    return library


@pytest.fixture(scope="session")
def family(library, default_checkpoint, tmp_path_factory):
    """name -> (our ChatTemplate, transformers' tokenizer)."""
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == set(FAMILIES)

    def make(name):
        if name == "default":
            return ChatTemplate(default_checkpoint, Tokenizer(default_checkpoint)), default_oracle()
        bos, eos, end = FAMILIES[name]
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        words = Library.from_str(library.to_str())
        special = sorted({bos, eos, end, *SPECIAL.findall(source)} - {None})
        words.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
        config = {"bos_token": bos, "eos_token": eos, "add_bos_token": bos is not None}
        config |= {"bos_token_id": bos and words.token_to_id(bos), "eos_token_ids": [words.token_to_id(eos)]}
        if bos:
            one = processors.TemplateProcessing(f"{bos} $A", special_tokens=[(bos, config["bos_token_id"])])
            words.post_processor = one
        folder = tmp_path_factory.mktemp(name)
        words.save(str(folder / "tokenizer.json"))
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "chat_template.jinja").write_text(source, encoding="utf-8")
        names = {"bos_token": bos, "eos_token": eos} if bos else {"eos_token": eos}
        oracle = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), **names)
        oracle.chat_template = source
        return ChatTemplate(folder, Tokenizer(folder)), oracle

    made = {}
    return lambda name: made.get(name) or made.setdefault(name, make(name))


def default_oracle():
    """transformers' tokenizer of the default GGUF file, told to cut before digits (see test_tokenizer.py)."""
    path = default_gguf()
    oracle = transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)
    cut = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(cut)
    return oracle


def refusal(call, *args):
    """The text of the UserError that a call ends in: one line that is not too long for one."""
    with pytest.raises(UserError) as caught:
        call(*args)
    text = str(caught.value)
    assert len(text.splitlines()) == 1 and len(text) < 1000, repr(text)
    return text


def equal_to_transformers(ours, oracle, messages):
    """Asserts the same ids and texts, or that both refuse, in the same words; whether there were ids."""
    try:
        text = oracle.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        closed = oracle.apply_chat_template(messages, add_generation_prompt=False, tokenize=False)
        ids = oracle.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    except (jinja2.TemplateError, TypeError) as error:
        own_words = not isinstance(
            error, jinja2.exceptions.SecurityError
        )  # else they are transformers', not the template's
        assert (" ".join(str(error).split())[:300] if own_words else "") in refusal(ours.encode, messages)
        return False
    assert ours.render(messages) == text
    assert ours.render(messages, add_generation_prompt=False) == closed
    assert ours.encode(messages) == ids
    return True


def on_one_day(check, *args):
    """check(*args), and once more where midnight fell between the two that are compared: templates write the date."""
    day = datetime.date.today()
    try:
        return check(*args)
    except AssertionError:
        if day == datetime.date.today():
            raise
    return check(*args)


@pytest.mark.parametrize("name", ["default", *FAMILIES])
def test_ids_equal_transformers_or_both_refuse(family, name):
    ours, oracle = family(name)
    rendered = {key: on_one_day(equal_to_transformers, ours, oracle, talk) for key, talk in CONVERSATIONS.items()}
    assert rendered["one message"] and rendered["turns"], "of what every model knows, nothing is refused"


def test_a_refusal_is_in_the_words_of_the_template(family):
    """So that the test above compares refusals, too."""
    template, _ = family("gemma-2")
    assert refusal(template.encode, CONVERSATIONS["system"]).endswith("fails: System role not supported")
    template, _ = family("mistral-7b")
    assert "roles must alternate" in refusal(template.encode, CONVERSATIONS["user twice"])


parts = st.one_of(
    st.text(max_size=8),
    st.sampled_from([" ", "\n", "\t", "{{", "}}", "{%", "%}", "{#", "-", "'", '"', "\\", "</think>", "<<SYS>>"]),
    st.sampled_from([token for three in FAMILIES.values() for token in three if token]),
)
contents = st.lists(parts, max_size=5).map("".join)


@settings(max_examples=150, deadline=None)
@given(name=st.sampled_from(["default", *FAMILIES]), turns=st.lists(contents, min_size=1, max_size=4), data=st.data())
def test_any_text_in_a_conversation_comes_out_as_with_transformers(family, name, turns, data):
    system = data.draw(st.none() | contents)
    on_one_day(equal_to_transformers, *family(name), talk(*turns, system=system))


@pytest.mark.parametrize("name", ["default", *FAMILIES])
def test_end_ids_are_the_token_that_ends_a_turn(family, name):
    ours, _ = family(name)
    end = "<|im_end|>" if name == "default" else FAMILIES[name][2]
    assert ours.end_ids() == {ours.tokenizer.vocabulary.library.token_to_id(end)}


@pytest.fixture
def chat(family):
    """A ChatTemplate of which a test may set the source."""
    template = ChatTemplate(family("openhermes-2.5")[0].path.parent, family("openhermes-2.5")[0].tokenizer)
    yield template
    if template.process is not None:
        template.process.kill()
        template.process.communicate()


PLAIN = "{% for m in messages %}### {{ m.role }}:\n{{ m.content }}\n\n{% endfor %}### assistant:"


def test_no_end_ids_where_no_special_token_follows_an_answer(chat):
    chat.source = PLAIN
    assert chat.end_ids() == set()
    chat.source = "{{ raise_exception('no conversation') }}<|im_end|>"
    assert chat.end_ids() == set()


def test_no_end_ids_where_the_template_leaves_answers_out(chat):
    chat.source = "<|im_start|>{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    assert chat.end_ids() == set()


# ---------------------------------------------------------------- the language

LANGUAGE = {  # each with what it renders differently where the environment is not transformers'
    "generation": (
        "{% for m in messages %}[{% generation %}{{ m.content }}{{ loop.index }}{% endgeneration %}]{% endfor %}"
    ),
    "generation keeps its variables": "{% set x = 1 %}{% generation %}{% set x = 2 %}{{ x }}{% endgeneration %}{{ x }}",
    "generation and whitespace": "a \n {%- generation -%} \n b \n {%- endgeneration %}\n c",
    "break": "{% for m in messages %}{{ m.content }}{% if loop.index == 2 %}{% break %}{% endif %};{% endfor %}",
    "continue": "{% for m in messages %}{% if loop.index == 2 %}{% continue %}{% endif %}{{ m.content }}{% endfor %}",
    "tojson": "{{ messages | tojson }} {{ '<&>\\'\"日本' | tojson }} {{ {'b': 1, 'a': none} | tojson }}",
    "tojson indent": "{{ messages | tojson(indent=4) }} {{ messages | tojson(2) }} {{ {'é': 1} | tojson(indent=1) }}",
    "tojson options": "{{ {'b': [1], 'a': 'é'} | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}",
    "tojson of what is not there": "{{ nothing | tojson }}",
    "strftime_now": "{{ strftime_now('%Y-%m-%d') }} {{ strftime_now('%A, %d %B %Y, %j') }} {{ strftime_now('é%%') }}",
    "raise_exception": "{{ raise_exception('Roles\n must  alternate: ' + messages[0].role) }}",
    "raise_exception late": "text{% for m in messages %}{{ m.content }}{{ raise_exception(m.content) }}{% endfor %}",
    "namespace": "{% set n = namespace(a=1, b=2) %}{% for m in messages %}{% set n.a = n.a + 1 %}{% endfor %}{{ n.a }}",
    "namespace of a dict": "{% set ns = namespace({'a': 1}, b=2) %}{{ ns.a + ns.b }}{{ ns.c is defined }}",
    "namespace underscore": "{% set ns = namespace() %}{% set ns._x = 1 %}{{ ns._x }}",
    "blocks on lines of their own": "  {% if true %}\n    x\n  {% endif %}\n\t{# c #}\n {{ 1 }} \n",
    "last line break": "x\n\n",
    "given values": "{{ tools is none }}{{ documents is none }}{{ add_generation_prompt }}{{ tools is defined }}",
    "token names": "[{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk_token }}]",
    "methods": (
        "{% for m in messages %}{{ m.get('x', 1) }}{{ m.items() | list }}{{ m.content.split()[0].lower() }}{% endfor %}"
    ),
    "dict": "{{ dict(a=1, b=messages[0]) }}{{ dict.fromkeys(['a']) }}{{ dict([('c', 3)]).c }}",
    "no HTML": "{{ '<&>' }}{{ '<' | e }}{{ '<b>' | safe }}{{ messages[0] | string }}",
    "undefined": "{{ nothing }}{{ nothing.x }}",
    "undefined call": "{{ strftime() }}",
    "no extensions but two": "{% do messages %}",
    "syntax": "{% for m in messages %}",
}  # fmt: skip
REFUSED = {"tojson of what is not there", "raise_exception", "raise_exception late", "namespace underscore"}
REFUSED |= {"undefined", "undefined call", "no extensions but two", "syntax"}


@pytest.mark.parametrize("name", LANGUAGE)
def test_the_template_language_is_that_of_transformers(chat, family, name):
    oracle = SimpleNamespace(
        apply_chat_template=lambda messages, **options: family("openhermes-2.5")[1].apply_chat_template(
            messages, chat_template=LANGUAGE[name], **options
        )
    )
    chat.source = LANGUAGE[name]
    messages = talk("Hi <b>&</b> 'x'", 'Grüße, "日本"\n', "Bye", system="s")
    assert on_one_day(equal_to_transformers, chat, oracle, messages) == (name not in REFUSED)


def test_namespaces_are_not_made_with_underscores(chat):
    chat.source = "{% set ns = namespace(_x=1) %}ok"
    refusal(chat.encode, HELLO)


def test_a_refusal_has_words_even_where_the_template_has_none(chat):
    chat.source = "{{ raise_exception('') }}"
    assert re.search("fails: .", refusal(chat.encode, HELLO))


# ---------------------------------------------------------------- templates that mean harm

NOTHING = "makes nothing of the conversation"  # what is refused shows as undefined, which is written as nothing
MEMORY, DEEP = "used more than 1 GB of memory", "maximum recursion depth exceeded"
HOSTILE = {  # name: (the template, what the error says)
    "class": ("{{ ''.__class__ }}", NOTHING),
    "class by index": ("{{ ''['__class__']['__base__'] }}", "'__class__' .* unsafe"),
    "class by filter": ("{{ '' | attr('__class__') }}", NOTHING),
    "class by another filter": ("{{ messages | map(attribute='__class__.__base__') | join }}", "'__class__' .* unsafe"),
    "bases": ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "'__class__' .* unsafe"),
    "mro": ("{{ dict.mro() }}{{ namespace.mro() }}", "'mro' .* unsafe"),
    "format": ("{{ '{0.__class__}'.format(messages) }}", NOTHING),
    "format by filter": ("{{ ('{0.__class__}' | attr('format'))(messages) }}", NOTHING),
    "format_map": ("{{ '{a.__class__}'.format_map({'a': messages}) }}", NOTHING),
    "format indirectly": ("{% for f in ['{0.__class__.a}'.format] %}{{ f(1) }}{% endfor %}", "'__class__' .* unsafe"),
    "cycler": ("{{ cycler.__init__.__globals__.os.system('touch FILE') }}", "'__init__' .* unsafe"),
    "joiner": ("{{ joiner.__init__.__globals__.os.system('touch FILE') }}", "'__init__' .* unsafe"),
    "lipsum": ("{{ lipsum.__globals__['os'].popen('touch FILE').read() }}", "'__globals__' .* unsafe"),
    "our functions": ("{{ raise_exception.__globals__.signal }}", "'__globals__' .* unsafe"),
    "our closures": ("{{ strftime_now.__closure__[0] }}", "'__closure__' .* unsafe"),
    "self": ("{{ self.__init__.__globals__ }}", "'__init__' .* unsafe"),
    "macro": ("{% macro m() %}{% endmacro %}{{ m._func.__code__ }}", "'_func' .* unsafe"),
    "namespace": ("{% set ns = namespace() %}{% set ns.__class__ = 1 %}x", "__class__"),
    "caller": ("{% macro m() %}{{ caller.__globals__.x }}{% endmacro %}{% call m() %}{% endcall %}", "'__globals__'"),
    "append": ("{{ messages.append(1) }}", "'append' .* unsafe"),
    "update": ("{{ messages[0].update(role='x') }}", "'update' .* unsafe"),
    "include": ("{% include '/etc/passwd' %}", "no loader"),
    "import": ("{% import 'os' as os %}{{ os.system('touch FILE') }}", "no loader"),
    "open": ("{{ open('FILE', 'w') }}", "'open' is undefined"),
    "times": ("{{ messages[0].role * 10 ** 10 }}", MEMORY),
    "times, folded": ("{{ 'x' * 10 ** 10 }}", MEMORY),
    "list": ("{{ [1] * 10 ** 10 }}", MEMORY),
    "ljust": ("{{ messages[0].role.ljust(10 ** 10) }}", MEMORY),
    "just too much": ("{{ messages[0].role.ljust(11 * 10 ** 8) | length }}", MEMORY),
    "center": ("{{ 'x' | center(10 ** 10) }}", MEMORY),
    "percent": ("{{ '%099999999999d' % messages | length }}", MEMORY),
    "width": ("{{ '{:>9999999999}'.format(1) }}", MEMORY),
    "indent": ("{{ messages | tojson(indent=10 ** 10) }}", MEMORY),
    "batch": ("{{ [1] | batch(10 ** 10, 0) | list }}", MEMORY),
    "doubling": ("{% set n = namespace(s='x') %}{% for i in range(99) %}{% set n.s = n.s ~ n.s %}{% endfor %}", MEMORY),
    "range": ("{{ range(10 ** 9) | list }}", "Range too big"),
    "digits": ("{{ 10 ** 5000 }}", "4300 digits"),
    "macros": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", DEEP),
    "loops": ("{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}", DEEP),
    "ifs": ("{% if true %}" * 9999 + "x" + "{% endif %}" * 9999, DEEP),
    "fors": ("{% for a in [1] %}" * 30 + "x" + "{% endfor %}" * 30, "too many statically nested blocks"),
    "parentheses": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", DEEP),
    "sums": ("{{ 1" + "+x" * 9999 + " }}", DEEP),
    "nots": ("{{ " + "not " * 9999 + "x }}", DEEP),
    "dots": ("{{ x" + ".x" * 9999 + " }}", DEEP),
    "much in pieces": ("{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", "more than 10,000,000 characters"),
    "much at once": ("{{ messages[0].role * 10 ** 7 }}", "more than 10,000,000 characters"),
    "words with line breaks": (r"{{ raise_exception('a\nb\r\n\tc\u2028d\x0be\x1cf\x85g') }}", "fails: a b c d e f g$"),
    "many words": ("{{ raise_exception('word ' * 10 ** 6) }}", "fails: (word )+"),
    "no words": ("{{ raise_exception() }}", "missing 1 required positional argument"),
    "a number for words": ("{{ raise_exception(10 ** 5000) }}", "chat template "),
    "half a character": (r"{{ '\ud800' }}", "not valid UTF-8"),
    "half a character in words": (r"{{ raise_exception('a\ud800b\x1b[2J') }}", r"fails: ab\[2J$"),
    "syntax": ("{% if %}", "Expected an expression"),
    "not closed": ("{% generation %}{{ 1 }}", "endgeneration"),
    "filter": ("{{ 1 | nofilter }}", "No filter named"),
    "undefined": ("{{ format_message(messages) }}", "'format_message' is undefined"),
    "empty": ("", NOTHING),
}  # fmt: skip


def good(template):
    """Whether the template object renders another template as if nothing had been."""
    template.source = PLAIN
    return template.render(HELLO) == "### user:\nHello\n\n### assistant:"


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_ends_in_one_line_and_harms_nothing(chat, tmp_path, name):
    source, reason = HOSTILE[name]
    chat.source = source.replace("FILE", str(tmp_path / "file"))
    start = time.monotonic()
    assert re.search(reason, refusal(chat.encode, HELLO))
    assert time.monotonic() - start < chat_template.SECONDS, "no time limit was needed"
    assert not (tmp_path / "file").exists()
    assert talk("Hello") == HELLO and good(chat)


@pytest.fixture(scope="session")
def hasty(tmp_path_factory):
    """chat_template.py as a module that gives a template two seconds: a copy, as the limit holds in a process of its
    own, which runs the file."""
    source = Path(chat_template.__file__).read_text(encoding="utf-8")
    changed = source.replace("\nSECONDS = 10 ", "\nSECONDS = 2 ")
    assert changed != source
    path = tmp_path_factory.mktemp("hasty") / "chat_template.py"
    path.write_text(changed, encoding="utf-8")
    spec = importlib.util.spec_from_file_location("hasty_chat_template", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FOR_EVER = "{% for a in range(99999) %}{% for b in range(99999) %}BODY{% endfor %}{% endfor %}"
ENDLESS = {
    "silent": FOR_EVER.replace("BODY", ""),
    "writing nothing": FOR_EVER.replace("BODY", "{{ '' }}"),
    "power": "{{ 7 ** (9 ** 9) }}",  # one operation, which Python does not interrupt
    "power, folded": "{{ 'x' * (7 ** (9 ** 9)) }}",
    "branching": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "words": "{{ lipsum(10 ** 7) }}",
}


quick = ("silent", "power", "branching")


@pytest.mark.parametrize("name", [pytest.param(x, marks=[] if x in quick else pytest.mark.slow) for x in ENDLESS])
def test_an_endless_template_is_ended_in_time(hasty, chat, name):
    template = hasty.ChatTemplate(chat.path.parent, chat.tokenizer)
    template.source = ENDLESS[name]
    start = time.monotonic()
    assert refusal(template.encode, HELLO).endswith("took more than 2 s")
    assert hasty.SECONDS <= time.monotonic() - start < hasty.SECONDS + 5
    assert good(template)


@pytest.mark.slow
def test_the_time_limit_is_ten_seconds(chat):
    chat.source = ENDLESS["silent"]
    start = time.monotonic()
    assert refusal(chat.encode, HELLO).endswith("took more than 10 s")
    assert chat_template.SECONDS <= time.monotonic() - start < chat_template.SECONDS + 5
    assert good(chat)


@pytest.mark.slow
def test_the_time_limit_holds_where_the_parent_ignores_alarms(hasty, chat):
    template = hasty.ChatTemplate(chat.path.parent, chat.tokenizer)
    template.source = ENDLESS["silent"]
    before = signal.signal(signal.SIGALRM, signal.SIG_IGN)
    rescue = threading.Timer(hasty.SECONDS + 2, lambda: template.process.kill())
    rescue.start()
    try:
        assert refusal(template.encode, HELLO).endswith("took more than 2 s")
    finally:
        signal.signal(signal.SIGALRM, before)
        rescue.cancel()


def test_a_directory_without_a_template_or_with_a_broken_one(chat, tmp_path):
    assert "has no chat template" in refusal(ChatTemplate, tmp_path, chat.tokenizer)
    path = tmp_path / "chat_template.jinja"
    path.write_bytes(b"{{ bos_token }}\xff")
    assert "chat_template.jinja cannot be read: 'utf-8' codec" in refusal(ChatTemplate, tmp_path, chat.tokenizer)
    path.unlink()
    path.mkdir()
    assert "has no chat template" in refusal(ChatTemplate, tmp_path, chat.tokenizer)


# ---------------------------------------------------------------- the process

PARENT = """
import signal, sys
from pathlib import Path
from types import SimpleNamespace
from chat_template import ChatTemplate

signal.signal(signal.SIGINT, lambda *_: None)  # as a program does that lives on after Ctrl-C
template = ChatTemplate(Path(sys.argv[1]), SimpleNamespace(named_tokens={}))
for template.source in map(str.rstrip, sys.stdin):
    print(template.render([]), template.process.pid, flush=True)
"""


@pytest.fixture
def parent(chat):
    """A program that renders the lines it reads, in a group of processes of its own, with its first answer's process.

    parent(folder): with the chat_template.py that is there.
    """
    started = []

    def start(folder=ROOT):
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (folder, ROOT)))}
        command = [sys.executable, "-c", PARENT, str(chat.path.parent)]
        started.append(subprocess.Popen(command, cwd=folder, env=environment, start_new_session=True, **pipes))
        word, child = ask(started[-1], "hello")
        assert word == "hello" and is_running(child)
        return started[-1], child

    yield start
    for program in started:
        program.kill()
        program.wait()
        program.stdout.close()


def ask(program, source):
    program.stdin.write(source + "\n")
    program.stdin.flush()
    word, child = program.stdout.readline().split()
    return word, int(child)


def is_running(process: int) -> bool:
    try:
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"  # ended, and nobody has asked for its exit code


def ends(process: int, seconds: float = 5) -> bool:
    deadline = time.monotonic() + seconds
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(process)


linux = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@linux
@pytest.mark.parametrize("way", ["end of input", "SIGTERM", "SIGKILL"])
def test_no_process_is_left_behind_when_the_program_ends(parent, way):
    program, child = parent()
    if way == "end of input":
        program.stdin.close()
        assert program.wait() == 0
    else:
        program.send_signal(getattr(signal, way))
        assert program.wait() == -getattr(signal, way)
    assert ends(child)


@pytest.mark.slow
@linux
def test_no_process_is_left_behind_when_the_program_is_killed_within_a_rendering(parent, hasty):
    program, child = parent(Path(hasty.__file__).parent)
    program.stdin.write(ENDLESS["silent"] + "\n")
    program.stdin.flush()
    time.sleep(0.3)
    program.kill()
    program.wait()
    assert ends(child, hasty.SECONDS + 5)


@linux
def test_no_process_is_left_behind_by_a_template_that_is_no_longer_used(chat):
    other = ChatTemplate(chat.path.parent, chat.tokenizer)
    assert good(other)
    child = other.process.pid
    assert is_running(child)
    del other
    gc.collect()
    assert ends(child)


@linux
def test_ctrl_c_does_not_end_the_rendering(parent):
    program, child = parent()
    os.killpg(program.pid, signal.SIGINT)
    assert ask(program, "idle") == ("idle", child)
    # About a second's work, with an interrupt every tenth of one.
    program.stdin.write(FOR_EVER.replace("99999", "3000").replace("BODY", "") + "busy\n")
    program.stdin.flush()
    answers = []
    reader = threading.Thread(target=lambda: answers.append(program.stdout.readline()))
    reader.start()
    interrupts = 0
    while reader.is_alive() and interrupts < 200:
        os.killpg(program.pid, signal.SIGINT)
        interrupts += 1
        reader.join(0.1)
    assert answers == [f"busy {child}\n"] and interrupts > 1


@pytest.mark.slow
def test_a_process_that_waits_has_no_time_limit(hasty, chat):
    template = hasty.ChatTemplate(chat.path.parent, chat.tokenizer)
    assert good(template)
    process = template.process
    time.sleep(hasty.SECONDS + 0.5)
    assert process.poll() is None and good(template) and template.process is process


def test_a_process_that_was_killed_is_replaced(chat):
    assert good(chat)
    before = chat.process.pid
    chat.process.kill()
    chat.process.wait()
    assert good(chat) and chat.process.pid != before


def test_a_rendering_that_was_interrupted_does_not_answer_the_next(chat):
    def interrupt(*_):
        raise KeyboardInterrupt

    assert good(chat)
    chat.source = "old" + FOR_EVER.replace("99999", "3000").replace("BODY", "")
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            chat.render(HELLO)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert good(chat)


def test_an_interrupt_while_the_process_starts_comes_out_as_one(chat, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(subprocess, "Popen", interrupt)
        with pytest.raises(KeyboardInterrupt):
            chat.render(HELLO)
    assert good(chat)
