"""The trainers: the text in the model's own words, the loop that can be stopped, the distilled draft, the heads."""

import importlib.util
import os
import random
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from cases import read_model
from conftest import ROOT, tiny_chat_llama
from texts import TEMPLATE

sys.path.append(str(ROOT / "training"))

import common
import distill
import self_text
from teacher import TeacherText, frequent_tokens, make_batches, new_token_positions, read_teacher_text, split_held_out

from checkpoint import empty_model, read_config
from cli import UserError
from config import Config
from convert_hf_checkpoint import convert
from costs import total_weight_bytes
from drafts.heads import MedusaDraft, make_heads, read_heads
from engine import Engine, Request, StepFunctions, generate
from formats import Quantization
from load import load_model, open_checkpoint
from sampling import SamplingParams
from sources.opening import open_hf
from speculative import Speculation
from text.tokenizer import Tokenizer, TokenizerFiles

V, D = 97, 40  # tokens and width of the made-up teacher
BFLOAT16 = 0.02  # relative error of gradients that are products of bfloat16 numbers
NO_TOKENIZER = TokenizerFiles(Path(), None)
SAME = 1e-4  # two orders of the same float32 sums

# ---------------------------------------------------------------- text


@pytest.fixture(scope="module")
def chat_checkpoint(tmp_path_factory, byte_level):
    folder = tmp_path_factory.mktemp("training")
    tiny_chat_llama(folder / "hf", byte_level, 1600, TEMPLATE, seed=1)
    return convert(open_hf(folder / "hf"), folder / "tiny", torch.float32)


def prompts_of(directory: Path, seed: int, max_new_tokens: int):
    return self_text.Prompts(open_checkpoint(str(directory)), seed, max_new_tokens)


@pytest.fixture(scope="module")
def write_text(chat_checkpoint):
    """path, tokens -> the samples of self_text.py in that file, by index."""
    model, prompts = load_model(chat_checkpoint, dtype=torch.float32), prompts_of(chat_checkpoint, 5, 6)

    def write(path, tokens):
        steps = self_text.RecordedSteps()
        engine = Engine(model, 8, 1600, StepFunctions(steps.prefill, steps.decode))
        self_text.write_samples(engine, steps, prompts, path, tokens)
        return {sample["index"]: sample for sample in self_text.read_samples(path)}

    return write


def test_only_files_of_samples_are_read(tmp_path):
    path = tmp_path / "text.jsonl"
    for text in ("no JSON\n", "1\n", "notes", '{"index": 1}\n', '{"index": 1, "prompt": [3], "new": []}\n'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"text.jsonl cannot be read as a file of self_text.py: .*"):
            self_text.read_samples(path)
        assert path.read_text() == text
    path.write_text('{"ind')  # the first line, cut short
    assert self_text.read_samples(path) == []


def test_text_is_the_same_after_an_interruption(tmp_path, write_text):
    """A line that was cut short is removed. A sample depends on its index alone. (Which of the samples of one batch are
    finished first is another matter.)"""
    whole = write_text(tmp_path / "whole.jsonl", 200)
    path = tmp_path / "part.jsonl"
    write_text(path, 90)
    cut = path.read_bytes()[:-4]  # within the last line
    path.write_bytes(cut)
    part = {sample["index"]: sample for sample in self_text.read_samples(path)}
    assert len(part) == cut.count(b"\n") > 10
    resumed = write_text(path, 200)
    assert len(part) < len(resumed) and part.items() <= resumed.items()
    both = whole.keys() & resumed.keys()
    assert len(both) > 0.7 * len(whole) and all(whole[i] == resumed[i] for i in both)
    assert len({tuple(sample["new"]) for sample in whole.values()}) > 0.5 * len(whole)


