"""Sparse layers: a router chooses a few small MLPs, the experts, for each token.

    logits = router x, one for each of X experts, in float32
    the k experts with the largest logits are chosen; of equal logits, the experts with lower numbers
    weights = softmax(logits) of the chosen experts; in most families divided by their sum
    y = the sum of weight * MLP(x) over the chosen experts, in the order of their logits
    y += sigmoid(gate x) * MLP(x) of the shared expert, if there is one

In LFM2-MoE, the weights are sigmoid(logits) instead, and the experts with the largest
sigmoid(logits) + bias are chosen.

In Gemma 4, a block has an MLP and experts. Both read the residual stream x, each through norms of its own:
    logits = router N_r(x)
    y = N_m(MLP(N(x))) + N_p(the sum of weight * scale of the expert * expert(N_e(x)))

So a token is multiplied with k of X experts, and a step reads only the experts that its tokens have
chosen. docs/experts.md has the numbers.

Read down: SparseMLP, the layer; the loop over the experts, in plain PyTorch. kernels.py
says which operation computes the same with the kernels of a device. A model without experts needs
nothing of this file.

Shapes as in model.py; X experts, k experts for each token, M = B * S tokens, F hidden units of one
expert.

Sources: sparsely gated experts (arXiv:1701.06538), Mixtral (arXiv:2401.04088), Qwen3
(arXiv:2505.09388), Qwen3.5, LFM2-MoE, Gemma 4; the bias on sigmoid scores: DeepSeek-V3 (arXiv:2412.19437).
"""

import itertools
import weakref
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from config import Config
from kernels import MAX_DECODE_TOKENS, define_reference
from layers import ExpertStack, FeedForward, RMSNorm, Router, Units, empty_parameter, gated

# In prefill, torch multiplies with weights that are not quantized. It may sum in another order for
# fewer rows than this, so an expert of fewer tokens gets rows of zeros: its bits must not depend on
# other tokens.
PREFILL_ROWS = 32
# LFM2-MoE adds it to the sum by which the sigmoids of the chosen experts are divided.
MIN_SIGMOID_SUM = 1e-6


class SparseMLP(FeedForward):
    """Experts instead of one MLP, or beside it. Those beside an MLP normalize their input themselves."""

    name = "experts"

    counts: Tensor  # see `set_counts`

    def __init__(self, config: Config, shared: nn.Module | None):
        """shared: the MLP of the shared expert, if the model has one."""
        super().__init__()
        experts = config.experts
        self.config = experts
        self.kind = config.mlp
        self.X = experts.n_expert
        self.k = experts.n_active
        self.normalized = experts.normalized
        self.router = Router(config.dim, self.X)
        self.choice = ChoiceBias(self.X) if experts.choice_bias else None
        self.scales = ExpertScales(self.X) if experts.expert_scales else None
        self.norm = None
        if experts.beside_mlp:
            self.router_norm = RMSNorm(config.dim, config.norm_eps)
            self.router_norm.is_float32 = True  # like the router
            self.norm = RMSNorm(config.dim, config.norm_eps)
            # model.Block applies these two: in a split model, the outputs are first summed over the ranks.
            self.term_norm = RMSNorm(config.dim, config.norm_eps)
            self.mlp_term_norm = RMSNorm(config.dim, config.norm_eps)
        hidden = Units("experts", experts.hidden_dim, even=False)
        self.gate_up = ExpertStack(config.dim, 2 * experts.hidden_dim, self.X, [[hidden], [hidden]])
        self.down = ExpertStack(experts.hidden_dim, config.dim, self.X, columns=[hidden])
        self.shared = shared
        self.shared_gate = None if shared is None else Router(config.dim, 1)
        # What a backend.Installer sets: run(x, input_pos, counts) -> y (B,S,D) computes the layer
        self.run: Callable | None = None
        self.max_run_tokens = 0  # it takes passes of up to this many new tokens per row
        self._register()

    def _register(self):
        self.number = next(NUMBERS)
        LAYERS[self.number] = self

    def __setstate__(self, state):  # a copy gets a number of its own
        super().__setstate__(state)
        self._register()

    @property
    def linears(self) -> list[nn.Module]:
        return []  # `blocks` runs the experts by the handle of `run`

    def set_counts(self, counts: Tensor):
        """counts (X+1,) int64: how many tokens have used each expert, and for how many experts a pass
        has read the weights. Passes add to it."""
        # As a buffer, it may change in a CUDA graph.
        self.register_buffer("counts", counts, persistent=False)

    def forward(self, x: Tensor, input_pos: Tensor) -> Tensor:
        """x (B,S,D) to (B,S,D). input_pos (B,S): -1 is padding, which uses no expert."""
        if self.run is not None and x.shape[1] <= self.max_run_tokens:
            return self.run(x, input_pos, self.counts)

        ids, weights = self.choose(x)  # (B,S,k)
        ids = torch.where(input_pos[:, :, None] >= 0, ids, -1)
        self.count(ids)

        few = x.shape[1] <= MAX_DECODE_TOKENS
        run = torch.ops.fastpath.experts.default
        x = self.normed(x)
        y = run(x.flatten(0, 1), ids.flatten(0, 1), weights.flatten(0, 1), self.number, few).view(x.shape)
        if self.shared is not None:
            y = y + self.shared_gate(x).sigmoid() * self.shared(x)
        return y.to(x.dtype)

    def normed(self, x: Tensor) -> Tensor:
        """What the experts multiply."""
        return x if self.norm is None else self.norm(x)

    def router_input(self, x: Tensor) -> Tensor:
        """What the router multiplies, in float32."""
        return x.float() if self.norm is None else self.router_norm(x.float())

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The numbers of the experts of tokens x (B,S,D), (B,S,k) int64, and their weights (B,S,k)
        float32."""
        logits = self.router(self.router_input(x))  # (B,S,X)
        scores = logits.sigmoid() if self.config.scoring == "sigmoid" else logits
        preferences = scores if self.choice is None else scores + self.choice.bias
        # torch.topk says nothing about the order of equal numbers.
        ids = preferences.sort(dim=-1, descending=True, stable=True).indices[..., : self.k]
        if self.config.scoring == "sigmoid":
            weights = scores.gather(-1, ids)
            if self.normalized:
                weights = weights / (weights.sum(-1, keepdim=True) + MIN_SIGMOID_SUM)
        elif self.normalized:
            weights = logits.gather(-1, ids).softmax(-1)
        else:
            weights = logits.softmax(-1).gather(-1, ids)
        if self.scales is not None:
            weights = weights * self.scales.weight[ids]
        return ids, weights * self.config.scale

    def count(self, ids: Tensor):
        """Add the experts of a pass to `counts`."""
        used = torch.where(ids >= 0, ids, self.X).flatten()
        tokens = torch.zeros_like(self.counts).scatter_add(0, used, torch.ones_like(used))
        tokens[self.X] = (tokens[: self.X] > 0).sum()  # replaces the number of padding choices
        self.counts.add_(tokens)


class ChoiceBias(nn.Module):
    """A number for each expert, which is added to its score when experts are chosen."""

    is_float32 = True

    def __init__(self, X: int):
        super().__init__()
        self.bias = empty_parameter(X)  # float32


class ExpertScales(nn.Module):
    """A factor of each expert's weight."""

    is_float32 = True

    def __init__(self, X: int):
        super().__init__()
        self.weight = empty_parameter(X)  # float32


