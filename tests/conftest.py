"""Shared fixtures: tiny random checkpoints by transformers (the oracle), and the default model.

Sizes are odd and pairwise different where they can be, so that a transposed or swapped dimension fails.
"""

import copy
import json
import os
import signal

# The models are tiny. On a busy machine, several threads would take ten times as long as one.
os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch reads it at import

import sys
from contextlib import suppress
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may use the hub
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton decides at import whether it interprets kernels, and torch's compiler imports it too.
INTERPRET = mock.patch.dict(os.environ, {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
with INTERPRET, suppress(ImportError):
    import triton  # noqa: F401

import gguf
import hypothesis
import transformers
from texts import TEMPLATE, strings
from tokenizers import Tokenizer as TokenizersLibrary
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import load
from checkpoint import CHECKPOINTS, DEFAULT_NAME
from cli import locked
from convert_hf_checkpoint import convert
from cpu import build
from formats import Quantization
from kernels import without_kernels
from load import load_model, open_checkpoint
from quantize import quantize_checkpoint
from sources.opening import open_hf
from sources.wheels import default_gguf
from text.tokenizer import Tokenizer

load.fastest_device = lambda: "cpu"  # also where there is a GPU: a test that needs one names it

# Every run has the same examples; --hypothesis-profile default has new ones.
hypothesis.settings.load_profile("ci")

# The kernels that Skylake-X gets: AVX-512 without VNNI and BF16.
SKYLAKE_FLAGS = ("-march=skylake-avx512", *build.AVX512.flags[1:])
SKYLAKE = build.InstructionSet("avx512-skylake", build.AVX512.needs, SKYLAKE_FLAGS)

ROOT = Path(__file__).resolve().parent.parent
VOCABULARY = 131

BLOOM, PHI3, GRANITE = transformers.BloomConfig, transformers.Phi3Config, transformers.GraniteConfig
GEMMA3, OLMO2, OLMO3 = transformers.Gemma3TextConfig, transformers.Olmo2Config, transformers.Olmo3Config
GEMMA4, GEMMA4_UNIFIED = transformers.Gemma4TextConfig, transformers.Gemma4UnifiedTextConfig
MINISTRAL3, QWEN35, LFM2 = transformers.Ministral3Config, transformers.Qwen3_5TextConfig, transformers.Lfm2Config
MIXTRAL, QWEN3_MOE = transformers.MixtralConfig, transformers.Qwen3MoeConfig
QWEN35_MOE, LFM2_MOE, NANOCHAT = (
    transformers.Qwen3_5MoeTextConfig,
    transformers.Lfm2MoeConfig,
    transformers.NanoChatConfig,
)
SHORT_CONTEXT = {"original_max_position_embeddings": 95}  # of longrope


def read_tiny():
    """name: (config class, hidden, heads, K/V heads, hidden of the MLP, layers, tied, the rest).

    Every family at least twice; MHA, GQA and MQA; tied and untied; every RoPE scaling. The MLPs of
    lfm2-tied and lfm2-biased have widths of 64 and 58, and layers 1 and 5 of qwen3-moe-8 are sparse.
    """
    rows = json.loads((ROOT / "tests" / "data" / "tiny_models.json").read_text())
    return {name: (getattr(transformers, kind), *rest) for name, (kind, *rest) in rows.items()}


TINY = read_tiny()
YARN_SET = TINY["qwen2-yarn"][-1]["rope_parameters"]
SCALED_QUERIES = TINY["ministral3-gqa"][-1]["rope_parameters"]


def longrope(n):
    """The parameters of longrope with n short and n long factors."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0} | SHORT_CONTEXT
    return rope | {"short_factor": [1 + i / 9 for i in range(n)], "long_factor": [2 + i * i for i in range(n)]}


def by_kind(truncate=None, **full):
    """RoPE that is scaled only in the layers with full attention, where transformers ignores `truncate`."""
    return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}


def tiny_config(name: str):
    kind, D, H, K, F, layers, tied, rest = TINY[name]
    sizes = {"hidden_size": D, "num_attention_heads": H, "num_key_value_heads": K, "intermediate_size": F}
    rest = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": None} | rest
    if kind is BLOOM:
        sizes = {"hidden_size": D, "n_head": H, "n_layer": layers, "seq_length": 256}
        return BLOOM(vocab_size=VOCABULARY, tie_word_embeddings=tied, **sizes, **rest)
    rest = {"max_position_embeddings": 256} | rest
    return kind(vocab_size=VOCABULARY, num_hidden_layers=layers, tie_word_embeddings=tied, **sizes, **rest)


def save_tiny(name: str, directory: Path, **save):
    """Write a tiny model with transformers and return it."""
    return save_random(tiny_config(name), directory, sum(map(ord, name)), **save)


def save_random(config, directory: Path, seed: int, **save):
    """Write a model of transformers with random weights, norms and biases, and return it."""
    torch.manual_seed(seed)
    what = "ImageTextToText" if hasattr(config, "vision_config") else "CausalLM"
    auto = getattr(transformers, f"AutoModelFor{what}")
    model = auto.from_config(config, dtype=torch.float32).eval()
    model.set_experts_implementation("eager")  # the usual one needs sizes that are multiples of 4
    kind = config.model_type
    # With these scales, the text does not repeat itself.
    small, large = (0.1, 2.5) if kind == "bloom" else (0.3, 1.2)
    biases = [(key, bias) for key, bias in model.named_buffers() if key.endswith("expert_bias")]
    for scalar in (one for key, one in model.named_buffers() if key.endswith("layer_scalar")):
        scalar.uniform_(0.4, 1.6)
    with torch.no_grad():
        for key, weight in [*model.named_parameters(), *biases]:
            weight.normal_(0, small if weight.dim() == 1 else large * weight.shape[-1] ** -0.5)
            is_norm = ("norm" in key or "ln_f" in key) and not key.endswith("bias")
            # Norms of Gemma and Qwen3.5 add 1 themselves, but for that in a gated delta net.
            adds_one = kind.startswith(("gemma3", "qwen3_5")) and not key.endswith("linear_attn.norm.weight")
            if (is_norm and not adds_one) or key.endswith("scale"):  # Gemma 4's router has two scales
                weight += 1
            if key.endswith("dt_bias"):  # the state then remembers some tens of tokens
                weight -= 3
            if kind.startswith("olmo") and "embed_tokens" in key:  # OLMo's blocks add large numbers
                weight *= 8
    model.save_pretrained(directory, **save)
    return model


def pytest_addoption(parser):
    names = ("auto", "avx512", "avx512-skylake", "avx2", "avx2-vnni")
    parser.addoption("--kernels", choices=names, default="auto", help="the CPU kernels that this process tests")


def pytest_configure(config):
    # A shell starts its background jobs with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    name = config.getoption("--kernels", "auto")
    if name == "auto":
        return
    if name == "avx512-skylake":
        build.INSTRUCTION_SETS[:] = [SKYLAKE]
    if name == "avx2-vnni" and not build.AVX2_VNNI.needs <= build.processor_flags():
        # AVX-512 has the same instruction for 256 bits.
        needs = build.AVX2.needs | {"avx512_vnni", "avx512vl"}
        flags = (*build.AVX2.flags, "-mavx512vnni", "-mavx512vl")
        build.INSTRUCTION_SETS[:] = [build.InstructionSet(name, needs, flags)]
    assert build.load_kernels(name)


def pytest_collection_modifyitems(items):
    for item in items:
        if not (item.get_closest_marker("slow") or item.get_closest_marker("full")):
            item.add_marker(pytest.mark.quick)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """A function of a name of TINY: transformers' model in float32, its directory, our checkpoint converted from it."""
    made = {}

    def get(name):
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            oracle = save_tiny(name, folder / "hf")
            ours = convert(open_hf(folder / "hf"), folder / "ours", torch.float32)
            made[name] = (oracle, folder / "hf", ours)
        return made[name]

    return get


@pytest.fixture(scope="session")
def tiny_model(tiny):
    """A function of a name of TINY that returns our model in float32, with caches."""

    def get(name, rows=5, length=256):
        model = load_model(tiny(name)[2], dtype=torch.float32)
        model.setup_caches(rows, length)
        return model

    return get


@pytest.fixture(scope="session")
def default_checkpoint():
    """The default model in bfloat16, converted into checkpoints/ at first use."""
    out = CHECKPOINTS / DEFAULT_NAME
    CHECKPOINTS.mkdir(exist_ok=True)
    with locked(CHECKPOINTS / f".{DEFAULT_NAME}.lock", "converts the default model"):
        if not out.exists():
            convert(open_checkpoint(dequantize=True), out, torch.bfloat16)
    return out


@pytest.fixture(scope="session")
def default_tokenizer(default_checkpoint):
    return Tokenizer(default_checkpoint)


@pytest.fixture(scope="session")
def gguf_package():
    """The gguf package, which here reads the default file and names its tensors only once, for both take seconds."""
    read = gguf.GGUFReader
    read_once = cache(read)
    name_once = cache(gguf.get_tensor_name_map)

    def reader(path, *rest):
        return read_once(Path(path)) if Path(path) == default_gguf() else read(path, *rest)

    with mock.patch.multiple(gguf, GGUFReader=reader, get_tensor_name_map=name_once):
        yield gguf


@pytest.fixture(scope="session")
def gguf_oracle(gguf_package):
    """transformers' tokenizer of the default GGUF file."""
    path = default_gguf()
    return transformers.AutoTokenizer.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture(scope="session")
def default_oracle(gguf_oracle):
    """The same with the pre-tokenizer of the file ("smollm": digits first).

    transformers 5.23 does not know "smollm" and splits as GPT-2 does: other ids for whitespace before a digit.
    """
    oracle = copy.deepcopy(gguf_oracle)
    digits = pre_tokenizers.Digits(individual_digits=True)
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False)
    oracle.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_])
    return oracle


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory):
    """A small byte-level BPE that adds a BOS token, like that of Llama 3."""
    library = TokenizersLibrary(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    options = {"special_tokens": ["<|begin|>", "<|end|>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=700, **options)
    library.train_from_iterator(strings(n=100), trainer)
    library.post_processor = processors.TemplateProcessing("<|begin|> $A", special_tokens=[("<|begin|>", 0)])
    folder = tmp_path_factory.mktemp("byte-level")
    library.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def sentencepiece_folder(tmp_path_factory):
    """A small sentencepiece BPE with byte fallback, like that of Llama 2."""
    import sentencepiece

    folder = tmp_path_factory.mktemp("sentencepiece")
    lines = [text.replace("\n", " ") for text in strings(n=150) if text.strip()]
    (folder / "corpus.txt").write_text("\n".join(lines))
    files = {"input": str(folder / "corpus.txt"), "model_prefix": str(folder / "tokenizer")}
    sentencepiece.SentencePieceTrainer.train(
        **files, vocab_size=600, model_type="bpe", byte_fallback=True, character_coverage=0.98, minloglevel=2,
        normalization_rule_name="identity", remove_extra_whitespaces=False, split_digits=True,
    )  # fmt: skip
    return folder


only_torch = without_kernels  # for models loaded with kernels="torch"


@torch.no_grad()
def greedy(model, prompts, n, prefill=None, decode=None, length=320):
    """n greedy tokens after each prompt, in one batch.

    prefill and decode: compiled versions of the model. length: of the caches; None uses the present ones.
    """
    prefill = model if prefill is None else prefill  # a compiled model has no truth value
    decode = model if decode is None else decode
    device = model.device
    longest = max(map(len, prompts))
    if length is not None:
        model.setup_caches(len(prompts), length)
    padded = [prompt + [0] * (longest - len(prompt)) for prompt in prompts]
    tokens = torch.tensor(padded, device=device)
    lengths = torch.tensor([[len(prompt)] for prompt in prompts], device=device)
    at = torch.arange(longest, device=device)

    logits = prefill(tokens, torch.where(at < lengths, at, -1))
    found = []
    for i in range(n):
        found.append(logits.argmax(-1, keepdim=True))
        if i + 1 < n:
            logits = decode(found[-1], lengths + i)
    return torch.cat(found, 1).tolist()


def random_prompts(lengths, V=VOCABULARY, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, V, (n,), generator=generator).tolist() for n in lengths]


def hf_greedy(oracle, prompt, n):
    """n greedy tokens by transformers' generate."""
    oracle.generation_config.eos_token_id = None
    out = oracle.generate(torch.tensor([prompt]), max_new_tokens=n, do_sample=False, pad_token_id=0)
    return out[0, len(prompt) :].tolist()


def for_long_rows(oracle):
    """The oracle for rows longer than longrope's original context: the model with the long factors for every input."""
    config = copy.deepcopy(oracle.config)
    rope = getattr(config, "rope_parameters", {})
    if rope.get("rope_type") != "longrope":
        return oracle
    rope["short_factor"] = rope["long_factor"]
    long = type(oracle)(config).eval()
    long.load_state_dict(oracle.state_dict())
    return long


@pytest.fixture(scope="session")
def python():
    """The command line of this interpreter, for running the programs as a user does."""
    return [sys.executable]


def tiny_chat_llama(directory, byte_level, context, template, seed):
    """Save a random Llama, whose choices are clear-cut, with a chat template; return its model and tokenizer."""
    config = transformers.LlamaConfig(
        vocab_size=700, hidden_size=36, num_attention_heads=6, num_key_value_heads=3, intermediate_size=92,
        num_hidden_layers=2, max_position_embeddings=context, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(seed)
    oracle = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in oracle.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 1.2 * weight.shape[-1] ** -0.5)

    file = str(byte_level / "tokenizer.json")
    special = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    library = transformers.PreTrainedTokenizerFast(tokenizer_file=file, **special)
    library.chat_template = template
    oracle.save_pretrained(directory)
    library.save_pretrained(directory)
    return oracle, library


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory, byte_level):
    """The checkpoints of one tiny model with a tokenizer and a template, by format; None is float32."""
    from servers import CONTEXT

    folder = tmp_path_factory.mktemp("serve")
    tiny_chat_llama(folder / "hf", byte_level, CONTEXT, TEMPLATE, seed=1)
    made = {None: convert(open_hf(folder / "hf"), folder / "tiny", torch.float32)}
    quantize_checkpoint(made[None], folder / "tiny-int4", Quantization("int4", 32, "int8"))
    return made | {"int4": folder / "tiny-int4"}


@pytest.fixture(scope="session")
def server_with_key(checkpoints, tmp_path_factory):
    """A server in float32 whose clients need a key."""
    from servers import KEY, OPTIONS, running

    log = tmp_path_factory.mktemp("log") / "server.txt"
    with running(log, "--checkpoint_path", checkpoints[None], "--api_key", KEY, *OPTIONS) as server:
        yield server


@pytest.fixture(scope="session")
def oracle(checkpoints):
    """The engine alone, with the checkpoint of the servers."""
    from servers import Oracle

    return Oracle(checkpoints[None])
