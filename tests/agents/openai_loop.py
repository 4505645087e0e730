"""Agents of openai-agents that answer a person with a tool: `python openai_loop.py URL AGENTS STEPS`.

Runs in an environment of its own, side by side with the server that it asks. Prints how often each agent has used its
tool. The engine calls the tool until a result says that it was the last one.
"""

import asyncio
import sys

from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
from openai import AsyncOpenAI

LAST = "that is all"
PAUSE_S = 0.02


async def main(url: str, count: int, steps: int) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    uses = [0] * count

    async def run(number: int) -> None:
        @function_tool
        async def edit() -> str:
            """Edit the file."""
            uses[number] += 1
            await asyncio.sleep(PAUSE_S)
            return LAST if uses[number] == steps - 1 else "done " * 40

        agent = Agent(
            name=f"agent {number}",
            instructions="You mend programs. " * 20,
            tools=[edit],
            model=OpenAIChatCompletionsModel("fake", client),
        )
        await Runner.run(agent, f"Mend program {number}. " + "It does not start. " * 20, max_turns=steps + 1)

    await asyncio.gather(*[run(number) for number in range(count)])
    print(*uses)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
