import math
import random
import time
import tracemalloc
from itertools import pairwise
from statistics import NormalDist, median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import spearmanr

from bins.calibration import midpoints
from predictor.online import LEVELS, OnlineLearner, bounded
from predictor.prediction import Prediction
from predictor.prompt import Prompt
from predictor.quantiles import crps
from predictor.text_features import TextFeatures

NORMAL = [NormalDist().inv_cdf(p) for p in midpoints(LEVELS)]
TEMPLATE = "Is the following review positive or negative? Answer with one word.\n\n"


def prediction(length, sigma=0.5):
    return [length * math.exp(sigma * z) for z in NORMAL]


def serve(learner, prompt, raw, length, capped=False):
    forecast = learner.forecast(prompt, None if raw is None else Prediction(raw))
    learner.observe(forecast, length, capped)
    return forecast


def loss(forecast, length):
    return crps(tuple(map(math.log, forecast.lengths)), math.log(length), False)


def test_there_is_no_forecast_without_data():
    forecast = OnlineLearner().forecast(Prompt("Hello"), None)
    assert (forecast.lengths, forecast.source, forecast.median) == ((), "", None)


def test_a_predictor_is_trusted_before_any_answer():
    forecast = OnlineLearner().forecast(Prompt("Hello"), Prediction(prediction(100)))
    assert forecast.source == "predictor"
    assert forecast.lengths == pytest.approx(prediction(100))
    assert OnlineLearner().forecast(Prompt("Hello"), Prediction([70])).lengths == pytest.approx((70,) * LEVELS)


def test_an_unknown_prompt_is_like_the_models_recent_ones():
    learner = OnlineLearner()
    for length in [50, 100, 200] * 20:
        serve(learner, Prompt(f"q{length}"), None, length)
    forecast = learner.forecast(Prompt("never seen"), None)
    assert forecast.source == "learner"
    assert forecast.median == pytest.approx(100, rel=0.3)
    assert learner.forecast(Prompt("never seen", model="another"), None).median == pytest.approx(100, rel=0.5)


def test_without_the_text_learner_an_unknown_prompt_is_forecast_by_its_models_recent_lengths_alone():
    learner = OnlineLearner(learns_text=False)
    for length in [50, 100, 200] * 20:
        serve(learner, Prompt(f"{length}"), None, length)
    forecast = learner.forecast(Prompt("never seen"), None)
    assert (forecast.source, forecast.median) == ("recent", pytest.approx(100, rel=0.05))
    assert learner.forecast(Prompt("never seen", model="another"), None).lengths == ()


def test_a_predictor_of_points_gets_the_quantiles_of_its_errors():
    learner, rng = OnlineLearner(), random.Random(0)
    for i in range(600):
        serve(learner, Prompt(f"{i}"), [100.0], 200 * math.exp(rng.gauss(0, 0.5)))
    forecast = learner.forecast(Prompt("new"), Prediction([10.0]))
    assert forecast.lengths == pytest.approx(prediction(20), rel=0.15)


def test_a_constant_template_that_the_predictor_gets_wrong_is_remembered():
    learner, rng = OnlineLearner(), random.Random(0)
    for i in range(300):
        length = rng.choice([30, 100, 300])
        serve(learner, Prompt(f"{i} is something else"), prediction(length), length * math.exp(rng.gauss(0, 0.5)))
    forecasts = [serve(learner, Prompt(f"{TEMPLATE}{i}"), prediction(100), 3) for i in range(40)]
    assert [f.source for f in forecasts[:6]] == ["predictor"] * 6
    assert {f.source for f in forecasts[12:]} == {"memory"}
    assert forecasts[-1].median == pytest.approx(3)
    assert 2.5 < forecasts[-1].lengths[0] < 3 < forecasts[-1].lengths[-1] < 3.5
    assert learner.forecast(Prompt("something else"), Prediction(prediction(100))).median == pytest.approx(100, rel=0.2)


