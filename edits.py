"""Notices edits of the Python code that kernels stand for, so that an edit takes effect.

A kernel computes what some Python functions specify, and runs instead of them. Somebody who edits
such a function would see no change. So this file lists the functions of each operation, and a
fingerprint of each, made of its syntax tree: comments, docstrings and annotations do not count. If
one of them differs when a model is loaded, the operation counts as one without a kernel, and a line
says so. A method that was patched in the running process, or a class that was replaced by another
one, counts as edited, too.

Whoever changes a kernel together with its functions renews the fingerprints: python edits.py
"""

import ast
import hashlib
import itertools
import linecache
import re
import sys
import textwrap
from collections.abc import Callable
from functools import cache
from importlib import import_module
from pathlib import Path

from cli import print_status

NORMS = ("layers.RMSNorm.forward", "layers.LayerNorm.forward", "kernels.rms_norm", "kernels.layer_norm")
LINEAR = ("layers.Linear.forward", "kernels.linear")
PACKED = (
    *LINEAR,
    "layers.Linear.multiply_rows",
    "layers.MatrixLayer.multiply_expert",
    "formats.StackedLinear.forward",
    "formats.StackedLinear.multiply_expert",
    "formats.QuantizedLinear.forward",
    "formats.QuantizedLinear.multiply_rows",
    "formats.QuantizedLinear.weights",
    "formats.Format.unpack",
)
KEYS = ("model.Attention.read", "model.Attention.normalize", "model.KVCache.write", "positions.rotate")
STATES = ("mixers.recurrent.Tail.write_tail", "mixers.recurrent.Tail.read_tail", "mixers.recurrent.Tail.with_tail")
EXPERTS = (
    "mixers.experts.SparseMLP.forward",
    "mixers.experts.SparseMLP.normed",
    "mixers.experts.SparseMLP.router_input",
    "mixers.experts.SparseMLP.choose",
    "mixers.experts.SparseMLP.count",
    "layers.Router.forward",
    "mixers.experts.run_experts",
    "model.MLP.forward",
    "layers.gated",
)
SAMPLING = (
    "sampling.adjusted",
    "sampling.penalized",
    "sampling.filtered",
    "sampling.any_row",
    "sampling.top_mass",
    "sampling.float_to_sortable_int",
)
# The functions that each operation stands for.
STANDS_FOR = {
    "attention": (
        "kernels.attention_torch",
        "kernels.attention_eager_cpu",
        "kernels.softmax_attention",
        "kernels.read_rows",
        "kernels.visible_slots",
        "kernels.zero_unseen",
        "kernels.zero_bad",
        "kernels.alibi_bias",
    ),
    "gated_delta": (
        "mixers.recurrent.gated_delta_torch",
        "mixers.recurrent.runs_of",
        "mixers.recurrent.outer",
        "mixers.recurrent.delta_tokens",
        "mixers.recurrent.delta_chunks",
    ),
    "linear_packed": PACKED,
    "embed_packed": ("layers.Embedding.forward", "formats.QuantizedEmbedding.forward"),
    "sparse_mlp": EXPERTS,
    "choose_experts": ("mixers.experts.SparseMLP.choose",),
    "expert_mlp": EXPERTS,
    "fused_linear": (*PACKED, *NORMS, "model.MLP.forward", "layers.gated"),
    "rotary": KEYS,
    "write_draft_keys": ("mixers.mtp.MTPLayer.read", "mixers.mtp.MTPLayer.join", *KEYS, *NORMS, *STATES),
    "blocks": (
        "model.Block.forward",
        "model.LayerInput.forward",
        "model.Block.add",
        "model.Attention.forward",
        "model.MLP.forward",
        "layers.gated",
        "kernels.attention",
        "mixers.recurrent.gated_delta",
        "mixers.recurrent.GatedDeltaNet.forward",
        "mixers.recurrent.unit_length",
        "mixers.recurrent.ShortConvolution.forward",
        "mixers.recurrent.Convolution.forward",
        "mixers.recurrent.Decay.forward",
        "mixers.recurrent.ConvState.move_base",
        *KEYS,
        *NORMS,
        *STATES,
    ),
    "sample": ("sampling.sample_reference", "sampling.exponential_noise", "sampling.scramble", *SAMPLING),
    "head_logits": (
        "model.Transformer.head",
        "model.Transformer.linear_head",
        "model.soft_cap",
        "sampling.sample",
        "sampling.sample_reference",
        "sampling.exponential_noise",
        "sampling.scramble",
        *PACKED,
        *SAMPLING,
    ),
    "probabilities": ("sampling.probabilities_reference", *SAMPLING),
}
IGNORED = ("annotation", "returns")
FINGERPRINTS = """
formats.Format.unpack fb36d1abca10 098fb93dec70
formats.QuantizedEmbedding.forward 5f2d523f21b2 186302c08dfc
formats.QuantizedLinear.forward d3cbe15164ee 76ef432c6f25
formats.QuantizedLinear.multiply_rows 9ba977afd521 39eab726846d
formats.QuantizedLinear.weights 25db16225499 d834c4a69b5a
formats.StackedLinear.forward 87018918a515 6b94e358eff1
formats.StackedLinear.multiply_expert 2e81417aad5a d24b94b9caff
kernels.alibi_bias 7f4e98cdc23e 6425dbbe6504
kernels.attention a8c6c54ac956 53a83b5faf3b
kernels.attention_eager_cpu ed8693400960 2b94b68e2091
kernels.attention_torch fd7ac5fd89bf 561fee088f42
kernels.layer_norm 445330620173 08704f7ddb8e
kernels.linear e8e18a90c105 dfcbcb9e38a4
kernels.read_rows 7451ae906ce6 2070bba75877
kernels.rms_norm 60da4cb713ec ba741bdf9e59
kernels.softmax_attention aa3497f2960c 908cb56301a9
kernels.visible_slots cf822fc0435d ea776688dc98
kernels.zero_bad 75764676a6ca 9d9607c2612a
kernels.zero_unseen b577bc93063a 680d10a408e5
layers.Embedding.forward 7e33a939599a 213273f054df
layers.LayerNorm.forward eaa7b5e03d08 5a07b3d1f8eb
layers.Linear.forward d48d6d1103a2 2b2cc0207934
layers.Linear.multiply_rows 545aa72d5c4e 5e7564b9aea1
layers.MatrixLayer.multiply_expert c5ef583c3674 41bc847319b0
layers.RMSNorm.forward cd19c72a6abf 11aa9cd73518
layers.Router.forward 089eda3f4b72 4c54d1c039bb
layers.gated aeeaf0912bb9 808f013a0d33
mixers.experts.SparseMLP.choose fead8cc27eab eee7459a7813
mixers.experts.SparseMLP.count 59d5267662a1 88debef37853
mixers.experts.SparseMLP.forward 129f5e82b5a1 fa9cb1ebbc9e
mixers.experts.SparseMLP.normed c0c20cc93ba5 2accf0e8efa8
mixers.experts.SparseMLP.router_input e752402f61b4 dc17de9cab97
mixers.experts.run_experts 711c60f85c04 0d5d42120b09
mixers.mtp.MTPLayer.join f8ec4370faf4 6b7e69c173f5
mixers.mtp.MTPLayer.read a84e3f13852e c872c4f488ba
mixers.recurrent.ConvState.move_base 898f60e46378 18e6f69248a5
mixers.recurrent.Convolution.forward 8472de3636de 928dddb0df92
mixers.recurrent.Decay.forward a4186831abaa bbe093a01fcb
mixers.recurrent.GatedDeltaNet.forward 9ed6fc1cf3fd 419236fc6b25
mixers.recurrent.ShortConvolution.forward 53e6dc515daf baf0c36edb37
mixers.recurrent.Tail.read_tail 1953204d2939 a7d06b1560aa
mixers.recurrent.Tail.with_tail 8230dbd8da6d acb89c7c7330
mixers.recurrent.Tail.write_tail f81707ed1e6e 7f37878b7be0
mixers.recurrent.delta_chunks f7295955f535 1afac84a33ca
mixers.recurrent.delta_tokens e117440feecc c44569c094a7
mixers.recurrent.gated_delta 4751d0ff61f5 67cdc3b467b1
mixers.recurrent.gated_delta_torch c2848e8366f7 ef54e7dba264
mixers.recurrent.outer 071d36748d1b 87cc9421ed6f
mixers.recurrent.runs_of 6bd892d0feea 058b8489ffe8
mixers.recurrent.unit_length 85847cba18d1 de3054f627dc
model.Attention.forward 9bb586f1946e 5b1b7a949cff
model.Attention.normalize 42b08007b352 bb590ca4e43f
model.Attention.read df758ec9e183 97b108f21c36
model.Block.add abe1d27fa0ea 65d4310b7667
model.Block.forward 08f9ecea078e 23bdf02404fd
model.KVCache.write 764453571dce a345fabb79d1
model.LayerInput.forward d1f5d00445a4 1a6b959e083f
model.MLP.forward 6594a8d756af 22210a68ccbf
model.Transformer.head cb82a187cb3a 9af876eeb56f
model.Transformer.linear_head fb45056d6c78 bba659d2ec66
model.soft_cap 2640969cf31f 7ce121374b9b
positions.rotate 2885a8bed7ef afcacfcbcf08
sampling.adjusted 8c1c27f87efe 73c3d85a7ba1
sampling.any_row 93b6720e5e3b 7ff724410389
sampling.exponential_noise 7490c242036e 11fcd955b7df
sampling.filtered 02e81f7b518c 980acfe044fd
sampling.float_to_sortable_int a48069e75793 596bd80214ea
sampling.penalized d379b0336d49 a9098f91f701
sampling.probabilities_reference afa1b76f9d1e 6367c3e1a380
sampling.sample fb0e92165695 4b28e61e106c
sampling.sample_reference b56f6f5a8e3c ea601e215dfa
sampling.scramble 2c91da9f758c d9d435bd08c8
sampling.top_mass 05618c7d2dcd 4eaa7065098f
"""


