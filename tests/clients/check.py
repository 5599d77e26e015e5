"""Real clients against a real server: content, usage and reasons for the end.

    python check.py http://127.0.0.1:8000 [client ...]

The server has to serve the bundled model. `.ci/clients` starts one and installs the clients."""

import asyncio
import json
import sys
import time

MODEL = "forebay-demo"
ASK = [{"role": "user", "content": "What is 2+2?"}]
WEATHER = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "description": "The name of the city"}},
    "required": ["city"],
}
TOOL = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the current weather for a city.", "parameters": SCHEMA},
}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def same(found, want):
    assert found == want, f"found {found!r}, want {want!r}"


def openai_chat(base):
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0)
    same([model.id for model in client.models.list()], [MODEL])
    whole = client.chat.completions.create(model=MODEL, messages=ASK, logprobs=True, top_logprobs=1)
    same(whole.choices[0].message.content, "2+2=4.")
    same(whole.choices[0].finish_reason, "stop")
    same((whole.usage.prompt_tokens, whole.usage.completion_tokens), (13, 6))
    same("".join(token.token for token in whole.choices[0].logprobs.content), "2+2=4.")

    chunks = list(
        client.chat.completions.create(model=MODEL, messages=ASK, stream=True, stream_options={"include_usage": True})
    )
    same("".join(c.choices[0].delta.content or "" for c in chunks if c.choices), "2+2=4.")
    same(chunks[-1].usage.total_tokens, 19)
    same(chunks[-1].usage.prompt_tokens_details.cached_tokens, 12)
    same([c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason], ["stop"])

    cut = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=2)
    same((cut.choices[0].message.content, cut.choices[0].finish_reason), ("2+", "length"))
    stopped = client.chat.completions.create(model=MODEL, messages=ASK, stop=["="])
    same((stopped.choices[0].message.content, stopped.choices[0].finish_reason), ("2+2", "stop"))

    asked = client.chat.completions.create(model=MODEL, messages=WEATHER, tools=[TOOL])
    call = asked.choices[0].message.tool_calls[0]
    same((call.function.name, json.loads(call.function.arguments)), ("get_weather", {"city": "Paris"}))
    same(asked.choices[0].finish_reason, "tool_calls")
    talk = WEATHER + [
        asked.choices[0].message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": '{"temperature": 21}'},
    ]
    told = client.chat.completions.create(model=MODEL, messages=talk, tools=[TOOL])
    assert told.choices[0].finish_reason == "stop" and told.choices[0].message.content
    assert told.usage.prompt_tokens_details.cached_tokens > 150, told.usage

    # The client's own helpers put the pieces together.
    with client.chat.completions.stream(model=MODEL, messages=WEATHER, tools=[TOOL]) as stream:
        final = stream.get_final_completion()
    same(json.loads(final.choices[0].message.tool_calls[0].function.arguments), {"city": "Paris"})

    schema = {"type": "json_schema", "json_schema": {"name": "person", "strict": True, "schema": PERSON}}
    people = [{"role": "user", "content": "Give me a JSON object with name Anna and age 7."}]
    found = client.chat.completions.create(model=MODEL, messages=people, response_format=schema)
    same(json.loads(found.choices[0].message.content), {"name": "Anna", "age": 7})

    thought = client.chat.completions.create(model=MODEL, messages=ASK, reasoning_effort="high")
    assert thought.choices[0].message.reasoning_content and thought.usage.completion_tokens_details.reasoning_tokens

    for wrong, kind in [
        (dict(temperature=9), openai.BadRequestError),
        (dict(extra_body={"bogus": 1}), openai.BadRequestError),
        (dict(model="other"), openai.NotFoundError),
    ]:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": ASK, **wrong})
        except kind as error:
            assert error.param in ("temperature", "bogus", "model"), error
        else:
            raise AssertionError(f"{wrong} was taken")

    text = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=3, temperature=0)
    same((text.choices[0].text, text.choices[0].finish_reason), (" a time,", "length"))
    pieces = client.completions.create(model=MODEL, prompt="Once upon", max_tokens=3, temperature=0, stream=True)
    same("".join(piece.choices[0].text for piece in pieces), " a time,")


def openai_structured(base):
    import openai
    import pydantic

    class Person(pydantic.BaseModel):
        name: str
        age: int

    client = openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0)
    people = [{"role": "user", "content": "Give me a JSON object with name Anna and age 7."}]
    found = client.chat.completions.parse(model=MODEL, messages=people, response_format=Person)
    same(found.choices[0].message.parsed, Person(name="Anna", age=7))


def openai_async(base):
    import openai

    async def check():
        async with openai.AsyncOpenAI(base_url=base + "/v1", api_key="unused", max_retries=0) as client:
            asked = [client.chat.completions.create(model=MODEL, messages=ASK) for _ in range(3)]
            for whole in await asyncio.gather(*asked):
                same((whole.choices[0].message.content, whole.usage.completion_tokens), ("2+2=4.", 6))
            stream = await client.chat.completions.create(model=MODEL, messages=ASK, stream=True)
            same("".join([c.choices[0].delta.content or "" async for c in stream if c.choices]), "2+2=4.")

    asyncio.run(check())


