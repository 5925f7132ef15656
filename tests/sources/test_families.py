"""Model families: random members against transformers, GGUF files, and all that an engine does with a model.

tests/test_model.py has the named tiny models of all families; here are sizes and fields drawn at random, prompts of
different lengths that run beside each other, in rows that are longer than the original context of longrope.
"""

import copy
import json
import random
import shutil

import conftest
import gguf
import numpy as np
import pytest
import torch
import transformers
from cases import STRANGE_VALUES
from conftest import VOCABULARY, by_kind, for_long_rows, hf_greedy, longrope, random_prompts, save_random, tiny_config
from gguf_writer import bpe_fields, write_gguf
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as TokenizersLibrary

from cli import UserError
from compile import compiled_steps
from convert_hf_checkpoint import convert
from drafts.draft_model import ModelDraft, SelfDraft
from drafts.retrieval import RetrievalDraft
from engine import Engine, EngineOptions, Request, generate
from formats import Quantization, quantize_model
from load import install_kernels, load_model
from positions import Positions
from quantize import quantize_checkpoint
from sampling import SamplingParams
from sources.gguf_file import USED_FIELDS, GgufFile
from sources.opening import open_gguf, open_hf
from speculative import Speculation

pytestmark = pytest.mark.slow

LOGITS = 1e-4  # float32 sums in another order, for logits of order 1
LENGTHS, NEW = (1, 5, 11, 26, 40, 67, 81, 120), 40  # of prompts; new tokens
GREEDY = SamplingParams(temperature=0.0)


