"""Medusa heads: their file, the rows of the output head that they borrow, and the tokens they propose.

test_speculative.py tests that the tokens with heads are those of plain decoding, test_training.py the training.
"""

import json
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from cases import numbers, random_heads, write_random
from programs import main
from safetensors.torch import load_file, save_file
from schedules import GREEDY
from table_model import DRAFT, SETTINGS, p_value
from test_speculative import three_tokens

from cli import UserError
from config import Config
from cpu.build import load_kernels
from drafts import heads as medusa
from drafts.draft_model import DraftVocabulary, output_head_rows
from drafts.heads import HeadsFile, MedusaDraft, draw_tokens, make_heads, pack_heads, read_heads, save_heads
from drafts.mtp import ReducedHead
from engine import Engine, Request, generate
from formats import Quantization, quantize_model
from load import install_kernels, load_model
from sampling import Sampling
from speculative import Speculation, verify

ROUNDING = 0.02  # of the largest logit: int8 weights and, with the kernels, int8 activations


def write_heads(path, model) -> dict[str, torch.Tensor]:
    D, chance = model.config.dim, torch.Generator().manual_seed(1)
    weights = {"gate_up": torch.randn(14, 2 * D, generator=chance), "down": torch.randn(D, 7, generator=chance)}
    save_heads(path, HeadsFile(pack_heads(weights), torch.arange(101, 2, -2), 3, 40), model, "the model")
    return weights


def test_heads_come_back_from_their_file(tiny, tmp_path):
    model = load_model(tiny("qwen3-gqa")[2], dtype=torch.float32)
    weights = write_heads(tmp_path / "heads.safetensors", model)
    file = read_heads(tmp_path / "heads.safetensors", model, "it")
    heads = make_heads(file, model)
    assert file.vocabulary.tolist() == list(range(101, 2, -2)) and heads.n == file.heads == 3
    assert heads.vocabulary.ids.tolist() == list(range(101, 22, -2))
    for layer, weight in ((heads.gate_up, weights["gate_up"]), (heads.down, weights["down"])):
        again = layer.weights()
        assert (again - weight).abs().max() <= weight.abs().max() / 127
    assert not list(tmp_path.glob("*.partial"))


def test_the_program_uses_a_file_of_heads(tiny, tmp_path, capsys, monkeypatch):
    """And says so if there are fewer heads than tokens to propose."""
    ours = tiny("qwen3-gqa")[2]
    write_heads(tmp_path / "heads.safetensors", load_model(ours, dtype=torch.float32))
    args = ["--checkpoint_path", ours, "--prompt_ids", "5,6,7", "--max_new_tokens", 30, "--dtype", "float32"]
    args += ["--json", "--temperature", 0]
    plain, _ = main(capsys, monkeypatch, *args)
    heads = f"medusa:{tmp_path}/heads.safetensors"
    for kind, k, said in ((heads, 3, False), (heads, 5, True), (heads, "auto", False), ("int4-self", 10, False)):
        result, err = main(capsys, monkeypatch, *args, "--draft", kind, "--speculate_k", k)
        assert result["samples"][0]["token_ids"] == plain["samples"][0]["token_ids"]
        assert [draft["name"] for draft in result["speculation"]["drafts"]] == [kind.partition(":")[0]]
        assert ("--speculate_k 5: medusa proposes at most 3 tokens" in err) == said
        assert said == ("proposes at most" in err)


def damage(key, value):
    def change(tensors, about):
        tensors[key] = value(tensors[key])

    return change


@pytest.mark.parametrize("change, said", [
    (lambda tensors, about: tensors.pop("down.scales"), "is not a file of Medusa heads"),
    (lambda tensors, about: about.update(fingerprint="0"), "holds heads for the model, which is another model"),
    (lambda tensors, about: about.update(tokens=51), "is damaged"),
    (lambda tensors, about: about.update(heads="x"), "is damaged"),
    (damage("gate_up.weight", lambda w: w[:0]), r"gate_up.weight is .*, but .* it should be \(14, 100\)"),
    (damage("down.weight", lambda w: w.float()), "is damaged"),
    (damage("down.scales", lambda s: s * float("nan")), "is damaged"),
    (damage("down.scales", lambda s: s[:2]), "down.scales is .*, but for this model it should be"),
    (damage("vocabulary", lambda v: v + 100), "is damaged"), (damage("vocabulary", lambda v: v * 0), "is damaged"),
    (damage("vocabulary", lambda v: v[:0]), "vocabulary is"),
    (damage("down.weight", lambda w: w[0, 0]), "gate_up.weight is .*, but for this model it should be"),
])  # fmt: skip
def test_what_is_no_file_of_heads_is_refused(tiny, tmp_path, change, said):
    model, path = load_model(tiny("mistral-gqa")[2], dtype=torch.float32), tmp_path / "heads.safetensors"
    write_heads(path, model)
    tensors, about = load_file(path), {"model": "the model", "fingerprint": medusa.fingerprint(model)}
    about |= {"tokens": 40, "heads": 3}
    change(tensors, about)
    save_file(tensors, path, {medusa.FORMAT: json.dumps(about)})
    with pytest.raises(UserError, match=said):
        read_heads(path, model, "it")


