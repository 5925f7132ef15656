"""From options to drafts: which ones --draft and --draft_checkpoint_path ask for, and what they need from files.

Read down: `open_drafts`, which checks what can be checked before the model's weights are read; `make_speculation`,
which loads the drafts; then what these two need.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint import Source, empty_model, read_model
from cli import UserError, check_is_file, print_status
from drafts.draft_model import DraftVocabulary, ModelDraft, SelfDraft, output_vectors
from drafts.heads import HeadsFile, MedusaDraft, describe_heads, make_heads, read_heads
from drafts.retrieval import RetrievalDraft
from engine import check_prompt
from formats import Quantization, quantize_model, swap
from load import DEFAULT_HEADS, Checkpoint, find_source, install_kernels, load_model
from model import Transformer
from speculative import Speculation
from tokenizer import Tokenizer


@dataclass
class DraftSources:
    """What the drafts need from files, apart from weights."""

    kinds: dict[str, str]  # of --draft: kind -> what follows its colon
    texts: list[list[int]]  # token ids of the files of lookup:FILE
    source: Source | None  # of the draft model, if it is read from a checkpoint


def open_drafts(checkpoint: Checkpoint, ranks) -> DraftSources:
    """Check what can be checked before the model's weights are read. ranks: as in start.load_engine."""
    options, quantization = checkpoint.options, checkpoint.quantization
    kinds = {kind.partition(":")[0]: kind.partition(":")[2] for kind in options.draft}
    files = [kind.partition(":")[2] for kind in options.draft if kind.startswith("lookup:")]
    texts = ranks.share(lambda: [read_lookup_text(file, checkpoint) for file in files])
    if "medusa" in kinds:
        describe_heads(heads_path(kinds))
    source = None if options.draft_checkpoint_path is None else open_draft_model(checkpoint, ranks)
    if "int4-self" in kinds and source is None and quantization is not None and quantization.bits < 8:
        four = f"{checkpoint.path} has {quantization.bits} bits already, and a draft should be smaller"
        dtype = str(options.dtype).removeprefix("torch.")
        raise UserError(f"--draft int4-self: {four}; give --dequantize to run the model in {dtype}")
    return DraftSources(kinds, texts, source)


def open_draft_model(checkpoint: Checkpoint, ranks) -> Source:
    """The source of --draft_checkpoint_path, after checking that this model can be a draft."""
    target, tokenizer = checkpoint.path, checkpoint.tokenizer
    config = checkpoint.config
    source = ranks.in_turn(lambda: find_source(checkpoint.options.draft_checkpoint_path))
    ranks.check_same(source)
    path, other = source.path, source.config
    if "int4-self" in checkpoint.options.draft and other != config:
        raise UserError(f"--draft int4-self: {path} is another model than {target}; leave out --draft int4-self")
    if difference := Tokenizer(source.tokenizer_files()).difference(tokenizer):
        raise UserError(f"{path} cannot propose tokens for {target}: {difference}")
    if tokenizer.vocabulary is None and other.vocab_size != config.vocab_size:
        raise UserError(f"{path} has {other.vocab_size} tokens, {target} {config.vocab_size}, and no tokenizer")
    return source


def make_speculation(checkpoint: Checkpoint, model: Transformer, sources: DraftSources) -> Speculation:
    """The Speculation with the drafts that the options ask for."""
    drafts, given = make_drafts(checkpoint, model, sources), checkpoint.options.speculate_k
    if given in (None, "auto"):
        return Speculation(drafts)
    heads = getattr(drafts[0], "heads", None)
    if len(drafts) == 1 and heads is not None and heads.n < given:
        print_status(f"--speculate_k {given}: there are only {heads.n} heads, so {heads.n} tokens are proposed")
    return Speculation(drafts, given, automatic=False)


