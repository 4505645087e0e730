"""The text learner, by the online learner that serves it."""

import json
import math
import random
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kendalltau

from predictor.online import READINGS_MAX, OnlineLearner
from predictor.prediction import Prediction
from predictor.prompt import Prompt
from predictor.quantiles import LENGTH_MAX, LEVELS
from predictor.ridge import WEIGHTS
from predictor.text_features import _ASCII_WORD, _WORD, TEXT_FIRST, TEXT_LAST, TextFeatures, _words
from predictor.text_learner import TextLearner

WORDS = [f"word{number}" for number in range(60)]
EFFECTS = dict(zip(WORDS, np.random.default_rng(7).normal(0, 0.8, len(WORDS)).tolist(), strict=True))


class Traffic:
    """Prompts of six random words, each of which makes the answer longer or shorter by its own factor."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def ask(self, model: str = "m", sender: str = "", factor: float = 1.0) -> tuple[Prompt, float]:
        words = self._rng.sample(WORDS, 6)
        log = 4.5 + sum(EFFECTS[word] for word in words) / 2 + self._rng.gauss(0, 0.2)
        return Prompt(" ".join(words), model, sender=sender), max(1.0, factor * math.exp(log))


def serve(learner, prompt, length, capped=False):
    forecast = learner.forecast(prompt, None)
    learner.observe(forecast, length, capped)
    return forecast


def taught(answers=400, seed=0, **of):
    learner, traffic = OnlineLearner(keys_max=0), Traffic(seed)
    for _ in range(answers):
        serve(learner, *traffic.ask(**of))
    return learner


def tau(learner, count=200, seed=99, **of):
    """Kendall's tau of the medians over answers that are not learnt."""
    traffic = Traffic(seed)
    asked = [traffic.ask(**of) for _ in range(count)]
    medians = [learner.forecast(prompt, None).median or 0.0 for prompt, _ in asked]
    return float(kendalltau(medians, [length for _, length in asked]).statistic)


def test_prompts_that_never_came_before_are_ranked_by_their_words():
    without = OnlineLearner(keys_max=0, learns_text=False)
    traffic = Traffic(0)
    for _ in range(400):
        serve(without, *traffic.ask())
    assert tau(taught()) > 0.7
    assert np.isnan(tau(without))


def test_the_source_of_a_forecast_from_words_is_the_learner():
    assert taught().forecast(Prompt("word1 word2"), None).source == "learner"


def test_a_few_answers_are_used_as_well_as_by_a_regression_over_all_of_them():
    assert tau(taught(100)) > 0.5


def test_four_in_five_answers_are_within_the_inner_quantiles():
    learner, traffic, within = taught(1000), Traffic(5), []
    for _ in range(1000):
        prompt, length = traffic.ask()
        forecast = serve(learner, prompt, length)
        within.append(forecast.lengths[1] <= length <= forecast.lengths[-2])
    assert 0.77 <= np.mean(within) <= 0.83


def test_lengths_that_grow_sixfold_are_followed_within_200_answers():
    learner, traffic = taught(1000), Traffic(1)
    for _ in range(200):
        serve(learner, *traffic.ask(factor=6))
    errors = []
    for _ in range(100):
        prompt, length = traffic.ask(factor=6)
        errors.append(math.log(length / serve(learner, prompt, length).median))
    assert abs(np.median(errors)) < 0.3  # of log 6 = 1.79
    assert tau(learner) > 0.65


def in_runs(seed, runs=120, of_a_run=25, models=("m",)):
    """Prompts in runs, as sessions or files have them: those of a run share three words, and what no word tells."""
    rng = random.Random(seed)
    for run in range(runs):
        shared, untold = rng.sample(WORDS, 3), rng.gauss(0, 0.5)
        for _ in range(of_a_run):
            words = [*shared, *rng.sample(WORDS, 3)]
            log = 4.5 + sum(EFFECTS[word] for word in words) / 2 + untold + rng.gauss(0, 0.2)
            yield Prompt(" ".join(words), models[run % len(models)]), max(1.0, math.exp(log))


