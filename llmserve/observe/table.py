"""Every metric of `/metrics`, in the order of the text: name, kind, labels, help, and where its numbers come from.

    counted    by the code that asks `Families` for the name
    read       at each scrape, by the function of the entry

To add a metric, add an entry here, and count it where it happens, or give the entry a function that reads it. The
reference page (docs/reference/metrics.md) and the checks of the dashboard's queries are made from this table.
"""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from llmserve import __version__
from llmserve.forecasts.saver import Saver
from llmserve.observe.counters import Kind, Metric, Rows
from llmserve.observe.readings import (
    Connections,
    EnergyReading,
    Jobs,
    Plans,
    Relays,
    SchedulerReading,
    counts,
    one,
)
from llmserve.scheduling.choice.orders import WAIT_MOST

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
FIRST_TOKEN_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_SECONDS = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5)
TOKENS = (4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768, 65536)
RATIO = (0.1, 0.25, 0.5, 0.67, 0.8, 0.9, 1.1, 1.25, 1.5, 2.0, 4.0, 10.0)
FILL = (0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)

S = TypeVar("S")


class Read(NamedTuple, Generic[S]):
    """A metric that is read at a scrape. rows : None: the metric is left out of the text"""

    metric: Metric
    rows: Callable[[S], Rows | None]


def _counter(name: str, help_: str, *labels: str) -> Metric:
    return Metric(f"llmserve_{name}", "counter", help_, labels)


def _histogram(name: str, help_: str, buckets: tuple[float, ...], *labels: str) -> Metric:
    return Metric(f"llmserve_{name}", "histogram", help_, labels, buckets)


def _read(
    name: str,
    help_: str,
    rows: Callable[[S], Rows | None],
    *labels: str,
    kind: Kind = "gauge",
    by_model: bool = False,
) -> Read[S]:
    return Read(Metric(f"llmserve_{name}", kind, help_, labels, by_model=by_model), rows)


# ---- counted --------------------------------------------------------------------------------------------------------

