"""Speculation changes nothing: greedy texts to the token, drawn ones in law; and drafts propose what they should."""

import dataclasses
import json
import shutil
import sys
from functools import partial
from itertools import cycle
from types import ModuleType

import pytest
import torch
from conftest import ROOT, random_prompts
from test_generate import ids, main, run

import speculative
from cli import UserError
from generate import Batch, Steps, compiled_steps, generate, prefill_rows
from linear import Quantization, quantize_model
from load import install_kernels, load_model
from quantize import quantize_checkpoint
from report import compile_counts
from sampling import Sampling, exponential_noise, probabilities
from speculative import MOST_K, Index, Lookup, ModelDraft, Pace, Report, Source, Speculation, accept

LENGTHS = (4, 23, 1, 9, 14)
KINDS = {  # what proposes: how often it should be right
    "the same model": 1.0, "another model": None, "a noisy copy": None, "int4-self": None, "lookup": None,
    "lookup in a text": None,
}  # fmt: skip


def make_draft(kind: str, tiny, name: str, model, steps):
    read = partial(prefill_rows, steps.prefill)
    if kind.startswith("lookup"):
        return Lookup([[*range(3, 131)] * 2] if kind == "lookup in a text" else [])
    draft = load_model(tiny("llama-mha" if kind == "another model" else name)[2], dtype=torch.float32, kernels="torch")
    if kind == "a noisy copy":
        torch.manual_seed(1)
        for weight in draft.state_dict().values():
            weight += 0.05 * weight.std() * torch.randn_like(weight)
    if kind == "int4-self":
        draft = quantize_model(draft, Quantization("int4", 32, "int8"))
    return ModelDraft(model, install_kernels(draft), steps.compiled, None if kind == "int4-self" else read)


def speculate(model, draft, k, steps=None, automatic=False):
    return Speculation(model, draft, steps or Steps(), k, automatic)


# ---------------------------------------------------------------- greedy: the same tokens

CASES = [  # family, draft, k, rows; three graphs each are compiled in the slow ones
    ("llama-gqa-biased", "the same model", 1, 5, False), ("mistral-window", "another model", 2, 5, False),
    ("qwen3-gqa", "a noisy copy", 3, 1, False), ("bloom-5", "int4-self", 4, 5, False),
    ("qwen2-sliding", "lookup", 5, 5, False), ("llama-yarn", "lookup in a text", 6, 1, False),
    ("bloom-3", "a noisy copy", 7, 5, False), ("qwen2-gqa", "the same model", 8, 5, False),
    ("mistral-gqa", "int4-self", MOST_K, 1, False),
    pytest.param("qwen3-gqa", "a noisy copy", 4, 5, True, marks=pytest.mark.slow),
    pytest.param("llama-gqa-biased", "int4-self", 2, 1, True, marks=pytest.mark.slow),
    pytest.param("mistral-window", "lookup", 3, 5, True, marks=pytest.mark.slow),
]  # fmt: skip


@pytest.mark.parametrize("name, kind, k, B, compiled", CASES)
def test_greedy_texts_are_those_without_it(tiny, tiny_model, name, kind, k, B, compiled, monkeypatch):
    """To the token, again in the same caches, with an end token inside a proposal, and to the end of the context."""
    steps = compiled_steps(compiled, False)
    model = tiny_model(name, rows=B, length=50)
    prompts, settings = random_prompts(LENGTHS[-B:]), Sampling.make(B, temperature=0.0)
    plain = generate(model, prompts, settings, 99)
    assert {len(ids) for ids, _ in plain} == {51 - n for n in LENGTHS[-B:]}  # the last needs no slot
    speculation = speculate(model, make_draft(kind, tiny, name, model, steps), k, steps)
    if compiled:
        speculation.rehearsing = True
        generate(model, prompts, settings, 2, steps=steps, speculation=speculation)  # a single step
        speculation.rehearsing = False
        monkeypatch.setattr(speculation.pace, "choose", cycle([k, 0, 1, k, k]).__next__)
    graphs = compile_counts()
    assert generate(model, prompts, settings, 99, steps=steps, speculation=speculation) == plain
    stop = {plain[0][0][17], plain[-1][0][10]}
    ends = generate(model, prompts, settings, 20, stop)
    assert generate(model, prompts, settings, 20, stop, steps, speculation=speculation) == ends
    assert compile_counts() == graphs  # the rehearsal took every path
    numbers = speculation.report.numbers(1.0)
    if kind == "the same model":  # its caches are right after every step, or it would not be right itself
        assert numbers["speculation"]["acceptance_by_place"] == [1.0] * k
    if kind in ("a noisy copy", "int4-self"):
        assert 0 < sum(speculation.report.kept) < sum(speculation.report.looked_at)