def served_late(learner, asked, in_flight=64):
    """The forecasts of the prompts, each made when all but the last `in_flight` answers before it are known."""
    forecasts = []
    for number, (prompt, _) in enumerate(asked):
        if number >= in_flight:
            learner.observe(forecasts[number - in_flight], asked[number - in_flight][1])
        forecasts.append(learner.forecast(prompt, None))
    return forecasts


@pytest.mark.parametrize("models", [("m",), ("a", "b", "c")])
@pytest.mark.parametrize("in_flight", [1, 64])
def test_intervals_hold_where_like_prompts_are_in_flight_together(in_flight, models):
    asked = list(in_runs(3, models=models))
    forecasts = served_late(OnlineLearner(keys_max=0), asked, in_flight)
    late = list(zip(forecasts, asked, strict=True))[500:]
    inside = [forecast.lengths[1] <= length <= forecast.lengths[-2] for forecast, (_, length) in late]
    assert 0.75 < np.mean(inside) < 0.85


def test_words_that_tell_nothing_leave_the_length_that_is_usual():
    learner, rng = OnlineLearner(keys_max=0), random.Random(1)
    prompts = [Prompt(" ".join(rng.sample(WORDS, 6)), "m") for _ in range(800)]
    for prompt in prompts:
        serve(learner, prompt, math.exp(rng.gauss(5, 1)))
    medians = [learner.forecast(prompt, None).median for prompt in prompts[:200]]
    assert np.std(np.log(medians)) < 0.25  # of a standard deviation of 1
    assert np.median(medians) == pytest.approx(math.exp(5), rel=0.3)


def test_the_first_forecasts_of_a_model_are_as_wide_as_those_of_earlier_new_models_were_wrong():
    """Each model has its own level; the first three forecasts of each know nothing of it."""
    learner, traffic, rng = OnlineLearner(keys_max=0), Traffic(2), random.Random(4)
    inside = []
    for number in range(150):
        model, factor = f"model {number}", math.exp(rng.gauss(0, 1))
        for answer in range(12):
            prompt, length = traffic.ask(model=model, factor=factor)
            forecast = serve(learner, prompt, length)
            if number >= 50 and answer < 3:
                inside.append(forecast.lengths[1] <= length <= forecast.lengths[-2])
    assert 0.65 < np.mean(inside) < 0.95


def test_a_state_of_before_keeps_its_templates_and_forgets_its_words():
    learner, restored = OnlineLearner(), OnlineLearner()
    for _ in range(40):
        serve(learner, Prompt("the same words", "m"), 70)
    state = learner.state()
    del state["text"]["level_of_all"]
    restored.restore(state)
    assert restored.forecast(Prompt("the same words", "m"), None).source == "memory"
    assert restored.forecast(Prompt("other words", "m"), None).source == "recent"


def test_capped_answers_only_raise_forecasts():
    learner = taught()
    prompt = Prompt("word3 word4 word5", "m")
    before = learner.forecast(prompt, None).median
    for _ in range(40):
        serve(learner, prompt, before / 4, capped=True)
    assert learner.forecast(prompt, None).median == pytest.approx(before, rel=0.1)
    for _ in range(40):
        serve(learner, prompt, before * 4, capped=True)
    assert learner.forecast(prompt, None).median > 2 * before


@pytest.mark.parametrize("capped", [False, True])
def test_lengths_that_change_after_a_thousand_equal_ones_are_forecast(capped):
    learner = OnlineLearner(keys_max=0)
    for number in range(1200):
        serve(learner, Prompt(f"question {number}", "m"), 20, capped)
    for number in range(200):
        forecast = serve(learner, Prompt(f"question {number}", "m"), 200, capped)
    assert 150 < forecast.lengths[0] <= forecast.lengths[-1] < 2000


def test_a_restored_correction_of_any_size_gives_a_forecast():
    learner, restored = taught(), OnlineLearner(keys_max=0)
    state = learner.state()
    for spread in state["text"]["spreads"]:
        spread["shape"] += 1e30
    restored.restore(state)
    assert restored.forecast(Prompt("word3 word4 word5", "m"), None).lengths == pytest.approx([LENGTH_MAX] * LEVELS)


