"""Computes scores with late interaction, for models such as ColBERT.

Such a model returns one vector for each token. For each token of the query, the dot products with
all tokens of the document are computed, and the largest dot product is selected. The score of the
document is the sum of the selected dot products (MaxSim).
"""

import asyncio
from collections.abc import Sequence

import numpy as np
from fastapi import Request

from nereid_client.embeddings.embedding_output import Floats, vectors_of
from nereid_client.embeddings.model_choice import call_model, choose_model
from nereid_client.embeddings.pooling_backend import (
    EMBEDDING,
    RERANK,
    PoolingOutputs,
    ServedModel,
)
from nereid_client.errors import ApiError
from nereid_client.protocol.embedding_requests import ModelInputs

_PROMPTS = {"query": ("query",), "documents": ("document", "passage", "corpus")}
"""Maps "query" and "documents" to the names of prompts that an embedding model can have.

A prompt is a text that the embedding model puts before each input text. For each of the two, the
first of these prompts that the model has is used. With the prompt "query", a model such as ColBERT
also adds mask tokens.
"""


def uses_late_interaction(served: ServedModel) -> bool:
    """Return whether a model returns one vector for each token by default."""
    return served.kind == EMBEDDING and served.info.get("kinds", ("",))[0] == "multi_vector"


async def choose_scorer(request: Request, name: str | None) -> ServedModel:
    """Return the model that scores the documents: a reranker, or an embedding model.

    Return the reranker with the name `name`. If there is no such reranker, or if it does not
    answer, but an embedding model with this name uses late interaction, return the embedding model.
    If `name` is None, a model with any name is suitable.

    Raises: ApiError 400 or 404 if there is no such model, 503 if the model does not answer.
    """
    try:
        return await choose_model(request, name, (RERANK,))
    except ApiError:
        served = await _late_interaction_model(request, name)
        if served is None:
            raise  # the error about the reranker
        return served


async def _late_interaction_model(request: Request, name: str | None) -> ServedModel | None:
    """Return the embedding model `name` if this model exists and uses late interaction, else None.

    Raises: ApiError 503 if the model exists, but cannot be used now.
    """
    try:
        served = await choose_model(request, name, (EMBEDDING,))
    except ApiError as error:
        if error.status == 503:
            raise
        return None
    return served if uses_late_interaction(served) else None


async def late_interaction(
    request: Request, served: ServedModel, inputs: ModelInputs, *, truncate: bool | None
) -> PoolingOutputs:
    """Score documents with an embedding model that uses late interaction.

    The model returns one vector for each token of the queries and of the documents. `max_sim`
    computes a score from the vectors of a query and a document.

    Args:
        request: the HTTP request.
        served: the embedding model.
        inputs: the input tensors of a reranker: the tensor `query`, and the tensor `documents`, or
            the tensor `parts` if a document is an image. There is one query for all documents, or
            one query for each document.
        truncate: whether to truncate texts that are too long. None means the server's default: such
            a text is an error.

    Returns: the outputs of a reranker: `scores` has one score for each document, and `num_tokens`
        has the number of tokens of each query and each document.
    """
    queries = await _embed_tokens(request, served, inputs, "query", truncate=truncate)
    # If the inputs have the tensor `parts`, it contains the documents that this call embeds.
    documents = await _embed_tokens(request, served, inputs, "documents", truncate=truncate)
    query_vectors = vectors_of(queries)
    document_vectors = vectors_of(documents)
    if len(query_vectors) == 1:  # the same query is compared with all documents
        query_vectors = query_vectors * len(document_vectors)
    # Computing the scores of a thousand documents takes a tenth of a second or more. A separate
    # thread computes them, so that the event loop is not blocked.
    scores = await asyncio.to_thread(max_sim, query_vectors, document_vectors)
    num_tokens = np.concatenate([queries.arrays["num_tokens"], documents.arrays["num_tokens"]])
    return PoolingOutputs(arrays={"scores": scores, "num_tokens": num_tokens}, strings={})


async def _embed_tokens(
    request: Request,
    served: ServedModel,
    inputs: ModelInputs,
    role: str,
    *,
    truncate: bool | None,
) -> PoolingOutputs:
    """Return one vector for each token of the queries or of the documents."""
    options = {
        "kind": "multi_vector",
        "prompt_name": _prompt_name(served, role),  # such as "passage" for documents
        "truncate": truncate,
    }
    return await call_model(request, served, _inputs_of_embedder(inputs, role), options)


def _inputs_of_embedder(inputs: ModelInputs, role: str) -> ModelInputs:
    """Convert one input tensor of a reranker to the input tensor of an embedding model.

    A reranker receives queries in the tensor "query", and documents in the tensor "documents". If a
    document is an image, the reranker receives all documents in the tensor "parts" instead. An
    embedding model receives texts in the tensor "texts", and texts or images in "parts".

    Example: the tensors {"query": ["a"], "documents": ["b", "c"]} and the role "documents" return
    the tensors {"texts": ["b", "c"]}.
    """
    if role in inputs.tensors:
        return ModelInputs({"texts": inputs.tensors[role]}, {"texts": inputs.fields[role]})
    # Only the tensor "documents" can be missing, because a query is never an image.
    return ModelInputs({"parts": inputs.tensors["parts"]}, {"parts": inputs.fields["parts"]})


def _prompt_name(served: ServedModel, role: str) -> str | None:
    """Return the name of the prompt that a model puts before queries or documents, or None.

    Example: a model with the prompts "query" and "passage" returns "passage" for "documents".
    """
    model_prompts = served.info.get("prompts", {})
    names = [name for name in _PROMPTS[role] if name in model_prompts]
    return names[0] if names else None


def max_sim(queries: Sequence[Floats], documents: Sequence[Floats]) -> Floats:
    """Return the score of each pair of a query and a document.

    The score is the sum of the largest dot product of each query vector with a document vector.

    Example: for the query vectors [[1, 0], [0, 1]] and the document vectors [[0.5, 0], [0, 0.25]],
    the score is 0.5 + 0.25 = 0.75. A document without vectors has the score 0.

    Args:
        queries: for each pair, the vectors of the query, [num_tokens, dimension].
        documents: for each pair, the vectors of the document, [num_tokens, dimension].
    """
    scores = np.zeros(len(queries), dtype=np.float32)
    for index, (query, document) in enumerate(zip(queries, documents, strict=True)):
        if len(document):
            dot_products = query @ document.T
            scores[index] = dot_products.max(axis=1).sum()
    return scores