SET_ASIDE: dict[str, set[str]] = {}  # type of a device -> the operations that `set_aside` has removed


def set_aside(known: set[str], device_type: str):
    """Remove the operations that must not run from the known kernels of a type of device, and put back those
    whose code is no longer edited. Called for each model: code may have been patched meanwhile."""
    known |= SET_ASIDE.get(device_type, set())
    SET_ASIDE[device_type] = known & unusable_operations()
    known -= SET_ASIDE[device_type]


def unusable_operations() -> set[str]:
    """The operations whose kernels must not run, because Python code that they stand for was edited.
    Prints a line for each function that was."""
    unusable = set()
    for name in recorded_fingerprints():
        # What nobody has imported does not run.
        if sys.modules.get(module_of(name)) is None or not is_edited(name):
            continue
        operations = [operation for operation, names in STANDS_FOR.items() if name in names]
        unusable.update(operations)
        say_once(name, "blocks" in operations, ", ".join(operations))
    return unusable


def is_edited(name: str) -> bool:
    """Whether a function has another fingerprint now."""
    return is_edited_function(name, function_at(name))


@cache
def recorded_fingerprints() -> dict[str, tuple[str, str]]:
    """name -> the hashes of its text and of its syntax tree."""
    return {name: tuple(hashes) for name, *hashes in map(str.split, FINGERPRINTS.strip().splitlines())}