def test_a_new_model_is_ranked_by_what_other_models_answered():
    assert tau(taught(model="old"), model="new") > 0.7


def test_a_model_may_differ_from_the_others_in_a_word():
    learner, rng = OnlineLearner(keys_max=0), random.Random(0)
    for _ in range(600):
        word, model = rng.choice(["long", "short"]), rng.choice(["obeys", "does not"])
        length = {"long": 400, "short": 20}[word] if model == "obeys" else 100
        serve(learner, Prompt(f"{word} {rng.choice(WORDS)}", model), length * math.exp(rng.gauss(0, 0.2)))

    def ratio(model):
        long, short = (learner.forecast(Prompt(f"{word} word0", model), None).median for word in ("long", "short"))
        return long / short

    assert ratio("obeys") > 3 * ratio("does not")


@pytest.mark.parametrize("nonsense_per_answer", [1, 9])
def test_a_key_that_sends_nonsense_teaches_the_other_keys_nothing(nonsense_per_answer):
    def served(nonsense):
        learner, traffic, rng = OnlineLearner(keys_max=0), Traffic(0), random.Random(1)
        for number in range(400):
            serve(learner, *traffic.ask(sender=f"key {number % 4}"))
            for _ in range(nonsense):
                prompt, _ = traffic.ask(sender="nonsense")
                serve(learner, prompt, math.exp(rng.uniform(0, 7.5)))
        return tau(learner)

    assert served(nonsense_per_answer) > served(0) - 0.03


def test_nonsense_about_a_template_stays_with_its_key():
    learner, traffic, rng = OnlineLearner(), Traffic(0), random.Random(1)
    templates = [f"Write the part number {number} of a report about {word}" for number, word in enumerate(WORDS)]
    for _ in range(600):
        serve(learner, *traffic.ask(sender=f"key {rng.randrange(4)}"))
        for _ in range(4):
            serve(learner, Prompt(rng.choice(templates), "m", sender="nonsense"), math.exp(rng.uniform(0, 7.5)))
    for place in [rng.randrange(len(templates)) for _ in range(20 * len(templates))]:
        serve(learner, Prompt(templates[place], "m", sender="key 0"), 10 + place)
        serve(learner, Prompt(templates[place], "m", sender="nonsense"), math.exp(rng.uniform(0, 7.5)))
    medians = [learner.forecast(Prompt(template, "m", sender="key 1"), None).median for template in templates]
    assert medians == pytest.approx([10 + place for place in range(len(templates))], rel=0.3)


@pytest.mark.parametrize("model", ["m", "new"])
def test_a_single_absurd_length_changes_forecasts_little(model):
    learner = taught()
    prompt, other_prompt = Prompt(" ".join(WORDS[:6]), model), Prompt(" ".join(WORDS[20:26]), "m")
    before, other = (learner.forecast(asked, None).median for asked in (prompt, other_prompt))
    serve(learner, prompt, 1e7)  # some 400,000 times the forecast
    assert learner.forecast(prompt, None).median < 20 * before
    assert learner.forecast(other_prompt, None).median == pytest.approx(other, rel=0.3)


def test_the_learner_mixes_its_forecasts_with_those_of_a_predictor():
    # the predictor knows what the words do not tell, and nothing about the words
    learner, traffic, rng, medians, hints, lengths = OnlineLearner(keys_max=0), Traffic(0), random.Random(2), [], [], []
    for _ in range(1500):
        prompt, length = traffic.ask()
        hint = rng.gauss(0, 0.7)
        raw = [100 * math.exp(hint) * factor for factor in (0.3, 0.7, 1.0, 1.5, 3.0)]
        forecast = learner.forecast(prompt, Prediction(raw))
        learner.observe(forecast, length * math.exp(hint))
        medians.append(forecast.median)
        hints.append(hint)
        lengths.append(length * math.exp(hint))
    late = slice(1000, None)
    assert kendalltau(medians[late], lengths[late]).statistic > kendalltau(hints[late], lengths[late]).statistic + 0.2