def test_a_draft_with_a_smaller_table(tiny, tiny_model):
    """A table may be padded, and the draft's less so: ids beyond it are no reason to stop."""
    model = tiny_model("llama-gqa-biased", rows=2)
    V = model.config.vocab_size
    draft = make_draft("the same model", tiny, "llama-gqa-biased", model, Steps())
    table, config = draft.draft.embedding, dataclasses.replace(model.config, vocab_size=V - 70)
    draft.draft.config = config
    table.weight = torch.nn.Parameter(table.weight[: V - 70], False)
    if draft.draft.output is not None:
        draft.draft.output.weight = torch.nn.Parameter(draft.draft.output.weight[: V - 70], False)
    prompts, settings = [[5, V - 1, 7], [V - 2]], Sampling.make(2, temperature=0.0)
    plain = generate(model, prompts, settings, 30)
    assert any(token >= V - 70 for ids, _ in plain for token in ids)
    assert generate(model, prompts, settings, 30, speculation=speculate(model, draft, 3)) == plain


@pytest.mark.parametrize("automatic", [False, True])
def test_a_draft_proposes_what_it_would_say(tiny, tiny_model, automatic, monkeypatch):
    """After partial and full acceptance, plain steps between, other prompts, and a conversation that goes on: its
    proposals are its own greedy continuation of the text, which no wrong entry of its caches would give."""
    model, steps = tiny_model("qwen3-gqa", rows=3), Steps()
    draft = make_draft("a noisy copy", tiny, "qwen3-gqa", model, steps)
    alone = make_draft("a noisy copy", tiny, "qwen3-gqa", model, steps).draft
    alone.setup_caches(1, 256)
    speculation, propose, seen = speculate(model, draft, 3, automatic=automatic), draft.propose, []

    def watched(batch, texts, k, hidden):
        found = propose(batch, texts, k, hidden)
        for i, row in enumerate(batch.numbers):
            [(expected, _)] = generate(alone, [texts[row]], Sampling.make(1, temperature=0.0), k)
            assert found[0][i].tolist() == expected
            seen.append(row)
        return found

    monkeypatch.setattr(draft, "propose", watched)
    if automatic:  # now and then
        monkeypatch.setattr(speculation.pace, "choose", iter([0, 2, 0, 0, 0, 3, 1, 0, 1, 0, 0, 3] * 40).__next__)
    prompts, settings = random_prompts((5, 1, 12)), Sampling.make(3, temperature=0.0)
    said = generate(model, prompts, settings, 25, speculation=speculation)
    further = [prompt + ids + [77] for prompt, (ids, _) in zip(prompts, said)]
    generate(model, further, settings, 15, cached=[len(text) - 2 for text in further], speculation=speculation)
    generate(model, random_prompts((2, 30, 7), seed=8), settings, 15, speculation=speculation)
    assert {0, 1, 2} == set(seen) and len(seen) > 25


