"""The clients that people use, with two real models: plain answers, streams, tools and structured answers.

The clients are in requirements-clients.txt; tests of those that are not installed are skipped. docs/serving.md
names them. With FASTPATH_CLIENTS_URL=http://127.0.0.1:8080/v1, the same tests run with the server that is there.
"""

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from conftest import ROOT
from pydantic import BaseModel
from servers import running

pytestmark = pytest.mark.full
MODELS = ["qwen2.5-coder-1.5b", "qwen2.5-coder-0.5b"]
OTHER_URL = os.environ.get("FASTPATH_CLIENTS_URL")
QUESTION = "What is the capital of France? Answer in one short sentence."
WEATHER = "What is the weather in Paris? Call the tool get_weather."
REPORT = "Sunny, 21 degrees."
FACTS = "Paris is a city in France with 2100000 inhabitants. Give these facts about the city as JSON."
# What to add where no schema helps the model.
KEYS = " Use the keys name, country and inhabitants."
EXAMPLE = ' Write it like this: {"name": "Berlin", "country": "Germany", "inhabitants": 3700000}'
TOKENS, SHORT = 120, 30  # of an answer; a limit, since a grammar lets a weak model write spaces for ever
SETTINGS = {"temperature": 0, "max_tokens": TOKENS}


class City(BaseModel):
    """Facts about a city."""

    name: str
    country: str
    inhabitants: int


def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    assert isinstance(city, str)
    return REPORT


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "get_weather", "description": "Tell the weather in a city.", "parameters": PARAMETERS}
TOOL = {"type": "function", "function": FUNCTION}


@dataclass(frozen=True)
class Address:
    """A server, as clients are told of it."""

    url: str  # with /v1
    model: str


@pytest.fixture(scope="module", params=["other"] if OTHER_URL else MODELS)
def server(request, tmp_path_factory):
    """The Address of a server with one of the models."""
    openai = client_package("openai")

    def address(url):
        return Address(url, openai.OpenAI(base_url=url, api_key="unused").models.list().data[0].id)

    if OTHER_URL:
        yield address(OTHER_URL)
        return
    command = [sys.executable, str(ROOT / "benchmarks" / "fetch_models.py"), request.param]
    path = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    log = tmp_path_factory.mktemp("clients") / "log"
    with running(log, "--checkpoint_path", path, "--max_batch_size", 4) as ours:
        yield address(f"http://127.0.0.1:{ours.port}/v1")


def client_package(name: str):
    return pytest.importorskip(name, reason=f"{name} is missing: pip install -r requirements-clients.txt")


def ask(text: str) -> list[dict]:
    return [{"role": "user", "content": text}]


def tells_report(server, text: str) -> bool:
    """Whether an answer tells what get_weather has returned. The smaller model repeats its call instead."""
    return "21" in text or ("0.5b" in server.model.lower() and "get_weather" in text)


def is_paris(city) -> bool:
    """Whether a City, or the same as a dictionary, has the facts."""
    city = city if isinstance(city, dict) else city.model_dump()
    return (city["name"], city["country"], city["inhabitants"]) == ("Paris", "France", 2_100_000)


# ---------------------------------------------------------------- OpenAI


@pytest.fixture
def openai_client(server):
    return client_package("openai").OpenAI(base_url=server.url, api_key="unused", max_retries=0, timeout=120)


@pytest.fixture
def chat(server, openai_client):
    """chat(text, **fields) -> the response of /v1/chat/completions."""

    def create(text, **fields):
        body = {"model": server.model, "messages": ask(text), **SETTINGS} | fields
        return openai_client.chat.completions.create(**body)

    return create


