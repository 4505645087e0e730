"""What the scaling signal saves and costs: engine hours beside deadlines met, over a day with bursts.

    python scripts/lab fleet.scaling --output docs/results/scaling.json --plot docs/results/scaling.png

The real scheduler serves one model with at most 24 simulated engines (4 slots, 20 ms a token). The traffic is that of
run.py: a day's curve, here in an hour, with bursts of three times the rate for 20 s; at the peak the work
of 17 engines arrives; the deadline is 60 s. The number of engines is asked for each 10 s. An engine takes 60 s to
start; one that is stopped first ends what it runs. Starting and stopping count as engine time.

    all          24 engines, always
    wanted       llmserve/estimates/engines_wanted.py: up at once, down after 300 s
    at once      the same number, down at once as well
    utilisation  busy slots over slots, aimed at 80 %, as autoscalers do by default; down after 300 s
"""

from __future__ import annotations

import math
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
from kit.arguments import add_results, parser_of
from kit.figures import BLUE, GREEN, GREY, ORANGE, new_figure, save
from kit.progress import log
from kit.results import day_and_machine, rounded, write_json
from kit.tables import markdown

from llmserve.estimates.engines_wanted import DOWN_AFTER_S, Load, Wanted
from llmserve.request import EngineInfo, Request
from llmserve.scheduling.messages import Action, EngineClosed, EngineLost, EngineReady, Event, FailRequest, RequestEnded
from llmserve.settings.policies import SchedulingConfig
from llmserve.simulation.cluster import SimulatedCluster
from llmserve.simulation.engine_model import TimedEngine
from questions.fleet.group import EngineSpeed
from questions.fleet.traffic import Traffic, drawn_bursts

MODEL, SPEED = "m0", EngineSpeed()
ENGINES, PEAK_ENGINES, FIRST_ENGINES = 24, 17, 5
TOKENS_MEAN, SLO_S, START_S, EVERY_S, RATE_OVER_S = 400.0, 60.0, 60.0, 10.0, 60.0
BURSTS = 6.0
COLOURS = {"all": GREY, "wanted": BLUE, "at once": GREEN, "utilisation": ORANGE}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--span-s", type=float, default=3600.0, help="simulated seconds of the day")
    parser.add_argument("--seeds", type=int, default=5)
    add_results(parser, "--plot")
    args = parser.parse_args()
    runs = {}
    for name in COLOURS:
        runs[name] = [Scaled(args.span_s, seed, name) for seed in range(args.seeds)]
        for each in runs[name]:
            each.run()
        log(f"{name}: done")
    summaries = {name: summary(of) for name, of in runs.items()}
    print(table(summaries))
    write_json(args.output, rounded({**day_and_machine(), "runs": summaries}))
    if args.plot:
        draw({name: of[0] for name, of in runs.items()}, args.plot)


