"""Embeddings: AutoModel's normalized last states are the oracle, for every kind of files; the API; real servers."""

import base64
import json
import re
import shutil
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from conftest import ROOT, random_prompts, save_random
from gguf_writer import bpe_fields, write_gguf
from scripted import ScriptedEngine
from servers import KEY, OPTIONS, running
from starlette.testclient import TestClient
from tokenizers import Tokenizer as Library
from tokenizers import processors

from cli import UserError
from convert_hf_checkpoint import convert
from engine import Engine, EngineOptions, Request, generate
from formats import Quantization
from load import load_model, open_checkpoint
from quantize import quantize_checkpoint
from serve import RunningRequest
from server.api import ServedModel
from server.embeddings import EmbeddingBuilder, parse_embeddings
from server.http_server import make_app
from server.pipe_messages import Settings
from sources.hub import directory_files

TOLERANCE = 1e-5  # of a number of a vector of length 1, in float32
V, END, LENGTH, ROWS, CHUNK = 700, 1, 320, 4, 16
# The name: hidden, heads, K/V heads, a head's size, hidden of the MLP, layers, tied.
SIZES = {
    "causal": (45, 6, 2, 18, 38, 3, True),
    "causal, untied, not normalized": (27, 3, 1, 22, 58, 2, False),
    "body": (46, 5, 1, 26, 62, 2, True),
    "body, untied": (35, 4, 4, 14, 50, 2, False),
    "body of a causal model": (52, 6, 3, 10, 30, 3, True),
    "body, converted": (48, 2, 1, 32, 26, 2, True),
    "gguf": (39, 8, 2, 12, 70, 2, True),
    "gguf, untied": (33, 4, 2, 16, 54, 2, False),
    "gguf, nothing appended": (51, 7, 1, 8, 42, 1, True),
    "gguf, converted": (41, 9, 3, 6, 34, 4, True),
}
TABLES = json.loads((ROOT / "tests" / "data" / "embeddings.json").read_text())
KINDS = ("Transformer", "Pooling", "Normalize")
LAST = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False, "include_prompt": True}


def write_modules(directory, kinds=KINDS, pooling=LAST):
    """The files of sentence-transformers."""
    modules = [{"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else ""} for i, kind in enumerate(kinds)]
    types = [{"type": f"sentence_transformers.{'models' if kind == 'Pooling' else 'x.y'}.{kind}"} for kind in kinds]
    (directory / "modules.json").write_text(json.dumps([a | b for a, b in zip(modules, types)]))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))


def write_embedder(name, folder, byte_level):
    """(AutoModel's model, the path of an embedding model's files)."""
    D, H, K, E, F_, layers, tied = SIZES[name]
    config = transformers.Qwen3Config(
        vocab_size=V, hidden_size=D, num_attention_heads=H, num_key_value_heads=K, head_dim=E, intermediate_size=F_,
        num_hidden_layers=layers, tie_word_embeddings=tied, max_position_embeddings=LENGTH, eos_token_id=END,
    )  # fmt: skip
    causal = save_random(config, folder / "hf", sum(map(ord, name)))
    library = Library.from_file(str(byte_level / "tokenizer.json"))
    path = folder / "hf"
    if "gguf" in name:
        path = folder / "model.gguf"
        fields = bpe_fields(library, "gpt-2", add_eos_token="nothing" not in name)
        write_gguf(path, causal, fields, extra={"qwen3.pooling_type": 3})
    else:
        library.post_processor = processors.TemplateProcessing("$A <|end|>", special_tokens=[("<|end|>", END)])
        if "body" in name:
            shutil.rmtree(path)
            causal.model.save_pretrained(path)
        library.save(str(path / "tokenizer.json"))
        new = {"pooling_mode": "lasttoken"} if "body" in name else LAST
        write_modules(path, KINDS[:2] if "not normalized" in name else KINDS, new)
    if name == "body of a causal model":
        settings = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(settings | {"architectures": ["Qwen3ForCausalLM"]}))
    if "converted" in name:
        path = convert(open_checkpoint(str(path)), folder / "ours", torch.float32)
    return causal.model, path


