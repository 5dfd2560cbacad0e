"""Training samples from JSON and JSONL files: token ids, a response mask, and batches of a token
budget.

One sample is one row of a batch: truncated to ``max_length`` from the right, padded on the right.
Samples are not packed into shared windows, so no document ever sees another and causality alone
masks the padding: the base runs on its fast, mask-free path whatever its architecture. Batches hold
samples of similar length, so little of them is padding.
"""

from __future__ import annotations

import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multirate.errors import UserError, say_once
from multirate.io import parse_json, read_text
from multirate.loading.chat_template import apply_template
from multirate.training.own_tokens import Said, is_own, read_said, said_by, samples_of

ACCEPTED = (
    '{"instruction", "input"?, "output" or "response"}, {"instruction", "instances": [{"input", '
    '"output"}]}, '
    '{"prompt", "completion"}, {"messages"}, '
    '{"question", "answer"} or {"text"}'
)
TOKENISED_TOGETHER = 1024
"""Conversations."""
POOL = 32
"""Batches drawn together and cut from one length-sorted pool."""


@dataclass(frozen=True)
class Conversation:
    """Turns of a chat, or plain text (``turns`` empty).

    said: the tokens of the assistant's turns, if they are a model's own answers. where: its file
    and line.
    """

    turns: tuple[tuple[str, str], ...] = ()
    text: str = ""
    said: tuple[Said, ...] = field(default=(), compare=False)
    where: str = field(default="the data", compare=False)

    @property
    def answers(self) -> list[str]:
        """The assistant's turns."""
        return [text for role, text in self.turns if role == "assistant"]


Piece = tuple[str | list[int], bool]
"""A text, or its token ids; whether it is a response."""


@dataclass(frozen=True)
class Sample:
    """``ids`` int32 [T]; ``response`` bool [T]: the token is one the model has to write;
    ``prompt``: normalised. ``cut``: responses were, in part at least.
    """

    ids: np.ndarray
    response: np.ndarray
    prompt: str = ""
    cut: bool = False

    @property
    def teaches(self) -> bool:
        """Whether it has a response token to predict."""
        return len(self.ids) >= 2 and bool(self.response[1:].any())


def normalised(text: str) -> str:
    """One form for texts that differ in case, white space or Unicode's compatible characters
    only.
    """
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def prompt_of(conversation: Conversation) -> str:
    """What decides which side of a split a conversation is on: its first question; all of a plain
    text.
    """
    asked = next((text for role, text in conversation.turns if role == "user"), conversation.text)
    return normalised(asked)


def prompt_rank(prompt: str, seed: int) -> bytes:
    """A place in an order of prompts that depends on nothing but the prompt and the seed."""
    return hashlib.sha256(f"{seed} {prompt}".encode()).digest()


def set_aside(samples: Sequence[Sample], most: int, seed: int) -> tuple[list[Sample], list[Sample]]:
    """(training, held-out) samples, no prompt on both sides; at most ``most`` held out, about a
    tenth of the prompts.

    Whether a prompt is held out depends on its hash alone, not on the order of the data or on what
    else is in it. Of the held-out prompts' samples the first of each prompt is evaluated, the
    others are left out.
    """
    cut = (1 << 64) // 10
    chosen = {s.prompt for s in samples if int.from_bytes(prompt_rank(s.prompt, seed)[:8]) < cut}
    if len(chosen) == len({s.prompt for s in samples}):
        chosen = set()  # a handful of prompts: training needs them
    heldout = first_of_each_prompt([s for s in samples if s.prompt in chosen])
    heldout.sort(key=lambda s: prompt_rank(s.prompt, seed))
    return [s for s in samples if s.prompt not in chosen], heldout[:most]


def first_of_each_prompt(samples: Sequence[Sample]) -> list[Sample]:
    """In their order: a prompt that is there often would count as often in held-out figures."""
    first: dict[str, Sample] = {}
    for sample in samples:
        first.setdefault(sample.prompt, sample)
    return list(first.values())


