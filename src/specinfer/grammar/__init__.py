"""Output that keeps to a grammar: a JSON schema, a regular expression, a list of choices or a Lark grammar.

`GrammarCompiler` turns what was asked into a `Grammar`, the state of one output: which tokens may come next, after
the output so far and after each path of a token tree. The work is llguidance's; this folder is its one door.
"""

from specinfer.grammar.compiler import GrammarCompiler
from specinfer.grammar.state import Grammar

__all__ = ["Grammar", "GrammarCompiler"]
