# SPDX-License-Identifier: Apache-2.0
"""Constrained decoding: a grammar or a reasoning budget limits the tokens of an answer.

Start reading at guide_factory.py: `Guides.prepare` creates the guide of a request.

    guide_factory.py        compiles the grammar of a request, and creates the request's guides
    token_guide.py          tracks the state of one sequence: reasoning, grammar, end of the answer
    guide_rules.py          the token masks that all sequences of a request share
    thinking_budget.py      finds the start and the end of reasoning and enforces its budget
    backend_interface.py    the interface of a grammar library
    llguidance_backend.py   JSON schemas, regular expressions, choices and Lark grammars
    xgrammar_backend.py     structural tags and EBNF grammars
    compile_grammar.py      chooses the grammar library that compiles a grammar
    compile_cost.py         rejects grammars that would take too long to compile, and finds grammars
                            that certainly compile quickly
    schema_parts.py         parses a JSON schema, and finds the schemas inside a schema
    compile_pool.py         compiles quick grammars immediately, and other grammars after a trial
    shared_compilations.py  lets requests with equal grammars share one compilation
    trial_compiler.py       starts a trial: another process tries to compile a grammar
    trial_process.py        the program that runs in the process for trials
    try_tokens.py          begins an answer in a trial, because masks can also take too long
    byte_cache.py           the cache of compiled grammars
    vocabulary.py           the tokens of a tokenizer, and token masks
    token_bytes.py          converts the entries of a vocabulary into bytes
    request_spec.py         converts a JSON schema or a grammar text into a GrammarSpec
    validate_answer.py      validates a finished answer against its JSON schema

The server's tokenizer and postprocessor use request_spec.py and validate_answer.py. These two
modules import neither torch nor a grammar library. This package imports guide_factory.py only when
`Guides` is used, so that the import of the two modules stays fast.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nereid_backend.grammar.guide_factory import Guides

__all__ = ["Guides"]


def __getattr__(name: str) -> object:
    if name == "Guides":
        from nereid_backend.grammar.guide_factory import Guides

        return Guides
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
