"""An agent with tools, written against the openai package alone, leaves groups that can be trained on.

Start a model server, then this file:

    atropos-gym serve-model --policy MODEL --port 8001
    python examples/agent_with_tools.py http://127.0.0.1:8001

`agent` knows a base URL and a key, as it would of any provider; it is run four times from each question. What
the policy said to it comes back as groups, id for id, with the score of each run. With `--to URL` the server
posts them to a trainer (`atropos-gym serve`) by itself.
"""

import asyncio
import json
import sys

import openai

from atropos_gym.model_server import AgentCollector

CALCULATE = {
    "type": "function",
    "function": {
        "name": "multiply",
        "description": "Multiplies two integers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


async def agent(base_url: str, api_key: str, start: tuple[int, int]) -> float:
    """Asks until there is an answer without a call; the score is 1 for the right one."""
    messages = [{"role": "user", "content": f"What is {start[0]} times {start[1]}? Answer with a number."}]
    async with openai.AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        for _ in range(4):
            said = await client.chat.completions.create(
                model="policy", messages=messages, tools=[CALCULATE], max_tokens=64
            )
            message = said.choices[0].message
            messages.append(message)
            if not message.tool_calls:
                return float(str(start[0] * start[1]) in (message.content or ""))
            messages += [
                {"role": "tool", "tool_call_id": call.id, "content": multiply(call.function.arguments)}
                for call in message.tool_calls
            ]
    return 0.0


def multiply(arguments: str) -> str:
    """Returns what the tool says, to calls that make no sense too."""
    try:
        given = json.loads(arguments)
        return str(int(given["a"]) * int(given["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {error}"


async def main(url: str) -> None:
    """Plays two groups and says what is in them."""
    collector = AgentCollector(agent, url, group_size=4, name="multiply")
    async for played in collector.stream([(6, 7), (12, 12)]):
        if played.group is None:
            print(f"{played.start}: {played.withheld or 'posted'}")
            continue
        sampled = sum(mark != -100 for row in played.group.masks for mark in row)
        print(f"{played.start}: scores {played.scores}, {played.group.size} rows, {sampled} sampled ids")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8001"))