def test_openai_streamed(chat):
    chunks = list(chat(QUESTION, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert "Paris" in text and chunks[-1].usage.completion_tokens >= 3
    whole = chat(QUESTION)
    assert text == whole.choices[0].message.content and whole.choices[0].finish_reason == "stop"
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens > 20


def test_openai_completion(server, openai_client):
    response = openai_client.completions.create(
        model=server.model, prompt="The capital of France is", max_tokens=SHORT, temperature=0, logprobs=2
    )
    assert "Paris" in response.choices[0].text and len(response.choices[0].logprobs.token_logprobs) > 3


def test_openai_several_answers_with_logprobs(chat):
    response = chat(QUESTION, n=2, temperature=0.7, seed=1, logprobs=True, top_logprobs=2)
    assert [choice.index for choice in response.choices] == [0, 1]
    for choice in response.choices:
        tokens = "".join(token.token for token in choice.logprobs.content)
        assert tokens.startswith(choice.message.content)  # some servers list the token that ends the answer, too
        assert all(len(token.top_logprobs) == 2 for token in choice.logprobs.content)


def test_openai_tools(server, chat):
    message = chat(WEATHER, tools=[TOOL]).choices[0].message
    assert message.tool_calls, message.content
    call = message.tool_calls[0]
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    result = {"role": "tool", "tool_call_id": call.id, "content": REPORT}
    answer = chat("", messages=[*ask(WEATHER), message, result], tools=[TOOL]).choices[0].message
    assert tells_report(server, answer.content)


def test_openai_tools_streamed(server, openai_client):
    with openai_client.chat.completions.stream(
        model=server.model, messages=ask(WEATHER), tools=[TOOL], **SETTINGS
    ) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert "tool_calls.function.arguments.delta" in kinds
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}], ids=str)
def test_openai_tools_required(chat, choice):
    other = {"type": "function", "function": {"name": "get_time", "parameters": PARAMETERS}}
    fields = {"tools": [TOOL, other], "tool_choice": choice, "parallel_tool_calls": False}
    (call,) = chat("How are you in Paris?", **fields).choices[0].message.tool_calls
    assert list(json.loads(call.function.arguments)) == ["city"] and call.function.name.startswith("get_")


def test_openai_structured(server, openai_client):
    body = {"model": server.model, "messages": ask(FACTS), "response_format": City, **SETTINGS}
    assert is_paris(openai_client.chat.completions.parse(**body).choices[0].message.parsed)
    with openai_client.chat.completions.stream(**body) as stream:
        assert is_paris(stream.get_final_completion().choices[0].message.parsed)


def test_openai_json_object(chat):
    text = chat(FACTS, response_format={"type": "json_object"}).choices[0].message.content
    assert "Paris" in json.dumps(json.loads(text))


@pytest.fixture
def responses(server, openai_client):
    """The `responses` of OpenAI's client, with its arguments."""
    return openai_client.responses, {"model": server.model, "max_output_tokens": TOKENS, "temperature": 0}


FLAT_TOOL = {"type": "function"} | FUNCTION


def test_openai_responses_streamed(responses):
    api, settings = responses
    with api.stream(input=QUESTION, **settings) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert "Paris" in text and stream.get_final_response().output_text == text


def test_openai_responses_next_turn(responses):
    api, settings = responses
    first = api.create(input=QUESTION, **settings)
    assert "Paris" in first.output_text and first.status == "completed"
    second = api.create(input="Repeat your answer.", previous_response_id=first.id, **settings)
    assert "Paris" in second.output_text
    assert second.usage.input_tokens_details.cached_tokens >= first.usage.input_tokens


def test_openai_responses_tools(server, responses):
    api, settings = responses
    response = api.create(input=WEATHER, tools=[FLAT_TOOL], **settings)
    call = next(item for item in response.output if item.type == "function_call")
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Paris"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": REPORT}
    turns = [*ask(WEATHER), *response.output, result]
    answer = api.create(input=turns, tools=[FLAT_TOOL], **settings)
    assert tells_report(server, answer.output_text or answer.output[0].name)


def test_openai_responses_tools_streamed(responses):
    api, settings = responses
    with api.stream(input=WEATHER, tools=[FLAT_TOOL], tool_choice="required", **settings) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_response().output[-1]
    assert "response.function_call_arguments.delta" in kinds and json.loads(call.arguments) == {"city": "Paris"}


def test_openai_responses_structured(responses):
    api, settings = responses
    assert is_paris(api.parse(input=FACTS, text_format=City, **settings).output_parsed)
    with api.stream(input=FACTS, text_format=City, **settings) as stream:
        assert is_paris(stream.get_final_response().output_parsed)


# ---------------------------------------------------------------- Anthropic


@pytest.fixture
def messages(server):
    """The `messages` of Anthropic's client, with its arguments."""
    client = client_package("anthropic").Anthropic(
        base_url=server.url.removesuffix("/v1"), api_key="unused", max_retries=0, timeout=120
    )
    return client.messages, {"model": server.model, "max_tokens": TOKENS, "extra_body": {"temperature": 0}}


CLAUDE_TOOL = {"name": "get_weather", "description": FUNCTION["description"], "input_schema": PARAMETERS}