def _conversations(record: Any, where: str, answered: bool) -> list[Conversation]:
    """One for a record, or one for each instance of Self-Instruct's seed format."""
    if answered and is_own(record):
        said = read_said(record, where)
        return [replace(_conversation(record, where, answered), said=said)]
    if not isinstance(record, dict) or "instances" not in record or "instruction" not in record:
        return [_conversation(record, where, answered)]
    instances = record["instances"]
    if (
        not isinstance(instances, list)
        or not instances
        or not all(isinstance(i, dict) for i in instances)
    ):
        raise UserError(
            f"{where}: field 'instances' must be a non-empty list of {{'input', 'output'}}."
        )
    return [
        _conversation(
            {"instruction": record["instruction"], **instance},
            f"{where}, instance {number}",
            answered,
        )
        for number, instance in enumerate(instances, start=1)
    ]


def _conversation(record: Any, where: str, answered: bool) -> Conversation:
    if not isinstance(record, dict):
        raise UserError(
            f"{where}: expected a JSON object, not {type(record).__name__}; accepted: {ACCEPTED}."
        )

    def text(name: str) -> str:
        value = record[name]
        if not isinstance(value, str):
            raise UserError(f"{where}: field '{name}' must be text, not {type(value).__name__}.")
        return value

    if "messages" in record:
        messages = record["messages"]
        if not isinstance(messages, list) or not messages:
            raise UserError(
                f"{where}: field 'messages' must be a non-empty list of {{'role', 'content'}}."
            )
        for number, m in enumerate(messages):
            if (
                not isinstance(m, dict)
                or not isinstance(m.get("role"), str)
                or not isinstance(m.get("content"), str)
            ):
                raise UserError(
                    f"{where}: message {number + 1} must have text fields 'role' and 'content'."
                )
        if answered and all(m["role"] != "assistant" for m in messages):
            raise UserError(
                f"{where}: no message has the role 'assistant', so there is no response to learn "
                "from."
            )
        return Conversation(tuple((m["role"], m["content"]) for m in messages), where=where)
    for ask, answers in (
        ("instruction", ("output", "response")),
        ("prompt", ("completion",)),
        ("question", ("answer",)),
    ):
        found = next((answer for answer in answers if answer in record), None)
        if ask in record and (found or not answered):
            user = text(ask)
            if ask == "instruction" and record.get("input"):
                user = f"{user}\n{text('input')}"
            said = (("assistant", text(found)),) if found else ()
            return Conversation((("user", user), *said), where=where)
    if "text" in record:
        return Conversation(text=text("text"), where=where)
    missing = "" if answered else ", each also without its answer"
    raise UserError(
        f"{where}: fields {sorted(record)} match no known form; accepted: {ACCEPTED}{missing}."
    )


