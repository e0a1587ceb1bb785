# SPDX-License-Identifier: Apache-2.0
"""Reads the rules by which a checkpoint such as ColBERT treats queries and documents.

Such a model returns one vector for each token. This is called late interaction. Three formats of
files describe the differences between queries and documents:

    sentence-transformers   the settings file of the transformers model, and a module
                            MultiVectorMask in modules.json
    PyLate                  config_sentence_transformers.json with the model_type "ColBERT"
    Stanford's ColBERT      artifact.metadata, and the architecture HF_ColBERT in config.json
"""

import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nereid_backend.errors import ModelError, UnsupportedModelError
from nereid_backend.pooling.loading.sentence_modules import ModuleSpec, find_config, read_json

QUERY = "query"
DOCUMENT = "document"
# The architecture in the config.json of Stanford's ColBERT checkpoints. transformers has no such
# class.
STANFORD_ARCHITECTURE = "HF_ColBERT"
# In Stanford's ColBERT checkpoints, the weight with this name projects the token vectors. The file
# that contains the weights of the encoder also contains this weight.
STANFORD_PROJECTION = "linear.weight"
_STANFORD_FILE = "artifact.metadata"
_PYLATE_TYPE = "ColBERT"
# If config_sentence_transformers.json contains one of these keys, PyLate has written the file.
_PYLATE_KEYS = {
    *("query_prefix", "document_prefix", "query_length", "document_length", "skiplist_words"),
    *("do_query_expansion", "attend_to_expansion_tokens", "attend_to_mask_tokens"),
}
# ColBERT expands a query to `_DEFAULT_QUERY_LENGTH` tokens if the checkpoint's files do not set
# another length.
_DEFAULT_QUERY_LENGTH = 32


@dataclass(frozen=True, slots=True)
class QueryExpansion:
    """The rule that appends mask tokens to short queries.

    Attributes:
        length: the number of tokens to which a query is expanded.
        is_limit: whether `length` is also the length limit of queries.
        is_attended: whether tokens attend to the mask tokens. If False, the mask tokens attend to
            the query, but no token attends to a mask token.
        token: the text of the appended token. None means the tokenizer's mask token.
    """

    length: int
    is_limit: bool
    is_attended: bool
    token: str | None = None


@dataclass(frozen=True, slots=True)
class LateInteraction:
    """The rules by which a checkpoint treats queries and documents.

    Attributes:
        query_length: the length limit of queries in tokens. None means that queries have no
            separate limit.
        document_length: the length limit of documents in tokens. None means that documents have no
            separate limit.
        expansion: the rule that appends mask tokens to short queries. None means that nothing is
            appended.
        markers: pairs of a role ("query" or "document") and a marker. A marker is one token, such
            as "[unused0] ", that precedes each text with this role.
        skip_words: the tokens that have no vector in the output, such as punctuation.
        skip_roles: the roles of the texts to which `skip_words` applies: "query", "document" or
            both.
    """

    query_length: int | None = None
    document_length: int | None = None
    expansion: QueryExpansion | None = None
    markers: tuple[tuple[str, str], ...] = ()
    skip_words: tuple[str, ...] = ()
    skip_roles: tuple[str, ...] = (DOCUMENT,)

    @property
    def distinguishes_queries(self) -> bool:
        """Whether queries and documents are processed differently, apart from their prompts."""
        skips_only_documents = bool(self.skip_words) and QUERY not in self.skip_roles
        return self.query_length is not None or self.expansion is not None or skips_only_documents

    def length(self, role: str) -> int | None:
        """Return the largest number of tokens of a query or document; None if there is no limit.

        `role` is "query" or "document".
        """
        return self.query_length if role == QUERY else self.document_length

    def longest_limit(self, max_seq_length: int | None) -> int | None:
        """Return the larger of two length limits: the limit of queries and the limit of documents.

        Args:
            max_seq_length: the length limit of documents if `document_length` is None. If both are
                None, documents have no limit, and the result is None.
        """
        document_length = self.document_length or max_seq_length
        if document_length is None:
            return None
        return max(document_length, self.query_length or 0)

    def with_markers(self, prompts: Mapping[str, str]) -> dict[str, str]:
        """Prepend the markers, such as "[Q] ", to the prompts for queries and documents.

        Example: the prompts {"query": "find: "} and the marker "[Q] " of queries return
        {"query": "[Q] find: "}. The keys are the names of the prompts.
        """
        marked = dict(prompts)
        if self.distinguishes_queries:
            # If a request selects the prompt with the name "query", the inputs of the request are
            # queries. `marked` must therefore contain the key "query", even if this prompt is
            # empty.
            marked.setdefault(QUERY, "")
        for role, marker in self.markers:
            # Some checkpoints contain the marker in the prompt already.
            prompt = marked.get(role, "").removeprefix(marker)
            marked[role] = marker + prompt
        return marked