def test_batch_neighbours_and_listeners_change_nothing(tiny, tiny_model):
    """Drawn texts: a row alone says what it says in a batch; on_token hears every token once and can end its row."""
    model = tiny_model("llama-gqa-biased", rows=4)
    prompts = random_prompts((3, 17, 8, 5))
    for kind in ("a noisy copy", "int4-self", "lookup"):
        speculation = speculate(model, make_draft(kind, tiny, "llama-gqa-biased", model, Steps()), 4)
        options = {"temperature": [0.7, 1.3, 0.0, 1.0], "top_k": [0, 20, 0, 5], "repetition_penalty": [1, 1.3, 1.2, 1]}
        heard = [[] for _ in prompts]

        def listen(row, token, last, heard=heard):
            heard[row].append(token)
            return row == 3 and len(heard[row]) == 6

        settings = Sampling.make(4, [5, 6, 7, 8], **options)
        together = generate(model, prompts, settings, 30, on_token=listen, speculation=speculation)
        assert heard == [ids for ids, _ in together] and len(heard[3]) == 6
        for i in range(3):
            alone = Sampling.make(1, 5 + i, **{name: values[i] for name, values in options.items()})
            assert generate(model, [prompts[i]], alone, 30, speculation=speculation) == [together[i]], (kind, i)


def test_greedy_rows_with_a_penalty_are_plain_ones(tiny, tiny_model):
    """What was said earlier in the same proposal counts, on both sides."""
    model = tiny_model("qwen2-gqa", rows=2)
    prompts, settings = random_prompts((6, 11)), Sampling.make(2, temperature=0.0, repetition_penalty=1.4)
    plain = generate(model, prompts, settings, 40)
    for kind in ("the same model", "lookup"):
        speculation = speculate(model, make_draft(kind, tiny, "qwen2-gqa", model, Steps()), 5)
        assert generate(model, prompts, settings, 40, speculation=speculation) == plain
    mixed = Sampling.make(2, temperature=[0.0, 0.8], repetition_penalty=1.4)  # greedy beside drawn rows
    assert generate(model, prompts, mixed, 40, speculation=speculation)[0] == plain[0]


# ---------------------------------------------------------------- drawn: the same law

V, ROWS = 11, 100_000
SETTINGS = [
    {}, {"temperature": 0.5}, {"temperature": 1.7, "top_k": 4}, {"top_p": 0.7},
    {"temperature": 0.8, "top_k": 6, "top_p": 0.8}, {"min_p": 0.15, "repetition_penalty": 1.5},
]  # fmt: skip


def tables():
    """Logits of a model and of a draft for what follows each token, (V,V)."""
    torch.manual_seed(3)
    model = 1.5 * torch.randn(V, V)
    return model, model + 1.2 * torch.randn(V, V)


def three_tokens(accept, how: dict, kind: str, law_of_draft: dict | None = None) -> torch.Tensor:
    """(ROWS,3): what is found after token 0, in as many steps as it takes, of proposals of 2 tokens."""
    model, draft = tables()
    settings = Sampling.make(ROWS, list(range(ROWS)), **how)
    penalized = settings.repetition_penalty is not None
    unlike = Sampling.make(ROWS, list(range(ROWS)), **law_of_draft) if law_of_draft is not None else settings
    texts = torch.full((ROWS, 7), -1)
    texts[:, 0], place = 0, torch.zeros(ROWS, dtype=torch.int64)  # of each row's last token
    everywhere = torch.arange(ROWS)
    for _ in range(3):
        seen = None
        if penalized:
            seen = ((texts[:, :, None] == torch.arange(V)) & (texts >= 0)[:, :, None]).any(1)
        token, drafted, laws, also = texts[everywhere, place], [], [], seen
        for i in range(2):
            logits, at = draft[token], place + 1 + i
            law = probabilities(logits, settings, also)
            race = law / exponential_noise(settings.seed, at, torch.arange(V).expand(ROWS, V), speculative.DRAFT)
            token = race.argmax(1) if kind == "a model" else logits.argmax(1)
            laws.append(probabilities(logits, unlike, also))
            drafted.append(token)
            also = None if also is None else also.scatter(1, token[:, None], True)
        drafted = torch.stack(drafted, 1)
        before = torch.cat([texts[everywhere, place][:, None], drafted], 1)  # (ROWS,3)
        lengths = 2 - (everywhere % 5 == 0).long()  # some propose less
        p_draft = torch.stack(laws, 1) if kind == "a model" else None
        found = accept(model[before], place + 1, settings, seen, drafted, lengths, p_draft)
        for i in range(3):
            there = (found[:, i] >= 0) & (place + 1 + i < 7)
            texts[everywhere[there], (place + 1 + i)[there]] = found[there, i]
        place = (place + (found >= 0).sum(1)).clamp(max=6)
    return texts[:, 1:4]


