"""The report of the path for GPUs: what is used of it, or why not."""

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from heads import save_block, save_tiny_head
from on_device import load_plain
from specinfer.core.config import SpeculativeConfig
from specinfer.drafters import HeadRunner, SelfRunner, make_drafter
from specinfer.engine.device.conditions import why_not, why_not_sampled
from specinfer.model.graphs.capture import CaptureError, Graphs
from specinfer.model.heads.load import load_head
from specinfer.model.runner import ModelRunner
from specinfer.setup import engine
from specinfer.setup.drafter_setup import Speculator
from specinfer.setup.engine import log_gpu_path
from tiny import VOCAB

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture
def runners(model_folder: Callable[..., Path]) -> tuple[ModelRunner, ModelRunner]:
    """Target and drafter, whose passes are padded as for captures."""
    target, small = (ModelRunner(load_plain(model_folder(seed=seed)), 200, graphs=Graphs(CPU)) for seed in (0, 1))
    return target, small


def logged(
    caplog: pytest.LogCaptureFixture,
    target: ModelRunner,
    small: ModelRunner,
    why_no_steps: str | None,
    why_no_sampled: str | None = None,
) -> tuple[str, str]:
    """Return the level and the text of the only line that is logged for a GPU."""
    caplog.clear()
    with caplog.at_level(logging.INFO, logger=engine.__name__):
        log_gpu_path(target, {"small": small.why_not_captured}, why_no_steps, why_no_sampled, device=GPU)
    (record,) = caplog.records
    return record.levelname, record.getMessage()