def test_anthropic_whole_and_streamed(messages):
    api, settings = messages
    with api.stream(messages=ask(QUESTION), **settings) as stream:
        text = "".join(stream.text_stream)
    assert "Paris" in text and stream.get_final_message().stop_reason == "end_turn"
    message = api.create(messages=ask(QUESTION), system="You know geography.", **settings)
    assert "Paris" in message.content[0].text and message.stop_reason == "end_turn"
    assert message.usage.output_tokens > 2


def test_anthropic_tools(server, messages):
    api, settings = messages
    message = api.create(messages=ask(WEATHER), tools=[CLAUDE_TOOL], **settings)
    assert message.stop_reason == "tool_use", message.content
    call = next(block for block in message.content if block.type == "tool_use")
    assert (call.name, call.input) == ("get_weather", {"city": "Paris"})
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call.id, "content": REPORT}]}
    turns = [*ask(WEATHER), {"role": "assistant", "content": message.content}, result]
    assert tells_report(server, api.create(messages=turns, tools=[CLAUDE_TOOL], **settings).content[0].text)


def test_anthropic_tools_streamed(messages):
    api, settings = messages
    with api.stream(messages=ask(WEATHER), tools=[CLAUDE_TOOL], tool_choice={"type": "any"}, **settings) as stream:
        kinds = {event.type for event in stream}
        call = stream.get_final_message().content[-1]
    assert "input_json" in kinds and (call.name, call.input) == ("get_weather", {"city": "Paris"})


def test_anthropic_structured(messages):
    api, settings = messages
    assert is_paris(api.parse(messages=ask(FACTS), output_format=City, **settings).parsed_output)


def test_anthropic_count_tokens(messages):
    api, settings = messages
    counted = api.count_tokens(model=settings["model"], messages=ask(QUESTION), tools=[CLAUDE_TOOL]).input_tokens
    usage = api.create(messages=ask(QUESTION), tools=[CLAUDE_TOOL], **settings).usage
    assert counted == usage.input_tokens + (usage.cache_read_input_tokens or 0)


# ---------------------------------------------------------------- LangChain


@pytest.fixture
def langchain(server):
    package = client_package("langchain_openai")
    return package.ChatOpenAI(base_url=server.url, api_key="unused", model=server.model, max_retries=0, **SETTINGS)


def test_langchain_tools(server, langchain):
    from langchain_core.messages import HumanMessage, ToolMessage

    model = langchain.bind_tools([get_weather])
    message = model.invoke(WEATHER)
    (call,) = message.tool_calls
    assert (call["name"], call["args"]) == ("get_weather", {"city": "Paris"})
    chunks = list(model.stream(WEATHER))
    streamed = sum(chunks[1:], chunks[0])
    assert [(one["name"], one["args"]) for one in streamed.tool_calls] == [("get_weather", {"city": "Paris"})]
    result = ToolMessage(REPORT, tool_call_id=call["id"])
    assert tells_report(server, model.invoke([HumanMessage(WEATHER), message, result]).content)


@pytest.mark.parametrize("method", ["json_schema", "function_calling", "json_mode"])
def test_langchain_structured(langchain, method):
    keys = KEYS if method == "json_mode" else ""
    assert is_paris(langchain.with_structured_output(City, method=method).invoke(FACTS + keys))


# ---------------------------------------------------------------- LlamaIndex


@pytest.fixture
def llama_index(server):
    """llama_index(**options) -> an LLM."""
    package = client_package("llama_index.llms.openai_like")

    def make(**options):
        address = {"api_base": server.url, "api_key": "unused", "model": server.model, "max_retries": 0}
        chat = {"is_chat_model": True, "context_window": 4096, "is_function_calling_model": True}
        return package.OpenAILike(**address, **chat, **SETTINGS, **options)

    return make


def test_llama_index_tools(llama_index):
    from llama_index.core.tools import FunctionTool

    tool = FunctionTool.from_defaults(fn=get_weather)
    response = llama_index().predict_and_call([tool], WEATHER)
    assert response.response == REPORT


@pytest.mark.parametrize("by", ["function", "schema"])
def test_llama_index_structured(llama_index, by):
    model = llama_index(should_use_structured_outputs=by == "schema")
    assert is_paris(model.as_structured_llm(City).complete(FACTS).raw)


# ---------------------------------------------------------------- Pydantic AI


@pytest.fixture
def agent(server):
    """agent(**options) -> an Agent."""
    ai = client_package("pydantic_ai")
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel(server.model, provider=OpenAIProvider(base_url=server.url, api_key="unused"))
    return lambda **options: ai.Agent(model, model_settings=SETTINGS, **options)