def test_the_first_answer_tells_what_a_predictor_usually_says():
    learner = TextLearner(b"", 4)
    features, predicted = learner.read(Prompt("word1 word2", "m")), math.log(100)
    learner.learn("m", learner.forecast("m", features, predicted), predicted, False, True)
    assert learner.forecast("m", features, predicted).likely == pytest.approx(0.0, abs=0.1)


def test_how_much_a_predictor_is_worth_is_learnt_from_all_models_together():
    def served(models):
        learner, traffic, rng, medians, lengths = OnlineLearner(keys_max=0), Traffic(0), random.Random(2), [], []
        for _ in range(600):
            prompt, length = traffic.ask(model=f"model {rng.randrange(models)}")
            forecast = learner.forecast(prompt, Prediction([math.exp(rng.gauss(4, 1))]))
            learner.observe(forecast, length)
            medians.append(forecast.median)
            lengths.append(length)
        return kendalltau(medians[200:], lengths[200:]).statistic

    assert served(models=50) > served(models=1) - 0.1


def test_nonsense_of_a_predictor_does_not_spoil_what_words_tell():
    learner, traffic, rng, medians, lengths = OnlineLearner(keys_max=0), Traffic(0), random.Random(2), [], []
    for _ in range(1000):
        prompt, length = traffic.ask()
        forecast = learner.forecast(prompt, Prediction([math.exp(rng.gauss(4, 1))]))
        learner.observe(forecast, length)
        medians.append(forecast.median)
        lengths.append(length)
    assert kendalltau(medians[500:], lengths[500:]).statistic > 0.7
    assert tau(learner) > 0.7  # the predictor is dead


def test_a_forecast_is_revised_by_what_was_learnt_since():
    learner, traffic = OnlineLearner(keys_max=0), Traffic(0)
    asked = [traffic.ask() for _ in range(100)]
    waiting = [learner.forecast(prompt, None) for prompt, _ in asked]
    assert all(forecast.median is None for forecast in waiting)
    for _ in range(400):
        serve(learner, *traffic.ask())
    revised = [learner.revise(forecast) for forecast in waiting]
    assert revised == [learner.forecast(prompt, None) for prompt, _ in asked]
    assert kendalltau([forecast.median for forecast in revised], [length for _, length in asked]).statistic > 0.7


def test_a_restored_learner_forecasts_and_learns_the_same():
    learner, restored = taught(2300), OnlineLearner(keys_max=0)
    restored.restore(learner.state())
    traffic = Traffic(3)
    for number in range(200):
        prompt, length = traffic.ask(sender=f"key {number % 3}")
        capped = number % 7 == 0
        assert serve(restored, prompt, length, capped).lengths == serve(learner, prompt, length, capped).lengths


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ridge", {}),
        ("numbers", "none"),
        ("senders", np.zeros((2, 2))),
        ("sender_keys", np.zeros(0, dtype=np.uint64)),
        ("spreads", [{"model": "m", "predicted": False, "count": 3}]),
        ("levels", {"models": ["m"], "values": np.zeros((7, 2))}),
        ("mixture", {"numbers": np.array([1.0, 9.0, 1.0, 0.0, 0.0])}),
    ],
)
def test_a_state_that_does_not_fit_is_refused(name, value):
    state = taught(50).state()
    state["text"][name] = value
    with pytest.raises(ValueError, match="state"):
        OnlineLearner(keys_max=0).restore(state)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("weights", np.zeros(5, dtype=np.float32)),
        ("weights", np.full(WEIGHTS, np.nan, dtype=np.float32)),
        ("indices", lambda indices: indices + (1 << 18)),
        ("open_indices", lambda indices: indices - (1 << 18)),
        ("places", lambda places: places + (1 << 20)),
        ("sizes", lambda sizes: sizes + 1),
        ("open_sizes", lambda sizes: -sizes),
        ("ridges", lambda ridges: -ridges),
        ("examples", lambda examples: examples[1:]),
        ("examples", lambda examples: examples + 1000),
        ("open_duals", np.zeros(3)),
    ],
)
def test_a_state_of_a_regression_that_does_not_fit_is_refused(name, value):
    state = taught(53).state()
    ridge = state["text"]["ridge"]
    ridge[name] = value(ridge[name]) if callable(value) else value
    with pytest.raises(ValueError, match="state"):
        OnlineLearner(keys_max=0).restore(state)


