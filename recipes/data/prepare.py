"""Tokenize files once, in parallel, into a folder of shards that training reads.

The folder is finished when it has a manifest. Until then progress.json says which shards are done
and where to go on, so an interrupted preparation continues after its last whole shard. The shards
depend on the input and the settings alone, not on the number of workers or interruptions.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

import numpy as np

from recipes.data.content import Conversation
from recipes.data.files import files_identity
from recipes.data.parallel import ordered_map
from recipes.data.readers import read_records
from recipes.data.records import BadDocument, Record
from recipes.data.shards import (
    FORMAT,
    MANIFEST,
    PROGRESS,
    TEMPORARY,
    VERSION,
    read_json,
    write_json,
    write_shard,
)
from recipes.data.targets import are_targets
from recipes.data.token_files import Vocabulary
from recipes.data.tokens import Tokenizer, encode, tokenizer_identity, vocabulary_of

# A worker's portion: so many documents or bytes of a file, whichever comes first.
_CHUNK_DOCUMENTS = 64
_CHUNK_BYTES = 1 << 18

# A document's place: number of its file, and of the line or row in it.
Place = tuple[int, int]
Chunk = list[tuple[Place, Record]]
Result = tuple[Place, int, np.ndarray | BadDocument]


@dataclass(frozen=True)
class Settings:
    """What decides the content of the shards.

    files: in order. text_column: JSON key or column. tokenizer_path: a folder.
    shard_tokens: a shard is closed after the document that reaches so many tokens.
    skip_bad: leave bad documents out and count them.
    loss_on: which messages of conversations are learned, see `tokens.encode`.
    """

    files: list[Path]
    text_column: str
    tokenizer_path: str
    shard_tokens: int
    skip_bad: bool
    loss_on: str = "all"


def prepare(
    settings: Settings,
    output: Path,
    workers: int,
    on_document: Callable[[Result], None],
) -> dict[str, Any]:
    """Write the shards and the manifest; go on where an earlier call was interrupted.

    Args:
        output: the folder; `clear` says what may be in it.
        workers: processes that tokenize.
        on_document: told of every document, good or bad, in order.

    Returns:
        The manifest.

    Raises:
        BadDocument: without `skip_bad`, at the first one.
        ValueError: the folder is in use, there is no document, or no conversation to which a
            loss on turns applies.
    """
    try:
        tokenizer = Tokenizer(settings.tokenizer_path)
    except Exception as error:  # the library raises what its Rust core says, of no kind
        raise ValueError(f"--tokenizer {settings.tokenizer_path}: {error}") from None
    tokenizer.warn_without_eos()
    wanted = {
        "files": files_identity(settings.files, settings.text_column),
        "tokenizer": tokenizer_identity(tokenizer),
        "shard_tokens": settings.shard_tokens,
    }
    if _has_conversations(settings, tokenizer):
        wanted["loss_on"] = settings.loss_on
        wanted["chat_template"] = tokenizer.chat_identity
    elif settings.loss_on != "all":
        raise ValueError(
            f"--loss-on {settings.loss_on}: {settings.files[0]} holds no conversations; allowed: "
            "all, or --text-column with a column of messages"
        )
    state = _open(output, wanted)
    documents: list[np.ndarray] = []
    tokens = 0
    # The fork server imports torch once; workers are forked from it in milliseconds.
    context = get_context("forkserver")
    context.set_forkserver_preload(["recipes.data.prepare", "torchtitan.components.tokenizer"])
    of_workers = settings.tokenizer_path, settings.loss_on
    with ProcessPoolExecutor(workers, context, _start_worker, of_workers) as pool:
        chunks = _chunks(settings, vocabulary_of(tokenizer), *state["after"])
        for results in ordered_map(pool, _encode_chunk, chunks, in_flight=4 * workers):
            for place, offset, result in results:
                on_document((place, offset, result))
                if isinstance(result, BadDocument):
                    if not settings.skip_bad:
                        raise result
                    state["bad_documents"] += 1
                    continue
                documents.append(result)
                tokens += len(result)
                if tokens >= settings.shard_tokens:
                    _add_shard(output, state, documents, place)
                    documents, tokens = [], 0
    if documents:
        _add_shard(output, state, documents, place)
    if not state["shards"]:
        raise ValueError(
            f"{settings.files[0]} ...: no good document in {len(settings.files)} files"
        )
    return _finish(output, state, settings)


def clear(output: Path) -> None:
    """Remove what an earlier preparation left, the manifest first; nothing else is touched."""
    for pattern in (MANIFEST, PROGRESS, "shard-*.arrow", f"*{TEMPORARY}"):
        for path in output.glob(pattern):
            path.unlink()


def _has_conversations(settings: Settings, tokenizer: Any) -> bool:
    """Whether the first good document is a conversation."""
    for chunk in _chunks(settings, vocabulary_of(tokenizer), 0, 0):
        for _, record in chunk:
            with contextlib.suppress(BadDocument):
                return isinstance(record.content(), Conversation)
    return False


def _open(output: Path, wanted: dict[str, Any]) -> dict[str, Any]:
    """The state of a new preparation, or of one that goes on."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output {output}: {error.strerror}; a folder is allowed") from None
    if (output / MANIFEST).exists():
        raise ValueError(f"--output {output}: is finished; --overwrite prepares it anew")
    if (output / PROGRESS).exists():
        state = read_json(output / PROGRESS)
        if not state.keys() >= {"settings", "after", "bad_documents", "shards"}:
            raise ValueError(f"{output / PROGRESS}: damaged; --overwrite prepares it anew")
        changed = [key for key in wanted if state["settings"].get(key) != wanted[key]]
        if changed:
            raise ValueError(
                f"--output {output}: begun with other {', '.join(changed)}; give the same as then "
                "to go on, --overwrite to begin anew, or another folder"
            )
        for path in output.glob(f"*{TEMPORARY}"):
            path.unlink()
        return state
    if any(output.iterdir()):
        raise ValueError(f"--output {output}: is not empty; give a new folder")
    state = {"settings": wanted, "after": [0, 0], "bad_documents": 0, "shards": []}
    write_json(output / PROGRESS, state)
    return state