def p_value(tokens: torch.Tensor, how: dict) -> float:
    """Of chi-square: the joint law of three tokens against the exact one."""
    model, _ = tables()
    expected = torch.zeros(V, V, V, dtype=torch.float64)

    def law(token: int, seen: list[int]) -> torch.Tensor:
        marks = torch.zeros(1, V, dtype=torch.bool)
        marks[0, seen] = True
        return probabilities(model[token][None], Sampling.make(1, **how), marks)[0].double()

    for a, p_a in enumerate(law(0, [0])):
        for b, p_b in enumerate(law(a, [0, a])) if p_a > 0 else ():
            expected[a, b] = p_a * p_b * law(b, [0, a, b]) if p_b > 0 else 0
    cells = tokens[:, 0] * V * V + tokens[:, 1] * V + tokens[:, 2]
    counts, expected = torch.bincount(cells, minlength=V**3).double(), ROWS * expected.flatten()
    if (counts[expected == 0] > 0).any():
        return 0.0
    usual = expected >= 5  # the others are one cell
    counts = torch.cat([counts[usual], counts[~usual].sum()[None]])
    expected = torch.cat([expected[usual], expected[~usual].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    chi2 = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2.0).double(), chi2 / 2))


@pytest.mark.parametrize("kind", ["a model", "a text"])
@pytest.mark.parametrize("how", SETTINGS, ids=repr)
def test_tokens_follow_the_law_of_the_model(how, kind):
    assert p_value(three_tokens(accept, how, kind), how) > 0.001


def mutant(*changes: tuple[str, str]):
    """`accept` of a module in which this was changed."""
    source = (ROOT / "speculative.py").read_text()
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    module = ModuleType("mutant")
    sys.modules["mutant"] = module  # dataclasses look there
    exec(source, module.__dict__)
    return module.accept


@pytest.mark.parametrize("how, kind", [(SETTINGS[0], "a model"), (SETTINGS[4], "a text")])
def test_that_law_is_broken_by_bugs(how, kind):
    always = mutant(("leading(chance * q < p, lengths)", "leading(p >= 0, lengths)"))
    assert p_value(three_tokens(always, how, kind), how) < 1e-6
    whole = mutant(("rest = (p - q).clamp(min=0)", "rest = p"))
    assert p_value(three_tokens(whole, how, kind), how) < 1e-6
    same_noise = mutant(
        ("DRAFT, ACCEPT = 1, 2", "DRAFT, ACCEPT = 1, 1"), ("column, ACCEPT)", "drafted.flatten()[:, None], 1)")
    )
    assert kind == "a text" or p_value(three_tokens(same_noise, how, kind), how) < 1e-6


def test_that_law_is_broken_by_a_draft_that_forgets_its_filter():
    how = {"temperature": 1.7, "top_k": 4}
    assert p_value(three_tokens(accept, how, "a model", {"temperature": 1.7}), how) < 1e-6


# ---------------------------------------------------------------- lookup


