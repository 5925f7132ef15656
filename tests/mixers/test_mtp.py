"""The MTP layer: its outputs, its state, what it proposes."""

import copy
import shutil
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from cases import EXPERTS, read_model, write_random
from conftest import random_prompts, save_random, tiny_config
from gguf_writer import NAMES, OTHER_NAMES, write_gguf
from safetensors.torch import load_file, save_file
from schedules import NoisyDraft, fuzz_states
from test_families import vocabulary_fields
from test_recurrent import passes
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5RMSNorm
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeDecoderLayer

from checkpoint import open_directory
from cli import UserError
from config import Config, DeltaNet
from convert_hf_checkpoint import convert
from drafts.mtp import MtpDraft, draw_tokens
from engine import Engine, EngineOptions, Request, generate
from formats import Quantization
from load import load_engine, load_model
from model import pad_rows
from options import ModelOptions
from quantize import quantize_checkpoint
from sampling import Sampling, SamplingParams, sample
from sources.opening import open_gguf, open_hf
from speculative import Speculation

NEAR = 1e-5  # float32 sums in another order


class Oracle(torch.nn.Module):
    """The layer, in plain torch with the attention of transformers. It sees whole sequences, and has no cache."""

    def __init__(self, model, seed):
        super().__init__()
        config = copy.deepcopy(model.config)
        config.layer_types = ["full_attention"]
        config._attn_implementation = "eager"
        D = config.hidden_size
        self.fc = torch.nn.Linear(2 * D, D, bias=False)
        self.pre_fc_norm_embedding = Qwen3_5RMSNorm(D, config.rms_norm_eps)
        self.pre_fc_norm_hidden = Qwen3_5RMSNorm(D, config.rms_norm_eps)
        block = Qwen3_5MoeDecoderLayer if config.model_type == "qwen3_5_moe_text" else Qwen3_5DecoderLayer
        self.layers = torch.nn.ModuleList([block(config, 0)])
        self.norm = Qwen3_5RMSNorm(D, config.rms_norm_eps)
        generator = torch.Generator().manual_seed(seed)
        for weight in self.parameters():
            weight.data.normal_(0, 0.3 if weight.dim() == 1 else 1.2 * weight.shape[-1] ** -0.5, generator=generator)
        self.__dict__["target"] = model  # not a submodule

    @torch.no_grad()
    def forward(self, tokens, hidden):
        """The outputs for pairs of the hidden states (n,D) and the tokens after them."""
        pair = [self.pre_fc_norm_embedding(self.target.model.embed_tokens(tokens)), self.pre_fc_norm_hidden(hidden)]
        z = self.fc(torch.cat(pair, dim=-1))[None]
        positions = torch.arange(z.shape[1])[None]
        mask = torch.full((z.shape[1], z.shape[1]), float("-inf")).triu(1)[None, None]
        rope = self.target.model.rotary_emb(z, positions)
        y = self.layers[0](z, position_embeddings=rope, attention_mask=mask, position_ids=positions)
        return self.norm(y)[0]

    @torch.no_grad()
    def draft(self, tokens, k):
        """The k tokens after a list of tokens, and the outputs (k,D) that they come from."""
        hidden = self.target.model(torch.tensor([tokens[:-1]])).last_hidden_state[0]
        tokens = torch.tensor(tokens[1:])
        outputs = []
        for _ in range(k):
            outputs.append(self(tokens, hidden)[-1])
            hidden = torch.cat([hidden, outputs[-1][None]])
            tokens = torch.cat([tokens, self.target.lm_head(outputs[-1]).argmax()[None]])
        return tokens[-k:].tolist(), torch.stack(outputs)


@pytest.fixture(scope="module", params=["qwen35-grouped", "qwen35-wide"])
def member(tiny, request, tmp_path_factory):
    """(the oracle, a Hugging Face directory with its layer) for a random model."""
    model, folder, _ = tiny(request.param)
    path = tmp_path_factory.mktemp(request.param) / "x"
    return save_with_layer(model, folder, path), path


