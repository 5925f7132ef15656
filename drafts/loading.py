"""From options to drafts: which ones --draft and --draft_checkpoint_path ask for, and what they need from files.

Read down: `open_drafts`, which checks what can be checked before the model's weights are read; `make_speculation`,
which loads the drafts; then what these two need.
"""

import os
from dataclasses import dataclass, replace
from pathlib import Path

from checkpoint import Source, empty_model, read_model
from cli import UserError, check_is_file, print_status, read_text
from drafts.draft_model import DraftVocabulary, ModelDraft, SelfDraft, output_head_rows
from drafts.heads import HeadsFile, MedusaDraft, describe_heads, make_heads, read_heads
from drafts.retrieval import RetrievalDraft
from engine import check_prompt
from formats import Quantization, QuantizedLinear, quantize_model, swap
from load import DEFAULT_HEADS, Checkpoint, DraftOption, find_source, install_kernels, load_model
from model import Transformer
from speculative import Draft, Speculation
from tokenizer import Tokenizer


@dataclass
class DraftSources:
    """What the drafts need from files, apart from weights."""

    texts: list[list[int]]  # token ids of the files of lookup:FILE
    source: Source | None  # of the draft model, if it is read from a checkpoint


def open_drafts(checkpoint: Checkpoint, ranks) -> DraftSources:
    """Check what can be checked before the model's weights are read. ranks: as in load.open_checkpoint."""
    options, quantization = checkpoint.options, checkpoint.quantization
    kinds, files = options.draft_kinds, [draft.path for draft in options.draft if draft.kind == "lookup"]
    texts = ranks.share(lambda: [read_lookup_text(file, checkpoint) for file in files])
    if "medusa" in kinds:
        describe_heads(heads_path(options.draft))
    source = None if options.draft_checkpoint_path is None else open_draft_model(checkpoint, ranks)
    if "int4-self" in kinds and source is None and quantization is not None and quantization.bits < 8:
        four = f"{checkpoint.path} has {quantization.bits} bits already, and a draft should be smaller"
        dtype = str(options.dtype).removeprefix("torch.")
        raise UserError(f"--draft int4-self: {four}; give --dequantize to run the model in {dtype}")
    return DraftSources(texts, source)


def open_draft_model(checkpoint: Checkpoint, ranks) -> Source:
    """The source of --draft_checkpoint_path, after checking that this model can be a draft."""
    target, tokenizer = checkpoint.path, checkpoint.tokenizer
    config = checkpoint.config
    source = ranks.in_turn(lambda: find_source(checkpoint.options.draft_checkpoint_path))
    ranks.check_same(source)
    path, other = source.path, source.config
    if "int4-self" in checkpoint.options.draft_kinds and other != config:
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
    most = drafts[0].max_k
    if len(drafts) == 1 and most < given:
        print_status(f"--speculate_k {given}: there are only {most} heads, so {most} tokens are proposed")
    return Speculation(drafts, given, automatic=False)


def make_drafts(checkpoint: Checkpoint, model: Transformer, sources: DraftSources) -> list[Draft]:
    """The drafts that the options ask for, the cheapest first."""
    options, kinds = checkpoint.options, set(checkpoint.options.draft_kinds)
    drafts, file = [], None

    def with_kernels(module):
        return install_kernels(module, options.kernels, options.exact_activations)

    def vocabulary_of(head: Transformer, size: int) -> DraftVocabulary | None:
        if file is None:
            return None
        ids = file.vocabulary[file.vocabulary < size]
        return with_kernels(DraftVocabulary(ids, output_head_rows(head, ids)))

    if kinds & {"medusa", "int4-self"} or sources.source is not None:
        file = read_heads_file(checkpoint, model)
    if kinds & {"prompt-lookup", "lookup"}:
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


def lookup_name(drafts: list[DraftOption]) -> str:
    """The name of the one draft for all prompt-lookup and lookup:FILE, for example prompt-lookup+lookup:a.txt."""
    lookups = [draft for draft in drafts if draft.kind in ("prompt-lookup", "lookup")]
    return "+".join(f"{draft.kind}:{Path(draft.path).name}" if draft.path else draft.kind for draft in lookups)


def read_lookup_text(name: str, checkpoint: Checkpoint) -> list[int]:
    """The tokens of the file of --draft lookup:FILE."""
    path = Path(os.path.expanduser(name))
    if checkpoint.tokenizer.vocabulary is None:
        raise UserError("--draft lookup:FILE needs text, but the checkpoint has no tokenizer")
    check_is_file(path)
    ids = checkpoint.tokenizer.encode(read_text(path, f"--draft lookup:{path}"), add_bos=False)
    check_prompt(ids or [0], checkpoint.config, len(ids) + 1)
    return ids


# ---------------------------------------------------------------- heads and draft models


def heads_path(drafts: list[DraftOption]) -> Path:
    """The file of medusa:FILE, by default that of the default model."""
    path = next((draft.path for draft in drafts if draft.kind == "medusa"), "")
    return Path(os.path.expanduser(path)) if path else DEFAULT_HEADS


def read_heads_file(checkpoint: Checkpoint, model: Transformer) -> HeadsFile | None:
    """The file of `heads_path`. Its vocabulary makes draft models faster as well, so without --draft medusa the file is
    read, too; then returns None if its heads are for another model."""
    options = checkpoint.options
    try:
        return read_heads(heads_path(options.draft), model, checkpoint.name)
    except UserError:
        if "medusa" in options.draft_kinds:
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
    print_status("loading the draft in 4 bits ...")
    draft = quantize_model(read_model(checkpoint.source, model.device, options.dtype), Quantization("int4", 32, "int8"))
    if model.shard.ranks > 1:
        shard, whole = model.shard.fit(draft), draft.state_dict()
        schemes = {name: layer.scheme for name, layer in draft.named_modules() if isinstance(layer, QuantizedLinear)}
        slices, draft = shard.slices(draft), swap(empty_model(model.config, shard=shard), schemes.get)
        draft.load_state_dict({name: part.cut(whole[name]).clone() for name, part in slices.items()}, assign=True)
        draft.activation_dtype = model.activation_dtype
    return install_kernels(draft, options.kernels, options.exact_activations)