@pytest.mark.parametrize(
    "text, most, expected",
    [
        ([5, 6, 7, 8, 5, 6], 2, [7, 8]),
        ([5, 6, 7, 8, 5, 6], 9, [7, 8, 5, 6, 7, 8, 5, 6, 7]),  # it goes on with itself
        ([9, 9, 9], 4, [9, 9, 9, 9]),
        ([1, 2, 3, 4, 2, 3, 7, 1, 2, 3], 3, [4, 2, 3]),  # the longest match, not the latest
        ([2, 3, 4, 8, 2, 3, 5, 9, 2, 3], 1, [5]),  # of equals the latest
        ([1, 2, 3, 4], 3, []),
        ([1, 2, 1, 2, 1], 0, []),
        ([4], 3, []),
    ],
)
def test_what_followed_before(text, most, expected):
    whole, grown = Index(text), Index([])
    for token in text:
        grown.text.append(token)
        found = grown.match(grown.text, most)
    assert whole.match(text, most)[1] == found[1] == expected


def test_what_follows_in_another_text():
    source = Source([1, 2, 3, 4, 5, 6, 2, 3, 9])
    assert source.match([7, 7, 2, 3], 5) == (2, [9])  # the end is the end
    assert source.match([1, 2, 3], 5) == (3, [4, 5, 6, 2, 3])
    assert source.match([6, 2], 5) == (2, [3, 9]) and source.match([3, 9], 5) == (0, [])  # nothing follows
    for n in range(4):
        assert Source([5] * n).match([5, 5], 2) == ((2, [5]) if n == 3 else (0, []))
    chance = torch.Generator().manual_seed(5)
    for _ in range(50):  # it finds what the index of a growing text finds
        text, tail = (torch.randint(4, (n,), generator=chance).tolist() for n in (60, 9))
        best, following = Index(text).match(tail, 3)
        assert Source(text).match(tail, 3) in [(best, following[:n]) for n in range(4)]
    lookup = Lookup([[1, 2, 3, 4, 5, 6]])
    lookup.begin([[8, 1, 2, 3], [8, 8], [2, 3, 9, 2, 3]])
    none = torch.zeros(3, dtype=torch.int64)
    batch = Batch([0, 1, 2], [0, 1, 2], 99, None, none, none, none, Sampling.make(3), None)
    drafted, lengths, law = lookup.propose(batch, [index.text for index in lookup.rows], 3, None)
    assert [row[:n] for row, n in zip(drafted.tolist(), lengths.tolist())] == [[4, 5, 6], [], [9, 2, 3]]
    assert law is None
    batch.live = [1]
    assert lookup.propose(batch, [index.text for index in lookup.rows], 3, None) is None


# ---------------------------------------------------------------- how far to look ahead


def drive(acceptance, plain_s, draft_s, verify_s, steps=4000):
    """Seconds that a Pace takes for its tokens and that plain steps would have taken, and what it chose at last.

    Now and then the machine hangs in a step: what is measured there is a thousand times too much.
    """
    chance = torch.Generator().manual_seed(2)
    pace, spent, tokens, chosen = Pace(7, True, False), 0.0, 0, []
    for step in range(steps):
        hangs = 1000 if step in (5, 301, 302) else 1
        k = pace.choose()
        chosen.append(k)
        if k == 0:
            pace.note(plain_s * hangs)
            spent, tokens = spent + plain_s, tokens + 1
            continue
        a = acceptance(step)
        kept = int((torch.rand(k, generator=chance) < a).long().cumprod(0).sum())
        verify = plain_s + (verify_s - plain_s) * k / 7
        pace.note((k * draft_s + verify) * hangs, k, k * draft_s * hangs, [kept], [k])
        spent, tokens = spent + k * draft_s + verify, tokens + kept + 1
    return spent, tokens * plain_s, sorted(chosen[-100:])[50]