def test_the_state_has_no_words_and_no_names_of_keys():
    learner = OnlineLearner(secret=b"secret")
    for _ in range(5):
        serve(learner, Prompt("confidential question", "m", "private instructions", sender="alice"), 50)
    text = json.dumps(learner.state(), default=lambda array: f"{array.tolist()} {array.tobytes()!r}")
    assert not [word for word in ("confidential", "question", "private", "alice") if word in text]


def test_another_secret_gives_other_features():
    first, second = (TextFeatures(secret).read(Prompt("a word")).indices.tolist() for secret in (b"a", b"b"))
    assert first != second
    assert len(set(first) & set(second)) <= 1


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt(""),
        Prompt("\ud800", "\ud800", "\ud800", stop=("\ud800",), sender="\ud800"),
        Prompt("one"),
        Prompt("one two"),
        Prompt("長さを予測する" * 500, history_characters=10**9, tools=128, format="json", output_tokens_max=2**30),
        Prompt("x" * 10**6, "m" * 10**5, "s" * 10**6),
    ],
)
def test_any_prompt_has_features_and_a_bounded_number_of_them(prompt):
    features = TextFeatures(b"").read(prompt)
    assert len(features.indices) == len(features.values) <= 500
    assert features.indices.min() >= 0
    assert features.indices.max() < 1 << 18


def test_a_text_is_read_alike_with_and_without_letters_beyond_ascii():
    """ASCII texts have a faster pattern of their own."""
    text = "".join(map(chr, range(128))) + " Write 12_000 words, don't list 3 or x1y2."
    with_ascii, without = (TextFeatures(b"").read(Prompt(some)) for some in (text, text + "\u00e9"))
    words = [
        set(zip(some.indices.tolist(), some.values.round(2).tolist(), strict=True)) for some in (with_ascii, without)
    ]
    assert len(words[0] & words[1]) > 0.8 * len(words[0])


@given(
    st.lists(
        st.sampled_from(["one two three ", "x" * 40, "12 345,", "\u4f60\u597d", "\u0130\u00fc ", "\n", "!? ", "a1b2"]),
        max_size=600,
    )
)
def test_the_ends_of_a_long_text_are_the_same_words_as_if_all_of_it_were_read(pieces):
    text = "".join(pieces).lower()
    ends = text[:TEXT_FIRST] + " " + text[-TEXT_LAST:] if len(text) > TEXT_FIRST + TEXT_LAST else text
    words = (_ASCII_WORD if text.isascii() else _WORD).findall(ends)
    assert _words(text, 64) == (words if len(words) <= 64 else words[:48] + words[-16:])


def test_a_prompt_that_comes_again_is_read_once(monkeypatch):
    learner, read = OnlineLearner(), []
    reading = learner._text.read
    monkeypatch.setattr(learner._text, "read", lambda prompt: read.append(prompt) or reading(prompt))
    for number in (1, 1, 2, 1, 2):
        serve(learner, Prompt(f"count to {number}"), 10.0 * number)
    assert read == [Prompt("count to 1"), Prompt("count to 2")]
    for number in range(2_000):
        learner.forecast(Prompt("x" * 900 + str(number)), None)
        learner.forecast(Prompt("y", model="m" * 10**6 + str(number % 3)), None)
    assert len(learner._readings) <= READINGS_MAX
    assert all(len(prompt.model) < 10 for prompt in learner._readings)


