"""The stream of prompts: rows in seeded order, rendered, tokenised once a run, and skipped if they are too long."""

from __future__ import annotations

import logging
from hashlib import blake2b
from typing import Protocol

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from common.config import Config
from common.token_cache import prompt_key
from common.tokenizer import ChatMessage, TextTokenizer, TokenizerError
from services.coordinator.row import NAMED, Row, RowError
from services.coordinator.rows import Rows, Split, load_rows

log = logging.getLogger("prompts")

_ROUNDS = 6


class PromptCache(Protocol):
    """What the stream needs of ``common.token_cache.TokenCache``."""

    def get_prompt(self, key: bytes) -> npt.NDArray[np.int32] | None:
        """Token ids under this key, int32[length], or None."""
        ...

    def put_prompt(self, key: bytes, ids: npt.ArrayLike) -> None:
        """Stores token ids under this key."""
        ...


class Prompt(Struct, frozen=True, kw_only=True):
    """One prompt, ready for a slot."""

    index: int
    """Index of its row among the usable rows of its split."""
    text: str
    """What was tokenised: the chat template's text, where prompts go through one."""
    key: bytes
    """Its key in the token cache."""
    length: int
    """In tokens."""
    ids: list[int] | None
    """Its token ids; None where they came from the token cache."""
    row: Row


def permuted(index: int, size: int, key: bytes) -> int:
    """Where ``index`` goes in a permutation of ``range(size)`` that ``key`` chooses; any place, without the others.

    A balanced Feistel network over the smallest even number of bits that holds ``size``, repeated until the value falls
    into the range (Black and Rogaway 2002, 'Ciphers with arbitrary finite domains', section 3).
    """
    if not 0 <= index < size:
        raise IndexError(f"index {index} of a permutation of {size}")
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half) - 1
    while True:
        left, right = index >> half, index & mask
        for turn in range(_ROUNDS):
            digest = blake2b(right.to_bytes(8, "little") + bytes([turn]), key=key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & mask)
        index = left << half | right
        if index < size:
            return index


