"""Reads the tokenizer of a GGUF file from the metadata: vocabulary, special tokens, chat templates.

Read down: gguf_tokenizer_files, and the fields as llama.cpp reads them; special tokens, and those
that end a text; byte-level BPE; sentencepiece. gguf_file.py reads the rest of the file.
"""

import struct
from pathlib import Path

from cli import UserError, print_status, printable
from text.tokenizer import TokenizerFiles, tokenizer_errors

START = "tokenizer.ggml."  # the names of the fields begin with this
TOKEN_IDS = {f"{name}_token_id" for name in ("bos", "eos", "eot", "eom", "unknown")}
LAST_TOKEN = 3  # the pooling_type of models that make embeddings; 0 is none, 1 mean, 2 CLS, 4 a reranker's
# The types of tokens, numbered as in sentencepiece.
NORMAL = 1
UNKNOWN = 2
CONTROL = 3
USER_DEFINED = 4
BYTE = 6
SPECIAL = (CONTROL, UNKNOWN)  # tokens of these types are found in text, and are not shown


def gguf_tokenizer_files(path: Path, metadata: dict) -> TokenizerFiles:
    """The tokenizer and the chat templates of a GGUF file. UserError if its fields do not fit each other."""
    with tokenizer_errors(path):
        return make_tokenizer_files(path, metadata)


def make_tokenizer_files(path: Path, metadata: dict) -> TokenizerFiles:
    fields = read_fields(path, metadata)
    files = TokenizerFiles(path, {})
    kind = fields.get("model")
    if kind == "llama" and fields.get("pre") == "gemma4":  # as Ollama writes it
        kind = "gemma4"
    if kind == "gpt2":
        files.library, add_bos = byte_level_bpe(path, fields)
    elif kind == "gemma4":
        files.library = character_bpe(path, fields)
        add_bos = True
        fields["add_bos_token"] = True  # as in llama.cpp, whatever the file says
    elif kind == "llama":
        files.model = sentencepiece_model(fields)
        add_bos = True
    else:
        raise UserError(f"{path}: tokenizer kind {short(kind)} is not known; known: gpt2, llama, gemma4")

    tokens = fields["tokens"]
    bos = fields.get("bos_token_id")
    eos_ids = end_tokens(fields)
    files.settings = {
        "bos_token_id": bos,
        "eos_token_ids": eos_ids,
        "add_bos_token": bool(fields.get("add_bos_token", add_bos)) and bos is not None,
        "bos_token": None if bos is None else tokens[bos],
        "eos_token": tokens[eos_ids[0]] if eos_ids else None,
    }
    if kind == "llama":
        about = f"{metadata.get('general.architecture')} {metadata.get('general.name')}".lower()
        is_phi3 = "phi3" in about or "phi-3" in about  # as in llama.cpp
        files.settings |= {"added_tokens": added_tokens(fields, is_phi3), "legacy": True}

    if metadata.get(f"{metadata.get('general.architecture')}.pooling_type") == LAST_TOKEN:
        appends = bool(fields.get("add_eos_token")) and "eos_token_id" in fields
        files.settings["embedding"] = {"append_ids": [fields["eos_token_id"]] if appends else []}

    files.template = metadata.get("tokenizer.chat_template") or None
    files.tool_template = metadata.get("tokenizer.chat_template.tool_use") or None
    return files


def short(value) -> str:
    """A value of the file as a message shows it."""
    return printable(repr(value))


# ---------------------------------------------------------------- the fields


def read_fields(path: Path, metadata: dict) -> dict:
    """The fields of the tokenizer, by their names without START.

    As in llama.cpp, an empty token gets a name, and an id outside the vocabulary counts as absent.
    tokens and token_type are lists of the same length.
    """
    fields = {name.removeprefix(START): metadata[name] for name in metadata if name.startswith(START)}
    tokens = fields.get("tokens")
    if tokens is None:
        raise UserError(f"{path} lacks {START}tokens")
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        raise ValueError("tokens is not a list of strings")
    tokens = [token or f"[EMPTY_{i}]" for i, token in enumerate(tokens)]
    fields["tokens"] = tokens

    for name in sorted(TOKEN_IDS & fields.keys()):
        value = fields[name]
        if type(value) is not int or not 0 <= value < len(tokens):
            del fields[name]
            ignored = f"is not one of the ids of {len(tokens)} tokens and counts as absent"
            print_status(f"warning: {path}: {START}{name} = {short(value)} {ignored}")
    fields["token_type"] = token_types(fields)
    return fields