def save_with_layer(model, folder, path):
    """Copy a directory, with a random layer besides. Returns the oracle."""
    oracle = Oracle(model, 3).eval()
    shutil.copytree(folder, path)
    layer = {f"mtp.{name}": weight.contiguous() for name, weight in oracle.state_dict().items()}
    save_file(load_file(folder / "model.safetensors") | layer, path / "model.safetensors")
    return oracle


@pytest.fixture(scope="module")
def model(member):
    return load_model(open_hf(member[1]), dtype=torch.float32, draft=["mtp"])


def drafted(model, tokens, k, parts, sampling=None):
    """The k tokens that the layer drafts after a row of tokens, whose prefix the model reads in these parts."""
    engine = Engine(model, 2, 100)
    rows = torch.tensor([1])
    start = 0
    for n in parts:
        with torch.no_grad():
            model(torch.tensor([tokens[start : start + n]]), torch.arange(start, start + n)[None], rows)
        start += n
    assert start == len(tokens) - 1
    draft = MtpDraft(model)
    draft.begin(engine)
    inputs = torch.tensor([[tokens[-1]], [start], [1]])
    with torch.no_grad():
        return draft.draw(model, draft.head, inputs, sampling, k)[0].tolist()


@pytest.mark.parametrize("parts", [[40], [1] * 40, [17, 23], [20, 3, 16, 1]])
def test_drafts_equal_the_oracle(member, model, parts):
    oracle, _ = member
    [tokens] = random_prompts((41,), seed=5)
    assert drafted(model, tokens, 6, parts) == oracle.draft(tokens, 6)[0]


def test_the_operation_equals_plain_torch(member):
    """Whatever the passes are: rows side by side, several batch rows of one row, tokens that are read again."""
    fused = load_model(open_hf(member[1]), dtype=torch.float32, draft=["mtp"])
    if fused.backend.write_draft_keys is None:
        pytest.skip("no kernels for this machine")
    plain = copy.deepcopy(fused)
    fused.backend = replace(fused.backend, max_fused_tokens=1000)  # also passes that torch would do faster
    plain.backend = replace(plain.backend, write_draft_keys=None)
    passes(fused)
    passes(plain)
    cache = plain.mtp.block.mixer.state
    used = cache.k.abs().sum((1, 3)) > 0
    used[:, -1] = False  # padding
    assert used.sum(1).tolist() == [58, 15, 85]
    for one, other in ((fused.mtp.block.mixer.state.k, cache.k), (fused.mtp.block.mixer.state.v, cache.v)):
        torch.testing.assert_close(one.transpose(1, 2)[used], other.transpose(1, 2)[used], rtol=NEAR, atol=20 * NEAR)
    tails = [model.mtp.hidden.tail[:, :-1] for model in (fused, plain)]
    torch.testing.assert_close(*tails, rtol=NEAR, atol=20 * NEAR)


class CheckingDraft(NoisyDraft):
    """Checks in each step what the layer drafts: the same as the oracle, which sees the row's tokens at once."""

    def __init__(self, oracle, choose):
        super().__init__(choose)
        self.oracle = oracle

    def begin(self, engine):
        super().begin(engine)
        self.mtp = MtpDraft(engine.model)
        self.mtp.begin(engine)

    def propose(self, batch, k):
        drafted = self.mtp.draw(self.engine.model, self.mtp.head, batch.inputs, None, 3)
        for row, tokens in zip(batch.rows, drafted.tolist()):
            expected, _ = self.oracle.draft([*row.tokens, row.request.new_tokens[-1]], 3)
            room = self.engine.length - 1 - len(row.tokens)
            assert tokens[:room] == expected[:room], row.tokens
        return super().propose(batch, k)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_the_state_of_the_layer_in_schedules(member, model, seed):
    """After each number of accepted tokens, in rows that go on from others and from snapshots, beside other rows."""
    fuzz_states(model, seed, partial(CheckingDraft, member[0]))