class Scaled:
    """A day under one rule.

    engine_s  seconds of all engines, starting and stopping ones included
    met       whether each answer was complete by its deadline
    shown     (time, engines, work that arrives in engines) at each question
    """

    def __init__(self, span_s: float, seed: int, rule: str) -> None:
        bursts = drawn_bursts(1, 1, span_s, BURSTS, np.random.default_rng(seed))
        peak_per_s = PEAK_ENGINES * SPEED.requests_per_s(TOKENS_MEAN)
        self._traffic = Traffic((peak_per_s,), (1.0,), span_s, 1, TOKENS_MEAN, SLO_S, bursts, seed=seed)
        self._rule = rule
        self.engine_s, self.starts = 0.0, 0
        self.met: list[bool] = []
        self.latency_s: list[float] = []
        self.shown: list[tuple[float, int, float]] = []
        self._lengths: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self._recent: deque[tuple[float, float]] = deque()  # (time, forecast work) of the last arrivals
        self._up = ENGINES if rule == "all" else FIRST_ENGINES
        self._state = ["up" if number < self._up else "off" for number in range(ENGINES)]
        self._ready_at_s = [0.0] * ENGINES
        self._wanted = Wanted(least=1, most=ENGINES, down_after_s=0.0 if rule == "at once" else DOWN_AFTER_S)
        scheduling = SchedulingConfig().resolved(barrier=False)
        infos = [EngineInfo(f"e{number}", SPEED.slots, False) for number in range(ENGINES)]
        engines = [TimedEngine(info, self._lengths, step_s=SPEED.step_s, prefill_s=SPEED.prefill_s) for info in infos]
        late = [info.name for number, info in enumerate(infos) if self._state[number] == "off"]
        scheduler = scheduling.scheduler(self._traffic.forecasts(500))
        self._infos = infos
        self._cluster = SimulatedCluster(scheduler, [*engines], on_step=self._note, late=late)

    def run(self) -> None:
        self._cluster.begin()
        first_id, ask_at_s = 0, 0.0
        for second in range(int(self._traffic.span_s)):
            if second >= ask_at_s:
                self._scale(float(second))
                ask_at_s += EVERY_S
            arrived = self._traffic.second(second, first_id)
            first_id += len(arrived)
            for sent in arrived:
                self._cluster.advance(sent.at_s)
                self._lengths[sent.request.id] = sent.tokens
                self._arrived[sent.request.id] = sent.at_s
                self._recent.append((sent.at_s, work_of(sent.request)))
                self._cluster.arrive(sent.request)
        self._cluster.advance(math.inf)
        assert not self._arrived, "a request never ended"

    def _note(self, now_s: float, event: Event, actions: list[Action]) -> None:
        if isinstance(event, RequestEnded) and event.outcome == "completed":
            took_s = now_s - self._arrived.pop(event.request_id)
            self.latency_s.append(took_s)
            self.met.append(took_s <= SLO_S)
        for action in actions:
            if isinstance(action, FailRequest):
                del self._arrived[action.request_id]
                self.met.append(False)

    # ---- engines come and go ------------------------------------------------------------------------------------

    def _scale(self, now_s: float) -> None:
        self._cluster.advance(now_s)
        for number, state in enumerate(self._state):
            if state == "starting" and self._ready_at_s[number] <= now_s:
                self._state[number] = "up"
            if state == "stopping" and not self._cluster.scheduler.engines[f"e{number}"].running:
                self._state[number] = "off"
                self._cluster.notify(EngineLost(f"e{number}", planned=True), now_s)
        arriving = self._arriving(now_s)
        wanted = ENGINES if self._rule == "all" else self._asked(now_s, arriving)
        self._change(wanted, now_s)
        held = sum(state != "off" for state in self._state)
        self.engine_s += held * EVERY_S
        self.shown.append((now_s, held, arriving))

    def _asked(self, now_s: float, arriving: float) -> int:
        requests = self._cluster.scheduler.requests.values()
        if self._rule == "utilisation":
            up = self._state.count("up")
            busy = sum(queued.run is not None for queued in requests) / SPEED.slots
            return self._wanted.at(now_s, Load(min(busy, up)))
        waiting = [queued.request for queued in requests if queued.run is None]
        due = tuple((request.deadline_s - now_s, work_of(request)) for request in waiting if request.deadline_s)
        return self._wanted.at(now_s, Load(arriving, due, START_S))

    def _arriving(self, now_s: float) -> float:
        while self._recent and self._recent[0][0] < now_s - RATE_OVER_S:
            self._recent.popleft()
        return sum(work for _, work in self._recent) / max(min(now_s, RATE_OVER_S), 1.0)

    def _change(self, wanted: int, now_s: float) -> None:
        """Start or stop the difference; an engine that stops is the first to be taken again."""
        running = [number for number, state in enumerate(self._state) if state in ("up", "starting")]
        for number in [number for number in reversed(running) if self._state[number] == "up"][: len(running) - wanted]:
            self._state[number] = "stopping"
            self._cluster.notify(EngineClosed(f"e{number}"), now_s)
        idle = sorted((self._state[number] != "stopping", number) for number in range(ENGINES) if number not in running)
        for starts, number in idle[: max(wanted - len(running), 0)]:
            self._ready_at_s[number] = now_s + (START_S if starts else 0.0)
            self._state[number] = "starting" if starts else "up"
            self.starts += starts
            self._cluster.notify(EngineReady(self._infos[number]), self._ready_at_s[number])


def work_of(request: Request) -> float:
    """Forecast engine-seconds."""
    return (SPEED.prefill_s + (request.expected_tokens or 0.0) * SPEED.step_s) / SPEED.slots


# ---- results --------------------------------------------------------------------------------------------------------


def summary(of: list[Scaled]) -> dict[str, Any]:
    """Means over the seeds; the deadlines met of all requests together."""
    met = np.concatenate([np.array(each.met) for each in of])
    latency_s = np.concatenate([np.array(each.latency_s) for each in of])
    return {
        "requests": met.size,
        "engine_hours": float(np.mean([each.engine_s for each in of]) / 3600.0),
        "deadlines_met": float(met.mean()),
        "latency_s_p99": float(np.percentile(latency_s, 99)),
        "starts": float(np.mean([each.starts for each in of])),
    }


def table(summaries: dict[str, dict[str, Any]]) -> str:
    whole = summaries["all"]["engine_hours"]
    lines = [
        [
            *(name, f"{of['engine_hours']:.1f}", f"{of['engine_hours'] / whole:.0%}", f"{of['deadlines_met']:.2%}"),
            *(f"{of['latency_s_p99']:.1f}", f"{of['starts']:.0f}"),
        ]
        for name, of in summaries.items()
    ]
    return markdown(["", "engine hours", "of all", "deadlines met", "latency p99 (s)", "starts"], lines)


def draw(runs: dict[str, Scaled], path: Path) -> None:
    figure, ((axis,),) = new_figure(1, 1, width=9, height=3.6)
    shown = np.array(runs["wanted"].shown)
    axis.fill_between(shown[:, 0] / 60, shown[:, 2], color="#d0dce6", label="work that arrives, in engines")
    for name, of in runs.items():
        points = np.array(of.shown)
        axis.step(points[:, 0] / 60, points[:, 1], color=COLOURS[name], label=name, linewidth=1.2, where="post")
    axis.set(xlabel="minute of the simulated day", ylabel="engines", ylim=(0, ENGINES * 1.05))
    axis.legend(ncols=5, loc="upper center", bbox_to_anchor=(0.5, 1.14))
    save(figure, path, dpi=110)