def test_an_answer_whose_words_are_not_taught_teaches_its_template_and_no_other_prompt():
    learner, traffic = taught(), Traffic(5)
    other, asked = traffic.ask()[0], Prompt("a template that is asked again and again")
    before = learner.forecast(other, None)
    templates = OnlineLearner()
    for each in (learner, templates):
        for _ in range(20):
            each.observe(each.forecast(asked, None), 7_000.0, words=False)
    assert learner.forecast(other, None).lengths == before.lengths
    assert templates.forecast(asked, None).median == pytest.approx(7_000.0, rel=0.01)


def test_a_sample_of_the_answers_ranks_as_well_as_if_only_these_had_come():
    sampled, only, traffic = OnlineLearner(keys_max=0), OnlineLearner(keys_max=0), Traffic(0)
    for number in range(1_200):
        prompt, length = traffic.ask()
        sampled.observe(sampled.forecast(prompt, None), length, words=number % 4 == 0)
        if number % 4 == 0:
            serve(only, prompt, length)
    assert tau(sampled) == pytest.approx(tau(only), abs=0.01)


def test_tools_format_and_max_tokens_tell_lengths_apart():
    learner, rng = OnlineLearner(keys_max=0), random.Random(0)
    kinds = {"tools": {"tools": 2}, "format": {"format": "json_schema"}, "most": {"output_tokens_max": 16}, "plain": {}}
    lengths = {"tools": 30, "format": 90, "most": 10, "plain": 300}
    for _ in range(600):
        kind = rng.choice(list(kinds))
        serve(learner, Prompt(rng.choice(WORDS), **kinds[kind]), lengths[kind] * math.exp(rng.gauss(0, 0.1)))
    medians = {kind: learner.forecast(Prompt("new", **fields), None).median for kind, fields in kinds.items()}
    assert sorted(medians, key=medians.get) == sorted(lengths, key=lengths.get)
    assert medians["plain"] > 10 * medians["most"]


def test_how_much_to_think_tells_lengths_apart_for_words_and_for_templates():
    words, both, rng = OnlineLearner(keys_max=0), OnlineLearner(), random.Random(0)
    lengths = {("effort low",): 40, ("effort high",): 900}
    for _ in range(600):
        text, shaping = rng.choice([rng.choice(WORDS), "the same template"]), rng.choice(list(lengths))
        for learner in (words, both):
            serve(learner, Prompt(text, shaping=shaping), lengths[shaping] * math.exp(rng.gauss(0, 0.1)))
    for learner, text, source in ((words, "new", "learner"), (both, "the same template", "memory")):
        low, high = (learner.forecast(Prompt(text, shaping=shaping), None) for shaping in lengths)
        assert low.source == high.source == source
        assert high.median > 8 * low.median


def test_long_prompts_of_many_models_and_senders_are_held_in_17_mib():
    rng = random.Random(0)
    tracemalloc.start()
    learner = OnlineLearner(keys_max=0)
    for number in range(2_200):
        words = " ".join(f"{rng.randrange(10**6)} x" for _ in range(100))
        prompt = Prompt(words, f"model {number % 200}", words, sender=f"key {number}")
        serve(learner, prompt, 1 + number % 500)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 17 * 2**20


def test_answers_in_flight_teach_their_error_once():
    """A burst is forecast before its first answer ends: all its forecasts have the same error."""
    learner = OnlineLearner()
    burst = [(learner.forecast(Prompt(f"word{number % 7} please", "m"), None), 100.0) for number in range(64)]
    for forecast, tokens in burst:
        learner.observe(forecast, tokens)
    assert learner.forecast(Prompt("word3 please", "m"), None).median == pytest.approx(100, rel=0.1)


def test_the_size_of_a_number_ranks_lengths():
    learner = OnlineLearner()
    for turn in range(4):
        for items in range(2, 60, 3):
            serve(learner, Prompt(f"list {items + turn % 2} things", "m"), 4.0 * items)
    medians = [learner.forecast(Prompt(f"list {items} things", "m"), None).median for items in (4, 13, 31, 58)]
    assert medians == sorted(medians)
    assert medians[-1] > 2 * medians[0]