def entries(model, drafts, prompts, rows, **options):
    """The tokens and log-probabilities of answers, greedy and sampled ones."""
    decoding = Speculation(drafts, 4, automatic=False) if drafts else None
    engine = Engine(model, rows, 120, None, decoding, EngineOptions(**options))
    requests = []
    for i, prompt in enumerate(prompts):
        params = SamplingParams(temperature=[0.0, 0.9][i % 2], seed=i, repetition_penalty=1.2)
        requests.append(Request(prompt, params, 20, logprobs=2))
    generate(engine, requests)
    if drafts:
        assert engine.decoding.report.proposed > 0
    return [(request.new_tokens, request.token_logprobs) for request in requests]


PROMPTS = random_prompts((31, 1, 17, 60, 2, 9), seed=8)


def test_drafts_change_no_token(model):
    expected = entries(model, [], PROMPTS, 6)
    for rows, chunk in ((1, 128), (4, 7)):
        found = entries(model, [MtpDraft(model)], PROMPTS, rows, chunk_tokens=chunk, always_chunk=True)
        assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]


@pytest.mark.slow
@pytest.mark.parametrize("format", ["int4", "int8", "iq4_nl"])
def test_bits_of_a_quantized_model_with_drafts(tiny, tmp_path, format):
    """The layer is quantized with the model, and log-probabilities are those of plain decoding, bit for bit."""
    config = tiny_config("qwen35-grouped")
    config.hidden_size = 96
    config.num_attention_heads = 4
    save_with_layer(save_random(config, tmp_path / "hf", seed=3), tmp_path / "hf", tmp_path / "mtp")
    exact = convert(open_hf(tmp_path / "mtp"), tmp_path / "exact", torch.float32)
    quantize_checkpoint(exact, tmp_path / "q", Quantization(format, 32, "int8"))
    model = load_model(tmp_path / "q", draft=["mtp"])
    assert model.mtp.block.mlp.down.stored_as == format
    if not model.backend.chunk_invariant:
        pytest.skip("no kernels for this machine")
    expected = entries(model, [], PROMPTS, 1)
    for rows in (1, 4):
        assert entries(model, [MtpDraft(model)], PROMPTS, rows) == expected
    without = load_model(tmp_path / "q")
    assert without.mtp is None and entries(without, [], PROMPTS, 1) == expected


HYBRID = Config(
    3, 4, 2, 12, 40, 57, 131, 256, qk_norm=True, attention_gate=True, mtp=True, experts=EXPERTS,
    delta_net=DeltaNet((0, 1), n_key_head=2, n_value_head=6, key_dim=10, value_dim=7),
)  # fmt: skip


@pytest.fixture(scope="module")
def sparse(tmp_path_factory):
    return read_model(write_random(tmp_path_factory.mktemp("sparse") / "x", HYBRID), torch.float32)


def test_a_sparse_layer_drafts(sparse):
    expected = entries(sparse, [], PROMPTS, 6)
    found = entries(sparse, [MtpDraft(sparse)], PROMPTS, 4, chunk_tokens=7, always_chunk=True)
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    assert sparse.expert_counts.shape == (3, 6) and sparse.expert_counts[2].sum() > 0


def test_drafting_reads_the_active_experts_of_its_layer_alone(sparse):
    """Of five experts one token reads two, and three tokens 3.92."""
    draft = MtpDraft(sparse)
    draft.begin(Engine(sparse, 3, 40))
    layers = [sparse.mtp.proj, sparse.mtp.block, sparse.output]
    total = sum(tensor.nbytes for layer in layers for tensor in layer.state_dict().values())
    expert = 3 * HYBRID.dim * EXPERTS.hidden_dim * 4
    for rows, chosen in ((1, 2), (3, 5 * (1 - 0.6**3))):
        weights, _ = draft.bytes_read(4, [9] * rows)
        assert weights == pytest.approx(4 * (total - (5 - chosen) * expert))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_schedules_of_a_hybrid_model_with_experts(sparse, seed):
    fuzz_states(sparse, seed)


