"""Complete several prompts at once in one event loop, and stream one of them."""

import asyncio

from specinfer import LLM, AsyncLLM, SamplingParams


async def main() -> None:
    params = SamplingParams(max_tokens=40, temperature=0.0)
    async with AsyncLLM(LLM("demo")) as engine:
        others = [asyncio.create_task(engine.complete(prompt, params)) for prompt in ("import os\n", "class Queue:\n")]
        generation = await engine.submit("def main(", params)
        async for chunk in generation:
            print(chunk.text, end="", flush=True)
        print(f"\n--- {generation.output().metrics.speculative_decoding['tokens_per_pass']:.2f} tokens a pass\n")
        for output in await asyncio.gather(*others):
            print(f"{output.prompt}{output.outputs[0].text}\n---")


if __name__ == "__main__":
    asyncio.run(main())