def test_pydantic_ai_tools(server, agent):
    result = agent(tools=[get_weather]).run_sync(WEATHER)
    assert tells_report(server, result.output) and REPORT in str(result.all_messages())


@pytest.mark.parametrize("kind", ["ToolOutput", "NativeOutput", "PromptedOutput"])
def test_pydantic_ai_structured(agent, kind):
    output = getattr(client_package("pydantic_ai"), kind)(City)
    example = EXAMPLE if kind == "PromptedOutput" else ""
    assert is_paris(agent(output_type=output).run_sync(FACTS + example).output)


# ---------------------------------------------------------------- instructor


@pytest.mark.parametrize("mode", ["TOOLS", "JSON", "JSON_SCHEMA"])
@pytest.mark.parametrize("streamed", [False, True], ids=["whole", "streamed"])
def test_instructor(server, openai_client, mode, streamed):
    instructor = client_package("instructor")
    create = instructor.from_openai(openai_client, mode=instructor.Mode[mode]).chat.completions
    body = {"model": server.model, "messages": ask(FACTS), "response_model": City, "max_retries": 0, **SETTINGS}
    if not streamed:
        assert is_paris(create.create(**body))
        return
    *partial, last = create.create_partial(**body)
    assert len(partial) > 2 and is_paris(last)


# ---------------------------------------------------------------- LiteLLM


@pytest.fixture
def completion(server, monkeypatch):
    """completion(text, **fields) -> LiteLLM's response."""
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else it downloads a list of prices
    litellm = client_package("litellm")

    def complete(text, **fields):
        address = {"model": f"openai/{server.model}", "api_base": server.url, "api_key": "unused", "max_retries": 0}
        return litellm.completion(messages=ask(text), **address, **SETTINGS, **fields)

    return complete


def test_litellm_tools_and_structured(completion):
    (call,) = completion(WEATHER, tools=[TOOL], tool_choice="auto").choices[0].message.tool_calls
    assert call.function.name == "get_weather" and json.loads(call.function.arguments) == {"city": "Paris"}
    assert is_paris(json.loads(completion(FACTS, response_format=City).choices[0].message.content))


# ---------------------------------------------------------------- llm


@pytest.fixture
def llm_model(server, tmp_path, monkeypatch):
    """The server's model in the command line's library, as extra-openai-models.yaml describes it."""
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    llm = client_package("llm")
    described = {"model_id": "ours", "model_name": server.model, "api_base": server.url}
    described |= {"supports_schema": True, "supports_tools": True}
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps([described]))  # which is YAML, too
    return llm.get_model("ours")


def test_llm_tools_and_structured(server, llm_model):
    results = []
    hear = {"after_call": lambda tool, call, result: results.append(result.output)}
    chain = llm_model.chain(WEATHER, tools=[get_weather], options=SETTINGS, **hear)
    assert tells_report(server, chain.text()) and results == [REPORT]
    assert is_paris(json.loads(llm_model.prompt(FACTS, schema=City, stream=False, **SETTINGS).text()))


# ---------------------------------------------------------------- plain answers of the clients that have one way to ask


async def pydantic_ai_pieces(agent) -> list[str]:
    async with agent().run_stream(QUESTION) as stream:
        return [text async for text in stream.stream_text(delta=True, debounce_by=None)]


PLAIN = {  # fixture: a whole answer, and the pieces of a streamed one
    "langchain": (
        lambda model: model.invoke(QUESTION).content,
        lambda model: [one.content for one in model.stream(QUESTION)],
    ),
    "llama_index": (
        lambda make: make().complete(QUESTION).text,
        lambda make: [piece.delta or "" for piece in make().stream_complete(QUESTION)],
    ),
    "agent": (lambda agent: agent().run_sync(QUESTION).output, lambda agent: asyncio.run(pydantic_ai_pieces(agent))),
    "completion": (
        lambda complete: complete(QUESTION).choices[0].message.content,
        lambda complete: [x.choices[0].delta.content or "" for x in complete(QUESTION, stream=True)],
    ),
    "llm_model": (
        lambda model: model.prompt(QUESTION, stream=False, **SETTINGS).text(),
        lambda model: list(model.prompt(QUESTION, stream=True, **SETTINGS)),
    ),
}


@pytest.mark.parametrize("client", PLAIN)
def test_plain_and_streamed_answers(request, server, client):
    whole, pieces = PLAIN[client]
    made = request.getfixturevalue(client)
    assert "Paris" in whole(made)
    streamed = pieces(made)
    assert len(streamed) > 2 and "Paris" in "".join(streamed)
