"""Grammars: the tokens that they allow, answers that fit them, and neighbours and drafts that change nothing."""

import json
import random
import re

import pytest
import torch
from programs import main
from schedules import NoMultiplesOfThree, masked_requests

from cli import UserError
from drafts.retrieval import RetrievalDraft
from engine import Engine, StepFunctions, generate
from grammar import GrammarThread, GrammarTokenizer, choice_source, regex_source, schema_source
from speculative import Speculation

pytest.importorskip("llguidance")

POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"enum": ["ä", "bc"]}}}
POINT |= {"required": ["x"], "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler(default_tokenizer):
    return GrammarTokenizer(default_tokenizer, 49152, default_tokenizer.eos_ids)


def allowed(grammar, drafted=()) -> list[set[int]]:
    """The ids that a grammar allows next, and after each drafted token."""
    masks = torch.zeros(1 + len(drafted), 1536, dtype=torch.int32)
    grammar.fill(masks, drafted)
    bits = (masks[:, :, None] >> torch.arange(32)) & 1
    return [set(line.flatten().nonzero()[:, 0].tolist()) for line in bits]


# ---------------------------------------------------------------- the tokens that are allowed


@pytest.mark.parametrize(
    "source, fits, others",
    [
        (
            schema_source(POINT),
            ['{"x": -3}', '{"x":12,"y":"ä"}', '{\n  "x": 0,\n  "y": "bc"\n}'],
            ['{"y": "bc"}', "[1"],
        ),
        (schema_source(True), ["[1, null]", '"a"', "-2.5e3"], ["nul1", "[,"]),
        (regex_source("(ab|[0-9]{2,3})+x?"), ["ab12x", "123ab"], ["1x", "abc"]),
        (choice_source(['yes "and" é', "no\n"]), ['yes "and" é', "no\n"], ["yes 'and'", "no "]),
    ],
    ids=["an object", "anything", "a regular expression", "a choice"],
)
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


# ---------------------------------------------------------------- in the engine


@pytest.mark.parametrize("draft", [None, "lookup"])
@pytest.mark.parametrize("fixed_shapes", [False, True])
def test_masked_rows_and_their_neighbours_are_as_alone(tiny_model, draft, fixed_shapes):
    """In a batch, with proposals of which some are forbidden, each request gets the tokens that it gets alone."""
    model = tiny_model("llama-gqa-biased")
    speculation = Speculation([RetrievalDraft([[*range(3, 131)] * 2])], 3, automatic=False) if draft else None
    requests, alone = masked_requests(13), masked_requests(13)
    engine = Engine(model, 4, 96, StepFunctions(fixed_shapes=fixed_shapes), 7, speculation)
    generate(engine, requests)
    for request, same in zip(requests, alone):
        generate(Engine(model, 1, 96), [same])
        assert (request.new_tokens, request.finish_reason) == (same.new_tokens, same.finish_reason)
        grammar = request.grammar
        if grammar is not None:
            complete = len(request.new_tokens) == grammar.n
            assert request.finish_reason == ("stop" if complete else "length") and len(request.new_tokens) <= grammar.n
    if draft:
        verified = sum(speculation.report.verified)
        assert 0 < sum(speculation.report.accepted) < verified


def test_a_grammar_that_fails_ends_its_request_alone(tiny_model):
    class Failing(NoMultiplesOfThree):
        def accept(self, token):
            raise UserError("the grammar failed: too complex")

    requests, alone = masked_requests(3), masked_requests(3)
    requests[0].grammar = Failing(9)
    engine = Engine(tiny_model("llama-gqa-biased"), 3, 96)
    generate(engine, requests)
    generate(engine, alone)
    assert (requests[0].finish_reason, requests[0].error) == ("error", "the grammar failed: too complex")
    assert [r.new_tokens for r in requests[1:]] == [r.new_tokens for r in alone[1:]]


# ---------------------------------------------------------------- the command line


def test_generate_writes_json_that_fits(tmp_path, capsys, monkeypatch):
    schema = tmp_path / "schema.json"
    schema.write_text(json.dumps(POINT))
    options = [
        "--json_schema",
        schema,
        "--prompt",
        "A point:",
        "--max_new_tokens",
        "60",
        "--num_samples",
        "2",
        "--json",
    ]
    for sample in main(capsys, monkeypatch, *options)[0]["samples"]:
        point = json.loads(sample["text"])
        assert sample["finish_reason"] == "stop" and isinstance(point["x"], int) and {*point} <= {"x", "y"}
    for text, why in (("{", "is not a readable JSON schema"), ('{"type": 3}', "schema.json: ")):
        schema.write_text(text)
        with pytest.raises(UserError, match=why):
            main(capsys, monkeypatch, *options)
