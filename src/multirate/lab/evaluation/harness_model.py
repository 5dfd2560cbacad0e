"""The engine as a model of lm-evaluation-harness. Only imported where that is installed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from multirate.engine import Engine, eos_token_ids
from multirate.errors import UserError, say_once
from multirate.lab.evaluation.likelihood import log_likelihood
from multirate.lab.evaluation.modes import DYNAMIC, Decoding
from multirate.loading.chat_template import apply_template

Progress = Callable[[int, int], None]
"""progress(requests done, requests in all) of one kind of request."""
DEFAULT_CONTEXT = 2048
"""Of a model without a limit of its own; the harness's default."""
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
_IGNORED = ("do_sample", "until", "max_gen_toks")


@dataclass
class Work:
    """What decoding took, summed over answers. steps: passes of the model after the prompts'."""

    answers: int = 0
    tokens: int = 0
    first_tokens: int = 0
    steps: int = 0
    seconds: float = 0.0
    exits: dict[int, int] = field(default_factory=dict)


class EngineLM(TemplateLM):
    """An engine that decodes in one mode, for `lm_eval.simple_evaluate(model=EngineLM(…))`.

    Generated text is decoded in the mode, one request at a time. Log-likelihoods are of given
    texts, where nothing can be drafted and no token leaves: they are those of all layers in every
    mode. Texts that do not fit the context are cut from the left, and that is said once. Prompts of
    a chat template get no further special tokens. With do_sample each request has a seed of its
    own, its number, so that a run can be repeated.
    """

    def __init__(
        self, engine: Engine, decoding: Decoding, progress: Progress | None = None
    ) -> None:
        super().__init__()
        if engine.tokenizer is None:
            raise UserError("evaluation needs the model's tokenizer, but the model has none")
        self.engine = engine
        self.decoding = decoding
        self.tokenizer = engine.tokenizer
        self.work = Work()
        self._progress = progress
        self._chat = False

    @property
    def max_length(self) -> int:
        """Most tokens of a prompt and what follows."""
        return self.engine.decoder.info.max_positions or DEFAULT_CONTEXT

    @property
    def _context(self) -> str:
        """What `max_length` is, for a sentence."""
        info = self.engine.decoder.info
        if info.max_positions is not None:
            return info.context
        return f"the {DEFAULT_CONTEXT} tokens used for a model without a context limit"

    @property
    def eot_token_id(self) -> int:
        """The first of the ids that end a text."""
        ids = eos_token_ids(self.engine.model, self.tokenizer)
        if not ids:
            raise UserError("evaluation needs an end-of-text token, but the model has none")
        return ids[0]

    @property
    def prefix_token_id(self) -> int:
        """What a text without context is scored after."""
        first = self.tokenizer.bos_token_id
        return self.eot_token_id if first is None else int(first)

    @property
    def tokenizer_name(self) -> str:
        """For the harness's cache of requests."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: Any
    ) -> list[int]:
        """Token ids; special tokens as the tokenizer does, but none twice."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (self._chat or (begin and string.startswith(begin)))
        ids = self.tokenizer(string, add_special_tokens=add_special_tokens)["input_ids"]
        return [int(token) for token in ids]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """The conversation as text, which is what the model is then asked with."""
        self._chat = True
        text: str = apply_template(
            self.tokenizer,
            chat_history,
            "a task's prompt",
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )
        return text

    def loglikelihood(
        self, requests: Sequence[Any], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        """(log-likelihood, whether greedy decoding would say it) of each continuation."""
        found: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return found

    def _loglikelihood_tokens(
        self,
        requests: Sequence[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        self._say_what_is_scored()
        found = []
        for number, (texts, context, continuation) in enumerate(requests):
            found.append(self._score(context, continuation))
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, found[-1])
            self._done(number + 1, len(requests))
        return found

    def loglikelihood_rolling(
        self, requests: Sequence[Any], disable_tqdm: bool = False
    ) -> list[float]:
        """The log-likelihood of whole texts: in windows where they are longer than the context,
        with as much context as fits before every token.
        """
        self._say_what_is_scored()
        found = []
        for number, request in enumerate(requests):
            (text,) = request.args
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(text, add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            pairs = [make_disjoint_window(window) for window in windows]
            found.append(sum(self._score(before, after)[0] for before, after in pairs))
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), found[-1])
            self._done(number + 1, len(requests))
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Each request's answer: up to its first stop string, which is not part of it."""
        found = []
        for number, request in enumerate(requests):
            context, given = request.args
            found.append(self._answer(context, given, number))
            self.cache_hook.add_partial("generate_until", (context, given), found[-1])
            self._done(number + 1, len(requests))
        return found

    def _answer(self, context: str, given: Mapping[str, Any], seed: int) -> str:
        settings = dict(normalize_gen_kwargs(dict(given)))
        for name in settings:
            if name not in (*_SAMPLING, *_IGNORED):
                raise UserError(
                    f"a task's generation_kwargs have {name!r}; accepted: "
                    f"{', '.join((*_SAMPLING, *_IGNORED))}"
                )
        chosen = {name: settings[name] for name in _SAMPLING if name in settings}
        if settings["do_sample"]:
            chosen = {"temperature": 1.0, "seed": seed} | chosen
        else:
            chosen["temperature"] = 0.0
        sampling = self.engine.sampling(**chosen)
        until = [text for text in settings["until"] if text]
        stop = self.engine.stopping(settings["max_gen_toks"], until)
        room = self.max_length - settings["max_gen_toks"]
        if room < 1:
            raise UserError(
                f"a task asks for {settings['max_gen_toks']} new tokens (max_gen_toks); the "
                f"maximum is {self.max_length - 1}, set by {self._context}"
            )
        prompt = self._cut(self.tok_encode(context), room)
        output = self.engine.generate([prompt], sampling, stop, **self.decoding.arguments)
        if self.engine.decoder.pass_dependent is not None and self.engine.notice:
            say_once(self.engine.notice)
        seen = output.stats
        self.work.answers += 1
        self.work.tokens += seen.tokens
        self.work.first_tokens += seen.first_tokens
        self.work.steps += seen.sequence_steps
        self.work.seconds += seen.seconds
        for layers, count in seen.exits.items():
            self.work.exits[layers] = self.work.exits.get(layers, 0) + count
        text: str = self.tokenizer.decode(output.sequences[0], skip_special_tokens=True)
        for end in until:
            text = text.split(end)[0]
        return text

    def _score(self, context: list[int], continuation: list[int]) -> tuple[float, bool]:
        text = self._cut([*context, *continuation], self.max_length + 1)
        # at least one token stays context: what is cut off a continuation is not scored
        split = max(1, len(text) - len(continuation))
        return log_likelihood(self.engine.decoder, text[:split], text[split:])

    def _cut(self, tokens: list[int], room: int) -> list[int]:
        if len(tokens) > room:
            say_once(f"some prompts were truncated on the left because they exceed {self._context}")
        return tokens[-room:]

    def _say_what_is_scored(self) -> None:
        if self.decoding.mode.name == DYNAMIC:
            say_once(
                "log-likelihoods use all layers in every mode; dynamic mode changes only "
                "generated text"
            )

    def _done(self, done: int, total: int) -> None:
        if self._progress is not None:
            self._progress(done, total)
