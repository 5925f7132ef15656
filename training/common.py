"""What the trainers of drafts share: options, the loss against the teacher, the training loop.

Read `Trainer` first. A batch is a function of its number alone, so a run that was stopped and
resumed gives the same weights as one that was not.
"""

import math
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cli import (
    ArgumentParser,
    HelpFormatter,
    UserError,
    first_line,
    number,
    positive,
    print_status,
    progress_bar,
)
from model import soft_cap

WARM_UP = 100  # steps in which the learning rate rises
SAVE_S = 60.0  # seconds between two writes of the state file
REPORTS = 20  # how often a run reports the quality of the draft
# Positions whose logits are computed at a time: with 10,000 columns, they fit in the caches of a processor
ROWS = 256

# ---------------------------------------------------------------- the options


def make_parser(description: str) -> ArgumentParser:
    """A parser with the options that all trainers have."""
    parser = ArgumentParser(description=description, formatter_class=HelpFormatter)
    add = parser.add_argument
    add(
        "--checkpoint_path",
        help="the target, in any format, as for generate.py; default: SmolLM2-135M-Instruct",
    )
    add("--text", type=Path, default=Path("self_text.jsonl"), help="a file of training/self_text.py")
    add("--epochs", type=positive, default=3, help="passes over the text")
    seed = number(int, "between 0 and 2^31", lambda n: 0 <= n <= 2**31)
    add(
        "--seed",
        type=seed,
        default=0,
        help="seed of the initial weights and of the order of the sequences",
    )
    return parser


# ---------------------------------------------------------------- the loss


def kl_divergence(
    x: Tensor, matrix: Tensor, teacher_x: Tensor, teacher_matrix: Tensor, bias: Tensor | int = 0, softcap=None
):
    """The mean over n positions of KL(p_target || p_draft), where p_draft is
    softmax(x @ matrix.T + bias), and p_target is softmax(teacher_x @ teacher_matrix.T + bias).

    x (n,D) and matrix (m,D) may need gradients; teacher_x (n,D'), teacher_matrix (m,D') and bias
    (m,) or 0 are constants. With a sampled vocabulary, bias gives each sampled token the weight
    of those that were not sampled. softcap: of the products, which are computed in bfloat16.
    """
    columns = matrix.to(torch.bfloat16).t()  # (D,m)
    teacher_columns = teacher_matrix.to(torch.bfloat16).t()
    total = torch.zeros(())
    for rows, teacher_rows in zip(x.split(ROWS), teacher_x.split(ROWS)):
        draft = soft_cap((rows.to(torch.bfloat16) @ columns).float(), softcap) + bias  # (ROWS,m)
        target = soft_cap((teacher_rows.to(torch.bfloat16) @ teacher_columns).float(), softcap) + bias
        total = total + F.kl_div(draft.log_softmax(-1), target.log_softmax(-1), reduction="sum", log_target=True)
    return total / len(x)


# ---------------------------------------------------------------- the training loop


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Linear warm-up for WARM_UP steps (or a tenth of a short run), then cosine decay to 0."""
    warm_up = min(WARM_UP, steps // 10 + 1)
    if step < warm_up:
        return peak * (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


class Trainer:
    """Trains the parameters of a module that need gradients with AdamW, for a number of steps that
    is known in advance.

    state_path: the file from which an interrupted run resumes. settings: everything that determines
    the result, as plain values; a state file with other settings is refused.
    """

    def __init__(self, module: nn.Module, steps: int, peak: float, state_path: Path, settings: dict):
        self.parameters = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), lr=peak, betas=(0.9, 0.95), weight_decay=0.01, fused=True
        )
        self.step = 0
        self.steps = steps
        self.peak = peak  # the largest learning rate
        self.state_path = state_path
        self.settings = settings | {"steps": steps, "peak": peak}
        self.resume()

    def resume(self):
        if not self.state_path.exists():
            return
        try:
            state = torch.load(self.state_path, weights_only=True)
            others = [name for name, value in self.settings.items() if state["settings"].get(name) != value]
        except Exception as error:  # torch raises errors of many types for a damaged file
            raise UserError(
                f"{self.state_path} cannot be read as the state of a training run: {first_line(error)}"
            ) from None
        if others:
            raise UserError(f"{self.state_path} belongs to a run with another {others[0]}; delete it for a new run")
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(state["parameters"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        print_status(f"resuming at step {self.step} of {self.steps} from {self.state_path}")

    def save(self):
        """Write the state file. It is replaced when the new one is complete."""
        part = self.state_path.with_name(self.state_path.name + ".part")
        state = {"settings": self.settings, "step": self.step, "parameters": self.parameters}
        torch.save(state | {"optimizer": self.optimizer.state_dict()}, part)
        part.replace(self.state_path)

    def run(self, loss: Callable[[int], Tensor], report: Callable[[], str]):
        """Train to the end.

        loss(step) computes the loss of a batch that depends on nothing but `step`. report()
        describes the quality of the draft in a few words.
        """
        every = max(1, self.steps // REPORTS)
        saved = time.monotonic()
        losses = []  # those since the last report
        with progress_bar(self.steps, "training", " steps") as bar:
            bar.update(self.step)
            while self.step < self.steps:
                losses.append(self.take_step(loss(self.step)))
                bar.update(1)
                if self.step % every == 0 or self.step == self.steps:
                    mean = sum(losses) / len(losses)
                    losses = []
                    bar.write(f"step {self.step} of {self.steps}: loss {mean:.3f}, {report()}")
                if time.monotonic() - saved > SAVE_S or self.step == self.steps:
                    self.save()
                    saved = time.monotonic()

    def take_step(self, loss: Tensor) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.steps, self.peak)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters.values(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()
