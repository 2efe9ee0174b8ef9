"""Output constrained by a grammar: a JSON schema, a regular expression, a list of choices or a Lark grammar.

`GrammarCompiler` compiles a request's constraints to a `Grammar`, the state of one output: the tokens that are legal
after the output so far and after each path of a token tree. llguidance does the work; only this package imports it.
"""

from specinfer.core.grammar.compiler import GrammarCompiler
from specinfer.core.grammar.state import Grammar

__all__ = ["Grammar", "GrammarCompiler"]
