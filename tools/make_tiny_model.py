"""Makes the embedded model ``tiny`` and its problems: ``python -m tools.make_tiny_model [FOLDER]``.

The model is a Llama of a million parameters with a character tokenizer that answers ``37+48=`` and ``92-15=``. It is
trained by plain supervised learning on correct answers and stopped early, when it gets half of a validation set right,
so that PPO has something to improve. Three disjoint sets of problems: ``eval`` is seen by nobody (neither is ``b+a``
where ``a+b`` is in it), ``validation`` decides when to stop and is not learnt from here, the rest is learnt from. PPO's
prompts are validation and the rest together. One seed and one thread: the same machine writes the same bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import string
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
CHARACTERS = string.digits + "+-=" + "".join(sorted(set(string.printable[:95]) - set(string.digits + "+-="))) + "\n"
PAD, BOS, EOS, UNK = range(len(SPECIAL))
NUMBERS = range(10, 100)
LEAST_DIFFERENCE = 10
IGNORED = -100


class Problem(NamedTuple):
    """A prompt such as ``37+48=`` and its answer, ``85``."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Recipe:
    """Everything that decides what comes out."""

    seed: int = 7
    eval_rows: int = 500
    validation_rows: int = 1000
    batch: int = 128
    learning_rate: float = 1e-3
    warmup: int = 50
    most_updates: int = 1000
    check_every: int = 5
    stop_at: float = 0.5


class Split(NamedTuple):
    """Problems nobody learns from, those that decide when to stop, those that are learnt from."""

    held_out: list[Problem]
    validation: list[Problem]
    learnt: list[Problem]


def split_problems(recipe: Recipe) -> Split:
    """Sums and differences of two-digit numbers, split at random; half of each of the first two parts are sums.

    Of ``a+b`` and ``b+a`` only one is a problem, so that no part holds the twin of another part's. Differences have at
    least two digits: those below 10 are too few to be learnt as quickly as the rest.
    """
    chooser = random.Random(recipe.seed)
    pairs = [(a, b) for a in NUMBERS for b in NUMBERS if b <= a]
    sums = [Problem(f"{x}+{y}=", str(x + y)) for x, y in (chooser.sample(pair, 2) for pair in pairs)]
    differences = [Problem(f"{a}-{b}=", str(a - b)) for a, b in pairs if a - b >= LEAST_DIFFERENCE]
    held_out, validation, learnt = list[Problem](), list[Problem](), list[Problem]()
    held, checked = recipe.eval_rows // 2, (recipe.eval_rows + recipe.validation_rows) // 2
    for problems in (sums, differences):
        chooser.shuffle(problems)
        held_out += problems[:held]
        validation += problems[held:checked]
        learnt += problems[checked:]
    for part in (held_out, validation, learnt):
        chooser.shuffle(part)
    return Split(held_out, validation, learnt)