# ---------------------------------------------------------------- the loop over the experts

# torch.compile cannot trace this loop, because which experts run depends on values. So it is an
# operation, and as an operation cannot have a layer as its argument, it gets the layer's number.
LAYERS: weakref.WeakValueDictionary[int, SparseMLP] = weakref.WeakValueDictionary()
NUMBERS = itertools.count()


def run_experts(x: Tensor, ids: Tensor, weights: Tensor, layer: int, few: bool) -> Tensor:
    """The sums of the experts' outputs (M,D) float32 for tokens x (M,D), which use the experts ids
    (M,k), -1 for none, with weights (M,k) float32.

    few: this is a pass of few tokens per row, whose products the kernels compute.
    """
    experts = LAYERS[layer]
    M, k = ids.shape
    order = ids.flatten().argsort(stable=True)  # the choices of a token have the numbers token * k + i
    counts = (ids.flatten() + 1).bincount(minlength=experts.X + 1).tolist()
    start = counts.pop(0)  # the number of padding choices

    outputs = x.new_zeros(M * k, x.shape[1])
    for e, count in enumerate(counts):
        if count == 0:
            continue
        choices = order[start : start + count]
        start += count
        h = x[choices // k]
        if not few:
            # (1,rows,D): the kernels leave passes of many tokens S to torch. See kernels.linear.
            h = F.pad(h, (0, 0, 0, max(0, PREFILL_ROWS - count)))[None]
        gate, up = experts.gate_up.multiply_expert(h, e).chunk(2, dim=-1)
        y = experts.down.multiply_expert(gated(experts.kind, gate, up), e)
        outputs[choices] = y.view(-1, x.shape[1])[:count]

    outputs = outputs.view(M, k, -1)
    total = outputs[:, 0] * weights[:, :1]
    for i in range(1, k):
        total = total + outputs[:, i] * weights[:, i : i + 1]
    return total


define_reference(
    "experts(Tensor x, Tensor ids, Tensor weights, int layer, bool few) -> Tensor",
    run_experts,
    lambda x, *rest: torch.empty_like(x, dtype=torch.float32, memory_format=torch.contiguous_format),
)