@cache
def say_once(name: str, runs_block: bool, operations: str):
    if runs_block:
        print_status(f"{name} was edited: the blocks run operation by operation")
    else:
        print_status(f"{name} was edited: its kernels ({operations}) do not run")


def module_of(name: str) -> str:
    """The module of a function with a name such as mixers.mtp.MTPLayer.read."""
    return re.match(r"(mixers\.)?\w+", name)[0]


def function_at(name: str) -> Callable | None:
    """The function with a name such as model.Attention.forward; None if it is not there any more."""
    module = module_of(name)
    found = import_module(module)
    for part in name.removeprefix(f"{module}.").split("."):
        found = getattr(found, part, None)
    return found


@cache  # also for each patched function
def is_edited_function(name: str, function: Callable | None) -> bool:
    """Whether the function with this name has another syntax tree than recorded. Trees take 0.5 ms each, so they are
    only looked at if the texts differ."""
    text_hash, tree_hash = recorded_fingerprints()[name]
    try:
        source = source_of(function)
        return hash_of(source) != text_hash and hash_of(tree_of(source)) != tree_hash
    except (AttributeError, SyntaxError, ValueError):  # not written in Python, or not in a file
        return True


def source_of(function: Callable) -> str:
    """The lines of a function in its file. (inspect.getsource reads them token by token, which takes much longer, and
    looks into what a wrapper says that it wraps.)"""
    code = function.__code__
    first, *rest = linecache.getlines(code.co_filename)[code.co_firstlineno - 1 :]
    indent = first[: len(first) - len(first.lstrip())]
    inside = (f"{indent} ", f"{indent})")  # the parenthesis may end the list of parameters
    lines = itertools.takewhile(lambda line: not line.strip() or line.startswith(inside), rest)
    return "".join([first, *lines]).rstrip()


def tree_of(source: str) -> str:
    """The syntax tree of a function, without its docstring. It is the same in all versions of Python."""
    (tree,) = ast.parse(textwrap.dedent(source)).body
    if ast.get_docstring(tree) is not None:
        tree.body.pop(0)
    return repr(as_lists(tree))


def hash_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def as_lists(node) -> list | str:
    """A syntax tree as nested lists, without annotations, and without empty fields, which differ between versions."""
    if isinstance(node, list):
        return [as_lists(child) for child in node]
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = [(name, value) for name, value in ast.iter_fields(node) if name not in IGNORED]
    return [type(node).__name__, *((name, as_lists(value)) for name, value in fields if value not in (None, []))]


def current_fingerprints() -> str:
    """What FINGERPRINTS should be: a line for each function of STANDS_FOR."""
    lines = []
    for name in sorted({name for names in STANDS_FOR.values() for name in names}):
        source = source_of(function_at(name))
        lines.append(f"{name} {hash_of(source)} {hash_of(tree_of(source))}\n")
    return "".join(lines)


if __name__ == "__main__":
    file = Path(__file__)
    file.write_text(re.sub(r'(?<=FINGERPRINTS = """\n)[^"]*', current_fingerprints(), file.read_text()))