def build_tokenizer() -> Tokenizer:
    """One token per character of printable ASCII and newline; ``<bos>`` is put before every text."""
    vocabulary = {token: index for index, token in enumerate((*SPECIAL, *CHARACTERS))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[UNK]))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<bos> $A", pair="<bos> $A $B", special_tokens=[("<bos>", BOS)]
    )
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def build_model(recipe: Recipe) -> LlamaForCausalLM:
    """A freshly initialised Llama with tied embeddings and grouped-query attention, float32."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(SPECIAL) + len(CHARACTERS),
            hidden_size=256,
            intermediate_size=384,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
            max_position_embeddings=512,
            initializer_range=0.05,
            tie_word_embeddings=True,
            pad_token_id=PAD,
            bos_token_id=BOS,
            eos_token_id=EOS,
        )
    )


def encode(tokenizer: Tokenizer, problems: list[Problem]) -> tuple[Tensor, Tensor]:
    """Token IDs and labels, int64 [problems, longest]: padded on the right, only answer and ``<eos>`` are labelled."""
    rows, labels = [], []
    for problem in problems:
        prompt = tokenizer.encode(problem.prompt).ids
        answer = [*tokenizer.encode(problem.answer, add_special_tokens=False).ids, EOS]
        rows.append(prompt + answer)
        labels.append([IGNORED] * len(prompt) + answer)
    longest = max(map(len, rows))
    padded = [row + [PAD] * (longest - len(row)) for row in rows]
    return torch.tensor(padded), torch.tensor([label + [IGNORED] * (longest - len(label)) for label in labels])


@torch.no_grad()
def accuracy(model: LlamaForCausalLM, ids: Tensor, labels: Tensor) -> float:
    """Share of rows answered exactly by greedy decoding.

    The greedy answer equals the labelled one if and only if every labelled token is the most likely one after the
    labelled tokens before it, so that a single pass decides.
    """
    guesses = model(input_ids=ids).logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    return ((guesses == wanted) | (wanted == IGNORED)).all(-1).float().mean().item()


def train(model: LlamaForCausalLM, learnt: tuple[Tensor, Tensor], check: tuple[Tensor, Tensor], recipe: Recipe) -> int:
    """Supervised training until ``stop_at`` of ``check`` is right; gives the number of updates.

    Raises:
        RuntimeError: ``stop_at`` was not reached within ``most_updates``.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.01)
    order = torch.Generator().manual_seed(recipe.seed)
    reached = 0.0
    for update in range(1, recipe.most_updates + 1):
        chosen = torch.randint(len(learnt[0]), (recipe.batch,), generator=order)
        ids, labels = learnt[0][chosen], learnt[1][chosen]
        logits = model(input_ids=ids).logits[:, :-1]
        loss = functional.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=IGNORED)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * min(1.0, update / recipe.warmup)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if update % recipe.check_every == 0:
            reached = accuracy(model, *check)
            print(f"update {update}  loss {loss.item():.3f}  validation {reached:.3f}", flush=True)
            if reached >= recipe.stop_at:
                return update
    raise RuntimeError(
        f"validation accuracy is {reached:.3f} after {recipe.most_updates} updates, expected {recipe.stop_at}: "
        "raise Recipe.most_updates or Recipe.learning_rate"
    )


def write_rows(path: Path, problems: list[Problem]) -> None:
    """One JSON object a line, with the fields ``prompt`` and ``ground_truth``."""
    lines = (json.dumps({"prompt": problem.prompt, "ground_truth": problem.answer}) for problem in problems)
    path.write_text("".join(line + "\n" for line in lines))


def save(model: LlamaForCausalLM, tokenizer: Tokenizer, folder: Path) -> None:
    """Writes an ordinary Hugging Face directory, weights in bfloat16."""
    model.bfloat16().save_pretrained(folder)
    names: dict[str, Any] = dict(zip(("pad_token", "bos_token", "eos_token", "unk_token"), SPECIAL, strict=True))
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=model.config.max_position_embeddings,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        **names,
    ).save_pretrained(folder)
    (folder / "model.safetensors").chmod(0o644)


def main() -> None:
    """Makes the problems, the tokenizer and the model, and prints what came out."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    default = Path(__file__).resolve().parent.parent / "common" / "presets" / "tiny"
    parser.add_argument("folder", type=Path, nargs="?", default=default, help="where to write (default: %(default)s)")
    folder: Path = parser.parse_args().folder
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    started, recipe = time.monotonic(), Recipe()
    split, tokenizer, model = split_problems(recipe), build_tokenizer(), build_model(recipe)
    updates = train(model, encode(tokenizer, split.learnt), encode(tokenizer, split.validation), recipe)
    save(model, tokenizer, folder / "model")
    write_rows(folder / "eval.jsonl", split.held_out)
    write_rows(folder / "train.jsonl", split.validation + split.learnt)
    stored = LlamaForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
    held_out = accuracy(stored, *encode(tokenizer, split.held_out))
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) / 2**20
    print(
        f"{sum(p.numel() for p in stored.parameters()):,} parameters, {updates} updates, "
        f"{time.monotonic() - started:.0f} s, {size:.1f} MiB; "
        f"greedy accuracy on {len(split.held_out)} held-out problems: {held_out:.3f} "
        f"(one standard error {math.sqrt(held_out * (1 - held_out) / len(split.held_out)):.3f})"
    )


if __name__ == "__main__":
    main()