# ---------------------------------------------------------------- special tokens

# Tokens that end a text or a turn, in the families that are known here and their relatives.
END_TOKENS = """<|endoftext|> <|im_end|> <|eot_id|> <|eom_id|> <|end_of_text|> <end_of_turn> <|end|>
    <|return|> <|call|> <|calls|> <|flush|> </s> <eos> <EOT> _<EOT> [EOT] [EOS] <|eot|> <|end_of_role|>
    <end_of_utterance> <turn|> <|tool_response> <｜end▁of▁sentence｜> [e~[""".split()  # noqa: SIM905
# Tokens that mark the parts of a file, and the files of a repository, in prompts for infilling.
INFILL_TOKENS = """<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|>
    <|prefix|> <|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|>
    <|suffix|> <|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|>
    <|middle|> <|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD] <|fim_repo|> <|repo_name|> <fim-repo>
    <REPO> <reponame> <|file_sep|>""".split()  # noqa: SIM905
MARKS = {*END_TOKENS, *INFILL_TOKENS}


def end_tokens(fields: dict) -> list[int]:
    """The ids of the tokens that end a text: what the fields name, and what END_TOKENS lists.

    (A file names one token only, such as Qwen2.5's <|im_end|>, although <|endoftext|> ends a text,
    too.)
    """
    tokens = fields["tokens"]
    named = [i for i in named_ends(fields) if i is not None]
    known = [i for i, kind in enumerate(fields["token_type"]) if kind in SPECIAL and tokens[i] in END_TOKENS]
    return list(dict.fromkeys(named + known))


def named_ends(fields: dict) -> list[int | None]:
    """The ids of the tokens that the fields name as the ends of a text, a turn and a message."""
    return [fields.get(f"{name}_token_id") for name in ("eos", "eot", "eom")]


def token_types(fields: dict) -> list[int]:
    """The type of each token. The tokens in MARKS are control tokens, whatever the file says.

    (Many files say that they are user-defined or normal. llama.cpp goes by the text, too.)
    """
    tokens = fields["tokens"]
    types = list(fields.get("token_type") or [NORMAL] * len(tokens))
    if len(types) != len(tokens) or not all(type(kind) is int for kind in types):
        raise ValueError("token_type does not have a number for each token")
    for i, token in enumerate(tokens):
        # In Gemma's and Qwen's vocabularies, </s> is a tag of HTML.
        is_html = token == "</s>" and i not in named_ends(fields)
        if token in MARKS and types[i] != UNKNOWN and not is_html:
            types[i] = CONTROL
    return types


def added_tokens(fields: dict, is_phi3: bool) -> list[dict]:
    """The tokens to look for before sentencepiece encodes the rest of a text, as in tokenizer.json.

    Tokens with spaces are left to sentencepiece, which also finds them beside other spaces.
    is_phi3: most of these tokens take the white space after them. A GGUF file cannot say so. (The
    tokenizer of Phi-4 is of another kind.)
    """
    added = []
    for i, (token, kind) in enumerate(zip(fields["tokens"], fields["token_type"])):
        if kind in SPECIAL or (kind == USER_DEFINED and " " not in token):
            rstrip = is_phi3 and token not in ("<unk>", "<s>", "<|endoftext|>")
            entry = {"id": i, "content": token, "rstrip": rstrip, "normalized": False}
            added.append(entry | {"special": kind in SPECIAL})
    return added


# ---------------------------------------------------------------- byte-level BPE

