"""Stream a completion; accepted draft tokens in green, tokens of the target in plain text."""

from specinfer import LLM, SamplingParams


def main() -> None:
    llm = LLM("demo")
    for chunk in llm.stream("def main():\n", SamplingParams(temperature=0.0, max_tokens=48)):
        drafted = any(origin is not None for origin in chunk.origins)
        print(f"\033[32m{chunk.text}\033[0m" if drafted else chunk.text, end="", flush=True)
        if chunk.output is not None:
            print(f"\n{chunk.output.metrics.speculative_decoding}")


if __name__ == "__main__":
    main()
