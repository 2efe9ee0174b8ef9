"""Output constrained by a grammar: a JSON schema, a regular expression, a list of choices or a Lark grammar.

`compiler.py` compiles a request's constraints to a `Grammar` (`state.py`), the state of one output: the tokens that are
legal after the output so far and after each path of a token tree. llguidance does the work; only this package imports
it. `checks.py` makes a constraint ready: it prepares JSON schemas (`json_schema.py`) and Lark grammars (`lark.py`).
`trial.py` does so in another process for untrusted clients.
"""