_GPT2 = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PATH_REST = _REST.replace(r"[\r\n]*", r"[\r\n/]*")
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
_LLAMA3 = _CONTRACTION + _WORD + r"|\p{N}{1,3}" + _REST
_MARKED_WORD = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_MARKED_REST = _REST.replace(r"[^\s\p{L}\p{N}]", r"[^\s\p{L}\p{M}\p{N}]")
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?(?:{_UPPER}*{_LOWER}+|{_UPPER}+{_LOWER}*)"
# Pre-tokenization: the regexes that split a text, one after the other, before BPE merges its parts.
# The keys are names in GGUF files; "default" is llama.cpp's rule for files without a name.
PRE_TOKENIZERS = {
    "default": [r"[\p{P}$+<=>^~|]+", _GPT2, r"\p{N}+", "[0-9]{3}"],
    "gpt-2": [_GPT2],
    "smollm": [r"\p{N}", _GPT2],
    "falcon": [r"[\p{P}$+<=>^~|`]+", _GPT2, "[0-9]{3}"],
    "llama-bpe": [_LLAMA3],
    "glm4": [_LLAMA3],
    "dbrx": [_LLAMA3],
    "minicpm5": [r"\p{N}{1,3}", _CONTRACTION + _WORD + r"|\p{N}+" + _REST],
    "qwen2": [_CONTRACTION + _WORD + r"|\p{N}" + _REST],
    "qwen35": [_CONTRACTION + _MARKED_WORD + r"|\p{N}" + _MARKED_REST],
    "seed-coder": [_CONTRACTION + _WORD + r"|\p{N}" + _REST.replace(r"[\r\n]*", "")],
    "tekken": [_CASED_WORD + r"|\p{N}" + _PATH_REST],
    "gpt-4o": [_CASED_WORD + rf"(?:{_CONTRACTION.rstrip('|')})?" + r"|\p{N}{1,3}" + _PATH_REST],
}
# With these rules, a word that is a token is not merged from its parts.
IGNORE_MERGES = ("llama-bpe", "glm4", "minicpm5", "tekken")
# With these rules, texts begin with a BOS token if the file does not say otherwise.
ADD_BOS = ("llama-bpe", "tekken")
# With these names, text is normalized as by the models' own tokenizer.json. (llama.cpp does not.)
NFC = ("qwen2", "deepseek-r1-qwen", "qwen35")
# Rules, with the other names for which llama.cpp has the same rule.
SAME_RULE = {
    "gpt-2": """phi-2 jina-es jina-de jina-v1-en jina-v2-es jina-v2-de jina-v2-code roberta-bpe
        modern-bert gigachat a.x-4.0 mellum mpt olmo jais exaone4 trillion granite-docling""",
    "smollm": "refact starcoder command-r codeshell exaone minerva-7b mellum2",
    "llama-bpe": "llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    "glm4": "glm5",
    "dbrx": "smaug-bpe chatglm-bpe",
    "qwen2": "deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
    "gpt-4o": "llama4 kanana2 talkie minimax-m2",
}
ALIASES = {name: rule for rule, names in SAME_RULE.items() for name in names.split()}


