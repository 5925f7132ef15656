"""Grammars: the tokens that they allow, answers that fit them, and neighbours and drafts that change nothing."""

import json
import random
import re
import threading
from types import SimpleNamespace

import pytest
import torch
from programs import main
from schedules import masked_requests

from cli import UserError
from drafts.retrieval import RetrievalDraft
from engine import Engine, EngineOptions, StepFunctions, generate
from speculative import Speculation
from text.grammar import GrammarThread, GrammarTokenizer, fit_schema, schema_rule, schema_source

regex_source = pytest.importorskip("llguidance").LLMatcher.grammar_from_regex

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["ä", "bc"]}}}
POINT |= {"required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler(default_tokenizer):
    return GrammarTokenizer(default_tokenizer, 49152, default_tokenizer.eos_ids)


def allowed(grammar, drafted=(), size=49152) -> list[set[int]]:
    """The ids that a grammar allows next, and after each drafted token."""
    masks = torch.zeros(1 + len(drafted), -(-size // 32), dtype=torch.int32)
    grammar.fill(masks, drafted)
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    return [set(line.flatten().nonzero()[:, 0].tolist()) for line in bits]


# ---------------------------------------------------------------- the tokens that are allowed


@pytest.mark.parametrize("source, fits, others", [
    (schema_source(POINT), ['{"x": -3}', '{"x":12,"y":"ä"}', '{\n  "x": 0,\n  "y": "bc"\n}'], ['{"y": "bc"}', "[1"]),
    (schema_source(True), ["[1, null]", '"a"', "-2.5e3"], ["nul1", "[,"]),
    (r'start: "yes \"and\" é" | "no\n"', ['yes "and" é', "no\n"], ["yes 'and'", "no "]),
], ids=["an object", "anything", "a choice"])  # fmt: skip
def test_texts_that_fit_and_others(compiler, default_tokenizer, source, fits, others):
    """Each text that fits may be written token by token, and then the answer may end. Others are refused somewhere."""

    def follow(text: str) -> bool:
        grammar = compiler.compile(source)
        for token in default_tokenizer.encode(text):
            if token not in allowed(grammar)[0]:
                return False
            if grammar.accept(token):
                return True
        return bool(allowed(grammar)[0] & {*default_tokenizer.eos_ids})

    assert [text for text in fits if not follow(text)] == [] and [text for text in others if follow(text)] == []


def test_drafted_tokens_are_followed_and_taken_back(compiler, default_tokenizer):
    text = default_tokenizer.encode('{"x": 12, "y": "bc"}')
    one, other = compiler.compile(schema_source(POINT)), compiler.compile(schema_source(POINT))
    masks = allowed(one, text)
    for token, mask in zip(text, masks):
        assert mask == allowed(other)[0] and token in mask
        other.accept(token)
    assert allowed(one) == masks[:1], "drafted tokens were not taken back"
    forbidden = [*text[:2], default_tokenizer.encode("!")[0], *text[2:]]
    masks_2 = allowed(one, forbidden)
    assert masks_2[:3] == masks[:3] and all(len(mask) == 49152 for mask in masks_2[3:])
    assert [one.accept(token) for token in text] == [False] * (len(text) - 1) + [True]
    assert allowed(one)[0] == {*default_tokenizer.eos_ids}
    with pytest.raises(UserError, match="too complex"):
        one.accept(text[0])


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
BAD = [
    ("start: (", "Expected token"), (schema_source({"type": 3}), "type must be"), (schema_source(LOOP), "no text fits"),
    (schema_source(False), "[Uu]nsatisf"), (schema_source({"$ref": "http://127.0.0.1/x"}), "Resource"),
    (regex_source("(a"), "regex"), ("x" * 300_000, "bytes"), (regex_source("a(?=c)"), "look-around"),
    ('start: %json {"a":' + '{"a":' * 10_000 + "}" * 10_001, "recursion"),
]  # fmt: skip


@pytest.mark.parametrize("source, said", BAD, ids=[said for _, said in BAD])
def test_grammars_that_are_refused(compiler, source, said):
    with pytest.raises(UserError, match=said) as failure:
        compiler.compile(source)
    assert "\n" not in str(failure.value)


def test_a_thread_compiles(default_tokenizer):
    thread = GrammarThread(default_tokenizer, 49152, default_tokenizer.eos_ids)
    for name, source in (("a", schema_source(POINT)), ("b", "start: ("), ("c", schema_source({}))):
        thread.add(name, source)
    assert thread.discard("c") and not thread.discard("d")
    found = {}
    while thread.pending:
        found |= dict(thread.finished())
    assert set(found) == {"a", "b"} and isinstance(found["b"], UserError) and len(allowed(found["a"])[0]) > 1


def test_grammars_of_requests_that_are_gone_are_not_compiled(default_tokenizer):
    thread = GrammarThread(default_tokenizer, 49152, default_tokenizer.eos_ids)
    free = threading.Event()
    thread.thread.submit(free.wait)  # the thread is busy
    for name in "abc":
        thread.add(name, schema_source(POINT))
    gone = thread.pending["b"]
    assert thread.discard("b") and gone.cancelled()
    free.set()
    found = []
    while thread.pending:
        found += [name for name, _ in thread.finished()]
    assert sorted(found) == ["a", "c"]


# ---------------------------------------------------------------- tokens that the model does not have


@pytest.mark.parametrize("size, named, found", [
    (49152, {60000, 2}, {2}),  # beyond the model's logits
    (49300, {49200, 2}, {2}),  # padded logits, which no token has
    (17, {2, 17}, {2}),  # more tokens than logits
    (49152, {-1, 2, 0}, {0, 2}),
])  # fmt: skip
def test_only_end_tokens_that_exist_end_a_text(default_tokenizer, size, named, found):
    grammar = GrammarTokenizer(default_tokenizer, size, named).compile('start: ""')
    assert allowed(grammar, size=size) == [found]


@pytest.mark.parametrize("size, named", [(49152, {49152, -1}), (49300, {49200}), (2, {2}), (9, set())])
@pytest.mark.slow
def test_a_model_without_any_end_token(default_tokenizer, size, named):
    ids = ", ".join(map(str, sorted(named))) or "none is named"
    said = re.escape(f"has no end-of-text token among its {size} tokens ({ids})")
    with pytest.raises(UserError, match=said):
        GrammarTokenizer(default_tokenizer, size, named)
    thread = GrammarThread(default_tokenizer, size, named)
    thread.add("a", "start: ")
    while thread.pending:
        for _, failure in thread.finished():
            assert isinstance(failure, UserError) and re.search(said, str(failure))


def test_a_text_of_tokens_that_the_model_does_not_have(default_tokenizer):
    """Where just one text can follow, the library asks the tokenizer for its tokens."""
    text = "Hello, international understanding"
    assert max(default_tokenizer.encode(text)) >= 800, "else this tests nothing"
    grammar, written = GrammarTokenizer(default_tokenizer, 800, [2]).compile(f"start: {json.dumps(text)}"), b""
    while written != text.encode():
        token = max(allowed(grammar, size=800)[0])
        written += default_tokenizer.vocabulary.token_bytes(token)
        assert text.encode().startswith(written)
        grammar.accept(token)


def test_an_end_token_is_no_text(default_tokenizer):
    """Some files do not say that their end token is special. It would end a string in the middle."""
    word = default_tokenizer.encode(" the")[0]
    grammar = GrammarTokenizer(default_tokenizer, 49152, [word]).compile(schema_source({"type": "string"}))
    for token in default_tokenizer.encode('"of'):
        assert word not in allowed(grammar)[0]
        grammar.accept(token)
    assert word not in allowed(grammar)[0]


def test_tokens_with_the_same_bytes_are_all_allowed():
    """Beside one without bytes, and an id without a token."""
    pieces = [b"a", b"b", b"a", b"ab", b"ab", b"", b"", b"</s>", *[b""] * 4]
    vocabulary = SimpleNamespace(special_ids={7}, name=lambda i: pieces[i].decode())
    vocabulary.token_bytes = lambda i: b"" if i == 7 else pieces[i]
    vocabulary.encode = lambda text: [pieces.index(bytes([byte])) for byte in text.encode() if byte in b"ab"]
    tokenizer = SimpleNamespace(path="x", vocabulary=vocabulary, bos_id=99)
    grammar = GrammarTokenizer(tokenizer, 12, [6, 7, 11]).compile("start: /(ab|a)*/")
    assert allowed(grammar, size=12) == [{0, 2, 3, 4, 7}]


# ---------------------------------------------------------------- schemas that the library does not support


def an_object(**properties):
    return {"type": "object", "properties": properties, "required": [*properties], "additionalProperties": False}


LOOKAHEAD = {"type": "string", "pattern": r"^(?!\.)[a-z.]+@[a-z.]+$"}
TEXT, INTEGER, NUMBER, ANY_MAP = {"type": "string"}, {"type": "integer"}, {"type": "number"}, {"type": "object"}
SHORT = TEXT | {"maxLength": 9}
NODE = {"type": "object", "properties": {"next": {"$ref": "#/$defs/node"}}}
NO_PLACE = NODE | {"$defs": {"other": LOOKAHEAD}}
# Names of properties and values that look like keywords.
NAMES = an_object(pattern=LOOKAHEAD, default=TEXT, enum={"enum": [LOOKAHEAD]}, minimum={"const": {"$ref": "#/x"}})
FITTED = [  # (schema, what is left of it, how the text about what is not enforced begins)
    *((schema, schema, "") for schema in (POINT, True, {}, NODE | {"$defs": {"node": NODE}})),
    ({"type": "integer", "default": float("inf")}, INTEGER, ""),
    # keywords that are refused alone
    *((an_object(a=SHORT | {"pattern": pattern}), an_object(a=SHORT), "$.properties.a.pattern: ")
      for pattern in (r"(?=a)b", r"\bword\b", r"(a|b)\1", "a$b", "(", 5)),
    ({"anyOf": [INTEGER, {"allOf": [LOOKAHEAD]}]}, {"anyOf": [INTEGER, {"allOf": [TEXT]}]},
     "$.anyOf[1].allOf[0].pattern: look-around"),
    ({"$ref": "#/$defs/a", "$defs": {"a": LOOKAHEAD}}, {"$ref": "#/$defs/a", "$defs": {"a": TEXT}},
     "$.$defs.a.pattern: "),
    (INTEGER | {"minimum": -(2**63), "maximum": 2**63 - 1}, INTEGER | {"maximum": 2**63 - 1}, "$.minimum: "),
    (NUMBER | {"minimum": 1, "maximum": 1e308}, NUMBER | {"minimum": 1}, "$.maximum: "),
    ({"$schema": "https://json-schema.org/draft-07/schema#"} | INTEGER, INTEGER, "$.$schema: "),
    (an_object(a={"type": "any"}, b=TEXT), an_object(a={}, b=TEXT), "$.properties.a.type: Invalid type"),
    (NAMES, NAMES | {"properties": NAMES["properties"] | {"pattern": TEXT}}, "$.properties.pattern.pattern: "),
    # schemas that are refused even so
    (NO_PLACE, ANY_MAP, "$, except for its type: Pointer '/$defs/node' does not exist"), (False, {}, "$, except"),
    (ANY_MAP | {"patternProperties": {"^(?!x)": INTEGER}}, ANY_MAP, "$, except for its type: look-around"),
    ({"type": ["object", "x"]}, {}, "$, except"), ({"anyOf": 5, "properties": {"a": 5}}, {}, "$, except"),
    # what the library itself ignores if it may
    *((schema, schema, "$: Un") for schema in ({"not": INTEGER}, {"uniqueItems": True}, TEXT | {"format": "iban"})),
]  # fmt: skip


@pytest.mark.parametrize("schema, kept, lost", FITTED)
def test_what_is_left_of_a_schema_and_what_a_strict_one_is_refused_for(compiler, schema, kept, lost):
    found, text = fit_schema(compiler, schema, strict=False)
    assert found == kept and text.startswith(lost) and bool(text) == bool(lost)
    compiler.compile(f"start: {schema_rule(kept, lenient=True)}")
    is_supported = lost == "" and "default" not in str(schema)
    assert (fit_schema(compiler, schema, strict=True)[1] == "") == is_supported


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_masked_rows_and_their_neighbours_are_as_alone(tiny_model, draft, fixed_shapes):
    """In a batch, with proposals of which some are forbidden, each request gets the tokens that it gets alone."""
    model = tiny_model("llama-gqa-biased")
    speculation = Speculation([RetrievalDraft([[*range(3, 131)] * 2])], 3, automatic=False) if draft else None
    requests, alone = masked_requests(13), masked_requests(13)
    engine = Engine(model, 4, 96, StepFunctions(fixed_shapes=fixed_shapes), speculation, EngineOptions(7))
    generate(engine, requests)
    for request, same in zip(requests, alone):
        generate(Engine(model, 1, 96), [same])
        assert (request.new_tokens, request.finish_reason) == (same.new_tokens, same.finish_reason)
        grammar = request.grammar
        if grammar is not None:
            complete = len(request.new_tokens) == grammar.n
            assert request.finish_reason == ("stop" if complete else "length") and len(request.new_tokens) <= grammar.n
    assert not draft or 0 < sum(speculation.report.accepted) < sum(speculation.report.verified)


@pytest.mark.parametrize("method", ["fill", "accept"])
def test_a_grammar_that_fails_ends_its_request_alone(tiny_model, monkeypatch, method):
    def fail(*args):
        raise UserError("the grammar failed: too complex")

    requests, alone = masked_requests(3), masked_requests(3)
    monkeypatch.setattr(requests[0].grammar, method, fail)
    engine = Engine(tiny_model("llama-gqa-biased"), 3, 96)
    generate(engine, requests)
    generate(engine, alone)
    assert (requests[0].finish_reason, requests[0].error) == ("error", "the grammar failed: too complex")
    assert [r.new_tokens for r in requests[1:]] == [r.new_tokens for r in alone[1:]]


# ---------------------------------------------------------------- the command line


@pytest.mark.slow
def test_generate_writes_json_that_fits(checkpoints, tmp_path, capsys, monkeypatch):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(POINT))
    options = ["--json_schema", schema, "--prompt", "A point:", "--json"]
    options += ["--max_new_tokens", "60", "--num_samples", "2"]
    for sample in main(capsys, monkeypatch, *options)[0]["samples"]:
        point = json.loads(sample["text"])
        assert sample["finish_reason"] == "stop" and isinstance(point["x"], int) and {*point} <= {"x", "y"}
    place = r"schema.json: \$.properties.x.pattern: look-around.* is not supported$"
    unsupported = json.dumps(POINT | {"properties": {"x": {"pattern": "(?=a)"}}})
    refused = [("{", "is not a readable JSON schema"), ('{"type": 3}', r"schema.json: \$.type: "), (unsupported, place)]
    for text, why in (*refused, ("[1]", r"schema.json: \$: schema must be an object")):
        schema.write_text(text)
        with pytest.raises(UserError, match=why):
            main(capsys, monkeypatch, "--checkpoint_path", checkpoints[None], *options)


@pytest.mark.slow
def test_masks_are_exact(compiler, default_tokenizer):
    """A token is allowed if its bytes continue the text to a beginning of some text that fits, and only then. But where
    the next byte is certain, the library allows only the tokens that the tokenizer would choose."""
    grammar = compiler.compile(regex_source("[0-9]{3}-ab"))
    begins = re.compile(rb"[0-9]{0,3}|[0-9]{3}-|[0-9]{3}-a|[0-9]{3}-ab")
    vocabulary, text = default_tokenizer.vocabulary, b""
    for _ in range(6):
        after = {i: text + vocabulary.token_bytes(i) for i in range(49152) if vocabulary.token_bytes(i)}
        expected = {i for i, data in after.items() if begins.fullmatch(data)}
        certain = len({after[i][len(text)] for i in expected}) == 1
        assert allowed(grammar)[0] == expected or (certain and allowed(grammar)[0] < expected)
        expected = allowed(grammar)[0]
        token = random.Random(len(text)).choice(sorted(expected))
        text = after[token]
        if grammar.accept(token):
            break
    assert re.fullmatch(rb"[0-9]{3}-ab", text)