class Embedder:
    """A model in an engine, as the two processes of a server have it."""

    def __init__(self, path, **options):
        opened = open_checkpoint(str(path))
        self.served = ServedModel(opened.config, opened.tokenizer_files, "tiny", LENGTH)
        self.engine = Engine(load_model(opened, dtype=torch.float32), ROWS, LENGTH, options=EngineOptions(**options))

    def answer(self, inputs, others=(), **fields) -> dict:
        completion = parse_embeddings(self.served, {"input": inputs} | fields)
        generate(self.engine, [*others, *(choice.request for choice in completion.choices)])
        for choice in completion.choices:
            choice.updates = [RunningRequest(choice.text_request).update()]
        self.requests = [choice.request for choice in completion.choices]
        return EmbeddingBuilder(self.served, completion).whole()

    def __call__(self, inputs, others=(), **fields) -> torch.Tensor:
        data = self.answer(inputs, others, **fields)["data"]
        assert [entry["index"] for entry in data] == list(range(len(data)))
        return torch.tensor([entry["embedding"] for entry in data])


@torch.no_grad()
def oracle_vectors(body, prompts, normalize=True, n=None):
    states = torch.stack([body(torch.tensor([prompt])).last_hidden_state[0, -1, :n] for prompt in prompts])
    return F.normalize(states, dim=1) if normalize else states


@pytest.fixture(scope="module")
def made(tmp_path_factory, byte_level):
    """A function of a name of SIZES: AutoModel's model, and the path of its files."""
    found = {}

    def get(name):
        if name not in found:
            found[name] = write_embedder(name, tmp_path_factory.mktemp("embedder"), byte_level)
        return found[name]

    return get


# ---------------------------------------------------------------- vectors


@pytest.mark.parametrize("name", SIZES)
def test_vectors_equal_those_of_automodel(made, name):
    """Of prompts alone, together, beside requests that generate (chunks then end after 16 tokens), and again."""
    body, path = made(name)
    embed = Embedder(path, chunk_tokens=CHUNK, always_chunk="body" in name)  # otherwise, passes have several prompts
    prompts = random_prompts([1, 2, 16, 17, 33, 97, 300, 5, 8], V)
    normalize = "not normalized" not in name
    expected = oracle_vectors(body, prompts, normalize)
    atol = TOLERANCE if normalize else TOLERANCE * float(expected.norm(dim=1).max())
    assert torch.pdist(F.normalize(expected, dim=1)).min() > 0.1  # they differ

    def check(found):
        torch.testing.assert_close(found, expected, atol=atol, rtol=0)

    alone = []
    for prompt in prompts:
        embed.engine.clear()
        alone.append(embed(prompt)[0])
    check(torch.stack(alone))
    embed.engine.clear()
    check(embed(prompts))
    assert not any(request.new_tokens for request in embed.requests)

    texts = random_prompts([40, 21], V, seed=1)
    plain = [Request(text, max_new_tokens=50) for text in texts]
    generate(embed.engine, plain)
    embed.engine.clear()
    others = [Request(text, max_new_tokens=50) for text in texts]
    check(embed(prompts, others))
    assert [other.new_tokens for other in others] == [one.new_tokens for one in plain]
    again = [embed(prompts[i])[0] for i in (6, 6)]
    torch.testing.assert_close(torch.stack(again), expected[[6, 6]], atol=atol, rtol=0)
    assert embed.requests[0].cached_tokens == 299


@pytest.mark.parametrize("name", ["body", "body, untied", "body, converted", "gguf", "gguf, nothing appended"])
def test_texts(made, byte_level, name):
    """The end token follows a text, if the files say so and it is not there already. Ids are taken as they are."""
    body, path = made(name)
    embed = Embedder(path)
    library = Library.from_file(str(byte_level / "tokenizer.json"))
    texts = ["once upon a time", "the \u20ac sea<|end|>", "<|end|>", "x" * 60]
    plain = [library.encode(text, add_special_tokens=False).ids for text in texts]
    appended = [] if "nothing" in name else [END]
    prompts = [ids if ids[-1] == END else ids + appended for ids in plain]
    answer = embed.answer([*texts, plain[0]], encoding_format="base64")
    data = [base64.b64decode(entry["embedding"]) for entry in answer["data"]]
    found = torch.tensor(np.array([np.frombuffer(one, "<f4") for one in data]))
    torch.testing.assert_close(found, oracle_vectors(body, [*prompts, plain[0]]), atol=TOLERANCE, rtol=0)
    count = sum(map(len, prompts)) + len(plain[0])
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count} and answer["object"] == "list"
    embed.engine.clear()
    assert torch.equal(embed([*texts, plain[0]]), found)  # float equals base64 to the bit
    embed.engine.clear()
    short = embed(texts, dimensions=7)
    torch.testing.assert_close(short, oracle_vectors(body, prompts, n=7), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["body", "gguf"])