def test_the_pace_follows_what_pays():
    """Against the formula's best k; and never much slower than plain steps, whatever the draft."""
    spent, plain, k = drive(lambda step: 0.95, 1.0, 0.3, 1.5)
    assert plain / spent > 1.6 and k >= 5
    spent, plain, k = drive(lambda step: 0.55, 1.0, 0.1, 1.4)
    assert plain / spent > 1.2 and 1 <= k <= 5
    for a, draft_s, verify_s in ((0.0, 0.3, 2.0), (0.3, 1.0, 2.0), (0.9, 2.0, 2.0), (0.0, 0.0, 4.0)):
        spent, plain, k = drive(lambda step, a=a: a, 1.0, draft_s, verify_s)
        assert plain / spent > 0.95, (a, draft_s, verify_s)
        assert k == 0
    spent, plain, _ = drive(lambda step: 0.97 * (step % 1000 > 500), 1.0, 0.2, 1.6)  # now so, now so
    assert plain / spent > 1.05


def test_the_report_counts_places():
    report = Report()
    report.note([2, 0, 1], [3, 3, 1])
    report.note([0, 2], [0, 2])  # nothing was proposed for the first
    assert report.kept == [3, 2, 0] and report.looked_at == [4, 2, 1]
    numbers = report.numbers(2.0)
    assert numbers["mean_accepted_tokens"] == 5 / 4
    assert numbers["speculation"]["acceptance_by_place"] == [3 / 4, 1.0, 0.0]


# ---------------------------------------------------------------- the command line


def test_the_program_speculates(tiny, capsys, monkeypatch):
    ours, prompts = tiny("qwen3-gqa")[2], random_prompts((4, 19))
    args = [part for prompt in prompts for part in ("--prompt_ids", ids(prompt))]
    args += ["--checkpoint_path", ours, "--max_new_tokens", 30, "--dtype", "float32", "--json", "--temperature", 0]
    plain, _ = main(capsys, monkeypatch, *args)
    assert plain["mean_accepted_tokens"] is None
    for more in (["--draft", "int4-self", "--speculate_k", 4], ["--draft_checkpoint_path", ours, "--speculate_k", 3]):
        result, err = main(capsys, monkeypatch, *args, *more)
        assert [s["token_ids"] for s in result["samples"]] == [s["token_ids"] for s in plain["samples"]]
        about = result["speculation"]
        assert sum(about["share_of_time"].values()) == pytest.approx(1) and "speculation: " in err
        assert result["weight_bytes_per_token"] > 0 and len(about["acceptance_by_place"]) == more[-1]
    assert result["mean_accepted_tokens"] == pytest.approx(3, abs=0.3) and about["plain_steps"] == 0  # room ends them
    main(capsys, monkeypatch, *args, "--draft", "prompt-lookup", "--speculate_k", "auto")


def test_a_draft_with_another_padding_of_the_table(tiny, tiny_model):
    """Ids of the larger table are never proposed, and those of the smaller are."""
    model = tiny_model("qwen2-gqa", rows=2)
    draft = make_draft("the same model", tiny, "qwen2-gqa", model, Steps())
    prompts = random_prompts((3, 8))
    for settings in (Sampling.make(2, temperature=0.0), Sampling.make(2, [1, 2], 1.1)):
        plain = generate(model, prompts, settings, 25)
        for n, config in ((90, model.config), (131, dataclasses.replace(model.config, n_token=120))):
            other = draft.draft
            other.config = dataclasses.replace(other.config, n_token=n)
            model.config = config
            got = generate(model, prompts, settings, 25, speculation=speculate(model, draft, 3))
            if settings.temperature is None and config.n_token is None:
                assert got == plain
            assert max(max(ids) for ids, _ in got) < (config.n_token or 131)


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--speculate_k", "3"], "--speculate_k needs something that proposes"),
        (["--speculate_k", "16", "--draft", "prompt-lookup"], "must be auto, or between 1 and 15, not 16"),
        (["--draft", "guess"], "'guess' is none of prompt-lookup, lookup:FILE, int4-self"),
        (["--speculate_k", "x", "--draft", "prompt-lookup"], "must be auto, or between 1 and 15, not x"),
        (["--draft", "lookup:"], "'lookup:' is none of"),
        (["--draft_checkpoint_path", ""], "--draft_checkpoint_path is empty"),
        (["--draft", "prompt-lookup", "--roofline", "40"], "--roofline runs nothing"),
        (["--draft_tp", "--draft", "int4-self"], "--draft_tp is about the model of --draft_checkpoint_path"),
        (["--draft", "lookup:missing.txt"], "the checkpoint has no tokenizer"),
        (["--draft", "prompt-lookup", "--draft_checkpoint_path", "{}"], "are two drafts; give one of them"),
        (["--draft", "int4-self", "--draft_checkpoint_path", "{other}"], "is another model"),
        (["--draft_checkpoint_path", "nowhere"], "nowhere"),
        (["--draft_checkpoint_path", "{small}"], "has 77 tokens"),
    ],
)
def test_what_is_refused(tiny, tmp_path, capsys, monkeypatch, arguments, said):
    ours, other = tiny("qwen3-gqa")[2], tiny("llama-mha")[2]
    small = tmp_path / "small"
    shutil.copytree(other, small)
    config = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(config | {"vocab_size": 77}))
    arguments = [argument.format(ours, other=other, small=small) for argument in arguments]
    with pytest.raises((UserError, SystemExit)) as end:
        main(capsys, monkeypatch, "--checkpoint_path", ours, "--prompt_ids", "5,6", *arguments)
    assert said in str(end.value) + capsys.readouterr().err