@dataclass(frozen=True, slots=True)
class _JsonRules:
    """The rules for queries and documents as JSON values, which are not validated yet.

    None means that the files do not contain the rule.

    Attributes:
        query_length: the length limit of queries in tokens.
        document_length: the length limit of documents in tokens.
        query_expansion: the rule for expanding queries (see `_expansion`).
        markers: pairs of a role and a marker. An empty marker means that there is no marker.
        skiplist_words: the tokens that get no vector.
        skiplist_tasks: the roles of the texts to which `skiplist_words` applies.
    """

    query_length: Any = None
    document_length: Any = None
    query_expansion: Any = None
    markers: tuple[tuple[str, str], ...] = ()
    skiplist_words: Any = None
    skiplist_tasks: Any = None


def read_late_interaction(
    root: Path,
    architecture: str,
    settings: Mapping[str, Any],
    sentence_config: Mapping[str, Any],
    modules: Sequence[ModuleSpec],
) -> LateInteraction:
    """Read the rules by which a checkpoint with late interaction treats queries and documents.

    Such a checkpoint, for example ColBERT, computes one vector for each token. Its rules are, for
    example, a length limit for queries, and a marker such as "[Q] " that precedes each query.

    Args:
        root: the folder of the checkpoint.
        architecture: the name of the model's class in config.json.
        settings: the content of the settings file of the transformers model.
        sentence_config: the content of config_sentence_transformers.json.
        modules: the modules in modules.json.

    Raises:
        UnsupportedModelError: the files name a query expansion that is not supported.
        ModelError: a value in the files has a wrong type.
    """
    if architecture == STANFORD_ARCHITECTURE:
        rules = _stanford_rules(read_json(root / _STANFORD_FILE))
    else:
        rules = _pylate_rules(sentence_config)
    # The files of sentence-transformers override the other files.
    return _validate(root, replace(rules, **_sentence_transformers_rules(settings, modules)))


def _validate(root: Path, rules: _JsonRules) -> LateInteraction:
    """Convert rules from JSON values, and raise an error if a value is wrong.

    `root` is the folder of the checkpoint, for error messages.
    """
    expansion = _expansion(root, rules.query_expansion)
    query_length = _length(root, "query_length", rules.query_length)
    if expansion is not None and expansion.is_limit:
        # The rule of the expansion prescribes a length. Each query is expanded or truncated to
        # exactly this length.
        query_length = expansion.length
    return LateInteraction(
        query_length=query_length,
        document_length=_length(root, "document_length", rules.document_length),
        expansion=expansion,
        markers=tuple((role, marker) for role, marker in rules.markers if marker),
        skip_words=tuple(rules.skiplist_words or ()),
        skip_roles=_skip_roles(rules.skiplist_tasks),
    )


def _sentence_transformers_rules(
    settings: Mapping[str, Any], modules: Sequence[ModuleSpec]
) -> dict[str, Any]:
    """Return the fields of `_JsonRules` that the files of sentence-transformers set.

    Fields that these files do not set are left out, because the result overrides the rules of other
    files. Example: the settings {"query_length": 32} return {"query_length": 32}.

    Args:
        settings: the content of the settings file of the transformers model.
        modules: the modules in modules.json.
    """
    names = ("query_length", "document_length", "query_expansion")
    rules = {name: settings[name] for name in names if settings.get(name) is not None}
    # The module MultiVectorMask lists the tokens that get no vector. The module has priority over
    # other files, even if it contains no list. The value None then replaces the list from the other
    # files, so that every token gets a vector.
    mask = find_config(modules, "MultiVectorMask")
    if mask is not None:
        rules["skiplist_words"] = mask.get("skiplist_words")
        rules["skiplist_tasks"] = mask.get("skiplist_tasks")
    return rules


def has_pylate_model_type(sentence_config: Mapping[str, Any]) -> bool:
    """Return whether PyLate saved the checkpoint.

    The modules.json of such a checkpoint names no MultiVectorMask and no Normalize, although the
    model leaves out punctuation and scales its vectors to length 1.

    Args:
        sentence_config: the content of config_sentence_transformers.json.
    """
    return sentence_config.get("model_type") == _PYLATE_TYPE


def _pylate_rules(sentence_config: Mapping[str, Any]) -> _JsonRules:
    """Return the rules in a file of PyLate, a library for ColBERT.

    Example: {"query_prefix": "[Q] ", "query_length": 48} returns the query_length 48, the marker
    "[Q] " of queries, and a rule that expands queries to 48 tokens. PyLate expands queries unless
    the file turns the expansion off.

    Args:
        sentence_config: the content of config_sentence_transformers.json.
    """
    return _JsonRules(
        query_length=sentence_config.get("query_length"),
        document_length=sentence_config.get("document_length"),
        query_expansion=_pylate_expansion(sentence_config),
        markers=(
            (QUERY, sentence_config.get("query_prefix") or ""),
            (DOCUMENT, sentence_config.get("document_prefix") or ""),
        ),
        skiplist_words=_pylate_skip_words(sentence_config),
    )