def test_a_template_whose_lengths_shift_is_followed():
    learner = OnlineLearner()
    medians = [serve(learner, Prompt(TEMPLATE), prediction(200), length).median for length in [3] * 100 + [40] * 100]
    assert medians[99] == pytest.approx(3, rel=0.1)
    assert medians[150:] == pytest.approx([40] * 50, rel=0.1)


def test_unrelated_prompts_with_a_common_beginning_keep_their_predictor():
    learner, rng, sources = OnlineLearner(), random.Random(0), []
    for i in range(500):
        length = rng.choice([10, 100, 1000])
        prompt = Prompt(f"Please answer my question, which is: {rng.random()} {i}")
        sources.append(serve(learner, prompt, prediction(length), length * math.exp(rng.gauss(0, 0.5))).source)
    assert sources.count("predictor") > 490


def test_a_poor_predictor_that_ranks_is_corrected_and_kept():
    learner, rng = OnlineLearner(), random.Random(0)
    for i in range(400):
        actual = rng.choice([50, 100, 200])
        forecast = serve(learner, Prompt(f"{i}"), prediction(9 * actual), actual)
    assert forecast.source == "predictor"
    assert forecast.median == pytest.approx(actual, rel=0.2)


def test_without_a_predictor_applications_are_distinguished():
    learner, rng, forecasts, lengths = OnlineLearner(), random.Random(0), [], []
    for i in range(300):
        size = rng.choice([20, 100, 500])
        length = size * math.exp(rng.gauss(0, 0.3))
        forecast = serve(learner, Prompt(f"{i}", system=f"You write about {size} tokens."), None, length)
        if i >= 100:
            forecasts.append(forecast.median)
            lengths.append(length)
    assert spearmanr(forecasts, lengths).statistic > 0.85


def test_a_memory_that_lost_to_the_predictor_serves_at_once_when_the_predictor_is_dead():
    learner, rng = OnlineLearner(), random.Random(0)
    for i in range(200):
        size = rng.choice([20, 500])
        forecast = serve(learner, Prompt(f"{i}", system=f"{size}"), prediction(size, 0.1), size * rng.uniform(0.9, 1.1))
    assert forecast.source == "predictor"
    forecast = learner.forecast(Prompt("new", system="20"), None)
    assert (forecast.source, forecast.median) == ("memory", pytest.approx(20, rel=0.1))


def test_half_the_traffic_of_a_template_does_not_spoil_the_predictor_for_the_other_half():
    learner, rng, medians = OnlineLearner(), random.Random(0), []
    for i in range(2000):
        serve(learner, Prompt(f"{TEMPLATE}{i}"), prediction(100), 2)
        length = 100 * math.exp(rng.gauss(0, 0.5))
        medians.append(serve(learner, Prompt(f"{i} is something else"), prediction(100), length).median)
    assert median(medians[1000:]) == pytest.approx(100, rel=0.15)


def test_after_a_drift_the_predictor_is_corrected_even_while_forecasts_come_from_memory():
    learner, rng, sources, errors = OnlineLearner(learns_text=False), random.Random(1), [], []
    for i in range(5000):
        centre = 100 * math.exp(rng.gauss(0, 1))
        length = centre * math.exp(rng.gauss(0, 0.4)) * (4 if i >= 1000 else 1)
        forecast = serve(learner, Prompt(f"{i}", system="the only application"), prediction(centre, 0.4), length)
        sources.append(forecast.source)
        errors.append(abs(math.log(length / forecast.median)))
    assert "memory" in sources[1000:1200]
    assert set(sources[-1000:]) == {"predictor"}
    assert median(errors[-1000:]) == pytest.approx(0.27, abs=0.03)  # 0.67 sigma: as good as before the drift