class PromptStream:
    """Batches of prompts of one split.

    ``train`` passes over its rows again and again, each pass in its own order if ``prompts.shuffle``; ``eval`` passes
    over them once, in the order of the file, until ``seek`` begins anew. With a cache, a prompt that it holds is not
    tokenised, and one that is tokenised is put there.

    Raises RowError and TokenizerError when it is made (see ``load_rows``), and RowError for a row that cannot be
    rendered and for a pass that yields nothing.
    """

    def __init__(
        self, config: Config, tokenizer: TextTokenizer, split: Split, cache: PromptCache | None = None
    ) -> None:
        self._prompts = config.prompts
        self._seed = config.run.seed
        self._split: Split = split
        self._tokenizer = tokenizer
        self._cache = cache
        self._epoch = 0
        self._position = 0
        self._too_long: dict[int, int] = {}
        self.tokenised = 0
        """Prompts that had to be tokenised."""
        if config.prompts.chat_template == "always" and not tokenizer.has_chat_template:
            raise TokenizerError(
                "prompts.chat_template: 'always', but the tokenizer of model.path has no chat template; choose 'auto' "
                "or 'never', or add chat_template.jinja to the model's directory"
            )
        self._rows: Rows = load_rows(config, split)
        if self._rows.skipped.count:
            log.warning("%s rows: %s", split, self._rows.skipped)

    @property
    def position(self) -> tuple[int, int]:
        """``(epoch, position)``: the pass, and how many rows of it were looked at; ``seek`` returns there."""
        return self._epoch, self._position

    @property
    def rows(self) -> int:
        """Usable rows, those that turn out too long included."""
        return len(self._rows)

    @property
    def without_ground_truth(self) -> int:
        """Rows that were skipped because they have no ground truth."""
        return self._rows.skipped.count

    @property
    def too_long(self) -> int:
        """Rows seen so far that are longer than ``prompts.max_tokens``."""
        return len(self._too_long)

    def seek(self, epoch: int, position: int) -> None:
        """Continues from a position that ``position`` gave; ``seek(0, 0)`` begins anew."""
        if epoch < 0 or not 0 <= position <= len(self._rows):
            raise ValueError(f"position ({epoch}, {position}): expected a pass of {len(self._rows)} rows")
        self._epoch, self._position = epoch, position

    def try_next(self) -> None:
        """Makes the next prompt and stays where it is: rows that cannot be used are refused before a run starts."""
        here = self.position
        self.next_batch(1)
        self.seek(*here)

    def next_batch(self, n: int) -> list[Prompt]:
        """The next ``n`` prompts; fewer, and then none, at the end of the rows of ``eval``."""
        batch: list[Prompt] = []
        while len(batch) < n:
            if self._position >= len(self._rows):
                if self._split == "eval":
                    break
                self._epoch, self._position = self._epoch + 1, 0
            index = self._index()
            self._position += 1
            prompt = self._prompt(index)
            if prompt is not None:
                batch.append(prompt)
            elif len(self._too_long) == len(self._rows):
                self._raise_nothing()
        return batch

    def _index(self) -> int:
        if self._split == "eval" or not self._prompts.shuffle:
            return self._position
        key = f"order {self._seed} {self._epoch}".encode()
        return permuted(self._position, len(self._rows), key)

    def _raise_nothing(self) -> None:
        shortest = min(self._too_long.values())
        raise RowError(
            f"prompts.max_tokens: {self._prompts.max_tokens}, but all {len(self._rows)} usable {self._split} rows are "
            f"longer; the shortest has {shortest} tokens"
        )

    def _prompt(self, index: int) -> Prompt | None:
        if index in self._too_long:
            return None
        row = self._rows[index]
        text, chat = self._render(row)
        template = self._tokenizer.chat_template if chat else ""
        key = prompt_key(text, template, self._tokenizer.fingerprint)
        cached = self._cache.get_prompt(key) if self._cache else None
        if cached is not None:
            return Prompt(index=index, text=text, key=key, length=len(cached), ids=None, row=row)
        ids = self._tokenizer.encode(text, chat=chat)
        self.tokenised += 1
        if not ids:
            raise RowError(f"{row.origin}: the prompt {text!r} has no tokens")
        if len(ids) > self._prompts.max_tokens:
            self._skip(index, row, len(ids))
            return None
        if self._cache:
            self._cache.put_prompt(key, ids)
        return Prompt(index=index, text=text, key=key, length=len(ids), ids=ids, row=row)

    def _skip(self, index: int, row: Row, length: int) -> None:
        self._too_long[index] = length
        if len(self._too_long) <= NAMED:
            limit = self._prompts.max_tokens
            log.warning("%s: skipped, its prompt has %d tokens (prompts.max_tokens = %d)", row.origin, length, limit)
        if len(self._too_long) == NAMED:
            log.warning("further %s rows that are too long are counted and not named", self._split)

    def _render(self, row: Row) -> tuple[str, bool]:
        """The text to tokenise, and whether a chat template wrote it."""
        mode = self._prompts.chat_template
        templated = mode == "always" or (mode == "auto" and self._tokenizer.has_chat_template)
        if isinstance(row.prompt, str):
            if not templated:
                return row.prompt, False
            messages: list[ChatMessage] = [{"role": "user", "content": row.prompt}]
        elif not templated:
            why = "prompts.chat_template is 'never'" if mode == "never" else "the tokenizer has no chat template"
            has_one = self._tokenizer.has_chat_template
            remedy = "or prompts.chat_template = 'auto'" if has_one else "or a model.path that has a chat template"
            raise RowError(
                f"{row.origin}: the prompt is a list of chat messages, but {why}; expected a string, {remedy}"
            )
        else:
            messages = row.prompt
        if self._prompts.system and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self._prompts.system}, *messages]
        try:
            return self._tokenizer.render_chat(messages), True
        except TokenizerError as error:
            raise RowError(f"{row.origin}: {error}") from error