def test_the_kept_states_are_those_of_their_tokens(tmp_path, chat_checkpoint, write_text):
    """A greedy token is the likeliest by its state, also behind the place where a second run went on with the text."""
    path = tmp_path / "text.jsonl"
    write_text(path, 60)
    samples = write_text(path, 150)
    model = load_model(chat_checkpoint, dtype=torch.float32)
    text = read_teacher_text(path, model)
    assert len(text.sequences) == len(samples) and len(text.hidden) == sum(len(s["new"]) for s in samples.values())
    same = n = 0
    for sequence, (index, sample) in zip(text.sequences, samples.items()):
        assert text.tokens[sequence[0] : sequence[2]].tolist() == sample["prompt"] + sample["new"]
        if index // 2 % 2:  # a greedy one
            states = text.hidden_states(torch.tensor(new_token_positions([sequence]))).float()
            same += (model.head(states[None])[0].argmax(-1) == torch.tensor(sample["new"])).sum()
            n += len(states)
    assert n > 40 and same > 0.9 * n  # two tokens may be equally likely in bfloat16
    model.norm.weight[2] += 1  # now it is another model
    with pytest.raises(UserError, match=r"text-\w{12}.states is missing or too short: .* was written by another model"):
        read_teacher_text(path, model)


@pytest.mark.parametrize("rows, answer, tokens", [(1, 6, 40), (4, 1, 12)])
def test_small_batches_and_short_answers_end(tmp_path, chat_checkpoint, rows, answer, tokens):
    """An answer of one token begins and ends within one step of the engine."""
    model, prompts = load_model(chat_checkpoint, dtype=torch.float32), prompts_of(chat_checkpoint, 5, answer)
    steps, calls = self_text.RecordedSteps(), iter(range(1000))
    engine = Engine(model, rows, 1600, StepFunctions(steps.prefill, steps.decode))
    step = engine.step
    engine.step = lambda: (next(calls), step())[1]  # StopIteration, if it never ends
    self_text.write_samples(engine, steps, prompts, tmp_path / "text.jsonl", tokens)
    lengths = [len(sample["new"]) for sample in self_text.read_samples(tmp_path / "text.jsonl")]
    assert sum(lengths) >= tokens and max(lengths) <= answer


def test_frequent_tokens():
    tokens = torch.tensor([7, 7, 7, 2, 2, 9, 4, 4, 12])
    assert frequent_tokens(tokens, 2).tolist() == [7, 2]
    assert frequent_tokens(tokens, 4, {12, 1}).tolist() == [1, 12, 7, 2, 4, 9]
    assert frequent_tokens(tokens, 100).tolist() == [7, 2, 4, 9, 12]


def test_batches_hold_every_sequence_once_an_epoch():
    lengths = [random.Random(i).randint(5, 40) for i in range(150)]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    sequences = [(end - length, end - 2, end) for end, length in zip(ends, lengths)]
    train, held_out = split_held_out(sequences)
    assert len(held_out) == 3 and sorted(train + held_out) == sequences
    batches = make_batches(train, 100, 2, seed=3)
    assert sorted(sequence for batch in batches for sequence in batch) == sorted(train * 2)
    assert all(sum(end - start for start, _, end in batch) <= 100 for batch in batches)
    assert batches == make_batches(train, 100, 2, seed=3) != make_batches(train, 100, 2, seed=4)
    assert new_token_positions([(0, 3, 6), (6, 7, 8)]) == [2, 3, 4, 6]


# ---------------------------------------------------------------- the loss and the loop


@pytest.mark.parametrize("n", [3, 700])
def test_the_loss_and_its_gradients_are_those_of_torch(n):
    torch.manual_seed(n)
    x, matrix, teacher_x, teacher_matrix = (torch.randn(shape) for shape in ((n, 24), (53, 24), (n, D), (53, D)))
    bias, x, matrix = torch.randn(53), x.requires_grad_(), matrix.requires_grad_()
    p_target = (0.3 * teacher_x @ teacher_matrix.T + bias).log_softmax(-1)
    expected = F.kl_div((x @ matrix.T + bias).log_softmax(-1), p_target, reduction="batchmean", log_target=True)
    gradients = torch.autograd.grad(3 * expected, (x, matrix))
    loss = common.kl_divergence(x, matrix, 0.3 * teacher_x, teacher_matrix, bias)
    torch.testing.assert_close(loss, expected, rtol=BFLOAT16, atol=0)
    for ours, reference in zip(torch.autograd.grad(3 * loss, (x, matrix)), gradients):
        assert (ours - reference).norm() < BFLOAT16 * reference.norm()
    common.kl_divergence(x, matrix.detach(), teacher_x, teacher_matrix).backward()  # with a constant head