def test_what_is_not_used_is_a_warning_with_the_reason(
    runners: tuple[ModelRunner, ModelRunner], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, small = runners
    monkeypatch.setattr(engine, "why_not_on", lambda _: None)
    assert logged(caplog, target, small, None) == (
        "INFO",
        "cuda:0: Triton kernels: yes; captured passes of the target: yes; captured passes of small: yes; "
        "steps on the device: yes",
    )
    assert logged(caplog, target, small, None, "verification is traversal") == (
        "WARNING",
        "cuda:0: Triton kernels: yes; captured passes of the target: yes; captured passes of small: yes; "
        "steps on the device: yes; steps on the device of sampled requests: no, verification is traversal",
    )
    assert target.padded is not None
    target.padded.why_not_captured = "they cannot be captured: it waits"
    monkeypatch.setattr(engine, "why_not_on", lambda _: "Failed to find C compiler.")
    plain = ModelRunner(small.loaded, 200)
    assert logged(caplog, target, plain, "the target is on several ranks") == (
        "WARNING",
        "cuda:0: Triton kernels: no, Failed to find C compiler.; "
        "captured passes of the target: no, they cannot be captured: it waits; "
        "captured passes of small: no, capturing is off; steps on the device: no, the target is on several ranks",
    )


def test_nothing_is_said_on_a_cpu(runners: tuple[ModelRunner, ModelRunner], caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger=engine.__name__):
        log_gpu_path(runners[0], {}, None, device=CPU)
    assert not caplog.records


def test_a_model_that_is_refused_says_why(model_folder: Callable[..., Path]) -> None:
    loaded = load_plain(model_folder())
    assert ModelRunner(loaded, 4, graphs=Graphs(CPU)).why_not_captured == "its cache has 4 slots"


def test_drafters_for_which_steps_do_not_run_on_the_device_are_named(
    runners: tuple[ModelRunner, ModelRunner], model_folder: Callable[..., Path]
) -> None:
    target, small = runners
    hybrid = ModelRunner(load_plain(model_folder("qwen3_5_text")), 200, graphs=Graphs(CPU))
    unpadded = ModelRunner(small.loaded, 200)
    reasons = {
        None: ([small, small, "ngram"], ["small", "other", "ngram"]),
        "passes of the drafter small are not captured": ([unpadded], ["small"]),
        "the drafter small has convolutions or recurrent layers": ([hybrid], ["small"]),
    }
    for reason, (kinds, names) in reasons.items():
        assert why_not(target, make_drafter(kinds, VOCAB, names)) == reason
    assert why_not(target, None) is why_not(target, make_drafter(["ngram"], VOCAB, ["ngram"])) is None
    for rule, draft_sampling, reason in (
        ("coupled", "shared-noise", None),
        ("coupled", "top-k", "draft_sampling is top-k"),
        ("target-only", "top-k", "verification is target-only, which has no walk on a device"),
        ("traversal", "iid", "verification is traversal, with several drafters"),
        ("multi-step", "without-replacement", "verification is multi-step, with several drafters"),
    ):
        drafter = make_drafter([small, "ngram"], VOCAB, ["small", "ngram"], draft_sampling)
        assert why_not(target, drafter) is None
        assert why_not_sampled(drafter, rule) == reason
        assert why_not_sampled(None, rule) is None
    for draft_sampling, reason in (("without-replacement", None), ("iid", "draft_sampling is iid")):
        for rule in ("multi-step", "traversal"):
            assert why_not_sampled(make_drafter([small], VOCAB, ["small"], draft_sampling), rule) == reason
    assert why_not(unpadded, None) == "passes of the target are not captured"
    assert hybrid.padded is not None
    assert why_not(hybrid, None) is why_not(hybrid, make_drafter([small, "ngram"], VOCAB, ["small", "ngram"])) is None


def test_passes_over_a_part_of_the_context_are_not_captured(
    runners: tuple[ModelRunner, ModelRunner], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine, "why_not_on", lambda _: None)
    sparse = SelfRunner(runners[0].loaded, runners[0], is_sparse=True)
    assert why_not(runners[0], make_drafter([sparse], VOCAB, ["a"])) == "passes of the drafter a are not captured"
    _, line = logged(caplog, runners[0], sparse, "layers are streamed")
    assert "captured passes of small: no, they leave out tokens, and layers have windows or are not fused" in line


def test_heads_draft_on_the_device(runners: tuple[ModelRunner, ModelRunner], tmp_path: Path) -> None:
    target, small = runners
    head = HeadRunner(load_head(save_tiny_head(tmp_path / "head"), target.loaded), target, 200)
    block = HeadRunner(load_head(save_block(tmp_path / "block"), target.loaded), target, 200)
    for kinds in ([head], [head, "suffix"], [small, head], [block, head, small, "suffix"]):
        assert why_not(target, make_drafter(kinds, VOCAB, [f"{i}" for i in range(len(kinds))])) is None
    copy = SelfRunner(replace(target.loaded, layer_shapes=()), target)
    assert why_not(target, make_drafter([copy, small, head], VOCAB, ["a", "b", "c"])) is None


def test_draft_loops_are_captured_where_passes_are(runners: tuple[ModelRunner, ModelRunner], tmp_path: Path) -> None:
    """Those of heads, too, whose other passes are not."""
    target, small = runners
    head = HeadRunner(load_head(save_tiny_head(tmp_path), target.loaded), target, 200, graphs=target.graphs)
    speculator = Speculator(target, {"small": small, "head": head, "suffix": "suffix"}, {})
    for captures, why in ((True, None), (False, "capturing is off")):
        for runner in runners:
            assert runner.graphs is not None
            runner.graphs.captures = captures
        speculator.configure(SpeculativeConfig(tree="2,1"))
        assert len(speculator.draft_programs) == 2 * captures
        assert speculator.why_not_captured == {"small": None, "head": why}


def test_what_a_gpu_can_do_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "why_not_on", lambda _: None)
    assert set(engine.gpu_abilities(CPU).values()) == {None}

    def fail(*_: object) -> None:
        raise CaptureError("out of memory\nmore of it")

    monkeypatch.setattr(Graphs, "captured", fail)
    assert engine.described(engine.gpu_abilities(CPU)) == [
        "Triton: yes", "captured: no, out of memory", "device step: no, out of memory",
    ]  # fmt: skip
    monkeypatch.setattr(engine, "why_not_on", lambda _: "no compiler")
    assert engine.gpu_abilities(CPU)["device step"] == "they need Triton's kernels"


def test_a_gpu_that_computes_nothing_is_reported_and_raises_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that PyTorch was not built for, or whose memory is full."""

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: no kernel image is available for execution on the device\nmore of it")

    monkeypatch.setattr(engine, "why_not_on", lambda _: None)
    monkeypatch.setattr(torch, "zeros", fail)
    reason = "CUDA error: no kernel image is available for execution on the device"
    assert engine.gpu_abilities(GPU) == {"Triton": None, "captured": reason, "device step": reason}