def make_drafts(checkpoint: Checkpoint, model: Transformer, sources: DraftSources) -> list:
    """The drafts that the options ask for, the cheapest first."""
    options, kinds = checkpoint.options, sources.kinds
    drafts = []

    def with_kernels(module):
        return install_kernels(module, options.kernels, options.exact_activations)

    def vocabulary_of(head: Transformer, size: int) -> DraftVocabulary | None:
        if file is None:
            return None
        ids = file.vocabulary[file.vocabulary < size]
        return with_kernels(DraftVocabulary(ids, output_vectors(head, ids)))

    file = read_heads_file(kinds, checkpoint, model)
    if kinds.keys() & {"prompt-lookup", "lookup"}:
        drafts.append(RetrievalDraft(sources.texts, lookup_name(options.draft)))
    if "medusa" in kinds:
        drafts.append(MedusaDraft(with_kernels(make_heads(file, model))))
    if "int4-self" in kinds:
        draft = load_self_draft(checkpoint, model, sources)
        drafts.append(SelfDraft(draft, vocabulary_of(model, draft.config.vocab_size)))
    elif sources.source is not None:
        draft = load_model(sources.source, draft_options(checkpoint, model))
        name = Path(options.draft_checkpoint_path).resolve().name
        drafts.append(ModelDraft(draft, vocabulary_of(draft, draft.config.vocab_size), name))
    return drafts


# ---------------------------------------------------------------- prompt lookup


def lookup_name(kinds: list[str]) -> str:
    """The name of the one draft that all prompt-lookup and lookup:FILE are, for example prompt-lookup+lookup:a.txt."""
    parts = (kind.partition(":") for kind in kinds if "lookup" in kind.partition(":")[0])
    return "+".join(kind + colon + Path(path).name for kind, colon, path in parts)


def read_lookup_text(name: str, checkpoint: Checkpoint) -> list[int]:
    """The tokens of the file of --draft lookup:FILE."""
    path = Path(os.path.expanduser(name))
    if checkpoint.tokenizer.vocabulary is None:
        raise UserError("--draft lookup:FILE needs text, but the checkpoint has no tokenizer")
    if not path.exists():
        raise UserError(f"--draft lookup:{path}: there is no such file")
    try:
        check_is_file(path)
        ids = checkpoint.tokenizer.encode(path.read_text(encoding="utf-8-sig"), add_bos=False)
    except (OSError, UnicodeDecodeError, ValueError) as error:
        raise UserError(f"--draft lookup:{path} cannot be read: {error}") from None
    check_prompt(ids or [0], checkpoint.config, len(ids) + 1)
    return ids


# ---------------------------------------------------------------- heads and draft models


def heads_path(kinds: dict[str, str]) -> Path:
    """The file that --draft medusa or medusa:FILE names."""
    return Path(os.path.expanduser(kinds["medusa"])) if kinds.get("medusa") else DEFAULT_HEADS


def read_heads_file(kinds: dict[str, str], checkpoint: Checkpoint, model: Transformer) -> HeadsFile | None:
    """The file of --draft medusa:FILE, by default that of the default model. Its vocabulary makes draft models faster,
    too; so without --draft medusa, the file is read as well, if it is one for this model. Otherwise returns None."""
    try:
        return read_heads(heads_path(kinds), model, checkpoint.name)
    except UserError:
        if "medusa" in kinds:
            raise
        return None


def draft_options(checkpoint: Checkpoint, model: Transformer):
    """The options of the target, for a draft beside it."""
    return replace(checkpoint.options, device=str(model.device), dequantize=False)


def load_self_draft(checkpoint: Checkpoint, model: Transformer, sources: DraftSources) -> Transformer:
    """The target in fewer bits: the model of --draft_checkpoint_path, or for --draft int4-self alone the model itself
    in 4 bits with groups of 32. If the target is split over ranks, so is the draft, which shares its caches."""
    options = draft_options(checkpoint, model)
    if sources.source is not None:
        return load_model(sources.source, options, model.shard)
    print_status("quantizing the draft to 4 bits ...")
    draft = quantize_model(read_model(checkpoint.source, model.device, options.dtype), Quantization("int4", 32, "int8"))
    if model.shard is not None:
        shard, whole = model.shard.fit(draft), draft.state_dict()
        schemes = {name: layer.scheme for name, layer in draft.named_modules() if hasattr(layer, "scheme")}
        slices, draft = shard.slices(draft), swap(empty_model(model.config, shard=shard), schemes.get)
        draft.load_state_dict({name: part.of(whole[name]).clone() for name, part in slices.items()}, assign=True)
    return install_kernels(draft, options.kernels, options.exact_activations)