def test_a_quantized_vector_does_not_depend_on_its_neighbours(made, tmp_path, name):
    """Not in a bit, where the backend promises it. The files of quantize.py say how to pool, too."""
    _, path = made(name)
    ours = convert(open_checkpoint(str(path)), tmp_path / "ours", torch.float32)
    quantize_checkpoint(ours, tmp_path / "int4", Quantization("int4", 32, "int8"))
    embed = Embedder(tmp_path / "int4", chunk_tokens=CHUNK)
    assert embed.engine.model.backend.chunk_invariant
    prompts = random_prompts([1, 17, 33, 65, 150], V)
    alone = []
    for prompt in prompts:
        embed.engine.clear()
        alone.append(embed(prompt)[0])
    for others in ([], [Request(prompts[0], max_new_tokens=90)]):
        embed.engine.clear()
        assert torch.equal(embed(prompts, others), torch.stack(alone))
    assert torch.equal(embed(prompts), torch.stack(alone))  # all but the last token of each is reused
    assert embed.served.tokenizer.embedding == Embedder(path).served.tokenizer.embedding


def test_zeros_and_numbers_that_are_not_finite(made):
    embed = Embedder(made("body")[1])
    norm = embed.engine.model.norm.weight
    with torch.no_grad():
        norm.zero_()
    assert embed([[5, 6]]).eq(0).all()
    norm.data[3] = torch.inf
    other = Request([7, 8], max_new_tokens=0)
    completion = parse_embeddings(embed.served, {"input": [5, 6, 7]})
    request = completion.choices[0].request
    generate(embed.engine, [request, other])
    assert request.finish_reason == "error" and "not finite" in request.error
    assert embed.engine.rows[0].tokens == []


# ---------------------------------------------------------------- files


@pytest.mark.parametrize(("kinds", "pooling", "why"), TABLES["poolings"])
def test_other_poolings_are_refused(made, tmp_path, kinds, pooling, why):
    shutil.copytree(made("body")[1], tmp_path / "hf")
    write_modules(tmp_path / "hf", kinds or KINDS, pooling)
    with pytest.raises(UserError, match=re.escape(why)):
        _ = open_checkpoint(str(tmp_path / "hf")).tokenizer


@pytest.mark.parametrize("text", ["{}x", "[1]", '[{"type": 5}]', '[{"type": "a.Pooling", "path": 5}]'])
def test_a_damaged_list_of_modules(made, tmp_path, text):
    shutil.copytree(made("body")[1], tmp_path / "hf")
    (tmp_path / "hf" / "modules.json").write_text(text)
    with pytest.raises(UserError, match="modules.json is not a list of modules"):
        _ = open_checkpoint(str(tmp_path / "hf")).tokenizer


@pytest.mark.parametrize("kind", [1, 2, 4, "last"])
def test_poolings_of_gguf_files(made, byte_level, tmp_path, kind):
    fields = bpe_fields(Library.from_file(str(byte_level / "tokenizer.json")), "gpt-2")
    model = transformers.Qwen3ForCausalLM(made("gguf")[0].config)
    write_gguf(tmp_path / "a.gguf", model, fields, extra={"qwen3.pooling_type": kind})
    with pytest.raises(UserError, match=f"qwen3.pooling_type = .?{kind}.* is not supported; expected 3"):
        open_checkpoint(str(tmp_path / "a.gguf"))


def test_the_pooling_is_downloaded():
    names = ["config.json", "modules.json", "1_Pooling/config.json", "model.safetensors", "onnx/config.json"]
    assert sorted(directory_files(names)) == sorted(names[:4])


def test_encoders_are_refused(made, tmp_path):
    for name, value in (("architectures", ["BertModel"]), ("is_causal", False), ("use_bidirectional_attention", True)):
        shutil.copytree(made("body")[1], tmp_path / name)
        settings = json.loads((tmp_path / name / "config.json").read_text())
        (tmp_path / name / "config.json").write_text(json.dumps(settings | {name: value}))
        with pytest.raises(UserError, match="BertModel .* is not known|changes what the model computes"):
            open_checkpoint(str(tmp_path / name))


# ---------------------------------------------------------------- bodies


def app_client(path) -> TestClient:
    opened = open_checkpoint(str(path))
    settings = Settings(opened.config, opened.tokenizer_files, "tiny", LENGTH, 1, 1, None)
    return TestClient(make_app(settings, ScriptedEngine(), "127.0.0.1"), "http://localhost")


LONG = [({"input": [5] * 321}, "the prompt has 321 tokens, the context is 320")]
LONG += [({"input": ["a"] * 2049}, "input has 2049 texts, at most 2048 are supported")]