def test_memory_does_no_harm_to_a_calibrated_predictor():
    # a tenth of the prompts come again, the others share random beginnings: memory has no advantage
    rng, losses = random.Random(0), {0: 0.0, 10_000: 0.0}
    learners = {keys_max: OnlineLearner(keys_max=keys_max) for keys_max in losses}
    raw_loss = 0.0
    for _ in range(3000):
        text = f"{rng.choice('abcde') * 32} {rng.choice('abcde') * 96} {rng.randrange(300)}"
        centre = math.exp(rng.gauss(4.5, 0.8))
        length = max(1, centre * math.exp(rng.gauss(0, 0.6)))
        raw = prediction(centre, 0.6)
        raw_loss += crps(tuple(math.log(max(1, q)) for q in raw), math.log(length), False)
        for keys_max, learner in learners.items():
            losses[keys_max] += loss(serve(learner, Prompt(text), raw, length), length)
    assert losses[10_000] < 1.01 * losses[0]
    assert losses[10_000] < 1.01 * raw_loss


def test_stop_strings_separate_the_corrections():
    learner = OnlineLearner()
    for i in range(200):
        serve(learner, Prompt(f"{i}", stop=("\n",)), prediction(100), 10)
        serve(learner, Prompt(f"{i}"), prediction(100), 100)
    assert learner.forecast(Prompt("new", stop=("\n\n",)), Prediction(prediction(100))).median == pytest.approx(
        10, rel=0.1
    )
    assert learner.forecast(Prompt("new"), Prediction(prediction(100))).median == pytest.approx(100, rel=0.1)


def test_capped_answers_are_known_to_be_longer():
    medians = []
    for seed in range(8):
        learner, rng = OnlineLearner(), random.Random(seed)
        for i in range(500):
            length, cap = 300 * math.exp(rng.gauss(0, 0.5)), rng.choice([100, 300, 1000])
            serve(learner, Prompt(f"{i}"), None, min(length, cap), capped=length > cap)
        medians.append(learner.forecast(Prompt("new"), None).median)
    assert np.median(medians) == pytest.approx(300, rel=0.2)  # of the lengths as they come: 180


@pytest.mark.parametrize("raw", [[], [math.nan] * 15, [1, math.inf], [0.0, 5.0], [-3.0], [math.nan, 4.0]])
def test_invalid_predictions_are_counted_and_not_used(raw):
    learner = OnlineLearner()
    assert learner.forecast(Prompt("Hello"), Prediction(raw)).lengths == ()
    assert learner.raw_invalid == 1


@pytest.mark.parametrize("output_tokens", [0, -5, math.nan, math.inf])
def test_answers_without_a_token_are_ignored(output_tokens):
    learner = OnlineLearner()
    serve(learner, Prompt("Hello"), prediction(100), output_tokens)
    assert learner.forecast(Prompt("Hello"), None).lengths == ()


def test_thousands_of_different_prompts_are_held_in_bounded_memory():
    learner = OnlineLearner(keys_max=200, learns_text=False)
    tracemalloc.start()
    for i in range(5_000):
        serve(learner, Prompt(f"{i} {'x' * 200}", f"model {i % 300}", f"system {i % 5000}"), None, 1 + i % 100)
    memory_bytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(learner.memory) == 200
    assert memory_bytes < 200 * 2000 + 128 * 10_000  # bytes: 2 kB per key, 10 kB per model


def test_bad_limits_are_refused():
    with pytest.raises(ValueError, match="window"):
        OnlineLearner(window=0)


def test_a_forecast_is_bounded_by_the_requests_limits():
    assert bounded((5.0, 50.0, 500.0), least=10, most=100) == (10, 50, 100)
    assert bounded((5.0, 50.0), least=None, most=None) == (5, 50)
    assert bounded((), least=10, most=100) == ()