def test_a_row_without_room_for_all_drafts(model):
    engine = Engine(model, 2, 30, None, Speculation([MtpDraft(model)], 6, automatic=False))
    plain = Engine(copy.deepcopy(model), 2, 30)
    found = []
    for one in (engine, plain):
        requests = [Request(prompt, SamplingParams(temperature=0.0), 99) for prompt in random_prompts((25, 29), seed=2)]
        generate(one, requests)
        found.append([request.new_tokens for request in requests])
    assert found[0] == found[1] and [len(tokens) for tokens in found[0]] == [6, 2]


def test_only_the_first_tokens_are_proposed(member, model, monkeypatch):
    """With the first 48 of 131 tokens, the draft is the likeliest of these."""
    monkeypatch.setattr("drafts.mtp.HEAD_ROWS", 48)
    oracle, _ = member
    [tokens] = random_prompts((41,), seed=7)
    expected = oracle.target.lm_head(oracle.draft(tokens, 1)[1])[0, :48].argmax()
    assert drafted(model, tokens, 1, [40]) == [int(expected)]


def test_a_row_with_a_temperature_has_the_noise_of_the_target(member, model):
    oracle, _ = member
    [tokens] = random_prompts((41,), seed=7)
    logits = oracle.target.lm_head(oracle.draft(tokens, 1)[1])[None].detach()
    settings = Sampling.make(2, 131)
    settings.temperature.fill_(1.0)
    for seed in range(9):
        settings.seed.fill_(seed)
        expected, _ = sample(logits, torch.tensor([1]), torch.tensor([41]), None, settings)
        assert drafted(model, tokens, 1, [40], settings) == expected[0].tolist()


def gguf_names(oracle):
    """The arrays of the layer by llama.cpp's names, whose norms hold the 1 that they add."""
    own = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm", "norm": "shared_head_norm"}
    names = NAMES | OTHER_NAMES["qwen3_5_text"]
    n_layer = oracle.target.config.num_hidden_layers
    arrays = {}
    for name, weight in oracle.state_dict().items():
        stem, _, kind = name.removesuffix("_proj").rpartition(".")
        if name.endswith("_proj"):  # the matrices of all experts
            stem = name
            kind = "weight"
        inner = stem.removeprefix("layers.0.")
        place = names[inner] if inner != stem else f"nextn.{own[stem]}"
        array = weight.numpy()
        if inner == "mlp.shared_expert_gate":
            array = array.squeeze(0)
        arrays[f"blk.{n_layer}.{place}.{kind}"] = array + 1 if stem.endswith("norm") or "norm_" in stem else array
    return arrays


def write_file(folder, oracle, byte_level, family="qwen35"):
    """A GGUF file with the layer."""
    n_layer = oracle.target.config.num_hidden_layers
    extra = {f"{family}.nextn_predict_layers": 1, f"{family}.block_count": n_layer + 1}
    fields = vocabulary_fields(byte_level)
    write_gguf(folder / "x.gguf", oracle.target, fields, extra=extra, tensors=gguf_names(oracle))
    return folder / "x.gguf"


@pytest.mark.parametrize("member", ["qwen35-grouped"], indirect=True)  # llama.cpp has no biases
def test_gguf_files(member, byte_level, tmp_path):
    """A file gives the directory's bits."""
    oracle, _ = member
    file = write_file(tmp_path, oracle, byte_level)
    state = load_model(open_gguf(file), dtype=torch.float32, draft=["mtp"]).state_dict()
    expected = load_model(open_hf(member[1]), dtype=torch.float32, draft=["mtp"]).state_dict()
    assert state.keys() == expected.keys()
    own = [name for name in state if name.startswith("mtp.")]
    assert len(own) == 12 and all(torch.equal(state[name], expected[name]) for name in own)