def test_the_learning_rate_rises_and_falls():
    rates = [common.learning_rate(step, 1000, 0.5) for step in range(1000)]
    assert max(rates) == rates[99] == rates[100] == 0.5
    assert rates[:100] == sorted(rates[:100]) and rates[100:] == sorted(rates[100:], reverse=True)
    assert 0 < rates[-1] < 1e-5 and common.learning_rate(0, 1, 0.5) == 0.5


def test_a_state_that_does_not_fit_is_refused(tmp_path):
    path = tmp_path / "draft.state"
    module = torch.nn.Linear(3, 2)
    common.Trainer(module, 10, 0.1, path, {"width": 32}).save()
    with pytest.raises(UserError, match="draft.state belongs to a run with another width; delete it"):
        common.Trainer(module, 10, 0.1, path, {"width": 64})
    path.unlink()
    common.Trainer(module, 10, 0.1, path, {"width": 32, "shift": 0}).save()  # an earlier version wrote more settings
    common.Trainer(module, 10, 0.1, path, {"width": 32})
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(UserError, match=r"draft.state cannot be read as the state of a training run: .*"):
        common.Trainer(module, 10, 0.1, path, {"width": 32})


# ---------------------------------------------------------------- the draft


def sequences_of(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end - length + 4, end) for end, length in zip(ends, lengths)]


def random_draft(target: Config, width: int):
    generator = torch.Generator().manual_seed(1)
    head, hidden = (torch.randn(n, D, generator=generator) for n in (target.vocab_size, 200))
    draft = distill.new_draft(distill.draft_config(target, 2, width), head, hidden, seed=3)
    with torch.no_grad():
        for name, parameter in draft.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter.bfloat16())  # as it is stored
    return draft