def openai_batches(base):
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0)
    url = "/v1/chat/completions"
    bodies = {"good": {"model": MODEL, "messages": ASK}, "bad": {"model": MODEL, "messages": ASK, "bogus": 1}}
    lines = [json.dumps({"custom_id": k, "method": "POST", "url": url, "body": v}) for k, v in bodies.items()]
    made = client.files.create(file=("in.jsonl", "\n".join(lines).encode()), purpose="batch")
    same((made.purpose, made.filename, client.files.retrieve(made.id).bytes), ("batch", "in.jsonl", made.bytes))
    assert made.id in [file.id for file in client.files.list()]
    batch = client.batches.create(
        input_file_id=made.id, endpoint=url, completion_window="24h", metadata={"night": "1"}
    )
    began = time.monotonic()
    while batch.status not in ("completed", "failed") and time.monotonic() - began < 60:
        time.sleep(0.05)
        batch = client.batches.retrieve(batch.id)
    same((batch.status, batch.metadata), ("completed", {"night": "1"}))
    counts = batch.request_counts
    same((counts.total, counts.completed, counts.failed), (2, 1, 1))
    output = json.loads(client.files.content(batch.output_file_id).text)
    same((output["custom_id"], output["response"]["body"]["choices"][0]["message"]["content"]), ("good", "2+2=4."))
    error = json.loads(client.files.content(batch.error_file_id).text)
    same((error["custom_id"], error["response"]["status_code"]), ("bad", 400))
    assert batch.id in [one.id for one in client.batches.list(limit=5)]
    try:
        client.batches.cancel(batch.id)
    except openai.ConflictError as error:
        assert "completed" in str(error)
    else:
        raise AssertionError("a batch that is over was cancelled")
    same(client.files.delete(made.id).deleted, True)


def openai_responses(base):
    import openai

    client = openai.OpenAI(base_url=base + "/v1", api_key="unused", max_retries=0)
    whole = client.responses.create(model=MODEL, input="What is 2+2?")
    same((whole.output_text, whole.status), ("2+2=4.", "completed"))
    same((whole.usage.input_tokens, whole.usage.output_tokens), (13, 6))
    with client.responses.stream(model=MODEL, input="What is 2+2?") as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    same((final.output_text, kinds[0], kinds[-1]), ("2+2=4.", "response.created", "response.completed"))
    tool = {"type": "function", "name": "get_weather", "description": TOOL["function"]["description"], "parameters": SCHEMA}
    asked = client.responses.create(model=MODEL, input=WEATHER, tools=[tool])
    call = asked.output[0]
    same((call.type, json.loads(call.arguments)), ("function_call", {"city": "Paris"}))
    talk = WEATHER + [
        call.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
    ]
    told = client.responses.create(model=MODEL, input=talk, tools=[tool])
    assert told.output_text


def anthropic_messages(base):
    import anthropic

    client = anthropic.Anthropic(base_url=base, api_key="unused", max_retries=0)
    whole = client.messages.create(model=MODEL, max_tokens=50, messages=ASK)
    same((whole.content[0].text, whole.stop_reason), ("2+2=4.", "end_turn"))
    same(whole.usage.input_tokens + whole.usage.cache_read_input_tokens, 13)
    same(whole.usage.output_tokens, 6)
    with client.messages.stream(model=MODEL, max_tokens=50, messages=ASK) as stream:
        same("".join(stream.text_stream), "2+2=4.")
        final = stream.get_final_message()
    same((final.stop_reason, final.usage.output_tokens), ("end_turn", 6))
    same(client.messages.count_tokens(model=MODEL, messages=ASK).input_tokens, 13)
    cut = client.messages.create(model=MODEL, max_tokens=2, messages=ASK)
    same((cut.content[0].text, cut.stop_reason), ("2+", "max_tokens"))
    stopped = client.messages.create(model=MODEL, max_tokens=50, messages=ASK, stop_sequences=["="])
    same((stopped.stop_reason, stopped.stop_sequence), ("stop_sequence", "="))

    tool = {"name": "get_weather", "description": TOOL["function"]["description"], "input_schema": SCHEMA}
    with client.messages.stream(model=MODEL, max_tokens=50, messages=WEATHER, tools=[tool]) as stream:
        asked = stream.get_final_message()
    used = asked.content[0]
    same((asked.stop_reason, used.name, used.input), ("tool_use", "get_weather", {"city": "Paris"}))
    result = {"type": "tool_result", "tool_use_id": used.id, "content": "sunny"}
    talk = WEATHER + [
        {"role": "assistant", "content": [block.model_dump(exclude_none=True) for block in asked.content]},
        {"role": "user", "content": [result]},
    ]
    told = client.messages.create(model=MODEL, max_tokens=50, messages=talk, tools=[tool])
    same((told.stop_reason, told.content[0].type), ("end_turn", "text"))

    thinking = {"type": "enabled", "budget_tokens": 1024}
    with client.messages.stream(model=MODEL, max_tokens=1500, messages=ASK, thinking=thinking) as stream:
        thought = stream.get_final_message()
    same([block.type for block in thought.content], ["thinking", "text"])
    try:
        client.messages.create(model="other", max_tokens=5, messages=ASK)
    except anthropic.NotFoundError as error:
        assert "other" in str(error)
    else:
        raise AssertionError("a model that is not there was taken")