@pytest.mark.parametrize("about", [None, "{", "3", "[" * 100_000])
def test_other_files_are_no_files_of_heads(tiny, tmp_path, about):
    model, path = load_model(tiny("mistral-gqa")[2], dtype=torch.float32), tmp_path / "heads.safetensors"
    write_heads(path, model)
    save_file(load_file(path), path, about and {medusa.FORMAT: about})
    with pytest.raises(UserError, match="is not a file of Medusa heads"):
        read_heads(path, model, "it")


def test_files_that_cannot_be_read_are_refused(tiny, tmp_path, capsys, monkeypatch):
    ours, path = tiny("mistral-gqa")[2], tmp_path / "heads.safetensors"
    write_heads(path, load_model(ours, dtype=torch.float32))
    path.write_bytes(path.read_bytes()[:-9])
    cases = [("", "holds heads for SmolLM2"), (f":{path}", "is truncated"), (":nowhere", "nowhere is missing")]
    for name, said in [*cases, (f":{tmp_path}", f"{tmp_path} is not a regular file")]:
        with pytest.raises((UserError, SystemExit)) as end:
            main(capsys, monkeypatch, "--checkpoint_path", ours, "--prompt_ids", "5,6", "--draft", "medusa" + name)
        assert said in str(end.value) + capsys.readouterr().err


def test_a_fingerprint_is_that_of_the_model_in_every_format(tiny):
    directory = tiny("qwen2-gqa")[2]
    model = load_model(directory, dtype=torch.float32)
    assert medusa.fingerprint(load_model(directory, dtype=torch.bfloat16)) == medusa.fingerprint(model)
    four = load_model(directory, dtype=torch.bfloat16, kernels="torch")
    four = install_kernels(quantize_model(four, Quantization("int4", 32, "int8")))
    assert medusa.fingerprint(four) == medusa.fingerprint(model)
    assert medusa.fingerprint(load_model(tiny("qwen2-sliding")[2])) != medusa.fingerprint(model)
    model.norm.weight[3] += 0.1
    assert medusa.fingerprint(model) != medusa.fingerprint(load_model(directory))


@pytest.mark.parametrize("name", ["qwen3-gqa", "llama-mha", "bloom-3"])
def test_rows_of_the_output_head_are_those_of_its_matrix(tiny, name):
    model, ids = load_model(tiny(name)[2], dtype=torch.float32), torch.tensor([5, 99, 17, 0, 4])
    matrix = model.embedding.weight if model.output is None else model.output.weight
    assert torch.equal(output_head_rows(model, ids), matrix[ids])
    model = load_model(tiny(name)[2], dtype=torch.float32, kernels="torch")
    model = quantize_model(model, Quantization("int8", 32, "int8"))
    layer = model.embedding if model.output is None else model.output
    expected = layer.weights(ids)
    assert (output_head_rows(install_kernels(model), ids) - expected).abs().max() < 1e-6


def test_a_soft_cap_acts_on_the_logits_of_drafts(tmp_path):
    more = {"logits_softcap": 2.0, "logits_scale": 3.0, "mlp": "relu2"}
    model = load_model(write_random(tmp_path, Config(2, 2, 1, 8, 30, 22, 97, 64, **more)), dtype=torch.float32)
    x, ids = numbers(3, 30), torch.tensor([5, 90, 17, 0])
    expected = model.head(x)
    assert expected.abs().max() <= 2 and expected.abs().max() > 1.9
    vocabulary = DraftVocabulary(ids, output_head_rows(model, ids), 2.0)
    assert (vocabulary.logits(x, 97)[:, ids] - expected[:, ids]).abs().max() < 0.05  # in int8
    head = ReducedHead(model)
    assert not head.is_whole and torch.equal(head.logits(model, x), expected)


@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_heads_compute_what_their_file_describes(tiny, kernels):
    """The greedy tokens, and the states of each head, against a plain calculation."""
    model = load_model(tiny("llama-gqa-biased")[2], dtype=torch.float32)
    heads = random_heads(model, n=3, size=0.3)
    W, V = (layer.weights() for layer in (heads.gate_up, heads.down))
    ids, layer = heads.vocabulary.ids, heads.vocabulary.output
    vectors = layer.weights()
    heads = install_kernels(heads, kernels)
    hidden = torch.randn(3, model.config.dim, generator=torch.Generator().manual_seed(8))
    inputs = torch.tensor([[9, 8, 7], [3, 4, 5], [6, 0, 2]])
    drafted = draw_tokens(model, heads, hidden, inputs, None, 3)
    state, token = hidden, inputs[0]
    for i in range(3):
        e = model.embedding(token[:, None])[:, 0]
        x = torch.cat([F.rms_norm(y, y.shape[-1:]) for y in (state, e)], -1)
        gate, up = (x @ W.T).chunk(2, -1)
        expected = state + (F.silu(gate) * up) @ V.T
        state = heads(state, e)
        assert (state - expected).abs().max() < ROUNDING * expected.abs().max()
        wanted, logits = expected @ vectors.T, heads.vocabulary.logits(state, 131)
        assert (logits[:, ids] - wanted).abs().max() < ROUNDING * wanted.abs().max()
        assert logits.isinf().sum() == 3 * (131 - len(ids))
        token = drafted[:, i]
        assert torch.equal(logits.argmax(-1), token)