@pytest.mark.parametrize("member", ["qwen35-moe-5"], indirect=True)
def test_a_layer_with_experts(member, byte_level, tmp_path):
    """As one tensor for the matrices of all experts, as one tensor for each matrix, and in a GGUF file."""
    oracle, folder = member
    model = load_model(open_hf(folder), dtype=torch.float32, draft=["mtp"])
    [tokens] = random_prompts((41,), seed=5)
    for parts in ([40], [17, 23]):
        assert drafted(model, tokens, 6, parts) == oracle.draft(tokens, 6)[0]
    shutil.copytree(folder, tmp_path / "x")
    state = load_file(folder / "model.safetensors")
    experts = "mtp.layers.0.mlp.experts"
    for e, (both, down) in enumerate(zip(state.pop(f"{experts}.gate_up_proj"), state.pop(f"{experts}.down_proj"))):
        gate, up = both.chunk(2)
        matrices = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        state |= {f"{experts}.{e}.{name}.weight": matrix.contiguous() for name, matrix in matrices.items()}
    save_file(state, tmp_path / "x" / "model.safetensors")
    file = write_file(tmp_path, oracle, byte_level, "qwen35moe")
    expected = model.state_dict()
    for source in (open_hf(tmp_path / "x"), open_gguf(file)):
        found = load_model(source, dtype=torch.float32, draft=["mtp"]).state_dict()
        own = [name for name in found if name.startswith("mtp.")]
        assert found.keys() == expected.keys() and len(own) == 16
        assert all(torch.equal(found[name], expected[name]) for name in own)


DEFAULT = {"kernels": "auto", "drafts_by_default": True}
LEFT_OUT = {
    "mtp.norm.weight": "lacks tensor mtp.norm.weight",
    "mtp.embed_tokens.weight": "holds tensor mtp.embed_tokens.weight (3, 5)",
    "mtp.fc.weight": "mtp.fc.weight is (3, 5), but by its config it should be (52, 104)",
}


@pytest.mark.parametrize("member", ["qwen35-grouped"], indirect=True)
@pytest.mark.parametrize("name", LEFT_OUT)
def test_layers_of_other_kinds_are_left_out(member, tmp_path, capsys, name):
    shutil.copytree(member[1], tmp_path / "x")
    state = load_file(member[1] / "model.safetensors")
    if name == "mtp.norm.weight":
        del state[name]
    else:
        state[name] = torch.ones(3, 5)
    save_file(state, tmp_path / "x" / "model.safetensors")
    source = open_hf(tmp_path / "x")
    said = capsys.readouterr().err
    assert "of a layer that drafts tokens (mtp)" in said and LEFT_OUT[name] in said
    assert not source.config.mtp and load_model(source).mtp is None
    with pytest.raises(UserError, match="^draft mtp: .*x has no layer that drafts tokens, or one of another kind;"):
        load_engine(source, ModelOptions(draft=["mtp"]), 1, 30)


@pytest.mark.parametrize("member", ["qwen35-grouped"], indirect=True)
def test_a_model_with_the_layer_cannot_be_the_draft(member, byte_level, tmp_path, capsys):
    """The error comes first, and names the drafts that work."""
    oracle, _ = member
    path = write_file(tmp_path, oracle, byte_level)
    source = open_gguf(path)
    source.quantization = Quantization("int4", 32, "int8")
    said = f"{path}: a model with recurrent states cannot be the draft; draft prompt-lookup works with {path}, "
    said += "and draft mtp does if it has an MTP layer"
    for drafts in (["int4-self"], ["mtp", "int4-self"]):
        with pytest.raises(UserError, match=f"^{said}$"):
            load_engine(source, ModelOptions(draft=drafts), 1, 30)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("member", ["qwen35-grouped"], indirect=True)