@pytest.mark.slow
def test_another_tokenizer_is_refused_and_the_default_models_is_not(default_checkpoint, tmp_path):
    other = tmp_path / "other"
    shutil.copytree(default_checkpoint, other)
    tokenizer = json.loads((other / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = (next(text for text, i in vocabulary.items() if i == n) for n in (1234, 4321))
    vocabulary[a], vocabulary[b] = 4321, 1234
    (other / "tokenizer.json").write_text(json.dumps(tokenizer))
    args = ["--draft_checkpoint_path", other, "--max_new_tokens", 12, "--prompt", "One, two, one, two, one,"]
    done = run("--checkpoint_path", default_checkpoint, *args)
    assert (
        done.returncode == 2
        and f"token 1234 is {a!r} there and {b!r} here" in done.stderr.replace("'", "'")
        or ("token 1234 is" in done.stderr)
    )
    source = tmp_path / "source.txt"
    source.write_text("One, two, one, two, one, two, three.")
    args[:2] = ["--draft", f"lookup:{source}", "--speculate_k", 5, "--temperature", 0]
    done = run("--checkpoint_path", default_checkpoint, *args, "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["speculation"]["steps"] > 0


@pytest.mark.full
@pytest.mark.parametrize("format", ["bf16", "int8", "int4"])
def test_the_default_model_says_the_same(default_checkpoint, tmp_path, format):
    """In bfloat16, on the kernels, whose bits do not depend on how many tokens there are: 32 prompts, 64 tokens."""
    directory = default_checkpoint
    if format != "bf16":
        directory = tmp_path / "q"
        quantize_checkpoint(default_checkpoint, directory, Quantization(format, 32, "int8"))
    model, steps = load_model(directory), Steps()
    kinds = [Lookup()]
    if format != "int4":
        four = quantize_model(load_model(directory, kernels="torch"), Quantization("int4", 32, "int8"))
        four = install_kernels(four)
        kinds += [ModelDraft(model, four, steps.compiled, None)]
        kinds += [ModelDraft(model, four, steps.compiled, partial(prefill_rows, steps.prefill))]
    prompts = random_prompts([1 + 5 * i for i in range(32)], V=49152, seed=6)
    model.setup_caches(8, 256)
    for start in range(0, 32, 8):
        some, settings = prompts[start : start + 8], Sampling.make(8, temperature=0.0)
        plain = generate(model, some, settings, 64)
        for n, draft in enumerate(kinds):
            if n == 2:  # the same model in 4 bits, now with caches of its own
                draft.draft.setup_caches(8, 256)
            assert generate(model, some, settings, 64, speculation=speculate(model, draft, 3 + 2 * n)) == plain
