"""The blocks of an output: their events, one after another, add up to them."""

from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from specinfer.core.outputs import TextChunk
from specinfer.inputs.formats.parser import OutputDelta
from specinfer.server.blocks import Block, Blocks

PARTS = st.one_of(
    st.builds(OutputDelta, content=st.text("ab", max_size=2)),
    st.builds(OutputDelta, reasoning=st.text("ab", max_size=2)),
    st.builds(OutputDelta, index=st.integers(0, 2), arguments=st.text("ab", max_size=2)),
)


@given(st.lists(st.lists(PARTS, max_size=4), max_size=4))
def test_the_events_of_blocks_add_up_to_them(chunks: list[list[OutputDelta]]) -> None:
    pending = iter(chunks)
    parser: Any = SimpleNamespace(push=lambda _: next(pending), finish=list)
    blocks = Blocks(parser)
    events = [event for _ in chunks for event in blocks.read(TextChunk("", [], []))] + blocks.end()
    grown: list[tuple[Block, str]] = []
    is_open = False
    for change, block, text in events:
        assert is_open == (change != "begin"), "one ends before another begins"
        is_open = change != "end"
        if change == "begin":
            grown.append((block, ""))
        assert grown[-1][0] is block
        grown[-1] = block, grown[-1][1] + text
    assert not is_open
    assert blocks.open is None
    assert [block.index for block in blocks.all] == list(range(len(grown)))
    assert [(block, block.text) for block in blocks.all] == grown
    deltas = [delta for chunk in chunks for delta in chunk]
    assert blocks.text("text") == "".join(delta.content for delta in deltas)
    assert blocks.text("thought") == "".join(delta.reasoning for delta in deltas)
    assert blocks.text("call") == "".join(delta.arguments for delta in deltas)