def _add_shard(
    output: Path, state: dict[str, Any], documents: list[np.ndarray], place: Place
) -> None:
    path = output / f"shard-{len(state['shards']):05d}.arrow"
    write_shard(path, documents)
    state["shards"].append(
        {
            "file": path.name,
            "bytes": path.stat().st_size,
            "documents": len(documents),
            "tokens": sum(map(len, documents)),
            "longest": max(map(len, documents)),
            "learned": sum(int(are_targets(document).sum()) for document in documents),
        }
    )
    state["after"] = list(place)
    write_json(output / PROGRESS, state)


def _finish(output: Path, state: dict[str, Any], settings: Settings) -> dict[str, Any]:
    shards = state["shards"]
    manifest = {
        "format": FORMAT,
        "version": VERSION,
        "tokenizer": {"path": settings.tokenizer_path, "sha256": state["settings"]["tokenizer"]},
        "documents": sum(shard["documents"] for shard in shards),
        "tokens": sum(shard["tokens"] for shard in shards),
        "longest": max(shard["longest"] for shard in shards),
        "bad_documents": state["bad_documents"],
        "text_column": settings.text_column,
        "loss_on": state["settings"].get("loss_on"),
        "shards": shards,
    }
    write_json(output / MANIFEST, manifest)
    (output / PROGRESS).unlink()
    return manifest


def _chunks(
    settings: Settings, vocabulary: Vocabulary, first_file: int, done: int
) -> Iterator[Chunk]:
    """The records after line or row `done` of file number `first_file`, in portions."""
    for index in range(first_file, len(settings.files)):
        skip = done if index == first_file else 0
        chunk: Chunk = []
        start = 0
        file = settings.files[index]
        for record in read_records(file, settings.text_column, skip, vocabulary):
            chunk.append(((index, record.number), record))
            if len(chunk) == _CHUNK_DOCUMENTS or record.offset - start >= _CHUNK_BYTES:
                yield chunk
                chunk, start = [], record.offset
        if chunk:
            yield chunk


_tokenizer: Any = None  # of a worker process
_loss_on = "all"


def _start_worker(tokenizer_path: str, loss_on: str) -> None:
    global _tokenizer, _loss_on
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process per core is parallel enough
    _tokenizer = Tokenizer(tokenizer_path)
    _loss_on = loss_on
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """A worker of a process that was killed would wait for work for ever."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _encode_chunk(chunk: Chunk) -> list[Result]:
    results: list[Result] = []
    for place, record in chunk:
        try:
            result: np.ndarray | BadDocument = encode(_tokenizer, record, _loss_on)
        except BadDocument as error:
            result = error
        results.append((place, record.offset, result))
    return results