class TableHeads:
    """Heads whose logits depend only on the token before, and that do not know all tokens. Their state is the token."""

    def __init__(self):
        self.vocabulary = SimpleNamespace(logits=self.logits)

    def __call__(self, state, embedded):
        return embedded

    def logits(self, state, V):
        logits = DRAFT.logits[state.long()[:, 0]].clone()
        logits[:, 1::4] = float("-inf")
        return logits


@pytest.mark.parametrize("how", [how for how in SETTINGS if "masked" not in how], ids=repr)
@pytest.mark.slow
def test_sampled_tokens_have_the_distribution_of_the_model(how):
    """And many drafted ones are accepted."""
    model = SimpleNamespace(embed=lambda tokens: tokens[..., None].float())
    accepted = []

    def draw(inputs, settings):
        return draw_tokens(model, TableHeads(), torch.zeros(inputs.shape[1], 1), inputs, settings, 2)

    def verify_and_count(*arguments):
        found = verify(*arguments)
        accepted.append(float((found[1] - 1).float().mean()) / 2)
        return found

    tokens = three_tokens(SimpleNamespace(verify=verify_and_count), how, draw)
    assert p_value(tokens, how) > 0.001 and 0.1 < accepted[0] < 0.9


@pytest.mark.skipif(not load_kernels(), reason="needs the CPU kernels")
@pytest.mark.parametrize("name", ["llama-gqa-biased", "bloom-5"])
@pytest.mark.parametrize("quantization", [None, Quantization("int8", 32, "int8"), Quantization("int4", 32, "int4")])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 0.02)])
def test_one_operation_draws_the_likeliest_tokens(tiny, name, quantization, dtype, tolerance):
    """Those with the largest logits of the heads, or nearly so; the tokens of a row are the same in every batch."""
    model = load_model(tiny(name)[2], dtype=dtype, kernels="torch")
    heads = install_kernels(random_heads(model, n=3, size=0.3))
    model = install_kernels(model if quantization is None else quantize_model(model, quantization))
    states = torch.randn(5, model.config.dim, generator=torch.Generator().manual_seed(4)).to(dtype)
    tokens, layers = torch.tensor([3, 99, 0, 130, 64]), heads.layers_for_kernels(model)
    arguments = heads.vocabulary.ids, *[layer.handle for layer in layers]
    drafted = torch.ops.fastpath.medusa(states, tokens, *arguments, 3)
    assert torch.equal(torch.ops.fastpath.medusa(states[3:], tokens[3:], *arguments, 2), drafted[3:, :2])
    state, token = states, tokens
    for i in range(3):
        state = heads(state, model.embedding(token[:, None])[:, 0])
        logits, token = heads.vocabulary.logits(state, 131).float(), drafted[:, i]
        missing = logits.amax(1) - logits.gather(1, token[:, None])[:, 0]
        assert (missing <= tolerance * logits[:, heads.vocabulary.ids].abs().amax(1)).all()


def test_the_noise_of_the_target_makes_samples_agree(tiny, tiny_model, monkeypatch):
    """Heads that give the target's own distribution propose what it samples: they share its noise."""
    model = tiny_model("qwen3-gqa")
    heads = random_heads(model, n=1, size=0.0)  # the state stays that of the token before
    hidden = torch.randn(5, model.config.dim, generator=torch.Generator().manual_seed(2))
    settings, rows = Sampling.make(5, 131), torch.arange(5)
    settings.temperature.fill_(1.0)
    agree = 0
    for seed in range(40):
        settings.seed.copy_(rows + 5 * seed)
        inputs = torch.stack([rows + 9, rows + 3, rows])
        drafted = draw_tokens(model, heads, hidden, inputs, settings, 1)
        logits = torch.full((5, 1, 131), float("-inf"))
        logits[:, 0, heads.vocabulary.ids] = model.head(hidden)[:, heads.vocabulary.ids]
        agree += (medusa.sample(logits, rows, rows + 4, None, settings)[0] == drafted).sum()
    assert agree > 0.95 * 200


def test_rows_without_a_hidden_state_wait(tiny, tiny_model):
    """The first step of a request is plain, and proposals stay within the cache row."""
    model = tiny_model("mistral-gqa")
    draft = MedusaDraft(random_heads(model, n=3))
    speculation = Speculation([draft], 3, automatic=False)
    engine = Engine(model, 2, 20, decoding=speculation)
    generate(engine, [Request([5, 6, 7], GREEDY, 9)])
    assert speculation.report.plain_steps == 1 and not draft.states
    assert draft.choices(8) == [1, 3] and draft.choices(2) == [1, 2] and draft.choices(1) == [1]
    generate(engine, [Request([5, 6, 7, 8], GREEDY, 99) for _ in range(3)])  # to the end of the rows
    assert max(len(row.tokens) for row in engine.rows) == 20