def byte_level_bpe(path: Path, fields: dict):
    """(a `tokenizers` Tokenizer, whether texts begin with a BOS token if the file does not say it)."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    name = fields.get("pre")
    if not name:
        print_status(f"warning: {path} lacks {START}pre: text is split by a default, maybe not as in training")
    rule = ALIASES.get(name, name or "default")
    if rule not in PRE_TOKENIZERS:
        known = f"{', '.join(sorted(PRE_TOKENIZERS))} and {len(ALIASES)} names of the same rules"
        raise UserError(f"{path}: {START}pre {short(name)} is not known; known: {known}")

    library = Tokenizer(byte_pair_model(path, fields, ignore_merges=rule in IGNORE_MERGES))
    cuts = [pre_tokenizers.Split(Regex(regex), behavior="isolated") for regex in PRE_TOKENIZERS[rule]]
    cuts.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    library.pre_tokenizer = pre_tokenizers.Sequence(cuts)
    library.decoder = decoders.ByteLevel()
    if name in NFC:
        library.normalizer = normalizers.NFC()
    add_tokens(library, fields)
    return library, rule in ADD_BOS


def add_tokens(library, fields: dict):
    """Let a `tokenizers` Tokenizer find special and user-defined tokens before it encodes the rest of a text."""
    from tokenizers import AddedToken

    kinds = list(zip(fields["tokens"], fields["token_type"]))
    special = [token for token, kind in kinds if kind in SPECIAL]
    user_defined = [token for token, kind in kinds if kind == USER_DEFINED]
    library.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    library.add_tokens([AddedToken(token, normalized=False) for token in user_defined])


def character_bpe(path: Path, fields: dict):
    """A `tokenizers` Tokenizer whose BPE merges characters, with ▁ for spaces. A character that is no token
    becomes tokens for its bytes. Only newlines cut a text."""
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers

    library = Tokenizer(byte_pair_model(path, fields, byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.pre_tokenizer = pre_tokenizers.Split(Regex(r"\n+"), behavior="isolated")
    library.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    add_tokens(library, fields)
    return library


def byte_pair_model(path: Path, fields: dict, **options):
    """The `tokenizers` library's BPE model with these options. Merges of tokens that the vocabulary lacks
    are left out."""
    from tokenizers import models

    vocabulary = {token: i for i, token in enumerate(fields["tokens"])}
    merges = [merge.partition(" ")[::2] for merge in fields.get("merges", [])]
    if not merges:
        print_status(f"warning: {path} lacks {START}merges: each byte of a text becomes a token")
    try:
        return models.BPE(vocab=vocabulary, merges=merges, **options)
    except Exception:  # the library has no type of its own for merges of unknown tokens
        known = [(a, b) for a, b in merges if {a, b, a + b} <= vocabulary.keys()]
    unknown = f"{len(merges) - len(known)} of {len(merges)} merges"
    print_status(f"warning: {path}: {unknown} are of tokens that the vocabulary lacks and are left out")
    return models.BPE(vocab=vocabulary, merges=known, **options)


# ---------------------------------------------------------------- sentencepiece


def sentencepiece_model(fields: dict) -> bytes:
    """A tokenizer.model file: sentencepiece's ModelProto (sentencepiece_model.proto) in protobuf's
    wire format.

    A GGUF file has everything that such a file needs. So the sentencepiece library can encode text
    here as it did when the model was trained.
    """

    def varint(number: int) -> bytes:
        number &= 2**64 - 1
        out = bytearray()
        while number > 127:
            out.append(number & 127 | 128)
            number >>= 7
        return bytes([*out, number])

    def field(number: int, value) -> bytes:
        """A float as fixed32, an int as a varint, or bytes after their length."""
        if isinstance(value, float):
            return varint(number << 3 | 5) + struct.pack("<f", value)
        if isinstance(value, int):
            return varint(number << 3) + varint(value)
        return varint(number << 3 | 2) + varint(len(value)) + value

    tokens = fields["tokens"]
    kinds = fields["token_type"]
    scores = fields["scores"]
    if len(scores) < len(tokens):
        raise ValueError("scores does not have a number for each token")

    pieces = []
    for token, score, kind in zip(tokens, scores, kinds):
        if kind == USER_DEFINED:
            # llama.cpp's converter writes plain spaces, as in Gemma's tokens for several spaces.
            token = token.replace(" ", "\u2581")
        piece = field(1, token.encode()) + field(2, float(score)) + field(3, int(kind))
        pieces.append(field(1, piece))

    unknown = fields.get("unknown_token_id", 0)
    if UNKNOWN in kinds:
        unknown = kinds.index(UNKNOWN)
    bos = fields.get("bos_token_id", -1)
    eos = fields.get("eos_token_id", -1)
    trainer = field(3, 2) + field(35, 1)  # model_type BPE, byte_fallback
    trainer += field(40, int(unknown)) + field(41, int(bos)) + field(42, int(eos)) + field(43, -1)
    prefix = int(bool(fields.get("add_space_prefix", True)))
    # name, add_dummy_prefix, remove_extra_whitespaces, escape_whitespaces
    normalizer = field(1, b"identity") + field(3, prefix) + field(4, 0) + field(5, 1)
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)