KEYS = (  # key_usage.py; only with keys
    _counter("key_requests", "Requests that ended, refused ones left out", "key", "model"),
    _counter(
        "key_refused",
        "Requests refused by a limit or budget of the key; without a model: before the body was read",
        *("key", "model"),
    ),
    _counter("key_prompt_tokens", "Tokens of prompts, as the engines count them", "key", "model"),
    _counter("key_output_tokens", "Tokens of answers, also of those that were not completed", "key", "model"),
    _counter("key_slot_seconds", "Seconds of slots, one slot for each answer", "key", "model"),
    _counter(
        "key_joules",
        "Energy of the engines while they ran requests, shared among these; 0 where it is not known",
        *("key", "model"),
    ),
    _counter("key_money", "Money by the prices of the key file", "key", "model"),
)
REQUESTS = (  # request_counts.py
    _counter("requests", "Requests that ended", "outcome"),
    _counter("rejections", "Requests refused or failed by the front-end", "reason"),
    _counter("engine_losses", "Times an engine was lost", "engine"),
    _counter("batches", "Formed batches that began to run"),
    _histogram("batch_fill", "Requests of a formed batch over the batch size", FILL),
    _histogram("predicted_tokens", "Predicted output tokens", TOKENS),
    _counter("revised_forecasts", "Later forecasts for waiting requests"),
    _histogram("actual_tokens", "Actual output tokens", TOKENS),
    _histogram("predicted_over_actual_tokens", "Predicted over actual output tokens of completed requests", RATIO),
)
STREAMS = (  # stream_counts.py
    _counter("stream_requests", "Requests that ended", "model", "stream", "outcome"),
    _counter("stream_output_tokens", "Output tokens generated", "model", "stream"),
    _histogram("stream_latency_seconds", "From arrival to the end of the answer", SECONDS, "model", "stream"),
    _counter(
        "deadlines",
        "Requests with a deadline: answer complete by the deadline (met), later or never (missed)",
        *("model", "stream", "outcome"),
    ),
    _counter("preempted_requests", "Times a running request was preempted", "model", "stream"),
    _counter("preempted_batches", "Preempted batches", "model"),
    _counter("preempted_seconds", "Lost run time of preempted batches, seconds", "model"),
)
RUNS = (  # run_counts.py
    _counter(
        "engine_requests",
        "Runs of requests that ended, by outcome: completed, failed (the engine refused it), fault (the engine's own), "
        "cancelled, preempted, lost (with the engine, or by it)",
        *("model", "engine", "outcome"),
    ),
    _counter(
        "retries",
        "Those of these runs that followed a fault, a refusal or a loss of the request",
        *("model", "engine", "outcome"),
    ),
    _histogram("waiting_seconds", "From arrival to each start on an engine", SECONDS, "model", "engine"),
    _histogram(
        "time_to_first_token_seconds",
        "Of streams: from arrival to the first event of the answer",
        FIRST_TOKEN_SECONDS,
        *("model", "engine"),
    ),
    _histogram(
        "time_between_tokens_seconds",
        "Of complete streams: mean time between two tokens of an answer, one value for each answer",
        TOKEN_SECONDS,
        *("model", "engine"),
    ),
    _histogram("latency_seconds", "From arrival to the end of the answer", SECONDS, "model", "engine"),
    _counter(
        "prompt_tokens",
        "Tokens of prompts that were answered, as the engines count them, by whether the engine had them in its cache: "
        "yes, no (they were computed), unknown (the engine does not tell)",
        *("model", "engine", "cached"),
    ),
    _counter(
        "forecast_cached_tokens",
        "Tokens of prompts that were expected in the engine's cache, of complete answers whose engine tells its hits",
        *("model", "engine"),
    ),
    _counter(
        "forecast_work_seconds",
        "Of complete answers: seconds on the engine, as forecast before the start, for the prompt and for the answer",
        *("model", "engine"),
    ),
    _counter("work_seconds", "Of complete answers: seconds on the engine", "model", "engine"),
    _counter("output_tokens", "Output tokens of complete answers", "model", "engine"),
)
PROGRAMS = (  # gateway/part.py
    _counter(
        "program_requests",
        "Requests that belong to a program, by the client whose ids they had; without ids: answer (the program's last "
        "answer made their tool call), prompt (their prompt goes on from the program's), first (they begin a program)",
        "source",
    ),
)
WEBHOOK = (  # webhook/part.py; only with a receiver
    _counter(
        "batch_webhooks",
        "Batches that ended, by what came of telling the receiver: sent, or given_up after the last try",
        "outcome",
    ),
)
CACHES = (  # kv_events/part.py; only with --kv-events
    _counter(
        "engine_cache_events",
        "What engines with --kv-events have told: messages, and those missed; blocks of prompts that were stored, and "
        "dropped; how often the cache was cleared; prompts tied to the engine's blocks by its tokenizer",
        *("engine", "event"),
    ),
)
COUNTED = (*KEYS, *REQUESTS, *STREAMS, *RUNS, *PROGRAMS, *WEBHOOK, *CACHES)

# ---- read -----------------------------------------------------------------------------------------------------------