def read_conversations(path: str | Path, answered: bool = True) -> list[Conversation]:
    """All samples of a ``.jsonl`` file (one object per line, blank lines ignored) or a ``.json``
    array.

    answered: whether a record needs its answer (for training) or only its question. Raises
    UserError naming the file and line (or array element) of the first malformed record, or an empty
    file.
    """
    path = Path(path)
    content = read_text(path)
    if not content.strip():
        raise UserError(
            f"Data file {path} is empty; accepted: JSONL or a JSON array of {ACCEPTED}."
        )
    if path.suffix == ".json":
        records = parse_json(content, path)
        if not isinstance(records, list) or not records:
            raise UserError(f"Data file {path} must hold a non-empty JSON array of {ACCEPTED}.")
        return [
            c
            for n, r in enumerate(records, start=1)
            for c in _conversations(r, f"{path}, element {n}", answered)
        ]
    out = []
    for number, line in enumerate(content.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        out += _conversations(parse_json(line, where), where, answered)
    return out


def render_prompt(
    tokenizer: Any, turns: Sequence[tuple[str, str]], where: str = "the prompt"
) -> str:
    """The text before the model's next answer, by the tokenizer's chat template or as "role:
    content" lines. Raises UserError, starting with `where`, for turns that the template rejects.
    """
    messages = [{"role": role, "content": content} for role, content in turns]
    if getattr(tokenizer, "chat_template", None):
        options = {"tokenize": False, "add_generation_prompt": True}
        return str(apply_template(tokenizer, messages, where, **options))
    bos = tokenizer.bos_token or ""
    return (
        bos
        + "".join(f"{role.capitalize()}: {content.strip()}\n\n" for role, content in turns)
        + "Assistant:"
    )


def _render(tokenizer: Any, turns: Sequence[tuple[str, str]], where: str) -> str:
    messages = [{"role": role, "content": content} for role, content in turns]
    if getattr(tokenizer, "chat_template", None):
        return str(apply_template(tokenizer, messages, where, tokenize=False))
    return (
        render_prompt(tokenizer, turns[:-1], where)
        + f" {turns[-1][1].strip()}{tokenizer.eos_token or ''}\n\n"
    )


def _samples(conversation: Conversation, tokenizer: Any) -> list[list[Piece]]:
    """The samples of a conversation, in the pieces that each is tokenised in.

    Own answers are the tokens that were said. Elsewhere the chat template writes the answers. A
    response is what an assistant turn adds after the generation prompt, its end-of-turn token
    included; the text after that token (which no one generates) is left out. Plain text counts as a
    response throughout. Where the template rewrites earlier turns (it leaves out their thoughts),
    what follows is a sample of its own.
    """
    if not conversation.turns:
        bos, eos = tokenizer.bos_token or "", tokenizer.eos_token or ""
        return [[(bos + conversation.text + eos, True)]]
    if conversation.said:
        if said_by(tokenizer, conversation.said, conversation.answers):
            return [list(sample) for sample in samples_of(conversation.said)]
        say_once(
            "own answers that this tokenizer does not encode to their tokens (another model's, "
            "or edited) are used for training as text"
        )
    samples: list[list[Piece]] = []
    done = ""
    cut_off = iter([one.cut_off for one in conversation.said])
    for number, (role, content) in enumerate(conversation.turns, start=1):
        if role != "assistant":
            continue
        prompt, answer = _answer(
            tokenizer, conversation.turns[:number], content, conversation.where
        )
        eos = tokenizer.eos_token
        if eos and eos in answer:
            end = answer.rfind(eos)
            answer = answer[:end] if next(cut_off, False) else answer[: end + len(eos)]
        if not samples or not prompt.startswith(done):
            samples.append([])
            done = ""
        samples[-1] += [(prompt[len(done) :], False), (answer, True)]
        done = prompt + answer
    return samples or [[]]


def _answer(
    tokenizer: Any, turns: Sequence[tuple[str, str]], content: str, where: str
) -> tuple[str, str]:
    """(what precedes the last of `turns`, what the template makes of it: its `content` and the end
    of the turn). Thoughts that the template puts before the content are not the turn's.
    """
    prompt, whole = render_prompt(tokenizer, turns[:-1], where), _render(tokenizer, turns, where)
    eos = tokenizer.eos_token
    place = whole.rfind(
        content.strip(), 0, whole.rfind(eos) if eos and eos in whole else len(whole)
    )
    if whole.startswith(prompt):
        start = len(prompt)
        if whole[start : max(start, place)].strip():
            start = place
    else:  # the generation prompt begins thoughts, and this turn has none
        pairs = enumerate(zip(prompt, whole, strict=False))
        shared = next((at for at, (one, other) in pairs if one != other), len(whole))
        start = shared if place < 0 else place
    return whole[:start], whole[start:]


def encode(
    conversations: Sequence[Conversation], tokenizer: Any, max_length: int
) -> Iterator[Sample]:
    """Token ids and response mask of each sample of the conversations, at most ``max_length``
    tokens (the rest is cut).
    """
    for begin in range(0, len(conversations), TOKENISED_TOGETHER):
        part = [
            (conversation, pieces)
            for conversation in conversations[begin : begin + TOKENISED_TOGETHER]
            for pieces in _samples(conversation, tokenizer)
        ]
        texts = [piece for _, pieces in part for piece, _ in pieces if isinstance(piece, str)]
        # all in one call, which a fast tokenizer answers on all cores
        encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
        tokenised = iter(encoded)
        for conversation, pieces in part:
            ids: list[int] = []
            response: list[bool] = []
            for piece, is_response in pieces:
                found = next(tokenised) if isinstance(piece, str) else piece
                ids += found
                response += [is_response] * len(found)
            yield Sample(
                np.asarray(ids[:max_length], np.int32),
                np.asarray(response[:max_length], np.bool_),
                prompt_of(conversation),
                any(response[max_length:]),
            )


def load_samples(
    paths: Sequence[str | Path], tokenizer: Any, max_length: int, vocabulary: int | None = None
) -> list[Sample]:
    """Encoded samples of all files, in order. Samples without a response token to predict are
    dropped, with a warning. vocabulary: the model's number of tokens. Raises UserError if no sample
    is left, and for a token that the model does not have.
    """
    if not paths:
        raise UserError("No data file was given; --data needs at least one JSONL or JSON file.")
    conversations = [c for path in paths for c in read_conversations(path)]
    samples = list(encode(conversations, tokenizer, max_length))
    kept = [s for s in samples if s.teaches]
    too_long, empty = f"within max_length={max_length}", "at all"
    why = Counter(too_long if s.cut else empty for s in samples if not s.teaches)
    names = ", ".join(str(p) for p in paths)
    most = max((int(s.ids.max()) for s in kept), default=0)
    if vocabulary is not None and most >= vocabulary:
        raise UserError(
            f"the tokenizer encodes {names} with token {most}, outside 0..{vocabulary - 1} (the "
            "model's vocabulary), so it belongs to another model"
        )
    counts = ", ".join(f"{count} none {where}" for where, count in why.items())
    if not kept:
        if why[too_long]:
            mend = "raise max_length"
        elif any(answer.strip() for c in conversations for answer in c.answers):
            mend = "the model's chat template drops the answers"
        else:
            mend = "add answers to the data"
        raise UserError(
            f"No sample of {names} has a response token to learn from ({counts}); {mend}."
        )
    if why:
        say_once(
            f"skipping {len(samples) - len(kept)} of {len(samples)} samples of {names}, which "
            f"have no response token to learn from ({counts})"
        )
    return kept


@dataclass(frozen=True)
class Batch:
    """ids int64 [B, T] padded on the right; mask bool [B, T]: the *next* token is a response token.

    ``indices``: which samples of the plan these are.
    """

    ids: Tensor
    mask: Tensor
    indices: tuple[int, ...] = ()


def collate(samples: Sequence[Sample]) -> Batch:
    """Pads with token 0; padding is never in the mask, and no real row can see it."""
    length = max(len(s.ids) for s in samples)
    ids = np.zeros((len(samples), length), np.int64)
    mask = np.zeros((len(samples), length), np.bool_)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.ids)] = sample.ids
        mask[row, : len(sample.ids) - 1] = sample.response[1:]
    return Batch(torch.from_numpy(ids), torch.from_numpy(mask))


