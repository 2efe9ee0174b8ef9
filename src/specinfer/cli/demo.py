"""The command demo: text coloured by drafter, a token tree after its verification, and the gain in speed."""

from typing import TYPE_CHECKING

from specinfer.cli.errors import checking
from specinfer.cli.options import DEBUG, load
from specinfer.cli.recording import Step
from specinfer.cli.screen import Screen
from specinfer.cli.terminal import quiet_libraries
from specinfer.cli.tree_view import render_tree
from specinfer.core.sampling import SamplingParams
from specinfer.demo.chat_model import CHAT, CHAT_TEMPERATURE, CODE, default_model
from specinfer.engine_args import EngineArgs

if TYPE_CHECKING:  # importing these imports torch, which takes seconds
    from torch import Tensor

    from specinfer.bench.comparisons import Compared
    from specinfer.core.request import Request
    from specinfer.core.speculation import StepTrace
    from specinfer.core.step_record import StepRecord
    from specinfer.core.tree import TokenTree
    from specinfer.llm import LLM
    from specinfer.verify import Acceptance

_QUESTIONS = (
    "Why do cats purr? Answer in three sentences.",
    "Correct the spelling mistakes in this text and repeat all of it:\n"
    "On sunday we went to the lake, becuase the wether was warm and suny. My sister\n"
    "brought her new boat, and my brother brought a basket full of sandwitches. We\n"
    "stayed at the lake until it was dark, and then we drove home, tired and hapy.",
)
_MAX_TOKENS = 120  # per answer
_MAX_NODES, _MAX_DEPTH = 16, 8  # limits on the tree that is shown, so that it fits 80 columns
_CODE_TREES = ("auto", "1,1,1,1", "3,2,1,1")  # chosen by cost; a chain; a tree of the same depth with 21 nodes
_NEXT_CHAT = """
Try next:
  specinfer chat --stats
  specinfer generate "The three largest cities of Europe are" --stats
  specinfer serve
  specinfer bench latency --model demo-chat
  specinfer demo --help
"""
_NEXT_CODE = """
Try next:
  specinfer generate demo "def fibonacci(n):" --temperature 0 --stats
  specinfer complete demo --stats
  specinfer bench latency --tree auto --tree 1,1,1,1 --tree 3,1,1
  specinfer chat Qwen/Qwen3-1.7B --drafter Qwen/Qwen3-0.6B --stats
  specinfer --help
"""


def demo(*, debug: DEBUG = False) -> None:
    """Let demo-chat (demo if its package is missing) answer with speculative decoding, and print the speedup."""
    quiet_libraries(debug=debug)
    screen = Screen(stats=True, wraps=True)
    model, missing = default_model()
    if missing is not None:
        screen.note(missing)
    with checking():
        llm = load(EngineArgs(model), screen)
    if model == CHAT:
        _show_responses(llm, screen)
    else:
        _show_code(llm, screen)
    del llm  # frees its memory for the measurement
    screen.heading("\nIn turns with plain decoding, on the same weights ...")
    print(_chat_figures(screen) if model == CHAT else _code_figures(screen))


def _show_responses(llm: "LLM", screen: Screen) -> None:
    """Show answers to the questions, then the tree of the step with the most accepted tokens."""
    best = _BestStep()
    llm.engine.observers.append(best)
    for number, question in enumerate(_QUESTIONS):
        screen.heading(f"> {question}\n")
        params = SamplingParams(temperature=CHAT_TEMPERATURE, seed=number, max_tokens=_MAX_TOKENS)
        prompt = llm.chat_prompt([{"role": "user", "content": question}])
        screen.stream(llm, prompt, params, stoppable=False)
        screen.end_line()
    if best.step is not None:
        _show_tree(llm, best.step, screen)


def _show_tree(llm: "LLM", trace: "StepTrace", screen: Screen) -> None:
    from specinfer.server.trace import TokenDecoder, step_record

    step = Step.from_record(step_record(trace, TokenDecoder(llm.tokenizer)))
    screen.heading(
        f"One pass of the target over a token tree: {len(step.nodes)} draft tokens, {len(step.path)} accepted (bold).\n"
        "q: probability by the drafter; p: probability by the target.\n"
    )
    screen.out.print(render_tree(step, screen.color))


def _show_code(llm: "LLM", screen: Screen) -> None:
    from specinfer.demo.corpus import heldout_prompts

    prompt = heldout_prompts(4)[3]
    screen.heading("A small model of Python code goes on with a file it has never seen:\n\n" + prompt)
    screen.stream(llm, prompt, SamplingParams(temperature=0.5, seed=3, max_tokens=160), stoppable=False)


def _chat_figures(screen: Screen) -> str:
    from specinfer.bench.latency import run_latency
    from specinfer.bench.options import LatencyConfig
    from specinfer.inputs.chat.samples import KINDS

    config = LatencyConfig(model=CHAT, num_prompts=len(KINDS), max_tokens=48, repeats=1, temperature=0.0)
    measured = run_latency(config, screen.err).measured
    kinds = []
    for kind, part in measured.by_kind().items():
        (tree,) = part.result.trees
        speedup = part.result.speedup_of(tree).median
        kinds.append(f"  {kind:<10}{tree.tokens_per_pass:.2f} tokens per pass, {speedup:.2f} times the speed")
    return "\n".join([*_lines(measured), *kinds, "greedy decoding, one prompt of each kind", _NEXT_CHAT])


def _code_figures(screen: Screen) -> str:
    from specinfer.bench.latency import run_latency
    from specinfer.bench.options import LatencyConfig

    config = LatencyConfig(model=CODE, trees=_CODE_TREES, num_prompts=4, max_tokens=64, repeats=1)
    measured = run_latency(config, screen.err).measured
    about = f"Medians and ranges over {measured.num_prompts} texts; each tree generates the tokens of plain decoding."
    return "\n".join([*_lines(measured), about, _NEXT_CODE])


def _lines(measured: "Compared") -> list[str]:
    lines = []
    for arm in measured.result.trees:
        speedup = measured.result.speedup_of(arm)
        lines.append(
            f"{arm.name:<9}{arm.tokens_per_pass:.2f} tokens per target pass, {speedup.median:.2f} times the speed "
            f"({speedup.min:.2f} to {speedup.max:.2f})"
        )
    return lines


class _BestStep:
    """The trace of the step with the most accepted, then the most rejected tokens, of those that can be shown."""

    reads_logits = True

    def __init__(self) -> None:
        self.step: StepTrace | None = None
        self._best = (0, 0)  # accepted, rejected

    def on_tokens(
        self, request: "Request", tree: "TokenTree", acceptance: "Acceptance", logits: "Tensor", num_generated: int
    ) -> None:
        from specinfer.engine.emission import target_probs, trace_step

        num_accepted = len(acceptance.path[:num_generated])
        counts = num_accepted, len(tree) - 1 - num_accepted
        if counts > self._best and len(tree) - 1 <= _MAX_NODES and max(tree.depths) <= _MAX_DEPTH:
            probs = target_probs(tree, acceptance, logits)
            self._best, self.step = counts, trace_step(request, tree, acceptance, probs, num_generated)

    def on_step(self, record: "StepRecord") -> None:
        """Do nothing: whole steps are not used."""