def random_member(family: str, seed: int, wide: bool = False):
    """A config of transformers with random sizes and fields. wide: the sizes are multiples of 32."""
    rng = random.Random(f"{family} {seed}")
    K, group, E = (1, 3, 32) if wide else (rng.choice([1, 2, 3]), rng.choice([1, 2, 3]), 2 * rng.randint(4, 13))
    D = K * group * E if wide or not family.startswith(("gemma", "ministral3")) else 2 * rng.randint(11, 37)
    if family == "gemma3":
        D -= D % (K * group)  # which transformers requires
    layers, window = rng.randint(2, 5), rng.randint(2, 50)
    sizes = {"vocab_size": VOCABULARY, "hidden_size": D, "num_attention_heads": K * group, "num_key_value_heads": K}
    sizes |= {"intermediate_size": 64 if wide else 2 * rng.randint(17, 51), "num_hidden_layers": layers}
    sizes |= {"tie_word_embeddings": rng.random() < 0.5, "max_position_embeddings": 256}
    sizes |= {"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None}
    kinds = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(layers)]
    biased = {"attention_bias": rng.random() < 0.3}
    if family == "gemma3":
        scaled = rng.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 8.0}])
        rope = by_kind(rope_theta=rng.choice([1e6, 2e4]), **scaled)
        scalar = E if seed % 2 else rng.randint(5, 40)  # E in most models; a GGUF file means E
        more = {"head_dim": E, "query_pre_attn_scalar": scalar, "layer_types": kinds}
        return conftest.GEMMA3(**sizes, **biased, **more, sliding_window=window, rope_parameters=rope)
    if family == "gemma4_small":
        return gemma4_small(rng, seed, sizes, E, wide)
    if family.startswith("gemma4"):
        return gemma4(rng, family, seed, sizes | biased, E, kinds, wide)
    if family == "phi3":
        part = rng.choice([1.0, 0.5, 0.75])
        plain = {"rope_type": "default", "rope_theta": 1e4}
        rope = rng.choice([plain, longrope(int(E * part) // 2)]) | {"partial_rotary_factor": part}
        if int(E * part) % 2:
            rope = plain
        more = conftest.SHORT_CONTEXT | {"sliding_window": rng.choice([None, window])}
        return conftest.PHI3(**sizes, **more, rope_parameters=rope)
    if family == "granite":
        scales = ("embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling")
        more = {name: round(rng.uniform(0.2, 3.0), 2) for name in scales} | {"mlp_bias": rng.random() < 0.3}
        return conftest.GRANITE(**sizes, **biased, **more)
    if family == "olmo2":
        return conftest.OLMO2(**sizes, **biased)
    if family == "ministral3":  # with positions up to twenty times the original context
        more = {"llama_4_scaling_beta": rng.uniform(0.1, 1.0), "original_max_position_embeddings": rng.randint(9, 70)}
        rope = conftest.SCALED_QUERIES | more | {"mscale_all_dim": rng.choice([0.6, 1.0])}
        return conftest.MINISTRAL3(**sizes, head_dim=E, rope_parameters=rope)
    if family in EXPERTS:
        sizes |= experts(rng, family, layers, wide)
    if family == "mixtral":
        return conftest.MIXTRAL(**sizes, head_dim=E, sliding_window=rng.choice([None, window]))
    if family == "qwen3_moe":
        sliding = {"use_sliding_window": rng.random() < 0.3, "sliding_window": window}
        return conftest.QWEN3_MOE(**sizes, **biased, **sliding, head_dim=E)
    if family.startswith("qwen35"):
        E = 32 if wide else rng.choice([16, 24])
        rope = rng.choice([conftest.YARN_SET, {"rope_type": "default", "rope_theta": 2e4}])
        sizes["head_dim"] = E
        kind = conftest.QWEN35_MOE if family == "qwen35_moe" else conftest.QWEN35
        return kind(**sizes, **delta_net(rng, layers, wide), rope_parameters=rope | {"partial_rotary_factor": 0.25})
    if family == "lfm2":
        kinds = [rng.choice(["full_attention", "conv"]) for _ in range(layers - 2)] + ["full_attention", "conv"]
        more = rng.choice([{"block_auto_adjust_ff_dim": False}, {"block_multiple_of": 32 if wide else 7}])
        more |= {"block_ffn_dim_multiplier": rng.choice([1.0, 1.3]), "conv_L_cache": rng.randint(2, 6)}
        # A GGUF file cannot say that yarn does not truncate.
        rope = rng.choice([conftest.YARN_SET | {"truncate": True}, {"rope_type": "default", "rope_theta": 1e6}])
        return conftest.LFM2(**sizes, **more, layer_types=rng.sample(kinds, layers), rope_parameters=rope)
    if family == "lfm2_moe":
        kinds = rng.sample(["conv", "full_attention"] + rng.choices(["conv", "full_attention"], k=layers - 2), layers)
        more = {"use_expert_bias": rng.random() < 0.8, "routed_scaling_factor": rng.choice([1.0, 2.5])}
        more |= {"num_dense_layers": rng.randint(0, layers - 1), "conv_L_cache": rng.randint(2, 6)}
        return conftest.LFM2_MOE(**sizes, **more, layer_types=kinds)
    if family == "nanochat":
        sizes |= {"final_logit_softcapping": rng.choice([15.0, 4.0, None]), "rms_norm_eps": rng.choice([1e-2, 1e-6])}
        return conftest.NANOCHAT(**sizes, **biased)
    if family.startswith("qwen3_vl"):
        return qwen3_vl(rng, family, sizes | biased, E)
    if family != "olmo3":
        raise ValueError(f"no random members of the family {family}")
    rope = by_kind(**rng.choice([conftest.YARN_SET, {"rope_type": "default", "rope_theta": 5e5}]))
    return conftest.OLMO3(**sizes, **biased, layer_types=kinds, sliding_window=window, rope_parameters=rope)


def gemma4(rng: random.Random, family: str, seed: int, sizes: dict, E: int, kinds: list, wide: bool):
    """A config of either type, with one window for all, shorter than most prompts. A GGUF file has no biases."""
    H = sizes["num_attention_heads"]
    full = {"rope_type": "proportional", "rope_theta": rng.choice([1e6, 2e4])}
    full |= {"partial_rotary_factor": rng.choice([0.25, 0.5, 0.3])}
    rope = {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": 3e4}}
    sizes |= {"head_dim": E, "global_head_dim": 64 if wide else E + 2 * rng.choice([-1, 1, 4]), "layer_types": kinds}
    sizes |= {"attention_k_eq_v": seed % 4 < 2, "final_logit_softcapping": rng.choice([None, 3.0])}
    sizes |= {"num_global_key_value_heads": rng.choice([n for n in range(1, H + 1) if H % n == 0] + [None])}
    sizes |= {"sliding_window": rng.randint(2, 50), "rope_parameters": rope, "attention_bias": seed == 5}
    if family == "gemma4_moe":
        sizes |= experts(rng, family, len(kinds), wide) | {"enable_moe_block": True}
        sizes["top_k_experts"] = sizes.pop("num_experts_per_tok")
    elif seed % 2:
        return conftest.GEMMA4_UNIFIED(**sizes)
    return conftest.GEMMA4(**{"hidden_size_per_layer_input": 0} | sizes)


def gemma4_small(rng: random.Random, seed: int, sizes: dict, E: int, wide: bool):
    """Like E2B and E4B, with the last layers of their own in any order. One in five has only inputs by layer, and one
    in five only shared keys and values, which is possible in the other type only."""
    both = ["full_attention", "sliding_attention"]
    shared = 0 if seed % 5 == 3 else rng.randint(1, 4)
    kinds = rng.choices(both, k=rng.randint(0, 2)) + rng.sample(both, 2) + rng.choices(both, k=shared)
    sizes |= {"num_hidden_layers": len(kinds), "num_kv_shared_layers": shared, "use_double_wide_mlp": seed % 2 == 0}
    if seed % 5 == 1:
        return gemma4(rng, "gemma4", 2 * seed + 1, sizes, E, kinds, wide)
    sizes |= {"hidden_size_per_layer_input": 32 if wide else 2 * rng.randint(3, 17)}
    sizes |= {"vocab_size_per_layer_input": VOCABULARY}
    return gemma4(rng, "gemma4", 2 * seed, sizes, E, kinds, wide)


def delta_net(rng: random.Random, layers: int, wide: bool) -> dict:
    """The fields of Qwen3.5 about gated delta nets. Without a layer with attention transformers does not generate."""
    n, dk, dv = (2, 32, 32) if wide else (rng.randint(1, 4), rng.randint(5, 20), rng.randint(5, 24))
    fields = {"linear_num_key_heads": n, "linear_num_value_heads": n * rng.randint(1, 3)}
    fields |= {"linear_key_head_dim": dk, "linear_value_head_dim": dv, "linear_conv_kernel_dim": rng.randint(2, 5)}
    if rng.random() < 0.5:
        return fields | {"full_attention_interval": rng.randint(2, min(4, layers))}
    both = ["linear_attention", "full_attention"]
    kinds = both + rng.choices(both, k=layers - 2)
    return fields | {"layer_types": rng.sample(kinds, layers)}


def experts(rng: random.Random, family: str, layers: int, wide: bool) -> dict:
    """The fields about experts. A GGUF file of Qwen3-MoE has no dense layers, and normalizes."""
    n_expert, n_active = rng.choice([(3, 1), (5, 4), (8, 3), (33, 8)])
    fields = {"num_experts": n_expert, "num_experts_per_tok": n_active}
    if family == "mixtral":
        return fields
    fields["moe_intermediate_size"] = 32 if wide else 2 * rng.randint(4, 16)
    if family == "gemma4_moe":
        return fields
    if family == "qwen35_moe":
        return fields | {"shared_expert_intermediate_size": 96 if wide else 2 * rng.randint(4, 16)}
    for_gguf = wide or rng.random() < 0.5
    dense = [] if for_gguf else rng.sample(range(layers), rng.randint(0, layers - 1))
    step = 1 if for_gguf else rng.choice([1, 2])
    fields["norm_topk_prob"] = for_gguf
    return fields if family == "lfm2_moe" else fields | {"mlp_only_layers": dense, "decoder_sparse_step": step}


def qwen3_vl(rng: random.Random, family: str, sizes: dict, E: int):
    """A config with a tiny vision tower. tie_word_embeddings of the text does not count."""
    tied = sizes.pop("tie_word_embeddings")
    rope = {"rope_type": "default", "rope_theta": 2e4, "mrope_section": [E // 2 - 2, 1, 1], "mrope_interleaved": True}
    text = sizes | {"head_dim": E, "rope_parameters": rope}
    kind = transformers.Qwen3VLConfig
    if family == "qwen3_vl_moe":
        kind = transformers.Qwen3VLMoeConfig
        text["mlp_only_layers"] = text.pop("mlp_only_layers") if text.pop("norm_topk_prob") else []
        text["tie_word_embeddings"] = not tied
    vision = {"depth": 2, "hidden_size": 8, "intermediate_size": 12, "num_heads": 2, "patch_size": 4}
    vision |= {"out_hidden_size": sizes["hidden_size"], "deepstack_visual_indexes": [0]}
    ids = {"image_token_id": 5, "video_token_id": 6, "vision_start_token_id": 7, "vision_end_token_id": 8}
    return kind(text_config=text, vision_config=vision, tie_word_embeddings=tied, **ids)


EXPERTS = ("mixtral", "qwen3_moe", "qwen35_moe", "qwen3_vl_moe", "lfm2_moe")
FAMILIES = (
    "gemma3",
    "phi3",
    "granite",
    "olmo2",
    "olmo3",
    "ministral3",
    "qwen35",
    "lfm2",
    "qwen3_vl",
    "nanochat",
    *EXPERTS,
    "gemma4",
    "gemma4_small",
    "gemma4_moe",
)


@pytest.fixture(scope="module")
def member(tmp_path_factory):
    """(family, seed) -> transformers' model for long rows, its directory, its greedy tokens for prompts of LENGTHS."""
    made, prompts = {}, random_prompts(LENGTHS, seed=3)

    def get(*which):
        if which not in made:
            folder = tmp_path_factory.mktemp("member")
            oracle = for_long_rows(save_random(random_member(*which), folder, seed=which[1]))
            made[which] = oracle, folder, [hf_greedy(oracle, prompt, NEW) for prompt in prompts]
        return made[which]

    return get


def tokens(engine: Engine, prompts=None) -> list[list[int]]:
    """The new tokens of all prompts of LENGTHS, as many at a time as the engine has rows."""
    requests = [Request(prompt, GREEDY, NEW) for prompt in prompts or random_prompts(LENGTHS, seed=3)]
    generate(engine, requests)
    return [request.new_tokens for request in requests]


SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 10))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_random_member_equals_transformers(member, family, seed):
    oracle, folder, expected = member(family, seed)
    model = load_model(open_hf(folder), dtype=torch.float32)
    assert tokens(Engine(model, 3, 200, options=EngineOptions(chunk_tokens=19))) == expected
    sequence = torch.tensor([random_prompts((130,), seed=5)[0]])
    model.setup_caches(1, 140)
    with torch.no_grad():
        theirs, exact = oracle(sequence).logits, copy.deepcopy(oracle).double()(sequence).logits
        difference = theirs - model(sequence, torch.arange(130)[None], all_logits=True)
    rounding = (theirs - exact).abs().max()  # transformers' own error, which we may have too
    assert difference.abs().max() < max(LOGITS, 4 * rounding)
    assert len({tuple(ids) for ids in expected}) >= len(LENGTHS) - 1, "the oracle should not repeat one text"


def engine_of(how: str, source) -> Engine:
    model = load_model(source, dtype=torch.float32, kernels="torch" if how == "plain torch" else "auto")
    if how == "compiled":
        return Engine(model, 2, 200, compiled_steps(True, False))
    if how in ("lookup", "self draft"):
        four = quantize_model(load_model(source, dtype=torch.float32, kernels="torch"), Quantization("int4", 0, "int8"))
        draft = RetrievalDraft() if how == "lookup" else SelfDraft(install_kernels(four))
        return Engine(model, 3, 200, None, Speculation([draft], 4, automatic=False), EngineOptions(chunk_tokens=23))
    options = EngineOptions(chunk_tokens=9, always_chunk=True)
    return Engine(model, 1 if how == "alone" else 4, 200, options=options)


HOW = ("alone", "beside others", "plain torch", "lookup", "self draft")
PAIRS = [(family, how) for i, family in enumerate(FAMILIES) for how in (HOW[i % 5], HOW[(i + 2) % 5])]
PAIRS += [("gemma3", "lookup"), ("phi3", "self draft"), ("phi3", "lookup"), ("phi3", "beside others")]
PAIRS += [("gemma4", "lookup"), ("gemma4", "self draft"), ("gemma4", "beside others")]
PAIRS += [("gemma4_small", "lookup"), ("gemma4_small", "self draft"), ("gemma4_small", "beside others")]
PAIRS += [("gemma4_moe", "lookup"), ("gemma4_moe", "self draft"), ("gemma4_moe", "beside others")]
PAIRS += [("ministral3", "lookup"), ("ministral3", "self draft"), ("lfm2", "lookup"), ("lfm2", "beside others")]
# Recurrent states cannot be taken back by several passes.
PAIRS = [(family, how) for family, how in PAIRS if not (how == "self draft" and family.startswith(("lfm2", "qwen35")))]
PAIRS += [pytest.param(family, "compiled", marks=pytest.mark.full) for family in FAMILIES]


@pytest.mark.parametrize("family, how", PAIRS)
def test_a_family_in_combination(member, family, how):
    """Phi-3's member has longrope, and rows that are longer than the original context."""
    _, folder, expected = member(family, 7 if family == "phi3" else 0)
    engine = engine_of(how, open_hf(folder))
    assert tokens(engine) == expected
    longer = [prompt + ids[:20] for prompt, ids in zip(random_prompts(LENGTHS, seed=3), expected)]
    found = [ids[: NEW - 20] for ids in tokens(engine, longer)]
    assert found == [ids[20:] for ids in expected], "with cached prefixes"


FORMATS = {"gemma3": "int8", "phi3": "int4", "granite": "int4", "olmo2": "int4", "olmo3": "int8", "ministral3": "int4"}
FORMATS |= dict.fromkeys(("gemma4", "gemma4_moe", "qwen3_vl", "nanochat", "qwen3_vl_moe", "lfm2_moe"), "int4")
FORMATS |= {
    "gemma4_small": "int8",
    "qwen35": "int4",
    "lfm2": "int4",
    "mixtral": "int8",
    "qwen3_moe": "int4",
    "qwen35_moe": "int4",
}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quantized_family(member, tmp_path, family):
    format = FORMATS[family]
    folder = member(family, 7 if family == "phi3" else 0)[1]
    exact = convert(open_hf(folder), tmp_path / "exact", torch.float32)
    quantize_checkpoint(exact, tmp_path / "q", Quantization(format, 0, format))
    fused = tokens(Engine(load_model(tmp_path / "q", dtype=torch.float32), 3, 200))
    assert tokens(Engine(load_model(tmp_path / "q", dtype=torch.float32, kernels="torch"), 3, 200)) == fused
    convert(open_hf(folder), tmp_path / "ours", torch.bfloat16)
    direct, ours = (tokens(Engine(load_model(path), 3, 200)) for path in (open_hf(folder), tmp_path / "ours"))
    assert direct == ours


GGUF_FAMILIES = [family for family in FAMILIES if family != "nanochat"]  # llama.cpp does not know it


def vocabulary_fields(byte_level) -> dict:
    fields = bpe_fields(TokenizersLibrary.from_file(str(byte_level / "tokenizer.json")), "llama-bpe")
    fields["tokenizer.ggml.merges"] = []
    return fields | {n: fields[n][:VOCABULARY] for n in fields if n.endswith((".tokens", ".token_type"))}


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_gguf_file_equals_transformers(member, byte_level, tmp_path, family):
    oracle, _, expected = member(family, 7 if family in ("phi3", "gemma3") else 0)
    write_gguf(tmp_path / "x.gguf", oracle, vocabulary_fields(byte_level))
    assert tokens(Engine(load_model(open_gguf(tmp_path / "x.gguf"), dtype=torch.float32), 3, 200)) == expected


def test_keys_and_values_that_no_layer_reads_are_left_out(member, byte_level, tmp_path):
    """Published files of Gemma 4 have them in layers that share the keys and values of others."""
    oracle, folder, expected = member("gemma4_small", 0)
    shutil.copytree(folder, tmp_path / "x")
    state = load_file(folder / "model.safetensors")
    layer = oracle.config.num_hidden_layers - 1
    theirs = {name: f"model.layers.{layer}.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")}
    save_file(state | {name: torch.ones(3, 5) for name in theirs.values()}, tmp_path / "x" / "model.safetensors")
    unread = {
        f"blk.{layer}.{name}.weight": np.ones(5, dtype=np.float32) for name in ("attn_k", "attn_v", "attn_k_norm")
    }
    write_gguf(tmp_path / "x.gguf", oracle, vocabulary_fields(byte_level), tensors=unread)
    for source in (open_hf(tmp_path / "x"), open_gguf(tmp_path / "x.gguf")):
        assert tokens(Engine(load_model(source, dtype=torch.float32), 3, 200)) == expected
    name = theirs["k_proj"].replace(f".{layer}.", ".0.")
    save_file(state | {name: torch.ones(3, 5)}, tmp_path / "x" / "model.safetensors")
    with pytest.raises(UserError, match=r"0.self_attn.k_proj.weight is \(3, 5\)"):
        load_model(open_hf(tmp_path / "x"))


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_a_quantized_gguf_file(byte_level, tmp_path, family):
    """Matrices that stay quantized, whose rows are changed while they are read, are those of the dequantized file."""
    oracle = save_random(random_member(family, 4, wide=True), tmp_path / "hf", seed=2)
    write_gguf(tmp_path / "q.gguf", oracle, vocabulary_fields(byte_level), lambda name: gguf.GGMLQuantizationType.Q8_0)
    models = [load_model(open_gguf(tmp_path / "q.gguf", dequantize=d), dtype=torch.float32) for d in (False, True)]
    kept, dense = (tokens(Engine(model, 3, 200)) for model in models)
    assert kept == dense
    convert(open_gguf(tmp_path / "q.gguf"), tmp_path / "ours", torch.float32)
    assert tokens(Engine(load_model(tmp_path / "ours", dtype=torch.float32), 3, 200)) == kept


@pytest.mark.parametrize("family", GGUF_FAMILIES)
def test_strange_values_in_a_gguf_file_end_in_one_line(member, byte_level, tmp_path, family):
    """Any value in the place of any field: the file's Config has tables of positions, or it is refused."""
    write_gguf(tmp_path / "x.gguf", member(family, 7 if family == "phi3" else 0)[0], vocabulary_fields(byte_level))
    chance = random.Random(family)
    layers = GgufFile(tmp_path / "x.gguf").config().n_layer
    values = [*STRANGE_VALUES, [3] * layers, ["x"] * layers, [True] * layers, [2**40] * layers]
    for name in USED_FIELDS.split():
        for value in chance.sample(values, 5):
            opened = GgufFile(tmp_path / "x.gguf")
            opened.metadata[f"{opened.architecture}.{name}"] = value
            try:
                Positions(config := opened.config(), 16, range(config.n_head), torch.device("cpu"))
            except UserError as error:
                assert len(str(error)) < 500 and "\n" not in str(error)


MULTIMODAL = {
    "mistral": (transformers.Mistral3Config, {"model_type": "pixtral", "head_dim": 8}),
    "ministral3": (transformers.Mistral3Config, {"model_type": "pixtral", "head_dim": 8}),
    "gemma3_text": (transformers.Gemma3Config, {"model_type": "siglip_vision_model"}),
    "gemma4_text": (
        transformers.Gemma4Config,
        {"model_type": "gemma4_vision", "num_key_value_heads": 2, "head_dim": 8},
    ),
    "gemma4_unified_text": (
        transformers.Gemma4UnifiedConfig,
        {"model_type": "gemma4_unified_vision", "mm_embed_dim": 50, "mm_posemb_size": 6},
    ),
    "qwen3_5_text": (transformers.Qwen3_5Config, {"model_type": "qwen3_5"}),
    "qwen3_5_moe_text": (transformers.Qwen3_5MoeConfig, {"model_type": "qwen3_5_moe_vision"}),
    "lfm2": (transformers.Lfm2VlConfig, {"model_type": "siglip2_vision_model", "num_patches": 4}),
}


def save_multimodal(name, directory):
    """Write a tiny model with images, whose language model is that of TINY, with transformers. Returns it."""
    text = tiny_config(name)
    kind, vision = MULTIMODAL[text.model_type]
    vision = vision | {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision |= {"image_size": 28, "patch_size": 14}
    ours = {
        "text_config": text.to_dict() | {"pad_token_id": 0},
        "vision_config": vision,
        "tie_word_embeddings": text.tie_word_embeddings,
    }
    return save_random(kind(**ours), directory, seed=5)


MULTIMODAL_NAMES = ["mistral-gqa", "ministral3-window", "gemma3-untied", "qwen35-grouped", "lfm2-tied", "lfm2-biased"]
MULTIMODAL_NAMES += ["qwen35-moe-5", "gemma4-tied", "gemma4-unified"]


@pytest.mark.parametrize("name", MULTIMODAL_NAMES)
def test_the_language_model_of_a_multimodal_directory(tmp_path, name):
    oracle = save_multimodal(name, tmp_path)
    [prompt] = random_prompts((41,), seed=4)
    model = load_model(open_hf(tmp_path), dtype=torch.float32)
    assert tokens(Engine(model, 1, 120), [prompt]) == [hf_greedy(oracle, prompt, NEW)]


def test_lfm2_with_images_and_the_names_of_other_files(tmp_path, capsys):
    """transformers does not look for tie_embedding in text_config."""
    oracle = save_multimodal("lfm2-tied", tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    renamed = {name.replace("model.language_model.", "language_model.model."): one for name, one in state.items()}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["text_config"]["tie_embedding"] = False
    for name in ("tie_word_embeddings", "tie_embedding"):
        fields.pop("tie_word_embeddings")
        fields[name] = True
        (tmp_path / "config.json").write_text(json.dumps(fields))
        assert transformers.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
        model = load_model(open_hf(tmp_path), dtype=torch.float32)
        assert "left out: tensors of other modalities" in capsys.readouterr().err
        assert model.config.tied_embeddings
    (tmp_path / "config.json").write_text(json.dumps(fields | {"tie_embedding": False}))
    assert not transformers.AutoConfig.from_pretrained(tmp_path).tie_word_embeddings
    assert not open_hf(tmp_path).config.tied_embeddings
    [prompt] = random_prompts((41,), seed=4)
    assert tokens(Engine(model, 1, 120), [prompt]) == [hf_greedy(oracle, prompt, NEW)]


@pytest.mark.parametrize("kind", ["directory", "file"])
def test_the_layer_of_qwen35_that_drafts_is_left_out(member, byte_level, tmp_path, capsys, kind):
    oracle, folder, expected = member("qwen35", 0)
    n_layer = oracle.config.num_hidden_layers
    if kind == "directory":
        shutil.copytree(folder, tmp_path / "x")
        state = load_file(folder / "model.safetensors")
        save_file(state | {"mtp.fc.weight": torch.ones(3, 5)}, tmp_path / "x" / "model.safetensors")
        source = open_hf(tmp_path / "x")
    else:
        extra = {"qwen35.nextn_predict_layers": 1, "qwen35.block_count": n_layer + 1}
        drafts = {f"blk.{n_layer}.nextn.eh_proj.weight": np.ones((3, 5), dtype=np.float32)}
        write_gguf(tmp_path / "x.gguf", oracle, vocabulary_fields(byte_level), extra=extra, tensors=drafts)
        source = open_gguf(tmp_path / "x.gguf")
    assert tokens(Engine(load_model(source, dtype=torch.float32), 3, 200)) == expected
    assert "left out: tensors of a layer that drafts tokens (mtp)" in capsys.readouterr().err


@pytest.mark.parametrize("number", [-1, 9])
def test_layers_beyond_a_file_s_number_of_layers_are_refused(member, byte_level, tmp_path, number):
    oracle, _, _ = member("granite", 0)
    n_layer = oracle.config.num_hidden_layers
    fields = vocabulary_fields(byte_level)
    write_gguf(tmp_path / "x.gguf", oracle, fields, extra={"granite.block_count": n_layer - 1})
    with pytest.raises(UserError, match="which the model does not have"):
        open_gguf(tmp_path / "x.gguf")
    write_gguf(tmp_path / "y.gguf", oracle, fields)
    opened = GgufFile(tmp_path / "y.gguf")
    opened.metadata["granite.nextn_predict_layers"] = number
    with pytest.raises(UserError, match="nextn_predict_layers = -?[0-9]* does not fit"):
        opened.config()


@pytest.mark.parametrize("head", ["lm_head.weight", "language_model.lm_head.weight"])
@pytest.mark.parametrize("name", ["mistral-gqa", "ministral3-gqa", "gemma3-tied"])
def test_a_head_of_its_own_of_a_multimodal_directory(tmp_path, name, head):
    """Although config.json calls it tied. The second name is that of older files, which transformers renames."""
    save_multimodal(name, tmp_path)
    state = load_file(tmp_path / "model.safetensors")
    [table] = [tensor for name, tensor in state.items() if name.endswith("embed_tokens.weight")]
    save_file(state | {head: table.flip(0)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    oracle = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = load_model(open_hf(tmp_path), dtype=torch.float32)
    assert torch.equal(model.output.weight, oracle.lm_head.weight) and not model.config.tied_embeddings
    assert torch.equal(model.output.weight.flip(0), model.embedding.weight)
    [prompt] = random_prompts((41,), seed=4)
    assert tokens(Engine(model, 1, 120), [prompt]) == [hf_greedy(oracle, prompt, NEW)]


@pytest.mark.parametrize("length", [95, 200])
def test_a_draft_model_has_longrope_s_factors_of_its_rows(member, length):
    """The model itself as its draft: all that it proposes is accepted, with short factors and with long ones."""
    folder = member("phi3", 7)[1]
    model, copy_of_it = (load_model(open_hf(folder), dtype=torch.float32) for _ in range(2))
    prompts = random_prompts(LENGTHS[:5], seed=3)
    speculation = Speculation([ModelDraft(copy_of_it)], 4, automatic=False)
    plain = tokens(Engine(model, 3, length), prompts)
    assert tokens(Engine(model, 3, length, decoding=speculation), prompts) == plain
    report = speculation.report
    assert sum(report.accepted) == sum(report.verified) > 100