@pytest.mark.parametrize("target, width", [("llama-llama3", 96), ("bloom-5", 32)])
def test_the_written_draft_computes_what_was_trained(tiny, tmp_path, target, width):
    """Sequences of different lengths, trained on together, have the logits that model.py gives for each alone."""
    source = tiny(target)[2]
    config = read_config(source)
    draft = random_draft(config, width)
    distill.write_draft(draft, NO_TOKENIZER, tmp_path / "draft")
    model = load_model(tmp_path / "draft", dtype=torch.float32)
    assert model.config == draft.config and model.config.max_seq_length == config.max_seq_length
    sequences = sequences_of([19, 7, 30])
    tokens = torch.randint(0, config.vocab_size, (56,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        logits = distill.draft_hidden_states(draft, tokens, sequences) @ draft.embedding.weight.T
    model.setup_caches(1, 64)
    whole = [model(tokens[None, a:c], torch.arange(c - a)[None], all_logits=True)[0] for a, _, c in sequences]
    expected = torch.cat([each[b - 1 - a : -1] for each, (a, b, _) in zip(whole, sequences)])
    torch.testing.assert_close(logits, expected, rtol=SAME, atol=SAME * expected.abs().max().item())


def test_the_gradients_of_a_draft_are_those_of_transformers(tiny):
    """Two batches one after the other, of sequences of different lengths; no gradient goes from one into the other."""
    oracle, _, ours = tiny("llama-mha")
    load_model(ours)  # its kernels have no gradients
    draft = read_model(ours, dtype=torch.float32).requires_grad_()
    tokens = torch.randint(0, draft.config.vocab_size, (73,), generator=torch.Generator().manual_seed(2))
    layers = [block.self_attn.o_proj.weight for block in oracle.model.layers]
    theirs = [oracle.model.embed_tokens.weight, oracle.model.norm.weight, *layers]
    mine = [draft.embedding.weight, draft.norm.weight, *(block.attention.out.weight for block in draft.blocks)]
    for sequences in (sequences_of([19, 7, 30]), [(0, 9, 40), (56, 60, 73)]):
        states = [oracle.model(tokens[None, a:c]).last_hidden_state[0, b - 1 - a : -1] for a, b, c in sequences]
        x = distill.draft_hidden_states(draft, tokens, sequences)
        weights = torch.randn(x.shape, generator=torch.Generator().manual_seed(3))
        expected = torch.autograd.grad((torch.cat(states) * weights).sum(), theirs)
        for found, gradient in zip(torch.autograd.grad((x * weights).sum(), mine), expected):
            torch.testing.assert_close(found, gradient, rtol=SAME, atol=SAME * gradient.abs().max().item())


def test_a_draft_begins_with_the_best_approximation_of_the_head():
    """With all columns it is exact, and its loss of each logit is the least that so few columns can have."""
    torch.manual_seed(0)
    target = Config(1, 1, 1, 64, 64, 64, 150, 256)
    head, hidden = torch.randn(150, 64) * torch.linspace(0.1, 2, 64), torch.randn(500, 64)
    for width in (32, 64, 96):
        draft = distill.new_draft(distill.draft_config(target, 1, width), head, hidden, seed=0)
        embedding = draft.embedding.weight.detach()
        singular = torch.linalg.svdvals(head)
        error = (embedding @ embedding.T - head @ head.T).norm() / (head @ head.T).norm()
        least = (singular[width:] ** 4).sum().sqrt() / (singular**4).sum().sqrt()
        torch.testing.assert_close(error, least, rtol=0.01, atol=SAME)
        scale = distill.FIRST_SCALE * (hidden @ torch.linalg.lstsq(head, embedding).solution).square().mean(0).sqrt()
        n = min(width, 64)
        torch.testing.assert_close(draft.norm.weight.detach()[:n], scale[:n], rtol=0.01, atol=SAME)


def made_up_teacher(seed=0, sequences=160) -> tuple[TeacherText, torch.Tensor]:
    """A target whose next token depends on the latest token alone, and its head. Each token has its hidden state."""
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(V, D, generator=generator)
    head = (torch.randn(V, D, generator=generator) * 0.5).bfloat16()
    probs = (table @ head.float().T).softmax(-1)
    rows = [torch.randint(0, V, (sequences, 1), generator=generator)]
    for _ in range(23):
        rows.append(torch.multinomial(probs[rows[-1][:, 0]], 1, generator=generator))
    tokens = torch.cat(rows, 1).flatten()
    row = torch.arange(len(tokens))
    return TeacherText(tokens, sequences_of([24] * sequences), table[tokens].bfloat16(), row), head


class Run:
    """A short training run of a small draft for the made-up teacher. interrupt: Ctrl-C comes within this step."""

    def __init__(self, text: TeacherText, head: torch.Tensor, state: Path, epochs=2, interrupt=None):
        target = Config(1, 1, 1, 40, 40, 40, V + 3, 256, n_token=V)
        draft = distill.new_draft(distill.draft_config(target, 2, 32), F.pad(head, (0, 0, 0, 3)), text.hidden, seed=0)
        self.draft, self.losses, self.interrupt, self.calls = draft, [], interrupt, 0
        self.task = distill.Distillation(draft, head, text, {1}, epochs, seed=0)
        self.trainer = common.Trainer(draft, len(self.task.batches), 0.01, state, {})

    def train(self):
        self.trainer.run(self.loss, self.report)
        return self

    def loss(self, step):
        if step == self.interrupt:
            os.kill(os.getpid(), signal.SIGINT)
        loss = self.task.loss(step)
        self.losses.append(loss.item())
        return loss

    def report(self):
        self.calls += 1
        return self.task.report()

    def numbers(self) -> list[float]:
        """The fractions of the held-out text that are accepted, and that are equal when greedy."""
        return [float(word) for word in self.task.report().replace(",", "").split() if word[0] in "01"]


@pytest.fixture
def short_batches(monkeypatch):
    monkeypatch.setattr(distill, "BATCH_TOKENS", 24 * 8)
    monkeypatch.setattr(distill, "FREQUENT", 60)  # so that other tokens are drawn for each step
    monkeypatch.setattr(distill, "OTHERS", 20)
    monkeypatch.setattr(common, "SAVE_S", 0)


@pytest.mark.slow
def test_a_draft_learns_from_its_teacher(tmp_path, short_batches):
    """And not from targets that belong to the tokens before."""
    text, head = made_up_teacher()
    run = Run(text, head, tmp_path / "state", epochs=8)
    before = run.numbers()
    after = run.train().numbers()
    assert sum(run.losses[-10:]) < 0.2 * sum(run.losses[:10])
    assert before[1] < 0.15 and after[0] > 0.8 and after[1] > 0.8, (before, after)
    assert run.calls > 10

    shifted = replace(text, row=text.row - 1)
    wrong = Run(shifted, head, tmp_path / "wrong", epochs=8).train()
    wrong.task.text = text
    assert wrong.numbers()[1] < 0.3 and wrong.numbers()[0] < 0.4, wrong.numbers()


@pytest.mark.slow
def test_an_interrupted_run_ends_as_one_without_a_pause(tmp_path, short_batches):
    text, head = made_up_teacher(1, 60)
    whole = Run(text, head, tmp_path / "whole").train()
    with pytest.raises(KeyboardInterrupt):
        Run(text, head, tmp_path / "state", interrupt=5).train()
    resumed = Run(text, head, tmp_path / "state")
    assert resumed.trainer.step == 5
    resumed.train()
    assert whole.losses[5:] == resumed.losses and len(whole.losses) > 12
    again = Run(text, head, tmp_path / "again").train()
    for other in (resumed, again):
        distill.write_draft(other.draft, NO_TOKENIZER, tmp_path / "draft")
        distill.write_draft(whole.draft, NO_TOKENIZER, tmp_path / "expected")
        files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("draft", "expected")]
        assert files[0] == files[1]


@pytest.mark.slow
def test_one_command_makes_a_draft(tmp_path, monkeypatch, capfd, chat_checkpoint, write_text):
    """Its directory is a checkpoint with the target's tokenizer."""
    text, out = tmp_path / "text.jsonl", tmp_path / "draft"
    write_text(text, 150)
    options = ["--checkpoint_path", chat_checkpoint, "--text", text, "--out", out]
    monkeypatch.setattr(sys, "argv", ["distill.py", *map(str, options), "--layers", "2", "--width", "64"])
    distill.main()
    output = capfd.readouterr()
    assert output.out == f"{out}\n" and "quantize.py --mode int8 --checkpoint_path" in output.err
    assert sorted(path.name for path in tmp_path.glob("draft*")) == ["draft"]  # no state is left
    assert Tokenizer(out).difference(Tokenizer(chat_checkpoint)) is None
    assert load_model(out).config.n_layer == 2
    quantized = total_weight_bytes(empty_model(read_config(out), Quantization("int8", 32, "int8")), torch.bfloat16)
    assert f"the draft will have {quantized / 1e6:.1f} MB in int8" in output.err


# ---------------------------------------------------------------- Medusa heads

spec = importlib.util.spec_from_file_location("medusa_trainer", ROOT / "training" / "medusa.py")
medusa_trainer = importlib.util.module_from_spec(spec)  # `medusa` is the file at the top level
spec.loader.exec_module(medusa_trainer)


def new_heads(teacher: TeacherText, head: torch.Tensor):
    """Heads for the made-up teacher, whose hidden states are the embeddings of its tokens."""
    table = torch.zeros(V, D).index_copy(0, teacher.tokens, teacher.hidden.float())
    return medusa_trainer.TrainedHeads(3, teacher, lambda tokens: table[tokens], head)


def trained_heads(teacher: TeacherText, head: torch.Tensor, state: Path, epochs: int):
    heads = new_heads(teacher, head)
    medusa_trainer.train(heads, epochs, 0, state)
    return heads


@pytest.fixture
def few_positions(monkeypatch):
    monkeypatch.setattr(medusa_trainer, "BATCH_TOKENS", 24 * 8)
    monkeypatch.setattr(medusa_trainer, "PEAK", 0.01)


@pytest.mark.slow
def test_heads_learn_from_their_teacher(tmp_path, few_positions, capfd):
    """And score at chance if their targets are those of the token after."""
    teacher, head = made_up_teacher()
    _, held_out = split_held_out(teacher.sequences)
    places = medusa_trainer.positions_of(held_out, 3)
    losses, hits = trained_heads(teacher, head, tmp_path / "state", 8).accuracy(places)
    assert len(hits) == 3 and min(hits) > 0.6 and max(losses) < 0.6, (losses, hits)
    assert "head 1: " in capfd.readouterr().err
    shifted = new_heads(teacher, head)
    hidden_states = shifted.hidden_states
    shifted.hidden_states = lambda positions: ((hidden, at + 1) for hidden, at in hidden_states(positions))
    medusa_trainer.train(shifted, 8, 0, tmp_path / "shifted")
    shifted.hidden_states = hidden_states
    losses, hits = shifted.accuracy(places)
    likeliest = torch.cat([teacher.hidden_states(places + i).float() @ head.float().T for i in (1, 2, 3)]).argmax(1)
    chance = likeliest.bincount().max() / len(likeliest)  # of always guessing the same token
    assert max(hits) < chance + 0.1 and min(losses) > 1, (losses, hits, chance)


def test_heads_see_only_positions_where_all_of_them_have_a_target():
    batch = [(0, 3, 9), (9, 12, 14), (14, 15, 18)]
    assert medusa_trainer.positions_of(batch, 2).tolist() == [2, 3, 4, 5, 14]
    assert medusa_trainer.positions_of(batch, 1).tolist() == [2, 3, 4, 5, 6, 11, 14, 15]


def test_one_command_makes_heads(tmp_path, monkeypatch, capfd, chat_checkpoint, write_text):
    """The same file each time, with which the program speaks."""
    text, files = tmp_path / "text.jsonl", []
    write_text(text, 150)
    for name in ("a", "b"):
        options = ["--checkpoint_path", chat_checkpoint, "--text", text, "--out", tmp_path / f"{name}.safetensors"]
        options += ["--heads", 2, "--vocabulary", 50, "--epochs", 1]
        monkeypatch.setattr(sys, "argv", ["medusa.py", *map(str, options)])
        medusa_trainer.main()
        files.append((tmp_path / f"{name}.safetensors").read_bytes())
    assert files[0] == files[1] and "holds 2 heads" in capfd.readouterr().err
    assert not list(tmp_path.glob("*.state"))
    model = load_model(chat_checkpoint, dtype=torch.float32)
    file = read_heads(tmp_path / "a.safetensors", model, "it")
    assert (file.heads, file.head_vocabulary_size) == (2, 50) and len(file.vocabulary) >= 50
    speculation = Speculation([MedusaDraft(make_heads(file, model))], 2, automatic=False)
    requests = [Request([5, 6, 7], SamplingParams(temperature=0.0), 20) for _ in range(2)]
    generate(Engine(model, 1, 64), requests[:1])
    generate(Engine(model, 1, 64, decoding=speculation), requests[1:])
    assert requests[0].new_tokens == requests[1].new_tokens and speculation.report.steps
