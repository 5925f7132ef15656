"""The harness's own model class for transformers is the oracle, for single requests and for whole tasks."""

import json
import subprocess
import sys
from functools import partial

import lm_eval.tasks
import pytest
import torch
from conftest import ROOT, tiny_chat_llama
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from texts import TEMPLATE, strings

from cli import UserError
from convert_hf_checkpoint import convert
from engine import Engine, Request, generate
from evaluate import harness_model, run_tasks
from load import load_model
from sampling import SamplingParams
from sources.opening import open_hf
from text.chat_template import ChatTemplate
from text.tokenizer import Tokenizer

CONTEXT = 90  # tokens


@pytest.fixture(scope="module")
def both(tmp_path_factory, byte_level):
    """(our model for the harness, the harness's own class, our directory) of a tiny model with a chat template."""
    folder = tmp_path_factory.mktemp("harness")
    oracle, library = tiny_chat_llama(folder / "hf", byte_level, CONTEXT, TEMPLATE, seed=0)
    ours = convert(open_hf(folder / "hf"), folder / "ours", torch.float32)
    tokenizer = Tokenizer(ours)
    model = harness_model(load_model(ours, dtype=torch.float32), tokenizer, 3, ChatTemplate(ours, tokenizer))
    return model, HFLM(oracle, tokenizer=library, batch_size=3, device="cpu", dtype="float32"), ours


def instances(kind, requests):
    return [Instance(kind, {}, args, i) for i, args in enumerate(requests)]


def test_loglikelihood(both):
    """Empty contexts, contexts that end with spaces, and some that are too long for the model."""
    texts = strings(n=60)
    pairs = [(a, " " + b) for a, b in zip(texts, texts[1:]) if b.strip() and len(b) < 60]
    pairs += [("", texts[3] + "x"), ("word  ", "next"), ("far " * 200, "end"), ("one two three", " four")]
    ours, theirs = (model.loglikelihood(instances("loglikelihood", pairs)) for model in both[:2])
    assert len(ours) > 40
    for (mine, same), (expected, greedy) in zip(ours, theirs):
        assert mine == pytest.approx(expected, abs=2e-3) and same == greedy


def test_greedy_continuations_are_recognized(both):
    context = both[0].tok_encode("once upon")
    request = Request(context, SamplingParams(temperature=0.0), 20)
    generate(Engine(both[0].model, 1, 40), [request])
    ids = request.new_tokens
    found = both[0]._loglikelihood_tokens([(None, context, ids), (None, context, ids[:-1] + [ids[-1] ^ 1])])
    assert [greedy for _, greedy in found] == [True, False]


def test_rolling(both):
    texts = [(text,) for text in [*strings(n=20), "a long one, " * 60] if text]
    ours, theirs = (model.loglikelihood_rolling(instances("loglikelihood_rolling", texts)) for model in both[:2])
    assert ours == pytest.approx(theirs, abs=5e-3)


@pytest.mark.slow
def test_generate_until(both):
    """Several settings in one call, contexts that are truncated on the left, and stop strings."""
    contexts = [text for text in strings(n=14) if text] + ["too long for it " * 30]
    requests = [(text, {"until": ["e", "\n\n"], "max_gen_toks": 12}) for text in contexts]
    requests += [(text, {"until": "a", "max_gen_toks": 20, "do_sample": False}) for text in contexts]
    requests += [(text, {"max_new_tokens": 9}) for text in contexts]
    ours, theirs = (model.generate_until(instances("generate_until", requests)) for model in both[:2])
    assert ours == theirs and len(set(ours)) > 10


def test_sampled_answers_can_be_repeated(both):
    settings = {"until": [], "max_gen_toks": 12, "temperature": 2.0, "do_sample": True}
    requests = instances("generate_until", [("same", settings)] * 3)
    once = both[0].generate_until(requests)
    assert once == both[0].generate_until(requests) and len(set(once)) == 3
    likeliest = both[0].generate_until(instances("generate_until", [("same", settings | {"top_p": 0.0})] * 3))
    assert len(set(likeliest)) == 1


