"""Agents of third parties as programs for `rollout.agent`: `python agents.py openai|anthropic|smolagents`.

They use what the episode's environment says: the address, the key and the task. Each leaves the last text
or code that the model wrote as its answer.
"""

import json
import os
import sys

CODE = {
    "type": "object",
    "properties": {"code": {"type": "string"}},
    "required": ["code"],
}


def openai_sdk(instruction):
    """Chat completions with a tool whose result the model sees before it goes on."""
    import openai

    client = openai.OpenAI(max_retries=0, timeout=120)
    tools = [{"type": "function", "function": {"name": "run_python", "parameters": CODE}}]
    messages = [{"role": "user", "content": instruction}]
    said = ""
    for _ in range(2):
        answer = client.chat.completions.create(
            model="gpt-9", messages=messages, tools=tools, max_tokens=60
        )
        message = answer.choices[0].message
        messages.append(message)
        said = message.content or said
        for call in message.tool_calls or []:
            said = json.loads(call.function.arguments).get("code", said)
            messages.append({"role": "tool", "tool_call_id": call.id, "content": "ok"})
        messages.append({"role": "user", "content": "Go on."})
    return said


def anthropic_sdk(instruction):
    """Messages with a tool, the second time streamed."""
    import anthropic

    client = anthropic.Anthropic(max_retries=0, timeout=120)
    tools = [{"name": "run_python", "description": "Runs Python.", "input_schema": CODE}]
    messages = [{"role": "user", "content": instruction}]
    request = dict(model="claude-9", max_tokens=60, tools=tools)
    said = ""
    for turn in range(2):
        if turn == 0:
            answer = client.messages.create(**request, messages=messages)
        else:
            with client.messages.stream(**request, messages=messages) as stream:
                answer = stream.get_final_message()
        results = []
        for block in answer.content:
            if block.type == "text":
                said = block.text
            if block.type == "tool_use":
                said = block.input.get("code", said)
                results.append({"type": "tool_result", "tool_use_id": block.id, "content": "ok"})
        if not answer.content:
            break
        messages.append({"role": "assistant", "content": answer.content})
        messages.append({"role": "user", "content": results or "Go on."})
    return said


def smolagents_code_agent(instruction):
    """A CodeAgent, which executes what the model writes and sends back what came of it."""
    from smolagents import CodeAgent, OpenAIServerModel
    from smolagents.monitoring import LogLevel

    model = OpenAIServerModel(
        model_id="gpt-9",
        api_base=os.environ["OPENAI_BASE_URL"],
        api_key=os.environ["OPENAI_API_KEY"],
        max_tokens=60,
    )
    agent = CodeAgent(tools=[], model=model, max_steps=2, verbosity_level=LogLevel.OFF)
    # Its own has thousands of tokens, nearly all of the time that this would take.
    agent.prompt_templates["system_prompt"] = "Write Python between <code> and </code>."
    agent.run(instruction)
    said = [step.model_output for step in agent.memory.steps if getattr(step, "model_output", None)]
    return str(said[-1]) if said else ""


AGENTS = {
    "openai": openai_sdk,
    "anthropic": anthropic_sdk,
    "smolagents": smolagents_code_agent,
}


def main():
    said = AGENTS[sys.argv[1]](os.environ["WARDIAN_INSTRUCTION"])
    with open(os.environ["WARDIAN_ANSWER"], "w") as file:
        file.write(said)


if __name__ == "__main__":
    main()
