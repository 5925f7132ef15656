"""Loads the drafts that the options --draft and --draft_checkpoint_path ask for.

Read down: Drafts, which checks what can be checked before the model's weights are read, and then
loads the drafts; own_part, for a model that is split; the texts of prompt lookup.
"""

import os
from pathlib import Path
from typing import Any

from checkpoint import Checkpoint, empty_model, read_weights
from cli import UserError, check_is_file, print_status, read_text
from drafts.draft import Draft
from drafts.draft_model import DraftVocabulary, ModelDraft, SelfDraft, output_head_rows
from drafts.heads import HeadsFile, MedusaDraft, describe_heads, make_heads, read_heads
from drafts.mtp import MtpDraft
from drafts.retrieval import RetrievalDraft
from engine import check_prompt
from formats import Quantization, QuantizedLinear, quantize_model, swap
from model import Transformer


class Drafts:
    """The drafts that the options ask for."""

    def __init__(self, target: Checkpoint, loader: Any):
        """Check what can be checked before the weights of the target are read. loader: a
        load.Loader."""
        self.target = target
        self.loader = loader
        self.options = loader.options
        files = [draft.path for draft in self.options.draft if draft.kind == "lookup"]
        # The token ids of each file
        self.texts = loader.ranks.share(lambda: [read_lookup_text(file, target) for file in files])
        if "medusa" in self.options.draft_kinds:
            describe_heads(self.options.heads_path)
        self.checkpoint = None  # of --draft_checkpoint_path
        if self.options.draft_checkpoint_path is not None:
            self.checkpoint = loader.open(self.options.draft_checkpoint_path)
            self.check_draft_model()
        elif "int4-self" in self.options.draft_kinds:
            self.check_bits()
        self.check_states()

    def check_draft_model(self):
        """UserError if the model of --draft_checkpoint_path cannot be a draft."""
        draft = self.checkpoint
        target = self.target
        if "int4-self" in self.options.draft_kinds and draft.config != target.config:
            raise UserError(
                f"--draft int4-self: {draft.path} is another model than {target.path}; leave out --draft int4-self"
            )
        if difference := draft.tokenizer.difference(target.tokenizer):
            raise UserError(f"{draft.path} cannot propose tokens for {target.path}: {difference}")
        few = draft.config.vocab_size
        many = target.config.vocab_size
        if target.tokenizer.vocabulary is None and few != many:
            raise UserError(f"{draft.path} has {few} tokens, but {target.path} has {many}, and no tokenizer")

    def check_bits(self):
        """UserError if the target runs in 4 bits already."""
        quantization = self.target.quantization
        if quantization is not None and quantization.bits < 8 and not self.options.dequantize:
            dtype = str(self.options.dtype).removeprefix("torch.")
            raise UserError(
                f"--draft int4-self: {self.target.path} has {quantization.bits} bits already, and a draft should "
                f"be smaller; give --dequantize to run the model in {dtype}"
            )

    def check_states(self):
        """UserError if the draft is a model with recurrent states. It drafts in several passes, and
        only the last pass can be undone in such a state."""
        draft = self.checkpoint
        if draft is None and "int4-self" in self.options.draft_kinds:
            draft = self.target
        if draft is not None and draft.config.recurrent is not None:
            raise UserError(
                f"{draft.path}: a model with recurrent states cannot be the draft; --draft prompt-lookup works with "
                f"{self.target.path}, and --draft mtp does if it has an MTP layer"
            )

    def load(self, model: Transformer) -> list[Draft]:
        """The drafts for the model of the target, the cheapest first."""
        kinds = self.options.draft_kinds
        file = None
        if "medusa" in kinds or "int4-self" in kinds or self.checkpoint is not None:
            file = self.read_heads_file(model)

        drafts = []
        if "prompt-lookup" in kinds or "lookup" in kinds:
            drafts.append(RetrievalDraft(self.texts, lookup_name(self.options.draft)))
        if "mtp" in kinds:
            drafts.append(MtpDraft(model))
        if "medusa" in kinds:
            drafts.append(MedusaDraft(self.loader.install(make_heads(file, model))))
        if "int4-self" in kinds:
            draft = self.load_self_draft(model)
            vocabulary = self.make_vocabulary(file, model)
            drafts.append(SelfDraft(draft, vocabulary))
        elif self.checkpoint is not None:
            draft = self.loader.load(self.checkpoint)
            vocabulary = self.make_vocabulary(file, draft)
            name = Path(self.options.draft_checkpoint_path).resolve().name
            drafts.append(ModelDraft(draft, vocabulary, name))
        return drafts

    def read_heads_file(self, model: Transformer) -> HeadsFile | None:
        """The file of heads. Without --draft medusa it is read for its vocabulary, which makes
        draft models faster; then the result is None if its heads are for another model."""
        try:
            return read_heads(self.options.heads_path, model, self.target.name)
        except UserError:
            if "medusa" in self.options.draft_kinds:
                raise
            return None

    def make_vocabulary(self, file: HeadsFile | None, model: Transformer) -> DraftVocabulary | None:
        """The vocabulary for a draft, with rows of the output head of a model that has as many tokens.
        None without a file."""
        if file is None:
            return None
        ids = file.vocabulary[file.vocabulary < model.config.vocab_size]
        return self.loader.install(DraftVocabulary(ids, output_head_rows(model, ids), model.config.logits_softcap))

    def load_self_draft(self, model: Transformer) -> Transformer:
        """The target in fewer bits. It is the model of --draft_checkpoint_path, or without this
        option the target itself, quantized to 4 bits with groups of 32. If the target is split over
        ranks, so is the draft, because it shares the target's caches."""
        if self.checkpoint is not None:
            return self.loader.load(self.checkpoint, model.shard)
        print_status("loading the draft in 4 bits ...")
        draft = self.target.empty_model()
        draft = read_weights(self.target, draft, model.device, self.options.dtype)
        draft = quantize_model(draft, Quantization("int4", 32, "int8"))
        if model.shard.ranks > 1:
            draft = own_part(draft, model)
        return self.loader.install(draft)