def test_empty_and_odd_requests(both):
    model = both[0]
    [text] = model.generate_until(instances("generate_until", [("", {"until": [], "max_gen_toks": 5})]))
    assert isinstance(text, str)
    assert model.loglikelihood(instances("loglikelihood", [("some context", "")])) == [(0.0, True)]
    settings = {"until": [], "max_gen_toks": 5}
    for kind, request, why in (
        ("loglikelihood", ("x", " far" * 300), "tokens at once, but the context holds 90"),
        ("generate_until", ("x", settings | {"max_gen_toks": 0}), "a task asks for 0 new tokens"),
        ("generate_until", ("x", settings | {"max_gen_toks": CONTEXT}), "but the context allows 1 to 89"),
        ("generate_until", ("x", settings | {"temperature": -1.0}), "temperature must be a number from 0"),
    ):
        with pytest.raises((UserError, ValueError), match=why):  # run_tasks turns both into one line
            getattr(model, kind)(instances(kind, [request]))


TASKS = {
    "choice": {
        "output_type": "multiple_choice", "doc_to_text": "{{q}}", "doc_to_choice": "{{c}}", "doc_to_target": "{{a}}",
        "metric_list": [{"metric": "acc"}, {"metric": "acc_norm"}],
    },
    "perplexity": {
        "output_type": "loglikelihood_rolling", "doc_to_text": "", "doc_to_target": "{{q}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    },
    "answer": {
        "output_type": "generate_until", "doc_to_text": "{{q}}", "doc_to_target": "{{c[a]}}",
        "generation_kwargs": {"until": ["\n"], "max_gen_toks": 8}, "metric_list": [{"metric": "bleu"}],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def task_files(tmp_path_factory):
    """Tasks with a data set in a file, which need no network."""
    folder, texts = tmp_path_factory.mktemp("tasks"), [text for text in strings(n=80) if len(text.split()) > 1]
    with open(folder / "data.jsonl", "w") as file:
        for i, text in enumerate(texts[:12]):
            words = text.split()[:7]
            choices = [words[-1], words[0] + "ing", "the"]
            file.write(json.dumps({"q": " ".join(words[:-1]), "c": choices, "a": i % 3}) + "\n")
    paths = []
    for name, fields in TASKS.items():
        data = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}}}
        task = {"task": f"local_{name}", "test_split": "test"} | data | fields
        paths.append(folder / f"{name}.yaml")
        paths[-1].write_text(json.dumps(task))  # JSON is YAML too
    return [str(path) for path in paths]


@pytest.mark.slow
def test_tasks_give_the_same_metrics(both, task_files, monkeypatch, tmp_path):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    # Without an index of the thousands of tasks that come with the harness, which takes seconds to make.
    monkeypatch.setattr(lm_eval.tasks, "TaskManager", partial(lm_eval.tasks.TaskManager, include_defaults=False))
    ours, theirs = (run_tasks(model, task_files, 2, None, True) for model in both[:2])
    assert ours.keys() == theirs.keys() == {"local_choice", "local_perplexity", "local_answer"}
    for task in ours:
        assert ours[task] == pytest.approx(theirs[task], rel=1e-3, nan_ok=True)
    assert {"acc", "acc_stderr", "acc_norm"} <= ours["local_choice"].keys()


@pytest.mark.full
def test_the_command(both, task_files, tmp_path):
    def run(*args):
        command = [sys.executable, str(ROOT / "evaluate.py"), "--checkpoint_path", str(both[2]), *args]
        return subprocess.run(command, capture_output=True, text=True)

    (tmp_path / "helper.py").write_text("import evaluate\nkeep = evaluate.load and (lambda data: data)\n")
    (tmp_path / "local.yaml").write_text(f"include: {task_files[0]}\nprocess_docs: !function helper.keep\n")
    done = run("--json", "--dtype", "float32", "--limit", "5", "--tasks", str(tmp_path / "local.yaml"), *task_files[1:])
    assert done.returncode == 0, done.stderr
    tasks = json.loads(done.stdout)["tasks"]
    assert tasks["local_choice"]["acc"] in (0.0, 0.2, 0.4, 0.6, 0.8, 1.0) and len(tasks) == 3
    for args, why in (
        (["--tasks", "no_such_task_at_all"], "no_such_task_at_all"),
        (["--tasks", str(tmp_path / "missing.yaml")], "missing.yaml"),
        ([], "give --text or --tasks"),
        (["--tasks", task_files[0], "--reference_checkpoint_path", "x"], "needs a --text"),
    ):
        bad = run(*args)
        assert bad.returncode == 2 and why in bad.stderr.splitlines()[-1], bad.stderr
        assert bad.stdout == "" and "Traceback" not in bad.stderr