class BatchPlan:
    """The order of batches, a function of (samples, budget, seed) alone, so a resume only needs a
    position.
    """

    def __init__(self, samples: Sequence[Sample], tokens: int, seed: int) -> None:
        self.samples, self.tokens, self.seed = samples, tokens, seed
        self.lengths = np.array([len(s.ids) for s in samples])

    def epoch(self, number: int) -> list[list[int]]:
        """Sample indices of every batch of one epoch: each sample once, rows × longest ≤ the token
        budget.
        """
        rng = np.random.default_rng([self.seed, number])
        order = rng.permutation(len(self.samples))
        pool = max(1, int(POOL * self.tokens / max(1.0, self.lengths.mean())))
        batches: list[list[int]] = []
        for begin in range(0, len(order), pool):
            part = order[begin : begin + pool]
            part = part[np.argsort(self.lengths[part], kind="stable")]
            batch: list[int] = []
            for i in part.tolist():
                if batch and (len(batch) + 1) * self.lengths[i] > self.tokens:
                    batches.append(batch)
                    batch = []
                batch.append(i)
            batches.append(batch)
        return [batches[i] for i in rng.permutation(len(batches))]

    def batches(self, start: int = 0, stride: int = 1) -> Iterator[Batch]:
        """Batches start, start + stride, … of the endless sequence of epochs."""
        number, epoch, offset = 0, self.epoch(0), 0
        index = start
        while True:
            while index - offset >= len(epoch):
                offset += len(epoch)
                number += 1
                epoch = self.epoch(number)
            chosen = epoch[index - offset]
            yield replace(collate([self.samples[i] for i in chosen]), indices=tuple(chosen))
            index += stride