def test_forecasts_and_answers_take_microseconds():
    """Processor time, in units of a loop that takes some 10 µs on an idle machine, and as much longer as the rest."""
    learner, rng = OnlineLearner(), random.Random(0)
    forecast_ns, observe_ns, unit_ns = [], [], []
    for i in range(3000):
        prompt = Prompt(f"{TEMPLATE}{i % 50} {'x' * 500}", system=f"{i % 7}" * 2000)
        times_ns = [time.thread_time_ns()]
        forecast = learner.forecast(prompt, Prediction(prediction(100)))
        times_ns.append(time.thread_time_ns())
        learner.observe(forecast, 100 * math.exp(rng.gauss(0, 0.5)), capped=i % 10 == 0)
        times_ns.append(time.thread_time_ns())
        sum([math.log(number) for number in range(1, 150)])
        times_ns.append(time.thread_time_ns())
        for passed_ns, (start, end) in zip((forecast_ns, observe_ns, unit_ns), pairwise(times_ns), strict=True):
            passed_ns.append(end - start)
    unit = median(unit_ns)
    assert median(forecast_ns) < 30 * unit  # usually 6 and 8 units
    assert np.mean(observe_ns) < 50 * unit


worlds = st.lists(
    st.tuples(
        st.integers(0, 3),
        st.one_of(st.none(), st.lists(st.floats(allow_nan=True, allow_infinity=True), max_size=20)),
        st.floats(allow_nan=True),
        st.booleans(),
        st.booleans(),
    ),
    max_size=60,
)


@settings(max_examples=100, deadline=None)
@given(worlds)
def test_forecasts_are_always_ascending_finite_and_at_least_one_token(world):
    learner = OnlineLearner(keys_max=5, lengths_per_key=9, window=9, models_max=1)
    waiting = []
    for number, raw, length, capped, answers_now in world:
        forecast = learner.forecast(
            Prompt("x" * 40 * number, "m", "s" * (number % 2)), None if raw is None else Prediction(raw)
        )
        assert len(forecast.lengths) == (LEVELS if forecast.source else 0)
        assert list(forecast.lengths) == sorted(forecast.lengths)
        assert all(1 <= tokens < math.inf for tokens in forecast.lengths)
        waiting.append((forecast, length, capped))
        while answers_now and waiting:
            learner.observe(*waiting.pop())
        assert len(learner.memory) <= 5


def test_a_forecast_can_be_revised_by_what_was_learnt_since() -> None:
    learner = OnlineLearner()
    waiting, other = Prompt("a", "m", system="brief"), Prompt("a", "m", system="essays")
    first, untouched = learner.forecast(waiting, None), learner.forecast(other, None)
    assert first.median is None
    for _ in range(20):
        learner.observe(learner.forecast(waiting, None), 50.0)
        learner.observe(learner.forecast(other, None), 700.0)
    assert learner.revise(first).lengths == learner.forecast(waiting, None).lengths
    assert learner.revise(untouched).lengths == learner.forecast(other, None).lengths
    assert learner.revise(learner.revise(first)).lengths == learner.revise(first).lengths


def test_a_predictors_forecast_is_revised_with_its_correction() -> None:
    learner = OnlineLearner()
    prompt = Prompt("a", "m")
    first = learner.forecast(prompt, Prediction([100.0]))
    for number in range(100):
        learner.observe(learner.forecast(Prompt(str(number), "m"), Prediction([100.0])), 300.0)
    later = learner.revise(first)
    assert later.median == pytest.approx(300.0, rel=0.1)
    assert later.lengths == learner.forecast(prompt, Prediction([100.0])).lengths


def test_features_that_were_read_elsewhere_give_the_same_forecasts() -> None:
    here, there = (OnlineLearner(secret=b"secret") for _ in range(2))
    secret = there.secret
    assert secret is not None
    reader = TextFeatures(secret)
    for number in range(60):
        prompt = Prompt(f"Write {number % 7} lines about a {('cat', 'dog', 'house')[number % 3]}.", "m", sender="ann")
        one, other = here.forecast(prompt, None), there.forecast(prompt, None, reader.read(prompt))
        assert one.lengths == other.lengths
        for learner, forecast in ((here, one), (there, other)):
            learner.observe(forecast, 10.0 + 20.0 * (number % 7))
    assert one.lengths, "something was learnt"


def test_who_learns_no_words_has_no_secret_for_readers() -> None:
    assert OnlineLearner(secret=b"secret", learns_text=False).secret is None
