"""Tiny random models for same_tokens.py, written by transformers and gguf: the same ones on every call.

Read down: the tables of models and GGUF files; `make_sources`, which writes all of them.
"""

from pathlib import Path

import tokenizers
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from gguf_writer import bpe_fields, write_gguf

LLAMA, MISTRAL = transformers.LlamaConfig, transformers.MistralConfig
QWEN2, QWEN3, BLOOM = transformers.Qwen2Config, transformers.Qwen3Config, transformers.BloomConfig
PHI3 = transformers.Phi3Config
BIASED = {"head_dim": 14, "attention_bias": True, "mlp_bias": True}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 = {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 40, "rope_theta": 500000.0}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 48, "rope_theta": 10000.0}
CONTEXT = {"original_max_position_embeddings": 150}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1 + i / 9 for i in range(6)]}
LONGROPE = {"rope_parameters": LONGROPE | {"long_factor": [2 + i * i for i in range(6)]} | CONTEXT} | CONTEXT
SLIDING = {"use_sliding_window": True, "sliding_window": 11, "max_window_layers": 1}
POST_NORM = {"apply_residual_connection_post_layernorm": True}

# Sizes are odd and pairwise different where they can be. Names with "text" have a tokenizer and a chat template.
# name: (config class, hidden, heads, K/V heads, hidden of the MLP, layers, tied, the rest)
MODELS = {
    "llama": (LLAMA, 60, 6, 6, 84, 2, False, {}),
    "llama-biased": (LLAMA, 36, 6, 3, 92, 3, True, BIASED),
    "llama-llama3": (LLAMA, 48, 4, 2, 76, 3, True, LLAMA3),
    "llama-yarn": (LLAMA, 66, 3, 1, 58, 2, False, {"rope_parameters": YARN, "max_position_embeddings": 48}),
    "llama-wide": (LLAMA, 132, 6, 3, 148, 2, True, {"head_dim": 24}),
    "llama-ranks": (LLAMA, 54, 6, 3, 192, 2, True, {"head_dim": 32}),  # has whole groups of 32 on 2 and on 3 ranks
    "mistral": (MISTRAL, 44, 2, 1, 74, 3, False, {"sliding_window": 7}),
    "qwen2": (QWEN2, 42, 3, 1, 94, 4, False, SLIDING),
    "qwen3": (QWEN3, 52, 6, 2, 38, 3, False, {"head_dim": 18}),
    "bloom": (BLOOM, 60, 12, 12, 240, 4, True, {}),
    "bloom-post": (BLOOM, 55, 5, 5, 220, 3, True, POST_NORM),
    "text": (LLAMA, 42, 6, 3, 94, 2, True, {"head_dim": 10}),
    "text-small": (LLAMA, 32, 2, 1, 54, 1, True, {}),
    "text-longrope": (PHI3, 48, 4, 2, 86, 2, False, LONGROPE | {"pad_token_id": 0}),
    "gguf-text": (LLAMA, 64, 4, 2, 96, 2, False, {}),
    "gguf-text-qwen2": (QWEN2, 96, 6, 2, 160, 2, True, {}),
}
MIXED = {"attn_k": Q.Q8_0, "attn_output": Q.Q4_1, "ffn_down": Q.Q8_0, "output": None}  # and Q4_0 for all others

# Files for `convert_hf_checkpoint.py FILE --keep_quantized`: model, a function from a tensor's name to its type
GGUF = {
    "gguf-q4_0": ("gguf-text", lambda name: Q.Q4_0),
    "gguf-q8_0": ("gguf-text-qwen2", lambda name: Q.Q8_0),
    "gguf-mixed": ("gguf-text", lambda name: MIXED.get(name.split(".")[-2], Q.Q4_0)),
}


def make_sources(work: Path):
    """Write the Hugging Face directories hf-NAME, the GGUF files and the text files."""
    transformers.utils.logging.disable_progress_bar()
    library = text_tokenizer()
    template = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
    template += "{% if add_generation_prompt %}[a]{% endif %}"
    wrapped = transformers.PreTrainedTokenizerFast(
        tokenizer_object=library, bos_token="<|begin|>", eos_token="<|end|>", chat_template=template
    )
    for name in MODELS:
        make_model(name).save_pretrained(work / f"hf-{name}")
        if "text" in name:
            wrapped.save_pretrained(work / f"hf-{name}")
    for name, (model, quantize) in GGUF.items():
        write_gguf(work / f"{name}.gguf", make_model(model), bpe_fields(library, "gpt-2"), quantize)
    (work / "prompts.txt").write_text("one\nthe end of the\n\ntwo and three\n")
    (work / "notes.txt").write_text("".join(f"The {i} of the end, and {i * i % 37} in one. " for i in range(150)))


def text_tokenizer() -> tokenizers.Tokenizer:
    """A byte-level BPE that knows a few words, made without training."""
    vocabulary, merges = ["<|begin|>", "<|end|>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())], []
    for word in ("the", "one", "two", "three", "and", "in", "end", "\u0120the", "\u0120of", "\u0120and", "\u0120one"):
        for i in range(1, len(word)):
            if word[: i + 1] not in vocabulary:
                merges.append((word[:i], word[i]))
                vocabulary.append(word[: i + 1])
    ids = {token: i for i, token in enumerate(vocabulary)}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=ids, merges=merges))
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    library.add_special_tokens(["<|begin|>", "<|end|>"])
    return library


def make_model(name: str):
    """A model of transformers with random weights, large enough that its text does not repeat itself."""
    kind, D, H, K, F, layers, tied, rest = MODELS[name]
    sizes = {"hidden_size": D, "num_attention_heads": H, "num_key_value_heads": K, "intermediate_size": F}
    sizes |= {"num_hidden_layers": layers, "max_position_embeddings": 256}
    if kind is BLOOM:
        sizes = {"hidden_size": D, "n_head": H, "n_layer": layers, "seq_length": 256}
    V = text_tokenizer().get_vocab_size() if "text" in name else 131
    ends = {"bos_token_id": 0, "eos_token_id": 1 if "text" in name else None}
    torch.manual_seed(sum(map(ord, name)))
    config = kind(vocab_size=V, tie_word_embeddings=tied, **(sizes | ends | rest))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    small, large = (0.1, 2.5) if kind is BLOOM else (0.3, 1.2)
    with torch.no_grad():
        for key, weight in model.named_parameters():
            weight.normal_(0, small if weight.dim() == 1 else large * weight.shape[-1] ** -0.5)
            if ("norm" in key or "ln_f" in key) and not key.endswith("bias"):
                weight += 1
    return model