def _pylate_skip_words(sentence_config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the words that get no vectors, such as ["!", "?"]; None if the file lists no words.

    If the file has PyLate's model type, the default is a list of all punctuation.
    """
    words = sentence_config.get("skiplist_words")
    if words is None and has_pylate_model_type(sentence_config):
        return list(string.punctuation)
    return words


def _pylate_expansion(sentence_config: Mapping[str, Any]) -> Any:  # noqa: ANN401 - JSON
    """Return the rule for query expansion, converted to the JSON format of sentence-transformers.

    The key `query_expansion`, which already has this format, has priority over PyLate's keys. The
    result is None if the file has no keys of PyLate, or if it turns the expansion off.

    Example: {"query_length": 48} returns {"strategy": "fixed", "attend": False, "length": 48}.
    """
    if "query_expansion" in sentence_config:
        return sentence_config["query_expansion"]
    has_pylate_keys = not _PYLATE_KEYS.isdisjoint(sentence_config)
    if not has_pylate_keys or sentence_config.get("do_query_expansion") is False:
        return None
    # `attend_to_expansion_tokens` and `attend_to_mask_tokens` have the same meaning. A file of
    # PyLate may contain either key.
    attends_to_masks = sentence_config.get("attend_to_mask_tokens")
    return {
        "strategy": "fixed",
        "attend": bool(sentence_config.get("attend_to_expansion_tokens", attends_to_masks)),
        "length": sentence_config.get("query_length") or _DEFAULT_QUERY_LENGTH,
    }


def _stanford_rules(metadata: Mapping[str, Any]) -> _JsonRules:
    """Return the rules in `artifact.metadata`, a file of Stanford's ColBERT.

    Example: {"doc_maxlen": 300} returns the document_length 300. Missing rules have the defaults of
    Stanford's ColBERT.
    """
    skips_punctuation = metadata.get("mask_punctuation", True)
    # The markers are tokens before queries and documents. The names of the keys end in "_id", but
    # the values are the texts of the tokens.
    query_token = metadata.get("query_token_id") or "[unused0]"
    document_token = metadata.get("doc_token_id") or "[unused1]"
    return _JsonRules(
        document_length=metadata.get("doc_maxlen"),
        query_expansion={
            "strategy": "fixed",  # each query is expanded or truncated to exactly `length` tokens
            # Whether the tokens of the query attend to the appended mask tokens.
            "attend": bool(metadata.get("attend_to_mask_tokens")),
            "length": metadata.get("query_maxlen") or _DEFAULT_QUERY_LENGTH,
        },
        markers=((QUERY, query_token + " "), (DOCUMENT, document_token + " ")),
        skiplist_words=list(string.punctuation) if skips_punctuation else [],
    )


def _expansion(root: Path, value: Any) -> QueryExpansion | None:  # noqa: ANN401 - JSON
    """Convert a rule for expanding queries from its JSON format to a QueryExpansion.

    A query is expanded by mask tokens at its end. With the strategy "fixed", each query gets
    exactly `length` tokens, so longer queries are truncated (is_limit). With the strategy "min",
    longer queries keep their length. `attend` states whether tokens attend to the mask tokens.
    `token` is the text of the appended token; None means the tokenizer's mask token.

    Example: {"strategy": "fixed", "length": 32} returns QueryExpansion(length=32, is_limit=True,
    is_attended=False).
    """
    if not value:
        return None
    strategy = value.get("strategy") if isinstance(value, dict) else None
    if strategy not in ("fixed", "min"):
        raise UnsupportedModelError(
            f'{root}: the strategy of query_expansion must be "fixed" or "min", but it is '
            f"{strategy!r}."
        )
    length = _length(root, "query_expansion.length", value.get("length"))
    if length is None:
        raise ModelError(
            f'{root}: query_expansion has no field "length". Download the checkpoint again.'
        )
    return QueryExpansion(
        length=length,
        is_limit=strategy == "fixed",
        is_attended=bool(value.get("attend")),
        token=value.get("token"),
    )


def _skip_roles(value: Any) -> tuple[str, ...]:  # noqa: ANN401 - JSON
    """Convert the setting `skiplist_tasks` of a checkpoint to `LateInteraction.skip_roles`.

    Examples: ["query", "document"] returns ("query", "document"), "query" returns ("query",), and
    None returns ("document",).
    """
    if not value:
        return (DOCUMENT,)
    return (value,) if isinstance(value, str) else tuple(value)


def _length(root: Path, name: str, value: Any) -> int | None:  # noqa: ANN401 - JSON
    """Return `value`, a length in tokens. Raise a ModelError if `value` is not a positive integer.

    The files of the checkpoint contain the value under the name `name`. If the files do not contain
    the value, `value` and the result are None.
    """
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ModelError(
            f"{root}: {name} must be an integer of at least 1, but it is {value!r}. Download the "
            "checkpoint again."
        )
    return value
