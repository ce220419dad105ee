"""Search and sampling, compared with every possible text, with ERNIE's beam search written out for
one prompt, and with transformers' `generate` on the same scores."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    NoRepeatNGramLogitsProcessor,
    PretrainedConfig,
    PreTrainedModel,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_outputs import CausalLMOutput

from palm_ds.common.errors import UserError
from palm_ds.model.generation.cached_decoder import CachedDecoder
from palm_ds.model.generation.generate import (
    DecodingSettings,
    Generated,
    TokenRules,
    draw,
    generate,
    kept_probabilities,
    repeating,
)
from tests.helpers.infilling import FORMAT, next_scores, prompt, small_model

WORDS = 7  # [PAD] [CLS] [SEP] . [ATTN] . .
RULES = TokenRules(end=FORMAT.end, blocked=(0, 1, 4))
SOURCES = ([1, 5, 6, 3, 2], [1, 6, 2], [1, 3, 3, 5, 6, 2])
LONGEST = 4
Scores = Callable[[Sequence[int]], torch.Tensor]


@pytest.fixture(scope="module")
def scores_of() -> list[Scores]:
    """For each source: the scores after a target, from dense passes; remembered."""
    encoder, head = small_model(WORDS, seed=3)

    def remembered(source: Sequence[int]) -> Scores:
        known: dict[tuple[int, ...], torch.Tensor] = {}

        def scores(target: Sequence[int]) -> torch.Tensor:
            key = tuple(target)
            if key not in known:
                known[key] = next_scores(encoder, head, prompt(source), [FORMAT.begin, *target])
            return known[key]

        return scores

    return [remembered(source) for source in SOURCES]


def generated(
    settings: DecodingSettings,
    sources: Sequence[Sequence[int]] = SOURCES,
    *,
    rules: TokenRules = RULES,
    numbers: Sequence[int] = (),
    limits: Sequence[int] = (),
) -> list[Generated]:
    encoder, head = small_model(WORDS, seed=3)
    decoder = CachedDecoder(encoder, head.logits, [prompt(x) for x in sources], FORMAT)
    most = limits or [settings.max_tokens] * len(sources)
    return generate(decoder, FORMAT.begin, most, settings, rules, numbers=numbers)


def log_probs(scores: Scores, target: Sequence[int], blocked: Sequence[int]) -> np.ndarray:
    found = torch.log_softmax(scores(target).double(), -1).numpy().copy()
    found[list(blocked)] = -np.inf
    return found


# ---- search ----


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.5, -0.5])
def test_enough_beams_find_the_best_of_all_texts(scores_of: list[Scores], alpha: float) -> None:
    letters = [x for x in range(WORDS) if x not in (*RULES.blocked, FORMAT.end)]
    settings = DecodingSettings(max_tokens=LONGEST, beams=200, length_penalty=alpha)
    for scores, found in zip(scores_of, generated(settings), strict=True):
        every = []
        for length in range(LONGEST + 1):
            for text in itertools.product(letters, repeat=length):
                whole = [*text, FORMAT.end][:LONGEST]
                total = sum(
                    log_probs(scores, whole[:k], RULES.blocked)[token]
                    for k, token in enumerate(whole)
                )
                every.append((total / ((5 + len(whole)) / 6) ** alpha, text))
        score, text = max(every)
        assert found.tokens == text
        assert found.score == pytest.approx(score, abs=1e-4)


class _Given:
    """A decoder with the same scores at every step."""

    def __init__(self, probabilities: Sequence[float]):
        self.scores = torch.tensor(probabilities).log()

    def widen(self, hypotheses: int) -> None: ...

    def step(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.scores.expand(len(tokens), -1).clone()

    def select(self, hypotheses: torch.Tensor, prompts: torch.Tensor | None = None) -> None: ...


def test_a_text_that_goes_on_is_not_returned_without_its_end() -> None:
    """With a penalty below 0 its score falls with each token more."""
    settings = DecodingSettings(max_tokens=5, beams=2, length_penalty=-1.0)
    (found,) = generate(_Given([0.45, 0.13, 0.42]), 0, [5], settings, TokenRules(end=2))
    assert found.tokens == () and found.score == pytest.approx(np.log(0.42))


def ernie_beams(scores: Scores, width: int, alpha: float, ngram: int) -> tuple[list[int], float]:
    """Beam search of ERNIE-GEN's static graph, for one prompt: finished hypotheses keep their score
    and stay among the beams."""
    beams: list[tuple[float, float, list[int]]] = [(0.0, 0.0, [])]  # score, log p, tokens
    for step in range(LONGEST):
        candidates = []
        for score, total, tokens in beams:
            if FORMAT.end in tokens:
                candidates.append((score, total, tokens))
                continue
            follow = log_probs(scores, tokens, RULES.blocked)
            for token in range(WORDS):
                grown = [*tokens, token]
                grams = [tuple(grown[i : i + ngram]) for i in range(len(grown) - ngram + 1)]
                if ngram and len(set(grams)) < len(grams):
                    continue
                new = total + follow[token]
                candidates.append((new / ((5 + step + 1) / 6) ** alpha, new, grown))
        beams = sorted(candidates, key=lambda each: -each[0])[:width]
        if all(FORMAT.end in tokens for _, _, tokens in beams):
            break
    score, _, tokens = beams[0]
    return [x for x in tokens if x != FORMAT.end], score


@pytest.mark.parametrize(
    ("width", "alpha", "ngram"), [(1, 1.0, 0), (2, 0.0, 0), (3, 0.6, 2), (3, 1.3, 1), (4, 1.0, 2)]
)
def test_beams_equal_ernies(scores_of: list[Scores], width: int, alpha: float, ngram: int) -> None:
    settings = DecodingSettings(
        max_tokens=LONGEST, beams=width, length_penalty=alpha, no_repeat_ngram=ngram
    )
    for scores, found in zip(scores_of, generated(settings), strict=True):
        tokens, score = ernie_beams(scores, width, alpha, ngram)
        assert list(found.tokens) == tokens
        assert found.score == pytest.approx(score, abs=1e-4)


class SameScores(PreTrainedModel, GenerationMixin):
    """The scores of a target as a model of transformers."""

    config_class = PretrainedConfig

    def __init__(self, scores: Scores):
        config = PretrainedConfig(vocab_size=WORDS, is_decoder=True)
        config.num_hidden_layers = 0
        super().__init__(config)
        self.scores = scores
        self.anything = torch.nn.Parameter(torch.zeros(1))

    def forward(self, input_ids: torch.Tensor, **unused: Any) -> CausalLMOutput:
        found = [self.scores(row[1:]) for row in input_ids.tolist()]
        return CausalLMOutput(logits=torch.stack(found)[:, None])  # type: ignore[arg-type]

    def prepare_inputs_for_generation(self, input_ids: torch.Tensor, **unused: Any) -> dict:
        return {"input_ids": input_ids}


def by_transformers(scores: Scores, **settings: Any) -> list[int]:
    config = GenerationConfig(
        max_new_tokens=LONGEST,
        pad_token_id=0,
        bos_token_id=FORMAT.begin,
        eos_token_id=FORMAT.end,
        suppress_tokens=list(RULES.blocked),
        use_cache=False,
        **settings,
    )
    out = SameScores(scores).generate(torch.tensor([[FORMAT.begin]]), config)
    tokens = out[0, 1:].tolist()  # type: ignore[index]
    return tokens[: tokens.index(FORMAT.end)] if FORMAT.end in tokens else tokens


@pytest.mark.parametrize("ngram", [0, 1, 2])
def test_greedy_search_equals_transformers(scores_of: list[Scores], ngram: int) -> None:
    found = generated(DecodingSettings(max_tokens=LONGEST, no_repeat_ngram=ngram))
    for scores, each in zip(scores_of, found, strict=True):
        wanted = by_transformers(scores, do_sample=False, no_repeat_ngram_size=ngram)
        assert list(each.tokens) == wanted


def test_wide_beams_equal_transformers(scores_of: list[Scores]) -> None:
    """Without length penalty both rank by log-probability; with few beams they differ, since
    finished hypotheses take no place in transformers."""
    found = generated(DecodingSettings(max_tokens=LONGEST, beams=60, length_penalty=0.0))
    for scores, each in zip(scores_of, found, strict=True):
        wanted = by_transformers(scores, num_beams=60, length_penalty=0.0, early_stopping=False)
        assert list(each.tokens) == wanted


@pytest.mark.parametrize("how", [dict(beams=3), dict(temperature=0.9)])
def test_a_text_does_not_depend_on_the_batch(how: dict[str, Any]) -> None:
    settings = DecodingSettings(max_tokens=9, **how)
    numbers = [7, 2, 40]
    together = generated(settings, numbers=numbers)
    alone = [
        generated(settings, [source], numbers=[number])[0]
        for source, number in zip(SOURCES, numbers, strict=True)
    ]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    assert [x.score for x in together] == pytest.approx([x.score for x in alone], abs=1e-5)


def test_limits_minimum_and_impossible_rules() -> None:
    settings = DecodingSettings(max_tokens=9, min_tokens=3)
    limits = [2, 9, 1]
    lengths = [len(each.tokens) for each in generated(settings, limits=limits)]
    assert lengths[0] == 2 and lengths[1] >= 3 and lengths[2] == 1
    everything = TokenRules(end=FORMAT.end, blocked=tuple(x for x in range(WORDS) if x != 2))
    assert generated(settings, rules=everything)[0].tokens == ()  # it can only end


# ---- sampling ----


def test_the_tokens_drawn_have_the_frequencies_of_the_scores(scores_of: list[Scores]) -> None:
    count = 4000
    settings = DecodingSettings(max_tokens=1, temperature=1.0, seed=5)
    drawn = generated(settings, [SOURCES[0]] * count, numbers=range(count))
    probs = np.exp(log_probs(scores_of[0], [], RULES.blocked))
    probs /= probs.sum()
    counts = np.bincount([each.tokens[0] if each.tokens else FORMAT.end for each in drawn])
    for token, wanted in enumerate(probs):
        found = counts[token] / count if token < len(counts) else 0.0
        assert abs(found - wanted) < 4 * math.sqrt(wanted * (1 - wanted) / count) + 1e-9


@pytest.mark.parametrize(
    ("top_k", "top_p", "temperature"), [(0, 1.0, 0.5), (3, 1.0, 1.0), (0, 0.7, 1.0), (4, 0.8, 1.7)]
)
def test_kept_probabilities_equal_transformers(
    top_k: int, top_p: float, temperature: float
) -> None:
    logits = torch.randn(50, 9, generator=torch.Generator().manual_seed(1)) * 2
    settings = DecodingSettings(temperature=temperature, top_k=top_k, top_p=top_p)
    probs, order = kept_probabilities(torch.log_softmax(logits, -1), settings)
    found = torch.zeros(50, 9, dtype=torch.float64).scatter(1, order, probs)
    wanted, unused = logits / temperature, torch.zeros(50, 1, dtype=torch.int64)
    if top_k:
        wanted = TopKLogitsWarper(top_k)(unused, wanted)
    if top_p < 1:
        wanted = TopPLogitsWarper(top_p)(unused, wanted)
    assert torch.allclose(found / found.sum(1, keepdim=True), wanted.double().softmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-320])
def test_the_lowest_temperatures_draw_the_best_token(temperature: float) -> None:
    logits = torch.randn(50, 1, 9, generator=torch.Generator().manual_seed(1))
    settings = DecodingSettings(temperature=temperature)
    drawn = draw(logits.log_softmax(-1), settings, torch.linspace(0, 0.99, 50).double())
    assert torch.equal(drawn, logits[:, 0].argmax(-1))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_repetitions_are_those_of_transformers(n: int) -> None:
    tokens = torch.randint(0, 3, (40, 8), generator=torch.Generator().manual_seed(n))
    scores = torch.zeros(40, 3)
    wanted = NoRepeatNGramLogitsProcessor(n)(tokens, scores.clone()) == -torch.inf
    assert torch.equal(repeating(tokens, n, scores), wanted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(max_tokens=-1), "max_tokens: expected 0 or more, got -1"),
        (dict(beams=0), "beams: expected a number above 0"),
        (dict(max_tokens=9, min_tokens=9), "min_tokens: 9 must be below max_tokens, 9"),
        (dict(top_p=0.0, temperature=1.0), "top_p: expected a number above 0"),
        (dict(temperature=-1.0), "temperature: expected 0 or more"),
        (dict(temperature=1.0, beams=2), "beams: 2 with a temperature of 1.0"),
        (dict(top_k=3), "top_k and top_p: only with a temperature above 0"),
    ],
)
def test_settings_that_contradict_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecodingSettings(**settings)