def own_part(whole: Transformer, model: Transformer) -> Transformer:
    """A rank's part of a draft. whole: the quantized draft; model: the rank's part of the target."""
    shard = model.shard.fit(whole)
    layers = whole.named_modules()
    schemes = {name: layer.scheme for name, layer in layers if isinstance(layer, QuantizedLinear)}
    part = swap(empty_model(model.config, shard=shard), schemes.get)
    state = whole.state_dict()
    slices = {name: piece.cut(state[name]).clone() for name, piece in shard.slices(whole).items()}
    if whole.layer_inputs is not None:
        part.layer_inputs.table = whole.layer_inputs.table
    part.load_state_dict(slices, assign=True)
    part.activation_dtype = model.activation_dtype
    return part


# ---------------------------------------------------------------- prompt lookup


def lookup_name(drafts: list) -> str:
    """The name of the one draft that serves all prompt-lookup and lookup:FILE options, for example
    prompt-lookup+lookup:a.txt. drafts: the values of --draft (options.DraftOption)."""
    used = [draft for draft in drafts if draft.kind in ("prompt-lookup", "lookup")]
    return "+".join(f"lookup:{Path(draft.path).name}" if draft.path else draft.kind for draft in used)


def read_lookup_text(name: str, checkpoint: Checkpoint) -> list[int]:
    """The tokens of the file of --draft lookup:FILE."""
    path = Path(os.path.expanduser(name))
    if checkpoint.tokenizer.vocabulary is None:
        raise UserError("--draft lookup:FILE needs text, but the checkpoint has no tokenizer")
    check_is_file(path)
    ids = checkpoint.tokenizer.encode(read_text(path, "--draft lookup:FILE"), add_bos=False)
    check_prompt(ids or [0], checkpoint.config, len(ids) + 1)
    return ids
