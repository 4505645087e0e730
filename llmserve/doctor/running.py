"""What is wrong or slow in a running server, by its metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from llmserve.doctor.finding import Finding
from llmserve.observe.scrape import Scrape

FEW = 50  # requests, below which a share says nothing
FAULTS_MAX = 0.01  # share of runs
REFUSED_MAX = 0.01  # share of requests
MISSED_MAX = 0.05  # share of deadlines
FALLBACKS_MAX = 0.05  # share of forecasts
LONG_PROMPT_TOKENS = 1_000  # mean of an engine whose cache is worth a word
EXPECTED_LEAST, FOUND_LEAST = 0.2, 0.5  # expected hits, as a share of prompts; hits, as a share of the expected ones
CONTINUED_LEAST = 0.02  # share of requests of programs that go on from an earlier one
LATE_RETURNS_MAX = 0.5  # share of returns from tool calls
PACE_MOST = 1.5  # measured over profiled times, or the other way round
AT_ONCE_S, AT_ONCE_SHARE = "0.01", 0.95
LATE_S, LATE_SHARE = "1.0", 0.2
CPU_MAX, FILES_MAX = 0.8, 0.8
WEAK_CORRELATION, ANSWERS_LEAST = 0.2, 100

REFUSALS = {  # by the reason of a refusal: what is so, and the remedy
    "queue_full": (
        "the queue was full",
        "Add engines. A larger --queue-requests-max only makes clients wait for longer",
    ),
    "no_engine": ("no engine of the model was up", "Start the engines, or let requests wait longer: --engine-wait-s"),
    "engine_lost": ("an engine was lost in mid-answer", "Look into the engine's own log"),
    "refused": ("every engine refused them", "Look into the engines' answers: full, or without the model"),
    "engine_failed": ("the engine returned an error", "Look into the engines' own logs"),
    "deadline_exceeded": (
        "they could not meet their deadlines",
        "Add engines, or give later deadlines (--slo-ms)",
    ),
    "requests_per_minute": (
        "a key had used its requests of the minute",
        "Raise the key's limit, if that is too little",
    ),
    "tokens_per_minute": ("a key had used its tokens of the minute", "Raise the key's limit, if that is too little"),
    "tokens_waiting": ("a key had too many tokens in the queue", "Raise the key's limit, if that is too little"),
    "concurrent_max": ("a key had too many requests at once", "Raise the key's limit, if that is too little"),
    "insufficient_quota": ("a key had spent its budget", "Raise the budget in the key file, and reload it"),
    "buffers_full": ("too many bytes were in memory", "Raise --buffers-bytes-max, or find clients that do not read"),
    "no_socket": ("this server had no free socket", "Raise the limit of open files: `ulimit -n`, LimitNOFILE"),
    "model_not_found": ("no engine serves their model", "Tell the clients the names that /v1/models lists"),
    "invalid_api_key": ("their key is not known", "Add the key to --api-key-file, and reload it"),
    "internal_error": ("the front-end has an error", "Report it, with the traceback in the log"),
}
FAILURES = {  # of the server, not of a client or a limit that does its work
    *("queue_full", "no_engine", "engine_lost", "engine_failed", "refused"),
    *("deadline_exceeded", "buffers_full", "no_socket", "internal_error"),
}
CUTS = {
    "stalled": ("a client read nothing of its answer", "Raise --client-stall-s, if these clients are only slow"),
    "buffers_full": REFUSALS["buffers_full"],
    "refused": ("the server had as many connections as it may have", REFUSALS["no_socket"][1]),
}


def findings(scrape: Scrape, seconds: float) -> list[Finding]:
    """All findings. seconds : in which what grows has grown"""
    checks: tuple[Callable[[Scrape], Iterator[Finding]], ...] = (
        *(engines_down, sources, open_circuits, faults, slots, paces, caches, programs),
        *(forecasts, order, refusals, cuts, deadlines, state),
    )
    found = [finding for check in checks for finding in check(scrape)]
    return found + list(process(scrape, seconds))


# ---- engines ----


def _named(scrape: Scrape, engine: str) -> str:
    """The engine with the kind of its program, if it has said what it is."""
    for labels, _ in scrape.rows("llmserve_engine_info"):
        if labels.get("engine") == engine:
            return f"{engine} ({labels.get('kind', '')} {labels.get('version', '')}".rstrip() + ")"
    return engine


def engines_down(scrape: Scrape) -> Iterator[Finding]:
    ready = scrape.by("llmserve_engine_ready", "engine")
    for engine in [engine for engine, is_ready in ready.items() if not is_ready]:
        yield Finding(
            "wrong",
            "engine_down",
            f"Engine {_named(scrape, engine)} is down, or drained by its operator.",
            "Start it or resume it, or take it out of --engine. The log of llmserve says why its probes fail.",
        )
    if not ready:
        yield Finding(
            "wrong", "no_engine", "No engine has been up yet.", "Check the URLs of --engine and the engines' logs."
        )


def sources(scrape: Scrape) -> Iterator[Finding]:
    engines = scrape.by("llmserve_source_engines", "source")
    for source, is_failing in scrape.by("llmserve_source_failing", "source").items():
        if is_failing:
            kept = (
                f"the {engines[source]:.0f} engines that it told of before stay" if engines.get(source) else "none yet"
            )
            yield Finding(
                "wrong",
                "source_failing",
                f"{source} gives no answer, or tells of no engine; {kept}.",
                "GET /admin/engines and the log of llmserve say why.",
            )


def open_circuits(scrape: Scrape) -> Iterator[Finding]:
    for engine, is_open in scrape.by("llmserve_engine_circuit_open", "engine").items():
        if is_open:
            yield Finding(
                "wrong",
                "circuit_open",
                f"Engine {_named(scrape, engine)} failed one request after another and gets none now, or one trial.",
                "Look into the engine's own log. It gets requests again when a trial succeeds.",
            )


def faults(scrape: Scrape) -> Iterator[Finding]:
    name = "llmserve_engine_requests_total"
    runs = scrape.by(name, "engine")
    for engine, count in runs.items():
        failed = scrape.sum(name, engine=engine, outcome="fault") + scrape.sum(name, engine=engine, outcome="lost")
        if failed and failed > FAULTS_MAX * count:
            yield Finding(
                "wrong",
                "engine_fails",
                f"Engine {_named(scrape, engine)} failed {failed:,.0f} of {count:,.0f} runs ({failed / count:.1%}).",
                "Look into the engine's own log; the log of llmserve names the requests.",
            )


def slots(scrape: Scrape) -> Iterator[Finding]:
    load_known, count = (scrape.by(f"llmserve_engine_{name}", "engine") for name in ("load_known", "slots"))
    for engine, known in scrape.by("llmserve_engine_slots_known", "engine").items():
        guess = f"{count.get(engine, 0):.0f}"
        if not known:
            yield Finding(
                "note",
                "slots_growing",
                f"Engine {_named(scrape, engine)} has had no more than {guess} requests at once: its slots are a "
                "guess, which grows with the load.",
                "Nothing, or give --slots (vLLM: --max-num-seqs).",
            )
        elif not load_known.get(engine, 1.0):
            yield Finding(
                "note",
                "engine_without_metrics",
                f"Engine {_named(scrape, engine)} has no metrics that llmserve can read: the size of its cache is not "
                "known.",
                "Nothing, unless requests are preempted in the engine: then lower --slots.",
            )


def paces(scrape: Scrape) -> Iterator[Finding]:
    for labels, pace in scrape.rows("llmserve_engine_pace_ratio"):
        if pace > PACE_MOST or pace < 1 / PACE_MOST:
            model = f" for {labels['model']}" if labels.get("model") else ""
            yield Finding(
                "wrong",
                "profile_off",
                f"Batches on engine {labels['engine']}{model} take {pace:.2g} times as long as the profile says.",
                "Measure the engine again with `llmserve profile`, and give the file with --profile.",
            )


def caches(scrape: Scrape) -> Iterator[Finding]:
    name = "llmserve_prompt_tokens_total"
    runs = scrape.by("llmserve_engine_requests_total", "engine", outcome="completed")
    forecast = scrape.by("llmserve_forecast_cached_tokens_total", "engine")
    for engine, tokens in scrape.by(name, "engine").items():
        if (count := runs.get(engine, 0.0)) < FEW:
            continue
        yes, unknown = (scrape.sum(name, engine=engine, cached=cached) for cached in ("yes", "unknown"))
        told, expected = tokens - unknown, forecast.get(engine, 0.0)
        if unknown == tokens and tokens > LONG_PROMPT_TOKENS * count:
            yield Finding(
                "note",
                "cache_not_told",
                f"Engine {_named(scrape, engine)} does not tell what it has of prompts in its cache, and prompts are "
                f"long ({tokens / count:,.0f} tokens).",
                "Start vLLM with --enable-prompt-tokens-details, SGLang with --enable-cache-report.",
            )
        elif told and expected > EXPECTED_LEAST * told and yes < FOUND_LEAST * expected:
            yield Finding(
                "slow",
                "prompts_computed_again",
                f"Engine {_named(scrape, engine)} had {yes / told:.0%} of its prompts in its cache, where llmserve "
                f"expected {expected / told:.0%}.",
                "Prefix caching may be off (vLLM: --enable-prefix-caching), or the cache too small for the prompts in "
                "use: give it more memory, or lower --slots.",
            )


def programs(scrape: Scrape) -> Iterator[Finding]:
    asked, source = "llmserve_program_requests_total", "first"
    requests, first = scrape.sum(asked), scrape.sum(asked, source=source)
    yes, prompts = (scrape.sum("llmserve_prompt_tokens_total", **of) for of in ({"cached": "yes"}, {}))
    if first >= FEW and first > (1.0 - CONTINUED_LEAST) * requests and yes < FOUND_LEAST * prompts:
        yield Finding(
            "note",
            "programs_not_seen",
            f"{first:,.0f} requests with tools or ids each began a program, and hardly any went on from another.",
            "If they are steps of agents, let these send the header x-llmserve-session, the same for all of a session.",
        )
    memories = scrape.by("llmserve_engine_memory_tokens", "engine")
    for engine in scrape.by("llmserve_engine_kept_programs", "engine"):
        if engine not in memories:
            yield Finding(
                "note",
                "memory_not_told",
                f"Engine {_named(scrape, engine)} does not tell how many tokens its cache holds, so turns of agents "
                "are not admitted by memory.",
                "Let the front-end read the engine's /metrics (vLLM) or /get_server_info (SGLang).",
            )
    for engine, count in scrape.by("llmserve_engine_oversized_programs_total", "engine").items():
        if count:
            yield Finding(
                "slow",
                "program_above_memory",
                f"{count:,.0f} times a single program took nine tenths of the cache of engine {_named(scrape, engine)} "
                f"or more ({memories.get(engine, 0.0):,.0f} tokens): nothing else runs beside it.",
                "Give the engine more memory, or let the agents summarise their context earlier.",
            )
    returns = scrape.by("llmserve_program_returns_total", "kept")
    late = returns.get("late", 0.0)
    if late >= FEW and late > LATE_RETURNS_MAX * sum(returns.values()):
        yield Finding(
            "note",
            "programs_return_late",
            f"{late / sum(returns.values()):.0%} of the returns from tool calls came when the program's tokens were no "
            "longer kept: their contexts may have to be computed again.",
            "The tools take longer than the memory is worth. An engine that moves what it drops to the host's memory "
            "(LMCache, vLLM's --kv-offloading-size) makes late returns cheap.",
        )


# ---- forecasts and order ----


def forecasts(scrape: Scrape) -> Iterator[Finding]:
    answers = scrape.by("llmserve_prediction_window_answers", "model")
    correlation = scrape.by("llmserve_prediction_rank_correlation", "model")
    for model, trusted in scrape.by("llmserve_prediction_trusted", "model").items():
        of, r = f" of {model}" if model else "", correlation.get(model, float("nan"))
        learn = "Train a predictor on your prompts (`llmserve train`), or let it learn from more answers."
        if not trusted:
            what = f"Forecasts{of} do not rank answers (rank correlation {r:.2f}): nothing is ordered by them."
            yield Finding("slow", "forecasts_not_trusted", what, learn)
        elif answers.get(model, 0) >= ANSWERS_LEAST and r < WEAK_CORRELATION:
            what = f"Forecasts{of} rank answers weakly (rank correlation {r:.2f}): the order gains little."
            yield Finding("note", "forecasts_weak", what, learn)
    made, fallen = scrape.sum("llmserve_prediction_forecasts_total"), scrape.sum("llmserve_prediction_fallbacks_total")
    if fallen and fallen > FALLBACKS_MAX * made:
        yield Finding(
            "slow",
            "predictor_falls_back",
            f"The predictor gave no forecast in time for {fallen:,.0f} of {made:,.0f} requests.",
            "Give it more threads (--predictor-threads) or more time (--predictor-budget-s). The log says more.",
        )


def order(scrape: Scrape) -> Iterator[Finding]:
    name = "llmserve_waiting_seconds"
    starts = scrape.sum(f"{name}_count")
    if starts < FEW:
        return
    at_once = scrape.sum(f"{name}_bucket", le=AT_ONCE_S) / starts
    late = 1.0 - scrape.sum(f"{name}_bucket", le=LATE_S) / starts
    in_force = next((labels["settings"] for labels, on in scrape.rows("llmserve_order") if on), "")
    if at_once > AT_ONCE_SHARE:
        yield Finding(
            "note",
            "order_cannot_help",
            f"{at_once:.0%} of the requests start within {1e3 * float(AT_ONCE_S):.0f} ms: where nothing waits, no "
            "order and no forecast can gain anything.",
            "Nothing: the engines have room. Fewer engines would do, if you want to save.",
        )
    elif in_force == "fffs" and late > LATE_SHARE:
        yield Finding(
            "slow",
            "order_ignores_lengths",
            f"{late:.0%} of the requests wait for more than {float(LATE_S):g} s, and run first come, first served.",
            "Try --order boost, or let `llmserve tune --journal FILE` find the best order for your traffic.",
        )


# ---- what is refused ----


def refusals(scrape: Scrape) -> Iterator[Finding]:
    ended = scrape.sum("llmserve_requests_total")
    reasons = scrape.by("llmserve_rejections_total", "reason")
    for reason, count in sorted(reasons.items(), key=lambda pair: -pair[1]):
        if not count or reason not in REFUSALS:
            continue
        why, remedy = REFUSALS[reason]
        all_ = max(ended, count)
        yield Finding(
            "wrong" if reason in FAILURES and count > REFUSED_MAX * all_ else "note",
            f"refused_{reason}",
            f"{count:,.0f} requests were refused or failed, because {why}.",
            f"{remedy}.",
        )


def cuts(scrape: Scrape) -> Iterator[Finding]:
    for reason, count in scrape.by("llmserve_connections_cut_total", "reason").items():
        if count and reason in CUTS:
            why, remedy = CUTS[reason]
            what = f"{count:,.0f} connections were cut, because {why}."
            yield Finding("note", f"cut_{reason}", what, f"{remedy}.")


def deadlines(scrape: Scrape) -> Iterator[Finding]:
    for model, missed in scrape.by("llmserve_deadlines_total", "model", outcome="missed").items():
        all_ = missed + scrape.sum("llmserve_deadlines_total", model=model, outcome="met")
        if all_ >= FEW and missed > MISSED_MAX * all_:
            yield Finding(
                "slow",
                "deadlines_missed",
                f"{missed:,.0f} of {all_:,.0f} deadlines of {model} were missed.",
                "Try --order edf, or flex on --barrier engines; else add engines or give later deadlines.",
            )


# ---- the process ----


def state(scrape: Scrape) -> Iterator[Finding]:
    if count := scrape.sum("llmserve_state_failures_total"):
        yield Finding(
            "wrong",
            "state_not_saved",
            f"What was learnt could not be saved {count:,.0f} times.",
            "Make room on the disk of --state, or make the folder writable.",
        )


def cores(scrape: Scrape, seconds: float) -> Iterator[Finding]:
    """Where a core is full: of the one process, of the scheduler process, of the relays."""
    if seconds <= 0:
        return
    cpu, relays = scrape.sum("process_cpu_seconds_total") / seconds, scrape.sum("llmserve_relays")
    if cpu > CPU_MAX and relays:
        yield Finding(
            "slow",
            "scheduler_busy",
            f"The scheduler process uses {cpu:.0%} of a core.",
            "Start a second server with engines of its own (--plan and --group, or a part of the --engine).",
        )
    elif cpu > CPU_MAX:
        yield Finding(
            "slow",
            "front_end_busy",
            f"The front-end uses {cpu:.0%} of a core, and it is one process.",
            "Let several processes hold the connections: --workers.",
        )
    of_each = scrape.sum("llmserve_relay_cpu_seconds_total") / seconds / relays if relays else 0.0
    if of_each > CPU_MAX:
        yield Finding(
            "slow",
            "relays_busy",
            f"{relays:.0f} relays use {of_each:.0%} of a core each.",
            "Start more of them (--workers), where the machine has the cores.",
        )


def process(scrape: Scrape, seconds: float) -> Iterator[Finding]:
    yield from cores(scrape, seconds)
    files, most = scrape.sum("process_open_fds"), scrape.sum("process_max_fds")
    if most and files > FILES_MAX * most:
        yield Finding(
            "wrong",
            "files_run_out",
            f"The front-end has {files:,.0f} of at most {most:,.0f} files open.",
            "Raise the limit of open files: `ulimit -n`, LimitNOFILE.",
        )
