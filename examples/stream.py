"""Stream a completion; guessed tokens in green, tokens said by the target in plain text."""

from specinfer import LLM, SamplingParams


def main() -> None:
    llm = LLM("demo")
    for chunk in llm.stream("def main():\n", SamplingParams(temperature=0.0, max_tokens=48)):
        guessed = any(origin is not None for origin in chunk.origins)
        print(f"\033[32m{chunk.text}\033[0m" if guessed else chunk.text, end="", flush=True)
        if chunk.output is not None:
            print(f"\n{chunk.output.metrics.speculative_decoding}")


if __name__ == "__main__":
    main()
