"""What is wrong or slow in a configuration, and in the engines by URL that it names. Nothing is started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from llmserve.discovery.part import first_look
from llmserve.discovery.source import CannotFind
from llmserve.doctor.finding import Finding
from llmserve.engines.engine import EngineError, Health
from llmserve.engines.kinds import Servers, engine_name
from llmserve.engines.openai import OpenAIEngine
from llmserve.errors import ConfigError
from llmserve.server.serving import checked
from llmserve.settings.by_model import PREFIX, by_model
from llmserve.settings.tree import Config
from llmserve.spelling import nearest

CHARS_PER_TOKEN = 4.0  # of English prompts, about
BY_LENGTH = ("shortest", "boost")
BY_DEADLINE = ("edf", "flex", "clockwork")
REMEDIES = {  # by the code of an engine's error
    "engine_auth": "Give the engine's key: --engine-api-key, or LLMSERVE_ENGINE_API_KEY.",
    "engine_priority": "Start it with such a scheduler, or leave --engine-priority out.",
}
Probed = dict[str, Health | EngineError]
"""The health of each engine by URL, or why it has none."""


def findings(config: Config) -> list[Finding]:
    """All findings. Asks the engines by URL how they are."""
    try:
        config = checked(config)
    except ConfigError as error:
        return [Finding("wrong", "settings", f"The server does not start: {error}.", "Change the setting it names.")]
    found, source_findings = asyncio.run(_found(config))
    engines, probed = asyncio.run(_probed(config, found))
    slots = sum([_slots_of(engine, probed) for engine in engines])
    return [
        *source_findings,
        *engine_findings(config, probed),
        *model_findings(config, probed),
        *order_findings(config),
        *limit_findings(config, slots, probed),
        *operator_findings(config),
    ]


# ---- engines ----


async def _found(config: Config) -> tuple[set[str], list[Finding]]:
    """The URLs of engines that the sources of engines tell of now."""
    urls, findings = set[str](), list[Finding]()
    for entry in config.engines.sources:
        try:
            found, why = await first_look(entry), "it tells of no ready engine"
        except CannotFind as error:
            found, why = frozenset(), str(error)
        urls |= found
        if not found:
            remedy = "Correct the name, or start the engines behind it."
            findings.append(Finding("wrong", "source_failing", f"{entry.text}: {why}.", remedy))
    return urls, findings


async def _probed(config: Config, found: Iterable[str]) -> tuple[list[OpenAIEngine], Probed]:
    servers = Servers(config)
    engines = servers.connect()
    known = {engine.info.name for engine in engines}
    engines += [servers.client(url) for url in sorted(found) if engine_name(url) not in known]

    async def probe(engine: OpenAIEngine) -> Health | EngineError:
        try:
            return await engine.probe()
        except EngineError as error:
            return error
        finally:
            await engine.close()

    health = await asyncio.gather(*(probe(engine) for engine in engines))
    return engines, {engine.info.name: each for engine, each in zip(engines, health, strict=True)}


def _slots_of(engine: OpenAIEngine, probed: Probed) -> int:
    health = probed[engine.info.name]
    return (health.slots if isinstance(health, Health) else None) or engine.info.slots


def engine_findings(config: Config, probed: Probed) -> Iterator[Finding]:
    for name, health in probed.items():
        if isinstance(health, EngineError):
            remedy = REMEDIES.get(health.code or "", "Start it, or correct its URL.")
            yield Finding("wrong", "engine_down", f"{_capital(str(health))}.", remedy)
        elif not health.models:
            yield Finding("wrong", "no_model", f"Engine {name} lists no model.", "Start it with a model.")


def model_findings(config: Config, probed: Probed) -> Iterator[Finding]:
    """Settings for models that no engine serves. Models of engines that do not answer are not known."""
    if not probed or not all(isinstance(health, Health) for health in probed.values()):
        return
    served = {model.id for health in probed.values() if isinstance(health, Health) for model in health.models}
    slos = [text for text in config.limits.slo_ms if text.startswith(PREFIX)]
    for setting, texts in (
        ("profile", config.dispatch.profile),
        ("predictor", config.prediction.predictor),
        ("slo_ms", slos),
    ):
        for model in sorted(set(by_model(setting, texts)) - {""} - served):
            what = f"No engine serves the model {model} of --{setting.replace('_', '-')}{nearest(model, served)}."
            yield Finding("wrong", "unserved_model", what, "Correct the name of the model, or remove the setting.")


# ---- forecasts, order and limits ----


def order_findings(config: Config) -> Iterator[Finding]:
    scheduling, prediction = config.scheduling, config.prediction
    predicted = prediction.memory_keys > 0 or set(by_model("predictor", prediction.predictor).values()) - {"none"}
    if scheduling.order in BY_LENGTH and not predicted:
        yield Finding(
            "slow",
            "order_cannot_help",
            f"The order {scheduling.order} goes by lengths, but nothing predicts them.",
            "Leave --memory-keys at its default, or give --predictor.",
        )
    if scheduling.order in BY_DEADLINE and not config.limits.slo_ms:
        yield Finding(
            "note",
            "no_deadlines",
            f"The order {scheduling.order} goes by deadlines, but only requests with the header x-llmserve-slo-ms "
            "have one.",
            "Give --slo-ms, unless all clients send the header.",
        )
    if scheduling.goes_by_times and not config.dispatch.profile:
        yield Finding(
            "slow",
            "no_profile",
            f"The order {scheduling.order} needs to know how long batches take.",
            "Measure the engine with `llmserve profile`, and give the file with --profile.",
        )
    for profile in config.dispatch.profiles().values():
        if profile.misfit:
            yield Finding(
                "slow", "profile_misfit", f"Profile {profile.name}: {profile.misfit}.", "Measure the engine again."
            )


def limit_findings(config: Config, slots: int, probed: Probed) -> Iterator[Finding]:
    limits, scheduling = config.limits, config.scheduling
    if slots and 0 < limits.concurrent_max < slots:
        yield Finding(
            "note",
            "limit_below_slots",
            f"--concurrent-max {limits.concurrent_max} is less than the {slots} slots: one key alone cannot fill them.",
            "Raise it, if a single key should be able to use all engines.",
        )
    if slots and scheduling.queue_requests_max < slots:
        yield Finding(
            "slow",
            "queue_small",
            f"--queue-requests-max {scheduling.queue_requests_max} is less than the {slots} slots: a burst that the "
            "engines could run is refused.",
            "Raise it to several times the slots.",
        )
    contexts = [
        model.context_tokens or 0 for health in probed.values() if isinstance(health, Health) for model in health.models
    ]
    longest = max(contexts, default=0) * CHARS_PER_TOKEN
    for name, most in (("body-bytes-max", limits.body_bytes_max), ("prompt-chars-max", limits.prompt_chars_max)):
        if longest > most:
            yield Finding(
                "note",
                "limit_below_context",
                f"--{name} {most:,} is less than the context of {max(contexts):,} tokens, about {longest:,.0f} "
                "characters.",
                f"Raise --{name}, if clients send such prompts.",
            )
    if config.live.keep_alive_s == 0 and scheduling.engine_wait_s > 0:
        yield Finding(
            "note",
            "no_keep_alive",
            "Streams that wait are silent (--keep-alive-s 0): proxies may cut them, most after 60 s.",
            "Leave --keep-alive-s at its default.",
        )


def operator_findings(config: Config) -> Iterator[Finding]:
    server = config.server
    if server.api_key_file and server.metrics_port is None:
        yield Finding(
            "note",
            "metrics_need_a_key",
            "With --api-key-file, /metrics needs a key.",
            "Give --metrics-port for Prometheus, or a key in its configuration.",
        )
    if server.state is None and config.prediction.memory_keys > 0:
        yield Finding(
            "note",
            "nothing_kept",
            "What is learnt of lengths is lost at a restart.",
            "Give --state DIR.",
        )


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]