def anthropic_async(base):
    import anthropic

    async def check():
        async with anthropic.AsyncAnthropic(base_url=base, api_key="unused", max_retries=0) as client:
            whole = await client.messages.create(model=MODEL, max_tokens=50, messages=ASK)
            same((whole.content[0].text, whole.stop_reason), ("2+2=4.", "end_turn"))
            async with client.messages.stream(model=MODEL, max_tokens=50, messages=ASK) as stream:
                same("".join([text async for text in stream.text_stream]), "2+2=4.")

    asyncio.run(check())


def langchain_chat(base):
    import langchain_openai
    import pydantic

    class Person(pydantic.BaseModel):
        """A person."""

        name: str
        age: int

    chat = langchain_openai.ChatOpenAI(model=MODEL, base_url=base + "/v1", api_key="unused", max_retries=0)
    whole = chat.invoke("What is 2+2?")
    same((whole.content, whole.response_metadata["finish_reason"]), ("2+2=4.", "stop"))
    same((whole.usage_metadata["input_tokens"], whole.usage_metadata["output_tokens"]), (13, 6))
    same("".join(piece.content for piece in chat.stream("What is 2+2?")), "2+2=4.")
    asked = chat.bind_tools([TOOL]).invoke("What is the weather in Paris?")
    same([(call["name"], call["args"]) for call in asked.tool_calls], [("get_weather", {"city": "Paris"})])
    people = "Give me a JSON object with name Anna and age 7."
    found = chat.with_structured_output(Person, method="json_schema").invoke(people)
    same(found, Person(name="Anna", age=7))


def ollama_chat(base):
    import ollama

    client = ollama.Client(host=base)
    same([model.model for model in client.list().models], [MODEL])
    whole = client.chat(model=MODEL, messages=ASK)
    same((whole.message.content, whole.done_reason, whole.eval_count), ("2+2=4.", "stop", 6))
    same("".join(part.message.content for part in client.chat(model=MODEL, messages=ASK, stream=True)), "2+2=4.")
    cut = client.generate(model=MODEL, prompt="What is 2+2?", options={"num_predict": 2})
    same((cut.response, cut.done_reason), ("2+", "length"))
    asked = client.chat(model=MODEL, messages=WEATHER, tools=[TOOL])
    same(asked.message.tool_calls[0].function.arguments, {"city": "Paris"})
    told = client.chat(
        model=MODEL,
        messages=WEATHER + [asked.message, {"role": "tool", "tool_name": "get_weather", "content": "sunny"}],
        tools=[TOOL],
    )
    assert told.message.content
    found = client.chat(
        model=MODEL,
        messages=[{"role": "user", "content": "Give me a JSON object with name Anna and age 7."}],
        format=PERSON,
    )
    same(json.loads(found.message.content), {"name": "Anna", "age": 7})
    assert client.chat(model=MODEL, messages=ASK, think=True).message.thinking
    assert "tools" in client.show(MODEL).capabilities
    try:
        client.chat(model="other", messages=ASK)
    except ollama.ResponseError as error:
        same(error.status_code, 404)
    else:
        raise AssertionError("a model that is not there was taken")


def litellm_chat(base):
    import litellm

    common = dict(model=f"openai/{MODEL}", api_base=base + "/v1", api_key="unused", num_retries=0)
    whole = litellm.completion(messages=ASK, **common)
    same((whole.choices[0].message.content, whole.choices[0].finish_reason), ("2+2=4.", "stop"))
    same(whole.usage.total_tokens, 19)
    pieces = litellm.completion(messages=ASK, stream=True, **common)
    same("".join(piece.choices[0].delta.content or "" for piece in pieces), "2+2=4.")
    asked = litellm.completion(messages=WEATHER, tools=[TOOL], **common)
    same(json.loads(asked.choices[0].message.tool_calls[0].function.arguments), {"city": "Paris"})
    through = litellm.completion(model=f"anthropic/{MODEL}", api_base=base, api_key="unused", messages=ASK, max_tokens=50)
    same(through.choices[0].message.content, "2+2=4.")


CLIENTS = {
    "openai": [openai_chat, openai_structured, openai_async, openai_responses, openai_batches],
    "anthropic": [anthropic_messages, anthropic_async],
    "langchain": [langchain_chat],
    "ollama": [ollama_chat],
    "litellm": [litellm_chat],
}


def main():
    base, names = sys.argv[1].rstrip("/"), sys.argv[2:] or list(CLIENTS)
    failed = 0
    for name in names:
        for check in CLIENTS[name]:
            try:
                check(base)
                print(f"ok      {check.__name__}")
            except Exception as error:  # noqa: BLE001 - every client has errors of its own
                failed += 1
                print(f"FAILED  {check.__name__}: {type(error).__name__}: {error}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