@pytest.mark.parametrize(("fields", "why"), TABLES["bodies"] + LONG)
def test_bodies_that_are_refused(made, fields, why):
    client = app_client(made("body")[1])
    for path in ("/v1/embeddings", "/embeddings"):
        answer = client.post(path, content=json.dumps(fields))
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["type"] == "invalid_request_error" and why in error["message"]
        assert why == "NaN" or error["param"].split("[")[0] in why or error["param"] == "input"


def test_models_without_pooling_or_head(made, tmp_path):
    """The first make no embeddings, the second no text."""
    shutil.copytree(made("causal")[1], tmp_path / "hf")
    (tmp_path / "hf" / "modules.json").unlink()
    answer = app_client(tmp_path / "hf").post("/v1/embeddings", json={"input": "a"})
    message = "the model 'tiny' makes no embeddings: its files name no pooling"
    assert answer.status_code == 400 and answer.json()["error"]["message"].startswith(message)

    client = app_client(made("body, untied")[1])
    question = {"messages": [{"role": "user", "content": "a"}]}
    for path, body in (("completions", {"prompt": "a"}), ("chat/completions", question)):
        answer = client.post(f"/v1/{path}", json=body)
        assert answer.status_code == 400 and "'tiny' has no output head: it makes embeddings only" in answer.text


# ---------------------------------------------------------------- real servers


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]


def floats_of(response) -> torch.Tensor:
    return torch.tensor([entry.embedding for entry in response.data])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "n", "launcher"), [("body", 2048, [sys.executable]), ("causal", 150, TORCHRUN)])
def test_the_official_client(made, tmp_path, name, n, launcher):
    """Its base64, floats, 2,048 inputs beside a request that generates, the log and the metrics."""
    body, path = made(name)
    log = tmp_path / "log"
    with running(log, "--checkpoint_path", path, "--api_key", KEY, *OPTIONS, launcher=launcher) as server:
        prompts = random_prompts([300] + [1 + i % 13 for i in range(n)], V)
        with server.client() as client:
            few = prompts[:3]
            expected = oracle_vectors(body, few)
            found = client.embeddings.create(model="tiny", input=few, encoding_format="float")
            torch.testing.assert_close(floats_of(found), expected, atol=TOLERANCE, rtol=0)
            assert found.model == path.name and found.usage.total_tokens == sum(map(len, few))
            again = client.embeddings.create(model="tiny", input=few, dimensions=3)
            expected = F.normalize(expected[:, :3], dim=1)
            torch.testing.assert_close(floats_of(again), expected, atol=TOLERANCE, rtol=0)

            stream = client.completions.create(model="tiny", prompt=[[7, 8]], max_tokens=15, stream=True)
            many = floats_of(client.embeddings.create(model="tiny", input=prompts[1:]))
            assert sum(len(chunk.choices[0].text) for chunk in stream) > 0
            torch.testing.assert_close(many[::29], oracle_vectors(body, prompts[1::29]), atol=TOLERANCE, rtol=0)
            assert len(many) == n and len(many.unique(dim=0)) > 0.9 * n
        assert server.metric('requests_total{outcome="length"}') == n + 7
        assert server.metric("prompt_tokens_reused_total") >= 299
        line = f"POST /v1/embeddings 200: {sum(map(len, few))} prompt tokens (0 reused), 0 new, length"
        assert "client.embeddings.create(model=" in log.read_text()
        assert line in log.read_text() and "Traceback" not in log.read_text()


@pytest.mark.full
def test_other_projects_clients(made, byte_level, tmp_path):
    why = "pip install -r requirements-clients.txt"
    langchain = pytest.importorskip("langchain_openai", reason=why)
    llama_index = pytest.importorskip("llama_index.embeddings.openai_like", reason=why)
    body, path = made("body")
    library = Library.from_file(str(byte_level / "tokenizer.json"))
    texts = ["once upon a time", "the \u20ac sea", "x" * 60]
    expected = oracle_vectors(body, [library.encode(text, add_special_tokens=False).ids + [END] for text in texts])
    with running(tmp_path / "log", "--checkpoint_path", path, "--api_key", KEY, *OPTIONS) as server:
        url = f"http://127.0.0.1:{server.port}/v1"
        # Its tokens are otherwise those of OpenAI's models.
        own = langchain.OpenAIEmbeddings(base_url=url, api_key=KEY, model="tiny", check_embedding_ctx_length=False)
        other = llama_index.OpenAILikeEmbedding(api_base=url, api_key=KEY, model_name="tiny")
        for vectors in (
            own.embed_documents(texts), [own.embed_query(text) for text in texts],
            other.get_text_embedding_batch(texts), [other.get_query_embedding(text) for text in texts],
        ):  # fmt: skip
            torch.testing.assert_close(torch.tensor(vectors), expected, atol=TOLERANCE, rtol=0)
