"""Which tokens of a document are learned, carried in its ids.

A document is one int32 array. A token that is no target (a user's turn, a system prompt) is stored
as the complement of its id, `~id`, which is negative. So what cuts, packs, saves or sends documents
carries their masks without knowing of them; `labels.build_sample` reads them.
"""

import numpy as np


def with_targets(ids: np.ndarray, learned: np.ndarray) -> np.ndarray:
    """Ids (n,) and which of them are targets, bool (n,), in one array (n,) int32."""
    ids = ids.astype(np.int32)  # unsigned ones have no negative complement
    return np.where(learned, ids, ~ids)


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """The ids (n,) of a document (n,), whether they are targets or not."""
    return np.where(tokens < 0, ~tokens, tokens)


def check_ids(place: str, tokens: np.ndarray, vocab_size: int) -> None:
    """Raise ValueError, with its place, if a document (n,) has an id that the model has not."""
    most = max(int(tokens.max(initial=0)), ~int(tokens.min(initial=0)))
    if most >= vocab_size:
        raise ValueError(
            f"{place}: token id {most}, the model has 0 to {vocab_size - 1}: the file is damaged, "
            "or was tokenized for another model; name files of this one's token ids"
        )


def are_targets(tokens: np.ndarray) -> np.ndarray:
    """Whether the tokens of a document (n,) are learned: bool (n,)."""
    return tokens >= 0