def test_a_model_with_the_layer_runs_without_the_file_mtp(member, byte_level, tmp_path, monkeypatch, capsys):
    """Hugging Face directories, GGUF files and checkpoint directories; without the file, each is as if without the
    layer."""
    oracle, folder = member
    convert(open_hf(folder), tmp_path / "ours", torch.float32)
    mixed = Quantization("int8", 0, "int8", {"mtp.proj": "none"})
    quantize_checkpoint(tmp_path / "ours", tmp_path / "int8", mixed)
    path = write_file(tmp_path, oracle, byte_level)
    openers = [(open_hf, folder), (open_gguf, path), (open_directory, tmp_path / "ours")]
    openers.append((open_directory, tmp_path / "int8"))
    expected = [load_model(open_(place), dtype=torch.float32).state_dict() for open_, place in openers]
    capsys.readouterr()
    monkeypatch.setitem(sys.modules, "mixers.mtp", None)
    for (open_, place), state in zip(openers, expected):
        engine = load_engine(open_(place), ModelOptions(device="cpu", dtype="float32", **DEFAULT), 1, 40)
        assert engine.model.mtp is None
        own = engine.model.state_dict()
        assert own.keys() == state.keys() and all(torch.equal(own[name], state[name]) for name in own)
        assert capsys.readouterr().err.count("(mtp): mixers/mtp.py is missing") == (open_ != open_directory)
        with pytest.raises(ModuleNotFoundError, match="mtp"):
            load_engine(open_(place), ModelOptions(draft=["mtp"]), 1, 40)
        capsys.readouterr()


@pytest.mark.parametrize("options, names", [
    ({}, None), (DEFAULT, ["prompt-lookup", "mtp"]), (DEFAULT | {"kernels": "torch"}, None),
    ({"draft": ["mtp"]}, ["mtp"]), ({"draft": ["prompt-lookup"]}, ["prompt-lookup"]),
    ({"draft": ["mtp", "prompt-lookup"]}, ["prompt-lookup", "mtp"]),
])  # fmt: skip
@pytest.mark.parametrize("member", ["qwen35-grouped"], indirect=True)
def test_when_the_layer_is_loaded(member, options, names):
    engine = load_engine(open_hf(member[1]), ModelOptions(device="cpu", dtype="float32", **options), 2, 40)
    if options.get("drafts_by_default") and not engine.model.backend.thread_invariant:
        names = None
    drafts = engine.decoding.drafts if isinstance(engine.decoding, Speculation) else []
    assert [draft.name for draft in drafts] == (names or [])
    assert (engine.model.mtp is not None) == ("mtp" in (names or []))


@pytest.mark.parametrize("member", ["qwen35-grouped"], indirect=True)
@pytest.mark.parametrize("kernels", ["torch", "auto"])
def test_passes_and_drafts_compile(member, kernels):
    """Without a break of the graph, and with the same tokens."""
    found = []
    for compiled in (False, True):
        model = load_model(open_hf(member[1]), dtype=torch.float32, kernels=kernels, draft=["mtp"])
        model.setup_caches(3, 100)
        draft = MtpDraft(model)
        functions = [model.hidden, draw_tokens]
        if compiled:
            options = {"fullgraph": True, "backend": "aot_eager", "dynamic": False}
            functions = [torch.compile(function, **options) for function in functions]
        hidden, draw = functions
        tokens, input_pos = pad_rows(random_prompts((20, 11), seed=3), [0, 0])
        with torch.no_grad():
            hidden(tokens, input_pos, torch.tensor([2, 0]))
            hidden(torch.tensor([[5], [6], [0]]), torch.tensor([[20], [11], [-1]]), torch.tensor([2, 0, 0]))
            inputs = torch.tensor([[7, 8, 0], [21, 12, -1], [2, 0, 0]])
            found.append(draw(model, draft.head, inputs, None, 4)[:2].tolist())
    assert found[0] == found[1]