SCHEDULER: tuple[Read[SchedulerReading], ...] = (
    _read("bin_requests", "Requests waiting in a bin", SchedulerReading.bins, "bin", by_model=True),
    _read(
        "bin_edge_tokens",
        "Lower edge of a bin, tokens (of risk or median)",
        SchedulerReading.bin_edges,
        "bin",
        by_model=True,
    ),
    _read("formed_requests", "Requests in formed batches", SchedulerReading.formed, by_model=True),
    _read("engine_ready", "1 when the engine is up", lambda now: now.of_engines(lambda e: e.ready), "engine"),
    _read("engine_running", "Requests on the engine", lambda now: now.of_engines(lambda e: len(e.running)), "engine"),
    _read(
        "engine_slots",
        "Requests that the engine runs at once",
        lambda now: now.of_engines(lambda e: e.info.slots),
        "engine",
    ),
    _read(
        "engine_predicted_tokens",
        "Predicted final KV tokens of the engine's requests",
        lambda now: now.of_engines(lambda e: e.total_tokens),
        "engine",
    ),
    _read(
        "engine_circuit_open",
        "1 while a failing engine gets no requests, or one trial",
        lambda now: now.of_engines(lambda e: not e.circuit.closed),
        "engine",
    ),
    _read(
        "engine_info",
        "1, with the kind of the engine and its version, as far as the engine tells them",
        SchedulerReading.programs,
        *("engine", "kind", "version"),
    ),
    _read(
        "engine_slots_known",
        "0 while the engine's number of slots is a guess",
        lambda now: now.of_probed(lambda e: e.probed.slots_found),
        "engine",
    ),
    _read(
        "engine_load_known",
        "1 when the engine says how many requests run and wait in it",
        lambda now: now.of_probed(lambda e: e.probed.load_known),
        "engine",
    ),
    _read(
        "engine_pace_ratio",
        "Measured over profiled durations of the engine's batches, with --profile",
        SchedulerReading.paces,
        *("engine", "model"),
    ),
    _read(
        "engine_model_load_seconds",
        "Seconds that the engine takes to load a model, where models share its memory in turn; `load_s` of a plan",
        SchedulerReading.model_loads,
        *("engine", "model"),
    ),
    _read(
        "engine_kept_programs",
        "Programs in a tool call whose tokens the engine keeps, once programs have come",
        lambda now: now.kept(0),
        "engine",
    ),
    _read(
        "engine_ledger_tokens",
        "Tokens of the engine's cache that running requests and kept programs have, what they share once",
        lambda now: now.kept(1),
        "engine",
    ),
    _read(
        "engine_memory_tokens",
        "Tokens that the engine's cache holds, as far as the engine tells",
        lambda now: now.memories(),
        "engine",
    ),
    _read(
        "engine_oversized_programs",
        "Requests of programs that took more than nine tenths of the engine's cache, alone",
        lambda now: counts(now.of_programs.alone),
        "engine",
        kind="counter",
    ),
    _read(
        "program_returns",
        "Returns of programs from tool calls: in_time, while an engine kept their tokens, or late",
        lambda now: counts(now.of_programs.returns),
        "kept",
        kind="counter",
    ),
    _read(
        "source_engines",
        "Engines that a source of engines tells of, such as dns:NAME:PORT",
        lambda now: now.of_sources(lambda looked: len(looked.engines)),
        "source",
    ),
    _read(
        "source_failing",
        "1 while a source of engines gives no answer, or tells of none: engines found before stay",
        lambda now: now.of_sources(lambda looked: bool(looked.trouble)),
        "source",
    ),
    _read("engines_wanted", "Engines that the model's requests need, by forecasts", SchedulerReading.wanted, "model"),
    _read(
        "boost_wait_longest_seconds",
        "Longest wait that first come, first served would have given, by forecast work; order boost only",
        lambda now: now.waits(lambda waits: waits.longest_s),
        by_model=True,
    ),
    _read(
        "boost_wait_bound_seconds",
        "Bound on the wait of every request, while forecasts of the work are right; order boost only",
        lambda now: now.waits(lambda waits: WAIT_MOST * waits.longest_s),
        by_model=True,
    ),
    _read(
        "boost_room_seconds",
        "Seconds by which a request is delayed at most now, the longest requests excepted; order boost only",
        lambda now: now.waits(lambda waits: waits.room_s),
        by_model=True,
    ),
    _read(
        "prediction_trusted",
        "0 while predictions do not rank answers, so that one bin is used",
        SchedulerReading.trusted,
        by_model=True,
    ),
    _read(
        "prediction_window_answers",
        "Answers in the window of the prediction metrics",
        lambda now: now.accuracy(lambda a: a.answers),
        by_model=True,
    ),
    _read(
        "prediction_rank_correlation",
        "Spearman's, predicted with real lengths",
        lambda now: now.accuracy(lambda a: a.rank_correlation),
        by_model=True,
    ),
    _read(
        "prediction_bin_accuracy",
        "Share predicted into the right one of {bins} bins",
        lambda now: now.accuracy(lambda a: a.bin_accuracy),
        by_model=True,
    ),
    _read(
        "prediction_near_bin_accuracy",
        "Share predicted into the right or an adjacent bin",
        lambda now: now.accuracy(lambda a: a.near_accuracy),
        by_model=True,
    ),
    _read(
        "prediction_calibration_error",
        "Mean error of the predicted quantiles' levels",
        lambda now: now.accuracy(lambda a: a.calibration_error),
        by_model=True,
    ),
    _read(
        "prediction_fallbacks",
        "Forecasts made without the predictor",
        lambda now: counts(now.lengths.fallbacks),
        "reason",
        kind="counter",
    ),
    _read(
        "prediction_forecasts",
        "Requests by what gave their first forecast: predictor, learner (of the prompt's words), memory (of its "
        "template), recent (the model's last answers), client, none",
        lambda now: counts(now.lengths.sources),
        "source",
        kind="counter",
    ),
    _read(
        "prediction_learnt_answers",
        "Answers learnt since the start",
        lambda now: one(now.lengths.learnt),
        kind="counter",
    ),
)
STATE: tuple[Read[Saver], ...] = (
    _read(
        "state_saved_timestamp_seconds",
        "When what was learnt was last saved, unix time",
        lambda saver: one(saver.last.at_s) if saver.last is not None else (),
    ),
    _read(
        "state_save_seconds",
        "Seconds that the last save took",
        lambda saver: one(saver.last.seconds) if saver.last is not None else (),
    ),
    _read(
        "state_bytes",
        "Size of what was last saved",
        lambda saver: one(saver.last.size) if saver.last is not None else (),
    ),
    _read(
        "state_failures",
        "Times that what was learnt could not be saved",
        lambda saver: one(saver.failures),
        kind="counter",
    ),
)
ENERGY: tuple[Read[EnergyReading], ...] = (
    _read(
        "energy_joules",
        "Energy of the engines; nvml: of this machine's GPUs",
        EnergyReading.total,
        "source",
        kind="counter",
    ),
    _read(
        "energy_joules_per_output_token",
        "Of completed requests, since the start",
        lambda now: now.per(now.output_tokens),
        "source",
    ),
    _read(
        "energy_joules_per_request",
        "Per completed request, since the start",
        lambda now: now.per(now.requests),
        "source",
    ),
)
PLANS: tuple[Read[Plans], ...] = (
    _read("dispatch_plans", "Dispatch plans that took effect", Plans.followed, kind="counter"),
    _read(
        "dispatch_fallbacks",
        "Dispatch plans that are not the best: no plan carries the load, so that no request waits for others "
        "(overload), or a decision process could not be solved (unsolved)",
        Plans.fallbacks,
        "reason",
        kind="counter",
    ),
    _read(
        "arrival_rate_per_second",
        "Arrivals per second for which the last dispatch plan was requested",
        Plans.rates,
        by_model=True,
    ),
    _read(
        "dispatch_queues",
        "Queues that the bins are merged into",
        lambda plans: plans.expected(lambda plan: len(plan.tables)),
        by_model=True,
    ),
    _read(
        "dispatch_response_seconds_expected",
        "Mean response time that the plan expects",
        lambda plans: plans.expected(lambda plan: plan.response_s_mean),
        by_model=True,
    ),
    _read(
        "dispatch_power_watts_expected",
        "Mean power of all engines that the plan expects",
        lambda plans: plans.expected(lambda plan: plan.power_w_mean) if plans.energy_known else None,
        by_model=True,
    ),
    _read(
        "dispatch_target_met",
        "1 when the plan expects to meet the latency target",
        lambda plans: plans.expected(Plans.meets_target),
        by_model=True,
    ),
)
ORDER: tuple[Read[str], ...] = (_read("order", "1 for the order in force", lambda order: one(1.0, order), "settings"),)
BUILD: tuple[Read[None], ...] = (
    _read(
        "build_info",
        "1, with the versions",
        lambda _: one(1.0, platform.python_version(), __version__),
        *("python", "version"),
    ),
)
CONNECTIONS: tuple[Read[Connections], ...] = (
    _read("connections", "Connections of clients", lambda server: one(len(server.connections))),
    _read(
        "buffered_bytes",
        "Bytes of requests and of unread answers in memory",
        lambda server: one(server.buffered_bytes),
    ),
    _read(
        "connections_cut",
        "Connections that the server closed, by reason",
        lambda server: counts(server.cut),
        "reason",
        kind="counter",
    ),
)
RELAYS: tuple[Read[Relays], ...] = (
    _read("relays", "Relays that are connected", lambda relays: one(relays.count)),
    _read(
        "relay_cpu_seconds",
        "Processor time of all relays, user and system",
        lambda relays: one(relays.cpu_s),
        kind="counter",
    ),
)
JOBS: tuple[Read[Jobs], ...] = (
    _read(
        "job_lines",
        "Lines of batch jobs: waiting in a file, or in flight",
        lambda jobs: [(("waiting",), jobs.lines_waiting), (("in_flight",), jobs.lines_in_flight)],
        "state",
    ),
    _read(
        "job_lines_ended",
        "Lines of batch jobs with a result, by outcome: completed, failed, expired",
        lambda jobs: counts(jobs.lines_ended),
        "outcome",
        kind="counter",
    ),
)

READ: tuple[Read[Any], ...] = (*SCHEDULER, *STATE, *ENERGY, *PLANS, *ORDER, *BUILD, *CONNECTIONS, *RELAYS, *JOBS)
TABLE: tuple[Metric, ...] = (*COUNTED, *[read.metric for read in READ])
