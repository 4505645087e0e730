"""Texts -> clusters that no split may cut: near duplicates, and texts that are tied together.

Two texts are near duplicates when the Jaccard similarity of their sets of word 3-shingles is at least SIMILARITY_MIN.
Texts with few spaces, such as Chinese and long URLs, have shingles of 5 characters.
MinHash signatures (Broder 1997) in bands of a few rows give the candidates (Leskovec, Rajaraman and Ullman, Mining of
Massive Datasets, ch. 3.4); each candidate is verified exactly. The signatures are datasketch's. Its MinHashLSH is not
used, because it cannot bound a query, and so takes quadratic time over prompts that share a template.
"""

import hashlib
from array import array
from collections.abc import Collection, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
from datasketch import MinHash  # type: ignore[import-untyped, unused-ignore]
from numpy.typing import NDArray
from scipy.sparse import coo_array, csr_array
from scipy.sparse.csgraph import connected_components

SIMILARITY_MIN = 0.7
SHINGLE_WORDS = 3
SHINGLE_CHARACTERS = 5
"""About three Chinese words, so that near duplicates may differ as much as with shingles of words."""
WORD_CHARACTERS_MAX = 20
"""A text with more characters per word than this, on average, does not separate its words by spaces."""
PERMUTATIONS = 64
BANDS, BAND_ROWS = 21, 3
"""A pair at the threshold agrees on no band, and is missed, with probability (1 - 0.7**3)**21 = 0.00015."""
SORTED_ROWS = 8
NEIGHBOURS_MAX = 8
"""Candidates of a text per band. If more texts agree on a band, such as the prompts of a template, the candidates are
the texts that agree on most of the SORTED_ROWS from there on: near duplicates before other prompts of the template."""
PAIRS_AT_ONCE = 100_000


def representatives(texts: Collection[str], ties: Collection[tuple[str, str]] = ()) -> dict[str, str]:
    """For each text the first text, in sorted order, of its cluster; the text itself when its cluster has no other.

    texts : normalised.  ties : pairs of texts that belong into one cluster, however different they are; the texts of a
    tie need not be among `texts`. Neither the order of the texts nor the number of copies matters.
    """
    unique = sorted({*texts, *chain.from_iterable(ties)})
    index = {text: i for i, text in enumerate(unique)}
    tied = np.array([(index[a], index[b]) for a, b in ties], dtype=np.int64).reshape(-1, 2)
    clusters = _components(np.concatenate([tied, near_duplicates(unique)]), len(unique))
    _, first = np.unique(clusters, return_index=True)
    return {text: unique[i] for text, i in zip(unique, first[clusters].tolist(), strict=True)}


def near_duplicates(texts: Sequence[str]) -> NDArray[np.int64]:
    """(pairs, 2) indices of near duplicates: enough pairs to connect each cluster, not all pairs.

    texts : all different, in an order that depends on the texts alone: among the many prompts of a template the order
    decides in part which prompts are compared.
    """
    duplicates = np.empty((0, 2), np.int64)
    if len(texts) < 2:
        return duplicates
    hashes, starts = _shingle_hashes(texts)
    signatures = _signatures(hashes, starts)
    columns = np.unique(hashes, return_inverse=True)[1]
    shingles = csr_array((np.ones(len(columns), np.int32), columns, starts))  # (texts, different shingles), 0 or 1
    clusters = np.arange(len(texts))
    for band in range(BANDS):
        pairs = _candidates(signatures, band)
        pairs = pairs[clusters[pairs[:, 0]] != clusters[pairs[:, 1]]]
        pairs = pairs[_similarity(shingles, pairs) >= SIMILARITY_MIN]
        if len(pairs):
            duplicates = np.concatenate([duplicates, pairs])
            clusters = _components(duplicates, len(texts))
    return duplicates


def _shingle_hashes(texts: Sequence[str]) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """(64-bit hashes of all shingles, text after text, sorted within a text; the start of each text, and the end).

    Hashes may stand for shingles, because only a collision within one pair of texts could matter.
    """
    hashes, starts = array("Q"), array("q", [0])
    for text in texts:
        hashes.extend(sorted({_hash(shingle) for shingle in _shingles(text)}))
        starts.append(len(hashes))
    return np.array(hashes, np.uint64), np.array(starts, np.int64)


def _shingles(text: str) -> set[str]:
    words = text.split()
    if len(text) > WORD_CHARACTERS_MAX * len(words):
        return {text[i : i + SHINGLE_CHARACTERS] for i in range(len(text) - SHINGLE_CHARACTERS + 1)}
    if len(words) < SHINGLE_WORDS:
        return {text}
    return {" ".join(words[i : i + SHINGLE_WORDS]) for i in range(len(words) - SHINGLE_WORDS + 1)}


def _hash(shingle: str) -> int:
    return int.from_bytes(hashlib.blake2b(shingle.encode("utf-8", "replace"), digest_size=8).digest())


def _signatures(hashes: NDArray[np.uint64], starts: NDArray[np.int64]) -> NDArray[np.uint64]:
    """(texts, PERMUTATIONS) least hash of each text under each permutation."""
    sets = (hashes[start:end].tolist() for start, end in pairwise(starts))
    minhashes = MinHash.generator(sets, num_perm=PERMUTATIONS, seed=1, hashfunc=int, scheme="affine64")
    rows = (minhash.hashvalues for minhash in minhashes)
    return np.fromiter(rows, dtype=np.dtype((np.uint64, PERMUTATIONS)), count=len(starts) - 1)


def _candidates(signatures: NDArray[np.uint64], band: int) -> NDArray[np.int64]:
    """(pairs, 2) texts whose signatures agree on the band; a text is in at most 2 * NEIGHBOURS_MAX pairs."""
    columns = (band * BAND_ROWS + np.arange(SORTED_ROWS)) % PERMUTATIONS
    order = np.lexsort(signatures[:, columns[::-1]].T)
    rows = signatures[order][:, columns[:BAND_ROWS]]
    pairs = []
    for distance in range(1, NEIGHBOURS_MAX + 1):
        at = np.flatnonzero((rows[:-distance] == rows[distance:]).all(axis=1))
        pairs.append(np.stack([order[at], order[at + distance]], axis=1))
    return np.concatenate(pairs)


def _similarity(shingles: Any, pairs: NDArray[np.int64]) -> NDArray[np.float64]:
    """(pairs,) Jaccard similarity of the two texts of each pair."""
    sizes = np.diff(shingles.indptr)
    parts = [np.empty(0)]
    for start in range(0, len(pairs), PAIRS_AT_ONCE):
        a, b = pairs[start : start + PAIRS_AT_ONCE].T
        shared = shingles[a].multiply(shingles[b]).sum(axis=1)
        parts.append(shared / (sizes[a] + sizes[b] - shared))
    return np.concatenate(parts)


def _components(edges: NDArray[np.int64], nodes: int) -> NDArray[np.int64]:
    """(nodes,) the number of each node's connected component."""
    graph = coo_array((np.ones(len(edges), bool), edges.T), shape=(nodes, nodes))
    return np.asarray(connected_components(graph, directed=False)[1], np.int64)
