"""From options to drafts: which ones --draft and --draft_checkpoint_path ask for, and what they need from files.

Read down: Drafts, which checks what can be checked before the model's weights are read, and then loads the drafts;
below it what it needs.
"""

import os
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, empty_model, read_weights
from cli import UserError, check_is_file, print_status, read_text
from drafts.draft import Draft
from drafts.draft_model import DraftVocabulary, ModelDraft, SelfDraft, output_head_rows
from drafts.heads import HeadsFile, MedusaDraft, describe_heads, make_heads, read_heads
from drafts.retrieval import RetrievalDraft
from engine import check_prompt
from formats import Quantization, QuantizedLinear, quantize_model, swap
from model import Transformer


class Drafts:
    """The drafts that the options ask for."""

    def __init__(self, target: Checkpoint, loader: Any):
        """Check what can be checked before the weights of the target are read. loader: a load.Loader."""
        self.target, self.loader = target, loader
        self.options = options = loader.options
        files = [draft.path for draft in options.draft if draft.kind == "lookup"]
        self.texts = loader.ranks.share(lambda: [read_lookup_text(file, target) for file in files])  # token ids
        if "medusa" in options.draft_kinds:
            describe_heads(options.heads_path)
        self.checkpoint = None  # of the draft model, if it is another one
        if options.draft_checkpoint_path is not None:
            self.checkpoint = loader.open(options.draft_checkpoint_path)
            self.check_draft_model()
        elif "int4-self" in options.draft_kinds:
            self.check_bits()

    def check_draft_model(self):
        """UserError if the model of --draft_checkpoint_path cannot be a draft."""
        path, other = self.checkpoint.path, self.checkpoint.config
        target, config = self.target.path, self.target.config
        tokenizer = self.target.tokenizer
        if "int4-self" in self.options.draft_kinds and other != config:
            raise UserError(f"--draft int4-self: {path} is another model than {target}; leave out --draft int4-self")
        if difference := self.checkpoint.tokenizer.difference(tokenizer):
            raise UserError(f"{path} cannot propose tokens for {target}: {difference}")
        if tokenizer.vocabulary is None and other.vocab_size != config.vocab_size:
            raise UserError(f"{path} has {other.vocab_size} tokens, {target} {config.vocab_size}, and no tokenizer")

    def check_bits(self):
        """UserError if the target runs in 4 bits already."""
        quantization = self.target.quantization
        if quantization is not None and quantization.bits < 8 and not self.options.dequantize:
            four = f"{self.target.path} has {quantization.bits} bits already, and a draft should be smaller"
            dtype = str(self.options.dtype).removeprefix("torch.")
            raise UserError(f"--draft int4-self: {four}; give --dequantize to run the model in {dtype}")

    def load(self, model: Transformer) -> list[Draft]:
        """The drafts for the model of the target, the cheapest first."""
        kinds = self.options.draft_kinds
        drafts, file = [], None
        if "medusa" in kinds or "int4-self" in kinds or self.checkpoint is not None:
            file = self.read_heads_file(model)
        if "prompt-lookup" in kinds or "lookup" in kinds:
            drafts.append(RetrievalDraft(self.texts, lookup_name(self.options.draft)))
        if "medusa" in kinds:
            drafts.append(MedusaDraft(self.loader.install(make_heads(file, model))))
        if "int4-self" in kinds:
            draft = self.load_self_draft(model)
            drafts.append(SelfDraft(draft, self.make_vocabulary(file, model, draft.config.vocab_size)))
        elif self.checkpoint is not None:
            draft = self.loader.load(self.checkpoint)
            vocabulary = self.make_vocabulary(file, draft, draft.config.vocab_size)
            drafts.append(ModelDraft(draft, vocabulary, Path(self.options.draft_checkpoint_path).resolve().name))
        return drafts

    def read_heads_file(self, model: Transformer) -> HeadsFile | None:
        """The file of heads. Its vocabulary makes draft models faster as well, so without --draft medusa the file is
        read, too; then returns None if its heads are for another model."""
        try:
            return read_heads(self.options.heads_path, model, self.target.name)
        except UserError:
            if "medusa" in self.options.draft_kinds:
                raise
            return None

    def make_vocabulary(self, file: HeadsFile | None, head: Transformer, size: int) -> DraftVocabulary | None:
        """The vocabulary of a draft of `size` tokens, with the rows of a model's output head."""
        if file is None:
            return None
        ids = file.vocabulary[file.vocabulary < size]
        return self.loader.install(DraftVocabulary(ids, output_head_rows(head, ids)))

    def load_self_draft(self, model: Transformer) -> Transformer:
        """The target in fewer bits: the model of --draft_checkpoint_path, or for --draft int4-self alone the model
        itself in 4 bits with groups of 32. If the target is split over ranks, so is the draft, which shares its
        caches."""
        if self.checkpoint is not None:
            return self.loader.load(self.checkpoint, model.shard)
        print_status("loading the draft in 4 bits ...")
        draft = read_weights(self.target, self.target.empty_model(), model.device, self.options.dtype)
        draft = quantize_model(draft, Quantization("int4", 32, "int8"))
        if model.shard.ranks > 1:
            draft = own_part(draft, model)
        return self.loader.install(draft)


def own_part(whole: Transformer, model: Transformer) -> Transformer:
    """One rank's part of a quantized model, where `model` is that rank's part of the model that it is the draft of."""
    shard, state = model.shard.fit(whole), whole.state_dict()
    schemes = {name: layer.scheme for name, layer in whole.named_modules() if isinstance(layer, QuantizedLinear)}
    part = swap(empty_model(model.config, shard=shard), schemes.get)
    slices = {name: piece.cut(state[name]).clone() for name, piece in shard.slices(whole).items()}
    part.load_state_dict(slices, assign=True)
    part.activation_dtype = model.activation_dtype
    return part


# ---------------------------------------------------------------- prompt lookup


def lookup_name(drafts: list) -> str:
    """The name of the one draft for all prompt-lookup and lookup:FILE, for example prompt-lookup+lookup:a.txt. drafts:
    the values of --draft (load.DraftOption)."""
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
