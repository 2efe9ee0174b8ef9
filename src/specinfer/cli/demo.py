"""The command demo: text coloured by who guessed it, then three shapes of tree against plain decoding."""

from specinfer.cli.commands import checking
from specinfer.cli.options import DEBUG, EngineOptions
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.sampling import SamplingParams

_TREES = ("auto", "1,1,1,1", "3,2,1,1")  # chosen by cost; a chain; a tree as deep, of 21 nodes
_NEXT = """
Try next:
  specinfer generate demo "def fibonacci(n):" --temperature 0 --stats
  specinfer complete demo --stats
  specinfer bench latency --tree auto --tree 1,1,1,1 --tree 3,1,1
  specinfer chat Qwen/Qwen3-1.7B --drafter Qwen/Qwen3-0.6B --stats
  specinfer --help
"""


def demo(*, debug: DEBUG = False) -> None:
    """Watch the embedded pair speculate, and measure what it gains; no download."""
    quiet_libraries(debug=debug)
    from specinfer.bench.latency import LatencyConfig, run_latency
    from specinfer.demo.corpus import heldout_prompts

    screen = Screen(stats=True)
    with checking():
        llm = EngineOptions().load("demo", screen)
    prompt = heldout_prompts(4)[3]
    screen.heading("A small model of Python code goes on with a file it has never seen:\n\n" + prompt)
    screen.stream(llm, prompt, SamplingParams(temperature=0.5, seed=3, max_tokens=160), stoppable=False)
    del llm  # its memory is for the measurement's own
    screen.heading("\nTrees in turns with plain decoding, on the same weights ...")
    report = run_latency(LatencyConfig(trees=_TREES, num_prompts=4, max_tokens=64, repeats=1), screen.err)
    for arm in report.trees:
        speedup = report.speedup_of(arm)
        print(
            f"{arm.name:<9}{arm.tokens_per_pass:.2f} tokens a target pass, and {speedup.median:.2f} times the speed "
            f"({speedup.min:.2f} to {speedup.max:.2f})"
        )
    print(f"Medians and ranges over {report.num_prompts} texts; each tree says the tokens of plain decoding.")
    print(_NEXT)
