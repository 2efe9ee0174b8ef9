"""Forms of grammars: Lark's as other parsers take them, and llama.cpp's notation."""

import pytest

from specinfer import RequestError, StructuredOutputsParams
from specinfer.core.grammar.compiler import GrammarCompiler
from talking import make_talker

TOKENIZER = make_talker()
EOS = TOKENIZER.eos_token_id
COMPILER = GrammarCompiler(TOKENIZER, len(TOKENIZER), (EOS,))
ARITHMETIC = """
?start: sum                       // Outlines' example
?sum: product
    | sum "+" product   -> add
?product.2: atom
    | product '*' atom  -> mul
?atom: NUMBER           -> number
     | "-" atom         -> neg  # it's a comment
     | "(" sum ")"
%import common.NUMBER
%import common.WS_INLINE
%ignore WS_INLINE
"""


def _fits(grammar: str, text: str) -> bool:
    made = COMPILER.compile(StructuredOutputsParams(grammar=grammar))
    for token in TOKENIZER.encode(text, add_special_tokens=False):
        if not made.mask(())[token]:
            return False
        made.advance(token)
    return bool(made.mask(())[EOS])


@pytest.mark.parametrize(
    ("grammar", "fits", "fails"),
    [
        (ARITHMETIC, "2*(3 + -4.5)", "2(3)"),
        ("?start: \"a\" | b\n?b: 'b'", "b", "c"),
        ("!start: 'it\\'s' '\"' \"'\"", "it's\"'", "it's"),
        ('// \'start\' is missing\nexpr: "a" expr | "b"', "aab", "aa"),
        ("WORD: /[a-z]+/", "word", "1"),
        ("start: A B\nA.2: /[a#]/\nB.-1 : '//'", "#//", "a/"),
        ('start: "::=" b\nb: "b"', "::=b", "b"),
        ('root ::= [0-9]+ b\nb ::= "\'" | "# no comment"', "12'", "a"),
        ('  root-of-all ::= "a"\nroot ::= root-of-all "b"\n', "ab", "a"),
        ("start: 'ab' @json\n%llguidance {}".replace("@json", '%json {"const": "it\'s"}'), 'ab"it\'s"', "ab"),
    ],
)
def test_forms_of_grammars(grammar: str, fits: str, fails: str) -> None:
    assert _fits(grammar, fits)
    assert not _fits(grammar, fails)


@pytest.mark.parametrize("hidden", ["'\"' <[*]> '\"'", '// "\nstart2: <[*]> // "', "'/' <[^1]> '/'"])
def test_quotes_and_comments_hide_no_class_of_tokens(hidden: str) -> None:
    with pytest.raises(RequestError, match="may include the end of the text"):
        _fits(f"start: {hidden}", "a")


def test_single_quotes_hide_no_option_of_a_rule() -> None:
    with pytest.raises(RequestError, match="option 'temperature' of a rule"):
        _fits("start: b '\"'\nb[temperature=1]: '\"'", "a")
